"""Fetches ranges of objects into copies: one queue for all clients, and threads that empty it."""

from __future__ import annotations

import bisect
import errno
import heapq
import itertools
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from energon_lite.extras.remote import object_stores
from energon_lite.extras.remote.copies import GRANULE, WritableCopy, bytes_beside, is_sound, path_of
from energon_lite.extras.remote.kept_ranges import KeptRanges, Range
from energon_lite.extras.remote.retries import retried
from energon_lite.extras.remote.staging import NOW, PIECE_BYTES
from energon_lite.extras.remote.statuses import Statuses
from energon_lite.extras.stores.owned_folders import (
    OwnedFolder,
    private_folder,
    remove_dead_folders,
)

# Requests in flight; with fewer, a network of 30 ms is not filled by pictures of 75 KB.
_NUM_THREADS = 128
# Where more than a part of all bytes is to be fetched, hints are passed over.
_QUEUED_PART = 16
# What is in flight for later: as much as came in the last second, so that a client that begins to
# wait does so for a second at most, or this, from which a fast network doubles it in each answer.
_LATER_BYTES = 1 << 20
# A client that waits hears so often that its fetcher lives. [Unit: second]
BEAT_SEC = 2.0
# Where bytes lie if a disk is full, and how many of them.
_MEMORY, _MEMORY_BYTES = Path("/dev/shm"), 1 << 30
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Job:
    """A range that is to be fetched."""

    def __init__(self, copy: _Fetched, start: int, stop: int) -> None:
        self.copy, self.start, self.stop = copy, start, stop
        self.is_queued = self.is_begun = self.is_done = self.is_awaited = False
        self.error: OSError | None = None


class _Fetched(WritableCopy):
    """A copy, with the jobs that are to fill it; they do not overlap.

    Args:
        path: of the copy.
        address: of the object.
        size_bytes: its size.
        identity: ETag and version.
    """

    def __init__(self, path: Path, address: str, size_bytes: int, identity: Any) -> None:
        super().__init__(path, size_bytes)
        self.address, self.e_tag = address, identity[0]
        self.counts: dict[str, float] | None = None
        self.starts: list[int] = []
        self.jobs: dict[int, _Job] = {}
        facts = json.dumps({"address": address, "size": size_bytes, "identity": identity})
        path.with_suffix(".json").write_text(facts)

    def jobs_for(self, start: int, stop: int) -> list[_Job]:
        """Returns the jobs after which a range is there; new ones are not queued yet."""
        found = []
        for at, end in self.missing(start, stop):
            while at < end:
                place = bisect.bisect_right(self.starts, at)
                job = self.jobs[self.starts[place - 1]] if place else None
                if job is None or job.stop <= at:
                    after = self.starts[place] if place < len(self.starts) else end
                    job = _Job(self, at, min(end, after, at + PIECE_BYTES))
                    self.starts.insert(place, at)
                    self.jobs[at] = job
                found.append(job)
                at = job.stop
        return found

    def end(self, job: _Job) -> None:
        """Forgets a job that is done."""
        job.is_done = True
        del self.jobs[job.start], self.starts[bisect.bisect_left(self.starts, job.start)]


def _earlier_copies(folder: Path) -> Iterator[tuple[float, Path, dict[str, Any]]]:
    """Yields the copies in a folder, of a fetcher that ended: their time, path and object.

    Empty and corrupt ones are removed, as those of a fetcher that was killed when it began.
    """
    for path in folder.glob("*.json"):
        try:
            facts, copy = json.loads(path.read_text()), path.with_suffix(".data")
            if is_sound(copy, facts["size"]):
                yield copy.stat().st_mtime, copy, {**facts, "bytes": copy.stat().st_blocks * 512}
                continue
        except (OSError, ValueError, KeyError, TypeError):
            pass
        _remove(path)


def _remove(path: Path) -> None:
    for suffix in (".json", ".data", ".map"):
        path.with_suffix(suffix).unlink(missing_ok=True)


