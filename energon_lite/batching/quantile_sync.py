"""Ranks that cannot talk take turns in the same rhythm: heavy packs together, light ones together.

Every rank sorts its W packs by cost, and emits them in a random order of positions that is the
same on all ranks. If the ranks draw from the same mix, the packs that meet in a step are of the
same quantile of cost. A rank with another mix stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_lite.batching.checks import at_least
from energon_lite.batching.costs import as_costs
from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import StateError
from energon_lite.core.seeds import key_of
from energon_lite.order.permutation import Permutation

_FIELDS = ("window", "seed", "window_number", "first", "order", "costs")


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
    window, window_number = (
        at_least("window", window, 1),
        at_least("window_number", window_number, 0),
    )
    costs = as_costs(costs_W, "pack")
    if len(costs) > window:
        raise ValueError(
            f"{len(costs):,} packs are more than a window of {window:,}. Give one window at a time."
        )
    key = key_of("balance.quantile_sync", operator.index(seed))
    places = Permutation(window, key, window_number)(np.arange(len(costs)))
    # Of places 5, 0, 3 the first is the highest: it gets the dearest pack.
    order: Int64Array = np.argsort(costs, kind="stable")[np.argsort(np.argsort(places))]
    return order


class QuantileSync:
    """Takes the costs of packs as they come, and returns which pack to emit next.

    Does what `quantile_sync` does, window after window. It buffers W packs when `is_full`: while
    one window is emitted, the next one is read, a pack for each pack.

    What it returns depends on the arguments and on the costs only, in the order of the calls.

    Args:
        window: W; packs in a window, the same on all ranks. 64 make the imbalance of long documents
            a sixth of that in random order; it falls with 1 / sqrt(W).
        seed: the same on all ranks.

    Raises:
        ValueError: `window` is below 1.

    Example:
        >>> sync = QuantileSync(window=3, seed=0)
        >>> for cost in (5, 1, 9):
        ...     sync.add(cost)
        >>> sync.is_full, [sync.next_pack() for _ in range(3)]
        (True, [1, 2, 0])
    """

    def __init__(self, window: int, seed: int) -> None:
        self._window = at_least("window", window, 1)
        self._seed = operator.index(seed)
        self._window_number = 0
        self._first = 0  # number of the first pack that is in no window yet
        self._order: list[int] = []  # packs to emit, the last one first
        self._costs: list[float] = []

    def add(self, cost: float) -> None:
        """Takes a pack, which gets the next number, from 0 on.

        Raises:
            TypeError: Not a number.
            ValueError: The cost is negative or not finite.
        """
        if not 0 <= cost < float("inf"):
            raise ValueError(
                f"Pack {self.num_added} has a cost of {cost}; it must be at least 0, finite."
            )
        self._costs.append(float(cost))

    @property
    def num_added(self) -> int:
        """Packs added in all; the number of the next one."""
        return self._first + len(self._costs)

    @property
    def num_held(self) -> int:
        """Packs that are yet to be emitted."""
        return len(self._order) + len(self._costs)

    @property
    def is_full(self) -> bool:
        """Whether a window of packs is buffered, so that the next pack may be emitted."""
        return self.num_held >= self._window

    def next_pack(self) -> int:
        """Returns the number of the next pack, and lets go of it.

        Before it `is_full`, only at the end of the packs: it may make a window that is shorter.

        Raises:
            IndexError: No pack is buffered.
        """
        if not self._order:
            if not self._costs:
                raise IndexError(
                    "No pack is buffered: all packs that were added were returned. Check num_held."
                )
            costs = self._costs[: self._window]
            order = quantile_sync(costs, self._window, self._seed, self._window_number)
            self._order = (order[::-1] + self._first).tolist()
            self._window_number += 1
            self._first += len(costs)
            del self._costs[: len(costs)]
        return self._order.pop()

    def held(self) -> list[int]:
        """Returns the numbers of the buffered packs, ascending."""
        return sorted(self._order) + list(range(self._first, self.num_added))

    def state(self) -> dict[str, Any]:
        """Returns all that `restore` needs to resume exactly, in integers.

        Returns:
            `window` and `seed`; `window_number`: windows begun; `first`: packs in them; `order`:
            numbers of the packs of the last one yet to be emitted, in order; `costs`: those of the
            packs after it, as the 64 bits of each number.
        """
        return {
            "window": self._window,
            "seed": self._seed,
            "window_number": self._window_number,
            "first": self._first,
            "order": self._order[::-1],
            "costs": np.array(self._costs, np.float64).view(np.int64).tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state` was taken, by one with the same arguments.

        Raises:
            StateError: It is corrupt, or of one with another window or seed; nothing has changed
                then.
        """
        if not isinstance(state, Mapping) or any(name not in state for name in _FIELDS):
            raise _corrupt_sync(f"is no dict with {', '.join(_FIELDS)}")
        for name, own in (("window", self._window), ("seed", self._seed)):
            if state[name] != own:
                raise StateError(
                    f"Checkpoint has {name}={state[name]!r} where this quantile sync has {own}. "
                    "Build it with the settings it was saved with."
                )
        try:
            window_number, first = map(operator.index, (state["window_number"], state["first"]))
            order = [operator.index(number) for number in state["order"]]
            bits = np.array([operator.index(cost) for cost in state["costs"]], np.int64)
            costs = as_costs(bits.view(np.float64), "pack").tolist()
        except (TypeError, ValueError, OverflowError) as error:
            raise _corrupt_sync(f"has something else than its integers: {error}") from error
        if not 0 <= window_number <= first <= window_number * self._window:
            raise _corrupt_sync(f"has {first} packs in {window_number} windows of {self._window}")
        earliest = max(first - self._window, 0)
        if len(set(order)) != len(order) or any(not earliest <= n < first for n in order):
            raise _corrupt_sync(
                f"has packs that are not among the last {self._window} before {first}"
            )
        self._window_number, self._first = window_number, first
        self._order, self._costs = order[::-1], costs


def _corrupt_sync(what: str) -> StateError:
    return StateError(f"The state of a quantile sync {what}: it is corrupt. Use an older one.")
