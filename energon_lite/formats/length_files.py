"""The length index: the lengths of every sample of a split part, in an array for each resource.

It lies beside the metadata, in `.nv-meta/energon_lite/lengths/NAME`, that of a file `x` of samples
in `x.lengths/NAME`; or, where NAME is an absolute path, in a folder below it named as the
dataset's `index.uuid`, so that data may be read-only.
`PART.npy` has the tokens, `PART.RESOURCE.npy` the lengths in another resource, each in the smallest
unsigned type; `PART.json` names the data, and what measured them, and sums the lengths up, so that
opening an index reads none of them. A sample that was skipped or failed has length 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np

from energon_lite.core.arrays import Int64Array, npy_view
from energon_lite.core.errors import DatasetFormatError
from energon_lite.formats.known import format_of
from energon_lite.formats.nvmeta import INDEX_UUID, META
from energon_lite.storage import files
from energon_lite.storage.local_paths import is_absolute, local_path

TOKENS = "tokens"
_MAX_FACTS_BYTES = 1 << 20
_LEFT_SEC = 60.0  # no process writes any more to a temporary file of this age
_MAX_LENGTH = 1 << 40  # sums of lengths must not overflow
# Nothing that these types hold is out of range.
_SMALL = (np.dtype("<u2"), np.dtype("<u4"))
_BLOCK = 1 << 20


def lengths_path(root: PurePath, part: str, name: str, resource: str = TOKENS) -> PurePath:
    """Returns where the index `name` of a split part lies.

    Raises:
        ValueError: The name is none of a folder.
    """
    if is_absolute(name):
        folder = local_path(name) / _identity(root)
    elif not name or name in (".", "..") or set("/\\") & set(name):
        raise ValueError(
            f"{name!r} is no name of a length index; it names a folder, as 'qwen2', or is an "
            "absolute path, as '/scratch/lengths/qwen2'"
        )
    else:
        folder = format_of(root).beside(root, "lengths")[1] / name
    suffix = "" if resource == TOKENS else f".{resource}"
    file = f"{part}{suffix}.npy"
    if set("/\0") & set(file):
        raise DatasetFormatError(
            f"{root}: {part!a} and {resource!a} are to be in the name of a file, which has no "
            "slash; rename the split part, or the resource"
        )
    return folder / file


def check_place(root: PurePath, name: str) -> None:
    """Refuses to write an index where a link in the dataset leads out of it.

    Raises:
        DatasetFormatError: A link does.
    """
    folder = lengths_path(root, "", name).parent
    home, _ = format_of(root).beside(root, "lengths")
    if not is_absolute(name) and files.leads_out(folder, home):
        raise DatasetFormatError(
            f"{folder}: a link leads out of the dataset, to {files.resolved(folder)}. Write the "
            "index elsewhere with --meta-dir DIR (meta_dir=...), or remove the link"
        )


def _identity(root: PurePath) -> str:
    """Returns a name for a dataset that it keeps where it is moved."""
    try:
        return str(UUID(files.read_file(root / META / INDEX_UUID, 1000).decode().strip()))
    except (OSError, ValueError):  # prepared by an old version
        real = files.resolved(root)
        return f"{real.name}-{zlib.crc32(os.fsencode(real)):08x}"


def _facts_path(root: PurePath, part: str, name: str) -> PurePath:
    return lengths_path(root, part, name).with_suffix(".json")


def write_lengths(
    root: PurePath,
    part: str,
    name: str,
    lengths: Int64Array | Mapping[str, Int64Array],
    data: str,
    encoder: str = "",
) -> PurePath:
    """Writes an index; complete, or not at all.

    Args:
        root: folder of the dataset.
        part: the split part.
        name: of the index, for example that of a tokenizer.
        lengths: tokens of each sample that is not excluded, shape (N,), each at least 0, in the
            order of the part; or such an array for each resource, with "tokens" among them.
        data: hash of the data, to notice that they changed.
        encoder: names what measured, to notice that the code changed.

    Returns:
        The file of the tokens.
    """
    arrays = lengths if isinstance(lengths, Mapping) else {TOKENS: lengths}
    path = lengths_path(root, part, name)
    check_place(root, name)
    files.make_folder(path.parent)
    facts = _facts_path(root, part, name)
    targets = {resource: lengths_path(root, part, name, resource) for resource in arrays}
    names = {facts.name, *(target.name for target in targets.values())}
    files.remove_leftovers(path.parent, names, _LEFT_SEC)
    # Until all is written there is no index: lengths without their facts are none.
    files.remove(facts)
    sums = {}
    for resource, array in arrays.items():
        found = np.asarray(array, dtype=np.int64)
        sums[resource] = _sums_of(found)
        fits = [kind for kind in _SMALL if sums[resource]["max"] >> 8 * kind.itemsize == 0]
        with files.new_file(targets[resource]) as file:
            np.save(file, found.astype(fits[0]) if fits else found, allow_pickle=False)
    written = {
        "data": data, "samples": len(arrays[TOKENS]), "resources": list(arrays),
        "encoder": encoder, "sums": sums,
    }  # fmt: skip
    files.write_atomically(facts, json.dumps(written).encode())
    return path


def _load_facts(root: PurePath, part: str, name: str) -> Any:
    return json.loads(files.read_file(_facts_path(root, part, name), _MAX_FACTS_BYTES))


def _sums_of(lengths: Int64Array) -> dict[str, Any]:
    """Returns a hash of lengths that is the same in any type, the least, the largest, the mean."""
    digest, total = hashlib.blake2b(digest_size=16), 0
    for first in range(0, len(lengths), _BLOCK):
        block = np.ascontiguousarray(lengths[first : first + _BLOCK], dtype="<i8")
        digest.update(block.data)
        total += int(block.sum())
    ends = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    mean = total / max(1, len(lengths))
    return {"hash": digest.hexdigest(), "min": ends[0], "max": ends[1], "mean": mean}


def sums_of(facts: Mapping[str, Any], resource: str, lengths: Int64Array) -> tuple[str, float]:
    """Returns the hash and the mean of lengths; they are read if an older version wrote the index.

    Args:
        facts: of the index.
        resource: which lengths.
        lengths: the lengths.
    """
    sums = facts.get("sums")
    own = sums.get(resource) if isinstance(sums, dict) else None
    if not isinstance(own, dict) or not {"hash", "mean"} <= own.keys():
        own = _sums_of(lengths)
    return str(own["hash"]), float(own["mean"])


def read_facts(root: PurePath, part: str, name: str) -> dict[str, Any] | None:
    """Returns the facts of an index: `data`, `samples`, `resources`, `encoder`, `sums`; or None."""
    try:
        facts = _load_facts(root, part, name)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    resources = facts.get("resources") if isinstance(facts, dict) else None
    is_valid = isinstance(resources, list) and all(isinstance(name, str) for name in resources)
    return facts if is_valid else None


def read_lengths(
    root: PurePath, part: str, name: str, num_samples: int, data: str, resource: str = TOKENS
) -> Int64Array:
    """Opens an index.

    Args:
        root: folder of the dataset.
        part: the split part.
        name: of the index.
        num_samples: samples that it must have.
        data: hash of the data that it must be of.
        resource: which lengths.

    Returns:
        The length of each sample, shape (N,), int64, uint32 or uint16; memory-mapped if they are
        many.

    Raises:
        FileNotFoundError: There is no such index.
        DatasetFormatError: It is of other data, or corrupt.
    """
    path = lengths_path(root, part, name, resource)
    folder, _, last = name.rpartition("/")
    place = f" --meta-dir {folder}" if folder else ""
    command = f"energon-lite lengths {root} --with module:Class --name {last}{place}"
    lengths: Int64Array
    try:
        facts = _load_facts(root, part, name)
        lengths = npy_view(files.map_file(path))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: there is no length index {name!r} for split part {part!r}; write it with "
            f"`{command}`"
        ) from None
    except Exception as error:  # numpy may raise anything for a corrupt header
        problem = f"no readable length index ({error})"
    else:
        problem = _problem(facts, lengths, num_samples, data)
        if not problem:
            return lengths
    raise DatasetFormatError(f"{path}: {problem}; write it again with `{command}`")


def _problem(facts: Any, lengths: Int64Array, num_samples: int, data: str) -> str:
    """Describes why an index cannot be used; empty if it can."""
    is_small = lengths.dtype in _SMALL
    if (
        not isinstance(facts, dict)
        or lengths.ndim != 1
        or not (is_small or lengths.dtype == np.int64)
    ):
        return f"no length index, but {lengths.dtype} of shape {lengths.shape}"
    counts = [facts.get("samples"), len(lengths)]
    wrong = dict.fromkeys(f"{count!s:.40}" for count in counts if count != num_samples)
    if wrong:
        return (
            f"the length index is of {' and '.join(wrong)} samples, the split part has "
            f"{num_samples} now"
        )
    if not is_small and (lengths.min(initial=0) < 0 or lengths.max(initial=0) > _MAX_LENGTH):
        return f"lengths of {lengths.min()} to {lengths.max()} are those of no sample"
    if facts.get("data") != data:
        return (
            "the length index is of other data with as many samples (their hash was "
            f"{facts.get('data')!r:.40} and is {data!r} now)"
        )
    return ""
