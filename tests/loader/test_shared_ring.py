"""A queue in shared memory: what is read, who waits, and who wakes whom."""

from __future__ import annotations

import mmap
import os
import random
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.loader.shared_ring import Bell, SharedRing


def made_memory(num_rows: int, num_columns: int = 2) -> memoryview:
    return memoryview(mmap.mmap(-1, SharedRing.num_bytes(num_rows, num_columns)))


@given(st.integers(1, 5), st.lists(st.integers(0, 5), max_size=60))
def test_rows_are_read_in_order_and_never_more_are_unread_than_fit(num_rows, actions) -> None:
    memory = made_memory(num_rows)
    writer, reader = SharedRing(memory, num_rows, 2), SharedRing(memory, num_rows, 2)
    unread: deque[tuple[int, int]] = deque()
    count = 0
    for action in actions:
        assert writer.num_unread == len(unread)
        assert writer.num_free == num_rows - len(unread)
        assert reader.peek() == (unread[0] if unread else None)
        if action < writer.num_free:
            rows = [(count + i, 2**64 - 1 - count) for i in range(action)]
            unread.extend(rows)
            count += len(rows)
            waits = reader.is_empty()
            assert writer.put(rows) == (waits and bool(rows))
        elif unread:
            waits = writer.lacks_room()
            assert waits == (len(unread) == num_rows)
            unread.popleft()
            assert reader.drop() == waits


def test_who_has_found_what_it_waited_for_is_not_woken_again() -> None:
    memory = made_memory(3)
    writer, reader = SharedRing(memory, 3, 2), SharedRing(memory, 3, 2)
    assert reader.is_empty()
    assert writer.put([(1, 1), (2, 2)])  # the first of them was waited for
    assert not writer.put([(3, 3)])
    assert writer.lacks_room()
    assert reader.drop()
    assert not reader.drop()
    assert not writer.lacks_room()
    reader.drop()
    assert not writer.put([(4, 4)])  # the reader has not looked
    assert not reader.is_empty()


def test_bell_that_was_rung_before_the_wait_ends_it_at_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    bell.wait()
    if len(bell.files) == 2:  # a pipe
        bell.wait()
    assert not select.select([bell.files[0]], [], [], 0)[0]
    files = [*bell.files]
    bell.close()
    bell.close()
    for file in files:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(file)


def test_bell_is_a_pipe_where_the_kernel_has_no_eventfd(monkeypatch) -> None:
    monkeypatch.delattr(os, "eventfd")
    bell = Bell()
    assert len(bell.files) == 2
    bell.ring()
    bell.wait()
    assert not select.select([bell.files[0]], [], [], 0)[0]


@contextmanager
def forked(run: Callable[[], None]) -> Iterator[int]:
    """Runs a function in another process during a `with` block."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def pauses(kind: str) -> Iterator[float]:
    """How long a process works on each row, in seconds."""
    numbers = random.Random(kind)
    while True:
        yield {"none": 0.0, "random": numbers.choice((0, 0, 0, 0.0002)), "long": 0.001}[kind]


def write_all(ring: SharedRing, num_rows: int, kind: str, has_row: Bell, has_room: Bell) -> None:
    for number, pause in zip(range(num_rows), pauses(kind), strict=False):
        time.sleep(pause) if pause else None
        while ring.lacks_room():
            has_room.wait()
        if ring.put([(number, number**2)]):
            has_row.ring()


@pytest.mark.parametrize(("writer", "reader"), [
    ("none", "none"), ("random", "random"), ("none", "long"), ("long", "none"),
    ("random", "none"), ("none", "random"),
])  # fmt: skip
@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_two_processes_of_any_speed_never_wait_for_each_other(writer, reader, capacity) -> None:
    """A wake-up that is lost would stop both for ever: neither looks again after some time."""
    num_rows = 300 if "long" in (writer, reader) else 3_000
    memory, has_row, has_room = made_memory(capacity), Bell(), Bell()
    poll = select.poll()
    poll.register(has_row.files[0], select.POLLIN)

    def write() -> None:
        ring = SharedRing(memory, capacity, 2)
        write_all(ring, num_rows, writer, has_row, has_room)

    ring = SharedRing(memory, capacity, 2)
    with forked(write):
        for number, pause in zip(range(num_rows), pauses(reader), strict=False):
            while ring.is_empty():
                assert poll.poll(20_000), f"nothing came after row {number}"
                has_row.wait()
            assert ring.peek() == (number, number**2)
            time.sleep(pause) if pause else None
            if ring.drop():
                has_room.ring()
        assert ring.is_empty()


def test_what_a_killed_writer_had_written_is_read_and_nothing_else() -> None:
    numbers = random.Random(0)
    for _ in range(20):
        memory, has_row, has_room = made_memory(1_000), Bell(), Bell()

        def write(memory: memoryview = memory, bells: tuple[Bell, Bell] = (has_row, has_room)):
            write_all(SharedRing(memory, 1_000, 2), 1_000, "none", *bells)

        ring = SharedRing(memory, 1_000, 2)
        with forked(write):
            time.sleep(numbers.uniform(0, 0.008))
        count = 0
        while (row := ring.peek()) is not None:
            assert row == (count, count**2)
            ring.drop()
            count += 1
        assert count <= 1_000


@given(st.integers(1, 6), st.integers(0, 5), st.integers(1, 4))
def test_who_waits_for_several_rows_is_woken_by_the_last_of_them(most, until, num) -> None:
    until = min(until, most - 1)
    memory = made_memory(7)
    writer, reader = SharedRing(memory, 7, 2), SharedRing(memory, 7, 2)
    assert reader.is_empty(num)
    assert writer.is_awaited
    rings = [writer.put([(row, row)]) for row in range(most)]
    assert rings == [row == num - 1 for row in range(most)]
    assert writer.is_awaited == (num > most)
    assert writer.lacks_room(most, until)
    assert [reader.drop() for _ in range(most)] == [
        unread == until for unread in reversed(range(most))
    ]
