"""JSONL files as sources: each line that is not blank is a crude sample."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Any

import numpy as np

from energon_lite.core.errors import DecodingError
from energon_lite.extras.jsonl.jsonl import JsonlFormat
from energon_lite.sources.crude_file import CrudeFileFactory, CrudeFileLoader
from energon_lite.storage.local_paths import local_path


class LineLoader(CrudeFileLoader):
    """Makes crude samples of lines, which must be JSON objects."""

    def _parts(self, data: memoryview, members: Any) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        """Returns key, value and file name of a line."""
        key, values, names = super()._parts(data, members)
        value = values.get("json", {})
        if not isinstance(value, dict):
            raise DecodingError(f"is no JSON object, but a {type(value).__name__}")
        return key, values, names


class JsonlPreparator:
    """Energon's name for what prepares JSONL files."""

    @staticmethod
    def prepare_dataset(path: str | PathLike[str]) -> int:
        """Writes the index of a JSONL file.

        Returns:
            The number of samples.
        """
        samples: int = JsonlFormat.prepare(path).samples
        return samples

    @staticmethod
    def iter_dataset_content(path: str | PathLike[str]) -> Iterator[dict[str, bytes]]:
        """Yields the samples of a file, undecoded: `{"json": line}`."""
        reader = JsonlFormat().open(local_path(path)).reader
        for block in reader.blocks(np.arange(reader.num_samples)):
            for members in block.members:
                if isinstance(members, Exception):
                    raise members
                ((_, first, last),) = members
                yield {"json": bytes(block.data[first:last])}


class CrudeJsonlDatasetFactory(CrudeFileFactory, JsonlPreparator):
    """All lines of a JSONL file; a split part changes only the name of the source.

    A sample has `json`, the value of its line, and as `__key__` its number, counted from 0. The
    index `x.jsonl.idx` (`energon-lite prepare x.jsonl`) saves reading the whole file at the start.

    Args:
        path: the file.
        kwargs: as in `CrudeFileFactory`. `max_samples_per_sequence` is by default 4,096, or a 256th
            of the file if that is less.
    """

    _loader = LineLoader

    def __init__(self, path: str | PathLike[str], **kwargs: Any) -> None:
        super().__init__(path, **{"format": JsonlFormat(), **kwargs})


class DefaultCrudeJsonlDatasetFactory(CrudeJsonlDatasetFactory):
    """The lines of a JSONL file, with subflavors.

    Args:
        path: the file.
        kwargs: as in `CrudeJsonlDatasetFactory`.
    """
