"""Several datasets by weight, of samples or of tokens, of which each item is taken whole."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import Cursor, SavableDataset, Traits, depth_of
from energon_lite.core.errors import StateError
from energon_lite.core.keys import first_leaf, leaves
from energon_lite.core.sample_columns import Columns, samples_of
from energon_lite.core.seeds import key_of
from energon_lite.core.stage import StageCursor
from energon_lite.core.state import COUNT, JSON, NUMBER, TEXT, RestoreKey, Snapshot, rows
from energon_lite.core.stream_context import context_or, current_context
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import FunctionRun, unskipped
from energon_lite.order.blending import MODES, BlendOrder, BudgetOrder, BudgetState
from energon_lite.order.schedules import Schedule, Weight, Weights
from energon_lite.sources.draws_ahead import DrawsAhead, common_kind
from energon_lite.sources.planned_source import OrderColumns, OrderCursor, interleaved
from energon_lite.sources.source import SourcePlaces, WebdatasetSource
from energon_lite.stages.concat import CombinedDataset, RepeatDataset, total_items
from energon_lite.stages.map import MapDataset

T = TypeVar("T")

UNTIL = ("first", "all_once", "forever")
# Draws that are planned together.
_BLOCK = 256
_LONGEST_BLOCK = 1 << 16
# Further draws after which a draw's measured length counts in the choice.
LAG = 16


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
        kind: what can be read together of them, as `common_kind` returns it; None for nothing.
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
        self.kind = common_kind(self.leaves)
        self.mean_bytes = 1.0
        if self.kind:
            facts = self.sources()
            num_samples = sum(fact.num_samples for fact in facts)
            self.mean_bytes = max(1.0, sum(fact.num_bytes for fact in facts) / num_samples)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the count of items behind: another process counts its own stream's."""
        return {**super().__getstate__(), "_counted": (None, 0)}

    def order(self, stream: Stream) -> BlendOrder:
        """Returns which dataset each draw of a stream takes."""
        return BlendOrder(self.weights, self.blend_mode, self.key, stream)

    def chooser(self, stream: Stream) -> Chooser:
        """Returns what chooses the dataset of each draw of a stream."""
        return _BySamples(self.order(stream), len(self.datasets))

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        if self.leaves:
            cursor: Cursor[T] = _SourcesCursor(self, stream)
            is_made = any(type(dataset) is MapDataset for dataset in self.datasets)
            return _MadeCursor(self, cursor) if is_made else cursor
        return _BlendCursor(self, stream, [dataset.cursor(stream) for dataset in self.datasets])

    def num_items(self, stream: Stream) -> int:
        """Counts the items of a stream's pass."""
        limits = [dataset.num_items(stream) for dataset in self.datasets]
        if self.until not in ("first", "all_once") or self.endless:
            return sum(limits)
        counted, is_all = self._counted, self.until == "all_once"
        if counted[0] != stream:
            number = _draws_until(self.order(stream), limits, is_all, self.labels)
            counted = self._counted = stream, number
        return counted[1]

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
        weights = leaf_weights(self.weights)
        of: list[JSON] = [
            {"name": label, "weight": weight, "of": dataset.config()}
            for dataset, label, weight in zip(self.datasets, self.labels, weights, strict=True)
        ]
        return {"stage": "blend", "blend_mode": self.blend_mode, "until": self.until, "of": of}


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
        self.lengths = None if lengths is None else dict(lengths)
        # In the order of the sources, which datasets around this one may give other ids.
        self._arrays = [self._length_array(facts.name) for facts in self.sources()]
        # With another index the order is another; a checkpoint must notice.
        self._digest = "measured" if lengths is None else _digest(self._arrays)

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

    def chooser(self, stream: Stream) -> Chooser:
        """Returns what chooses the dataset of each draw of a stream."""
        return _ByTokens(self, stream)

    def num_items(self, stream: Stream) -> int:
        """Sums the items of the datasets."""
        return sum(dataset.num_items(stream) for dataset in self.datasets)

    def config(self) -> dict[str, JSON]:
        """Returns the weights and all that is blended."""
        return {**super().config(), "unit": "tokens", "lengths": self._digest}


