"""Object stores as storages: their files are read from copies that the fetcher fills."""

from __future__ import annotations

import errno
import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from time import monotonic
from typing import Any

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError, FatalSampleError
from energon_lite.extras.remote.copies import GRANULE, Copy, path_of
from energon_lite.extras.remote.fetcher_client import ask, folder_of_copies, hint
from energon_lite.extras.remote.staging import (
    LATER,
    NOW,
    PIECE_BYTES,
    SMALL_BYTES,
    ahead_bytes,
    check_place,
    staged,
)
from energon_lite.storage.byte_file import (
    Address,
    ByteFile,
    ExpectedReads,
    Folder,
    Status,
    current_cache,
)
from energon_lite.storage.patience import warn_once

# Largest file that is fetched as a whole for a program that knows local files only: the
# `index.sqlite` of two million samples, which training needs for a comparison.
_MAX_LOCAL_BYTES = 256 << 20
# Bytes of a range may be taken away before they are read, for others that were fetched since.
_MOST_FETCHED = 20
# Indexes are read in many small ranges, which lie close together.
_INDEX_BYTES = 64 << 10
# For how long a piece is not asked for ahead again, and for how many pieces that is remembered.
_HINTED_SEC, _MOST_HINTED = 5.0, 1000

logger = logging.getLogger(__name__)


class RemoteFile(ByteFile):
    """An object, as it was when it was opened.

    Args:
        path: its address.
        found: the facts about it; its identity has ETag and version.
    """

    def __init__(self, path: Address, found: Status) -> None:
        self.path, self.size_bytes, self.identity = path, found.size_bytes, found.identity
        own: Any = found.identity
        self.is_versioned = any(own)
        self._object = {"address": os.fspath(path), "size": found.size_bytes, "identity": own}
        self._copy: Copy | None = None
        self._bounds: list[int] = []
        self._hinted: dict[int, float] = {}

    def cut_at(self, bounds: Int64Array) -> None:
        """Fetches small ranges in pieces from now on, cut at these bytes, too."""
        self._bounds = bounds.tolist()

    def _unit(self, start: int, stop: int) -> dict[str, Any]:
        """Returns what is asked of the fetcher for a range: whole granules, or the whole piece."""
        if self._bounds and stop - start < SMALL_BYTES:
            place = bisect_right(self._bounds, start)
            begin = self._bounds[place - 1] if place else 0
            end = self._bounds[place] if place < len(self._bounds) else self.size_bytes
            start = begin + (start - begin) // PIECE_BYTES * PIECE_BYTES
            stop = max(stop, min(start + PIECE_BYTES, end))
        unit = GRANULE if self.path.suffix == ".tar" else _INDEX_BYTES
        first, last = start // unit * unit, -(-stop // unit) * unit
        return {"start": first, "stop": min(last, self.size_bytes), **self._object}

    def read_into(self, target: memoryview, start: int) -> int:
        """Fills `target` with the bytes from `start` on; fewer where the file ends."""
        target = target[: max(0, self.size_bytes - start)]
        for number in range(_MOST_FETCHED):
            if self.read_at_hand(target, start):
                return len(target)
            if number == _MOST_FETCHED // 2:  # the copy may be corrupt
                ask({"kind": "drop", "address": self._object["address"]})
                self._copy = None
            self.ensure(start, start + len(target))
        raise FatalSampleError(
            f"{self.path}: bytes that were fetched are taken away before they are read, for others "
            "that are read ahead by this and other programs. No sample was skipped for it: start "
            "fewer workers, or programs with other folders TMPDIR, from the last state"
        )

    def read_at_hand(self, target: memoryview, start: int) -> bool:
        """Fills `target` if the copy has all of it; returns whether it did."""
        if not target:
            return True
        copy = self._local()
        return copy is not None and copy.read_into(target, start)

    def advise(self, start: int, stop: int, rank: int = LATER) -> None:
        """Asks the fetcher for a range that will be read soon; does not wait for it."""
        if self._has(start, stop):
            return
        unit = self._unit(start, stop)
        if self._bounds:  # neighbours ask for the same piece
            now, first = monotonic(), unit["start"]
            if now < self._hinted.get(first, 0.0):
                return
            if len(self._hinted) > _MOST_HINTED:
                self._hinted = {}
            self._hinted[first] = now + _HINTED_SEC
        hint({"kind": "advise", "rank": rank, **unit})

    def ensure(self, start: int, stop: int) -> None:
        """Waits until the copy has a range.

        Raises:
            OSError: It cannot be fetched.
        """
        stop = min(stop, self.size_bytes)
        if start < stop and not self._has(start, stop):
            path = ask({"kind": "ensure", **self._unit(start, stop)})
            if not self._has(start, stop):  # the first time, or after the end of a fetcher
                with suppress(FileNotFoundError):
                    self._copy = Copy(Path(path), self.size_bytes)

    def _has(self, start: int, stop: int) -> bool:
        copy = self._local()
        return copy is not None and copy.has(start, stop)

    def _local(self) -> Copy | None:
        """Returns the copy, if there is one."""
        if self._copy is None:
            with suppress(OSError, ValueError):  # it may just be made
                path = path_of(folder_of_copies(), *self._object.values())
                self._copy = Copy(path, self.size_bytes)
        return self._copy

    def local_copy(self) -> Path:
        """Fetches the whole file, and returns the path of its copy."""
        whole = {"kind": "ensure", "start": 0, "stop": self.size_bytes}
        return Path(ask({**whole, **self._object}))


