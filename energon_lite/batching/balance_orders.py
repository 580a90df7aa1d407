"""Orders of packs in which all ranks have packs of similar cost at the same step.

`global_window` plans for all ranks at once. With `quantile_sync` each rank orders its own packs,
without communication: it sorts W of them by cost, and emits them in a random order of places that
is the same on all ranks. If the ranks draw from the same mix, the packs that meet in a step are of
the same quantile of cost. A rank with another mix stays as it is.

Axes: P packs, S steps, K ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from energon_lite.batching.collector import CollectorState, OneByOne, Samples, saved_count
from energon_lite.batching.costs import as_costs
from energon_lite.core.arguments import at_least
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.seeds import UInt64Array, key_of, random_words
from energon_lite.order.permutation import Permutation

Remainder = Literal["pad", "drop", "ragged"]

NO_PACK = -1


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The pack of each rank in each step, and what became of those that did not fit in.

    Every pack in 0..P-1 is in `steps` once, and once more for each time that `repeated` has it; or
    it is in `omitted`.

    Attributes:
        steps: shape (S, K); the pack of each rank in each step, -1 for none.
        repeated: packs that are there once more for each time that they are named here.
        omitted: packs that no rank has, ascending.
    """

    steps: Int64Array
    repeated: Int64Array
    omitted: Int64Array

    def __len__(self) -> int:
        return len(self.steps)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepPlan):
            return NotImplemented
        return all(np.array_equal(a, vars(other)[name]) for name, a in vars(self).items())

    def __repr__(self) -> str:
        num_steps, num_ranks = self.steps.shape
        return (
            f"StepPlan({num_steps:,} steps of {num_ranks:,} ranks, {len(self.repeated):,} packs "
            f"repeated, {len(self.omitted):,} omitted)"
        )

    def costs(self, costs_P: npt.ArrayLike) -> Float64Array:
        """Returns what each rank has in each step, 0 where it has no pack.

        Args:
            costs_P: shape (P,); any cost of the packs.

        Returns:
            Shape (S, K), for `imbalance` and `idle_share`.

        Raises:
            TypeError: Not numbers.
            ValueError: Another shape, not P of them, or one is negative or not finite.
        """
        costs = as_costs(costs_P, "pack")
        num_packs = self.steps.size - (self.steps == NO_PACK).sum()
        num_packs += len(self.omitted) - len(self.repeated)
        if len(costs) != num_packs:
            raise ValueError(f"{len(costs):,} costs for a plan of {num_packs:,} packs.")
        return np.append(costs, 0.0)[self.steps]  # -1 takes the last


