"""energon_lite with threads in place of worker processes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers.loaders import ours
from benchmarks.peers.rows import Row

TITLE = "energon_lite, threads"
PACKAGES = ours.PACKAGES
SHOWN = ours.SHOWN
DATA_OF = ENVIRONMENT_OF = "ours"
samples_of = ours.samples_of


def open_loader(folder: Path, row: Row) -> Iterable[Any]:
    return ours.open_loader(folder, row, worker_type="thread")


def lacks(row: Row) -> str:
    return "" if row.workers else "without workers there are no threads"
