"""Plans packs: which samples of a window share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from energon_lite import packing as packers
from energon_lite.batching.global_window import NO_PACK, global_window
from energon_lite.batching.lists import Lists
from energon_lite.batching.rules import Packing
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import context_of
from energon_lite.core.keys import is_piece
from energon_lite.core.seeds import key_of, random_words
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import StreamContext
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED
from energon_lite.stages.overlong import Measure
from energon_lite.stages.planned.order import Refs
from energon_lite.stages.planned.window import WHOLE, Arranged, LengthsOf, Notes, Planner, Units


class PackPlanner(Planner):
    """Plans the packs of one stream; with a shared plan those of all, and takes its own.

    Args:
        packing: how samples are packed.
        names: of the sources.
        lengths: opens their lengths.
        window: samples of each stream in a window.
        stream: whose packs are planned.
        seed: of the run.
        packs_per_batch: which are to be of one group, in all streams of a shared plan.
    """

    def __init__(
        self,
        packing: Packing,
        names: list[str],
        lengths: LengthsOf,
        window: int,
        stream: Stream,
        seed: int,
        packs_per_batch: int = 1,
    ) -> None:
        super().__init__(names, lengths, window, stream)
        self._packing = packing
        self._is_shared = packing.balance == "global_window"
        self._key = key_of("planned_packs", seed, stream.num_streams, stream.pass_index)
        self._measure = Measure(packing)
        self._packs_per_batch = packs_per_batch

    def _arranged(
        self, refs: Refs, units: Units, num_carried: int, number: int, is_last: bool
    ) -> Arranged:
        found = packers.pack_planned(
            units.lengths[:, : len(self._packing.resources)],
            self._groups(refs.sources[units.refs], units.lengths),
            units.refs < num_carried,
            self._packing,
            multiple=self._stream.num_streams * self._packs_per_batch if self._is_shared else 1,
            is_last=is_last,
        )
        costs = self._costs(found.packs, units.lengths)
        if not self._is_shared:
            return Arranged(units, found.packs, costs, found.carried)
        steps = self._steps(costs, found.groups, number)
        own = steps[:, self._stream.index]
        own = own[own != NO_PACK]
        num_lists: Int64Array = (steps != NO_PACK).sum(axis=0)
        return Arranged(units, found.packs.reordered(own), costs[own], found.carried, num_lists)

    def _units(
        self, refs: Refs, lengths: Int64Array, carried: Sequence[RestoreKey], notes: Notes
    ) -> Units:
        """Returns what is to be packed: samples as they are, but for those that are too long."""
        num_resources = len(self._packing.resources)
        limits = np.array(self._packing.limits)
        is_special = (lengths[:, 0] < 1) | (lengths[:, :num_resources] > limits).any(axis=1)
        for i, key in enumerate(carried):
            is_special[i] |= is_piece(key)
        plain, special = np.flatnonzero(~is_special), np.flatnonzero(is_special)
        rows = []
        for i in special.tolist():
            key = carried[i] if i < len(carried) else self._key_of(refs, i)
            if i >= len(carried):
                parts = self._parts(key, lengths[i].tolist(), notes)
            else:  # it was looked at before
                parts = [(key[1], key[2]) if is_piece(key) else (WHOLE, WHOLE)]
            rows += [(i, *part) for part in parts]
        added = np.array(rows, dtype=np.int64).reshape(-1, 3)
        numbers = np.concatenate([plain, added[:, 0]])
        nothing = np.full(len(plain), WHOLE)
        starts = np.concatenate([nothing, added[:, 1]])
        stops = np.concatenate([nothing, added[:, 2]])
        own = lengths[numbers]
        is_part = starts != WHOLE
        own[is_part, 0] = (stops - starts)[is_part]
        order = np.argsort(numbers, kind="stable")
        return Units(numbers[order], starts[order], stops[order], own[order])

    def _parts(self, key: RestoreKey, lengths: list[int], notes: Notes) -> list[tuple[int, int]]:
        """Returns first token and the one after the last of what is packed of a special sample."""
        packing = self._packing
        if lengths[0] < 1:
            self._without_length(key, str(packing.lengths), notes)
            return []
        apart = StreamContext(self._stream, max_skip_rate=1.0)
        with context_of(apart):
            sizes = dict(zip(packing.resources, lengths, strict=False))
            pieces: list[Any] = [p for p, _ in self._measure.pieces(key, SKIPPED, sizes)]
        records = apart.take_records()
        if self._is_own(key):
            notes.records.extend(records)
            notes.draws[key[0]] += len(records)
            notes.overlong[key[0]] += apart.cost(key[0]).overlong
        if not pieces and not records:  # it is packed alone
            return [(WHOLE, WHOLE)]
        return [(piece[1], piece[2]) for piece in pieces]

    def _groups(self, sources: Int64Array, lengths: Int64Array) -> Int64Array:
        """Numbers the groups of the units; shape (U,)."""
        groups: Any = np.zeros(len(sources), dtype=np.int64)
        if self._packing.group_by == "source":
            groups = sources
        if self._packing.group_by == "modality":
            groups = (lengths[:, 1:] > 0).any(axis=1).astype(np.int64)
        found: Int64Array = groups
        return found

    def _costs(self, packs: Lists, lengths: Int64Array) -> Float64Array:
        if self._packing.cost is None:
            return np.zeros(len(packs))
        costs: Float64Array = self._packing.cost.costs(packs, lengths)
        return costs

    def _steps(self, costs: Float64Array, groups: Int64Array, number: int) -> Int64Array:
        """Returns the pack that each stream has at each step, or none; shape (T, S)."""
        num_streams = self._stream.num_streams
        steps = [np.empty((0, num_streams), dtype=np.int64)]
        batches = [steps[0][:, 0]]
        for group in np.unique(groups).tolist():
            packs = np.flatnonzero(groups == group)
            plan = global_window(
                costs[packs], num_streams, self._balance_window(len(packs)),
                key_of(self._key, group), epoch=number, remainder="ragged",
            )  # fmt: skip
            steps.append(np.append(packs, NO_PACK)[plan.steps])  # -1 takes the last
            batches.append(np.arange(len(plan)) // self._packs_per_batch)
        all_steps = np.concatenate(steps)
        if len(steps) > 2:
            all_steps = all_steps[self._mixed(all_steps, batches, number)]
        return all_steps

    def _mixed(self, steps: Int64Array, batches: list[Int64Array], number: int) -> Int64Array:
        """Returns an order of the steps of several groups, in which those of a batch stay together.

        Args:
            steps: shape (T, S); group after group.
            batches: of each group, the batch of each step.
            number: of the window.
        """
        firsts = np.cumsum([0, *(int(own.max(initial=-1)) + 1 for own in batches)])
        of_steps = np.concatenate(
            [own + first for own, first in zip(batches, firsts, strict=False)]
        )
        words = random_words(self._key, number, size=int(firsts[-1]))
        # Batches that are not full, or that some streams have not, come last: else those would be
        # ahead of the others.
        is_short = np.bincount(of_steps, minlength=len(words)) < self._packs_per_batch
        is_short |= np.bincount(of_steps, (steps == NO_PACK).any(axis=1), len(words)) > 0
        order: Int64Array = np.lexsort((words[of_steps], is_short[of_steps]))
        return order

    def _balance_window(self, num_packs: int) -> int:
        """Returns the steps that are sorted together: about `balance_window`, in equal windows."""
        num_steps = -(-num_packs // self._stream.num_streams)
        num_windows = max(1, round(num_steps / self._packing.balance_window))
        return max(1, -(-num_steps // num_windows))
