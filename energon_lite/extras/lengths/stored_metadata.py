"""Samples with metadata in the place of images, video and audio, which are not decoded.

Where the index of a dataset has the metadata, the media are not even read; their headers are read
otherwise.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.file_store import FileStoreWrapper
from energon_lite.core.samples import SourceInfo
from energon_lite.decoding.sample_decoder import PartDecoder, SampleDecoder
from energon_lite.extras.joins.joined import JoinReader
from energon_lite.extras.media.media_headers import MediaFilterConfig, read_metadata
from energon_lite.extras.media.media_metadata import (
    ImageMetadata,
    MediaMetadataBase,
    deserialize_media_metadata,
    media_database,
    serialize_media_metadata,
)
from energon_lite.extras.stores.file_stores import WebdatasetFileStore
from energon_lite.formats.shards import MAX_BLOCK_BYTES, Block, BlockReader, ShardReader
from energon_lite.sources.sample_loader import SampleLoader
from energon_lite.sources.source import WebdatasetSource

# Begins what stands in the place of a file: type and JSON of its metadata. No file of media does.
_STORED = b"\0energon_lite metadata\0"
_MEDIA = MediaFilterConfig.parse(None, header=False, extension=True)


def _in_place(kind: str, text: str) -> bytes:
    return _STORED + f"{kind} {text}".encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetadataDecoder(SampleDecoder):
    """Decodes the parts that are media to their metadata; of images with the size once decoded.

    Attributes:
        inner: decodes the other parts; without it they stay bytes.
    """

    inner: SampleDecoder | None

    def decode(self, fname: str, raw: bytes) -> Any:
        """Decodes a file, or what stands in its place.

        Raises:
            UnreadableMediaError: A file with the name of an image, video or recording is none.
        """
        found: MediaMetadataBase | None
        if raw.startswith(_STORED):
            kind, _, text = raw[len(_STORED) :].decode().partition(" ")
            found = deserialize_media_metadata(kind, text)
        else:
            stem, _, extension = fname.rpartition(".")
            name = stem if extension.isdecimal() else fname  # `jpg.0` is a JPEG
            found = read_metadata(name, io.BytesIO(raw), _MEDIA)
        if found is None:
            return raw if self.inner is None else self.inner.decode(fname, raw)
        if isinstance(found, ImageMetadata) and self.inner is not None and self.inner.limits:
            width, height = self.inner.limits.of_image(found.width, found.height)
            return dataclasses.replace(found, width=width, height=height)
        return found

    def decoder_of(self, part: str) -> PartDecoder:
        """Returns the function that decodes a part."""
        return partial(self.decode, part)


class MetadataFileStore(FileStoreWrapper[bytes]):
    """A store for a `MetadataDecoder`: files with stored metadata are not read.

    Args:
        inner: the store of the files.
    """

    def __getitem__(self, key: str) -> tuple[bytes, SourceInfo]:
        """Returns the metadata of a file, or reads it."""
        return self.get_raw(key)

    def get_raw(self, key: str) -> tuple[bytes, SourceInfo]:
        """Returns the metadata of a file, or reads it."""
        with suppress(RuntimeError, KeyError):
            kind, text = serialize_media_metadata(self.inner.get_media_metadata(key))
            path = self.get_path()
            return _in_place(kind.value, text), SourceInfo(path, key, path, (key,))
        return self.inner.get_raw(key)


class _MetadataReader(ShardReader):
    """Reads the metadata of samples from the index, and their other files from the tars.

    Args:
        reader: of the same samples.
        wants: whether a part is read.
    """

    def __init__(self, reader: ShardReader, wants: Callable[[str], bool]) -> None:
        self.__dict__.update(reader.__dict__)
        self._wants = wants
        self._store = WebdatasetFileStore(reader.root)

    def read(self, indices: Int64Array, max_bytes: int = MAX_BLOCK_BYTES) -> Block:
        """Reads samples as `ShardReader.read` does."""
        shards, places = self.locate(indices)
        found: dict[tuple[int, int], Any] = {}
        for shard in np.unique(shards).tolist():
            own, tar_file_id = places[shards == shard], self.tar_file_ids[shard]
            samples = media_database(self.root).samples(tar_file_id, int(own.min()), int(own.max()))
            found |= {(shard, place): sample for place, sample in samples.items()}
        data, members, names = bytearray(), list[Any](), list[str]()
        for shard, place in zip(shards.tolist(), places.tolist(), strict=True):
            if len(data) > max_bytes:
                break
            names.append(self.shards[shard])
            try:
                members.append(self._add_files(data, found.get((shard, place))))
            except (OSError, ValueError, KeyError) as error:
                members.append(error)
        return Block(memoryview(data), members, names, places[: len(names)].tolist())

    blocks, advise = BlockReader.blocks, BlockReader.advise  # not of tars

    def _add_files(
        self, data: bytearray, sample: tuple[str, list[tuple[str, str, str]]] | None
    ) -> list[tuple[str, int, int]]:
        """Adds the files of one sample to a block, and returns its members."""
        if sample is None:
            raise DatasetFormatError(
                f"{self.root}: index.sqlite lacks this sample; run `energon-lite prepare "
                f"{self.root} --tar-index-only`"
            )
        members = []
        for part, kind, text in sample[1]:
            name, start = f"{sample[0]}.{part}", len(data)
            if kind:
                data += _in_place(kind, text)
            elif self._wants(part):
                data += self._store[name][0]
            members.append((name, start, len(data)))
        return members


def metadata_source(source: WebdatasetSource[Any]) -> WebdatasetSource[Any]:
    """Returns a source with the same samples, of which stored metadata are read, not the media.

    Args:
        source: its samples are decoded by a `MetadataDecoder`.
    """
    reader: Any = source.reader
    loader: Any = source.loader
    if isinstance(reader, JoinReader):
        sides = [
            dataclasses.replace(side, reader=_with_metadata(side.reader, own))
            for side, own in zip(reader.sides, loader.loaders, strict=True)
        ]
        return dataclasses.replace(source, reader=JoinReader(reader.index, sides))
    return dataclasses.replace(source, reader=_with_metadata(reader, loader))


def _with_metadata(reader: ShardReader, loader: SampleLoader) -> ShardReader:
    """Returns a reader of stored metadata, or the reader itself where none are stored.

    Code of the user that decodes by itself gets the files.
    """
    with suppress(RuntimeError):
        if isinstance(loader.decoder, MetadataDecoder) and media_database(reader.root).has_samples:
            return _MetadataReader(reader, loader.wants)
    return reader
