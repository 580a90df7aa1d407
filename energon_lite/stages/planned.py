"""Lists of samples that a collector chooses from the order and a length index, before any is read.

Axes: U units (samples, or parts of samples that are too long), R resources, S streams.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Self

from energon_lite.batching.collector import Samples, WindowCollector
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import TOKENS, WHOLE, LengthRules, OverlongError, number_groups
from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.errors import FatalSampleError, StateError
from energon_lite.core.keys import REPEATED, is_again, is_piece, name_of_key, whole
from energon_lite.core.sample_columns import Columns
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import Cost, StreamContext, context_of, current_context
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED
from energon_lite.formats.length_files import sums_of
from energon_lite.sources.reading import facts_of
from energon_lite.sources.source import WebdatasetSource, sources_in
from energon_lite.stages.collect import ListDataset, count_dropped
from energon_lite.stages.plan_order import (
    NO_REFS,
    DrawnRefs,
    OrderReader,
    PlanReader,
    chosen,
    joined,
    keys_of,
    order_of,
)
from energon_lite.stages.token_lengths import MeasureDataset

# Other lists of a group that are tried in place of one that was lost.
_MOST_TRIED = 8
# Counts of streams and passes that are kept, as a plan takes seconds.
_MOST_COUNTED = 4096


class Units(NamedTuple):
    """Samples, and parts of samples, that a collector chooses from; U of them.

    Attributes:
        sources: shape (U,); this column and the next three are those of `DrawnRefs`.
        epochs: shape (U,).
        indices: shape (U,).
        draws: shape (U,).
        numbers: shape (U,), rising; their numbers in the collector.
        starts: shape (U,); first token of a part, or `WHOLE`.
        stops: shape (U,); the token after the last.
        groups: shape (U,).
        lengths: shape (U, R); of a part, its tokens.
        planned: shape (U, R); of the whole samples.
    """

    sources: Int64Array
    epochs: Int64Array
    indices: Int64Array
    draws: Int64Array
    numbers: Int64Array
    starts: Int64Array
    stops: Int64Array
    groups: Int64Array
    lengths: Int64Array
    planned: Int64Array

    def samples(self) -> Samples:
        """Returns what a collector knows of them."""
        return Samples(self.numbers, self.groups, self.lengths)

    def numbered(self, numbers: Any) -> Units:
        """Returns those with some numbers."""
        return chosen(self, np.searchsorted(self.numbers, numbers))

    def keys(self, names: Sequence[str]) -> list[RestoreKey]:
        """Returns their restore keys."""
        keys = keys_of(DrawnRefs(*self[:4]), names)
        for i in np.flatnonzero(self.starts != WHOLE).tolist():
            keys[i] = ("piece", int(self.starts[i]), int(self.stops[i]), keys[i])
        return keys


class PlannedWindow(NamedTuple):
    """The lists that one stream has of a window of the order.

    Attributes:
        units: what the lists consist of.
        packs: P lists of rows of `units`, in their order. A repetition of row u is `~u`.
        is_last: whether no window follows.
    """

    units: Units
    packs: Lists
    is_last: bool


class PlannedDataset(ListDataset[list[Any]]):
    """Lists of samples, planned window by window of the order; none is buffered.

    State: where the order stood when the window began, restore keys of the few samples that were
        carried over to it, and the lists that were emitted since.
    Length: number of lists in the plan of a pass; of endless data, about that of an epoch.
    Keys: as those of `CollectDataset`.

    Args:
        dataset: the samples, measured; each stage works on single samples, or on their order.
        rules: for lengths and groups; they name the length index.
        is_shared: whether each stream plans for all of them, and has its part of the plan.

    Attributes:
        webdatasets: the sources, by name.
        order: the restore keys that come, in their order.
        digest: hash of all lengths.
        mean_tokens: tokens of a sample, by source.
        kind_of_samples: what can be decoded together of the sources, as `facts_of` returns it.
        mean_bytes: of a sample.

    Raises:
        ValueError: The order is not known before reading; or the index has no modalities.
        FileNotFoundError: A source has no such index.
    """

    def __init__(self, dataset: MeasureDataset[Any], rules: LengthRules, is_shared: bool) -> None:
        super().__init__(dataset.nested())
        self.rules, self.is_shared = rules, is_shared
        self.index = str(rules.lengths)
        self.set_order()

    def set_order(self) -> None:
        """Looks at the datasets below: their order, and the lengths of their samples."""
        self.order = order_of(self.dataset)
        self.webdatasets = {source.name: source for source in sources_in(self.dataset)}
        self.digest, self.mean_tokens = self._totals()
        self.kind_of_samples, self.mean_bytes = facts_of([*self.webdatasets.values()])
        self._counted: dict[tuple[int, int, int], int] = {}

    def with_children(self, children: Sequence[SavableDataset[Any]]) -> Self:
        """Returns the same over another dataset."""
        other = super().with_children(children)
        other.set_order()
        return other

    @abstractmethod
    def collector(self, stream: Stream) -> WindowCollector:
        """Returns what chooses the lists of a stream."""

    def together(self, stream: Stream) -> range:
        """Returns the streams that have a plan together with a stream, which is one of them."""
        index = stream.index
        return range(stream.num_streams) if self.is_shared else range(index, index + 1)

    @property
    @abstractmethod
    def samples_per_list(self) -> float:
        """About how many samples a list has."""

    def cursor(self, stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        return PlanCursor(self, stream)

    def own_settings(self) -> dict[str, JSON]:
        """Returns the index; a subclass adds what else decides which samples share a list."""
        return {"lengths": self.digest}

    def lengths(self, source: str) -> tuple[Int64Array, ...]:
        """Opens the lengths of a source's samples; shape (N,) for each resource, tokens first."""
        opened = self.webdatasets[source]
        return tuple(opened.stored_lengths(self.index, name) for name in self._stored(opened))

    def _stored(self, source: WebdatasetSource[Any]) -> tuple[str, ...]:
        """Names the lengths to look up: limits of a list, and lengths that determine modalities."""
        if self.rules.group_by != "modality" or len(self.rules.resources) > 1:
            return self.rules.resources
        stored = source.stored_facts(self.index).get("resources", ())
        others = tuple(name for name in stored if name != TOKENS)
        if not others:
            source.stored_lengths(self.index)  # raises if there is none at all
            raise ValueError(
                f'{source.reader.root}: group_by="modality", but length index {self.index!r} has '
                "tokens only. Let sample_length return a dict with what an image takes, too, as in "
                '{"tokens": n, "images": m}, and write the index again'
            )
        return self.rules.resources + others

    def _totals(self) -> tuple[str, dict[str, float]]:
        """Returns a hash of all lengths, and the mean tokens of a sample by source."""
        digest, means = hashlib.blake2b(digest_size=16), {}
        for name, source in sorted(self.webdatasets.items()):
            facts = source.stored_facts(self.index)
            columns = dict(zip(self._stored(source), self.lengths(name), strict=True))
            found = [sums_of(facts, *column) for column in columns.items()]
            for own, _ in found:
                digest.update(own.encode())
            means[name] = found[0][1]
        return digest.hexdigest(), means

    @property
    def shares(self) -> dict[str, float]:
        """Samples by source, of a million; of a pass, where the blend does not say."""
        target = self.dataset.expected(1e6)
        return target or {facts.name: float(facts.num_samples) for facts in self.sources()}

    def num_items(self, stream: Stream) -> int:
        """Counts the lists of a stream's pass; of endless data, about those of its first epoch."""
        if self.endless:
            return stream.part(self.dataset.num_items(stream) / max(1.0, self.samples_per_list))
        about = (stream.index, stream.num_streams, stream.pass_index)
        if about not in self._counted:
            if len(self._counted) > _MOST_COUNTED:
                self._counted.clear()
            cursor = PlanCursor(self, stream)
            with context_of(StreamContext(stream, max_skip_rate=1.0)):
                num = sum(len(window.packs) for window in cursor.windows())
            # A shared plan, which is made once, has those of all its streams.
            counts = getattr(cursor.collector, "num_lists", np.array([num])).tolist()
            for index, own in zip(self.together(stream), counts, strict=True):
                self._counted[(index, *about[1:])] = own
        return self._counted[about]

    def windows(self, stream: Stream) -> Iterator[PlannedWindow]:
        """Yields the plans of a stream's windows, of which nothing is read."""
        return PlanCursor(self, stream).windows()

    def planned_by(self) -> list[tuple[Any, str]]:
        """Lists all sources, with the name of the index."""
        return [(source, self.index) for source in self.webdatasets.values()]


