"""SQLite files that may come from anywhere: read-only, of plain tables, with a limit on the work.

A database may hold views in place of tables, and values that are computed. Such a file could keep
a query busy for ever, so both are refused, and a query may take as many steps as its file has
room for.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.files import create, errors_of, explained, open_regular

# A row has at least 15 bytes, and a query of ours takes less than 60 steps for it.
_STEPS_PER_BYTE = 10
_STEPS_PER_CALL = 100_000
# What SQLite says where the system refuses to write.
_FAULTS = {
    "disk is full": errno.ENOSPC,
    "readonly": errno.EROFS,
    "unable to open": errno.EACCES,
    "disk I/O": errno.EIO,
}
# Names of tables and columns, keys of samples and records of shards are shorter.
_MAX_VALUE_BYTES = 64 << 20
_LIMIT_LENGTH = 0  # SQLITE_LIMIT_LENGTH; the module has no name for it before Python 3.11


@contextmanager
def reading(path: Path, way_out: str) -> Iterator[None]:
    """Turns what SQLite raises into an error that names the file, and what to do."""
    try:
        yield
    except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError, MemoryError) as error:
        text = "holds a loop, or asks for endless work" if "interrupt" in str(error) else error
        raise DatasetFormatError(f"{path}: {text}; {way_out}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what SQLite raises where it cannot write into an error of the system."""
    try:
        with errors_of(path):
            yield
    except sqlite3.OperationalError as error:
        text = str(error)
        number = next((number for words, number in _FAULTS.items() if words in text), 0)
        if not number:
            raise
        raise explained(OSError(number, os.strerror(number)), path) from None


def create_database(path: Path, tables: str) -> sqlite3.Connection:
    """Creates a database for one process; what is under its name is replaced, links themselves."""
    with writing(path):
        path.unlink(missing_ok=True)
        os.close(create(path))
        connection = sqlite3.connect(path.absolute().as_uri(), isolation_level=None, uri=True)
        # The file gets its name only when it is whole, so it need not survive a crash.
        connection.executescript(
            "PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF; PRAGMA trusted_schema = OFF;"
            "PRAGMA cache_size = -262144;" + tables
        )
    return connection


def read_only_uri(path: Path) -> str:
    """Returns the address under which SQLite opens a file as it is, without journals beside it."""
    return f"{path.absolute().as_uri()}?mode=ro&immutable=1"


class ReadOnlyDatabase:
    """Some tables of an SQLite file.

    Args:
        path: the file.
        tables: for each table the columns that are read.
        way_out: what to do where something is wrong with the file.

    Attributes:
        tables: those of the tables that are there.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no SQLite database, a table has not these columns, or is a view.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, tables: Mapping[str, Sequence[str]], way_out: str) -> None:
        descriptor = open_regular(path)
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
        self.path = path
        self._way_out = way_out
        self._calls = 0
        self._max_calls = 20 + size * _STEPS_PER_BYTE // _STEPS_PER_CALL
        with reading(path, way_out):
            self._connection = sqlite3.connect(read_only_uri(path), uri=True)
        try:
            if hasattr(self._connection, "setlimit"):
                self._connection.setlimit(_LIMIT_LENGTH, _MAX_VALUE_BYTES)
            self._connection.set_progress_handler(self._is_too_much, _STEPS_PER_CALL)
            with reading(path, way_out):
                self._connection.execute("PRAGMA trusted_schema = OFF")
                self._connection.execute("PRAGMA query_only = ON")
            self.tables = frozenset(name for name in tables if self._has(name, tables[name]))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Returns the open database."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the file."""
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def rows(self, query: str, values: Sequence[Any], *kinds: type) -> list[Any]:
        """Returns the rows that a query has.

        Args:
            query: SQL, of the tables that are there.
            values: for the question marks in it.
            kinds: of each column, `str` or `int`.

        Raises:
            DatasetFormatError: The file is damaged, or a value of another kind.
        """
        self._calls = 0
        found: list[Any] = []
        with reading(self.path, self._way_out):
            for row in self._connection.execute(query, values):
                if tuple(map(type, row)) != kinds:
                    raise DatasetFormatError(
                        f"{self.path}: has a row {row!r:.200}, where "
                        f"{', '.join(kind.__name__ for kind in kinds)} should be; {self._way_out}"
                    )
                found.append(row)
        return found

    def _is_too_much(self) -> bool:
        self._calls += 1
        return self._calls > self._max_calls

    def _has(self, table: str, columns: Sequence[str]) -> bool:
        found = self.rows(
            "SELECT type, coalesce(sql, '') FROM sqlite_master WHERE name = ? COLLATE NOCASE "
            "AND type IN ('table', 'view')", (table,), str, str,
        )  # fmt: skip
        if not found:
            return False
        is_plain = all(
            kind == "table" and not sql.lower().startswith("create virtual") for kind, sql in found
        )
        stored = self.rows("SELECT name FROM pragma_table_xinfo(?) WHERE hidden = 0", (table,), str)
        missing = set(columns) - {name for (name,) in stored}
        if missing or not is_plain:
            what = (
                f"table {table!r} has no column {min(missing)!r}"
                if is_plain
                else f"{table!r} is no plain table"
            )
            raise DatasetFormatError(f"{self.path}: {what}; {self._way_out}")
        return True
