"""Writes `index.sqlite`, and asks it what only preparing a dataset needs to know."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from functools import partial
from pathlib import PurePath
from typing import NamedTuple

from energon_lite.formats.sqlite import (
    INDEX_TABLES,
    MEDIA_COLUMNS,
    ReadOnlyDatabase,
    question_marks,
    read_only_uri,
    reading,
    uri_of,
)
from energon_lite.storage import files
from energon_lite.storage.files import errors_of, explained

_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq
    ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(
    tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""
_MEDIA_TABLES = {
    "media_metadata": "entry_key TEXT PRIMARY KEY, metadata_type TEXT NOT NULL, "
    "metadata_json TEXT NOT NULL",
    "media_filters": "filter_id INTEGER PRIMARY KEY AUTOINCREMENT, strategy TEXT NOT NULL, "
    "patterns TEXT, created_at_utc TEXT DEFAULT CURRENT_TIMESTAMP, UNIQUE(strategy, patterns)",
}
_FILTER_COLUMNS = {"media_filters": "strategy TEXT, patterns TEXT, created_at_utc TEXT"}
# The rows of one shard, by field of `ShardRows`, from which `new_index` takes them.
_SHARD_TABLES = {
    "shard_samples": "sample_index INTEGER PRIMARY KEY, sample_key TEXT, byte_offset INTEGER, "
    "byte_size INTEGER",
    "shard_parts": "sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER, "
    "content_byte_size INTEGER",
    "shard_media": MEDIA_COLUMNS["media_metadata"],
}
_ROWS_AGAIN = "remove the folder {}, and run the same command again"
# Words of SQLite where the system refuses to write.
_FAULTS = {
    "disk is full": errno.ENOSPC,
    "readonly": errno.EROFS,
    "unable to open": errno.EACCES,
    "disk I/O": errno.EIO,
}


# ------------------------------------------------------------------------------------- asking


def has_whole_sample(index: PurePath, groups: Sequence[Collection[str]]) -> bool:
    """Whether a sample has a part of each group."""
    having = " AND ".join(f"max(part_name IN ({question_marks(group)}))" for group in groups)
    query = (
        "SELECT 1 FROM sample_parts GROUP BY tar_file_id, sample_index "
        f"HAVING {having or 'true'} LIMIT 1"
    )
    with ReadOnlyDatabase(index, INDEX_TABLES, "prepare again") as database:
        return bool(database.rows(query, [part for group in groups for part in group], int))


def counts_of_groups(index: PurePath, groups: Sequence[Collection[str]]) -> list[int]:
    """Counts the samples that have a part of each group."""
    count = (
        "SELECT count(*) FROM (SELECT DISTINCT tar_file_id, sample_index FROM sample_parts "
        "WHERE part_name IN ({}))"
    )
    with ReadOnlyDatabase(index, INDEX_TABLES, "prepare again") as database:
        return [database.rows(count.format(question_marks(g)), list(g), int)[0][0] for g in groups]


def largest_sample(index: PurePath, parts: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the key of the sample with most of some parts, and all of its parts, in order."""
    query = (
        "SELECT sample_key, part_name FROM sample_parts JOIN samples USING (tar_file_id, "
        "sample_index) WHERE (tar_file_id, sample_index) = (SELECT tar_file_id, sample_index FROM "
        f"sample_parts WHERE part_name IN ({question_marks(parts)}) GROUP BY 1, 2 "
        "ORDER BY count(*) DESC LIMIT 1) ORDER BY content_byte_offset"
    )
    with ReadOnlyDatabase(index, INDEX_TABLES, "prepare again") as database:
        rows = database.rows(query, parts, str, str)
    return rows[0][0], [part for _, part in rows]


# ------------------------------------------------------------------------------------- writing


@contextmanager
def _writing(path: PurePath) -> Iterator[None]:
    """Turns errors of SQLite where it cannot write into errors of the system."""
    try:
        with errors_of(path):
            yield
    except sqlite3.OperationalError as error:
        text = str(error)
        number = next((number for words, number in _FAULTS.items() if words in text), 0)
        if not number:
            raise
        raise explained(OSError(number, os.strerror(number)), path) from None


def _new_database(path: PurePath, tables: Mapping[str, str]) -> sqlite3.Connection:
    """Creates a database for one process; what has its name is replaced, also a link."""
    with _writing(path):
        files.create(path)
        connection = sqlite3.connect(uri_of(path), isolation_level=None, uri=True)
        # The file gets its name only when it is whole, so it need not survive a crash.
        connection.executescript(
            "PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF; PRAGMA trusted_schema = OFF;"
            "PRAGMA cache_size = -262144;"
            + "".join(f"CREATE TABLE {name} ( {columns} );" for name, columns in tables.items())
        )
    return connection


