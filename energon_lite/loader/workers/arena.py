"""Memory that a worker process shares with the training loop: the batches lie in it.

A worker process has one nameless file in memory, its arena, which both processes map once: nothing
can be left behind by a kill, and a batch is sent by the place where it lies. The worker process
deals out ranges of the arena, and a range comes back when the last array or tensor of the training
loop that refers to it is gone. The arena grows when it has no room; what was freed of an arena that
had to hold much more than usual goes back to the system.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from energon_lite.storage import files

# Ranges begin at multiples of this: no two of them share a cache line.
_ALIGNMENT = 64
_MIN_BYTES = 1 << 20
_MAP_FIXED = 0x10


class FreeSpace:
    """Deals out ranges of one address space, each time the first one that is large enough.

    Attributes:
        used_bytes: size of all ranges that are out.
        holes: the free ranges as (start, end), by their place; no two of them touch.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self.holes: list[tuple[int, int]] = []

    def take(self, size: int) -> int | None:
        """Returns the start of a range that was free; None where none is so large."""
        for index, (start, end) in enumerate(self.holes):
            if end - start >= size:
                self.holes[index : index + 1] = [(start + size, end)] if end - start > size else []
                self.used_bytes += size
                return start
        return None

    def put(self, start: int, end: int) -> None:
        """Adds a free range."""
        index = bisect_left(self.holes, (start, end))
        first, last = index, index
        if index and self.holes[index - 1][1] == start:
            first, start = index - 1, self.holes[index - 1][0]
        if index < len(self.holes) and self.holes[index][0] == end:
            last, end = index + 1, self.holes[index][1]
        self.holes[first:last] = [(start, end)]


class LentRange(np.ndarray[Any, Any]):
    """A range of an arena; the array below all arrays and tensors that lie in it.

    Attributes:
        returned: where its start and size go when nothing refers to it any more.
        arena: kept as long as the range is, for forks of the training loop; None in a worker.
        is_shared: whether the worker process still uses it after it was sent.
    """

    # Views of this type have none: only the array that was made of the memory stands for the range.
    returned: deque[tuple[int, int]] | None = None
    start: int
    arena: ReadArena | None = None
    is_shared = False

    def __del__(self) -> None:
        if self.returned is not None:
            self.returned.append((self.start, self.size))


def _lent(memory: mmap.mmap, start: int, size: int, returned: deque[tuple[int, int]]) -> LentRange:
    lent = LentRange.__new__(LentRange, size, np.uint8, memory, start)
    lent.start, lent.returned = start, returned
    return lent


