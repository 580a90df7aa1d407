"""Reads and encodes the samples of a plan, in its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from energon_lite.batching.rules import TOKENS
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import current_context
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED
from energon_lite.sources.given_order import GivenRows
from energon_lite.stages.measuring import MeasureCursor
from energon_lite.stages.overlong import name_of
from energon_lite.stages.planned.order import PlannableDataset
from energon_lite.stages.planned.window import AGAIN, PlannedWindow


@dataclass(frozen=True)
class PlannedLengths:
    """What of a length index a plan uses.

    Attributes:
        index: its name.
        resources: what limits a list, tokens first.
        has_modality: whether another resource than tokens tells the modality.
        kept_tokens: gives how many tokens of a sample with a length come into lists.
    """

    index: str
    resources: tuple[str, ...]
    has_modality: bool
    kept_tokens: Callable[[Any], int]


@dataclass
class _Branch:
    """The samples of one source."""

    cursor: MeasureCursor[Any]
    rows: GivenRows


class PlanReader:
    """Returns the samples of a stream's lists, one after the other.

    What cannot be read, or is skipped by a hook, was counted there; its place stays empty.

    Args:
        plannable: the pipeline.
        measured: what the plan goes by.
        window: the plan.
        first_pack: where to begin.
        names: of the sources.
        stream: the stream.
    """

    def __init__(
        self,
        plannable: PlannableDataset,
        measured: PlannedLengths,
        window: PlannedWindow,
        first_pack: int,
        names: list[str],
        stream: Stream,
    ) -> None:
        self._plannable = plannable
        self._measured = measured
        self._names = names
        self._stream = stream
        units = window.packs.indices[window.packs.offsets[first_pack] :]
        refs = window.units.refs[units]
        self._refs = window.refs.chosen(refs)
        self._sources: list[int] = self._refs.sources.tolist()
        self._lengths: list[list[int]] = window.lengths[refs].tolist()
        # A sample in several parts is read for each, and counts with the first.
        starts = window.units.starts[units]
        self._is_again: list[bool] = ((starts > 0) | (starts == AGAIN)).tolist()
        order = np.argsort(self._refs.sources, kind="stable")
        edges = np.flatnonzero(np.diff(self._refs.sources[order])) + 1
        self._places = {
            int(self._refs.sources[order[first]]): order[first:last]
            for first, last in pairwise([0, *edges.tolist(), len(order)])
            if first < last
        }
        self._branches: dict[int, _Branch] = {}
        self._at = 0

    def __next__(self) -> Any:
        """Returns the next sample, or `SKIPPED`."""
        at = self._at
        self._at += 1
        source = self._sources[at]
        branch = self._branches.get(source) or self._open(source)
        context = current_context()
        num_records = len(context.records)
        branch.rows.num_due += 1
        try:
            sample = next(branch.cursor)
        except StopIteration:
            sample = SKIPPED
        if self._is_again[at]:
            context.cost(self._names[source]).draws -= 1
            del context.records[num_records:]
        if sample is not SKIPPED:
            length = branch.cursor.length
            self._check(branch.cursor.key, sample, length, self._lengths[at])
            if self._is_again[at]:
                kept = self._measured.kept_tokens(length)
                context.cost(self._names[source]).tokens -= kept
        return sample

    def _open(self, source: int) -> _Branch:
        name, own = self._names[source], self._places[source]
        refs = self._refs.chosen(own)
        rows = GivenRows(refs.epochs, refs.indices, refs.numbers)
        reading = self._plannable.reading(name, rows)
        cursor: Any = reading.cursor(replace(self._stream, share=len(own) / len(self._refs)))
        branch = self._branches[source] = _Branch(cursor, rows)
        return branch

    def _check(self, key: RestoreKey, sample: Any, length: Any, planned: list[int]) -> None:
        """Refuses a sample that has not the length it was planned with."""
        if type(length) is int and length == planned[0]:
            return
        given = length if isinstance(length, Mapping) else {TOKENS: length}
        sizes = dict(zip(self._measured.resources, planned, strict=False))
        if any(given.get(name) != size for name, size in sizes.items()):
            raise FatalSampleError.from_sample_key(
                name_of(key, sample),
                f"length index {self._measured.index!r} says {sizes}, but sample_length gave "
                f"{length!r:.80}: the data or the encoder changed since it was written, or the "
                "length is random. Write it anew with `energon-lite lengths`, or leave out "
                "`lengths`",
            )
