"""A training job on remote data, also one with a small disk; see `tests/faults/jobs.py`."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.remote import fetcher_client
from energon_lite.storage import patience

from ..helpers import text_of

# Of linux/sched.h and linux/mount.h.
_NEW_MOUNTS, _NEW_USER, _PRIVATE = 0x20000, 0x10000000, 1 << 18 | 1 << 14
_libc = ctypes.CDLL(None)


def long_text(number: int) -> str:
    """The text of 40 KB of a sample of the dataset `long`."""
    return f"text {number} " * 5000


def version_of(key: str, text: str) -> str:
    """Returns whether a text is that of its sample, that of `replaced` shards, or neither."""
    for version, head in (("old", "text"), ("new", "TEXT")):
        if text.replace(head, "text") in (text_of(int(key)), long_text(int(key))):
            return version
    return "wrong"


def read(
    report: Callable[[Any], None],
    address: str,
    environment: dict[str, str],
    num_batches: int,
    disk_bytes: int = 0,
    **config: Any,
) -> None:
    """Reports the folder of its fetcher, keys and versions of each batch, and the number of skips.

    Args:
        report: called with each batch.
        address: of the dataset.
        environment: settings of the store.
        num_batches: how many are read.
        disk_bytes: size of the disk for copies; 0 is without a limit.
        config: arguments of `WorkerConfig`.
    """
    os.environ.update(environment)
    if disk_bytes:
        mount(tempfile.gettempdir(), disk_bytes)
    fetcher_client._SILENT_SEC, patience.OUTAGE_SEC = 3.0, 5.0
    report(fetcher_client.folder_of_fetcher().name)
    try:
        dataset: Any = get_train_dataset(
            address, batch_size=2, shuffle_buffer_size=10,
            worker_config=WorkerConfig(rank=0, world_size=1, num_streams=2, **config),
        )  # fmt: skip
        with get_savable_loader(dataset, max_skip_rate=1) as loader:
            for batch in islice(loader, num_batches):
                keys = list(batch.__key__)
                report([*map(list, zip(keys, map(version_of, keys, batch.text), strict=True))])
            report({"skipped": loader.num_skipped})
    finally:
        for path in Path(tempfile.gettempdir()).rglob("log"):
            print(path.read_text(), file=sys.stderr)


def mount(folder: str, num_bytes: int) -> None:
    """Mounts memory of a size over a folder, for this process and its children; where it may."""
    if not _libc.unshare(_NEW_MOUNTS | (_NEW_USER if os.getuid() else 0)):
        _libc.mount(b"none", b"/", None, _PRIVATE, None)
        settings = f"size={num_bytes},mode=700".encode()
        _libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, settings)