class ShardRows(NamedTuple):
    """The rows of one shard.

    Attributes:
        samples: (sample_index, key, byte offset, byte size) per sample.
        parts: (sample_index, part name, content offset, content size) per part.
        media: (entry key, type, JSON) per file with media metadata.
    """

    samples: list[tuple[int, str, int, int]]
    parts: list[tuple[int, str, int, int]]
    media: Sequence[tuple[str, str, str]] = ()

    def write(self, path: PurePath) -> None:
        """Writes the rows to a small database."""
        with closing(_new_database(path, _SHARD_TABLES)) as connection, _writing(path):
            connection.execute("BEGIN")
            for (table, columns), rows in zip(_SHARD_TABLES.items(), self, strict=True):
                marks = question_marks(columns.split(", "))
                connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
            connection.execute("COMMIT")


def read_offsets(path: PurePath) -> tuple[str, list[int]]:
    """Returns the first key, and the values of `.tar.idx`, of a shard with rows in a file.

    Raises:
        DatasetFormatError: The file is corrupt.
    """
    with ReadOnlyDatabase(path, _SHARD_TABLES, _ROWS_AGAIN.format(path.parent)) as database:
        query = "SELECT byte_offset, byte_size FROM shard_samples ORDER BY sample_index"
        rows = database.rows(query, (), int, int)
        query = "SELECT sample_key FROM shard_samples WHERE sample_index = 0"
        ((first_key,),) = database.rows(query, (), str)
    return first_key, [*(offset for offset, _ in rows), sum(rows[-1])]


# Offset and size of each part of each sample, by key and part name.
Members = dict[str, dict[str, tuple[int, int]]]


def shard_members(path: PurePath) -> Members:
    """Returns the members of a shard with rows in a file.

    Raises:
        DatasetFormatError: The file is corrupt.
    """
    query = (
        "SELECT sample_key, part_name, content_byte_offset, content_byte_size FROM shard_samples "
        "JOIN shard_parts USING (sample_index) ORDER BY sample_index"
    )
    found: Members = {}
    with ReadOnlyDatabase(path, _SHARD_TABLES, _ROWS_AGAIN.format(path.parent)) as database:
        for key, part, offset, size in database.rows(query, (), str, str, int, int):
            found.setdefault(key, {})[part] = offset, size
    return found


@contextmanager
def new_index(
    path: PurePath, media_filter: tuple[str, str] | None = None, *, has_samples: bool = True
) -> Iterator[Callable[..., int | None]]:
    """Creates an index database; the caller moves it to its place.

    Args:
        path: where to.
        media_filter: strategy and patterns by which files with media metadata were chosen.
        has_samples: whether the dataset consists of samples, and not of other files.

    Yields:
        The function that adds the rows of a shard: a file that `ShardRows.write` made, the
        position of the shard in `.info.json`, and a prefix for its keys. If an earlier shard has a
        sample of the same key, it adds nothing, and returns that shard's position. It raises a
        DatasetFormatError if the file is corrupt.

    Raises:
        OSError: There is no room for the database.
    """
    tables = {**(INDEX_TABLES if has_samples else {}), **(_MEDIA_TABLES if media_filter else {})}
    with closing(_new_database(path, tables)) as connection:
        try:
            if media_filter:
                connection.execute(_ADD_FILTER, media_filter)
            yield partial(_add_rows, connection, path, tables.keys())
            if has_samples:
                with _writing(path):
                    connection.executescript(_INDEXES)
        except BaseException:
            files.remove(path)
            raise


_ADD_FILTER = "INSERT INTO media_filters(strategy, patterns) VALUES (?, ?)"


