"""What a prepared dataset says about itself: the `.nv-meta` folder, and the tar indexes.

The files are Energon's. Energon refuses keys that it does not know, so nothing of ours goes into
them.
"""

from __future__ import annotations

import functools
import json
import logging
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.files import is_there, read_file, write_atomically
from energon_lite.storage.tar import BLOCK
from energon_lite.storage.yaml import YamlMap, check_keys, dump_yaml, load_yaml

META = ".nv-meta"


def index_path(shard: Path) -> Path:
    """Returns the path of a shard's index: `x.tar` has `x.tar.idx`."""
    return shard.with_suffix(".tar.idx")


def check_index_size(shard: Path, count: int) -> None:
    """Checks, without reading it, that a shard has an index of `count` samples.

    Raises:
        FileNotFoundError: There is no index.
        DatasetFormatError: The index is one of another number of samples.
    """
    try:
        size = index_path(shard).stat().st_size
    except OSError:
        size = -1
    if size != 8 * (count + 1):
        read_index(shard, count)  # says what is wrong


def read_index(shard: Path, count: int) -> Int64Array:
    """Reads where the samples of a shard begin.

    Args:
        shard: path of the tar.
        count: number of samples that it must have.

    Returns:
        Shape (count + 1,): sample i is at bytes [i] to [i + 1]. The first value is 0 whatever the
        file says: a folder entry before the first sample belongs to it.

    Raises:
        FileNotFoundError: There is no index.
        DatasetFormatError: The index does not fit `count`, or its values do not increase, or are
            no multiples of 512.
    """
    path = index_path(shard)
    try:
        raw = read_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; {reindex(shard)}") from None
    if len(raw) != 8 * (count + 1):
        entries = f"{len(raw) // 8 - 1} samples" if len(raw) % 8 == 0 else "a broken number"
        raise DatasetFormatError(
            f"{path}: {len(raw)} bytes are the index of {entries}, where {META}/.info.json says "
            f"{count} samples; {reindex(shard)}"
        )
    offsets = np.frombuffer(raw, dtype="<i8").astype(np.int64)
    offsets[0] = 0
    wrong = offsets[1:] <= offsets[:-1]
    if wrong.any():
        at = int(wrong.argmax())
        raise DatasetFormatError(
            f"{path}: sample {at} would end at byte {offsets[at + 1]}, before its first byte "
            f"{offsets[at]}; {reindex(shard)}"
        )
    if np.bitwise_or.reduce(offsets) % BLOCK:
        at = int((offsets % BLOCK > 0).argmax())
        raise DatasetFormatError(
            f"{path}: sample {at - 1} would end at byte {offsets[at]}, which is no multiple of "
            f"{BLOCK}; {reindex(shard)}"
        )
    return offsets


def reindex(shard: Path) -> str:
    """Returns what to do about a shard whose index is wrong."""
    root = next((folder for folder in shard.parents if (folder / META).is_dir()), "PATH")
    return f"run `energon-lite prepare {root} --tar-index-only`"


def write_index(shard: Path, offsets: Sequence[int] | Int64Array) -> None:
    """Writes the index of a shard at once.

    Args:
        shard: path of the tar; its permissions, plus read and write for the owner, are taken.
        offsets: first byte of each sample, then the byte after the last member.
    """
    mode = stat.S_IMODE(shard.stat().st_mode) | stat.S_IRUSR | stat.S_IWUSR
    write_atomically(index_path(shard), np.asarray(offsets, dtype="<u8").tobytes(), mode)


logger = logging.getLogger(__name__)

INFO_JSON = ".info.json"
INFO_YAML = ".info.yaml"
INDEX_UUID = "index.uuid"
DEFAULT_SPLIT = "split.yaml"
DEFAULT_DATASET = "dataset.yaml"
# 2 ** 40 samples take 512 TiB of tar headers; sums of them must not overflow.
_MAX_SAMPLES = 1 << 40


@dataclass(frozen=True)
class DatasetInfo:
    """What `.info.json` holds.

    Attributes:
        shard_counts: number of samples of each shard, by its path relative to the dataset. The
            position of a shard is its `tar_file_id` in `index.sqlite`.
        energon_version: version of the program that wrote it, as written; None in old datasets.
    """

    shard_counts: dict[str, int]
    energon_version: str | None = None


# ---------------------------------------------------------------------------------- .info.json


def is_prepared(root: Path) -> bool:
    """Returns whether `root` is a folder with a written `.info.json` or `.info.yaml`."""
    return is_there(root / META / INFO_JSON) or is_there(root / META / INFO_YAML)


@functools.lru_cache(maxsize=1000)
def warn_double(message: str) -> None:
    """Logs, once, that a file of `.nv-meta` has a key twice: as in Energon the last one counts."""
    logger.warning("%s; the last one counts", message)


