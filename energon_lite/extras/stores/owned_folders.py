"""Folders for temporary files, each owned by one process, and removed when its owner has ended.

The owner holds a lock on the folder. The kernel frees it when the process ends, also by `kill -9`,
so a later process of the same host recognises a folder without an owner, and removes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import tempfile
import weakref
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePath

from energon_lite.storage import files

_PREFIX = "cache_"
_NUM_RANDOM = 8  # letters that `mkdtemp` adds


def private_folder(name: str, place: str | None = None) -> Path:
    """Returns a folder that only this user may open, and makes it; below TMPDIR, or `place`.

    Raises:
        OSError: It is the folder of another user.
    """
    return _private(Path(place or tempfile.gettempdir()) / f"energon-lite-{os.getuid()}" / name)


@cache
def _private(folder: Path) -> Path:
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        facts = path.lstat()
        if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o077:
            text = "is not a folder of this user alone; remove it, or set TMPDIR to another place"
            raise OSError(errno.EPERM, text, str(path))
    return folder


def work_folder(place: PurePath) -> Path:
    """Returns a folder of this machine for files that grow: itself, or one for a place elsewhere.

    Raises:
        OSError: It cannot be made.
    """
    if files.is_local(place):
        return Path(place)
    return private_folder(hashlib.blake2b(os.fsencode(place), digest_size=8).hexdigest())


class OwnedFolder:
    """A new folder `<parent>/cache_<16 characters>` of this process.

    Args:
        parent: is made if it is missing.

    Attributes:
        path: of the folder.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            self.path = _new_folder(parent)
            # Another process may just have taken it for a folder without an owner.
            with suppress(FileNotFoundError, BlockingIOError):
                self._lock = _lock(self.path, is_own=True)
                break
        _owned.add(self)

    def remove(self) -> None:
        """Removes the folder with all files, at once for those who would write to it."""
        if self._lock >= 0:
            gone = self.path
            with suppress(OSError):
                gone = self.path.rename(_new_folder(self.path.parent))
            shutil.rmtree(gone, ignore_errors=True)
            self.leave()

    def leave(self) -> None:
        """Leaves the folder to the process that made it, in a fork of this process."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)  # the lock is freed when all processes that have it closed it


_owned: weakref.WeakSet[OwnedFolder] = weakref.WeakSet()


def _leave_all() -> None:
    for folder in list(_owned):
        folder.leave()


os.register_at_fork(after_in_child=_leave_all)


def remove_dead_folders(parent: Path) -> None:
    """Removes the folders of owners that have ended; those of other hosts stay.

    A lock on a network storage may be known on its own host only.

    Args:
        parent: of the folders.
    """
    of_host = _start_of_names()
    length = len(of_host) + _NUM_RANDOM
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if len(entry.name) == length and entry.name.startswith(of_host):
                with suppress(OSError):  # it has an owner, is no folder, or belongs to another user
                    lock = _lock(Path(entry))
                    shutil.rmtree(entry, ignore_errors=True)
                    os.close(lock)


def _new_folder(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=_start_of_names(), dir=parent))


def _start_of_names() -> str:
    """Returns how the names of the folders of this host begin."""
    return f"{_PREFIX}{zlib.crc32(socket.gethostname().encode('utf-8', 'surrogateescape')):08x}"


def _lock(folder: Path, is_own: bool = False) -> int:
    """Locks a folder.

    Args:
        folder: its path.
        is_own: whether it may stay unlocked, on a storage without locks: no process can remove the
            folder of another one there.

    Returns:
        The descriptor that has the lock.

    Raises:
        BlockingIOError: Another process has it.
        FileNotFoundError: The folder is gone.
        OSError: It is no folder, or cannot be locked.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.stat()
    except OSError as error:
        if not is_own or isinstance(error, (BlockingIOError, FileNotFoundError)):
            os.close(lock)
            raise
    return lock
