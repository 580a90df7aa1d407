"""Mounts a prepared folder with FUSE, for reading: each part of each sample is a file."""

from __future__ import annotations

import errno
import logging
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from energon_lite.core.errors import FatalSampleError
from energon_lite.extras.inspect.file_view import DatasetFiles

logger = logging.getLogger(__name__)
T = TypeVar("T")

_INSTALL = (
    "Mounting needs FUSE: the package mfusepy (`pip install 'energon_lite[mount]'`), and the "
    "library of the system (`apt install fuse3 libfuse3-3`, `dnf install fuse3-libs`)"
)
_DEVICE = (
    "/dev/fuse is missing: load the kernel module (`modprobe fuse`), or start the container with "
    "`--device /dev/fuse --cap-add SYS_ADMIN`"
)


class MountedFiles:
    """The calls of the kernel to a file system, answered by `DatasetFiles`.

    Method names and arguments are those of FUSE. Errors are OSErrors with a number.

    Args:
        files: the files to show.
        on_ready: is called when the files can be read.
    """

    use_ns = True  # times are whole numbers of nanoseconds

    def __init__(self, files: DatasetFiles, on_ready: Callable[[], None] = lambda: None) -> None:
        self._files = files
        self._on_ready = on_ready
        self._time_ns = files.root.stat().st_mtime_ns

    def init(self, path: str) -> None:
        """Is called once, when the files can be read."""
        del path
        self._on_ready()

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        """Returns kind, rights, size and times of a file or folder."""
        del fh
        place = self._ask(self._files.find, path)
        if place is None and not self._ask(self._files.is_folder, path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        kind = stat.S_IFDIR | 0o555 if place is None else stat.S_IFREG | 0o444
        times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), self._time_ns)
        return times | {
            "st_mode": kind,
            "st_nlink": 2 if place is None else 1,
            "st_size": 0 if place is None else place.size,
            "st_uid": os.getuid(),
            "st_gid": os.getgid(),
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        """Returns the names in a folder."""
        del fh
        return [".", "..", *self._ask(self._files.names, path)]

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Returns bytes of a file."""
        del fh
        place = self._ask(self._files.find, path)
        if place is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._ask(lambda _: self._files.read(place, size, offset), path)

    def _ask(self, question: Callable[[str], T], path: str) -> T:
        """Asks about a path; an error in the data is logged, and becomes an input/output error."""
        try:
            return question(path.strip("/"))
        except (ValueError, FatalSampleError) as error:
            logger.error("%s: %s", path, error)
            raise OSError(errno.EIO, str(error), path) from None


def mount_dataset(
    files: DatasetFiles,
    mountpoint: str | os.PathLike[str],
    *,
    detach: bool = False,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Mounts a dataset, and serves its files until it is unmounted.

    Args:
        files: the files to show.
        mountpoint: an empty folder.
        detach: whether to serve the files in another process, in the background. This process
            ends then, as soon as the files can be read.
        on_ready: is called when the files can be read, in the process that serves them.

    Raises:
        FileNotFoundError: There is no such folder.
        NotADirectoryError: It is a file.
        RuntimeError: A package, library or device is missing, or the kernel refuses.
    """
    folder = Path(mountpoint).expanduser()
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist; create an empty folder to mount at")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; name an empty folder to mount at")
    fuse = _fuse()
    operations = MountedFiles(files, on_ready)
    sys.stdout.flush()  # a process that detaches does not
    try:
        # Python runs one thread at a time, and a thread of FUSE's would open its own index.
        fuse.FUSE(
            operations, str(folder), foreground=not detach, nothreads=True, ro=True,
            fsname=f"energon-lite:{files.root.name}".replace(",", "_"),
        )  # fmt: skip
    except RuntimeError as error:
        raise RuntimeError(
            f"FUSE could not mount {files.root} at {folder} (error {error}). Is the folder already "
            f"a mount (`umount {folder}`)? Mounting needs root, or the program fusermount3; a "
            "container needs --cap-add SYS_ADMIN"
        ) from None


def _fuse() -> Any:
    """Returns the package that speaks to FUSE.

    Raises:
        RuntimeError: It cannot be used; names what to install.
    """
    try:
        import mfusepy
    except (ImportError, OSError) as error:
        raise RuntimeError(f"{_INSTALL}. ({error})") from None
    if sys.platform == "linux" and not Path("/dev/fuse").exists():
        raise RuntimeError(_DEVICE)
    return mfusepy
