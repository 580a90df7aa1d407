"""`index.sqlite`: where each sample and each of its parts lies, by sample key.

Training reads `.tar.idx` instead; this file is for joins and for access by key. It may come from
anywhere, and may hold views in place of tables, or computed values, which could keep a query busy
for ever. So both are refused, and a query may take as many steps as its file has room for.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import itemgetter
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

from typing_extensions import Self

from energon_lite.core.errors import DatasetFormatError
from energon_lite.formats.nvmeta import INDEX_SQLITE as INDEX_SQLITE
from energon_lite.formats.nvmeta import META, is_utf8
from energon_lite.storage import files
from energon_lite.storage.files import explained

T = TypeVar("T")

# Columns of the tables of the index, in the words of Energon's.
INDEX_TABLES = {
    "samples": "tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, "
    "sample_index INTEGER NOT NULL, byte_offset INTEGER, byte_size INTEGER",
    "sample_parts": "tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, "
    "content_byte_offset INTEGER, content_byte_size INTEGER",
}
# Columns that are read of the media metadata of a dataset, and the tables of them.
MEDIA_COLUMNS = {"media_metadata": "entry_key TEXT, metadata_type TEXT, metadata_json TEXT"}
_KEYS_PER_QUERY = 500
_OF_SAMPLE = (
    "FROM samples CROSS JOIN sample_parts USING (tar_file_id, sample_index) WHERE sample_key = ?"
)
_FIND_PART = (
    f"SELECT tar_file_id, sample_index, content_byte_offset, content_byte_size {_OF_SAMPLE} "
    "AND part_name = ?"
)
_PARTS_OF = f"SELECT part_name {_OF_SAMPLE}"
_FIND_SAMPLE = (
    "SELECT tar_file_id, sample_index, byte_offset, byte_size FROM samples WHERE sample_key = ?"
)
_BY_PLACE = "idx_samples_by_tar_and_idx"

# A row has at least 15 bytes, and a query of ours takes less than 60 steps for it.
_STEPS_PER_BYTE = 10
_STEPS_PER_CALL = 100_000
# Names of tables and columns, keys of samples and records of shards are shorter.
_MAX_VALUE_BYTES = 64 << 20
_LIMIT_LENGTH = 0  # SQLITE_LIMIT_LENGTH; the module has no name for it before Python 3.11


# ------------------------------------------------------------------------------------- reading


@contextmanager
def reading(path: PurePath, remedy: str) -> Iterator[None]:
    """Turns errors of SQLite into errors that name the file and the remedy."""
    try:
        yield
    except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError, MemoryError) as error:
        if "disk I/O" in str(error):
            raise explained(OSError(errno.EIO, str(error)), path) from None
        text = "holds a loop, or needs endless work" if "interrupt" in str(error) else error
        raise DatasetFormatError(f"{path}: {text}; {remedy}") from None


def read_only_uri(path: PurePath) -> str:
    """Returns the address under which SQLite opens a file as it is, without journals beside it."""
    return f"{uri_of(path)}?mode=ro&immutable=1"


def uri_of(path: PurePath) -> str:
    """Returns the address under which SQLite opens a local file."""
    return files.absolute(files.real_path(path)).as_uri()


class ReadOnlyDatabase:
    """Some tables of an SQLite file, for any thread of the process that opened it.

    Args:
        path: the file.
        tables: for each table the columns that are read, as in CREATE TABLE.
        remedy: what to do where something is wrong with the file.

    Attributes:
        tables: those of the tables that are there.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no SQLite database, a table lacks a column, or is a view.
        OSError: It cannot be opened.
    """

    def __init__(self, path: PurePath, tables: Mapping[str, str], remedy: str) -> None:
        size = files.open_bytes(path).size_bytes
        self.path = path
        self._remedy = remedy
        self._lock = threading.Lock()
        self._max_calls = 20 + size * _STEPS_PER_BYTE // _STEPS_PER_CALL
        with reading(path, remedy):
            uri = read_only_uri(path)
            self._connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
        try:
            if hasattr(self._connection, "setlimit"):
                self._connection.setlimit(_LIMIT_LENGTH, _MAX_VALUE_BYTES)
            with reading(path, remedy):
                self._connection.execute("PRAGMA trusted_schema = OFF")
                self._connection.execute("PRAGMA query_only = ON")
            self.tables = frozenset(name for name in tables if self._has(name, tables[name]))
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        """Returns the open database."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the file."""
        self._connection.close()

    def rows(self, query: str, values: Sequence[Any], *kinds: type) -> list[Any]:
        """Returns the rows of a query.

        Args:
            query: SQL, of the tables that are there.
            values: for the question marks in it.
            kinds: of each column, `str` or `int`.

        Raises:
            DatasetFormatError: The file is corrupt, or a value is of another kind.
            OSError: It cannot be read.
        """
        with self._lock, reading(self.path, self._remedy):
            # No code of Python's, in which SQLite would drop what the handler of a signal raises.
            is_too_much = chain(repeat(0, self._max_calls), repeat(1)).__next__
            self._connection.set_progress_handler(is_too_much, _STEPS_PER_CALL)
            found: list[Any] = self._connection.execute(query, values).fetchall()
        if any({*map(type, map(itemgetter(i), found))} - {kind} for i, kind in enumerate(kinds)):
            row = next(row for row in found if tuple(map(type, row)) != kinds)
            wanted = ", ".join(kind.__name__ for kind in kinds)
            raise self.error(f"has a row {row!r:.200}, where {wanted} should be")
        return found

    def error(self, text: str) -> DatasetFormatError:
        """Returns an error with the file and the remedy."""
        return DatasetFormatError(f"{self.path}: {text}; {self._remedy}")

    def _has(self, table: str, columns: str) -> bool:
        found = self.rows(
            "SELECT type, coalesce(sql, '') FROM sqlite_master WHERE name = ? COLLATE NOCASE "
            "AND type IN ('table', 'view')", (table,), str, str,
        )  # fmt: skip
        if any(kind == "view" or sql.lower().startswith("create virtual") for kind, sql in found):
            raise self.error(f"{table!r} is no plain table")
        stored = self.rows("SELECT name FROM pragma_table_xinfo(?) WHERE hidden = 0", (table,), str)
        missing = {column.split()[0] for column in columns.split(", ")} - {
            name for (name,) in stored
        }
        if found and missing:
            raise self.error(f"table {table!r} has no column {min(missing)!r}")
        return bool(found)


