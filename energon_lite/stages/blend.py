"""Several datasets by weight, of samples or of tokens, of which each item is taken whole."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import Cursor, SavableDataset, Traits, depth_of
from energon_lite.core.seeds import key_of
from energon_lite.core.stage import StageCursor
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.order.blending import MODES, BlendOrder
from energon_lite.order.schedules import Schedule, Weight, Weights
from energon_lite.sources.reading import ReadCursor, facts_of
from energon_lite.sources.source import SourcePlaces, WebdatasetSource
from energon_lite.stages.blend_refs import BlendRefs
from energon_lite.stages.by_source import by_source
from energon_lite.stages.choosers import LONGEST_BLOCK, BySamples, ByTokens, Chooser
from energon_lite.stages.concat import CombinedDataset, RepeatDataset, total_items
from energon_lite.stages.map import FilterDataset, MapDataset

T = TypeVar("T")

UNTIL = ("first", "all_once", "forever")
# Draws up to an end that are counted at first, and items of what is endless.
_FEWEST, _NO_END = 256, 1 << 62


class BlendDataset(CombinedDataset[T]):
    """Takes each item whole from one of several datasets, by weight.

    Shares count draws: in each stream, every stretch from its start holds each dataset's share
    within five items. A dataset that has ended leaves the blend; its later draws are skipped.

    State: the number of the next draw, and the places in all datasets.
    Length: the sum of those below; with `until="first"` or `"all_once"` the items up to that end.
    Keys: as below.

    Args:
        datasets: pairs (dataset, weight). Weights need not sum to 1; 0 drops a dataset. A
            `Schedule` is a weight that changes with the number of the draw in the run.
        until: None ends when all datasets have ended; "first" with the first that would be drawn
            and has ended; "all_once" when each has ended once, repeating those that ended before;
            "forever" repeats them all.
        blend_mode: "exact", or "random" for independent draws.
        weights: the weights as a tree, in place of those of the pairs.
        worker_config: by default that of the datasets.

    Attributes:
        leaves: the sources, if all datasets are sources, or sources under a function of one item.
        kind: what can be decoded together of them, as `facts_of` returns it; None for nothing.
        mean_bytes: of a sample of them.

    Raises:
        ValueError: A weight is negative, all are 0, or a setting is unknown.
    """

    name = "blend"

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
        if blend_mode == "exact" and self.weights.is_constant:
            _ = self.weights.tree  # of all streams, so that no worker process builds its own
        self.until = until
        self.blend_mode = blend_mode
        below = [dataset for dataset, _ in pairs]
        if until in ("all_once", "forever"):
            below = [d if d.endless else RepeatDataset(d) for d in (x.nested() for x in below)]
        super().__init__(below, worker_config)
        self._may_lack_end = until in ("first", "all_once") and not self.weights.is_constant
        labelled = zip(self.datasets, self.labels, strict=True)
        never_ends = [label for d, label in labelled if not isinstance(d, RepeatDataset)]
        if until == "all_once" and never_ends:
            raise ValueError(
                f"until='all_once': {never_ends[0]} never ends by itself, so there is no once; "
                "make it with repeat=False"
            )
        # Blends in one another do not draw in step.
        self.key = key_of("blend", self.run_seed, depth_of(self, BlendDataset))

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

    def _set_datasets(self, datasets: Sequence[SavableDataset[Any]]) -> None:
        super()._set_datasets(datasets)
        # The stream whose items were counted last, and how many it has: a save asks repeatedly.
        self._counted: tuple[Stream | None, int] = None, 0
        self.leaves = _leaves(datasets)
        # Here and not in a stream: a worker process would copy pages of all sources.
        self.kind, self.mean_bytes = facts_of(self.leaves)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the count of items behind: another process counts its own stream's."""
        return {**super().__getstate__(), "_counted": (None, 0)}

    def order(self, stream: Stream) -> BlendOrder:
        """Returns which dataset each draw of a stream takes."""
        return BlendOrder(self.weights, self.blend_mode, self.key, stream)

    def chooser(self, stream: Stream) -> Chooser:
        """Returns what chooses the dataset of each draw of a stream."""
        return BySamples(self.order(stream), len(self.datasets))

    def check_end(self, stream: Stream) -> None:
        """Checks that the datasets that end a pass are drawn until they have ended."""
        super().check_end(stream)
        if self._may_lack_end:
            self.num_items(stream)

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        if self._may_lack_end:
            self.check_end(stream)
        if not self.leaves:
            return _BlendCursor(self, stream, [dataset.cursor(stream) for dataset in self.datasets])
        refs = self.refs(stream)
        cursor = ReadCursor(refs, stream) if refs else _SourcesCursor(self, stream)
        return by_source(self, cursor, stream)

    def refs(self, stream: Stream) -> BlendRefs | None:
        """Returns the order of a stream, if it does not depend on what is read."""
        chooser = self.chooser(stream) if self.leaves else None
        return BlendRefs(self, chooser, stream) if isinstance(chooser, BySamples) else None

    def num_items(self, stream: Stream) -> int:
        """Counts the items of a stream's pass."""
        limits = [dataset.num_items(stream) for dataset in self.datasets]
        if self.until not in ("first", "all_once") or self.endless:
            return sum(limits)
        counted, is_all = self._counted, self.until == "all_once"
        if counted[0] != stream:
            if not is_all:  # what is endless does not end it
                pairs = zip(self.datasets, limits, strict=True)
                limits = [_NO_END if dataset.endless else num for dataset, num in pairs]
            number = _draws_until(self.order(stream), limits, is_all, self.labels)
            counted = self._counted = stream, number
        return counted[1]

    def expected(self, num_items: float) -> dict[str, float]:
        """Deals the items out by the weights."""
        found: dict[str, float] = {}
        shares = self.weights.expected(int(num_items)).tolist()
        if self.leaves and self.endless:
            return dict(zip((leaf.name for leaf in self.leaves), shares, strict=True))
        for dataset, share in zip(self.datasets, shares, strict=True):
            if not dataset.endless:
                share = min(share, float(total_items(dataset)))
            found.update(dataset.expected(share))
        return found

    def config(self) -> dict[str, JSON]:
        """Returns the weights and all that is blended."""
        weights = leaf_weights(self.weights)
        of: list[JSON] = [
            {"name": label, "weight": weight, "of": dataset.config()}
            for dataset, label, weight in zip(self.datasets, self.labels, weights, strict=True)
        ]
        return {
            "stage": "blend", "blend_mode": self.blend_mode, "until": self.until,
            "seed": self.run_seed, "of": of,
        }  # fmt: skip


