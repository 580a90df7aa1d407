"""JSONL files: where the lines begin, the index beside them, and reading lines by their numbers.

A sample is a line that is not blank. `x.jsonl.idx` has, as 64-bit integers, where each sample
begins, and the size of the file: the bytes of blank lines belong to the sample before them, those
of the first blank lines to the first sample. A file without an index is indexed in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from energon_lite.core.arrays import Int64Array, UInt8Array
from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError
from energon_lite.storage import files
from energon_lite.storage.shards import MAX_OPEN, OpenShards, Rows, ShardReader

JSONL = ".jsonl"
IJSONL_SUFFIX = ".jsonl.idx"
# All lines belong to every split; this is the name of the split part that they are.
LINES = "lines"
# A longer line is a file of another kind.
MAX_LINE_BYTES = 1 << 30
_READ_BYTES = 4 << 20
_SAMPLES_SHOWN = 20
_BOM = b"\xef\xbb\xbf"
_NEWLINE, _RETURN, _OPEN, _CLOSE = b"\n\r{}"
# How files of other kinds begin, and what to do with them.
_OTHER = {
    b"\x1f\x8b": "gzip data; decompress it (gunzip)",
    b"BZh": "bzip2 data; decompress it (bunzip2)",
    b"\x28\xb5\x2f\xfd": "zstd data; decompress it (unzstd)",
    b"\xfd7zXZ": "xz data; decompress it (unxz)",
    b"PK\3\4": "a zip archive; unpack it",
    b"\xff\xfe": "text in UTF-16; write it in UTF-8",
    b"\xfe\xff": "text in UTF-16; write it in UTF-8",
}


def is_jsonl(path: Path) -> bool:
    """Returns whether a path is that of a JSONL file, by its name; a folder is none."""
    return path.suffix == JSONL and not path.is_dir()


def line_index_path(path: Path) -> Path:
    """Returns the path of the index: `x.jsonl` has `x.jsonl.idx`."""
    return path.with_name(path.name + ".idx")


class Lines(NamedTuple):
    """Where the samples of a JSONL file lie.

    Attributes:
        offsets: shape (N + 1,): sample i is at bytes [i] to [i + 1].
        num_broken: number of the samples that are no JSON object: their lines do not begin with
            `{`, or do not end with `}`.
        broken: the first of these, as (sample, line of the file, counted from 1).
    """

    offsets: Int64Array
    num_broken: int
    broken: list[tuple[int, int]]


def scan_lines(
    path: Path,
    size_bytes: int | None = None,
    progress: Callable[[int, int, int], None] = lambda *_: None,
) -> Lines:
    """Reads a JSONL file once, and finds its samples.

    Args:
        path: the file.
        size_bytes: how much of it counts; by default all.
        progress: called with the bytes done, the bytes in all, and the samples found.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no regular file, or a line of it is longer than 1 GiB.
        EmptyDatasetError: It has no sample.
        OSError: It cannot be read.
    """
    descriptor = _descriptor_of(path)
    try:
        size = os.fstat(descriptor).st_size if size_bytes is None else size_bytes
        lines = _Scan(path, descriptor, size, progress).lines()
    finally:
        os.close(descriptor)
    if len(lines.offsets) == 1:
        raise EmptyDatasetError(f"{path} has no line that is not blank; write samples to it")
    return lines


def _descriptor_of(path: Path) -> int:
    """Opens a file of lines.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no regular file, or of another kind by its first bytes.
    """
    try:
        descriptor = files.open_regular(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; check the path") from None
    head = os.pread(descriptor, 8, 0)
    kind = next((kind for start, kind in _OTHER.items() if head.startswith(start)), None)
    if kind:
        os.close(descriptor)
        raise DatasetFormatError(f"{path} has no lines of JSON, but {kind}")
    return descriptor


class _Scan:
    """One pass over a file, in pieces of whole lines.

    Args:
        path: the file, for errors.
        descriptor: the open file.
        size: bytes of it that count.
        progress: as in `scan_lines`.
    """

    def __init__(
        self, path: Path, descriptor: int, size: int, progress: Callable[[int, int, int], None]
    ) -> None:
        self._progress = progress
        self._path = path
        self._descriptor = descriptor
        self._size = size
        self._num_lines = self._num_samples = self._num_broken = 0
        self._broken: list[tuple[int, int]] = []

    def lines(self) -> Lines:
        """Finds all samples."""
        found = []
        buffer = np.empty(_READ_BYTES + 1, dtype=np.uint8)
        start = held = 0  # the buffer has `held` bytes of a line that begins at byte `start`
        while start + held < self._size:
            if held == len(buffer) - 1:
                buffer = self._longer(buffer)
            stop = min(self._size, start + len(buffer) - 1)
            self._fill(buffer[held : stop - start], start + held)
            filled = stop - start
            if stop == self._size and buffer[filled - 1] != _NEWLINE:
                buffer[filled] = _NEWLINE  # the last line may lack it
                filled += 1
            ends = np.flatnonzero(buffer[:filled] == _NEWLINE)
            whole = int(ends[-1]) + 1 if len(ends) else 0
            if whole:
                found.append(self._samples(buffer, ends) + start)
                rest = filled - whole
                buffer[:rest] = buffer[whole:filled].copy()
                filled = rest
            start, held = start + whole, filled
            self._progress(stop, self._size, self._num_samples)
        offsets = np.concatenate([*found, np.array([self._size])])
        offsets[0] = 0
        return Lines(offsets, self._num_broken, self._broken)

    def _fill(self, target: UInt8Array, start: int) -> None:
        read = partial(files.read_into, self._descriptor, target.data, start)
        if files.retried(read, self._path) < len(target):
            raise DatasetFormatError(
                f"{self._path} became shorter while it was read; index it when it is complete"
            )

    def _longer(self, buffer: UInt8Array) -> UInt8Array:
        if len(buffer) > MAX_LINE_BYTES:
            raise DatasetFormatError(
                f"{self._path}: line {self._num_lines + 1} is longer than {MAX_LINE_BYTES:,} "
                "bytes; a JSONL file has a JSON object in each line"
            )
        longer = np.empty(2 * len(buffer), dtype=np.uint8)
        longer[: len(buffer)] = buffer
        return longer

    def _samples(self, buffer: UInt8Array, ends: Int64Array) -> Int64Array:
        """Returns where the samples among some lines begin.

        Args:
            buffer: the bytes, from the beginning of the first line.
            ends: shape (n,); where the newlines of the n lines are.
        """
        starts = np.empty_like(ends)
        starts[0], starts[1:] = 0, ends[:-1] + 1
        # An empty line has its newline in place of the first byte, so it is no object.
        last = buffer[np.maximum(ends - 1, 0)]
        is_return = last == _RETURN
        if is_return.any():
            last[is_return] = buffer[np.maximum(ends[is_return] - 2, 0)]
        odd = np.flatnonzero((buffer[starts] != _OPEN) | (last != _CLOSE))
        if len(odd):
            starts = self._without_blank(buffer, starts, ends, odd)
        self._num_lines += len(ends)
        self._num_samples += len(starts)
        return starts

    def _without_blank(
        self, buffer: UInt8Array, starts: Int64Array, ends: Int64Array, odd: Int64Array
    ) -> Int64Array:
        """Looks at the lines that are not clearly objects: blank, indented, or broken."""
        is_sample = np.ones(len(starts), dtype=np.bool_)
        spans = zip(odd.tolist(), starts[odd].tolist(), ends[odd].tolist(), strict=True)
        num_blank = 0
        for line, start, end in spans:
            text = buffer[start:end].tobytes().strip()
            bare = text.removeprefix(_BOM).strip()  # files that were put together may have several
            if not text or not (bare or self._num_lines + line):
                is_sample[line] = False
                num_blank += 1
            elif bare[:1] + bare[-1:] != b"{}":
                self._num_broken += 1
                if len(self._broken) < _SAMPLES_SHOWN:
                    sample = self._num_samples + line - num_blank
                    self._broken.append((sample, self._num_lines + line + 1))
        return starts[is_sample]


# --------------------------------------------------------------------------------------- the index


def write_line_index(path: Path, offsets: Int64Array) -> None:
    """Writes the index of a JSONL file at once."""
    files.write_atomically(line_index_path(path), offsets.astype("<u8").tobytes())


class IJsonlIndexWriter(list[int]):
    """Writes the index of a JSONL file that a user's program has written.

    What is appended is where each sample begins, and in the end the size of the file.

    Args:
        jsonl_path: the file.
    """

    def __init__(self, jsonl_path: str | PathLike[str]) -> None:
        self._path = Path(jsonl_path)

    def close(self, finalize: bool = True) -> None:
        """Writes the index, unless it is not to be `finalize`d."""
        if finalize:
            write_line_index(self._path, np.array(self))

    def __enter__(self) -> IJsonlIndexWriter:
        """Returns the writer."""
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Writes the index, if nothing was raised."""
        self.close(finalize=kind is None)


