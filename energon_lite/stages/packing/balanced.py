"""Packs in an order in which ranks have alike ones at the same step, without talking."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from energon_lite.batching.quantile_sync import QuantileSync
from energon_lite.core.dataset import Cursor
from energon_lite.core.errors import StateError
from energon_lite.core.seeds import key_of
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import Again, current_context
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED
from energon_lite.stages.batching import Collected
from energon_lite.stages.packing.filled import FillCursor, FilledPacks
from energon_lite.stages.packing.planned import PlannedPacks
from energon_lite.stages.planned.lists import PlanCursor


class BalancedPacks(Collected):
    """The packs of each window, light and heavy ones at the same places in all streams.

    State: the restore keys and the costs of the packs held, and which of them come next.
    Length: as below.
    Keys: as below.

    Args:
        dataset: packs; their `packing` has the cost model and the size of a window.
        seed: of the run.
    """

    kind: ClassVar[str] = "pack"

    def __init__(self, dataset: FilledPacks | PlannedPacks, seed: int = 0) -> None:
        super().__init__(dataset, "Balanced packs")
        self.packing = dataset.packing
        self.seed = seed

    def cursor(self, stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        inner: Any = self.dataset.cursor(stream)
        # The same for all streams: that is the point of it.
        seed = key_of("balanced_packs", self.seed, stream.num_streams, stream.pass_index)
        return _BalanceCursor(self, inner, seed)

    @property
    def samples_are_known(self) -> bool:
        """It is not, as of packs."""
        return False

    def restore_sample(self, restore_key: RestoreKey) -> list[Any]:
        """Makes the samples of a pack again."""
        samples: list[Any] = self.dataset.restore_sample(restore_key)
        return samples

    def config(self) -> dict[str, JSON]:
        """Returns window and costs."""
        cost = self.packing.cost
        return {
            "stage": "balance_packs",
            "window": self.packing.balance_window,
            "cost": [cost.token, cost.token_squared, cost.tile],
            "seed_offset": self.seed,
            "of": self.dataset.config(),
        }


class _Held(NamedTuple):
    """A pack that waits: its restore key, and its samples, `SKIPPED` after a resume."""

    key: RestoreKey
    samples: Any


class _BalanceCursor(Cursor[list[Any]]):
    def __init__(self, spec: BalancedPacks, inner: FillCursor | PlanCursor, seed: int) -> None:
        self._spec = spec
        self._inner = inner
        self._seed = seed
        self._sync = QuantileSync(spec.packing.balance_window, seed)
        self._held: dict[int, _Held] = {}
        self._again = Again(spec.restore_sample)

    def __next__(self) -> list[Any]:
        sync, inner = self._sync, self._inner
        while not sync.is_full:
            try:
                samples = next(inner)
            except StopIteration:
                break
            self._held[sync.num_added] = _Held(inner.key, samples)
            sync.add(inner.cost)
        if not sync.num_held:
            raise StopIteration
        held = self._held.pop(sync.next_pack())
        self.key = ("pack", current_context().batch_index, *held.key[2:])
        if held.samples is SKIPPED:
            return list(self._again(self.key))
        pack: list[Any] = held.samples
        return pack

    def snapshot(self) -> Snapshot:
        state = self._sync.state()
        # A row for each pack held: number, place among those that come next or -1, bits of cost.
        waiting = range(state["first"], state["first"] + len(state["costs"]))
        rows = [(number, place, 0) for place, number in enumerate(state["order"])]
        rows += [(n, -1, bits) for n, bits in zip(waiting, state["costs"], strict=True)]
        fields = {
            "first": state["first"],
            "window_number": state["window_number"],
            "rows": tuple(rows),
            "held": tuple(self._held[number].key for number, _, _ in rows),
        }
        return Snapshot("balance_packs", fields, (self._inner.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("balance_packs", 1)
        keys = snapshot.field("held")
        try:
            rows = np.array(snapshot.field("rows"), dtype=np.int64).reshape(len(keys), 3)
            numbers = rows[:, 0].tolist()
            is_next = rows[:, 1] >= 0
            self._sync.restore(
                {
                    "window": self._spec.packing.balance_window,
                    "seed": self._seed,
                    "window_number": snapshot.count("window_number"),
                    "first": snapshot.count("first"),
                    "order": rows[is_next, 0].tolist(),
                    "costs": rows[~is_next, 2].tolist(),
                }
            )
            if self._sync.held() != sorted(numbers):
                raise ValueError(f"it holds {numbers}")
            held = {
                number: _Held(_checked(key), SKIPPED)
                for number, key in zip(numbers, keys, strict=True)
            }
        except (TypeError, ValueError) as error:
            raise StateError(
                f"The checkpoint's stage 'balance_packs' is damaged: {error}"
            ) from error
        self._inner.restore(snapshot.inner[0])
        self._held = held
        self._again = Again(self._spec.restore_sample, keys)


def _checked(key: Any) -> RestoreKey:
    if not isinstance(key, tuple) or len(key) < 3 or key[0] != "pack":
        raise ValueError(f"{key!r:.80} is no restore key of a pack")
    return key
