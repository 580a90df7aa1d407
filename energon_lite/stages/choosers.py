"""Choose which of several datasets each draw of a blend takes: by weight, of samples or tokens."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import StateError
from energon_lite.core.keys import first_leaf, leaves
from energon_lite.core.state import COUNT, NUMBER, TEXT, RestoreKey, Snapshot, rows
from energon_lite.core.stream_context import context_or
from energon_lite.core.topology import Stream
from energon_lite.order.blending import BlendOrder, BudgetOrder, BudgetState

# Draws that are planned together.
_BLOCK = 256
LONGEST_BLOCK = 1 << 16
# Further draws after which a draw's measured length counts in the choice.
LAG = 16


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


class BySamples:
    """Chooses by the number of the draw: a plan for many draws at a time.

    Args:
        order: which dataset each draw takes.
        num_datasets: how many there are.
    """

    def __init__(self, order: BlendOrder, num_datasets: int) -> None:
        self.order = order
        self._num_datasets = num_datasets
        self._begin(0)

    def _begin(self, draw: int) -> None:
        self._ended: set[int] = set()
        self._only_one_left: int | None = 0 if self._num_datasets == 1 else None
        self._go_to(draw)

    def _go_to(self, draw: int) -> None:
        """Forgets the plan; the next one begins with `draw`."""
        self._next_plan = draw
        # The datasets that the next draws take, the numbers of the draws, and which is the next.
        self._plan = self._draws = np.empty(0, dtype=np.int64)
        self._at = self._block = 0

    def choose(self) -> int:
        """Returns the dataset that the next draw takes."""
        if self._only_one_left is not None:
            return self._only_one_left
        while self._at >= len(self._plan):
            size = max(_BLOCK, self._block)
            self._plan_on(size)
            if self._ended:
                # Where little is left of the weights, long intervals are passed over at once.
                self._block = min(LONGEST_BLOCK, 2 * size) if len(self._plan) < 16 else 0
                if not len(self._plan) and (alone := self._pass_over()) is not None:
                    return alone
        return int(self._plan[self._at])

    def next(self, n: int) -> tuple[Int64Array, Int64Array]:
        """Returns the datasets of some of the next `n` draws and the draws' numbers; both (N,).

        The number is -1 where only one dataset is left: its items use no draws up.
        """
        self.choose()
        if self._only_one_left is not None:
            return np.full(n, self._only_one_left), np.full(n, -1)
        if (missing := self._at + n - len(self._plan)) > 0:
            with suppress(ValueError):  # weights that are all 0, which these draws report
                self._plan_on(max(_BLOCK, missing))
        own = slice(self._at, self._at + n)
        return self._plan[own], self._draws[own]

    def _plan_on(self, size: int) -> None:
        """Plans further draws, but for those of datasets that have ended."""
        new = self.order.block(self._next_plan, size)
        draws = np.arange(self._next_plan, self._next_plan + size)
        self._next_plan += size
        self._set_plan(
            np.concatenate([self._plan[self._at :], new]),
            np.concatenate([self._draws[self._at :], draws]),
        )

    def _set_plan(self, plan: Int64Array, draws: Int64Array) -> None:
        if self._ended:
            is_left = ~np.isin(plan, list(self._ended))
            plan, draws = plan[is_left], draws[is_left]
        self._plan, self._draws, self._at = plan, draws, 0

    def drew(self, child: int, key: RestoreKey) -> None:
        """Counts a draw."""
        self._at += 1

    def pass_over(self, draw: int) -> None:
        """Goes behind a draw."""
        self._at = int(np.searchsorted(self._draws, draw, side="right"))

    def _pass_over(self) -> int | None:
        """Passes over draws at which no dataset that is left has a share.

        Returns:
            If none ever has one again, the first of them: they are taken whole, one by one.
        """
        is_left = ~np.isin(np.arange(self._num_datasets), list(self._ended))
        later = self.order.next_draw(self._next_plan, is_left)
        if later is None:
            self._go_to(self._next_plan)
            self._only_one_left = int(is_left.argmax())
        else:
            self._next_plan = max(self._next_plan, later)
        return self._only_one_left

    def leave_out(self, ended: set[int]) -> None:
        """Takes the datasets that have ended out of the plan, from the next draw on."""
        self._ended, self._only_one_left = ended, None
        if len(ended) == self._num_datasets - 1:
            # Whatever the plan has, it is always the turn of this one.
            (self._only_one_left,) = set(range(self._num_datasets)) - ended
            self._go_to(self._next_draw)
        else:
            self._set_plan(self._plan[self._at :], self._draws[self._at :])

    @property
    def _next_draw(self) -> int:
        return int(self._draws[self._at]) if self._at < len(self._plan) else self._next_plan

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
        tokens: the length that was measured, as far as it is known.
        source: the source of its first sample.
    """

    child: int
    tokens: int
    source: str


_TOKEN_STATE = {
    "draw": COUNT,
    "debts": rows(NUMBER, NUMBER, NUMBER),
    "pending": rows(COUNT, COUNT, TEXT),
    "measured": rows(TEXT, COUNT),
}


class ByTokens:
    """Chooses by the tokens of the draws before.

    The tokens of a draw come from an index; or they are those that are measured of its source
    between the draw and the next one.
    """

    def __init__(self, spec: Any, stream: Stream) -> None:
        self._stream = stream
        self._num_datasets = len(spec.datasets)
        self._order = BudgetOrder(spec.weights, spec.key, stream, spec.first_means)
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
        else:
            self._tell_lengths()
        return self._order.choose()

    def _tell_lengths(self) -> None:
        """Passes stored lengths to the stream, which counts the tokens of its items by them."""
        stored = context_or(self._stream).stored_lengths
        if self._lengths and not self._stream.is_measured and self._sources[0] not in stored:
            stored.update(self._lengths)

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
            child, tokens, _ = pending.popleft()
            order.pending[child] -= 1
            order.count(child, order.draw - len(pending) - 1, tokens)

    def drew(self, child: int, key: RestoreKey) -> None:
        """Counts the draw: with its length, if there is an index; with the mean until then."""
        order = self._order
        if self._lengths is not None:
            found = [int(self._lengths[leaf[0]][leaf[2]]) for leaf in leaves(key)]
            order.count(child, order.draw, sum(found))
        else:
            order.pending[child] += 1
            self._pending.append(_Draw(child, 0, first_leaf(key)[0]))
        order.draw += 1

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
        for draw in pending:
            self._order.pending[draw.child] += 1
        self._pending = deque(pending)
        self._begin(dict(fields["measured"]))
        self._tell_lengths()
