"""Several datasets by weight: whole items of one after the other, or mixed inside a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from energon_lite.core.dataset import Cursor, SavableDataset, Traits
from energon_lite.core.seeds import key_of
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import UserFunction
from energon_lite.order.blending import BlendOrder
from energon_lite.order.schedules import Schedule, Weight, Weights
from energon_lite.sources.order_only import OrderColumns, OrderCursor, interleaved
from energon_lite.stages.batching import BatchDataset
from energon_lite.stages.children import CombinedDataset
from energon_lite.stages.concat import RepeatCursor, RepeatDataset, total_items
from energon_lite.stages.loss_weights import LossWeightCursor, LossWeightDataset

T = TypeVar("T")

MODES = ("exact", "random")
UNTIL = ("first", "all_once", "forever")
# Draws that are planned together.
_BLOCK = 256
_LONGEST_BLOCK = 1 << 16


class BlendDataset(CombinedDataset[T]):
    """Takes each item whole from one of several datasets, by weight.

    Shares count draws: in each stream, every stretch from its start holds each dataset's share
    within five items. A dataset that has ended leaves the blend; its later turns are passed over.

    State: the number of the next draw, and the places in all datasets.
    Length: the sum of those below; with `until="first"` or `"all_once"` the items up to that end.
    Keys: as below.

    Args:
        datasets: pairs (dataset, weight). Weights need not sum to 1; one of 0 is left out. A
            `Schedule` is a weight that changes with the number of the draw in the run.
        until: None ends when all datasets have ended; "first" with the first that would be drawn
            and has ended; "all_once" when each has ended once, repeating those that ended before;
            "forever" repeats them all.
        blend_mode: "exact", or "random" for independent draws.
        weights: the weights as a tree, in place of those of the pairs.
        worker_config: by default that of the datasets.

    Raises:
        ValueError: A weight is negative, all are 0, or a setting is unknown.
    """

    def __init__(
        self,
        *datasets: tuple[SavableDataset[T], Weight],
        until: str | None = None,
        blend_mode: str = "exact",
        weights: Weights | None = None,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        pairs = _checked_pairs(datasets)
        if until not in (None, *UNTIL):
            raise ValueError(f"until={until!r} is none of {', '.join(UNTIL)}")
        if blend_mode not in MODES:
            raise ValueError(f"blend_mode={blend_mode!r} is none of {', '.join(MODES)}")
        self.weights = weights or Weights([weight for _, weight in pairs])
        if self.weights.num_leaves != len(pairs):
            raise ValueError(
                f"weights has {self.weights.num_leaves} leaves for {len(pairs)} datasets"
            )
        self.until = until
        self.blend_mode = blend_mode
        below = [dataset for dataset, _ in pairs]
        if until in ("all_once", "forever"):
            below = [d if d.endless else RepeatDataset(d) for d in (x.nested() for x in below)]
        super().__init__(below, worker_config)
        never_ends = [label for d, label in self._labelled() if not isinstance(d, RepeatDataset)]
        if until == "all_once" and never_ends:
            raise ValueError(
                f"until='all_once': {never_ends[0]} never ends by itself, so there is no once; "
                "make it with repeat=False"
            )
        self.key = key_of("blend", self.seed, _depth(self))

    def _labelled(self) -> Iterator[tuple[SavableDataset[T], str]]:
        return zip(self.datasets, self.labels, strict=True)

    def own_traits(self, below: Traits) -> Traits:
        """Adds which end of the datasets ends a pass."""
        endless = self.until != "all_once" and below.endless
        if self.until == "first":
            endless = all(dataset.endless for dataset in self.datasets)
        return dataclasses.replace(
            super().own_traits(below),
            endless=endless,
            each_once=below.each_once and self.until not in ("first", "all_once"),
        )

    def order(self, stream: Stream) -> BlendOrder:
        """Returns which dataset each draw of a stream takes."""
        return BlendOrder(self.weights, self.blend_mode, self.key, stream)

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return _BlendCursor(self, stream)

    def num_items(self, stream: Stream) -> int:
        """Counts the items of a stream's pass."""
        if self.until not in ("first", "all_once") or self.endless:
            return sum(dataset.num_items(stream) for dataset in self.datasets)
        limits = [dataset.num_items(stream) for dataset in self.datasets]
        return _draws_until(self.order(stream), limits, all_of_them=self.until == "all_once")

    def expected(self, num_items: float) -> dict[str, float]:
        """Deals the items out by the weights."""
        found: dict[str, float] = {}
        shares = self.weights.expected(int(num_items)).tolist()
        for dataset, share in zip(self.datasets, shares, strict=True):
            if not dataset.endless:
                share = min(share, float(total_items(dataset)))
            found.update(dataset.expected(share))
        return found

    def config(self) -> dict[str, JSON]:
        """Returns the weights and all that is blended."""
        of: list[JSON] = [
            {"name": label, "weight": weight, "of": dataset.config()}
            for (dataset, label), weight in zip(
                self._labelled(), leaf_weights(self.weights), strict=True
            )
        ]
        return {"stage": "blend", "blend_mode": self.blend_mode, "until": self.until, "of": of}


