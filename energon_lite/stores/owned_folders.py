"""Folders for temporary files, each owned by one process, and removed when its owner has ended.

The owner holds a lock on a file of the folder. The kernel frees the lock when the process ends,
also by `kill -9`, so a later process recognises a folder without an owner, and removes it.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import socket
import string
import weakref
from contextlib import suppress
from pathlib import Path

LOCK_NAME = ".owner"
_LETTERS = string.ascii_lowercase + string.digits
_NUM_LETTERS = 16
_names = random.SystemRandom()  # draws nothing from a generator that somebody seeded


class OwnedFolder:
    """A new folder `<parent>/<prefix><16 random characters>` of this process.

    Args:
        parent: is made if it is missing.
        prefix: how the names of the folders begin.

    Attributes:
        path: of the folder.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            self.path = _new_path(parent, prefix)
            self.path.mkdir(mode=0o700)
            lock = _lock(self.path, os.O_CREAT)
            if lock is not None:
                break  # else another process has just taken it for a folder without an owner
        self._prefix = prefix
        self._lock = lock
        os.write(lock, socket.gethostname().encode())
        _owned.add(self)

    def remove(self) -> None:
        """Removes the folder with all files, at once for those who would write to it."""
        if self._lock >= 0:
            gone = self.path
            with suppress(OSError):
                gone = self.path.rename(_new_path(self.path.parent, self._prefix))
            _remove_all(gone)
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


def _new_path(parent: Path, prefix: str) -> Path:
    return parent / (prefix + "".join(_names.choices(_LETTERS, k=_NUM_LETTERS)))


def remove_dead_folders(parent: Path, prefix: str) -> None:
    """Removes the folders of owners that have ended; those of other hosts stay.

    Args:
        parent: of the folders.
        prefix: how their names begin.
    """
    length = len(prefix) + _NUM_LETTERS
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if len(entry.name) == length and entry.name.startswith(prefix):
                with suppress(OSError):
                    is_own = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                    if is_own and entry.is_dir(follow_symlinks=False):
                        _remove_if_dead(Path(entry))


def _remove_if_dead(folder: Path) -> None:
    try:
        lock = _lock(folder)
    except FileNotFoundError:  # its owner ended at once, or the folder is not of this library
        folder.rmdir()
        return
    if lock is None:
        return
    try:
        # A lock on a network storage may be known on its own host only.
        if os.read(lock, 1024).decode() in ("", socket.gethostname()):
            _remove_all(folder)
    finally:
        os.close(lock)


def _lock(folder: Path, flags: int = 0) -> int | None:
    """Locks a folder; returns the open file of the lock, or None if another process has it.

    Raises:
        FileNotFoundError: The folder has no lock.
    """
    path = folder / LOCK_NAME
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    except FileNotFoundError:
        if flags:  # the whole folder was removed
            return None
        raise
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(lock), path.stat())
    except OSError as error:
        if flags and not isinstance(error, (BlockingIOError, FileNotFoundError)):
            return lock  # a storage without locks, where no process can remove another's folder
        os.close(lock)
        return None
    if is_there:
        return lock
    os.close(lock)
    return None


def _remove_all(folder: Path) -> None:
    """Removes a folder, its lock last."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK_NAME:
                Path(entry).unlink(missing_ok=True)
        (folder / LOCK_NAME).unlink()
        folder.rmdir()