def _digest(arrays: list[Int64Array]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array, dtype="<i8").data)
    return digest.hexdigest()


class Chooser(Protocol):
    """Chooses the dataset of each draw of a stream."""

    def choose(self) -> int:
        """Returns the dataset that the next draw takes."""

    def drew(self, child: int, key: RestoreKey) -> None:
        """Counts a draw, which returned the item with this restore key."""

    def leave_out(self, ended: set[int]) -> None:
        """Takes all datasets that have ended out of the choice, from the next draw on."""

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs."""

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the state that a snapshot has among its fields."""


class _BySamples:
    """Chooses by the number of the draw: a plan for many draws at a time.

    Attributes:
        size: how many draws are planned together, if all datasets are left.
        plan: the datasets that the next draws take.
        at: the place of the next draw in `plan`.
    """

    def __init__(self, order: BlendOrder, num_datasets: int) -> None:
        self._order = order
        self._num_datasets = num_datasets
        self.size = _BLOCK
        self._begin(0)

    def _begin(self, draw: int) -> None:
        self._ended: set[int] = set()
        self._only_one_left: int | None = 0 if self._num_datasets == 1 else None
        self._go_to(draw)

    def _go_to(self, draw: int) -> None:
        """Forgets the plan; the next one begins with `draw`."""
        self._next_plan = draw
        self.plan: list[int] = []
        self._draws = np.empty(0, dtype=np.int64)
        self.at = self._block = 0

    def choose(self) -> int:
        """Returns the dataset that the next draw takes."""
        if self._only_one_left is not None:
            return self._only_one_left
        while self.at >= len(self.plan):
            size = max(self.size, self._block)
            draws = np.arange(self._next_plan, self._next_plan + size)
            self._set_plan(self._order.block(self._next_plan, size), draws)
            self._next_plan += size
            if self._ended:
                # Where little is left of the weights, long intervals are passed over at once.
                self._block = min(_LONGEST_BLOCK, 2 * size) if len(self.plan) < 16 else 0
                if not self.plan and (alone := self._pass_over()) is not None:
                    return alone
        return self.plan[self.at]

    def _set_plan(self, plan: Int64Array, draws: Int64Array) -> None:
        """Plans draws, but for those of datasets that have ended."""
        if self._ended:
            is_left = ~np.isin(plan, list(self._ended))
            plan, draws = plan[is_left], draws[is_left]
        self.plan, self._draws, self.at = plan.tolist(), draws, 0

    def drew(self, child: int, key: RestoreKey) -> None:
        """Counts a draw."""
        self.at += 1

    def _pass_over(self) -> int | None:
        """Passes over draws at which no dataset that is left has a share.

        Returns:
            If none ever has one again, the first of them: they are taken whole, one by one.
        """
        is_left = ~np.isin(np.arange(self._num_datasets), list(self._ended))
        later = self._order.next_draw(self._next_plan, is_left)
        if later is None:
            self._go_to(self._next_plan)
            self._only_one_left = int(is_left.argmax())
        else:
            self._next_plan = max(self._next_plan, later)
        return self._only_one_left

    def take(self, num_draws: int) -> Int64Array:
        """Returns the datasets of the next draws, shape (num_draws,); none may have ended."""
        draw = self._next_draw
        self._go_to(draw + num_draws)
        return self._order.block(draw, num_draws)

    def following(self, num_draws: int) -> Int64Array:
        """Returns the datasets of draws after the plan, as far as is known before they end."""
        with suppress(ValueError):  # weights that are all 0, which the draws themselves report
            return self._order.block(self._next_plan, num_draws)
        return np.empty(0, dtype=np.int64)

    def leave_out(self, ended: set[int]) -> None:
        """Takes the datasets that have ended out of the plan, from the next draw on."""
        self._ended, self._only_one_left = ended, None
        if len(ended) == self._num_datasets - 1:
            # Whatever the plan has, it is always the turn of this one.
            (self._only_one_left,) = set(range(self._num_datasets)) - ended
            self._go_to(self._next_draw)
        else:
            self._set_plan(np.array(self.plan[self.at :]), self._draws[self.at :])

    @property
    def _next_draw(self) -> int:
        return int(self._draws[self.at]) if self.at < len(self.plan) else self._next_plan

    def state(self) -> dict[str, Any]:
        """Returns the number of the next draw."""
        return {"draw": self._next_draw}

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to a draw."""
        self._begin(snapshot.count("draw"))


class _Draw(NamedTuple):
    """A draw whose length has not been counted yet.

    Attributes:
        child: the dataset that was drawn from.
        guess: the length that was counted for it.
        tokens: the length that was measured, as far as it is known.
        source: the source of its first sample.
    """

    child: int
    guess: float
    tokens: int
    source: str


_TOKEN_STATE = {
    "draw": COUNT,
    "debts": rows(NUMBER, NUMBER, NUMBER),
    "pending": rows(COUNT, NUMBER, COUNT, TEXT),
    "measured": rows(TEXT, COUNT),
}


class _ByTokens:
    """Chooses by the tokens of the draws before.

    The tokens of a draw come from an index; or they are those that are measured of its source
    between the draw and the next one.
    """

    def __init__(self, spec: TokenBlendDataset[Any], stream: Stream) -> None:
        self._stream = stream
        self._num_datasets = len(spec.datasets)
        self._order = BudgetOrder(spec.weights, spec.key, stream)
        self._lengths = None if spec.lengths is None else spec.lengths_by_source()
        self._sources = [facts.name for facts in spec.sources()]
        self._pending: deque[_Draw] = deque()
        self._begin({})

    def _begin(self, open_tokens: dict[str, int]) -> None:
        """Begins to count what is measured, of which `open_tokens` belong to no draw so far."""
        self._context = context_or(self._stream)
        tokens = self._context.tokens
        # What had been measured of each source when it was counted last.
        self._counted = {name: tokens[name] - open_tokens.get(name, 0) for name in self._sources}

    def choose(self) -> int:
        """Returns the dataset that the next draw takes."""
        if self._lengths is None:
            self._settle()
        return self._order.choose()

    def _settle(self) -> None:
        """Counts what was measured of the last draw, and the length of the oldest pending draw."""
        self._context = context_or(self._stream)
        pending, order = self._pending, self._order
        if pending:
            last = pending[-1]
            measured = self._context.tokens[last.source]
            new = measured - self._counted.get(last.source, measured)
            pending[-1] = last._replace(tokens=last.tokens + new)
            self._counted[last.source] = measured
        if len(pending) >= LAG:
            child, guess, tokens, _ = pending.popleft()
            order.count(child, order.draw - len(pending) - 1, tokens - guess)
            order.learn(child, float(tokens))

    def drew(self, child: int, key: RestoreKey) -> None:
        """Counts the draw: with its length, if there is an index; with the mean until then."""
        order = self._order
        if self._lengths is not None:
            tokens = float(sum([self._indexed(self._lengths, leaf) for leaf in leaves(key)]))
            order.count(child, order.draw, tokens)
            order.learn(child, tokens)
        else:
            guess = order.mean(child)
            order.count(child, order.draw, guess)
            self._pending.append(_Draw(child, guess, 0, first_leaf(key)[0]))
        order.draw += 1

    def _indexed(self, lengths: dict[str, Int64Array], leaf: RestoreKey) -> int:
        tokens = int(lengths[leaf[0]][leaf[2]])
        if not self._stream.is_measured:
            context_or(self._stream).costs[leaf[0]].tokens += tokens
        return tokens

    def leave_out(self, ended: set[int]) -> None:
        """Takes the datasets that have ended out of the choice."""
        for child in ended:
            self._order.leave_out(child)

    def state(self) -> dict[str, Any]:
        """Returns tokens and mean lengths, and the last draws."""
        state, tokens = self._order.state(), self._context.tokens
        found = ((name, tokens[name] - count) for name, count in self._counted.items())
        return {
            "draw": state.draw,
            "debts": tuple(zip(state.debts, state.tokens, state.counts, strict=True)),
            "pending": tuple(tuple(draw) for draw in self._pending),
            "measured": tuple((name, new) for name, new in found if new),
        }

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to a state."""
        fields = snapshot.checked(_TOKEN_STATE)
        table, pending = fields["debts"], [_Draw(*row) for row in fields["pending"]]
        if len(table) != self._num_datasets or any(d.child >= len(table) for d in pending):
            raise StateError(
                f"The checkpoint's token blend has debts={table!r:.80} and "
                f"pending={fields['pending']!r:.80}, which are of other datasets than the "
                f"{self._num_datasets} of this one"
            )
        columns = [list(column) for column in zip(*table, strict=True)]
        self._order.go_to(BudgetState(fields["draw"], *columns))
        self._pending = deque(pending)
        self._begin(dict(fields["measured"]))