class _BlendCursor(Cursor[T]):
    def __init__(self, spec: BlendDataset[T], stream: Stream) -> None:
        shares = typical_shares(spec.weights)
        self._spec = spec
        self._is_plain = spec.until != "all_once"
        self._order = spec.order(stream)
        self._cursors: list[Cursor[T]] = [
            dataset.cursor(dataclasses.replace(stream, share=stream.share * share))
            for dataset, share in zip(spec.datasets, shares, strict=True)
        ]
        self._begin(0)

    def _begin(self, draw: int) -> None:
        """Starts with the cursors as they stand."""
        self._inner: list[Snapshot | None] = [None] * len(self._cursors)
        self._ended: set[int] = set()
        self._only_one_left: int | None = 0 if len(self._cursors) == 1 else None
        self._go_to(draw)

    def _go_to(self, draw: int) -> None:
        """Forgets the plan; the next one begins with `draw`."""
        self._next_plan = draw
        self._plan: list[int] = []
        self._draws: Sequence[int] = ()
        self._at = self._stop = 0
        self._block = _BLOCK

    def __next__(self) -> T:
        while True:
            at = self._at
            child = self._plan[at] if at < self._stop else self._choose()
            cursor = self._cursors[child]
            self._inner[child] = None
            try:
                item = next(cursor) if self._is_plain else next_until("all_once", cursor)
            except StopIteration:
                self._has_ended(child)
                continue
            self._at += 1
            self.key = cursor.key
            return item

    @property
    def has_columns(self) -> bool:
        """As `OrderCursor`: if nothing below comes to an end."""
        return self._spec.until != "all_once" and all(
            dataset.endless and isinstance(cursor, OrderCursor) and cursor.has_columns
            for dataset, cursor in zip(self._spec.datasets, self._cursors, strict=True)
        )

    def take_columns(self, n: int) -> OrderColumns:
        """As `OrderCursor`."""
        cursors: list[Any] = self._cursors
        if len(cursors) == 1:
            self._inner[0] = None
            columns: OrderColumns = cursors[0].take_columns(n)
            return columns
        draw = self._next_draw
        turns = self._order.block(draw, n)
        counts = np.bincount(turns, minlength=len(cursors)).tolist()
        parts = [cursor.take_columns(count) for cursor, count in zip(cursors, counts, strict=True)]
        self._inner = [None] * len(cursors)
        self._go_to(draw + n)
        return interleaved(parts, turns)

    def _choose(self) -> int:
        """Returns the dataset that the next draw takes; those that have ended are passed over."""
        if self._only_one_left is not None:
            return self._only_one_left
        while self._at >= len(self._plan):
            plan = self._order.block(self._next_plan, self._block)
            draws = np.arange(self._next_plan, self._next_plan + self._block)
            self._next_plan += self._block
            if self._ended:
                is_left = ~np.isin(plan, list(self._ended))
                plan, draws = plan[is_left], draws[is_left]
                # Where little is left of the weights, long stretches are passed over at once.
                self._block = min(_LONGEST_BLOCK, 2 * self._block) if len(plan) < 16 else _BLOCK
            self._plan, self._draws, self._at = plan.tolist(), draws.tolist(), 0
            self._stop = len(self._plan)
        return self._plan[self._at]

    def _has_ended(self, child: int) -> None:
        """Takes a dataset out of the plan; ends the pass where it was the one to wait for."""
        if self._spec.until == "all_once":
            begin_again(self._cursors, child)
            return
        self._ended.add(child)
        if self._spec.until == "first" or len(self._ended) == len(self._cursors):
            raise StopIteration
        self._go_to(self._next_draw)
        if len(self._ended) == len(self._cursors) - 1:
            # Whatever the plan says, it is always its turn.
            (self._only_one_left,) = set(range(len(self._cursors))) - self._ended

    @property
    def _next_draw(self) -> int:
        return self._draws[self._at] if self._at < len(self._plan) else self._next_plan

    def snapshot(self) -> Snapshot:
        inner = self._inner
        for i, snapshot in enumerate(inner):
            if snapshot is None:
                inner[i] = self._cursors[i].snapshot()
        return Snapshot("blend", {"draw": self._next_draw}, tuple(inner))  # type: ignore[arg-type]

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("blend", len(self._cursors))
        draw = snapshot.count("draw")
        for cursor, inner in zip(self._cursors, snapshot.inner, strict=True):
            cursor.restore(inner)
        self._begin(draw)


def next_until(until: str | None, cursor: Cursor[T]) -> T:
    """Returns a dataset's next item; with "all_once", its first round ends as finite data do."""
    if until == "all_once" and isinstance(cursor, RepeatCursor) and cursor.round == 0:
        item: T = cursor.next_in_round()
        return item
    return next(cursor)