def global_window(
    costs_P: npt.ArrayLike,
    num_ranks: int,
    window_steps: int,
    seed: int,
    *,
    epoch: int = 0,
    remainder: Remainder = "pad",
) -> StepPlan:
    """Sorts windows of packs by cost, and cuts them into steps of neighbours.

    A window is the next `window_steps * num_ranks` packs of the argument; it keeps its packs.
    Steps of a window come in random order. Within `num_ranks` steps of neighbouring cost, each rank
    has each place, from the cheapest to the dearest, in turn. What becomes of a window depends on
    its own packs, the seed, the epoch and its number only. O(P log window) time.

    Packs are to come in random order: those of a packer that sorts go from long samples to short
    ones, and so would the epoch.

    Args:
        costs_P: shape (P,); the cost of each pack, in any unit.
        num_ranks: K.
        window_steps: steps in a window; 1 keeps the order of packs but for ranks. The imbalance
            falls about with 1 / window_steps: 64 make that of long documents a fiftieth.
        seed: the same on all ranks.
        epoch: with the seed, it fixes what is drawn.
        remainder: what becomes of P % K packs. `"pad"`: as many packs as are missing come once
            more, from the first on. `"drop"`: the last packs are dropped; all of them, if they are
            fewer than ranks. `"ragged"`: the cheapest of the last window make
            a step that comes last, in which some ranks have no pack.

    Raises:
        TypeError: Not numbers.
        ValueError: A cost is negative or not finite, `remainder` is another word, or a number is
            too small.

    Example:
        >>> global_window([3, 9, 4, 8, 1, 2], num_ranks=2, window_steps=3, seed=0).steps.tolist()
        [[0, 2], [1, 3], [5, 4]]
    """
    costs = as_costs(costs_P, "pack")
    num_ranks, epoch = at_least("num_ranks", num_ranks, 1), at_least("epoch", epoch, 0)
    window_steps = at_least("window_steps", window_steps, 1)
    if remainder not in get_args(Remainder):
        raise ValueError(f"remainder={remainder!r} is not one of {', '.join(get_args(Remainder))}")
    packs, repeated, omitted = _whole_steps(len(costs), num_ranks, remainder)
    window_steps = max(min(window_steps, len(packs) // num_ranks), 1)
    size = window_steps * num_ranks
    num_whole, num_windows = len(packs) // size, -(-len(packs) // size)
    per_window = -(-(window_steps + num_ranks) // 4) * 4  # whole blocks of Philox
    key = key_of("balance.global_window", at_least("seed", seed, -inf))
    words = random_words(key, epoch, size=num_windows * per_window).reshape(-1, per_window)
    whole = packs[: num_whole * size].reshape(num_whole, size)
    steps = [_cut(costs, whole, num_ranks, words[:num_whole])]
    if num_whole < num_windows:
        rest = packs[None, num_whole * size :]
        steps.append(_cut(costs, rest, num_ranks, words[num_whole:]))
    return StepPlan(np.concatenate(steps), repeated, omitted)


def balanced_steps(
    costs_P: Float64Array, num_ranks: int, balance_window: int, seed: int, epoch: int
) -> Int64Array:
    """Returns the steps of `global_window` in windows of equal size, shape (S, K).

    A last window of few steps would balance worse. Ranks that have no pack in the last step have
    `NO_PACK`.

    Args:
        costs_P: shape (P,).
        num_ranks: K.
        balance_window: about how many steps are sorted together.
        seed: the same on all ranks.
        epoch: with the seed, it fixes what is drawn.
    """
    num_steps = -(-len(costs_P) // num_ranks)
    window = -(-num_steps // max(1, round(num_steps / balance_window)))
    plan = global_window(costs_P, num_ranks, max(1, window), seed, epoch=epoch, remainder="ragged")
    return plan.steps


def _whole_steps(
    num_packs: int, num_ranks: int, remainder: Remainder
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Packs for whole steps, with `NO_PACK` among the last; those repeated, and those dropped."""
    packs = np.arange(num_packs)
    num_missing = -num_packs % num_ranks
    if remainder == "drop":
        packs, omitted = np.split(packs, [num_packs - num_packs % num_ranks])
        return packs, omitted[:0], omitted
    repeated = np.resize(packs, num_missing if remainder == "pad" else 0)
    added = repeated if remainder == "pad" else np.full(num_missing, NO_PACK)
    return np.append(packs, added), repeated, packs[:0]


def _cut(
    costs: Float64Array, packs_WM: Int64Array, num_ranks: int, words: UInt64Array
) -> Int64Array:
    """Makes the steps of windows, each a row of M packs; shape (number of all steps, K).

    The first K random words of a window are for its ranks, the next for its steps.
    """
    num_windows, num_packs = packs_WM.shape
    num_steps = num_packs // num_ranks
    keys_WM = np.append(costs, -1.0)[packs_WM]  # no pack is cheaper than any
    order_WM = np.argsort(keys_WM, axis=1, kind="stable")
    sorted_WSK = np.take_along_axis(packs_WM, order_WM, axis=1).reshape(-1, num_steps, num_ranks)
    # The step at place s of a window, in sorted order, starts with rank s. Ranks are renamed, or
    # the first would always have the cheapest pack of all.
    places = np.arange(num_ranks) - np.arange(num_steps)[:, None]
    turned_WSK = np.take_along_axis(sorted_WSK, places[None] % num_ranks, axis=2)
    ranks_WK = np.argsort(words[:, :num_ranks], axis=1, kind="stable")
    turned_WSK = np.take_along_axis(turned_WSK, ranks_WK[:, None], axis=2)
    steps_WS = np.argsort(words[:, num_ranks : num_ranks + num_steps], axis=1, kind="stable")
    if NO_PACK in packs_WM[-1:]:  # then in the first step when sorted; it comes last
        steps_WS[-1] = np.append(steps_WS[-1][steps_WS[-1] > 0], 0)
    shuffled = np.take_along_axis(turned_WSK, steps_WS[:, :, None], axis=1)
    return shuffled.reshape(num_windows * num_steps, num_ranks)


def quantile_sync(costs_W: npt.ArrayLike, window: int, seed: int, window_number: int) -> Int64Array:
    """Returns the order in which a rank emits the packs of one of its windows.

    Sorted by cost, equal ones by index, then permuted by what depends on `seed` and `window_number`
    only: pack t of all ranks has the same rank in cost. A rank whose last window has fewer packs
    keeps the rhythm, as far as it can.

    Args:
        costs_W: shape (n,), n at most `window`; the costs of the packs, in any unit.
        window: W; packs in a full window, the same on all ranks.
        seed: the same on all ranks.
        window_number: windows before this one.

    Returns:
        Shape (n,); indices into `costs_W`, in the order of emission.

    Raises:
        TypeError: Not numbers.
        ValueError: `window` or `window_number` is too small, there are more costs than `window`, or
            a cost is negative or not finite.

    Example:
        >>> quantile_sync([5, 1, 9], 3, seed=0, window_number=0).tolist()
        [1, 2, 0]
        >>> quantile_sync([40, 20, 30], 3, seed=0, window_number=0).tolist()
        [1, 0, 2]
    """
    window = at_least("window", window, 1)
    window_number = at_least("window_number", window_number, 0)
    costs = as_costs(costs_W, "pack")
    if len(costs) > window:
        raise ValueError(
            f"{len(costs):,} packs are more than a window of {window:,}. Give one window at a time."
        )
    key = key_of("balance.quantile_sync", at_least("seed", seed, -inf))
    places = Permutation(window, key, window_number)(np.arange(len(costs)))
    # The first of places 5, 0, 3 is the highest: it gets the dearest pack.
    order: Int64Array = np.argsort(costs, kind="stable")[np.argsort(np.argsort(places))]
    return order


class BalancedOrder(OneByOne):
    """Returns packs one by one, in the order that `quantile_sync` has for each window of them.

    Length: the cost of a pack, as the 64 bits of a float. Column: the pack's place among those
    that come next, or -1 if it belongs to the next window.

    Args:
        window: packs of a window.
        seed: the same in all streams.

    Attributes:
        waiting: packs of the next window, by number, and their costs.
    """

    num_columns = 1

    def __init__(self, window: int, seed: int) -> None:
        self._window = window
        self._seed = seed
        self._num_windows = 0
        self._order: list[int] = []  # the next one last
        self.waiting: dict[int, int] = {}

    @property
    def num_buffered(self) -> int:
        """Packs that are yet to be emitted."""
        return len(self._order) + len(self.waiting)

    def add_one(self, number: int, group: int, lengths: Sequence[int]) -> bool:
        """Adds a pack to the next window."""
        self.waiting[number] = lengths[0]
        return self.num_buffered >= self._window

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns the next pack, as a list of one."""
        if self.num_buffered < (1 if has_ended else self._window):
            return None
        if not self._order:
            numbers = np.array([*islice(self.waiting, self._window)], np.int64)
            costs = np.array([self.waiting.pop(number) for number in numbers.tolist()], np.int64)
            order = quantile_sync(
                costs.view(np.float64), self._window, self._seed, self._num_windows
            )
            self._order = numbers[order[::-1]].tolist()
            self._num_windows += 1
        return (self._order.pop(),)

    def state(self) -> CollectorState:
        """Returns the windows begun, and the place of each pack."""
        numbers = np.array([*self._order[::-1], *self.waiting], np.int64)
        places = np.append(np.arange(len(self._order)), np.full(len(self.waiting), -1))
        return CollectorState(
            {"windows": self._num_windows}, partial(np.column_stack, (numbers, places))
        )

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: It buffers more packs than it can, or one has no cost.
        """
        numbers, places = samples.numbers, columns_NC[:, 0]
        as_costs(np.ascontiguousarray(samples.lengths[:, 0]).view(np.float64), "pack")
        self._num_windows = saved_count(counts, "windows")
        is_waiting = places < 0
        pairs = zip(numbers[is_waiting], samples.lengths[is_waiting, 0], strict=True)
        self.waiting = {int(number): int(cost) for number, cost in pairs}
        order = np.argsort(-places, kind="stable")[: len(places) - len(self.waiting)]
        self._order = numbers[order].tolist()
        if len(self._order) > self._window:
            raise ValueError(f"{len(self._order)} packs are left of a window of {self._window}")