def read_line_index(path: Path, size_bytes: int) -> Int64Array:
    """Reads the index of a JSONL file.

    Args:
        path: the JSONL file.
        size_bytes: its size.

    Returns:
        Shape (N + 1,), as `Lines.offsets`; memory-mapped if it is long.

    Raises:
        FileNotFoundError: There is no index.
        DatasetFormatError: It is none, or of another content of the file.
    """
    index = line_index_path(path)
    again = f"run `energon-lite prepare {path}`, or remove it"
    raw = files.map_file(index)
    num_bytes = len(raw)
    if num_bytes % 8 or not 16 <= num_bytes <= 8 * (size_bytes + 1):
        raise DatasetFormatError(f"{index}: {num_bytes} bytes are no index of lines; {again}")
    offsets: Int64Array = np.frombuffer(raw, dtype="<i8").astype(np.int64, copy=False)
    if offsets[-1] != size_bytes:
        raise DatasetFormatError(
            f"{index} is of a file of {offsets[-1]} bytes, and {path.name} has {size_bytes}: it "
            f"was changed after it was indexed; {again}"
        )
    is_wrong = offsets[1:] <= offsets[:-1]
    if offsets[0] or is_wrong.any():
        at = int(is_wrong.argmax())
        raise DatasetFormatError(
            f"{index}: sample {at} would lie at bytes {offsets[at]} to {offsets[at + 1]}, where "
            f"the first sample begins at 0 and each ends behind its first byte; {again}"
        )
    return offsets


