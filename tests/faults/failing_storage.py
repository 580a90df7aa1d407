"""Storage that fails: faults between the readers and the system's calls. Nothing waits."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def error_of(name: str, path: str = "") -> OSError:
    """The error of the system with a name such as "EIO"."""
    number = getattr(errno, name)
    return OSError(number, os.strerror(number), path)


class FailingStorage:
    """Answers the calls of the readers, with faults.

    Attributes:
        fault: called before each read of a block with path, first byte and byte after the last;
            raises, or returns how many bytes may be read (None for all).
        at_opening: called with the path before a file is opened, or a folder is listed.
        at_reading: called with the path before another read.
        while_waiting: called in each pause between two tries, with the seconds waited so far.
        reads: how many reads of blocks there were.
        waited_sec: the pauses in all.
        latest: the path of the latest call, where calls may fail.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.mend()
        self.while_waiting: Callable[[float], None] = lambda waited: None
        self.reads, self.waited_sec, self.latest = 0, 0.0, ""
        self.patch = patch
        self._preadv, system = os.preadv, {n: getattr(os, n) for n in ("open", "pread", "scandir")}

        def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
            self.at_opening(str(path))
            return system["open"](path, flags, *more, **named)

        def read(descriptor: int, size: int, offset: int) -> bytes:
            self.at_reading(path_of(descriptor))
            return system["pread"](descriptor, size, offset)

        def listed(path: Any) -> Any:
            self.at_opening(str(path))
            return system["scandir"](path)

        for name, function in zip(system, (opened, read, listed), strict=True):
            patch.setattr(os, name, function)
        patch.setattr(os, "preadv", self._read)
        patch.setattr("energon_lite.storage.patience.sleep", self._wait)

    def mend(self) -> None:
        """Removes the faults."""
        self.fault: Callable[[str, int, int], int | None] = lambda path, start, stop: None
        self.at_opening: Callable[[str], None] = lambda path: None
        self.at_reading: Callable[[str], None] = lambda path: None

    def fail(
        self, name: str, only: Any, number: float = float("inf"), until_sec: float = float("inf"),
        *, blocks: bool = False, is_away: Callable[[], Any] = lambda: True,
    ) -> None:  # fmt: skip
        """Fails the calls for paths with a text, so many times and so long.

        Args:
            name: of the error.
            only: the text.
            number: how often at most.
            until_sec: how long is waited then.
            blocks: whether only reads of blocks fail.
            is_away: whether they fail now.
        """
        left = [number]

        def fault(path: str, *range_: int) -> None:
            self.latest = path
            is_due = left[0] > 0 and self.waited_sec < until_sec
            if str(only) in path and is_due and is_away():
                left[0] -= 1
                raise error_of(name, path)

        self.fault = fault
        if not blocks:
            self.at_opening = self.at_reading = fault

    def _wait(self, seconds: float) -> None:
        self.waited_sec += seconds
        self.while_waiting(self.waited_sec)

    def _read(self, descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:  # nothing is in the page cache
            raise BlockingIOError(errno.EAGAIN, "not cached")
        self.reads += 1
        limit = self.fault(path_of(descriptor), offset, offset + len(buffers[0]))
        return self._preadv(descriptor, [buffers[0][:limit]], offset)


def path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())
