"""JSONL files: where the lines begin, the index beside them, and reading lines by their numbers.

A sample is a line that is not blank. `x.jsonl.idx` has, as 64-bit integers, where each sample
begins, and the size of the file: the bytes of blank lines belong to the sample before them, those
of the first blank lines to the first sample. Form feeds and other blanks at the edges that JSON
does not allow are not read. A file without an index is indexed in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from os import PathLike
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from energon_lite.core.arrays import Int64Array, UInt8Array
from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError
from energon_lite.core.seeds import key_of
from energon_lite.extras.jsonl.file_kinds import HEAD_BYTES, kind_of
from energon_lite.formats.format import Format, Opened
from energon_lite.formats.shards import MAX_OPEN, RangeReader, Rows
from energon_lite.names.energon_modules import LazyFunction
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

IJSONL_SUFFIX = ".jsonl.idx"
# By default an epoch is shuffled in at least 256 slices, of at most 4,096 samples.
_NUM_SLICES, _LONGEST_SLICE = 256, 4096
# A longer line is a file of another kind.
MAX_LINE_BYTES = 1 << 30
_READ_BYTES = 4 << 20
_SAMPLES_SHOWN = 20
# Pieces of a file that are hashed, to notice other lines of the same length: each is a read, or a
# request.
_NUM_PROBED, _PROBED_BYTES = 4, 4096
_BOM = b"\xef\xbb\xbf"


def line_index_path(path: PurePath) -> PurePath:
    """Returns the path of the index: `x.jsonl` has `x.jsonl.idx`."""
    return path.with_name(path.name + ".idx")


class Lines(NamedTuple):
    """The places of the samples of a JSONL file.

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
    path: PurePath,
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
    file = _opened_lines(path)
    size = file.size_bytes if size_bytes is None else size_bytes
    offsets, num_lines, broken = list[int](), 0, list[tuple[int, int]]()
    rest, start = b"", 0  # a part of a line, and where it begins
    while start + len(rest) < size:
        if len(rest) > MAX_LINE_BYTES:
            raise DatasetFormatError(
                f"{path}: line {num_lines + 1} is longer than {MAX_LINE_BYTES:,} bytes; a JSONL "
                "file has a JSON object in each line"
            )
        at = start + len(rest)
        stop = min(size, at + max(_READ_BYTES, len(rest)))
        *lines, rest = (rest + _read_piece(file, at, stop)).split(b"\n")
        if stop == size and rest:  # the last line may lack its end
            lines, rest = [*lines, rest], b""
        for line in lines:
            num_lines += 1
            if line[:1] == b"{" and line[-1:] == b"}":
                offsets.append(start)
            elif (text := _bare_line(line)) or (num_lines > 1 and line.strip()):
                if text[:1] + text[-1:] != b"{}":
                    broken.append((len(offsets), num_lines))
                offsets.append(start)
            start += len(line) + 1
        progress(stop, size, len(offsets))
    if not offsets:
        raise EmptyDatasetError(f"{path} has no line that is not blank; write samples to it")
    return Lines(np.array([0, *offsets[1:], size]), len(broken), broken[:_SAMPLES_SHOWN])


def _bare_line(line: bytes) -> bytes:
    """Returns a line without white space around it, and without a mark of the byte order."""
    return line.strip().removeprefix(_BOM).strip()  # files that were put together have several


def _read_piece(file: files.ByteFile, start: int, stop: int) -> bytearray:
    piece = bytearray(stop - start)
    num_read = files.retried(lambda: file.read_into(memoryview(piece), start), file.path)
    if num_read < len(piece):
        raise DatasetFormatError(
            f"{file.path} became shorter while it was read; index it when it is complete"
        )
    return piece


