"""A queue of rows of integers in memory that two processes share: one writes, the other one reads.

Neither makes a system call as long as the other one keeps up. Who has to wait sets a word in the
same memory, and is woken by a bell. There is no lock: each word has one process that writes it, so
a process may be killed at any moment, and a row that it was writing is never seen.

The counts are words of 64 bits at places that are multiples of eight bytes, and CPython copies such
a word at once (`memoryview` with format "Q"; `struct` with a byte order would write single bytes).
What is visible in which order is another matter. x86 may read a word before its last writes are
visible to others, and ARM may change the order of any reads and writes, so `_fence` keeps what is
before it before what is behind it, and `_order` does where x86 does so by itself:

- a row, and what it refers to, is written before the count of written rows, and read after it;
- it was read before the count of read rows lets the writer use its memory again;
- who has to wait sets the word before it looks a last time, and the other one writes its count
  before it looks whether someone waits. So at least one of them sees what the other one wrote.
"""

from __future__ import annotations

import os
import platform
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_WORD = 8
# Words of the head, each in another cache line.
_WRITTEN, _READ, _READER_WAITS, _WRITER_WAITS = range(0, 32, 8)
_HEAD = 32
_ONE = struct.pack("=Q", 1)
_IS_X86 = platform.machine() == "x86_64"


class Bell:
    """Wakes a process up.

    It is an `eventfd` where the kernel has such: one file instead of the two of a pipe.

    Args:
        files: descriptors, the first to wait at and the last to ring; None makes them.
    """

    def __init__(self, files: Sequence[int] | None = None) -> None:
        self.files: list[int] = []
        if files is None:
            files = (os.eventfd(0, os.EFD_CLOEXEC),) if hasattr(os, "eventfd") else os.pipe()
        self.files += files

    def ring(self) -> None:
        """Wakes who waits, or who waits next."""
        os.write(self.files[-1], _ONE)

    def wait(self) -> None:
        """Waits until the bell was rung since the last wait."""
        os.read(self.files[0], _WORD)

    # The default is there at the end of a program, `os` may not be.
    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Closes the descriptors."""
        while self.files:
            close(self.files.pop())

    __del__ = close


class SharedRing:
    """One end of a queue of rows.

    Args:
        memory: shared by both ends; zeros at first.
        num_rows: how many rows are written and not read, at most.
        num_columns: integers of a row.

    Attributes:
        num_rows: as above.
    """

    def __init__(self, memory: memoryview, num_rows: int, num_columns: int) -> None:
        self.num_rows = num_rows
        self._words = memory.cast("Q")
        self._memory = memory
        self._row = struct.Struct(f"@{num_columns}Q")
        self._count = 0  # rows that this end has written, or read
        self._lock = threading.Lock()

    @staticmethod
    def num_bytes(num_rows: int, num_columns: int) -> int:
        """Returns how much memory a ring has."""
        return (_HEAD + num_rows * num_columns) * _WORD

    def _place(self, index: int) -> int:
        return _HEAD * _WORD + index % self.num_rows * self._row.size

    def _fence(self) -> None:
        """Keeps all reads and writes before it before all those behind it, for other processes.

        Taking a lock has acquire order, and releasing it has release order: what is before the
        first release stays before it, what is behind the second taking stays behind it, and on ARM
        these two stay in order. On x86 each of them is a full fence.
        """
        with self._lock:
            pass
        with self._lock:
            pass

    def _order(self) -> None:
        """As `_fence`, but lets reads pass the writes before it; on x86 that needs nothing."""
        if not _IS_X86:
            self._fence()

    # ----------------------------------------------------------------------------- the writer

    @property
    def num_unread(self) -> int:
        """How many rows the reader is not done with; the memory of others may be used again."""
        count = self._count - self._words[_READ]
        self._order()
        return count

    @property
    def num_free(self) -> int:
        """How many rows may be written."""
        return self.num_rows - self.num_unread

    def put(self, rows: Iterable[Sequence[int]]) -> bool:
        """Writes rows, for which there is room.

        Returns:
            Whether the reader waits for them, so that the bell is to be rung.
        """
        first = self._count + 1
        for row in rows:
            self._row.pack_into(self._memory, self._place(self._count), *row)
            self._count += 1
        self._order()
        self._words[_WRITTEN] = self._count
        self._fence()
        return first <= self._words[_READER_WAITS] <= self._count

    def lacks_room(self, most: int | None = None, until: int | None = None) -> bool:
        """Whether no row may be written as too many are unread; then the reader will ring.

        Args:
            most: how many may be unread; by default all rows.
            until: the reader rings when no more than these are unread; by default one less.
        """
        most = self.num_rows if most is None else most
        if self.num_unread < most:
            return False
        self._words[_WRITER_WAITS] = self._count - (most - 1 if until is None else until)
        self._fence()
        return self.num_unread >= most

    @property
    def is_awaited(self) -> bool:
        """Whether the reader may wait for more rows than there are."""
        return self._words[_READER_WAITS] > self._count

    # ----------------------------------------------------------------------------- the reader

    def peek(self) -> Any:
        """Returns the next row, which stays; None if there is none."""
        if self._words[_WRITTEN] == self._count:
            return None
        self._order()
        return self._row.unpack_from(self._memory, self._place(self._count))

    def drop(self) -> bool:
        """Ends the use of the next row, and of what it refers to.

        Returns:
            Whether the writer waits for that, so that the bell is to be rung.
        """
        self._order()
        self._count += 1
        self._words[_READ] = self._count
        self._fence()
        return self._words[_WRITER_WAITS] == self._count

    def is_empty(self, num: int = 1) -> bool:
        """Whether there is no row; then the writer will ring when there are `num`."""
        if self._words[_WRITTEN] != self._count:
            return False
        self._words[_READER_WAITS] = self._count + num
        self._fence()
        return self._words[_WRITTEN] == self._count