class Part(NamedTuple):
    """The place of a file's content in a tar; or of its sample, where the index has no parts.

    `offset` and `size` are in bytes.
    """

    tar_file_id: int
    offset: int
    size: int
    is_sample: bool


class IndexDatabase(ReadOnlyDatabase):
    """Reads `index.sqlite` of a prepared dataset, also of those that Energon made."""

    def __init__(self, root: PurePath) -> None:
        """Opens the index of the dataset at `root`.

        Raises:
            FileNotFoundError: There is no index.
            DatasetFormatError: The file is no SQLite database, or has other tables.
        """
        path = root / META / INDEX_SQLITE
        remedy = f"run `energon-lite prepare {root} --tar-index-only`"
        try:
            super().__init__(path, INDEX_TABLES, remedy)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is missing; {remedy}") from None

    def sample_indices(self, keys: Iterable[str]) -> dict[str, tuple[int, int]] | None:
        """Finds samples by key.

        Returns:
            (tar_file_id, sample_index) of each key that is there; None without a usable table.
        """
        if "samples" not in self.tables:
            return None
        # No index holds a key with half a surrogate.
        keys = [key for key in keys if is_utf8(key)]
        query = "SELECT sample_key, tar_file_id, sample_index FROM samples WHERE sample_key IN ({})"
        rows = (
            row
            for some in _chunks(keys)
            for row in self.rows(query.format(question_marks(some)), some, str, int, int)
        )
        return {key: (tar_file_id, index) for key, tar_file_id, index in rows}

    def find_part(self, sample_key: str, part: str) -> Part | None:
        """Finds one file, or its sample in an old index without parts; None if it is not there.

        Raises:
            DatasetFormatError: There is no usable table, or several samples have the key.
        """
        if "samples" not in self.tables:
            raise self.error("has no table 'samples'")
        if not is_utf8(sample_key) or not is_utf8(part):
            return None
        has_parts = "sample_parts" in self.tables
        query, values = (_FIND_PART, [part]) if has_parts else (_FIND_SAMPLE, [])
        rows = self.rows(query, [sample_key, *values], int, int, int, int)
        if len({row[:2] for row in rows}) > 1:
            raise self.error(f"several samples have the key {sample_key!r}")
        # The last of several parts of one name counts, as in a tar.
        if not rows:
            return None
        tar_file_id, _, offset, size = rows[-1]
        return Part(tar_file_id, offset, size, not has_parts)

    def parts_of(self, sample_key: str) -> list[str] | None:
        """Returns the names of a sample's parts, as far as they are known; None for no sample."""
        if not is_utf8(sample_key) or not self.rows(_FIND_SAMPLE, (sample_key,), *[int] * 4):
            return None
        if "sample_parts" not in self.tables:
            return []
        return [name for (name,) in self.rows(_PARTS_OF, (sample_key,), str)]

    def keys_at(self, places: Sequence[tuple[int, int]]) -> dict[tuple[int, int], str]:
        """Returns the keys of samples, by (tar_file_id, sample_index).

        Returns none of an old index, which would have to be read whole for it.
        """
        found: dict[tuple[int, int], str] = {}
        for some in _chunks(places):
            query = (
                f"WITH places(shard, place) AS (VALUES {','.join(['(?,?)'] * len(some))}) "
                "SELECT tar_file_id, sample_index, sample_key FROM places CROSS JOIN {} "
                "ON tar_file_id = shard AND sample_index = place"
            )
            values = [number for place in some for number in place]
            rows = self._rows_by_place(query, values, int, int, str)
            found.update(((tar_file_id, index), key) for tar_file_id, index, key in rows)
        return found

    def keys_of(self, tar_file_id: int) -> dict[int, str]:
        """Returns the keys of a shard, by sample_index; none of an old index, as `keys_at`."""
        query = "SELECT sample_index, sample_key FROM {} WHERE tar_file_id = ?"
        return dict(self._rows_by_place(query, (tar_file_id,), int, str))

    def offset_sum(self, tar_file_id: int, count: int) -> dict[int, int]:
        """Adds up where the samples of a shard begin, without the first; there must be `count`."""
        query = (
            "SELECT tar_file_id, sum(byte_offset) FROM {} WHERE tar_file_id = ? "
            "AND sample_index > 0 GROUP BY tar_file_id HAVING count(*) = ?"
        )
        return dict(self._rows_by_place(query, (tar_file_id, count), int, int))

    def last_sample(self, tar_file_id: int) -> dict[int, tuple[str, int, int]]:
        """Returns key, byte offset and byte size of the last sample of a shard, by sample_index."""
        query = (
            "SELECT sample_index, sample_key, byte_offset, byte_size FROM {} WHERE tar_file_id = ? "
            "ORDER BY sample_index DESC LIMIT 1"
        )
        rows = self._rows_by_place(query, (tar_file_id,), int, str, int, int)
        return {index: sample for index, *sample in rows}

    def _rows_by_place(self, query: str, values: Sequence[Any], *kinds: type) -> list[Any]:
        """Returns rows of the samples; none where it would have to read all samples for them."""
        names = self.rows("SELECT name FROM sqlite_master WHERE type = 'index'", (), str)
        if "samples" not in self.tables or (_BY_PLACE,) not in names:
            return []
        return self.rows(query.format(f"samples INDEXED BY {_BY_PLACE}"), values, *kinds)

    def shard_counts(self) -> dict[int, int] | None:
        """Returns the number of samples by tar_file_id; None without a usable table."""
        if "samples" not in self.tables:
            return None
        query = "SELECT tar_file_id, count(*) FROM samples GROUP BY tar_file_id"
        return dict(self.rows(query, (), int, int))

    def shard_rows(self, tar_file_id: int) -> list[tuple[int, str, int]]:
        """Returns (sample_index, key, byte offset) of each sample of a shard, in tar order."""
        return self.rows(
            "SELECT sample_index, sample_key, byte_offset FROM samples WHERE tar_file_id = ? "
            "ORDER BY sample_index", (tar_file_id,), int, str, int,
        )  # fmt: skip

    def has_unique_keys(self) -> bool:
        """Returns whether no two samples have the same key."""
        query = "SELECT count(DISTINCT sample_key), count(*) FROM samples"
        ((distinct, total),) = self.rows(query, (), int, int)
        return bool(distinct == total)

    def part_sizes(self) -> dict[str, tuple[int, int]] | None:
        """Returns (count, bytes) by part name; None in an old index without parts."""
        if "sample_parts" not in self.tables:
            return None
        rows = self.rows(
            "SELECT part_name, count(*), sum(content_byte_size) FROM sample_parts "
            "GROUP BY part_name ORDER BY min(rowid)", (), str, int, int,
        )  # fmt: skip
        return {name: (count, size) for name, count, size in rows}


def sample_indices(root: PurePath, keys: Iterable[str]) -> dict[str, tuple[int, int]] | None:
    """Finds samples as `IndexDatabase.sample_indices`; returns None also without an index."""
    try:
        with IndexDatabase(root) as index:
            return index.sample_indices(keys)
    except FileNotFoundError:
        return None


def question_marks(values: Collection[object]) -> str:
    """Returns the placeholders of a query for some values."""
    return ",".join("?" * len(values))


def _chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[i : i + _KEYS_PER_QUERY] for i in range(0, len(values), _KEYS_PER_QUERY))
