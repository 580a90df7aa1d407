"""Asks the fetcher of this machine, and starts it where none runs."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import struct
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from signal import SIGKILL
from typing import Any

from energon_lite.core.errors import FatalSampleError
from energon_lite.extras.remote.copies import address_in
from energon_lite.extras.stores.owned_folders import private_folder
from energon_lite.storage.byte_file import current_cache
from energon_lite.storage.patience import warn_once

# How long a fetcher may need to start, and how long it may be silent. [Unit: second]
_START_SEC, _SILENT_SEC = 60.0, 30.0
# How long a request is sent again to fetchers that end meanwhile, and how long between two tries.
_TRYING_SEC, _PAUSE_SEC = 60.0, 0.02
# Variables that decide whose credentials are used: programs that differ have fetchers of their own.
_SETTINGS = re.compile(
    r"^(AWS|GOOGLE|AZURE|MSC|XDG_CONFIG)_|^HOME$|^https?_proxy$|key|secret|token|password|credential",
    re.IGNORECASE,
)
# Bytes of all copies where no cache is given.
_MAX_BYTES = 4 << 30
_OF_OTHERS = re.compile(r"nfs|cifs|smb|lustre|gpfs|ceph|9p|gluster|beegfs|fuse\.(?!fuse-overlayfs)")


def folder_of_fetcher() -> Path:
    """Returns the folder of the fetcher for the settings of this process, and makes it.

    Raises:
        OSError: It is the folder of another user, or on another machine.
    """
    own = sorted(item for item in os.environ.items() if _decides(item[0]))
    cache_ = current_cache()
    return _folder_for(repr(own), cache_["path"] if cache_ else tempfile.gettempdir())


@lru_cache(1000)
def _decides(variable: str) -> bool:
    return _SETTINGS.search(variable) is not None


@lru_cache(64)
def _folder_for(settings: str, place: str) -> Path:
    name = hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
    try:
        folder = private_folder(name, place)
    except OSError as error:
        text = f"{error.strerror}; give cache=, or TMPDIR, another place for what is fetched"
        raise OSError(error.errno, text, error.filename) from None
    kind = _file_system_of(folder)
    if _OF_OTHERS.match(kind):
        text = (
            f"is on {kind}: bytes of other machines, which cannot be freed in parts, and whose "
            "memory processes do not share; set TMPDIR, or cache={'path': ..., 'max_bytes': ...}, "
            "to a place on a disk of this machine"
        )
        raise OSError(errno.ENOTSUP, text, str(folder))
    return folder


def _file_system_of(path: Path) -> str:
    """Returns the kind of the file system that a path is on."""
    found = "", ""
    own = str(path.resolve())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        place = before.split()[4].replace("\\040", " ")
        if f"{own}/".startswith(f"{place.rstrip('/')}/") and len(place) >= len(found[0]):
            found = place, after.split()[0]
    return found[1]


class _Connection:
    """A connection to the fetcher.

    Args:
        channel: the socket.
        folder: of the fetcher.
    """

    def __init__(self, channel: socket.socket, folder: Path) -> None:
        self.folder = folder
        self._channel, self._stream = channel, channel.makefile("rwb")

    def send(self, request: dict[str, Any], data: bytes = b"") -> None:
        """Sends a request, and bytes that belong to it."""
        self._stream.write(json.dumps(request).encode() + b"\n" + data)
        self._stream.flush()

    def answer(self) -> Any:
        """Waits for an answer; ends a fetcher that does not say that it lives."""
        line = b"\n"
        while line == b"\n":
            try:
                line = self._stream.readline()
            except TimeoutError:
                size = struct.calcsize("3i")
                peer = self._channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
                with suppress(ProcessLookupError):
                    os.kill(struct.unpack("3i", peer)[0], SIGKILL)
                raise
        if not line.endswith(b"\n"):
            raise ConnectionResetError(errno.ECONNRESET, "it ended during a request")
        return json.loads(line)

    def close(self) -> None:
        """Ends the connection."""
        with suppress(OSError):
            self._stream.close()
        self._channel.close()

    __del__ = close


class _Own(threading.local):
    """The connection of a thread.

    Attributes:
        copies: folder of the copies, as the last answer named it.
    """

    connection: _Connection | None = None
    copies = ""

    def get(self) -> _Connection:
        if self.connection is None:
            self.connection = _connected()
        return self.connection


_own = _Own()
# Fetchers that are children of this process until they have ended.
_started_here: list[int] = []


def forget() -> None:
    """Ends the connection of this thread; in a forked child it was the parent's."""
    _own.connection = None


