"""`index.sqlite`: where each sample and each of its parts lies, by sample key.

Training reads `.tar.idx` instead; this file is for joins and for access by key.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.tar_index import META

INDEX_SQLITE = "index.sqlite"

_TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL,
    sample_key TEXT NOT NULL UNIQUE,
    sample_index INTEGER NOT NULL,
    byte_offset INTEGER,
    byte_size INTEGER
);
CREATE TABLE sample_parts (
    tar_file_id INTEGER,
    sample_index INTEGER,
    part_name TEXT,
    content_byte_offset INTEGER,
    content_byte_size INTEGER
);
"""
_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq
    ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(
    tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""
# One shard's rows, as a worker writes them. `sample_index` is the row's id.
_SHARD_TABLES = """
CREATE TABLE shard_samples (
    sample_index INTEGER PRIMARY KEY, sample_key TEXT, byte_offset INTEGER, byte_size INTEGER);
CREATE TABLE shard_parts (
    sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER, content_byte_size INTEGER);
CREATE TABLE record (content TEXT);
"""
_KEYS_PER_QUERY = 500


class DuplicateKeyError(DatasetFormatError):
    """Two shards hold a sample of the same key."""

    def __init__(self, key: str, tar_file_id: int) -> None:
        """Names the key, and the shard that had it first."""
        super().__init__(f"sample key {key!r} is there twice")
        self.key = key
        self.tar_file_id = tar_file_id


def _create(path: Path, tables: str) -> sqlite3.Connection:
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path, isolation_level=None)
    # The file gets its name only when it is whole, so it need not survive a crash.
    connection.executescript(
        "PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF;"
        "PRAGMA cache_size = -262144;" + tables
    )
    return connection


def _open_read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)


class ShardRows:
    """The rows of one shard, in a small database of its own.

    Attributes:
        samples: (sample_index, key, byte offset, byte size) per sample.
        parts: (sample_index, part name, content offset, content size) per part.
    """

    def __init__(self) -> None:
        """Makes an empty set of rows."""
        self.samples: list[tuple[int, str, int, int]] = []
        self.parts: list[tuple[int, str, int, int]] = []

    def write(self, path: Path, record: str) -> None:
        """Writes the rows, and a text that tells what they were made from, at once."""
        temporary = path.with_name(path.name + ".tmp")
        connection = _create(temporary, _SHARD_TABLES)
        try:
            connection.execute("BEGIN")
            connection.executemany("INSERT INTO shard_samples VALUES (?, ?, ?, ?)", self.samples)
            connection.executemany("INSERT INTO shard_parts VALUES (?, ?, ?, ?)", self.parts)
            connection.execute("INSERT INTO record VALUES (?)", (record,))
            connection.execute("COMMIT")
        finally:
            connection.close()
        temporary.replace(path)


def read_record(path: Path) -> str | None:
    """Gives the record of a file that `ShardRows.write` made; None where there is none."""
    if not path.is_file():
        return None
    try:
        connection = _open_read_only(path)
        try:
            row = connection.execute("SELECT content FROM record").fetchone()
        finally:
            connection.close()
    except sqlite3.DatabaseError:
        return None
    return None if row is None else str(row[0])


def read_offsets(path: Path) -> list[int]:
    """Gives the values of `.tar.idx` from a file that `ShardRows.write` made."""
    connection = _open_read_only(path)
    try:
        rows = connection.execute(
            "SELECT byte_offset, byte_size FROM shard_samples ORDER BY sample_index"
        ).fetchall()
    finally:
        connection.close()
    offsets = [offset for offset, _ in rows]
    return [*offsets, sum(rows[-1])] if rows else offsets


class IndexWriter:
    """Makes an index database of the rows of all shards; the caller moves it to its place."""

    def __init__(self, path: Path) -> None:
        """Starts the database at `path`; an existing file is replaced."""
        self.path = path
        self.connection = _create(path, _TABLES)

    def add(self, rows: Path, tar_file_id: int) -> None:
        """Takes over the rows of one shard.

        Args:
            rows: a file that `ShardRows.write` made.
            tar_file_id: position of the shard in `.info.json`.

        Raises:
            DuplicateKeyError: An earlier shard has a sample of the same key.
        """
        execute = self.connection.execute
        execute("ATTACH ? AS shard", (str(rows),))
        try:
            execute("BEGIN")
            try:
                execute(
                    "INSERT INTO samples SELECT ?, sample_key, sample_index, byte_offset, "
                    "byte_size FROM shard_samples ORDER BY sample_index",
                    (tar_file_id,),
                )
            except sqlite3.IntegrityError:
                row = execute(
                    "SELECT sample_key, tar_file_id FROM samples JOIN shard_samples "
                    "USING (sample_key) WHERE tar_file_id <> ? LIMIT 1",
                    (tar_file_id,),
                ).fetchone()
                raise DuplicateKeyError(*row) from None
            execute("INSERT INTO sample_parts SELECT ?, * FROM shard_parts", (tar_file_id,))
        finally:
            execute("COMMIT")
            execute("DETACH shard")

    def finish(self) -> None:
        """Makes the indexes and closes the file."""
        self.connection.executescript(_INDEXES)
        self.connection.close()

    def abort(self) -> None:
        """Closes and removes the file."""
        self.connection.close()
        self.path.unlink(missing_ok=True)


