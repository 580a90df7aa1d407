"""The length index: the lengths of every sample of a split part, in an array for each resource.

It lies beside the metadata, in `.nv-meta/energon_lite/lengths/NAME`; or, where NAME is an absolute
path, in a folder below it named as the dataset's `index.uuid`, so that data may be read-only.
`PART.npy` has the tokens, `PART.RESOURCE.npy` the lengths in another resource, `PART.json` says of
which data they are, and who measured them. A sample that was skipped or failed has length 0.

`PartialLengths` keeps what was measured so far, whatever becomes of the process.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.files import (
    errors_of,
    leads_out,
    new_file,
    open_own,
    open_regular,
    read_file,
    remove_leftovers,
    write_atomically,
)
from energon_lite.storage.nvmeta import INDEX_UUID, META

TOKENS = "tokens"
_MAX_FACTS_BYTES = 1 << 20
_LEFT_SEC = 60.0  # nobody writes any more to a temporary file that old
_MAX_LENGTH = 1 << 40  # sums of lengths must not overflow
# Up to this size an index is read into memory, a longer one is mapped: where the storage of a
# mapped file fails, or cuts it short, the system kills the process.
_MAPPED_BYTES = 256 << 20


def lengths_path(root: Path, part: str, name: str, resource: str = TOKENS) -> Path:
    """Returns where the index `name` of a split part lies.

    Raises:
        ValueError: The name is none of a folder.
    """
    if name.startswith("/"):
        folder = Path(name) / _identity(root)
    elif not name or name in (".", "..") or set("/\\") & set(name):
        raise ValueError(
            f"{name!r} is no name of a length index; it names a folder, as 'qwen2', or is an "
            "absolute path, as '/scratch/lengths/qwen2'"
        )
    else:
        folder = root / META / "energon_lite" / "lengths" / name
    suffix = "" if resource == TOKENS else f".{resource}"
    file = f"{part}{suffix}.npy"
    if set("/\0") & set(file):
        raise DatasetFormatError(
            f"{root}: {part!a} and {resource!a} are to be in the name of a file, which has no "
            "slash; rename the split part, or the resource"
        )
    return folder / file


def check_lengths_place(root: Path, name: str) -> None:
    """Refuses to write an index where a link in the dataset leads out of it.

    Raises:
        DatasetFormatError: Says how to write it elsewhere.
    """
    folder = lengths_path(root, "", name).parent
    if not name.startswith("/") and leads_out(folder, root):
        raise DatasetFormatError(
            f"{folder}: a link leads out of the dataset, to {os.path.realpath(folder)}. Write the "
            "index elsewhere with --meta-dir DIR (meta_dir=...), or remove the link"
        )


def _identity(root: Path) -> str:
    """Returns a name for a dataset that it keeps where it is moved."""
    try:
        return str(UUID(read_file(root / META / INDEX_UUID, 1000).decode().strip()))
    except (OSError, ValueError):  # prepared by an old version
        return f"{root.resolve().name}-{zlib.crc32(os.fsencode(root.resolve())):08x}"


def writing_command(root: Path, name: str) -> str:
    """Returns the command that writes an index."""
    folder, _, last = name.rpartition("/")
    place = f" --meta-dir {folder}" if folder else ""
    return f"energon-lite lengths {root} --with module:Class --name {last}{place}"


def _facts_path(root: Path, part: str, name: str) -> Path:
    return lengths_path(root, part, name).with_suffix(".json")


def write_lengths(
    root: Path,
    part: str,
    name: str,
    lengths: Int64Array | Mapping[str, Int64Array],
    data: str,
    encoder: str = "",
) -> Path:
    """Writes an index; complete, or not at all.

    Args:
        root: folder of the dataset.
        part: the split part.
        name: of the index, for example that of a tokenizer.
        lengths: tokens of each sample that is not excluded, shape (N,), in the order of the part;
            or such an array for each resource, with "tokens" among them.
        data: hash of the data, to notice that they changed.
        encoder: says who measured, to notice that the code changed.

    Returns:
        The file of the tokens.

    Raises:
        ValueError: `lengths` are no integers of at least 0, or have another shape.
    """
    arrays = lengths if isinstance(lengths, Mapping) else {TOKENS: lengths}
    checked = {resource: _checked_lengths(array) for resource, array in arrays.items()}
    path = lengths_path(root, part, name)
    check_lengths_place(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = _facts_path(root, part, name)
    targets = {resource: lengths_path(root, part, name, resource) for resource in checked}
    names = {facts.name, *(target.name for target in targets.values())}
    remove_leftovers(path.parent, names, _LEFT_SEC)
    # Until all is written there is no index: lengths without their facts are none.
    facts.unlink(missing_ok=True)
    for resource, array in checked.items():
        with new_file(targets[resource]) as file:
            np.save(file, array, allow_pickle=False)
    written = {
        "data": data,
        "samples": len(checked[TOKENS]),
        "resources": list(checked),
        "encoder": encoder,
    }
    write_atomically(facts, json.dumps(written).encode())
    return path


def _checked_lengths(lengths: Int64Array) -> Int64Array:
    checked = np.asarray(lengths)
    if checked.ndim != 1 or not (np.issubdtype(checked.dtype, np.integer) or not len(checked)):
        raise ValueError(
            f"lengths have shape {checked.shape} and type {checked.dtype}; give integers, (N,)"
        )
    if len(checked) and checked.min() < 0:
        index = int(np.argmin(checked))
        raise ValueError(f"the length of sample {index} is {checked[index]}; it must be at least 0")
    return checked.astype(np.int64)


def read_facts(root: Path, part: str, name: str) -> dict[str, Any] | None:
    """Returns what an index says of itself: `data`, `samples`, `resources`, `encoder`; or None."""
    try:
        facts = json.loads(read_file(_facts_path(root, part, name), _MAX_FACTS_BYTES))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    is_right = isinstance(facts, dict) and _are_names(facts.get("resources"))
    return facts if is_right else None


def _are_names(resources: Any) -> bool:
    return isinstance(resources, list) and all(isinstance(name, str) for name in resources)


def _read_array(path: Path) -> Int64Array:
    lengths: Int64Array
    if path.stat().st_size > _MAPPED_BYTES:
        os.close(open_regular(path))
        lengths = np.load(path, mmap_mode="r", allow_pickle=False)
        return lengths
    raw = read_file(path)
    header = io.BytesIO(raw)
    np.lib.format.read_magic(header)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(header)
    if dtype.hasobject or is_fortran:
        raise ValueError(f"{dtype} in Fortran order" if is_fortran else f"{dtype}")
    lengths = np.frombuffer(raw, dtype, offset=header.tell()).reshape(shape)
    if lengths.shape != shape:
        raise ValueError(f"shape {shape}")
    return lengths


def read_lengths(
    root: Path, part: str, name: str, num_samples: int, data: str, resource: str = TOKENS
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
        The length of each sample, shape (N,); memory-mapped above 32 million samples.

    Raises:
        FileNotFoundError: There is no such index.
        DatasetFormatError: It is of other data, or damaged.
    """
    path = lengths_path(root, part, name, resource)
    again = f"write it again with `{writing_command(root, name)}`"
    try:
        facts: Any = json.loads(read_file(_facts_path(root, part, name), _MAX_FACTS_BYTES))
        lengths = _read_array(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: there is no length index {name!r} for split part {part!r}; write it with "
            f"`{writing_command(root, name)}`"
        ) from None
    except Exception as error:  # what numpy raises for a damaged header is not known
        raise DatasetFormatError(f"{path}: no readable length index ({error}); {again}") from None
    if not isinstance(facts, dict) or lengths.ndim != 1 or lengths.dtype != np.int64:
        raise DatasetFormatError(
            f"{path}: no length index, but {lengths.dtype} of shape {lengths.shape}; {again}"
        )
    counts = [facts.get("samples"), len(lengths)]
    wrong = dict.fromkeys(f"{count!s:.40}" for count in counts if count != num_samples)
    if wrong:
        raise DatasetFormatError(
            f"{path}: the length index is of {' and '.join(wrong)} "
            f"samples, the split part has {num_samples} now; {again}"
        )
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > _MAX_LENGTH:
        raise DatasetFormatError(
            f"{path}: lengths of {lengths.min()} to {lengths.max()} are those of no sample; {again}"
        )
    if facts.get("data") != data:
        raise DatasetFormatError(
            f"{path}: the length index is of other data with as many samples (their hash was "
            f"{facts.get('data')!r:.40} and is {data!r} now); {again}"
        )
    return lengths


