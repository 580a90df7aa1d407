"""The calls and attributes of the classes that ours are called after, where they differ."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.samplers.plan import PackSettings

F = TypeVar("F", bound=Callable[..., None])


def also_called(*names: str) -> Callable[[F], F]:
    """Lets `__init__` be called with the arguments of another library's class, by position too.

    A call is the other one's if it fits their order of arguments and not ours:
    `Ours(sampler, lengths=[...])` gives `lengths` twice where `lengths` is our first argument.

    Args:
        names: the other's arguments in their order, each called as the argument of ours.
    """

    def decorate(init: F) -> F:
        signature = inspect.signature(init)

        @wraps(init)
        def called(self: Any, *args: Any, **settings: Any) -> None:
            theirs = dict(zip(names, args, strict=False))
            if len(args) <= len(names) and not theirs.keys() & settings.keys():
                try:
                    signature.bind(self, *args, **settings)
                except TypeError:
                    args, settings = (), theirs | settings
            init(self, *args, **settings)

        return called  # type: ignore[return-value]

    return decorate


AXOLOTLS_ORDER = (
    "sampler", "batch_size", "batch_max_len", "lengths", "packing_efficiency_estimate",
    "drop_last", "num_count_samples", "sequential", "group_size", "bin_size", "num_processes",
    "safe_mode", "mp_start_method",
)  # fmt: skip

# Arguments of axolotl's that say how its packing is computed, not what comes out, and what they
# are if they are not given.
WITHOUT_EFFECT: dict[str, Any] = {
    "group_size": 100_000,
    "mp_start_method": "fork",
    "num_count_samples": 4,
    "num_processes": None,
    "packing_efficiency_estimate": 1.0,
    "safe_mode": True,
}


class AxolotlNames:
    """What axolotl's code reads of its `MultipackBatchSampler`, of the packs that ours gives.

    Numbers of tokens are those of one epoch: as many as all ranks give of it.
    """

    settings: PackSettings
    _unused: dict[str, Any]

    def __len__(self) -> int:
        raise NotImplementedError

    def _sizes_given(self) -> Int64Array:
        """Returns the tokens of each pack that all ranks give."""
        raise NotImplementedError

    def efficiency(self) -> float:
        """Returns the share of packs' room that is filled, in 0..1, of all that all ranks give.

        Padding by `align` counts as empty, a pack above the capacity as full. 1 if nothing is left.
        """
        slots = self.total_token_slots
        return self.total_tokens_used / slots if slots else 1.0

    def __getattr__(self, name: str) -> Any:
        """Returns an argument of axolotl's that has no effect, as it was given."""
        if name not in WITHOUT_EFFECT:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._unused.get(name, WITHOUT_EFFECT[name])

    @property
    def batch_max_len(self) -> int:
        """Tokens a pack can hold: `capacity`."""
        return self.settings.capacity

    @property
    def bin_size(self) -> int | None:
        """Samples in a pack at most: `max_samples`."""
        return self.settings.max_samples

    @property
    def sequential(self) -> bool:
        """Whether packs keep the order of samples."""
        return self.settings.algorithm == "sequential"

    @property
    def total_tokens_used(self) -> int:
        """Tokens of the packs that are given in this epoch, over all ranks."""
        return int(self._sizes_given().sum())

    @property
    def total_token_slots(self) -> int:
        """Tokens that there is room for in these packs; in one that is too large, as it has."""
        return int(np.maximum(self._sizes_given(), self.settings.capacity).sum())

    @property
    def eff_total_used(self) -> int:
        """`total_tokens_used`; an older name of axolotl's."""
        return self.total_tokens_used

    @property
    def eff_total_slots(self) -> int:
        """`total_token_slots`; an older name of axolotl's."""
        return self.total_token_slots

    @property
    def len_across_ranks(self) -> int:
        """`len()`, which is the same on all ranks already."""
        return len(self)

    def num_batches(self) -> int:
        """Returns `len()`."""
        return len(self)

    def gather_efficiency(self) -> float:
        """Returns `efficiency()`, which is of all ranks already."""
        return self.efficiency()

    def gather_len_batches(self, num: float) -> int:
        """Returns a number of batches: what the plan gives is the same on all ranks already."""
        return math.floor(num)
