"""The samples of a split, each read when it is looked at: by source, in either order, by search.

Nothing lists the samples: places are computed, so a large dataset opens as quickly as a small one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from os import PathLike
from threading import Lock
from time import monotonic
from typing import Any, Literal, NamedTuple

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import SourceFacts
from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.topology import Stream
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.extras.inspect.draws import RunShape
from energon_lite.extras.inspect.forecast import run_opener
from energon_lite.extras.preview.page_jobs import report_progress
from energon_lite.extras.preview.raw_folders import RawOpener, raw_notice
from energon_lite.extras.view.fields import fields_of, is_plain, short_text
from energon_lite.formats.known import format_of
from energon_lite.formats.shards import ShardReader
from energon_lite.formats.sqlite import sample_indices
from energon_lite.metadataset.build import build_training, build_validation
from energon_lite.metadataset.read import is_metadataset, split_names
from energon_lite.sources.source import sources_in
from energon_lite.stages.plan_order import NO_REFS, OrderReader, joined, order_of
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

Order = Literal["files", "run"]

# Draws that are computed at a time, and at all; characters of a value that a search looks at.
_BLOCK, _MAX_DRAWS, _MAX_SEARCHED = 16_384, 5_000_000, 100_000


class Place(NamedTuple):
    """The place of a sample: the number of its source, its number there, and the epoch."""

    source: int
    number: int
    epoch: int = 0


@dataclass(frozen=True)
class Query:
    """A choice of samples and their order: `source` is a number, `text` stands in the sample."""

    order: Order = "files"
    source: int | None = None
    text: str = ""


class Found(NamedTuple):
    """Samples that fit a query.

    Attributes:
        entries: position in the order, and place.
        next: the position to continue at; None at the end.
    """

    entries: list[tuple[int, Place]]
    next: int | None


@dataclass(frozen=True)
class SourceRow:
    """Facts of a source: `share` of the run's first samples in 0..1, if it is known."""

    facts: SourceFacts
    path: str
    share: float | None
    subflavors: Mapping[str, Any]


def split_names_of(path: str | PathLike[str]) -> Sequence[str]:
    """Returns the splits of a metadataset, or the split parts of a folder or file."""
    local = local_path(path)
    return split_names(local) if is_metadataset(local) else format_of(local).split_parts(local)