def begin_again(cursors: Sequence[Cursor[Any]], child: int) -> None:
    """Starts the second round of a dataset, whose first has ended.

    Raises:
        StopIteration: It was the last one in its first round; all stay where they are.
    """
    rounds = [cursor.round for cursor in cursors if isinstance(cursor, RepeatCursor)]
    if rounds[child] > 0 or rounds.count(0) == 1:
        raise StopIteration
    ended = cursors[child]
    assert isinstance(ended, RepeatCursor)
    ended.begin_round()


class MixBatchDataset(BatchDataset[T]):
    """Batches whose samples come from several datasets, by weight.

    State, Length, Keys: those of a batch over a `BlendDataset`.

    Args:
        datasets: pairs (dataset, weight); datasets of batches should have batches of one, so that
            `batch_size` of them make a batch.
        batch_size: items of the datasets in a batch.
        batch_mix_fn: makes a batch of a list of such items; `homogeneous_concat_mix` for batches of
            one type. By default the list itself.
        until: as in `BlendDataset`.
        blend_mode: as in `BlendDataset`.
        worker_config: by default that of the datasets.
    """

    def __init__(
        self,
        *datasets: tuple[SavableDataset[Any], Weight],
        batch_size: int,
        batch_mix_fn: Callable[[list[Any]], T] | UserFunction | None = None,
        until: str | None = None,
        blend_mode: str = "exact",
        worker_config: WorkerConfig | None = None,
    ) -> None:
        blend = BlendDataset(
            *datasets, until=until, blend_mode=blend_mode, worker_config=worker_config
        )
        mix = batch_mix_fn or _as_list
        if not isinstance(mix, UserFunction):
            mix = UserFunction(
                mix, name="batch_mix_fn", seed=blend.seed, config=blend.worker_config,
                is_stateless=True,
            )  # fmt: skip
        super().__init__(blend, batch_size, mix)

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor, of batches with the loss weights of all their samples."""
        return LossWeightCursor(LossWeightDataset(self), super().cursor(stream))

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the batch again, with its loss weights."""
        batch = super().restore_sample(restore_key)
        LossWeightDataset(self).weigh(batch, restore_key)
        return batch


def _as_list(items: list[Any]) -> Any:
    return items


def leaf_weights(weights: Weights) -> list[JSON]:
    """Yields the weight of each leaf as JSON: a number; below others, after theirs.

    Example:
        1.0, and two leaves of weights 2.0 and 3.0 in a nested blend of weight 5.0, which is number
        1 here: `1.0`, `[[1, 5.0], 2.0]`, `[[1, 5.0], 3.0]`.
    """

    def walk(level: Weights, above: list[JSON]) -> Iterator[JSON]:
        for number, entry in enumerate(level.entries):
            weight, inner = entry if isinstance(entry, tuple) else (entry, None)
            own: JSON = weight.config() if isinstance(weight, Schedule) else float(weight)
            if inner is not None:
                yield from walk(inner, [*above, [number, own]])
            else:
                yield [*above, own] if above else own

    return list(walk(weights, []))


def typical_shares(weights: Weights) -> list[float]:
    """Returns about each leaf's part of the draws; of schedules, the larger of two ends."""
    if weights.is_constant:
        shares: list[float] = weights.constant().tolist()
        return shares
    ends = weights.at(np.array([0, weights.breaks[-1]]))
    largest: list[float] = ends.max(axis=0).tolist()
    return largest


def _checked_pairs(datasets: Sequence[Any]) -> list[tuple[SavableDataset[Any], Weight]]:
    """Returns the pairs without those of weight 0."""
    for number, pair in enumerate(datasets):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"BlendDataset: argument {number} is {pair!r:.60}, not a pair (dataset, weight)"
            )
    kept = [(d, w) for d, w in datasets if isinstance(w, Schedule) or w != 0]
    if not kept:
        raise ValueError("BlendDataset: all weights are 0, or there is no dataset")
    return kept


def _depth(dataset: SavableDataset[Any]) -> int:
    """Counts how many blends lie in one another, so that those do not draw in step."""
    below = max((_depth(child) for child in dataset.children), default=0)
    return below + isinstance(dataset, BlendDataset)


def _draws_until(order: BlendOrder, limits: list[int], *, all_of_them: bool) -> int:
    """Counts the draws before the first one (or the last one) that finds its dataset at its end.

    Args:
        order: the draws.
        limits: items of each dataset.
        all_of_them: whether each dataset has to end, not only one.
    """
    left = np.array(limits, dtype=np.int64)
    has_ended = np.zeros(len(limits), dtype=bool)
    draw, size = 0, _BLOCK
    while True:
        plan = order.block(draw, size)
        counts = np.bincount(plan, minlength=len(limits))
        crossing = np.flatnonzero((counts > left) & ~has_ended)
        places = [int(np.flatnonzero(plan == child)[left[child]]) for child in crossing.tolist()]
        has_ended[crossing] = True
        if places and (not all_of_them or has_ended.all()):
            return draw + (max(places) if all_of_them else min(places))
        left = np.where(has_ended, left, left - counts)
        draw, size = draw + size, min(2 * size, _LONGEST_BLOCK)
