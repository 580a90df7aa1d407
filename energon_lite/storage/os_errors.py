"""Errors of the system where files are used: which may pass, and what to do about each."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

# Errors that may be gone a moment later, whichever file it is.
PASSING = frozenset(
    getattr(errno, name)
    for name in (
        "EIO", "ESTALE", "EAGAIN", "EINTR", "ETIMEDOUT", "ENOTCONN", "ECONNRESET", "ECONNABORTED",
        "ECONNREFUSED", "EPIPE", "EREMOTEIO", "ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN",
        "EHOSTUNREACH", "ESHUTDOWN", "ECOMM", "EPROTO", "EBUSY", "ENOLCK", "ENOMEM", "EBADF",
        "EKEYEXPIRED",
    )
    if hasattr(errno, name)
)  # fmt: skip

# No more files can be opened, by this process or on this machine.
FULL = frozenset((errno.EMFILE, errno.ENFILE))
# What no server that comes back changes.
FINAL = (errno.ELOOP, errno.ENAMETOOLONG)

_REMEDIES = {
    **dict.fromkeys(PASSING, "the storage failed; try again, and check the disk or the mount"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give the user of this process permission for it"),
    errno.EROFS: "mount the file system for writing, or work on a copy",
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "free some space there, then run the same command again",
    ),
    errno.ENAMETOOLONG: "give the files and folders shorter names",
    errno.ELOOP: "links lead in a circle, or a link is where there may be none; move it away",
    errno.ENOTDIR: "a file is in the place of a folder; move it away",
    errno.EEXIST: "something else is in the place of a folder; move it away",
    errno.EISDIR: "a folder is in the place of a file; move it away",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the limit of open files of the machine",
    errno.ENOMEM: "free some memory",
    errno.ESTALE: "the file was replaced on the network storage; try again",
}


def explained(error: OSError, path: str | os.PathLike[str]) -> OSError:
    """Returns an error of the system with the file and the remedy in its text."""
    remedy = _REMEDIES.get(error.errno or 0)
    text = error.strerror or str(error)
    if remedy is None or remedy in text:
        return error
    return OSError(error.errno, f"{text}; {remedy}", os.fspath(error.filename or path))


@dataclass(slots=True)
class errors_of:  # noqa: N801  as `contextlib.suppress`; a generator would take many times as long
    """Explains the errors of the system in a block that uses the file `path`."""

    path: str | os.PathLike[str]

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Explains what the block raised."""
        # To raise an error that this frame has would keep all its frames, and their open files.
        if isinstance(error, OSError) and explained(error, self.path) is not error:
            raise explained(error, self.path) from None