class SplitBrowser:
    """Reads the samples of a split, in any order, from any thread.

    Pictures, audio and video stay bytes, and no hook runs.

    Args:
        path: a prepared folder, a file of samples or a metadataset.
        split_part: the split.
        trust: whether code that the dataset names may run. Such code gets decoded parts; without
            it, the parts are shown in place of samples.
        num_streams: of the run.
        batch_size: samples of a batch of the run.
        settings: further arguments of `get_train_dataset` that decide the order of the run.

    Attributes:
        sources: what is known of each source.
        num_samples: of all sources.
        run_error: why there is no order of the run; empty if there is one.
        raw: what is missing without `trust`; empty if nothing is.
        is_crude: whether a source has crude samples, which need a task encoder with a cooker.

    Raises:
        FileNotFoundError: The path does not exist.
        DatasetFormatError: It is not valid, or has no such split.
    """

    def __init__(
        self, path: str | PathLike[str], split_part: str, *, trust: bool | None = None,
        num_streams: int = 1, batch_size: int = 1, **settings: Any,
    ) -> None:  # fmt: skip
        self.run_error, self._lock = "", Lock()
        undecoded: Any = {} if trust else {"image_decode": "bytes", "av_decode": "bytes"}
        opener = RawOpener(**vars(run_opener(
            path, split_part, RunShape(0, batch_size, 1, num_streams), trust=trust,
            decoder=SampleDecoder(**undecoded), **settings,
        )))  # fmt: skip
        shares: Mapping[str, float] = {}
        try:
            dataset = build_training(opener, repeat=True)
            order, shares = order_of(dataset), dataset.expected(1000.0)
        except ValueError as error:
            self.run_error = str(error)
            dataset = build_validation(opener.node, opener)
        self._sources = list(sources_in(dataset))
        names = [source.name for source in self._sources]
        total = sum(shares.values())
        self._factories = opener.factories[-len(names) :]
        self.raw = raw_notice(self._factories)
        self.is_crude = any(factory.is_crude for factory in self._factories)
        self.sources = [
            SourceRow(
                facts, str(factory.path),
                shares[facts.name] / total if facts.name in shares else None, factory.subflavors,
            )
            for source, factory in zip(self._sources, self._factories, strict=True)
            for facts in source.sources()
        ]  # fmt: skip
        self._starts = [0, *accumulate(source.facts.num_samples for source in self.sources)]
        self.num_samples = self._starts[-1]
        self._batch_size = batch_size
        self._streams: list[tuple[OrderReader, Any]] = []
        if not self.run_error:
            streams = (Stream(index, num_streams) for index in range(num_streams))
            self._streams = [(OrderReader(order, names, own), NO_REFS) for own in streams]

    def bounds(self, query: Query) -> tuple[int, int | None]:
        """Returns the first position of an order and the one after its last; None without end."""
        if query.order == "run":
            return 0, None
        first = query.source or 0
        return self._starts[first], self._starts[first + 1 if query.source is not None else -1]

    def place(self, query: Query, position: int) -> Place | None:
        """Returns which sample is at a position of an order; None where there is none.

        Raises:
            ValueError: There is no order of the run, or it cannot be computed.
        """
        first, stop = self.bounds(query)
        if position < first or (stop is not None and position >= stop):
            return None
        if query.order == "run":
            return self._drawn(position)
        number = bisect_right(self._starts, position) - 1
        offset = position - self._starts[number]
        return Place(number, self._sources[number].order.first + offset)

    def _drawn(self, position: int) -> Place | None:
        """Returns the draw of a run at a position: its batches take turns among the streams."""
        if self.run_error or position >= _MAX_DRAWS:
            what = f"the order of the run is computed up to sample {_MAX_DRAWS:,} only"
            raise ValueError(self.run_error or what)
        slot, row = divmod(position, self._batch_size)
        batch, stream = divmod(slot, len(self._streams))
        draw = batch * self._batch_size + row
        with self._lock:
            reader, refs = self._streams[stream]
            blocks, num_draws = [refs], len(refs.draws)
            try:
                while num_draws <= draw:
                    blocks.append(reader.take(_BLOCK))
                    if not len(blocks[-1].draws):
                        return None
                    num_draws += len(blocks[-1].draws)
                    report_progress(num_draws, draw)
            finally:
                if len(blocks) > 1:
                    refs = joined(blocks)
                    self._streams[stream] = reader, refs
        return Place(int(refs.sources[draw]), int(refs.indices[draw]), int(refs.epochs[draw]))

    def position(self, place: Place) -> int:
        """Returns the position of a sample in the order of the files."""
        return self._starts[place.source] + place.number - self._sources[place.source].order.first

    def at(self, query: Query, position: int) -> Any:
        """Reads the sample at a position of an order; raises as `place` and `sample`."""
        place = self.place(query, position)
        if place is None:
            raise ValueError(f"there is no sample at {position:,}")
        return self.sample(place)

    def sample(self, place: Place) -> Any:
        """Reads a sample.

        Raises:
            ValueError: There is no such sample.
            Exception: What reading or decoding it raised.
        """
        if not 0 <= place.source < len(self._sources):
            raise ValueError(f"there is no source {place.source}")
        source = self._sources[place.source]
        return source.restore_sample((source.name, place.epoch, place.number, 0))

    def find(self, key: str) -> Place | None:
        """Finds a sample by its key, where a source has an `index.sqlite`."""
        for number, source in enumerate(self._sources):
            reader, order = source.reader, source.order
            if not isinstance(reader, ShardReader):
                continue
            tar_file_id, place = (sample_indices(reader.root, [key]) or {}).get(key, (-1, 0))
            if tar_file_id in reader.tar_file_ids:
                excluded = self._factories[number].opened.excluded
                position = int(reader.starts[reader.tar_file_ids.index(tar_file_id)]) + place
                index = position - bisect_left(excluded, position)
                is_own = 0 <= index - order.first < order.num_samples
                if is_own and position not in excluded:
                    return Place(number, index)
        return None

    def stored_lengths(self) -> dict[str, Int64Array]:
        """Returns the lengths in the indexes of the sources; of samples that have a length.

        Returns:
            By name of resource and index, of all sources together; shape (N,).
        """
        found: dict[str, list[Int64Array]] = {}
        for source in self._sources:
            root, order = source.reader.root, source.order
            folder = format_of(root).beside(root, "lengths")[1]
            entries = files.entries(folder) if files.is_folder(folder) else []
            for name in (entry.rstrip("/") for entry in entries):  # of folders they end with one
                for resource in source.stored_facts(name).get("resources", ()):
                    with suppress(OSError, DatasetFormatError):  # an index of other data
                        whole = source.stored_lengths(name, resource)
                        own = whole[order.first : order.first + order.num_samples]
                        found.setdefault(f"{resource}, index {name}", []).append(
                            own[own > 0].astype(np.int64)
                        )
        return {name: np.concatenate(own) for name, own in found.items()}

    def search(
        self, query: Query, start: int, count: int, *, step: int = 1, limit_sec: float = 1.0
    ) -> Found:
        """Returns the next samples that fit a query.

        Args:
            query: which samples.
            start: position to begin at.
            count: samples at most.
            step: 1, or -1 to go back.
            limit_sec: after so long, what was found so far is returned.
        """
        first, _ = self.bounds(query)
        position, end = max(start, first) if step > 0 else start, monotonic() + limit_sec
        entries: list[tuple[int, Place]] = []
        while (place := self.place(query, position)) is not None:
            if len(entries) == count or monotonic() > end:
                return Found(entries, position)
            if query.source in (None, place.source) and self._has(place, query.text.casefold()):
                entries.append((position, place))
            position += step
        return Found(entries, None)

    def _has(self, place: Place, text: str) -> bool:
        if not text:
            return True
        try:
            values = fields_of(self.sample(place)).values()
        except Exception:  # it cannot be read; the page of the sample reports why
            return False
        plain = (value for value in values if is_plain(value))
        return any(text in short_text(value, _MAX_SEARCHED).casefold() for value in plain)
