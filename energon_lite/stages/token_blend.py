"""Several datasets by their share of tokens."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import Cursor, SavableDataset, Traits
from energon_lite.core.errors import StateError
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import context_or, leaves
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.order.budget import BudgetOrder, BudgetState
from energon_lite.order.schedules import Weight, Weights
from energon_lite.stages.blend import (
    BlendDataset,
    begin_again,
    next_until,
    typical_shares,
)

T = TypeVar("T")

# A draw's length counts in the choice after so many further draws; by then it has been measured.
LAG = 16


class TokenBlendDataset(BlendDataset[T]):
    """Takes each item whole from one of several datasets, by their share of tokens.

    Lengths come from a stored index, and are then known at once; or they are measured where
    samples are encoded (`TaskEncoder.sample_length`), and count `LAG` draws later. An item that is
    left out on the way there counts nothing then; with an index, it counts.

    State: the number of the next draw, tokens asked less given and mean lengths by dataset, the
    last draws with what is known of their length, and the places in all datasets.
    Length: the sum of those below; which end comes first is not foreseen.
    Keys: as below.

    Args:
        datasets: pairs (dataset, weight), as in `BlendDataset`.
        until: as in `BlendDataset`.
        weights: as in `BlendDataset`.
        lengths: the tokens of each sample, shape (N,), by source; None to use what is measured.
        worker_config: by default that of the datasets.
    """

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
        self.counts_tokens = lengths is not None
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

    def uncounted(self) -> TokenBlendDataset[T]:
        """Returns this dataset where the tokens for statistics are counted elsewhere."""
        if not self.counts_tokens:
            return self
        other = copy.copy(self)
        other.counts_tokens = False
        return other

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

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return _TokenBlendCursor(self, stream)

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


class _Draw(NamedTuple):
    """A draw whose length has not been counted yet."""

    child: int
    guess: float
    key: RestoreKey


class _TokenBlendCursor(Cursor[T]):
    def __init__(self, spec: TokenBlendDataset[T], stream: Stream) -> None:
        self._spec = spec
        self._stream = stream
        self._order = BudgetOrder(spec.weights, spec.key, stream)
        self._cursors: list[Cursor[T]] = [
            dataset.cursor(dataclasses.replace(stream, share=stream.share * share))
            for dataset, share in zip(spec.datasets, typical_shares(spec.weights), strict=True)
        ]
        self._lengths = None if spec.lengths is None else spec.lengths_by_source()
        self._num_ended = 0
        self._pending: deque[_Draw] = deque()
        # What was measured so far of the samples of pending draws.
        self._measured: dict[RestoreKey, int] = {}
        self._context = context_or(stream)
        self._listens = False

    def __next__(self) -> T:
        self._listen()
        order = self._order
        while self._num_ended < len(self._cursors):
            if len(self._pending) >= LAG:
                self._settle()
            child = order.choose()
            cursor = self._cursors[child]
            try:
                item = next_until(self._spec.until, cursor)
            except StopIteration:
                self._has_ended(child)
                continue
            self.key = cursor.key
            self._count(child)
            return item
        raise StopIteration

    def _listen(self) -> None:
        context = context_or(self._stream)
        if context is not self._context or not self._listens:
            self._context, self._listens = context, True
            if self._lengths is None:
                context.length_listeners.append(self._note)

    def _note(self, leaf: RestoreKey, tokens: int) -> None:
        if leaf in self._measured:  # else it is of another dataset
            self._measured[leaf] += tokens

    def _count(self, child: int) -> None:
        """Counts the draw: with its length, if there is an index; with the mean till then."""
        order = self._order
        if self._lengths is not None:
            tokens = sum(self._indexed(self._lengths, leaf) for leaf in leaves(self.key))
            order.gave(child, order.draw, float(tokens))
            order.learn(child, float(tokens))
        else:
            guess = order.mean(child)
            order.gave(child, order.draw, guess)
            self._pending.append(_Draw(child, guess, self.key))
            for leaf in leaves(self.key):
                self._measured.setdefault(leaf, 0)
        order.draw += 1

    def _indexed(self, lengths: dict[str, Int64Array], leaf: RestoreKey) -> int:
        tokens = int(lengths[leaf[0]][leaf[2]])
        if self._spec.counts_tokens:
            self._context.cost(leaf[0]).tokens += tokens
        return tokens

    def _settle(self) -> None:
        """Counts the oldest pending draw with what was measured for it."""
        order = self._order
        child, guess, key = self._pending.popleft()
        draw = order.draw - len(self._pending) - 1
        tokens = float(sum(self._measured.pop(leaf, 0) for leaf in leaves(key)))
        order.gave(child, draw, tokens - guess)
        order.learn(child, tokens)

    def _length(self, key: RestoreKey) -> int:
        return sum(self._measured.get(leaf, 0) for leaf in leaves(key))

    def _has_ended(self, child: int) -> None:
        """Takes a dataset out of the choice; ends the pass where it was the one to wait for."""
        if self._spec.until == "first":
            raise StopIteration
        if self._spec.until == "all_once":
            begin_again(self._cursors, child)
            return
        self._order.leave_out(child)
        self._num_ended += 1

    def snapshot(self) -> Snapshot:
        state = self._order.state()
        pending = tuple((*draw, self._length(draw.key)) for draw in self._pending)
        fields: dict[str, Any] = {
            "draw": state.draw,
            "debts": tuple(zip(state.debts, state.tokens, state.counts, strict=True)),
            "pending": pending,
        }
        return Snapshot("token_blend", fields, tuple(c.snapshot() for c in self._cursors))

    def restore(self, snapshot: Snapshot) -> None:
        k = len(self._cursors)
        snapshot.expect("token_blend", k)
        draw = snapshot.count("draw")
        rows, pending = snapshot.field("debts"), snapshot.field("pending")
        is_whole = (
            _is_table(rows, 3) and len(rows) == k and _is_table(pending, 4)
            and all(_is_number(x) for row in rows for x in row)
            and all(
                child in range(k) and _is_number(guess) and isinstance(key, tuple)
                and isinstance(tokens, int)
                for child, guess, key, tokens in pending
            )
        )  # fmt: skip
        if not is_whole:
            raise StateError(
                f"The checkpoint's token blend has debts={rows!r:.80} and pending={pending!r:.80}, "
                "which it did not save; it was edited or damaged."
            )
        for cursor, inner in zip(self._cursors, snapshot.inner, strict=True):
            cursor.restore(inner)
        columns = [list(column) for column in zip(*rows, strict=True)]
        self._order.go_to(BudgetState(draw, *columns))
        self._num_ended = 0
        self._pending = deque(_Draw(child, guess, key) for child, guess, key, _ in pending)
        self._measured = {leaf: 0 for _, _, key, _ in pending for leaf in leaves(key)}
        self._measured.update((next(leaves(key)), tokens) for _, _, key, tokens in pending)
        self._listen()  # a stage above may still be expanding the sample drawn last


def _is_table(value: Any, width: int) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(row, tuple) and len(row) == width for row in value
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