class TokenBlendDataset(BlendDataset[T]):
    """Takes each item whole from one of several datasets, by their share of tokens.

    Lengths come from a stored index, and are then known at once; or they are measured where
    samples are encoded (`TaskEncoder.sample_length`), and count `LAG` draws later. An item that is
    skipped on the way there counts nothing; with an index, it counts.

    State: the number of the next draw, target less actual tokens and mean lengths by dataset, the
    last draws with their lengths as far as they are known, and the places in all datasets.
    Length: the sum of those below; which end comes first is not predicted.
    Keys: as below.

    Args:
        datasets: pairs (dataset, weight), as in `BlendDataset`.
        until: as in `BlendDataset`.
        weights: as in `BlendDataset`.
        lengths: the tokens of each sample, shape (N,), by source; None to use what is measured.
        worker_config: by default that of the datasets.

    Raises:
        ValueError: as `BlendDataset`, or a weight ends at 0 with `until="all_once"`.
    """

    name = "token_blend"

    def __init__(
        self,
        *datasets: tuple[SavableDataset[T], Weight],
        until: str | None = None,
        weights: Weights | None = None,
        lengths: Mapping[str, Int64Array] | None = None,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        super().__init__(*datasets, until=until, weights=weights, worker_config=worker_config)
        if until == "all_once" and self._may_lack_end:  # the last weights count: draws are unknown
            shares = self.weights.at(self.weights.breaks[-1:])[0]
            if not shares.all():
                raise _no_end(until, self.labels[int(shares.argmin())])
        self.lengths = None if lengths is None else dict(lengths)
        # In the order of the sources, which datasets around this one may give other ids.
        self._arrays = [self._length_array(facts.name) for facts in self.sources()]
        # With another index the order is another; a checkpoint must notice.
        arrays, counts = iter(self._arrays), [len(d.sources()) for d in self.datasets]
        self._digests = [_digest(islice(arrays, count)) for count in counts]

    def _length_array(self, source: str) -> Int64Array:
        if self.lengths is None:
            return np.empty(0, dtype=np.int64)
        for name in (source, source.rpartition("#")[0]):  # "a#2" is the second use of "a"
            if name in self.lengths:
                return self.lengths[name]
        raise ValueError(f"lengths: there is no entry for source {source!r}")

    def lengths_by_source(self) -> dict[str, Int64Array]:
        """Returns the tokens of each sample, shape (N,), by the ids that the sources have now."""
        return dict(zip((facts.name for facts in self.sources()), self._arrays, strict=True))

    def own_traits(self, below: Traits) -> Traits:
        """Adds what shares are of, and whether lengths are measured."""
        return dataclasses.replace(
            super().own_traits(below),
            unit="tokens",
            measures=self.lengths is None,
            ordering=self.lengths is not None,
            obstacle="a blend has `unit: tokens` and measures lengths while it reads, so that its "
            "order is not known before; name a stored index with `lengths` in the blend, too",
        )

    @cached_property
    def first_means(self) -> Float64Array:
        """Mean lengths, shape (K,), that the first draws are chosen by: of the index, or in bytes.

        Datasets with other parts than text, or that are not sources, have the mean of the others.
        """
        if self.lengths is not None:
            arrays = iter(self._arrays)
            own = [np.concatenate([*islice(arrays, len(d.sources()))]) for d in self.datasets]
            return np.maximum(1.0, [array.mean() for array in own])
        means = np.array([leaf.text_bytes() for leaf in self.leaves] or [np.nan])
        is_known = ~np.isnan(means)
        other = means[is_known].mean() if is_known.any() else 1.0
        return np.broadcast_to(np.where(is_known, means, other), len(self.datasets))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the first means behind: another process looks at the first samples itself."""
        return {name: own for name, own in super().__getstate__().items() if name != "first_means"}

    def chooser(self, stream: Stream) -> Chooser:
        """Returns what chooses the dataset of each draw of a stream."""
        return ByTokens(self, stream)

    def num_items(self, stream: Stream) -> int:
        """Sums the items of the datasets."""
        return sum(dataset.num_items(stream) for dataset in self.datasets)

    def config(self) -> dict[str, JSON]:
        """Returns the weights and all that is blended."""
        found: dict[str, Any] = super().config()
        if self.lengths is not None:
            pairs = zip(found["of"], self._digests, strict=True)
            found["of"] = [{**e, "of": {**e["of"], "lengths": digest}} for e, digest in pairs]
        return {**found, "unit": "tokens", "lengths": "stored" if self.lengths else "measured"}


def _digest(arrays: Iterable[Int64Array]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array, dtype="<i8").data)
    return digest.hexdigest()


class _Opened(dict[int, Any]):
    """The cursors of a blend of sources, by number: each is opened when it is drawn from first.

    A worker process of a thousand sources would copy what the training loop has of all of them.

    Attributes:
        positions: shape (K,), never changed in place; where the sources stand, except for what was
            drawn since from those that have a cursor.
    """

    def __init__(self, spec: BlendDataset[Any], stream: Stream) -> None:
        self._spec = spec
        self._stream = stream
        self._shares = typical_shares(spec.weights)
        self.positions: Int64Array = np.zeros(len(self._shares), dtype=np.int64)

    def __missing__(self, child: int) -> Any:
        share = self._stream.share * float(self._shares[child])
        leaf = self._spec.leaves[child]
        cursor: Any = leaf.cursor(dataclasses.replace(self._stream, share=share))
        cursor.order.position = int(self.positions[child])
        self[child] = cursor
        return cursor

    def snapshot(self, drawn: set[int]) -> SourcePlaces:
        """Returns the places of all sources, of which some were drawn from."""
        if drawn_here := drawn & self.keys():
            self.positions = self.positions.copy()  # snapshots keep the one before
            for child in drawn_here:
                self.positions[child] = self[child].order.position
        return SourcePlaces(self._spec.labels, self.positions)

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        """Goes to other places."""
        self.positions = SourcePlaces.positions(snapshots, self._spec.labels)
        self.clear()


class _BlendCursor(StageCursor[T]):
    """A place in a blend of any datasets."""

    key: RestoreKey = ()
    cursors: Any

    def __init__(self, spec: BlendDataset[T], stream: Stream, cursors: Any) -> None:
        super().__init__(spec)
        self.cursors = cursors
        self._is_plain = spec.until != "all_once"
        self._chooser = spec.chooser(stream)
        self._begin()

    def _begin(self) -> None:
        self._ended: set[int] = set()
        # The snapshots of all datasets, and those from which something was drawn since.
        num_datasets = len(self.spec.datasets)
        self._places: list[Any] = [None] * num_datasets
        self._drawn = set(range(num_datasets))

    def __next__(self) -> T:
        while True:
            child = self._chooser.choose()
            try:
                return self._draw(child)
            except StopIteration:
                self._end(child)

    def _draw(self, child: int) -> T:
        """Returns the next item of a dataset, and counts the draw."""
        cursor = self.cursors[child]
        self._drawn.add(child)
        # The first round of a repeated dataset ends as finite data do.
        is_first = not self._is_plain and cursor.round == 0
        item: T = cursor.next_in_round() if is_first else next(cursor)
        self.key = cursor.key
        self._chooser.drew(child, self.key)
        return item

    def _end(self, child: int) -> None:
        """Takes a dataset out of the choice; ends the pass where it was the one to wait for."""
        if not self._is_plain:
            rounds = [cursor.round for cursor in self.cursors]
            if rounds[child] > 0 or rounds.count(0) == 1:  # the last one in its first round
                raise StopIteration
            self.cursors[child].begin_round()
            return
        self._ended.add(child)
        if self.spec.until == "first" or len(self._ended) == len(self.spec.datasets):
            raise StopIteration
        self._chooser.leave_out(self._ended)

    def fields(self) -> dict[str, Any]:
        return self._chooser.state()

    def places(self) -> Sequence[Snapshot]:
        for child in self._drawn:
            self._places[child] = self.cursors[child].snapshot()
        self._drawn.clear()
        return tuple(self._places)

    def set_fields(self, snapshot: Snapshot) -> None:
        self._chooser.restore(snapshot)
        self._begin()


class _SourcesCursor(_BlendCursor[T]):
    """A place in a blend of sources whose order depends on what is read."""

    def __init__(self, spec: BlendDataset[T], stream: Stream) -> None:
        super().__init__(spec, stream, _Opened(spec, stream))

    def places(self) -> Sequence[Snapshot]:
        places: Sequence[Snapshot] = self.cursors.snapshot(self._drawn)
        self._drawn.clear()
        return places

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect(self.spec.name, len(self.spec.datasets))
        self.set_fields(snapshot)
        self.cursors.restore(snapshot.below(self.spec.labels))


def _leaves(datasets: Sequence[Any]) -> list[Any]:
    """Returns the sources of datasets that make one item of each sample; else nothing."""
    below = [_source_under(dataset) for dataset in datasets]
    return below if None not in below else []


def _source_under(dataset: Any) -> WebdatasetSource[Any] | None:
    """Returns the source under functions that make one item of each sample, or none of it."""
    while type(dataset) in (MapDataset, FilterDataset) and dataset.traits.per_item:
        dataset = dataset.dataset
    return dataset if type(dataset) is WebdatasetSource else None


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


def typical_shares(weights: Weights) -> Float64Array:
    """Returns about each leaf's part of the draws, (K,); of schedules, the larger of two ends."""
    if weights.is_constant:
        return weights.constant()
    largest: Float64Array = weights.at(np.array([0, weights.breaks[-1]])).max(axis=0)
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


def _draws_until(
    order: BlendOrder, limits: list[int], all_of_them: bool, names: Sequence[str]
) -> int:
    """Counts the draws before the first one (or the last one) that finds its dataset at its end.

    Args:
        order: the draws.
        limits: items of each dataset.
        all_of_them: whether each dataset has to end, not only one.
        names: of the datasets.

    Raises:
        ValueError: a dataset that has to end is not drawn again.
    """
    left = np.array(limits, dtype=np.int64)
    has_ended = np.zeros(len(limits), dtype=bool)
    draw, size = 0, _FEWEST
    while True:
        plan = order.block(draw, size)
        counts = np.bincount(plan, minlength=len(limits))
        crossing = np.flatnonzero((counts > left) & ~has_ended)
        places = [int(np.flatnonzero(plan == child)[left[child]]) for child in crossing.tolist()]
        has_ended[crossing] = True
        if places and (not all_of_them or has_ended.all()):
            return draw + (max(places) if all_of_them else min(places))
        left = np.where(has_ended, left, left - counts)
        draw, size = draw + size, min(2 * size, LONGEST_BLOCK)
        waits = ~has_ended & (left < _NO_END // 2)
        for child in np.flatnonzero(waits & (counts == 0)).tolist():
            waits[child] = order.next_draw(draw, np.arange(len(limits)) == child) is not None
            if not waits[child] and (all_of_them or not waits.any()):
                raise _no_end("all_once" if all_of_them else "first", names[child])


def _no_end(until: str, name: str) -> ValueError:
    return ValueError(
        f"until={until!r}: the weight of {name} stays 0 before it has ended once, so the blend "
        "never ends; end with a weight above 0, or use until='forever'"
    )