os.register_at_fork(after_in_child=forget)


def folder_of_copies() -> Path:
    """Returns the folder in which the fetcher keeps bytes now; none before its first answer."""
    return Path(_own.copies)


def hint(request: dict[str, Any]) -> None:
    """Sends a request that has no answer."""
    try:
        _own.get().send(request)
    except (OSError, ValueError):
        forget()


def ask(request: dict[str, Any], data: bytes = b"") -> Any:
    """Sends a request, and returns the answer.

    A fetcher that ended, or that is silent, is started again.

    Args:
        request: its kind and arguments.
        data: bytes that belong to it.

    Raises:
        OSError: The error of the store.
        FatalSampleError: Fetchers end again and again, or do not start.
    """
    died_at, answer = 0.0, None
    folder = folder_of_fetcher()  # its errors do not pass
    while answer is None:
        try:
            connection = _own.get()
            if connection.folder != folder:  # credentials were changed
                forget()
                continue
            connection.send(request, data)
            answer = connection.answer()
        except (OSError, ValueError) as error:
            forget()
            time.sleep(_PAUSE_SEC)
            died_at = died_at or time.monotonic()
            if time.monotonic() > died_at + _TRYING_SEC:
                raise FatalSampleError(
                    f"the process that fetches from object stores ended again and again during "
                    f"{_TRYING_SEC:g} s ({error}); see {folder / 'log'}. No sample "
                    "was skipped for it: start the program again, from the last state"
                ) from error
    _own.copies = answer["copies"]
    if answer["warning"]:
        warn_once(answer["warning"])
    if "error" in answer:
        raise OSError(*answer["error"])
    return answer["value"]


def _connected() -> _Connection:
    """Connects to the fetcher, which is started if it is not there.

    Raises:
        ImportError: obstore is not installed.
        OSError: It does not start.
    """
    folder, end = folder_of_fetcher(), time.monotonic() + _START_SEC
    started, stuck_at = 0, time.monotonic() + _SILENT_SEC
    _started_here[:] = [process for process in _started_here if not _has_ended(process)]
    while time.monotonic() < end:
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(_SILENT_SEC)
        try:
            with address_in(folder) as address:
                channel.connect(address)
            return _Connection(channel, folder)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            channel.close()
        if time.monotonic() > stuck_at:
            _end_stuck(folder, started)
            stuck_at += _SILENT_SEC
        if not started or _has_ended(started):
            started = _started(folder)
            _started_here.append(started)
        time.sleep(_PAUSE_SEC)
    raise OSError(errno.ETIMEDOUT, f"it did not start in {_START_SEC:g} s", str(folder))


def _end_stuck(folder: Path, started: int) -> None:
    """Ends the process that has the lock of a folder and does not answer, or that was started."""
    form = "hhqqi"  # struct flock of fcntl.h
    with suppress(OSError), (folder / "lock").open("ab") as lock:  # it may not be there yet
        asked = struct.pack(form, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, process = struct.unpack(form, fcntl.fcntl(lock, fcntl.F_GETLK, asked))
        if stuck := started if kind == fcntl.F_UNLCK else process:  # 0 is a process out of sight
            os.kill(stuck, SIGKILL)


def _started(folder: Path) -> int:
    """Starts a fetcher, which ends at once where another one serves the folder; returns its PID."""
    if find_spec("obstore") is None:
        text = "Data in object stores needs obstore: pip install 'energon_lite[remote]'"
        raise ImportError(text)
    home = str(Path(__file__).parents[3])
    paths = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    log = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    cache_ = current_cache()
    settings = [str(cache_["max_bytes"] if cache_ else _MAX_BYTES), str(int(bool(cache_)))]
    folder.mkdir(mode=0o700, exist_ok=True)  # it goes with a fetcher that ends
    # Not `subprocess`, which warns of a program that outlives it.
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "energon_lite.extras.remote.fetcher", str(folder), *settings],
        {**os.environ, "PYTHONPATH": paths},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(folder / "log"), log, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def _has_ended(process: int) -> bool:
    try:
        return os.waitpid(process, os.WNOHANG) != (0, 0)
    except ChildProcessError:  # the program has asked for it itself
        return True