def _add_rows(
    connection: sqlite3.Connection,
    path: PurePath,
    tables: Collection[str],
    rows: PurePath,
    tar_file_id: int,
    prefix: str = "",
) -> int | None:
    execute = connection.execute
    with reading(rows, _ROWS_AGAIN.format(rows.parent)), _writing(path):
        execute("ATTACH ? AS shard", (read_only_uri(rows),))
        execute("BEGIN")
        try:
            if "media_metadata" in tables:
                execute("INSERT OR REPLACE INTO media_metadata SELECT * FROM shard_media")
            if "samples" in tables:
                execute(
                    "INSERT INTO samples SELECT ?, ? || sample_key, sample_index, byte_offset, "
                    "byte_size FROM shard_samples ORDER BY sample_index",
                    (tar_file_id, prefix),
                )
                execute("INSERT INTO sample_parts SELECT ?, * FROM shard_parts", (tar_file_id,))
        except sqlite3.IntegrityError:
            execute("ROLLBACK")
            both = "SELECT tar_file_id FROM samples JOIN shard_samples USING (sample_key) LIMIT 1"
            ((earlier,),) = execute(both).fetchall()
            execute("DETACH shard")
            return int(earlier)
        execute("COMMIT")
        execute("DETACH shard")
    return None


# -------------------------------------------------------------------------------- media metadata

_ENTRIES = (
    "SELECT sample_key || '.' || part_name AS entry, content_byte_offset, content_byte_size "
    "FROM {0}.samples CROSS JOIN {0}.sample_parts USING (tar_file_id, sample_index)"
)


def keep_media(path: PurePath, old: PurePath, is_there: Callable[[str], bool] | None = None) -> int:
    """Adds the media metadata of an old index to a new one, if the files are still the same.

    A file of a sample is the same if it has the same name, size and place in its tar. Metadata
    that the new index has already stay.

    Args:
        path: the new index, in the hands of this process.
        old: the one that it will replace.
        is_there: returns whether a file is there, for a folder of files, which has no samples.

    Returns:
        The number of entries of the old index that are not in the new one.

    Raises:
        DatasetFormatError: The old index is corrupt.
    """
    remedy = f"remove {old}, and run the same command again"
    wanted = {**INDEX_TABLES, **MEDIA_COLUMNS, **_FILTER_COLUMNS}
    try:
        with ReadOnlyDatabase(old, wanted, remedy) as database:
            tables = database.tables
    except FileNotFoundError:
        return 0
    if not tables >= MEDIA_COLUMNS.keys() | _FILTER_COLUMNS.keys():
        return 0
    with (
        _writing(path),
        closing(sqlite3.connect(files.real_path(path), isolation_level=None)) as connection,
        reading(old, remedy),
    ):
        execute = connection.execute
        for setting in ("trusted_schema = OFF", "synchronous = OFF", "journal_mode = MEMORY"):
            execute(f"PRAGMA {setting}")
        execute("ATTACH ? AS old", (read_only_uri(old),))
        execute("BEGIN")
        dropped = _take_over(connection, tables, is_there)
        execute("COMMIT")
        return dropped


def _take_over(
    connection: sqlite3.Connection, tables: Set[str], is_there: Callable[[str], bool] | None
) -> int:
    """Copies media metadata of the database `old` into `main`; returns how many entries it did not.

    Args:
        connection: to both.
        tables: those of the old database.
        is_there: as in `keep_media`.
    """
    execute = connection.execute
    for table, columns in _MEDIA_TABLES.items():
        execute(f"CREATE TABLE IF NOT EXISTS {table} ( {columns} )")
    if execute("SELECT 1 FROM main.sqlite_master WHERE name = 'samples'").fetchone() is None:
        connection.create_function("is_there", 1, is_there)
        same = "is_there(entry_key)"
    elif tables >= INDEX_TABLES.keys():
        both = f"{_ENTRIES.format('main')} INTERSECT {_ENTRIES.format('old')}"
        same = f"entry_key IN (SELECT entry FROM ({both}))"
    else:
        same = "false"
    execute(f"INSERT OR IGNORE INTO main.media_metadata SELECT * FROM ({_OLD_MEDIA}) WHERE {same}")
    filters = "SELECT strategy, patterns, created_at_utc FROM {}.media_filters ORDER BY rowid"
    newest = execute(filters.format("main")).fetchall()
    execute("DELETE FROM main.media_filters")
    execute("DELETE FROM main.sqlite_sequence")
    execute(f"{_KEEP_FILTER} {filters.format('old')}")
    connection.executemany(f"{_KEEP_FILTER} VALUES (?, ?, ?)", newest)
    ((dropped,),) = execute(
        f"SELECT count(*) FROM ({_OLD_MEDIA}) "
        "WHERE entry_key NOT IN (SELECT entry_key FROM main.media_metadata)"
    )
    return int(dropped)


_KEEP_FILTER = "INSERT OR IGNORE INTO main.media_filters(strategy, patterns, created_at_utc)"
_OLD_MEDIA = "SELECT entry_key, metadata_type, metadata_json FROM old.media_metadata"