class Arena:
    """An arena as its worker process has it.

    Args:
        file: descriptor of the memory.
        num_deliveries: how many deliveries are to have room.

    Attributes:
        file: as above.
        length: how large the memory is.
        shared: ranges that the training loop has and that are in use here, by their start; each as
            often as it was sent.
    """

    _memory: mmap.mmap

    def __init__(self, file: int, num_deliveries: int) -> None:
        self.file = file
        self._num_deliveries = num_deliveries
        self._space = FreeSpace()
        self.length = 0
        self._usual_length = 0
        self._touched = 0  # the end of what may have memory
        self._returned: deque[tuple[int, int]] = deque()
        self._maps = weakref.WeakSet[mmap.mmap]()  # an array keeps that in which it was made
        self._made = weakref.WeakValueDictionary[int, LentRange]()  # by their addresses
        self.shared = defaultdict[int, list[LentRange]](list)

    def write(self, pieces: Sequence[Any]) -> int:
        """Copies bytes, one piece behind the other, into a free range; returns its start."""
        place = start = self._take(sum(map(len, pieces)))
        for piece in pieces:
            self._memory[place : place + len(piece)] = piece
            place += len(piece)
        return start

    def empty(self, size: int) -> LentRange:
        """Returns a free range, for an array that is to be sent."""
        start = self._take(size)
        made = _lent(self._memory, start, size, self._returned)
        self._made[_address(made.data)] = made
        return made

    def place(self, buffers: list[memoryview]) -> list[tuple[int, int]]:
        """Puts the memory of a delivery into the arena; returns the start and size of each part.

        Args:
            buffers: parts to which nothing else should refer, but for shared ones; they are taken
                out of the list. One that was made in the arena is not copied.
        """
        claims = [self._claim(part) for part in buffers]
        places = [
            (self.write([part]), len(part)) if claim is None else claim[:2]
            for part, claim in zip(buffers, claims, strict=True)
        ]
        buffers.clear()
        for index, claim in enumerate(claims):
            if claim is not None and (made := claim[2]()) is not None:
                made.returned = self._returned  # it is in use here, where it may be changed
                if made.is_shared:
                    self.shared[made.start].append(made)
                else:
                    places[index] = (self.write([made.data]), made.size)
        return places

    def _claim(self, part: memoryview) -> tuple[int, int, weakref.ref[LentRange]] | None:
        """Returns the range that was made for a part; the training loop returns it from now on."""
        made = self._made.get(_address(part))
        if made is None or made.returned is None:  # or it lies in the delivery twice
            return None
        made.returned = None
        return made.start, made.size, weakref.ref(made)

    def _take(self, size: int) -> int:
        if self._returned:
            self.put_back(())
        size = _padded_size(size)
        start = self._space.take(size)
        if start is None:
            self._grow(size)
            start = self._space.take(size)
            assert start is not None
        self._touched = max(self._touched, start + size)
        return start

    def put_back(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Takes back ranges: the start of each, and the size that was asked for."""
        dropped = [self._returned.popleft() for _ in range(len(self._returned))]
        for start, size in chain(ranges, dropped):
            if self.shared.get(start):
                self.shared[start].pop()  # when all have gone on both sides, it is dropped
                continue
            self._space.put(start, start + _padded_size(size))
            self._space.used_bytes -= _padded_size(size)
        # The training loop kept many batches for a time, and keeps them no more.
        if self._touched > max(self._usual_length, 4 * self._space.used_bytes):
            self._release(self._usual_length)

    def _grow(self, size: int) -> None:
        # A power of two: each size that is a little larger would ask for a new map.
        usual = self._num_deliveries << (size - 1).bit_length()
        self._usual_length = max(self._usual_length, usual, _MIN_BYTES)
        before, self.length = self.length, max(2 * self.length, self._usual_length)
        os.ftruncate(self.file, self.length)
        self._memory = mmap.mmap(self.file, self.length)
        self._maps.add(self._memory)
        self._space.put(before, self.length)

    def _release(self, first: int) -> None:
        """Returns the memory of free ranges from a place on to the system."""
        page = mmap.PAGESIZE
        for start, end in self._space.holes:
            begin = -(-max(start, first) // page) * page
            size = min(end, self._touched) // page * page - begin
            if size > 0 and hasattr(mmap, "MADV_REMOVE"):
                with suppress(OSError):  # not every sandbox has it
                    self._memory.madvise(mmap.MADV_REMOVE, begin, size)
        last = self._space.holes[-1] if self._space.holes else (self.length, self.length)
        end_of_used = last[0] if last[1] == self.length else self.length
        self._touched = min(self._touched, max(first, end_of_used))

    def keep_writes(self) -> None:
        """In a fork of the worker process: what the fork writes is seen by no other process."""
        _keep_writes(self._maps, self.file)

    def leave(self) -> None:
        """Ends the arena: nothing more is put into it, and what lies in it may be read for long."""
        self._release(0)
        os.close(self.file)


class ReadArena:
    """An arena as the training loop has it, which makes it.

    Attributes:
        file: descriptor of the memory.
        is_left: whether ranges stay out for good, since a fork of this process may read them.
        returned: start and size of the ranges that are to be returned.
    """

    file = -1

    def __init__(self) -> None:
        self.is_left = False
        self.file = nameless_file()
        self._memory: Any = b""
        self._maps = weakref.WeakSet[mmap.mmap]()  # with those of batches that are kept
        _read_arenas.add(self)
        self._num_lent = 0  # that were not taken from `returned`
        self.returned: deque[tuple[int, int]] = deque()

    def map(self, length: int) -> None:
        """Maps so much of the memory; what was read before keeps its own map."""
        if length > len(self._memory):
            self._memory = mmap.mmap(self.file, length)
            self._maps.add(self._memory)

    def read(self, start: int, size: int) -> LentRange:
        """Returns the bytes of a range, which is returned when nothing refers to them any more."""
        self._num_lent += 1
        lent = _lent(self._memory, start, size, self.returned)
        lent.arena = self
        return lent

    def take_returned(self, most: int) -> list[tuple[int, int]]:
        """Returns some of the ranges that the worker process may use again, once."""
        if self.is_left:
            return []
        number = min(len(self.returned), most)
        self._num_lent -= number
        return [self.returned.popleft() for _ in range(number)]

    def leave(self) -> None:
        """Prepares for a fork, which may still read what is in use now."""
        self.is_left = self.is_left or self._num_lent > len(self.returned)

    # The default is there at the end of a program, `os` may not be.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.file >= 0:
            close(self.file)


_read_arenas: weakref.WeakSet[ReadArena] = weakref.WeakSet()


def _leave_arenas() -> None:
    """Before a fork of the training loop, which may read what is in use."""
    for arena in list(_read_arenas):
        arena.leave()


def _keep_writes_of_loop() -> None:
    """In a fork of the training loop: what it writes into batches changes only its own."""
    for arena in list(_read_arenas):
        _keep_writes(arena._maps, arena.file)


os.register_at_fork(before=_leave_arenas, after_in_child=_keep_writes_of_loop)


def _keep_writes(maps: weakref.WeakSet[mmap.mmap], file: int) -> None:
    for memory in maps:
        mode = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        files.libc.mmap(_address(memoryview(memory)), len(memory), *mode, file, 0)
    maps.clear()  # a fork of the fork has what that wrote


def _address(part: memoryview) -> int:
    address: int = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
    return address


def _padded_size(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def nameless_file() -> int:
    """Returns the descriptor of a file in memory that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("batches", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