class IndexDatabase:
    """Reads `index.sqlite` of a prepared dataset, also of those that Energon made."""

    def __init__(self, root: Path) -> None:
        """Opens the index of the dataset at `root`.

        Raises:
            FileNotFoundError: There is no index.
            DatasetFormatError: The file is no SQLite database.
        """
        self.path = root / META / INDEX_SQLITE
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{self.path} is missing; run `energon-lite prepare {root} --tar-index-only`"
            )
        self.connection = _open_read_only(self.path)
        try:
            rows = self.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            self.tables = frozenset(name for (name,) in rows)
        except sqlite3.DatabaseError as error:
            self.connection.close()
            raise DatasetFormatError(
                f"{self.path}: {error}; run `energon-lite prepare {root} --tar-index-only`"
            ) from None

    def __enter__(self) -> Self:
        """Gives the open index."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the file."""
        self.connection.close()

    def sample_indices(self, keys: Iterable[str]) -> dict[str, tuple[int, int]] | None:
        """Finds samples by key.

        Returns:
            (tar_file_id, sample_index) of each key that is there; None without a usable table.
        """
        if "samples" not in self.tables:
            return None
        found: dict[str, tuple[int, int]] = {}
        wanted = list(keys)
        for start in range(0, len(wanted), _KEYS_PER_QUERY):
            some = wanted[start : start + _KEYS_PER_QUERY]
            marks = ",".join("?" * len(some))
            for key, tar_file_id, sample_index in self.connection.execute(
                f"SELECT sample_key, tar_file_id, sample_index FROM samples "
                f"WHERE sample_key IN ({marks})",
                some,
            ):
                found[key] = (tar_file_id, sample_index)
        return found

    def sample_parts(self, tar_file_id: int, sample_index: int) -> list[tuple[str, int, int]]:
        """Gives (part name, content offset, content size) of one sample, in tar order.

        Empty where the sample is not there, or the index is an old one without parts.
        """
        if "sample_parts" not in self.tables:
            return []
        return self.connection.execute(
            "SELECT part_name, content_byte_offset, content_byte_size FROM sample_parts "
            "WHERE tar_file_id = ? AND sample_index = ? ORDER BY content_byte_offset",
            (tar_file_id, sample_index),
        ).fetchall()

    def shard_counts(self) -> dict[int, int] | None:
        """Gives the number of samples by tar_file_id; None without a usable table."""
        if "samples" not in self.tables:
            return None
        rows: Sequence[tuple[int, int]] = self.connection.execute(
            "SELECT tar_file_id, count(*) FROM samples GROUP BY tar_file_id"
        ).fetchall()
        return dict(rows)

    def shard_rows(self, tar_file_id: int) -> list[tuple[str, int, int]]:
        """Gives (key, byte offset, byte size) of each sample of a shard, in tar order."""
        return self.connection.execute(
            "SELECT sample_key, byte_offset, byte_size FROM samples WHERE tar_file_id = ? "
            "ORDER BY sample_index",
            (tar_file_id,),
        ).fetchall()

    def has_unique_keys(self) -> bool:
        """Tells whether no two samples have the same key."""
        row = self.connection.execute("SELECT count(DISTINCT sample_key), count(*) FROM samples")
        distinct, total = row.fetchone()
        return bool(distinct == total)

    def part_sizes(self) -> dict[str, tuple[int, int]] | None:
        """Gives (count, bytes) by part name; None in an old index without parts."""
        if "sample_parts" not in self.tables:
            return None
        rows = self.connection.execute(
            "SELECT part_name, count(*), sum(content_byte_size) FROM sample_parts "
            "GROUP BY part_name ORDER BY min(rowid)"
        )
        return {name: (count, size) for name, count, size in rows}


def has_sample_with(index: Path, groups: Sequence[Collection[str]]) -> bool:
    """Returns whether a sample has a part of each group, by an index that `IndexWriter` wrote."""
    having = " AND ".join(f"max(part_name IN ({_marks(group)}))" for group in groups)
    query = (
        "SELECT 1 FROM sample_parts GROUP BY tar_file_id, sample_index "
        f"HAVING {having or 'true'} LIMIT 1"
    )
    parts = [part for group in groups for part in group]
    with closing(_open_read_only(index)) as connection:
        return connection.execute(query, parts).fetchone() is not None


def count_samples_with(index: Path, group: Collection[str]) -> int:
    """Counts the samples that have a part of a group."""
    query = (
        "SELECT count(*) FROM (SELECT DISTINCT tar_file_id, sample_index FROM sample_parts "
        f"WHERE part_name IN ({_marks(group)}))"
    )
    with closing(_open_read_only(index)) as connection:
        count: int = connection.execute(query, list(group)).fetchone()[0]
    return count


def _marks(values: Collection[str]) -> str:
    return ",".join("?" * len(values))


def sample_indices(root: Path, keys: Iterable[str]) -> dict[str, tuple[int, int]] | None:
    """Finds samples of a prepared dataset by key.

    Returns:
        (tar_file_id, sample_index) of each key that is there; None where there is no index, or
        no usable table in it.

    Raises:
        DatasetFormatError: The index is no SQLite database.
    """
    try:
        with IndexDatabase(root) as index:
            return index.sample_indices(keys)
    except FileNotFoundError:
        return None