class PlanCursor(Cursor[list[Any]]):
    """A stream's position among planned lists."""

    key: RestoreKey = ()

    def __init__(self, spec: PlannedDataset, stream: Stream) -> None:
        self._spec = spec
        self._stream = stream
        self._names = list(spec.webdatasets)
        self._opened = cache(lambda number: spec.lengths(self._names[number]))
        self.collector = spec.collector(stream)
        self._readers = [
            OrderReader(spec.order, self._names, replace(stream, index=index))
            for index in spec.together(stream)
        ]
        self._num_units = self._emitted = 0
        self._units = self._new_units(NO_REFS)
        self._window: PlannedWindow | None = None
        self._reader: PlanReader | None = None
        self._mark()

    def _mark(self) -> None:
        """Saves where the window begins, and what is carried over to it."""
        state = self.collector.state()
        rows = state.rows()
        self._units = self._units.numbered(rows[:, 0])
        self._starts: Sequence[Snapshot] = tuple(reader.snapshot() for reader in self._readers)
        self._fields = {
            "units": self._num_units,
            "draws": tuple(reader.num_draws for reader in self._readers),
            "keys": tuple(self._units.keys(self._names)),
            "rows": tuple(map(tuple, rows.tolist())),
            "counts": state.counts,
        }

    def take(self, n: int) -> tuple[list[list[Any]] | Columns, list[RestoreKey]]:
        """Returns the samples of some of the next lists, which are read together, and their keys.

        A list of which all samples failed is omitted; where ranks must be in step, another list
        of its group takes its place. Hooks that draw do so in the order of the lists.
        """
        window, first = self._with_lists(), self._emitted
        num = min(1 if self._spec.drawing else n, len(window.packs) - first)
        if self._reader is None:
            self._reader = PlanReader(self._spec, window, first, self._names, self._stream)
        self._last = window.units, window.packs[first]
        self._emitted += num
        reader, self._reader = self._reader, None
        slot = self._spec.kind, current_context().batch_index
        found: list[tuple[list[Any], RestoreKey]] = []
        for number, (keys, samples) in enumerate(reader.next_lists(num), first):
            if not keys and self._spec.traits.lockstep:
                keys, samples = self._in_place_of(window, number)
            if keys:
                found.append((samples, (*slot, *keys)))
        self._reader = reader  # after an error, the next list begins with another one
        self.key = found[-1][1] if found else self.key
        return [samples for samples, _ in found], [key for _, key in found]

    def _in_place_of(self, window: PlannedWindow, lost: int) -> tuple[list[RestoreKey], list[Any]]:
        """Reads another list of the group of a list that was lost, which is emitted twice then.

        Without it the stream would be one list ahead of others, and ranks have batches of different
        groups at a step. It returns nothing if hooks skip all of the group on purpose.

        Raises:
            FatalSampleError: There is no other list that can be read.
        """
        packs, context = window.packs, current_context()
        firsts = packs.indices[packs.offsets[:-1]]
        groups = window.units.groups[np.where(firsts < 0, ~firsts, firsts)]
        others = np.flatnonzero(groups == groups[lost])
        others = np.roll(others, -int(np.searchsorted(others, lost)) - 1)[:-1]
        records, costs, draw = context.records, context.costs, context.sample_index
        is_on_purpose = all(record.on_purpose for record in records)
        try:
            for number in others[:_MOST_TRIED].tolist():
                context.records, context.costs = [], defaultdict(Cost)  # counted in its own place
                reader = PlanReader(self._spec, window, number, self._names, self._stream)
                ((keys, samples),) = reader.next_lists(1)
                if keys:
                    again = len(packs.indices) + lost
                    return [k if is_again(k) else (REPEATED, again, k) for k in keys], samples
                is_on_purpose &= all(record.on_purpose for record in context.records)
        finally:
            context.records, context.costs, context.sample_index = records, costs, draw
        if is_on_purpose:
            return [], []
        rows = packs[lost]
        keys = chosen(window.units, np.where(rows < 0, ~rows, rows)).keys(self._names)
        raise FatalSampleError(
            f"all samples of a planned list failed ({', '.join(map(name_of_key, keys[:8]))}), and "
            "no other list of their group can be read: ranks would come out of step. Repair the "
            "data or the hook, or write the length index again, which omits samples that fail"
        )

    @property
    def lengths(self) -> list[list[int]]:
        """The lengths of the samples of the list that `next` returned last, of each resource."""
        units, rows = self._last
        found: list[list[int]] = units.lengths[np.where(rows < 0, ~rows, rows)].tolist()
        return found

    def windows(self) -> Iterator[PlannedWindow]:
        """Yields the plans of the windows to come, of which nothing is read."""
        while True:
            try:
                window = self._with_lists()
            except StopIteration:
                return
            self._emitted = len(window.packs)
            yield window

    def _with_lists(self) -> PlannedWindow:
        """Returns the window with the next list."""
        window = self._window or self._plan()
        while self._emitted >= len(window.packs):
            if window.is_last:
                raise StopIteration
            self._emitted = 0
            self._mark()
            window = self._plan()
        return window

    def _plan(self) -> PlannedWindow:
        """Plans lists up to the next place between windows."""
        collector, blocks = self.collector, [self._units]
        has_ended = False
        while not len(lists := collector.next_window(has_ended)) and not has_ended:
            num = -(-collector.num_wanted // len(self._readers))
            taken = [reader.take(num) for reader in self._readers]
            has_ended = all(len(refs.draws) < num for refs in taken)
            units = self._new_units(joined(taken))
            collector.add(units.samples())
            blocks.append(units)
        self._units = units = joined(blocks)
        if has_ended:
            rest = units.numbered(collector.leftover())
            self._drop(rest.keys(self._names), "left over at the end of the data")
        if self._emitted > len(lists):
            raise StateError(
                f"The checkpoint's stage 'plan' has {self._emitted} lists of a window that has "
                f"{len(lists)}; it was edited. Use another checkpoint."
            )
        packs = lists.renumbered(units.numbers.searchsorted)
        self._window, self._reader = PlannedWindow(units, packs, has_ended), None
        return self._window

    def _new_units(self, refs: DrawnRefs) -> Units:
        """Returns the units of samples that were drawn; drops those without a length."""
        rules, lengths = self._spec.rules, self._lengths_of(refs)
        has_length = lengths[:, 0] >= rules.shortest
        why = f"has length 0 in index {self._spec.index!r}: it was skipped when measured"
        self._drop(keys_of(chosen(refs, ~has_length), self._names), why)
        refs, lengths = chosen(refs, has_length), lengths[has_length]
        sizes = lengths[:, : len(rules.resources)]
        try:
            parts = rules.parts(sizes)
        except OverlongError as error:
            (key,) = keys_of(chosen(refs, [error.sample]), self._names)
            raise FatalSampleError.from_sample_key(name_of_key(key), str(error)) from None
        is_dropped = parts.is_overlong.copy()
        is_dropped[parts.samples] = False
        rows = np.flatnonzero(parts.is_overlong)
        for row, key in zip(rows.tolist(), keys_of(chosen(refs, rows), self._names), strict=True):
            if is_dropped[row]:
                self._drop([key], f"too long: {rules.excess(sizes[row].tolist())}")
            elif self._counts(key):
                current_context().costs[key[0]].overlong += 1
        own = parts.samples
        return self._units_of_parts(chosen(refs, own), parts.starts, parts.stops, lengths[own])

    def _units_of_parts(
        self, refs: DrawnRefs, starts: Int64Array, stops: Int64Array, lengths: Int64Array
    ) -> Units:
        first, self._num_units = self._num_units, self._num_units + len(starts)
        numbers, groups = np.arange(first, self._num_units), self._groups(refs, lengths)
        planned = lengths[:, : len(self._spec.rules.resources)]
        lengths = planned.copy()
        lengths[:, 0] = np.where(starts == WHOLE, lengths[:, 0], stops - starts)
        return Units(*refs, numbers, starts, stops, groups, lengths, planned)

    def _groups(self, refs: DrawnRefs, lengths: Int64Array) -> Int64Array:
        group_by = self._spec.rules.group_by
        groups: Any = refs.sources
        if group_by is None:
            groups = np.zeros_like(groups)
        elif group_by == "modality":
            groups = (lengths[:, 1:] > 0).any(axis=1).astype(np.int64)
        elif isinstance(group_by, Mapping):
            groups = number_groups(group_by[name] for name in self._names)[groups]
        return np.asarray(groups, np.int64)

    def _drop(self, keys: Iterable[RestoreKey], why: str) -> None:
        """Counts samples that no list has, if this stream drew them."""
        for key in filter(self._counts, keys):
            is_first = not is_piece(key) or key[1] == 0
            current_context().costs[whole(key)[0]].draws += is_first
            count_dropped(key, SKIPPED, why)

    def _counts(self, key: RestoreKey) -> bool:
        """Whether a sample is counted here: other streams plan with it, too.

        Samples of a window of which lists were emitted were counted with the first of the lists.
        """
        drawn_by: int = whole(key)[3] % self._stream.num_streams
        return not self._emitted and drawn_by == self._stream.index

    def _lengths_of(self, refs: DrawnRefs) -> Int64Array:
        """Looks the lengths up; shape (N, R)."""
        order = np.argsort(refs.sources, kind="stable")
        numbers, firsts = np.unique(refs.sources[order], return_index=True)
        lengths = np.empty((len(order), len(self._opened(0))), np.int64)
        for number, own in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=False):
            for place, column in enumerate(self._opened(number)):
                lengths[own, place] = column[refs.indices[own]]
        return lengths

    def snapshot(self) -> Snapshot:
        """Returns the position."""
        return Snapshot("plan", {**self._fields, "emitted": self._emitted}, self._starts)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the position of a snapshot; the window is planned again when it is needed."""
        snapshot.expect("plan", len(self._readers))
        fields = {name: snapshot.field(name) for name in self._fields}
        num_units, emitted = snapshot.count("units"), snapshot.count("emitted")
        keys, counts = fields["keys"], fields["counts"]
        collector = self._spec.collector(self._stream)
        try:
            draws = map(int, fields["draws"])
            places = list(zip(self._readers, snapshot.inner, draws, strict=True))
            rows = np.array(fields["rows"], np.int64)
            rows = rows.reshape(len(keys), 1 + collector.num_columns)
            if (np.diff(rows[:, 0], prepend=-1, append=num_units) < 1).any():
                raise ValueError("samples are not numbered as they must be")
            units = self._units_of(keys)._replace(numbers=rows[:, 0])
            if set(counts) != set(collector.state().counts):
                raise ValueError(f"its counts are {counts!r:.80}")
            collector.restore(dict(counts), units.samples(), rows[:, 1:])
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise StateError(
                f"The checkpoint's stage 'plan' is invalid: {error}. Use another checkpoint."
            ) from error
        for reader, inner, num_draws in places:
            reader.restore(inner, num_draws)
        self.collector, self._units, self._num_units = collector, units, num_units
        self._fields, self._emitted, self._starts = fields, emitted, snapshot.inner
        self._window = self._reader = None

    def _units_of(self, keys: Sequence[RestoreKey]) -> Units:
        """Returns the units of restore keys.

        Raises:
            ValueError: A key is of no source here.
        """
        rows = [whole(key) for key in keys]
        if any(len(row) != 4 or row[0] not in self._names for row in rows):
            raise ValueError("it carries a sample over that is of no source here")
        numbered = [(self._names.index(name), *rest) for name, *rest in rows]
        refs = DrawnRefs(*np.array(numbered, np.int64).reshape(-1, 4).T)
        parts = [key[1:3] if is_piece(key) else (WHOLE, WHOLE) for key in keys]
        starts, stops = np.array(parts, np.int64).reshape(-1, 2).T
        return self._units_of_parts(refs, starts, stops, self._lengths_of(refs))