def _opened_lines(path: PurePath) -> files.ByteFile:
    """Opens a file of lines.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no regular file, or of another kind by its first bytes.
    """
    try:
        file = files.open_bytes(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; check the path") from None
    kind = kind_of(file.read(0, min(HEAD_BYTES, file.size_bytes)), is_text=True)
    if kind:
        raise DatasetFormatError(f"{path} has no lines of JSON, but {kind}")
    return file


def _lines_digest(file: files.ByteFile) -> str:
    """Hashes some pieces of a file, all of a small one."""
    found, size = blake2b(digest_size=3), file.size_bytes
    for number in range(_NUM_PROBED):
        start = size * number // _NUM_PROBED
        found.update(file.read(start, min(size, start + _PROBED_BYTES)))
    return found.hexdigest()


# --------------------------------------------------------------------------------------- the index


def write_line_index(path: PurePath, offsets: Int64Array) -> None:
    """Writes the index of a JSONL file at once."""
    files.write_atomically(line_index_path(path), offsets.astype("<u8").tobytes())


class IJsonlIndexWriter(list[int]):
    """Writes the index of a JSONL file that a user's program has written.

    What is appended is where each sample begins, and in the end the size of the file.

    Args:
        jsonl_path: the file.
    """

    def __init__(self, jsonl_path: str | PathLike[str]) -> None:
        self._path = local_path(jsonl_path)

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


class IJsonlIndexReader(list[int]):
    """The index of a JSONL file: where each sample begins, and in the end the size of the file.

    Args:
        jsonl_path: the file.

    Raises:
        FileNotFoundError: There is no file, or no index.
        DatasetFormatError: The index is of another content of the file.
    """

    def __init__(self, jsonl_path: str | PathLike[str]) -> None:
        path = local_path(jsonl_path)
        super().__init__(read_line_index(path, _opened_lines(path).size_bytes).tolist())

    @classmethod
    def count_samples(cls, jsonl_path: str | PathLike[str]) -> int:
        """Returns the number of samples in a file."""
        return len(cls(jsonl_path)) - 1

    @classmethod
    def size(cls, jsonl_path: str | PathLike[str]) -> int:
        """Returns the size of a file in bytes."""
        return cls(jsonl_path)[-1]

    def close(self) -> None:
        """Does nothing: the file is read when the reader is made."""

    def __enter__(self) -> IJsonlIndexReader:
        """Returns the reader."""
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing."""


def read_line_index(path: PurePath, size_bytes: int) -> Int64Array:
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


def line_offsets(path: PurePath, size_bytes: int) -> Int64Array:
    """Returns where the samples lie: by the index, or where there is none by reading all lines."""
    facts = map(files.status_of, (path, line_index_path(path)))
    return _line_offsets(path, size_bytes, *facts)


# Several sources of a file share the offsets, also with the worker processes that are forked.
@lru_cache(8)
def _line_offsets(path: PurePath, size_bytes: int, *facts: object) -> Int64Array:
    del facts
    try:
        return read_line_index(path, size_bytes)
    except FileNotFoundError:
        return scan_lines(path, size_bytes).offsets


# ----------------------------------------------------------------------------------------- reading


class LineReader(RangeReader):
    """Random access to the samples of a JSONL file; see `RangeReader`.

    The file of a sample is named by its number: `0.json`, `1.json`, ...

    Args:
        path: the file.
        max_open: 0 opens the file again for every block.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no regular file, or its index is wrong.
        EmptyDatasetError: It has no sample.
    """

    _lines: Int64Array | None

    def __init__(self, path: PurePath, max_open: int = MAX_OPEN) -> None:
        file = _opened_lines(path)
        self.size_bytes, self.content = file.size_bytes, _lines_digest(file)
        lines = line_offsets(path, self.size_bytes)
        super().__init__(path, (path.name,), (len(lines) - 1,), max_open=max_open)
        self._lines = lines

    def _begin(self) -> None:
        super()._begin()
        self._lines = None

    def extents(
        self, indices: Int64Array, is_patient: bool = True
    ) -> tuple[Rows, dict[int, Exception]]:
        """Looks up lines; another process has to have the same ones."""
        self.load_offsets(0)
        return super().extents(indices, is_patient)

    def load_offsets(self, shard: int) -> Int64Array:
        """Returns where the samples begin, if they are those that there were when the run began."""
        del shard
        if self._lines is None:
            self._lines = line_offsets(self.root, self.size_bytes)
            if len(self._lines) - 1 != self.num_samples:
                raise DatasetFormatError(
                    f"{self.root} has {len(self._lines) - 1:,} samples now, and had "
                    f"{self.num_samples:,} when the run began; begin a run of the new data"
                )
        return self._lines

    def cut_short(self, shard: int, place: int, stop: int, size: int) -> DatasetFormatError:
        """Returns the error of a sample that would end at byte `stop` of a file of `size` bytes."""
        del shard
        return DatasetFormatError(
            f"{self.root}: {JsonlFormat().place_of(place)} should end at byte {stop}, but the "
            f"file ends before ({size} bytes): it was cut after it was indexed. "
            f"Restore it, or run `energon-lite prepare {self.root}`"
        )

    def path_of(self, number: int) -> PurePath:
        """Returns the path of the file."""
        del number
        return self.root

    def members(self, data: UInt8Array, rows: Rows, bases: Int64Array) -> list[Any]:
        """Names the bytes of each sample."""
        del bases
        places, *ranges = (rows.places.tolist(), rows.starts.tolist(), rows.stops.tolist())
        if len(data):
            # Nearly all samples are `{...}` and the end of a line: nothing to remove.
            ends = rows.stops - 2
            ends -= data.take(ends, mode="clip") == ord("\r")
            is_plain = data.take(rows.starts, mode="clip") == ord("{")
            is_plain &= data.take(ends, mode="clip") == ord("}")
            for row in np.flatnonzero(~is_plain).tolist():
                start, stop = ranges[0][row], ranges[1][row]
                text = data[start:stop].tobytes()
                if text.rstrip().endswith(b"}"):  # broken lines stay as they are
                    ranges[0][row] = stop - len(text.lstrip())
                    ranges[1][row] = start + len(text.rstrip())
        return [[(f"{place}.json", a, b)] for place, a, b in zip(places, *ranges, strict=True)]


class JsonlFormat(Format):
    """JSONL files: each line that is not blank is a sample, its value the part `json`."""

    name = "JSONL"
    suffix = ".jsonl"
    only_part = "lines"
    part = "json"
    prepare: Any = LazyFunction("energon_lite.extras.prepare.lines:prepare_lines")
    check: Any = LazyFunction("energon_lite.extras.prepare.lines:check_lines")
    files: Any = LazyFunction("energon_lite.extras.stores.file_stores:JsonlFileStore")
    class_home = "energon_lite.extras.jsonl.crude_jsonl:DefaultCrudeJsonlDatasetFactory"

    def open(self, path: PurePath, max_open: int = MAX_OPEN, **_: Any) -> Opened:
        """Opens a file; without an index, it is read once."""
        reader = LineReader(path, max_open)
        size, number = reader.size_bytes, reader.num_samples
        digest = key_of("lines", number, size) & (2**64 - 1)
        slice_length = min(_LONGEST_SLICE, number // _NUM_SLICES)
        return Opened(reader, f"{digest:016x}", size, slice_length, content=reader.content)

    def place_of(self, number: int) -> str:
        """Names a sample in messages by its line, counted as editors do."""
        return f"line {number + 1} (blank lines not counted)"

    def is_indexed(self, path: PurePath) -> bool:
        """Returns whether the index lies beside the file."""
        return files.is_there(line_index_path(path))
