"""Reads and encodes the samples of planned lists, in the order of the lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from typing import Any

import numpy as np

from energon_lite.batching.rules import TOKENS
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.keys import REPEATED
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import current_context
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED
from energon_lite.sources.planned_source import PlannedRows
from energon_lite.stages.collect import name_of
from energon_lite.stages.token_lengths import MeasureCursor


@dataclass
class _Branch:
    """The samples of one source."""

    cursor: MeasureCursor[Any]
    rows: PlannedRows


class PlanReader:
    """Reads the samples of a stream's lists; each source in blocks.

    Samples that cannot be read, or that a hook skips, are counted there and leave a gap.

    Args:
        spec: the `PlannedDataset`.
        window: the plan.
        first: number of the list to begin with.
        names: of the sources.
        stream: the stream.
    """

    def __init__(
        self, spec: Any, window: Any, first: int, names: list[str], stream: Stream
    ) -> None:
        self._spec = spec
        self._names = names
        self._stream = stream
        rows = window.packs.indices[window.packs.offsets[first] :]
        is_repeated = rows < 0
        num_before = int((window.packs.indices < 0).sum() - is_repeated.sum())
        units = window.units.chosen(np.where(is_repeated, ~rows, rows))
        self._refs = units.refs
        self._sizes = iter(np.diff(window.packs.offsets[first:]).tolist())
        self._rows = self._numbered(units, is_repeated.tolist(), count(num_before))
        order = np.argsort(self._refs.sources, kind="stable")
        edges = np.flatnonzero(np.diff(self._refs.sources[order])) + 1
        self._places = {
            int(self._refs.sources[order[start]]): order[start:stop]
            for start, stop in pairwise([0, *edges.tolist(), len(order)])
            if start < stop
        }
        self._branches: dict[int, _Branch] = {}

    def _numbered(
        self, units: Any, is_repeated: list[bool], numbers: Iterator[int]
    ) -> Iterator[tuple[RestoreKey, tuple[int, bool, list[int]]]]:
        """Yields key, source, whether the sample was read before, and planned lengths of units."""
        keys, sources = units.keys(self._names), units.refs.sources.tolist()
        # A sample in several parts is read for each, and counts with the first.
        was_read = (units.starts > 0).tolist()
        for i, (key, lengths) in enumerate(zip(keys, units.planned.tolist(), strict=True)):
            if is_repeated[i]:
                key = (REPEATED, next(numbers), key)
            yield key, (sources[i], was_read[i] or is_repeated[i], lengths)

    def next_list(self) -> list[tuple[RestoreKey, Any]]:
        """Returns restore keys and samples of the next list; `SKIPPED` for those that failed."""
        rows = islice(self._rows, next(self._sizes))
        return [(key, self._read(*row)) for key, row in rows]

    def _read(self, source: int, was_read: bool, planned: list[int]) -> Any:
        branch = self._branches.get(source) or self._open(source)
        context = current_context()
        num_records = len(context.records)
        branch.rows.num_due += 1
        try:
            sample = next(branch.cursor)
        except StopIteration:
            sample = SKIPPED
        cost = context.cost(self._names[source])
        if was_read:
            cost.draws -= 1
            del context.records[num_records:]
        if sample is not SKIPPED:
            length = branch.cursor.length
            self._check(branch.cursor.key, sample, length, planned)
            if was_read:
                cost.tokens -= self._spec.rules.kept_tokens(length)
        return sample

    def _open(self, source: int) -> _Branch:
        name, own = self._names[source], self._places[source]
        refs = self._refs.chosen(own)
        rows = PlannedRows(refs.epochs, refs.indices, refs.numbers)
        reading = self._spec.plannable.reading(name, rows)
        cursor: Any = reading.cursor(replace(self._stream, share=len(own) / len(self._refs)))
        branch = self._branches[source] = _Branch(cursor, rows)
        return branch

    def _check(self, key: RestoreKey, sample: Any, length: Any, planned: list[int]) -> None:
        """Refuses a sample that does not have the length it was planned with."""
        if type(length) is int and length == planned[0]:
            return
        measured = length if isinstance(length, Mapping) else {TOKENS: length}
        sizes = dict(zip(self._spec.rules.resources, planned, strict=False))
        if any(measured.get(name) != size for name, size in sizes.items()):
            raise FatalSampleError.from_sample_key(
                name_of(key, sample),
                f"length index {self._spec.index!r} has {sizes}, but sample_length returned "
                f"{length!r:.80}: the data or the encoder changed since the index was written, or "
                "the length is random. Write the index again with `energon-lite lengths`, or leave "
                "out `lengths`",
            )
