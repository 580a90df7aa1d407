"""The process that fetches: one for each folder of copies, which ends with its last client.

It is started by exec, never by a fork, and no other process imports obstore. Clients ask in lines
of JSON over a socket (`fetcher_client`). All ranges that they ask for are one queue: first those
that a client waits for, then those that will be needed, in the order in which they were named.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from energon_lite.extras.remote import object_stores
from energon_lite.extras.remote.copies import address_in
from energon_lite.extras.remote.retries import retried
from energon_lite.extras.remote.transfers import BEAT_SEC, Transfers

# Without clients it waits so long for the next one; and for the first. [Unit: second]
_LEAVE_SEC, _FIRST_SEC = 2.0, 20.0
# Variables that decide where objects are.
_WHERE = re.compile(r"^(AWS|AZURE|GOOGLE|MSC)_.*(ENDPOINT|ACCOUNT_NAME|PROFILE|CONFIG)")
# Of the files of copies; those of another number are removed.
_FORMAT = 2


class Fetcher:
    """Answers the clients of a folder.

    Args:
        transfers: what is fetched.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._lock = threading.Lock()
        self._processes = set[int]()
        self._num_clients, self._idle_since = 0, time.monotonic() + _FIRST_SEC - _LEAVE_SEC

    def serve(self, listening: socket.socket) -> None:
        """Answers clients until the last of them is gone."""
        listening.settimeout(_LEAVE_SEC / 4)
        while self._num_clients or time.monotonic() < self._idle_since + _LEAVE_SEC:
            try:
                client, _ = listening.accept()
            except TimeoutError:
                continue
            with self._lock:
                self._num_clients += 1
            client.settimeout(None)
            threading.Thread(target=self._answer, args=[client], daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        """Answers one client, request by request."""
        try:
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            process = struct.unpack("3i", peer)[0]
            if process not in self._processes:
                self._processes.add(process)
                self._transfers.statuses.expire()
            with client, client.makefile("rwb") as stream:

                def beat() -> None:
                    stream.write(b"\n")
                    stream.flush()

                for line in stream:
                    request = json.loads(line)
                    answer = self._answered(request, stream, beat)
                    if answer is not None:
                        answer["warning"] = self._transfers.warning
                        answer["copies"] = str(self._transfers.folder)
                        stream.write(json.dumps(answer).encode() + b"\n")
                        stream.flush()
        except (OSError, ValueError):
            pass  # it is gone, or was killed while it wrote
        finally:
            with self._lock:
                self._num_clients -= 1
                self._idle_since = time.monotonic()

    def _answered(self, request: Any, stream: Any, beat: Callable[[], None]) -> Any:
        """Returns the answer to a request; None where none is waited for."""
        kind, address = request["kind"], request.get("address", "")
        transfers = self._transfers
        if kind == "advise":
            with suppress(OSError):  # it is only a hint
                transfers.hint(request)
            return None
        if kind == "ensure":
            return _result(lambda: transfers.ensure(request, beat))
        if kind == "expect":
            return _result(lambda: transfers.expect(request))
        if kind == "counts":
            return _result(transfers.counts)
        if kind == "drop":
            return _result(lambda: transfers.drop(address))
        if kind == "write":
            data = Path(request["file"]) if "file" in request else stream.read(request["size"])
            over = request.get("over", object_stores.ANY)
            transfers.statuses.forget(address)
            return _after(
                lambda: retried(lambda: object_stores.write_whole(address, data, over)), beat
            )
        if kind == "remove":
            transfers.statuses.forget(address)
            return _after(lambda: retried(lambda: object_stores.remove(address)), beat)
        if kind == "entries":
            return _after(lambda: retried(lambda: object_stores.names_below(address)), beat)
        known = [*map(transfers.statuses.known, request["addresses"])]
        if all(known):
            return {"value": known}
        return _after(lambda: transfers.statuses.of(request["addresses"]), beat)


def _after(call: Callable[[], Any], beat: Callable[[], None]) -> Any:
    """Returns the result of a request to a store, which may take long."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_result(call)), daemon=True)
    thread.start()
    thread.join(BEAT_SEC)
    while thread.is_alive():
        beat()
        thread.join(BEAT_SEC)
    return found[0]


def _result(call: Callable[[], Any]) -> dict[str, Any]:
    """Returns what a call returned, or its error."""
    try:
        return {"value": call()}
    except OSError as error:
        return {"error": [error.errno, error.strerror, error.filename]}
    except Exception as error:
        return {"error": [errno.EIO, f"{type(error).__name__} in the fetcher: {error}", ""]}


def _locked(folder: Path) -> bool:
    """Locks a folder until this process ends; returns whether no other process has it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel knows whose it is
    except OSError:
        os.close(descriptor)
        return False
    os.utime(descriptor)
    return True


def _kept_folder(place: Path, max_bytes: int) -> Path:
    """Returns the folder of the copies that stay, which is locked.

    It depends on where objects are, and not on credentials, which change from run to run. Programs
    with other credentials that run at the same time have a second folder. Folders without a
    program are removed, the oldest first, while all of them have more than `max_bytes`.
    """
    settings = sorted(item for item in os.environ.items() if _WHERE.search(item[0]))
    name = hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()
    end, number = time.monotonic() + 2 * _LEAVE_SEC, 0
    while True:
        own = place / f"copies-{name}-{number}"
        own.mkdir(mode=0o700, exist_ok=True)
        if _locked(own):
            break
        time.sleep(_LEAVE_SEC / 20)
        number += time.monotonic() > end  # the other fetcher is not about to end
    folders = [path.parent for path in place.glob("copies-*/lock")]
    folders.sort(key=lambda path: (path / "lock").stat().st_mtime)
    files = {path: [*path.glob("copies/*")] for path in folders}
    sizes = {path: sum(512 * file.stat().st_blocks for file in files[path]) for path in folders}
    for other in folders:
        if other != own and sum(sizes.values()) > max_bytes and _locked(other):
            shutil.rmtree(other, ignore_errors=True)
            sizes[other] = 0
    return own


def main(folder: Path, max_bytes: int, is_kept: bool) -> None:
    """Serves the clients of a folder, if no other process does.

    Args:
        folder: of the lock, the socket, and of copies that do not stay.
        max_bytes: of all copies.
        is_kept: whether copies stay when this process ends, in a folder beside.
    """
    if not _locked(folder):
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a copy has two files
    base = _kept_folder(folder.parent, max_bytes) if is_kept else folder
    copies, place, marker = base / "copies", folder / "socket", base / "boot"
    boot = f"{_FORMAT} {Path('/proc/sys/kernel/random/boot_id').read_text()}"
    if not marker.exists() or marker.read_text() != boot:  # files may lack what was in memory only
        shutil.rmtree(copies, ignore_errors=True)
        marker.write_text(boot)
    copies.mkdir(mode=0o700, exist_ok=True)
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        with address_in(folder) as address:
            listening.bind(address)
        listening.listen(1024)
        transfers = Transfers(copies, max_bytes)
        Fetcher(transfers).serve(listening)
        place.unlink(missing_ok=True)
        transfers.end()
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # threads may be in a request


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3])))