def mapping(value: Any, place: str, what: str) -> YamlMap:
    """Returns a value that must be a mapping; a DatasetFormatError names what it is instead."""
    if not isinstance(value, YamlMap):
        raise DatasetFormatError(f"{place}: {what} must be a mapping, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Returns a value as error texts show it: in ASCII, and short."""
    try:
        text = ascii(value)
    except ValueError:  # an integer of thousands of digits
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def read_info(root: Path) -> DatasetInfo:
    """Reads `.info.json`, or the `.info.yaml` of an old dataset.

    Raises:
        FileNotFoundError: The folder is not prepared.
        DatasetFormatError: The file is not as it must be; names file and key.
    """
    path = root / META / INFO_JSON
    if not is_there(path):
        path = root / META / INFO_YAML
    try:
        value = load_yaml(path, warn_double)
    except FileNotFoundError:
        raise FileNotFoundError(_unprepared(root)) from None
    info = mapping(value, str(path), "the file")
    check_keys(info, ("energon_version", "shard_counts"), "")
    if "shard_counts" not in info:
        raise DatasetFormatError(f"{path}: key 'shard_counts' is missing; prepare {root} again")
    counts = mapping(info["shard_counts"], info.place("shard_counts"), "it")
    for shard, count in counts.items():
        if type(count) is not int or not 0 < count <= _MAX_SAMPLES:
            place = counts.place(shard, "shard_counts")
            raise DatasetFormatError(
                f"{place}: a shard has a number of samples above 0, not {shown(count)}; "
                f"run `energon-lite prepare {root} --force-overwrite`"
            )
        _check_shard_name(shard, path, root)
    version = info.get("energon_version")
    return DatasetInfo(dict(counts), None if version is None else str(version))


def _check_shard_name(name: str, path: Path, root: Path) -> None:
    """Refuses the name of a shard that lies outside of the dataset, or that no file can have."""
    if name.startswith("/") or (".." in name and ".." in name.split("/")):
        raise DatasetFormatError(
            f"{path}: shard {shown(name)} lies outside of the dataset. Move the tar into {root}, "
            f"or link it there (`ln -s`), and run `energon-lite prepare {root} --force-overwrite`"
        )
    if "\0" in name or not (name.isascii() or is_utf8(name)):
        raise DatasetFormatError(
            f"{path}: {shown(name)} can be the name of no file; rename the tar, and run "
            f"`energon-lite prepare {root} --force-overwrite`"
        )


def is_utf8(name: str) -> bool:
    """Returns whether a name is text: without bytes that are no UTF-8, and half surrogates."""
    return name.encode("utf-8", "replace") == name.encode("utf-8", "surrogatepass")


def _unprepared(root: Path) -> str:
    if not is_there(root):
        return f"{root} does not exist"
    if not root.is_dir():
        return f"{root} is a file; a dataset is a folder of .tar files"
    return (
        f"{root} is not a prepared dataset (no {META}/{INFO_JSON}); "
        f"run `energon-lite prepare {root}`"
    )


def write_info(root: Path, info: DatasetInfo, also_yaml: bool = False) -> None:
    """Writes `.info.json`.

    Args:
        root: the dataset's folder.
        info: what to write.
        also_yaml: whether to write `.info.yaml` too; done anyway where one is there already.
    """
    content: dict[str, Any] = {"shard_counts": info.shard_counts}
    if info.energon_version is not None:
        content = {"energon_version": info.energon_version, **content}
    text = json.dumps(content, indent=2, ensure_ascii=False)
    write_atomically(root / META / INFO_JSON, text.encode())
    old = root / META / INFO_YAML
    if also_yaml or is_there(old):
        write_atomically(old, dump_yaml(content).encode())


# ---------------------------------------------------------------------------------- config files


def config_path(root: Path, name: str) -> Path:
    """Returns the path of a split or dataset config, which must be a .yaml or .json file."""
    if not isinstance(name, str) or not name.endswith((".yaml", ".json")):
        raise DatasetFormatError(
            f"{name!r:.80}: a split or dataset config is a .yaml or .json file; name one"
        )
    return root / META / name


def load_config(root: Path, path: Path, way_out: str) -> YamlMap:
    """Reads a config that a prepared folder should have."""
    try:
        value = load_yaml(path, warn_double)
    except FileNotFoundError:
        if not is_prepared(root):
            raise FileNotFoundError(_unprepared(root)) from None
        raise FileNotFoundError(f"{path} is missing; {way_out}") from None
    return mapping(value, str(path), "the file")


# -------------------------------------------------------------------------------- dataset.yaml


def read_dataset_config(root: Path, name: str | None = None) -> YamlMap:
    """Reads `dataset.yaml`, which says how to make samples.

    Args:
        root: the dataset's folder.
        name: file name inside `.nv-meta`, by default `dataset.yaml`.

    Raises:
        FileNotFoundError: There is none; says how to make it.
        DatasetFormatError: The file is not a mapping.
    """
    path = config_path(root, name or DEFAULT_DATASET)
    return load_config(
        root,
        path,
        "it says how to make samples. Write it (sample_type and field_map), "
        f"or run `energon-lite prepare {root} --force-overwrite` with --sample-type",
    )
