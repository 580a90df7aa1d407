"""The join index: which samples of several datasets have the same key, in Energon's file format.

A row has a place (shard, first byte, size) for each dataset, in the order of the first dataset, the
primary.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any
from zlib import crc32

import numpy as np
import torch

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError, pass_on
from energon_lite.formats.nvmeta import INDEX_UUID, META
from energon_lite.formats.shards import ShardReader
from energon_lite.formats.sqlite import IndexDatabase
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

_HEADER = struct.Struct("<8sq")
_MAGIC = b"JIDX0001"
_MOST_COLUMNS = 10_000
_SUMMED = 1 << 16  # rows
# In place of a position: no match; a shard that is excluded.
MISSING, _WRONG = -1, -2


# -------------------------------------------------------------------------------------- the file


class JoinIndexReader(AbstractContextManager["JoinIndexReader"]):
    """The rows of a join index, mapped into memory.

    Args:
        join_index_path: the file.
        column: the dataset whose places items have; by default all.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: The file is no join index, or has not all of its bytes.
    """

    def __init__(self, join_index_path: PurePath | str, column: int | None = None) -> None:
        self.path = local_path(join_index_path)
        self.column = column
        raw = files.map_file(self.path)
        header, size = bytes(raw[: _HEADER.size]), len(raw) - _HEADER.size
        magic, columns = _HEADER.unpack(header.ljust(_HEADER.size))
        is_valid = magic == _MAGIC and 1 <= columns <= _MOST_COLUMNS
        if not is_valid or size % (24 * columns):
            raise DatasetFormatError(
                f"{self.path}: {len(raw)} bytes, of which the first are {header!r}, are no whole "
                "join index; remove the file, and prepare the metadataset again"
            )
        self._rows: Int64Array = np.frombuffer(raw, "<i8", offset=_HEADER.size)
        self._rows = self._rows.reshape(-1, columns, 3)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the path: another process maps the rows itself."""
        return type(self), (self.path, self.column)

    @property
    def num_columns(self) -> int:
        """Counts the datasets."""
        return int(self._rows.shape[1])

    def rows(self, indices: Int64Array | slice = slice(None)) -> Int64Array:
        """Returns rows, shape (N, columns, 3); a missing match is (-1, -1, -1)."""
        return self._rows[indices]

    def crc(self) -> int:
        """Returns a checksum of the number of rows, and of 65,536 of them."""
        some = self._rows[:: 1 + len(self) // _SUMMED]
        return crc32(np.ascontiguousarray(some).data, len(self))

    def __len__(self) -> int:
        """Counts the rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> list[tuple[int, int, int]]:
        """Returns the places of one row."""
        own = slice(None) if self.column is None else slice(self.column, self.column + 1)
        return [(int(a), int(b), int(c)) for a, b, c in self._rows[index, own]]

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        """Yields the rows."""
        return (self[index] for index in range(len(self)))

    def get_as_tensor(self) -> Any:
        """Returns all rows as a tensor, shape (rows, columns, 3)."""
        return torch.from_numpy(np.array(self._rows))

    def close(self) -> None:
        """Does nothing; the file is not open, but mapped."""

    def __exit__(self, *error: object) -> None:
        """Closes the reader."""


class JoinIndexWriter(AbstractContextManager["JoinIndexWriter"]):
    """Writes a join index; whole, or not at all.

    Args:
        join_index_path: the file, which gets its name when the writer is closed.
    """

    def __init__(self, join_index_path: PurePath | str) -> None:
        self.path = PurePath(join_index_path)
        self._stack = ExitStack()
        self._file = self._stack.enter_context(files.new_file(self.path))
        self._columns = 0

    def append(self, *columns: tuple[int, int, int]) -> None:
        """Writes one row: a place for each dataset."""
        self.extend(np.array([columns], dtype=np.int64))

    def extend(self, rows: Int64Array) -> None:
        """Writes rows, shape (N, columns, 3).

        Raises:
            ValueError: The rows before have another number of columns.
        """
        if not self._columns:
            self._columns = rows.shape[1]
            self._file.write(_HEADER.pack(_MAGIC, self._columns))
        if rows.shape[1] != self._columns:
            raise ValueError(
                f"{self.path}: a row of {rows.shape[1]} columns, where the rows before have "
                f"{self._columns}; write one place for each dataset"
            )
        self._file.write(np.ascontiguousarray(rows, dtype="<i8").data)

    def close(self) -> None:
        """Renames the file to its name."""
        self._stack.close()

    def __exit__(self, *error: Any) -> None:
        """Renames the file to its name; or removes it, after an error."""
        self._stack.__exit__(*error)


# ------------------------------------------------------------------------------------- the sides


@dataclass(eq=False)
class JoinSide:
    """A dataset of a join: a split part of a prepared folder.

    A position is a number of a sample in the concatenated shards, excluded samples included.

    Attributes:
        reader: reads samples by their positions.
        listed: names of the shards of the split part, excluded shards included.
        excludes: what the split file excludes: samples, as SHARD/KEY.
        excluded: positions of the excluded samples, rising.
        span: the first of the samples that are not excluded, and the one after the last, of those
            that take part.
        nonmatch: what happens to a sample of the primary without a match here: `error`, `skip` or
            `none`.
        numbers: by number in `listed`, the number of the shard in the reader; -2 if it is excluded.
    """

    reader: ShardReader
    listed: tuple[str, ...]
    excludes: tuple[str, ...]
    excluded: tuple[int, ...]
    span: tuple[int, int]
    nonmatch: str = "error"

    def __post_init__(self) -> None:
        """Numbers the shards."""
        inside = set(self.reader.shards)
        is_inside = np.array([name in inside for name in self.listed], dtype=bool)
        self.numbers: Int64Array = np.where(is_inside, np.cumsum(is_inside) - 1, _WRONG)

    @property
    def root(self) -> PurePath:
        """The folder."""
        return self.reader.root

    @cached_property
    def uuid(self) -> str:
        """The name that `prepare` took for the indexes of the folder; empty in an old dataset."""
        try:
            return files.read_file(self.root / META / INDEX_UUID, 1000).decode().strip()
        except (OSError, ValueError):
            return ""

    def kept(self) -> Int64Array:
        """Returns the positions of the samples that take part."""
        positions = np.delete(
            np.arange(self.reader.num_samples), np.array(self.excluded, dtype=np.int64)
        )
        return positions[slice(*self.span)]

    def keys(self, positions: Int64Array) -> list[str]:
        """Returns the keys of samples."""
        shards, numbers = self.reader.locate(positions)
        ids = np.array(self.reader.tar_file_ids)[shards]
        places = list(zip(ids.tolist(), numbers.tolist(), strict=True))
        with IndexDatabase(self.root) as index:
            found = index.keys_at(places)
        return [found.get(place, f"number {place[1]}") for place in places]

    def positions_of(self, rows: Int64Array) -> tuple[Int64Array, dict[int, Exception]]:
        """Finds samples by where their bytes begin.

        Args:
            rows: (shard, first byte, size), shape (N, 3).

        Returns:
            Their positions, shape (N,), -1 for a missing match; and the errors of the samples that
            are not there, by their number among the N.
        """
        positions = np.full(len(rows), MISSING, dtype=np.int64)
        lost: dict[int, Exception] = {}
        for shard in np.unique(rows[:, 0]).tolist():
            if shard == MISSING:
                continue
            own = np.flatnonzero(rows[:, 0] == shard)
            number = int(self.numbers[shard]) if 0 <= shard < len(self.numbers) else _WRONG
            try:
                if number == _WRONG:
                    raise self.misfit(f"shard {shard} of its split part is not there, or excluded")
                offsets = self.reader.offsets(number)
            except (OSError, DatasetFormatError) as error:
                pass_on(error)
                lost.update(dict.fromkeys(own.tolist(), error))
                continue
            first, size = rows[own, 1], rows[own, 2]
            places = np.clip(np.searchsorted(offsets, first, side="right") - 1, 0, None)
            places = np.minimum(places, len(offsets) - 2)
            # A folder entry before the first sample may not be counted.
            is_there = (offsets[places] == first) | (places == 0)
            is_there &= offsets[places + 1] == first + size
            positions[own] = self.reader.starts[number] + places
            name = self.reader.shards[number]
            for row in own[~is_there].tolist():
                text = f"bytes {rows[row, 1]} to {rows[row, 1] + rows[row, 2]} of {name}"
                lost[row] = self.misfit(f"{text} are no sample")
                positions[row] = MISSING
        return positions, lost

    def misfit(self, what: str) -> DatasetFormatError:
        """Returns the error of a join index that does not fit the dataset."""
        return DatasetFormatError(
            f"{self.root}: the join index does not fit: {what}. Run `energon-lite prepare` on the "
            "metadataset again"
        )
