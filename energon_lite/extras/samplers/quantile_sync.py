"""The order of packs that `quantile_sync` has, for packs whose costs come one by one."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np

from energon_lite.batching.balance_orders import BalancedOrder
from energon_lite.batching.collector import Samples, saved_count
from energon_lite.core.arguments import at_least
from energon_lite.core.errors import StateError


class QuantileSync:
    """Takes the costs of packs as they come, and returns which pack to emit next.

    Does what `quantile_sync` does, window after window. It buffers W packs when `is_full`: while
    one window is emitted, the next one is read, a pack for each pack.

    What it returns depends on the arguments and on the costs only, in the order of the calls.

    Args:
        window: W; packs in a window, the same on all ranks. 64 make the imbalance of long documents
            a sixth of that in random order; it falls with 1 / sqrt(W).
        seed: the same on all ranks.

    Attributes:
        num_added: packs added in all; the number of the next one.

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
        window, seed = at_least("window", window, 1), at_least("seed", seed, -inf)
        self._settings = {"window": window, "seed": seed}
        self._order = BalancedOrder(**self._settings)
        self.num_added = 0

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
        self._order.add_one(self.num_added, 0, (int(np.float64(cost).view(np.int64)),))
        self.num_added += 1

    @property
    def num_buffered(self) -> int:
        """Packs that are yet to be emitted."""
        return self._order.num_buffered

    @property
    def is_full(self) -> bool:
        """Whether a window of packs is buffered, so that the next pack may be emitted."""
        return self.num_buffered >= self._settings["window"]

    def next_pack(self) -> int:
        """Returns the number of the next pack, and lets go of it.

        Before it `is_full`, only at the end of the packs: it may make a window that is shorter.

        Raises:
            IndexError: No pack is buffered.
        """
        pack = self._order.next(0, has_ended=True)
        if pack is None:
            raise IndexError("No pack is buffered: all packs were returned. Check num_buffered.")
        return pack[0]

    def buffered(self) -> list[int]:
        """Returns the numbers of the buffered packs, ascending."""
        return [number for number, _, _ in self.state()["packs"]]

    def state(self) -> dict[str, Any]:
        """Returns all that `restore` needs to resume exactly, in integers.

        Returns:
            `window` and `seed`; `windows` begun; packs `added`; and of each of the `packs` that are
            buffered its number, its place in the last window or -1, and its cost as 64 bits.
        """
        state, waiting = self._order.state(), self._order.waiting
        packs = [[number, place, waiting.get(number, 0)] for number, place in state.rows().tolist()]
        return {**self._settings, **state.counts, "added": self.num_added, "packs": packs}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to where `state` was taken, by one with the same arguments.

        Raises:
            StateError: It is corrupt, or of one with another window or seed; nothing has changed
                then.
        """
        order = BalancedOrder(**self._settings)
        try:
            for name, own in self._settings.items():
                if state[name] != own:
                    raise StateError(
                        f"Checkpoint has {name}={state[name]!r} where this quantile sync has {own}."
                        " Build it with the settings it was saved with."
                    )
            added, rows = saved_count(state, "added"), [list(map(int, p)) for p in state["packs"]]
            numbers, places, costs = np.array(rows, np.int64).reshape(-1, 3).T
            if not (np.diff(numbers, prepend=-1, append=added) > 0).all():
                raise ValueError(f"the packs are not numbered from 0 to below {added}")
            samples = Samples(numbers, np.zeros_like(numbers), costs[:, None])
            order.restore(state, samples, places[:, None])
        except StateError:
            raise
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise StateError(
                f"The state of a quantile sync is corrupt: {error!r:.200}. Use an older one."
            ) from error
        self._order, self.num_added = order, added
