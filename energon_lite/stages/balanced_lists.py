"""Packs in an order in which all ranks have packs of similar cost at the same step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from energon_lite.batching.balance_orders import BalancedOrder
from energon_lite.core.seeds import key_of
from energon_lite.core.stage import Stage
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.core.stream_context import current_context
from energon_lite.core.topology import Stream
from energon_lite.stages.collect import CollectCursor, CollectDataset, Unit, UnitsOf
from energon_lite.stages.pack_lists import PackLists, cost_settings

if TYPE_CHECKING:  # plans are made only in runs that use them
    from energon_lite.stages.planned_packs import PlannedPacks


def balanced_order(dataset: PackLists | PlannedPacks, stream: Stream) -> BalancedOrder | None:
    """Returns what orders the packs of a stream, in the rhythm of all; None if nothing does."""
    packing = dataset.packing
    if packing.balance != "quantile_sync":
        return None
    key = key_of("balance_packs", dataset.run_seed, stream.num_streams, stream.pass_index)
    return BalancedOrder(packing.balance_window, key)


class BalancedLists(CollectDataset[list[Any]]):
    """Packs, reordered so that all ranks have packs of similar cost at the same step.

    State: that of `CollectDataset`, of packs.
    Length: as below.
    Keys: those of the packs, with the slot in which they are emitted.

    Args:
        dataset: lists of samples, with their lengths.
        packing: window and cost.
    """

    name, kind, what = "balance_packs", "pack", "Balanced packs"
    samples_per_list = 1
    dataset: PackLists | PlannedPacks

    def __init__(self, dataset: PackLists | PlannedPacks) -> None:
        super().__init__(dataset)
        self.packing = dataset.packing

    def own_settings(self) -> dict[str, JSON]:
        """Returns window and cost."""
        packing, seed = self.packing, self.run_seed
        cost = cost_settings(packing)
        return {"window": packing.balance_window, "cost": cost, "seed_offset": seed}

    def collector(self, stream: Stream, cursor: CollectCursor) -> BalancedOrder:
        """Returns what orders the packs of a stream, in the rhythm of all."""
        order = balanced_order(self.dataset, stream)
        assert order is not None
        return order

    def units(self, inner: Any) -> UnitsOf:
        """Returns what measures the cost of a pack, as the bits of a float."""
        cost = self.packing.cost

        def units(key: RestoreKey, _: list[Any]) -> Iterable[Unit]:
            tokens = [lengths[0] for lengths in inner.lengths]
            tiles = sum(lengths[1] for lengths in inner.lengths if len(lengths) > 1)
            squares = sum(length * length for length in tokens)
            found = cost.token * sum(tokens) + cost.token_squared * squares + cost.tile * tiles
            return ((key, None, (int(np.float64(found).view(np.int64)),)),)

        return units

    def made(self, keys: list[RestoreKey], packs: list[Any]) -> tuple[RestoreKey, list[Any]]:
        """Returns the one pack, with the slot in which it is emitted."""
        return self._in_slot(keys[0]), packs[0]

    restore_sample = Stage.restore_sample

    def restore_member(self, restore_key: RestoreKey) -> list[Any]:
        """Re-creates the samples of a pack of the buffer, in the current slot."""
        return self.restore_sample(self._in_slot(restore_key))

    def _in_slot(self, key: RestoreKey) -> RestoreKey:
        return (self.kind, current_context().batch_index, *key[2:])
