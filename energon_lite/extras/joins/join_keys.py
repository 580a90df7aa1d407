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
from itertools import islice
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.joins.join_index import MISSING, JoinIndexReader, JoinIndexWriter, JoinSide
from energon_lite.extras.prepare.pool import ordered_results
from energon_lite.formats.nvmeta import read_index
from energon_lite.formats.sqlite import IndexDatabase
from energon_lite.storage import files

_ROWS_AT_ONCE = 1 << 16
_LISTED = 5
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
    """The way in which the samples of a join match.

    Attributes:
        path: the index.
        samples: samples of the primary that take part.
        rows: samples of the join.
        missing: by dataset, samples of the primary without a match there.
        unused: by dataset, samples that match none of the primary.
        listed: by dataset, the first keys of the primary without a match there.
    """

    path: PurePath
    samples: int = 0
    rows: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    listed: dict[str, list[str]] = field(default_factory=dict)


def find_index(folder: PurePath, sides: Sequence[JoinSide]) -> PurePath | None:
    """Returns the join index of some datasets, also one that Energon made; None without one.

    An index that is not whole is not used, and a warning is logged.
    """
    start = f"join_index_{digest_of(sides)}_"
    names = files.entries(folder) if files.is_folder(folder) else []
    for own in (folder / name for name in names if name.startswith(start)):
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


def index_file(folder: PurePath, sides: Sequence[JoinSide], num_rows: int) -> PurePath:
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
    wanted = [chosen.tolist(), *(_positions_of_keys(side, keys) for side in sides[1:])]
    must = [side.nonmatch != "none" for side in sides]
    rows = {row[0]: row for row in zip(*(own.tolist() for own in columns), strict=True)}
    for key, row in zip(keys, zip(*wanted, strict=True), strict=True):
        is_row = all(at != MISSING or not it for at, it in zip(row, must, strict=True))
        if rows.get(row[0]) != (row if is_row else None):
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


def build_index(
    folder: PurePath, sides: Sequence[JoinSide], num_workers: int | None = 0
) -> JoinReport:
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
        files.make_folder(folder)
    files.remove_leftovers(folder, {report.path.name}, min_age_sec=60.0)
    places = list(map(_rows_of_samples, sides))
    with JoinIndexWriter(report.path) as writer:
        for start in range(0, max(1, report.rows), _ROWS_AT_ONCE):
            some = [column[start : start + _ROWS_AT_ONCE] for column in columns]
            parts = [own[positions] for own, positions in zip(places, some, strict=True)]
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
    _check_unique(sides[0], wanted, columns[0])
    report.samples = len(wanted)
    is_row = np.ones(len(wanted), dtype=bool)
    for side, hashes in zip(sides[1:], hashed[1:], strict=True):
        kept = side.kept()
        own = hashes[kept]
        _check_unique(side, own, kept)
        _, at, match = np.intersect1d(wanted, own, assume_unique=True, return_indices=True)
        column = np.full(len(wanted), MISSING)
        column[at] = kept[match]
        columns.append(column)
        _count(report, sides[0], side, columns[0][column == MISSING], len(own) - len(at))
        if side.nonmatch == "skip":
            is_row &= column != MISSING
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
        remedy = why_unmatched(side, report.listed[name]) or (
            "Write `nonmatch: skip` (drop the rows) or `nonmatch: none` (the joiner gets None) "
            "beside its path, or add the samples"
        )
        raise DatasetFormatError(
            f"{side.root}: {len(missing):,} of {report.samples:,} samples of {primary.root} have "
            f"no match here, as {', '.join(map(repr, report.listed[name]))}. {remedy}"
        )


def why_unmatched(side: JoinSide, keys: Sequence[str]) -> str:
    """Describes where the matches of samples are instead, by their keys; empty if nowhere."""
    with IndexDatabase(side.root) as index:
        elsewhere = [*(index.sample_indices(keys) or {})]
    if elsewhere:
        return (
            f"{elsewhere[0]!r} is in this dataset, but not in this split part, or excluded: join "
            "the split part that has it, or prepare both datasets with the same split"
        )
    wanted = {_last_name(key): key for key in keys}
    for key in side.keys(side.kept()[:_COMPARED]):
        if _last_name(key) in wanted:
            return (
                f"The key here is {key!r}, not {wanted[_last_name(key)]!r}: write the tars so that "
                "both have the same folders and capitals in their names"
            )
    return ""


def _last_name(key: str) -> str:
    return key.rpartition("/")[2].lower()


class _Shard(NamedTuple):
    """A shard of a split part, which one process looks up in `index.sqlite`."""

    root: PurePath
    name: str
    tar_file_id: int
    num_samples: int


def _hashes(sides: Sequence[JoinSide], num_workers: int | None) -> list[Int64Array]:
    """Returns for each dataset a hash of the key of each sample, by position."""
    if "fork" not in multiprocessing.get_all_start_methods():
        num_workers = 0  # hashes of two processes are comparable only if one is the other's copy
    tasks = []
    for side in sides:
        counts = np.diff(side.reader.starts).tolist()
        shards = zip(side.reader.shards, side.reader.tar_file_ids, counts, strict=True)
        tasks += [_Shard(side.root, *shard) for shard in shards]
    rest = ordered_results(_hashed, tasks, num_workers)
    return [np.concatenate([*islice(rest, len(side.reader.shards))]) for side in sides]


def _hashed(shard: _Shard) -> Int64Array:
    """Returns a hash of the key of each sample of a shard."""
    with IndexDatabase(shard.root) as index:
        keys = index.keys_of(shard.tar_file_id)
        for number in range(shard.num_samples):
            if number not in keys:
                raise index.error(f"sample {number} of {shard.name} has no entry")
    hashes = (hash(keys[number]) for number in range(shard.num_samples))
    return np.fromiter(hashes, np.int64, shard.num_samples)


def _check_unique(side: JoinSide, hashes: Int64Array, positions: Int64Array) -> None:
    """Checks that no key is there twice.

    Raises:
        DatasetFormatError: A key is; counts such samples, and names the first.
    """
    order = np.argsort(hashes)
    is_again = np.diff(hashes[order]) == 0
    if is_again.any():
        again = np.sort(positions[order[1:][is_again]])
        keys = ", ".join(map(repr, side.keys(again[:_LISTED])))
        raise DatasetFormatError(
            f"{side.root}: {len(again):,} samples have a key that another sample has, too, as "
            f"{keys}; a join needs each key once. List no shard twice in the split file, or rename "
            "the files in the tars and prepare again"
        )


def _rows_of_samples(side: JoinSide) -> Int64Array:
    """Returns (shard, first byte, size) of the samples of a dataset by position, shape (N + 1, 3).

    The last row stands for a missing match, whose position is -1.
    """
    root, reader = side.root, side.reader
    counts = np.diff(reader.starts).tolist()
    all_offsets = [
        read_index(root / name, count) for name, count in zip(reader.shards, counts, strict=True)
    ]
    firsts = np.concatenate([*(own[:-1] for own in all_offsets), [MISSING]])
    sizes = np.concatenate([*(np.diff(own) for own in all_offsets), [MISSING]])
    listed = np.flatnonzero(side.numbers >= 0)
    shards = np.repeat(np.append(listed, MISSING), [*counts, 1])
    return np.stack([shards, firsts, sizes], axis=1)
