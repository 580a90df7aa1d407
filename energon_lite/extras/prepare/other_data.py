"""Data in formats that are not read directly: how to convert them."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from pathlib import PurePath

from energon_lite.storage import files

# Folders in a folder whose files are looked at.
_MAX_FOLDERS = 8
ONE_OBJECT_PER_LINE = (
    "write one object into each line (of a JSON array: `jq -c '.[]' array.json > lines.jsonl`)"
)
_LINES = "and pass the .jsonl file"
_TO_JSON = f"to_json('data.jsonl', orient='records', lines=True)` {_LINES}"
# Names of files as regular expressions, what such data are, and how to convert them. Of a folder,
# the first expression that fits one of its files counts.
_ANSWERS = {
    r"dataset_dict\.json|state\.json": (
        "a dataset of Hugging Face",
        f"`datasets.load_from_disk('{{path}}').to_json('data.jsonl')` (of a DatasetDict, of each "
        f"split: `['train'].to_json(...)`) {_LINES}",
    ),
    r".*\.arrow": ("Arrow", f"`datasets.Dataset.from_file(FILE).to_json('data.jsonl')` {_LINES}"),
    r".*\.(parquet|pq)": ("Parquet", f"`pandas.read_parquet('{{path}}').{_TO_JSON}"),
    r".*\.[ct]sv(\.\w+)?": ("CSV", f"`pandas.read_csv(FILE, sep=None).{_TO_JSON}"),
    r".*\.(mds|tfrecords?|lmdb|mdb|h5|hdf5)([.-].*)?|chunk-\d+-\d+\..*": (
        "MDS, litData, TFRecord, LMDB or HDF5",
        "write its samples into tars (`webdataset.ShardWriter('%04d.tar')`), and run "
        "`energon-lite prepare` on these",
    ),
    r".*\.(bin|idx)": (
        "Megatron's .bin and .idx",
        "write each document (`numpy.save`) as KEY.npy into tars, then `energon-lite prepare` them",
    ),
    r".*\.jsonl": (
        "JSONL",
        "pass the path of a file, or of a metadataset of several; cookers read files beside it by "
        "`aux: {{name: filesystem://{folder}}}`",
    ),
    r".*\.(jsonl|ndjson|json)\.\w+": ("compressed JSON", f"decompress it, {_LINES}"),
    r".*\.(jpe?g|png|webp|gif|bmp|tiff?|avif|hei[cf]|wav|mp3|flac|mp4|mov|mkv|webm|txt|npy)": (
        "files without a tar",
        "`mkdir shards && tar --sort=name -cf shards/0.tar -C {folder} .`, then `energon-lite "
        "prepare shards`. Cookers read them as they are: `aux: {{name: filesystem://{folder}}}`; "
        "`energon-lite prepare-media` stores their sizes",
    ),
    r".*\.(ndjson|json)": ("JSON", f"{ONE_OBJECT_PER_LINE} {_LINES}"),
    r".*\.(zip|7z|rar)": ("an archive", "unpack it, and pass the folder"),
}


def how_to_convert(path: PurePath) -> str:
    """Describes data that are neither tars nor JSONL, and how to convert them.

    Args:
        path: a file, or a folder, of which the files in it and in its folders count.

    Returns:
        Such as " It is Parquet: ..."; empty for a folder with tars, and for one without files.
    """
    names = [path.name]
    if files.is_folder(path):
        found = files.entries(path)
        names = [name for name in found if not name.endswith("/")]
        for name in islice((name for name in found if name.endswith("/")), _MAX_FOLDERS):
            with suppress(OSError):
                names += files.entries(path / name)
    if any(re.search(r"\.(tar(\.\w+)?|tgz)$", name, re.IGNORECASE) for name in names):
        return ""
    folder = path if files.is_folder(path) else path.parent
    for pattern, (kind, answer) in _ANSWERS.items():
        if any(re.fullmatch(pattern, name, re.IGNORECASE) for name in names):
            return f" It is {kind}: {answer.format(path=path, folder=folder)}"
    return ""
