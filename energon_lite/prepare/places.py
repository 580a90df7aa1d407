"""Where a run writes: inside of the dataset, alone, and beside nothing that a killed run left."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from energon_lite.core.errors import DatasetFormatError
from energon_lite.prepare.plan import Plan
from energon_lite.storage.files import explained, leads_out, open_own, remove_leftovers
from energon_lite.storage.nvmeta import INDEX_UUID, INFO_JSON, INFO_YAML, META, index_path

PARTIAL = "prepare.partial"


@contextmanager
def partial_folder(plan: Plan) -> Iterator[Path]:
    """Yields the folder for the rows, locked against a second run; removed after success."""
    folder = plan.root / META / PARTIAL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(open_own(folder / "lock"), "w")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise explained(error, folder) from None
        raise PermissionError(
            f"{plan.root} cannot be written to ({error.strerror}: {folder}); a prepared dataset "
            f"has a folder {META} and an index next to each tar"
        ) from None
    with lock:
        try:
            # Not flock: worker processes would inherit it, and hold it after a kill.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another run is preparing {plan.root}; wait for it") from None
        except OSError:
            pass  # no locks on this file system
        for parent in {shard.path.parent for shard in plan.shards}:
            if not os.access(parent, os.W_OK):
                raise PermissionError(f"{parent} cannot be written to; the indexes go there")
        _remove_leftovers(plan)
        yield folder
        shutil.rmtree(folder)


def check_places(plan: Plan) -> None:
    """Refuses to write where links lead out of the dataset.

    Raises:
        DatasetFormatError: Names the folder, where the link leads, and how to allow it.
    """
    partial = plan.root / META / PARTIAL
    for folder in sorted({partial, *(shard.path.parent for shard in plan.shards)}):
        if folder == partial and partial.is_symlink():
            raise DatasetFormatError(f"{partial} is a link; remove it")
        if leads_out(folder, plan.root):
            raise DatasetFormatError(
                f"{folder}: a link leads out of the dataset, to {os.path.realpath(folder)}, where "
                "nothing is written unasked. If that is meant, let follow_links=True "
                "(--follow-links) write there; or link the tars themselves, not their folder"
            )


def _remove_leftovers(plan: Plan) -> None:
    """Removes the temporary files of runs that were killed."""
    own = {plan.root / META: {INFO_JSON, INFO_YAML, INDEX_UUID, *plan.texts}}
    for shard in plan.shards:
        names = own.setdefault(shard.path.parent, set())
        names.update((shard.path.name, index_path(shard.path).name))
    for folder, names in own.items():
        remove_leftovers(folder, names)