_UNKNOWN = -1


class PartialLengths:
    """Lengths of N samples in R resources, in a file that is mapped into memory.

    It resumes what an interrupted process left, if that was of the same data and encoder.

    Args:
        root: folder of the dataset.
        part: the split part.
        name: of the index.
        num_samples: N.
        resources: names of the R resources.
        data: hash of the data.
        encoder: says who measures.

    Raises:
        PermissionError: The place of the index cannot be written to.
    """

    def __init__(
        self,
        root: Path,
        part: str,
        name: str,
        num_samples: int,
        resources: Sequence[str],
        data: str,
        encoder: str,
    ) -> None:
        self._target = (root, part, name)
        self._resources = tuple(resources)
        self._data = data
        self._encoder = encoder
        path = lengths_path(root, part, name)
        self._path = path.with_name(path.name + ".partial")
        self._facts_path = path.with_name(path.name + ".partial.json")
        _make_writable(path.parent, root, name)
        shape = (num_samples, len(self._resources))
        facts = {"data": data, "encoder": encoder, "resources": list(resources), "shape": shape}
        text = json.dumps(facts).encode()
        if not self._is_left(text, shape):
            self._facts_path.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            self._lengths = _mapped(self._path, shape)
            self._lengths[:] = _UNKNOWN
            self._lengths.flush()
            # Written last: with it the lengths count.
            write_atomically(self._facts_path, text)

    def _is_left(self, facts: bytes, shape: tuple[int, int]) -> bool:
        try:
            if read_file(self._facts_path, len(facts)) != facts:
                return False
            if self._path.stat().st_size != 8 * shape[0] * shape[1]:
                return False
            self._lengths = _mapped(self._path, shape)
        except (OSError, ValueError):
            return False
        return True

    def missing(self) -> Int64Array:
        """Returns the numbers of samples that are not measured yet, rising."""
        found: Int64Array = np.flatnonzero(self._lengths[:, 0] == _UNKNOWN)
        return found

    def put(self, samples: Int64Array, lengths: Int64Array) -> None:
        """Records what was measured.

        Args:
            samples: shape (n,); their numbers in the part.
            lengths: shape (n, R), each at least 0.
        """
        self._lengths[samples] = lengths

    def finish(self) -> Path:
        """Writes the index, and removes what was on its way to it."""
        arrays = {
            name: np.ascontiguousarray(self._lengths[:, i])
            for i, name in enumerate(self._resources)
        }
        path = write_lengths(*self._target, arrays, self._data, self._encoder)
        self._facts_path.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        return path


def _mapped(path: Path, shape: tuple[int, int]) -> np.memmap[Any, np.dtype[np.int64]]:
    """Maps a file into memory, for which there is room on the disk."""
    with errors_of(path), os.fdopen(open_own(path), "r+b") as file:
        # Where a disk is full, writing to a page without a place on it kills the process.
        os.posix_fallocate(file.fileno(), 0, max(1, 8 * shape[0] * shape[1]))
        return np.memmap(file, dtype=np.int64, mode="r+", shape=shape)


def _make_writable(folder: Path, root: Path, name: str) -> None:
    check_lengths_place(root, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PermissionError(
            f"{folder} cannot be written to ({error.strerror}): no place for the length index "
            f"{name!r} of {root}. Write it elsewhere with --meta-dir DIR (meta_dir=...), and "
            f"read it as lengths='DIR/{name.rpartition('/')[2]}'"
        ) from None