class RemoteFolder(Folder):
    """All objects of one kind of store; a name begins with the bucket, container or server.

    Args:
        scheme: before `://` in addresses.
    """

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        # Of which the first bytes were asked for, and when.
        self._begun: dict[PurePath, tuple[float, RemoteFile]] = {}

    def _address(self, name: PurePath) -> str:
        text = str(name)
        if "@" in text.partition("/")[0] or "?" in text:
            place = text.partition("/")[0].rpartition("@")[2]
            raise DatasetFormatError(
                f"an address on {self._scheme}://{place} has a user or a signature in it, which "
                "would be written to logs and states; give credentials by the environment"
            )
        return f"{self._scheme}://{text}"

    def statuses(self, names: Sequence[PurePath]) -> list[Status | None]:
        """Asks the store for the facts about all names; None for each where there is nothing."""
        found = ask({"kind": "statuses", "addresses": [*map(self._address, names)]})
        return [
            Status(True, False, own["size"], tuple(own["identity"])) if "size" in own
            else Status(False, True) if own["is_folder"] else None
            for own in found
        ]  # fmt: skip

    def status(self, name: PurePath) -> Status | None:
        """Asks the store for the facts about a name; None where there is nothing."""
        return self.statuses([name])[0]

    def open(self, name: PurePath) -> RemoteFile:
        """Opens an object as it is now, or was when its first bytes were asked for just before."""
        since, file = self._begun.pop(name, (0.0, None))
        if file is not None and monotonic() < since + _HINTED_SEC:
            return file
        address, found = self._address(name), self.status(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", address)
        if found.is_folder:
            raise DatasetFormatError(f"{address} is a folder, not a file; give another path")
        return RemoteFile(Address(f"{self._scheme}:", name), found)

    def entries(self, name: PurePath) -> list[str]:
        """Lists the names below a prefix, one level deep."""
        found: list[str] = ask({"kind": "entries", "address": self._address(name)})
        if not found:
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", self._address(name))
        return found

    def is_well(self, name: PurePath) -> bool:
        """Never: stores throttle by prefix, and grants end by bucket, while others can be read."""
        del name
        return False

    def real_path(self, name: PurePath) -> Path:
        """Fetches a whole file, and returns the path of its copy; see `Folder.real_path`."""
        found = self.status(name)
        if found is None or found.is_folder or found.size_bytes > _MAX_LOCAL_BYTES:
            return super().real_path(Address(self._address(name)))
        return self.open(name).local_copy()

    def prefetch(self, names: Sequence[PurePath], stop: int) -> None:
        """Asks the fetcher for the first bytes of files; does not wait for them."""
        if len(self._begun) > _MOST_HINTED:  # they were not opened
            self._begun = {}
        with suppress(OSError):  # those who open them get the error
            for name, found in zip(names, self.statuses(names), strict=True):
                if found and found.is_file:
                    file = RemoteFile(Address(f"{self._scheme}:", name), found)
                    file.advise(0, min(stop, file.size_bytes), NOW)
                    self._begun[name] = monotonic(), file

    def expect(self, reads: Sequence[ExpectedReads]) -> list[tuple[int, int]]:
        """Checks that there is place for what a run needs at a time; see `staging`."""
        plans = [*map(staged, reads)]
        returns = dict[str, float]()
        for own in reads:
            address, after = self._address(own.name), own.num_samples / max(own.share, 1e-12)
            returns[address] = min(after, returns.get(address, after))
        name = " ".join(sorted(returns))
        each, ahead = ahead_bytes(reads)
        total = sum(plan.live_bytes for plan in plans) + ahead
        request = {"kind": "expect", "process": os.getpid(), "name": name, "returns": returns}
        found = ask({**request, "live": total})
        cache, asked = current_cache(), found["asked"]
        if cache and cache["max_bytes"] != asked:
            warn_once(
                f"cache {cache['path']}: max_bytes={cache['max_bytes']:,} has no effect, as a "
                f"program that runs has given {asked:,}; give all programs the same number"
            )
        if total > ahead and found["live"] > found["max_bytes"]:
            ask({**request, "live": 0})
            others = found["live"] - total + ahead
            check_place(self._scheme, reads, plans, others, found["max_bytes"])
        for own, plan in zip(reads, plans, strict=True):
            if plan.is_slow:
                logger.warning(
                    "%s: slices have %d samples of %d bytes, so each sample is a request of its "
                    "own, which is slow; give max_samples_per_sequence of at least %d",
                    self._address(own.name), own.slice_length, own.num_bytes // own.num_samples,
                    -(-SMALL_BYTES * own.num_samples // own.num_bytes),
                )  # fmt: skip
        return [(plan.slice_length, each) for plan in plans]

    def transfers(self, names: Sequence[PurePath]) -> dict[PurePath, dict[str, float]]:
        """Returns requests, bytes, retries and waits for the files of some datasets."""
        found = ask({"kind": "counts"})
        addresses = {name: self._address(name) for name in names}
        return {name: found[own] for name, own in addresses.items() if own in found}

    def write(self, name: PurePath, data: bytes) -> None:
        """Writes an object, whole or not at all."""
        ask({"kind": "write", "address": self._address(name), "size": len(data)}, data)

    def write_file(self, name: PurePath, file: Path) -> None:
        """Writes an object with the content of a local file."""
        ask({"kind": "write", "address": self._address(name), "file": os.path.abspath(file)})  # noqa: PTH100

    def write_over(self, name: PurePath, data: bytes, identity: Any) -> None:
        """Writes an object where the one of this identity is; see `Folder.write_over`."""
        request = {"kind": "write", "address": self._address(name), "size": len(data)}
        ask({**request, "over": identity}, data)

    def remove(self, name: PurePath) -> None:
        """Removes an object, if it is there."""
        ask({"kind": "remove", "address": self._address(name)})