# The offsets that are in use in this process. Several sources of a file share them, also with the
# worker processes that are forked, and with what is pickled for these.
_in_use: WeakValueDictionary[tuple[Any, ...], Int64Array] = WeakValueDictionary()


def line_offsets(path: Path, size_bytes: int) -> Int64Array:
    """Returns where the samples lie: by the index, or where there is none by reading all lines."""
    key = (str(path), size_bytes, _stamp(path), _stamp(line_index_path(path)))
    offsets = _in_use.get(key)
    if offsets is None:
        try:
            offsets = read_line_index(path, size_bytes)
        except FileNotFoundError:
            offsets = scan_lines(path, size_bytes).offsets
        _in_use[key] = offsets
    return offsets


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


# ----------------------------------------------------------------------------------------- reading


class _OpenLines(OpenShards):
    """Reads byte ranges of one JSONL file, which takes the place of the shards.

    Args:
        path: the file.
        size_bytes: its size when the dataset was opened.
        num_samples: number of its samples; by default what is found.
    """

    def __init__(self, path: Path, size_bytes: int, num_samples: int | None = None) -> None:
        self._path = path
        self._lines = line_offsets(path, size_bytes)
        self.num_samples = len(self._lines) - 1
        if num_samples not in (None, self.num_samples):
            raise DatasetFormatError(
                f"{path} has {self.num_samples:,} samples now, and had {num_samples:,} when the "
                "run began; begin a run of the new data"
            )
        super().__init__(path.parent, (path.name,), (self.num_samples,), (0,))

    def _load_offsets(self, number: int) -> Int64Array:
        del number
        return self._lines

    def _check_first_key(self, number: int, descriptor: int, offsets: Int64Array) -> None:
        """Keys of lines are their numbers."""

    def _others_can_be_read(self, number: int) -> bool:
        """Whether anything of the file can be read, so that single samples are the problem."""
        del number
        return files.can_read(self._path)

    def cut_short(self, shard: int, place: int, stop: int) -> DatasetFormatError:
        """Returns the error of a sample that would end at byte `stop`, behind the file's end."""
        size = self._overrun[shard]
        return DatasetFormatError(
            f"{self._path}: {sample_place(place)} should end at byte {stop}, but the file ends "
            f"before ({size} bytes): it was cut after it was indexed. Restore it, or run "
            f"`energon-lite prepare {self._path}`"
        )


class LineReader(ShardReader):
    """Random access to the samples of a JSONL file; see `ShardReader`.

    The file of a sample is named by its number: `0.json`, `1.json`, ...

    Args:
        path: the file.
        max_open: 0 opens the file again for every block.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no regular file, or its index is wrong.
        EmptyDatasetError: It has no sample.
    """

    def __init__(self, path: Path, max_open: int = MAX_OPEN) -> None:
        descriptor = _descriptor_of(path)
        self.size_bytes = os.fstat(descriptor).st_size
        os.close(descriptor)
        lines = _OpenLines(path, self.size_bytes)
        super().__init__(path.parent, (path.name,), (lines.num_samples,), (0,), max_open=max_open)
        self.root, self._opened = path, lines

    def _new_files(self) -> OpenShards:
        return _OpenLines(self.root, self.size_bytes, self.num_samples)

    def path_of(self, number: int) -> Path:
        """Returns the path of the file."""
        del number
        return self.root

    def _members(self, data: UInt8Array, rows: Rows, bases: Int64Array) -> list[Any]:
        """Names the bytes of each sample."""
        del data, bases
        columns = (rows.places.tolist(), rows.starts.tolist(), rows.stops.tolist())
        return [[(f"{place}.json", a, b)] for place, a, b in zip(*columns, strict=True)]


def sample_place(number: int) -> str:
    """Names a sample in messages by its line, counted as editors do."""
    return f"line {number + 1} (blank lines not counted)"