class _Opened(dict[int, Any]):
    """The cursors of a blend of sources, by number: each is opened when it is drawn from first.

    A worker process of a thousand sources would copy what the training loop has of all of them.

    Attributes:
        positions: shape (K,), never changed in place; where the sources stand, except for what was
            drawn since from those that have a cursor, and for what `ahead` has returned.
        ahead: what reads the next draws together, if anything does.
    """

    ahead: DrawsAhead | None = None

    def __init__(self, spec: BlendDataset[Any], stream: Stream) -> None:
        self._spec = spec
        self._stream = stream
        self._shares = typical_shares(spec.weights)
        self.positions: Int64Array = np.zeros(len(self._shares), dtype=np.int64)

    def __missing__(self, child: int) -> Any:
        share = self._stream.share * float(self._shares[child])
        leaf = self._spec.leaves[child]
        cursor: Any = leaf.cursor(dataclasses.replace(self._stream, share=share))
        if self.ahead is not None:
            self.ahead.settle()
        if self.positions[child]:
            cursor.go_to(int(self.positions[child]))
        self[child] = cursor
        return cursor

    def close(self, child: int) -> None:
        """Removes a cursor, and notes its position."""
        self._note([child])
        del self[child]

    def _note(self, children: Iterable[int]) -> None:
        """Puts the positions of cursors into a new array: snapshots keep the one before."""
        self.positions = self.positions.copy()
        for child in children:
            self.positions[child] = self[child].position

    def snapshot(self, drawn: set[int]) -> SourcePlaces:
        """Returns the places of all sources, of which some were drawn from."""
        if drawn_alone := drawn & self.keys():
            self._note(drawn_alone)
        taken = () if self.ahead is None else self.ahead.taken
        return SourcePlaces(self._spec.labels, self.positions, taken)

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

    @property
    def has_columns(self) -> bool:
        """As `OrderCursor`: if nothing below comes to an end."""
        return (
            self._is_plain
            and isinstance(self._chooser, _BySamples)
            and all(
                dataset.endless and isinstance(cursor, OrderCursor) and cursor.has_columns
                for dataset, cursor in zip(self.spec.datasets, self.cursors, strict=True)
            )
        )

    def take_columns(self, n: int) -> OrderColumns:
        """As `OrderCursor`."""
        cursors = self.cursors
        self._drawn.update(range(len(cursors)))
        if len(cursors) == 1:
            columns: OrderColumns = cursors[0].take_columns(n)
            return columns
        chooser: Any = self._chooser
        turns = chooser.take(n)
        counts = np.bincount(turns, minlength=len(cursors)).tolist()
        parts = [cursor.take_columns(count) for cursor, count in zip(cursors, counts, strict=True)]
        return interleaved(parts, turns)

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
    """A place in a blend of sources, of which the next draws are read together if possible."""

    def __init__(self, spec: BlendDataset[T], stream: Stream) -> None:
        self._opened = _Opened(spec, stream)
        self._stream = stream
        super().__init__(spec, stream, self._opened)

    def _begin(self) -> None:
        super()._begin()
        self._ahead: DrawsAhead | None = None
        spec, chooser = self.spec, self._chooser
        if spec.kind and isinstance(chooser, _BySamples):
            self._plan = chooser
            self._ahead = DrawsAhead(
                spec.leaves, self._stream, self._opened, chooser.following, spec.kind,
                spec.mean_bytes,
            )  # fmt: skip
            chooser.size = self._ahead.size
        self._opened.ahead = self._ahead

    def _num_ready(self, n: int) -> int:
        """Counts how many of the next `n` draws were read; reads on where these are over."""
        ahead = self._ahead
        if ahead is None:
            return 0
        plan = self._plan
        if plan.at < len(plan.plan) and (num := ahead.num_ready(n)):
            return num
        plan.choose()
        if plan.plan and ahead.is_over():
            ahead.read(np.array(plan.plan[plan.at :]))
            plan.size = ahead.size
        return ahead.num_ready(n)

    __next__ = Cursor.__next__

    def _draw(self, child: int) -> T:
        if self._num_ready(1):  # since another source has ended
            return next(self)
        item = super()._draw(child)
        if self._ahead is not None:
            self._ahead.pass_over()
        return item

    def take(self, n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
        num = self._num_ready(n)
        if not num:
            return [super().__next__()], [self.key]
        assert self._ahead is not None
        columns, keys = self._ahead.take(num)
        self._plan.at += num
        self.key = keys[-1]
        return columns, keys

    def _end(self, child: int) -> None:
        super()._end(child)
        if self._ahead is not None:
            self._ahead.leave_out(self._ended)

    def places(self) -> Sequence[Snapshot]:
        places = self._opened.snapshot(self._drawn)
        self._drawn.clear()
        return places

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect(self.spec.name, len(self.spec.datasets))
        self.set_fields(snapshot)
        self._opened.restore(snapshot.below(self.spec.labels))


class _MadeCursor(StageCursor[T]):
    """A place in a blend of sources, of which some have a function over them, such as a cooker."""

    key: RestoreKey = ()
    __next__ = Cursor.__next__

    def __init__(self, spec: BlendDataset[T], inner: Cursor[Any]) -> None:
        super().__init__(spec, inner)
        self._runs = {
            leaf.name: FunctionRun(dataset.function) if type(dataset) is MapDataset else None
            for leaf, dataset in zip(spec.leaves, spec.datasets, strict=True)
        }

    def take(self, n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
        """Returns some of the next items; the functions are called in their order."""
        found, keys = self.inner.take(n)
        runs, spend, made = self._runs, current_context().spend, list[Any]()
        since = perf_counter()
        for key, item in zip(keys, samples_of(found), strict=True):
            run = runs[key[0]]
            made.append(item if run is None else run.call(key, item))
            until = perf_counter()
            spend(key, until - since)
            since = until
        made, keys = unskipped(made, keys)
        self.key = keys[-1] if keys else self.key
        return made, keys


def _leaves(datasets: Sequence[Any]) -> list[Any]:
    """Returns the sources of datasets that make one item of each sample; else nothing."""
    below = [d.dataset if type(d) is MapDataset and d.traits.per_item else d for d in datasets]
    return below if all(type(leaf) is WebdatasetSource for leaf in below) else []


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
        for child in np.flatnonzero(~has_ended & (counts == 0)).tolist() if all_of_them else ():
            if order.next_draw(draw, np.arange(len(limits)) == child) is None:
                raise ValueError(
                    f"until='all_once': the weight of {names[child]} stays 0 before it has ended "
                    "once, so the blend never ends; end with a weight above 0, or use until='first'"
                )
