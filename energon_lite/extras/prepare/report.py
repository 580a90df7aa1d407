"""The report of preparing a dataset: what was found and written."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import Any


@dataclasses.dataclass(frozen=True)
class SplitCount:
    """Size of a split part."""

    shards: int
    samples: int


@dataclasses.dataclass(frozen=True)
class PrepareReport:
    """The report of `prepare_dataset`: what it found and wrote.

    Attributes:
        path: the dataset's folder.
        shards: number of tars.
        samples: number of samples in them.
        size_bytes: size of the tars.
        splits: size of each split part; empty with `tar_index_only`.
        parts: number of members by part name.
        resumed_shards: tars that an earlier, unfinished run had read.
        written: files that were written, relative to `path`; the indexes of the tars are one
            entry.
        warnings: what is odd but no error.
        media_files: number of files with media metadata; None where none were asked for.
    """

    path: PurePath
    shards: int
    samples: int
    size_bytes: int
    splits: dict[str, SplitCount]
    parts: dict[str, int]
    resumed_shards: int
    written: tuple[str, ...]
    warnings: tuple[str, ...]
    media_files: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON-serialisable values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}
