"""Lists of samples that fill packs, planned by a stored index before anything is read."""

from __future__ import annotations

from typing import Any

from energon_lite.batching.rules import Packing
from energon_lite.batching.shared_packs import SharedPacks
from energon_lite.batching.window_packs import WindowPacks
from energon_lite.core.compiled import compile_all
from energon_lite.core.seeds import key_of
from energon_lite.core.state import JSON
from energon_lite.core.topology import Stream
from energon_lite.stages.pack_lists import cost_settings, pack_settings
from energon_lite.stages.planned import PlannedDataset
from energon_lite.stages.token_lengths import MeasureDataset

# Streams that plan together: a plan for more of them would hardly balance better.
_MOST_TOGETHER = 64
_LEAST_WINDOW, _PACKS_PER_WINDOW, _LARGEST_WINDOW = 4096, 64, 1 << 18


class PlannedPacks(PlannedDataset):
    """Lists of samples that fill packs, planned window by window of the order.

    With `balance="global_window"` each stream plans for all of them, or without `group_by` for some
    dozens of neighbours, and has its part of the plan.

    State, Length: those of `PlannedDataset`.
    Keys: those of `PackLists`.

    Args:
        dataset: the samples, measured; each stage works on single samples, or on their order.
        packing: how they are packed; names the index.
        packs_per_batch: with a shared plan and `group_by`, packs that follow each other in a stream
            and are to be of one group.

    Raises:
        ValueError: The order is not known before reading; or `group_by="modality"`, and the index
            has tokens only.
        FileNotFoundError: A source has no such index.
    """

    name, kind = "plan_packs", "pack"

    def __init__(
        self, dataset: MeasureDataset[Any], packing: Packing, packs_per_batch: int = 1
    ) -> None:
        self.packing = packing
        is_shared = packing.balance == "global_window"
        super().__init__(dataset, packing, is_shared)
        # Nothing else depends on it.
        self.packs_per_batch = packs_per_batch if is_shared and packing.group_by else 1
        compile_all()

    def collector(self, stream: Stream) -> WindowPacks:
        """Returns what chooses the packs of a stream."""
        if not self.is_shared:
            return WindowPacks(self.packing, self.window)
        together = self.together(stream)
        key = key_of("planned_packs", self.run_seed, stream.num_streams, stream.pass_index)
        return SharedPacks(
            self.packing, self.window * len(together), together.index(stream.index), len(together),
            key, self.packs_per_batch, is_part=len(together) < stream.num_streams,
        )  # fmt: skip

    def together(self, stream: Stream) -> range:
        """Returns the streams that have a plan together; of one group of samples all of them."""
        streams = super().together(stream)
        num_parts = 1 if self.packing.group_by else -(-len(streams) // _MOST_TOGETHER)
        size = -(-len(streams) // num_parts)
        first = (stream.index - streams.start) // size * size
        return streams[first : first + size]

    @property
    def samples_per_list(self) -> float:
        """About how many samples a pack has, by the mean lengths and the shares of the sources."""
        kept, total = self.packing.longest, sum(self.shares.values())
        tokens = sum(n * min(self.mean_tokens[name], kept) for name, n in self.shares.items())
        return max(1.0, self.packing.tokens * total / max(tokens, 1.0))

    @property
    def window(self) -> int:
        """Samples of each stream that are planned together."""
        if self.packing.plan_window is not None:
            return self.packing.plan_window
        packs = max(_PACKS_PER_WINDOW, self.packing.balance_window * self.is_shared)
        # Few data would be read a hundred times for a window of all streams.
        least = min(_LEAST_WINDOW, sum(facts.num_samples for facts in self.sources()))
        return min(max(least, int(packs * self.samples_per_list)), _LARGEST_WINDOW)

    def own_settings(self) -> dict[str, JSON]:
        """Returns all that decides which samples share a pack."""
        packing = self.packing
        balance: JSON = None
        if self.is_shared:
            balance = [packing.balance_window, *cost_settings(packing)]
        return {
            **pack_settings(packing),
            "window": self.window,
            "balance": balance,
            "packs_per_batch": self.packs_per_batch,
            "seed_offset": self.run_seed,
            **super().own_settings(),
        }
