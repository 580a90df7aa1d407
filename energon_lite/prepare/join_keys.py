"""Makes join indexes, and finds those that are there, also Energon's.

The keys come from `index.sqlite`. They are compared as hashes of 64 bits, sorted: of ten million
joins of a million keys one pairs two samples of different keys, which is refused when the pair is
read.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError
from energon_lite.prepare.pool import ordered_results
from energon_lite.storage import files
from energon_lite.storage.join_index import MISSING, JoinIndexReader, JoinIndexWriter, JoinSide
from energon_lite.storage.nvmeta import META, read_index, read_info
from energon_lite.storage.sqlite import INDEX_SQLITE, IndexDatabase

_ROWS_AT_ONCE = 1 << 16
_LISTED = 5
# Rows of an index that a process reads at once, and the most parts into which an index is divided.
_ROWS_OF_TASK, _MOST_TASKS = 1 << 18, 256
# Rows of an index of Energon's that are compared with the keys of the datasets.
_COMPARED = 256


def digest_of(sides: Sequence[JoinSide]) -> str:
    """Names what a join index depends on: the indexes, split parts, excludes, and modes."""
    facts = [
        (side.uuid, side.listed, side.reader.shards, np.diff(side.reader.starts).tolist(),
         sorted(side.excludes), side.excluded, side.span, side.nonmatch)
        for side in sides
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def energon_digest_of(sides: Sequence[JoinSide]) -> str | None:
    """Returns the name of the index in Energon; None where it depends on chance.

    Energon writes several excludes in the order of a set.
    """
    text = ""
    for side in sides:
        if len(side.excludes) > 1:
            return None
        excludes = "".join(f"{entry}\0" for entry in side.excludes)
        text += f"\0uuid={side.uuid}\0excludes={excludes}\0nonmatch={side.nonmatch}\0"
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class JoinReport:
    """How the samples of a join match.

    Attributes:
        path: the index.
        samples: samples of the primary that take part.
        rows: samples of the join.
        missing: by dataset, samples of the primary without a match there.
        unused: by dataset, samples that match none of the primary.
        listed: by dataset, the first keys of the primary without a match there.
    """

    path: Path
    samples: int = 0
    rows: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    listed: dict[str, list[str]] = field(default_factory=dict)


def find_index(folder: Path, sides: Sequence[JoinSide]) -> Path | None:
    """Returns the join index of some datasets, also one that Energon made; None without one.

    An index that is not whole is not used, and a warning is logged.
    """
    for own in folder.glob(f"join_index_{digest_of(sides)}_*.bin"):
        with suppress(DatasetFormatError):
            if own == index_file(folder, sides, len(JoinIndexReader(own))):
                return own
        files.warn_once(f"{own} is not whole, and is replaced")
    theirs = energon_digest_of(sides)
    path = None if theirs is None else folder / f"join_index_{theirs}.bin"
    if path is None or not files.is_there(path):
        return None
    try:
        difference = _difference(JoinIndexReader(path), sides)
    except DatasetFormatError as error:
        difference = str(error)
    if difference:
        files.warn_once(f"{path}: not used, as it was made for other split parts: {difference}")
    return None if difference else path


def index_file(folder: Path, sides: Sequence[JoinSide], num_rows: int) -> Path:
    """Returns the file of an index; by the number of rows an incomplete one is noticed."""
    return folder / f"join_index_{digest_of(sides)}_{num_rows}.bin"


def _difference(index: JoinIndexReader, sides: Sequence[JoinSide]) -> str:
    """Returns how an index differs from what some samples ask for; empty where it does not.

    Energon names the indexes of all splits by the same text, and leaves incomplete ones behind.
    """
    if index.num_columns != len(sides):
        return f"{index.num_columns} columns for {len(sides)} datasets"
    columns = []
    for number, side in enumerate(sides):
        positions, lost = side.positions_of(index.rows()[:, number])
        if lost:
            return str(next(iter(lost.values())))
        columns.append(positions)
    kept = sides[0].kept()
    chosen = kept[np.linspace(0, len(kept) - 1, min(_COMPARED, len(kept))).astype(np.int64)]
    keys = sides[0].keys(chosen)
    found = [_positions_of_keys(side, keys) for side in sides[1:]]
    rows = {position: row for row, position in enumerate(columns[0].tolist())}
    for i, (position, key) in enumerate(zip(chosen.tolist(), keys, strict=True)):
        expected = [own[i] for own in found]
        is_row = all(
            at != MISSING or side.nonmatch == "none"
            for at, side in zip(expected, sides[1:], strict=True)
        )
        row = rows.get(position)
        if is_row != (row is not None):
            return f"sample {key!r} is {'missing' if is_row else 'there'}"
        if row is not None and expected != [int(own[row]) for own in columns[1:]]:
            return f"sample {key!r} has another match"
    if len(rows) != len(index) or not np.isin(columns[0], kept).all():
        return f"{len(index)} rows are of other samples"
    return ""


def _positions_of_keys(side: JoinSide, keys: Sequence[str]) -> list[int]:
    """Returns the positions of samples by key; -1 for those that do not take part."""
    with IndexDatabase(side.root) as index:
        found = index.sample_indices(keys) or {}
    firsts = dict(zip(side.reader.tar_file_ids, side.reader.starts.tolist(), strict=False))
    kept = set(side.kept().tolist())
    places = (found.get(key, (MISSING, 0)) for key in keys)
    positions = [firsts[id_] + place if id_ in firsts else MISSING for id_, place in places]
    return [position if position in kept else MISSING for position in positions]


def build_index(folder: Path, sides: Sequence[JoinSide], num_workers: int | None = 0) -> JoinReport:
    """Makes the index of a join.

    Args:
        folder: where the index is written.
        sides: the datasets, the primary first.
        num_workers: processes; 0: this process.

    Raises:
        DatasetFormatError: Two samples of a dataset have the same key, or a sample of the primary
            has no match in a dataset with `nonmatch: error`.
        OSError: The index cannot be written.
    """
    report = JoinReport(folder)
    columns = match_samples(sides, report, num_workers)
    report.path = index_file(folder, sides, report.rows)
    with files.errors_of(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(folder, {report.path.name}, min_age_sec=60.0)
    extents = [_Extents(side) for side in sides]
    with JoinIndexWriter(report.path) as writer:
        for start in range(0, max(1, report.rows), _ROWS_AT_ONCE):
            some = [column[start : start + _ROWS_AT_ONCE] for column in columns]
            parts = [own.rows(positions) for own, positions in zip(extents, some, strict=True)]
            writer.extend(np.stack(parts, axis=1))
    return report


def match_samples(
    sides: Sequence[JoinSide], report: JoinReport, num_workers: int | None = 0
) -> list[Int64Array]:
    """Finds the samples of the same key.

    Args:
        sides: the datasets, the primary first.
        report: receives the counts.
        num_workers: as in `build_index`.

    Returns:
        By dataset the positions of the samples of each row, -1 for none.
    """
    hashed = _hashes(sides, num_workers)
    columns = [sides[0].kept()]
    wanted = hashed[0][columns[0]]
    rising = _check_unique(sides[0], wanted, columns[0])
    report.samples = len(wanted)
    is_row = np.ones(len(wanted), dtype=bool)
    for side, hashes in zip(sides[1:], hashed[1:], strict=True):
        kept = side.kept()
        order = _check_unique(side, hashes[kept], kept)
        kept = kept[order]
        own = hashes[kept]
        at = np.empty_like(wanted)
        at[rising] = np.searchsorted(own, wanted[rising])  # ten times as quick as unsorted
        at[at == len(own)] = 0
        is_match = own[at] == wanted if len(own) else np.zeros(len(wanted), dtype=bool)
        columns.append(np.where(is_match, kept[at], MISSING) if len(own) else is_match - 1)
        _count(report, sides[0], side, columns[0][~is_match], len(own) - int(is_match.sum()))
        if side.nonmatch == "skip":
            is_row &= is_match
    report.rows = int(is_row.sum())
    return columns if is_row.all() else [column[is_row] for column in columns]


def _count(
    report: JoinReport, primary: JoinSide, side: JoinSide, missing: Int64Array, unused: int
) -> None:
    """Counts the samples of the primary without a match, and lists the first of them."""
    name = f"{side.root}"
    name = name if name not in report.missing else f"{name} ({len(report.missing)})"
    report.missing[name], report.unused[name] = len(missing), unused
    report.listed[name] = primary.keys(missing[:_LISTED])
    if len(missing) and side.nonmatch == "error":
        raise DatasetFormatError(
            f"{side.root}: {len(missing):,} of {report.samples:,} samples of {primary.root} have "
            f"no match here, as {', '.join(map(repr, report.listed[name]))}. Write `nonmatch: "
            "skip` (drop the rows) or `nonmatch: none` (the joiner gets None) beside its path, or "
            "add the samples"
        )


class _Rows(NamedTuple):
    """Some rows of an index: those with the row ids from `first` to `last`."""

    root: Path
    first: int
    last: int


def _hashes(sides: Sequence[JoinSide], num_workers: int | None) -> list[Int64Array]:
    """Returns for each dataset a hash of the key of each sample, by position."""
    if "fork" not in multiprocessing.get_all_start_methods():
        num_workers = 0  # hashes of two processes are comparable only if one is the other's copy
    tables = {}
    for side in sides:
        starts = np.cumsum([0, *read_info(side.root).shard_counts.values()], dtype=np.int64)
        tables[side.root] = starts, np.zeros((2, starts[-1]), dtype=np.int64)
    tasks = [rows for root in tables for rows in _tasks(root)]
    for rows, result in zip(tasks, ordered_results(_hashed, tasks, num_workers), strict=True):
        if isinstance(result, Exception):
            raise result
        positions, hashes = result
        _, table = tables[rows.root]
        table[0, positions], table[1, positions] = hashes, 1
    return [_hashes_of(side, *tables[side.root]) for side in sides]


def _hashes_of(side: JoinSide, starts: Int64Array, table: Int64Array) -> Int64Array:
    """Returns the hashes of a split part, of those of a folder and whether these are known."""
    spans = [slice(starts[id_], starts[id_ + 1]) for id_ in side.reader.tar_file_ids]
    for name, span in zip(side.reader.shards, spans, strict=True):
        if not table[1, span].all():
            raise DatasetFormatError(
                f"{side.root / META / INDEX_SQLITE}: sample {int(table[1, span].argmin())} of "
                f"{name} has no entry; run `energon-lite prepare {side.root} --tar-index-only`"
            )
    return np.concatenate([table[0, span] for span in spans])


def _tasks(root: Path) -> list[_Rows]:
    """Divides the rows of an index by their row ids."""
    with IndexDatabase(root) as index:
        first, last, total = index.row_ids()
    number = min(_MOST_TASKS, 1 + total // _ROWS_OF_TASK)
    edges = [first + (last + 1 - first) * i // number for i in range(number + 1)]
    return [_Rows(root, a, b - 1) for a, b in pairwise(edges)]


def _hashed(rows: _Rows) -> tuple[Int64Array, Int64Array]:
    """Returns the positions of samples in all shards of a folder, and hashes of their keys."""
    counts = np.array(list(read_info(rows.root).shard_counts.values()), dtype=np.int64)
    starts = np.cumsum([0, *counts], dtype=np.int64)
    positions, hashes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with IndexDatabase(rows.root) as index:
        for some in index.all_keys(rows.first, rows.last):
            _, keys, shards, places = zip(*some, strict=True)
            ids, at = np.array(shards, dtype=np.int64), np.array(places, dtype=np.int64)
            is_wrong = (ids < 0) | (ids >= len(counts)) | (at < 0)
            is_wrong |= at >= counts[np.where(is_wrong, 0, ids)]
            if is_wrong.any():
                key = keys[int(is_wrong.argmax())]
                raise index.error(f"sample {key!r} is in no shard of {META}/.info.json")
            positions.append(starts[ids] + at)
            hashes.append(np.fromiter(map(hash, keys), np.int64, len(keys)))
    return np.concatenate(positions), np.concatenate(hashes)


def _check_unique(side: JoinSide, hashes: Int64Array, positions: Int64Array) -> Int64Array:
    """Checks that no key is there twice.

    Returns:
        What sorts the hashes.

    Raises:
        DatasetFormatError: A key is; counts such samples, and names the first.
    """
    order = np.argsort(hashes)
    own = hashes[order]
    is_again = own[1:] == own[:-1]
    if is_again.any():
        again = np.sort(positions[order[1:][is_again]])
        keys = ", ".join(map(repr, side.keys(again[:_LISTED])))
        raise DatasetFormatError(
            f"{side.root}: {len(again):,} samples have a key that another sample has, too, as "
            f"{keys}; a join needs each key once. Rename the files in the tars, and prepare again"
        )
    return order


class _Extents:
    """Where the samples of a dataset lie, by position."""

    def __init__(self, side: JoinSide) -> None:
        root, reader = side.root, side.reader
        counts = np.diff(reader.starts).tolist()
        all_offsets = [
            read_index(root / name, count)
            for name, count in zip(reader.shards, counts, strict=True)
        ]
        # The last row stands for a missing match.
        self._firsts = np.concatenate([*(own[:-1] for own in all_offsets), [MISSING]])
        self._sizes = np.concatenate([*(np.diff(own) for own in all_offsets), [MISSING]])
        listed = np.flatnonzero(side.numbers >= 0)
        self._shards = np.repeat(np.append(listed, MISSING), [*counts, 1])

    def rows(self, positions: Int64Array) -> Int64Array:
        """Returns (shard, first byte, size) of samples, shape (N, 3)."""
        columns = (self._shards, self._firsts, self._sizes)
        return np.stack([column[positions] for column in columns], axis=1)
