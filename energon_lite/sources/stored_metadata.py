"""Samples of stored media metadata, in place of the media: neither read nor decoded."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.samples import CrudeSample, SourceInfo
from energon_lite.core.state import RestoreKey
from energon_lite.decoding.media_metadata import MediaDatabase, deserialize_media_metadata
from energon_lite.sources.source import WebdatasetSource
from energon_lite.storage.shards import Block, ShardReader


class _MetadataReader:
    """Reads the metadata of samples from the index, where a `ShardReader` reads their files."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self.root, self.num_samples = reader.root, reader.num_samples
        self._opened: tuple[int, MediaDatabase] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the open database behind."""
        return {**self.__dict__, "_opened": None}

    def read(self, indices: Int64Array, max_bytes: int = 0) -> Block:
        """Returns a block whose members are (sample key, [(part, type, JSON), ...])."""
        del max_bytes
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), MediaDatabase(self.root)
        shards, places = self._reader.locate(indices)
        members: list[Any] = [None] * len(indices)
        for shard in np.unique(shards).tolist():
            rows = np.flatnonzero(shards == shard)
            wanted = places[rows]
            tar_file_id = self._reader.tar_file_ids[shard]
            found = self._opened[1].samples(tar_file_id, int(wanted.min()), int(wanted.max()))
            for row, place in zip(rows.tolist(), wanted.tolist(), strict=True):
                members[row] = found.get(place)
        names = [self._reader.shards[shard] for shard in shards.tolist()]
        return Block(memoryview(b""), members, names, places.tolist())


@dataclasses.dataclass(eq=False)
class _MetadataLoader:
    """Makes crude samples of what a `_MetadataReader` read."""

    root: str
    subflavors: dict[str, Any]
    loss_weight: float
    may_draw: bool = False

    def __call__(
        self, data: memoryview, members: Any, shard: str, place: int, key: RestoreKey
    ) -> CrudeSample:
        del data
        if members is None:
            raise DatasetFormatError(
                f"{self.root}: index.sqlite has no sample {place} of {shard}; run `energon-lite "
                f"prepare {self.root} --tar-index-only`"
            )
        sample_key, parts = members
        info = SourceInfo(self.root, key[2], shard, tuple(f"{sample_key}.{p[0]}" for p in parts))
        return CrudeSample(
            __key__=sample_key,
            __restore_key__=key,
            __subflavors__=self.subflavors.copy(),
            __sources__=(info,),
            **{part: deserialize_media_metadata(kind, text) for part, kind, text in parts},
        )


def metadata_source(source: WebdatasetSource[Any]) -> WebdatasetSource[CrudeSample]:
    """Returns a source with the same samples, as dicts of the metadata of their media.

    Parts without stored metadata are not in the dicts.

    Raises:
        RuntimeError: The dataset has no media metadata.
    """
    reader: Any = _MetadataReader(source.reader)
    with MediaDatabase(reader.root):
        pass
    loader: Any = _MetadataLoader(str(reader.root), source.loader.subflavors, 1.0)
    return dataclasses.replace(source, reader=reader, loader=loader)