class Transfers:
    """All that is fetched, and where it lies.

    Args:
        folder: of the copies; this process has its lock.
        max_bytes: of all of them.

    Attributes:
        folder: of the copies that are made now.
        statuses: facts about objects.
        warning: what the user should know; empty if nothing.
    """

    warning = ""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.statuses = Statuses()
        self.folder, self._asked_bytes = folder, max_bytes
        self._memory: OwnedFolder | None = None
        self._lock = threading.Lock()
        self._has_work, self._has_done = (threading.Condition(self._lock) for _ in range(2))
        self._copies: dict[Path, _Fetched] = {}
        self._by_object: dict[tuple[Any, ...], _Fetched] = {}
        self._latest: dict[str, Path] = {}  # copy of each address
        self._queue: list[tuple[int, int, _Job]] = []
        self._numbers = itertools.count()
        self._queued_bytes = self._later_bytes = 0
        self._received: deque[tuple[float, int]] = deque(maxlen=1000)  # when, how much
        self._kept = KeptRanges(max_bytes, self._take_away)
        self._live: dict[int, dict[str, int]] = defaultdict(dict)
        self._counts: dict[str, dict[str, float]] = {}
        for _, path, facts in sorted(_earlier_copies(folder), key=lambda found: found[0]):
            self._drop_others(facts["address"], path)
            self._kept.max_bytes -= bytes_beside(facts["size"])
            self._kept.keep(Range(path, facts["address"], 0, facts["size"], facts["bytes"]))
        self._kept.shrink(self._kept.max_bytes)
        for _ in range(_NUM_THREADS):
            threading.Thread(target=self._work, daemon=True).start()

    def _copy_of(self, request: Any) -> _Fetched:
        address, size, identity = request["address"], request["size"], request["identity"]
        name = address, size, *identity
        copy = self._by_object.get(name)
        if copy is None:
            path = path_of(self.folder, address, size, identity)
            self._drop_others(address, path)
            if not path.exists():
                self._kept.max_bytes -= bytes_beside(size)
            try:
                copy = self._copies.get(path) or _Fetched(path, address, size, identity)
            except OSError as error:
                if error.errno not in _DISK_FULL or not self._move_to_memory():
                    raise
                return self._copy_of(request)
            self._copies[path] = self._by_object[name] = copy
        return copy

    def _drop_others(self, address: str, path: Path) -> None:
        """Removes the copy of an object that had the address before."""
        before = self._latest.get(address, path)
        self._latest[address] = path
        if before != path:
            self._drop(before)

    def _drop(self, path: Path) -> None:
        """Removes a copy; what is being fetched for it is lost, and fetched again when read."""
        old = self._copies.pop(path, None)
        self._by_object = {k: v for k, v in self._by_object.items() if v is not old}
        _remove(path)

    def drop(self, address: str) -> None:
        """Removes the copy of an object from which nothing can be read; see `RemoteFile`."""
        with self._lock:
            if address in self._latest:
                self._drop(self._latest[address])

    def hint(self, request: Any) -> None:
        """Queues a range that will be needed; one for later unless very much is queued already."""
        with self._lock:
            if request["rank"] == NOW or self._queued_bytes <= self._kept.max_bytes // _QUEUED_PART:
                self._queue_range(request, request["rank"])

    def _queue_range(self, request: Any, rank: int) -> list[_Job]:
        jobs = self._copy_of(request).jobs_for(request["start"], request["stop"])
        waiting = [job for job in jobs if not job.is_begun]
        for job in waiting:
            heapq.heappush(self._queue, (rank, next(self._numbers), job))
            self._queued_bytes += 0 if job.is_queued else job.stop - job.start
            job.is_queued = True
        self._has_work.notify(len(waiting))
        return jobs

    def ensure(self, request: Any, beat: Callable[[], None]) -> str:
        """Waits until a range is there; returns the path of the copy.

        Raises:
            OSError: It cannot be fetched.
        """
        since = time.monotonic()
        with self._lock:
            jobs, folder = self._queue_range(request, NOW), self.folder
            copy = self._copy_of(request)
            for job in jobs:
                job.is_awaited = True
        is_done = not jobs
        while not is_done:
            with self._lock:
                is_done = self._has_done.wait_for(lambda: all(j.is_done for j in jobs), BEAT_SEC)
            if not is_done:
                beat()
        if jobs:
            with self._lock:
                own = self._counts_of(copy)
                own["waits"] += 1
                own["wait_sec"] += time.monotonic() - since
        error = next((job.error for job in jobs if job.error), None)
        if error is not None and error.errno in _DISK_FULL and self.folder != folder:
            return self.ensure(request, beat)
        if error is not None:
            raise error
        return str(copy.path)

    def expect(self, request: Any) -> dict[str, int]:
        """Notes what a program will read.

        Args:
            request: the number of its process; `name` of its pipeline, and how many bytes are
                needed at a time for it; and for each of its sources after how many draws it
                returns.

        Returns:
            How many bytes all programs need at a time, how many there may be, and how many the
            program has given that started this process.
        """
        with self._lock:
            self._live[request["process"]][request["name"]] = request["live"]
            self._live = defaultdict(
                dict, {pid: own for pid, own in self._live.items() if Path(f"/proc/{pid}").exists()}
            )
            self._kept.expect(request["returns"])
            for copy in self._copies.values():
                copy.counts = None
            live = sum(sum(own.values()) for own in self._live.values())
            self._kept.staged_bytes = live
            most = self._kept.max_bytes
            return {"live": live, "max_bytes": most, "asked": self._asked_bytes}

    def counts(self) -> dict[str, dict[str, float]]:
        """Returns requests, bytes, retries and waits by source, since this process began."""
        with self._lock:
            return {source: dict(own) for source, own in self._counts.items()}

    def _counts_of(self, copy: _Fetched) -> dict[str, float]:
        if copy.counts is None:
            source = self._kept.source_of(copy.address)
            copy.counts = self._counts.setdefault(source, defaultdict(float))
        return copy.counts

    def _work(self) -> None:
        """Fetches one range after the other, for ever."""
        while True:
            with self._lock:
                while not self._queue or self._is_crowded(self._queue[0][0]):
                    self._has_work.wait()
                rank, _, job = heapq.heappop(self._queue)
                if job.is_begun:  # it was queued twice
                    continue
                job.is_begun = True
                later = 0 if rank == NOW else job.stop - job.start
                self._later_bytes += later
                self._has_work.notify()  # one wakes the next: all at once take long
            self._fetch(job)
            with self._lock:
                self._later_bytes -= later
                self._has_work.notify()

    def _is_crowded(self, rank: int) -> bool:
        """Returns whether more for later would hold up a client that begins to wait."""
        if rank == NOW:
            return False
        since = time.monotonic() - 1.0
        while self._received and self._received[0][0] < since:
            self._received.popleft()
        return self._later_bytes >= max(_LATER_BYTES, sum(size for _, size in self._received))

    def _fetch(self, job: _Job) -> None:
        copy, num_tries = job.copy, 0

        def read() -> Any:
            nonlocal num_tries
            num_tries += 1
            return object_stores.read_range(copy.address, job.start, job.stop, copy.e_tag)

        try:
            self._put(job, retried(read))
        except OSError as error:
            text = f"{error.strerror} in {copy.path.parent}; free some space, or set TMPDIR"
            job.error = error if error.filename else OSError(error.errno, text, copy.address)
            if error.errno == errno.ESTALE:
                self.statuses.forget(copy.address)
        except Exception as error:
            job.error = OSError(errno.EIO, f"{type(error).__name__}: {error}", copy.address)
        with self._lock:
            copy.end(job)
            self._queued_bytes -= job.stop - job.start
            size = 0 if job.error else job.stop - job.start
            own = self._counts_of(copy)
            own["requests"] += num_tries
            own["retries"] += num_tries - 1
            own["bytes"] += size
            self._received.append((time.monotonic(), size))
            if size and copy.path.parent == self.folder:
                on_disk = -(-size // GRANULE) * GRANULE
                self._kept.add(Range(copy.path, copy.address, job.start, job.stop, on_disk))
            if job.is_awaited:
                self._has_done.notify_all()

    def _put(self, job: _Job, data: Any) -> None:
        """Writes what was fetched; on a full disk, in the place of other ranges, or in memory."""
        try:
            job.copy.put(job.start, data)
            return
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
        with self._lock:
            if job.copy.path.parent != self.folder:
                raise OSError(errno.ENOSPC, "the disk is full")
            self._kept.max_bytes = self._kept.shrink_by(2 * PIECE_BYTES)
        try:
            job.copy.put(job.start, data)
        except OSError:
            with self._lock:
                self._move_to_memory()
            raise

    def _move_to_memory(self) -> bool:
        """Fetches to memory from now on, as the disk is full; what is there can still be read.

        Returns:
            Whether it does so now, and did not before.
        """
        if self._memory is not None or not _MEMORY.is_dir():
            return False
        place = private_folder("copies", str(_MEMORY))
        remove_dead_folders(place)
        self._memory = OwnedFolder(place)
        self.warning = (
            f"the disk of {self.folder} is full: what is fetched is kept in memory (at most "
            f"{_MEMORY_BYTES >> 20:,} MiB of {_MEMORY}), and not until the next epoch. Free "
            "some space, or give cache= with another path or fewer max_bytes"
        )
        before, self._kept = self._kept, KeptRanges(_MEMORY_BYTES, self._take_away)
        self._kept.staged_bytes = before.staged_bytes
        self.folder = self._memory.path
        self._copies, self._latest, self._by_object = {}, {}, {}
        return True

    def _take_away(self, range_: Range) -> None:
        """Frees the place of a range."""
        copy = self._copies.get(range_.path)
        try:
            if copy is None and range_.path.exists():
                facts = json.loads(range_.path.with_suffix(".json").read_text())
                copy = self._copies[range_.path] = _Fetched(range_.path, *facts.values())
        except (OSError, ValueError):
            _remove(range_.path)
        if copy is not None:
            copy.take_away(range_.start, range_.stop)

    def end(self) -> None:
        """Removes what is in memory."""
        if self._memory is not None:
            self._memory.remove()
            with suppress(OSError):  # others are there
                self._memory.path.parent.rmdir()
                self._memory.path.parents[1].rmdir()
