"""JSONL files as sources: each line that is not blank is a crude sample."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from os import PathLike
from typing import Any, ClassVar

import numpy as np

from energon_lite.core.errors import DecodingError, add_note
from energon_lite.core.samples import CrudeSample, SourceInfo
from energon_lite.core.seeds import key_of
from energon_lite.core.stacking import LOSS_WEIGHT
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.names.energon_modules import LazyFunction
from energon_lite.sources.sample_loader import SampleLoader, make_crude
from energon_lite.sources.source_factory import SourceFactory, plain
from energon_lite.storage.jsonl import LINES, LineReader, sample_place
from energon_lite.storage.local_paths import local_path
from energon_lite.storage.shards import BlockBytes
from energon_lite.stores.file_stores import JsonlFileStore

_JSON = "json"
# By default an epoch is shuffled in at least 256 slices, of at most 4,096 samples.
_NUM_SLICES, _LONGEST_SLICE = 256, 4096


class LineLoader(SampleLoader):
    """Makes crude samples of lines, with no detour for names of parts; errors name the line."""

    def place_of(self, members: Any, shard: str, place: int) -> str:
        """Names a sample in errors."""
        del members, shard
        return f"{self.root}, {sample_place(place)}"

    def __call__(
        self, data: BlockBytes, members: Any, shard: str, place: int, key: RestoreKey
    ) -> Any:
        """Makes the sample of one line.

        Raises:
            Exception: As of other samples.
        """
        try:
            if isinstance(members, Exception):
                raise copy.copy(members) from members
            ((name, first, last),) = members
            plans = self._plans
            target, decode = plans.get(_JSON) or plans.setdefault(_JSON, self._plan(_JSON))
            sample = CrudeSample(
                __key__=name.removesuffix(".json"),
                __restore_key__=key,
                __subflavors__=self.subflavors.copy(),
                __sources__=(SourceInfo(self.path, key[2], shard, (name,)),),
                __shard__=shard,
            )
            if target is not None and decode is not None:
                sample[_JSON] = value = decode(bytes(data[first:last]))
                if not isinstance(value, dict):
                    raise DecodingError(f"is no JSON object, but a {type(value).__name__}")
            if self.loss_weight != 1:
                sample[LOSS_WEIGHT] = self.loss_weight
            return sample
        except Exception as error:
            add_note(error, self.place_of(members, shard, place))
            raise


class JsonlPreparator:
    """Energon's name for what prepares JSONL files."""

    _prepare = LazyFunction("energon_lite.prepare.lines:prepare_lines")

    @staticmethod
    def prepare_dataset(path: str | PathLike[str]) -> int:
        """Writes the index of a JSONL file.

        Returns:
            The number of samples.
        """
        samples: int = JsonlPreparator._prepare(path).samples
        return samples

    @staticmethod
    def iter_dataset_content(path: str | PathLike[str]) -> Iterator[dict[str, bytes]]:
        """Yields the samples of a file, undecoded: `{"json": line}`."""
        reader = LineReader(local_path(path))
        for block in reader.blocks(np.arange(reader.num_samples)):
            for members in block.members:
                if isinstance(members, Exception):
                    raise members
                ((_, first, last),) = members
                yield {"json": bytes(block.data[first:last])}


class CrudeJsonlDatasetFactory(SourceFactory[CrudeSample], JsonlPreparator):
    """All lines of a JSONL file; a split part changes only the name of the source.

    A sample has `json`, the value of its line, and as `__key__` its number, counted from 0. The
    index `x.jsonl.idx` (`energon-lite prepare x.jsonl`) saves reading the whole file at the start.

    Args:
        path: the file.
        split_part: only for the name.
        decoder: has the limits of a decoded line; lines are decoded in any case.
        kwargs: as in `SourceFactory`. `part_filter` is called with "json"; where it returns False,
            samples have no `json`. `max_samples_per_sequence` is by default 4,096, or a 256th of
            the file if that is less.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: The index is of another content, or the file is no regular one.
        EmptyDatasetError: The file, or the subset, has no sample.
    """

    __sample_type__: ClassVar[type[Any] | None] = CrudeSample

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        split_part: str = LINES,
        decoder: SampleDecoder | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, split_part=split_part, **kwargs)
        self.split_part = LINES
        self._decoder = decoder or SampleDecoder()
        reader = LineReader(self.path, self.max_open)
        self._size_bytes = reader.size_bytes
        self._read_from(reader, min(_LONGEST_SLICE, reader.num_samples // _NUM_SLICES))

    def as_file_store(self) -> JsonlFileStore:
        """Returns access to the lines by key."""
        return JsonlFileStore(self.path)

    def sample_loader(self) -> SampleLoader:
        """Makes what turns lines into samples."""
        return LineLoader(self.path, self._wants, self._decoder, make_crude, self.subflavors)

    def sample_settings(self) -> dict[str, JSON]:
        """Returns the decoder."""
        return {"decoder": plain(self._decoder.config())}

    def _fingerprint(self) -> tuple[str, int]:
        digest = key_of("lines", self._reader.num_samples, self._size_bytes) & (2**64 - 1)
        return f"{digest:016x}", self._size_bytes


class DefaultCrudeJsonlDatasetFactory(CrudeJsonlDatasetFactory):
    """The lines of a JSONL file, with subflavors.

    Args:
        path: the file.
        kwargs: as in `CrudeJsonlDatasetFactory`.
    """
