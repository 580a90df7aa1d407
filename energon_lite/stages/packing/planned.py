"""Packs that are planned by a length index before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from typing_extensions import Self

from energon_lite import packing as packers
from energon_lite.batching.rules import Packing
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.state import JSON
from energon_lite.core.topology import Stream
from energon_lite.stages.measuring import MeasureDataset
from energon_lite.stages.packing.planner import PackPlanner
from energon_lite.stages.planned.lists import PlannedLists
from energon_lite.stages.planned.reading import PlannedLengths

_LEAST_WINDOW, _PACKS_PER_WINDOW, _LARGEST_WINDOW = 4096, 64, 1 << 18


class PlannedPacks(PlannedLists):
    """Lists of samples that fill packs, planned window by window of the order.

    No sample is held back: what a pack has is known before it is read. With
    `balance="global_window"` each stream makes the plan of all, and takes its part.

    State, Length: those of `PlannedLists`.
    Keys: `("pack", slot, key, key, ...)`; that of a part of a sample that is too long for a pack is
    `("piece", start, stop, key)`.

    Args:
        dataset: the samples, measured; each stage works on single samples, or on their order.
        packing: how they are packed; names the index.
        seed: of the run.
        packs_per_batch: with a shared plan and `group_by`, packs that follow each other in a stream
            and are to be of one group.

    Raises:
        ValueError: The order is not known before reading; or `group_by="modality"`, and the index
            has tokens only.
        FileNotFoundError: A source has no such index.
    """

    kind: ClassVar[str] = "pack"

    def __init__(
        self,
        dataset: MeasureDataset[Any],
        packing: Packing,
        seed: int = 0,
        packs_per_batch: int = 1,
    ) -> None:
        self.packing = packing
        self.seed = seed
        super().__init__(
            dataset,
            PlannedLengths(
                str(packing.lengths), packing.resources, packing.group_by == "modality",
                packing.kept_tokens,
            ),
            is_shared=packing.balance == "global_window",
        )  # fmt: skip
        # Nothing else depends on it.
        self.packs_per_batch = packs_per_batch if self.is_shared and packing.group_by else 1
        packers.compile_all()

    def with_children(self, children: Sequence[SavableDataset[Any]]) -> Self:
        """Returns the same over another dataset."""
        (dataset,) = children
        measured: Any = dataset
        return type(self)(measured, self.packing, self.seed, self.packs_per_batch)

    def planner(self, stream: Stream) -> PackPlanner:
        """Returns what plans a stream's packs."""
        names = list(self.plannable.sources)
        return PackPlanner(
            self.packing, names, self.lengths, self.window, stream, self.seed, self.packs_per_batch
        )

    @cached_property
    def samples_per_list(self) -> float:
        """About how many samples a pack has, by the mean lengths and the shares of the sources."""
        kept, total = self.packing.longest, sum(self.shares.values())
        tokens = sum(n * min(self.mean_tokens[name], kept) for name, n in self.shares.items())
        return max(1.0, self.packing.tokens * total / max(tokens, 1.0))

    @cached_property
    def window(self) -> int:
        """Samples of each stream that are planned together."""
        if self.packing.plan_window is not None:
            return self.packing.plan_window
        packs = max(_PACKS_PER_WINDOW, self.packing.balance_window * self.is_shared)
        return min(max(_LEAST_WINDOW, int(packs * self.samples_per_list)), _LARGEST_WINDOW)

    def config(self) -> dict[str, JSON]:
        """Returns all that decides which samples share a pack."""
        packing = self.packing
        balance: JSON = None
        if self.is_shared:
            cost = packing.cost
            balance = [packing.balance_window, cost.token, cost.token_squared, cost.tile]
        return {
            "stage": "plan_packs",
            "capacity": dict(zip(packing.resources, packing.capacities, strict=True)),
            "algorithm": packing.algorithm,
            "packing_buffer_size": packing.buffer_size,
            "max_samples": packing.max_samples,
            "group_by": str(packing.group_by),
            "overlong": packing.overlong,
            "align": list(packing.alignments),
            "drop_last": packing.drop_last,
            "end_of_data": packing.end_of_data,
            "lengths": self.digest,
            "window": self.window,
            "balance": balance,
            "packs_per_batch": self.packs_per_batch,
            "seed_offset": self.seed,
            "of": self.dataset.config(),
        }
