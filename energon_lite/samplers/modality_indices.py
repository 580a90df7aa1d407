"""A sampler of indices for steps of one group, for loaders that make batches themselves."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from energon_lite.batching.steps import deal
from energon_lite.samplers.split_modality import SplitModalityBatchSampler, plan_steps


class SplitModalitySampler(Sampler[int]):
    """Yields the indices of `SplitModalityBatchSampler`'s batches one by one.

    For `DataLoader(dataset, batch_size=global_batch_size // num_replicas, sampler=...)`, as
    prismatic's class of this name; `batch_size` may be a divisor of this, or groups would meet in a
    batch. Each epoch begins with the step that has the longest sample.

    Args:
        dataset: its length must be N.
        modality_lengths: N pairs (group, length), as those of `SplitModalityBatchSampler`.
        global_batch_size: samples of a step over all ranks.
        num_replicas: number of data-parallel processes, given together with `rank`. By default as
            `torch.distributed` says. Leave both out where accelerate deals batches to processes.
        rank: index of this process.
        seed: another value gives other epochs.
        drop_last: whether samples that fill no step of their group are left out; else others of
            the group come twice.
        window: steps that are sorted by length together.

    Raises:
        TypeError: as `SplitModalityBatchSampler`.
        ValueError: as `SplitModalityBatchSampler`.
    """

    def __init__(
        self,
        dataset: Sized,
        modality_lengths: Sequence[tuple[Hashable, int]],
        global_batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        window: int = 64,
    ) -> None:
        self.dataset, self.modality_lengths = dataset, modality_lengths
        self.batches = SplitModalityBatchSampler(
            modality_lengths, global_batch_size, dataset=dataset, num_replicas=num_replicas,
            rank=rank, seed=seed, drop_last=drop_last, window=window, longest_first=True,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        """Returns what the batch sampler has: `rank`, `epoch`, `seed`, `num_repeated`, ..."""
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __iter__(self) -> Iterator[int]:
        """Yields this rank's indices of the epoch, or of the rest of it after `load_state_dict`."""
        for batch in self.batches:
            yield from batch

    def __len__(self) -> int:
        """Returns how many indices the next iteration yields: the same number on each rank."""
        return len(self.batches) * int(self.batches.batch_size)

    @property
    def num_replicas(self) -> int:
        """The number of data-parallel processes."""
        return self.batches.world_size

    @property
    def num_samples(self) -> int:
        """Indices of this rank in an epoch."""
        return self.total_size // self.num_replicas

    @property
    def total_size(self) -> int:
        """Indices of all ranks in an epoch, with those that come twice."""
        return int(self.batches._planned().indices.size)

    def set_epoch(self, epoch: int) -> None:
        """Begins another epoch; its number fixes the order."""
        self.batches.set_epoch(epoch)

    def state_dict(self, batches_given: int | None = None) -> dict[str, Any]:
        """Returns where the epoch stands; see `SplitModalityBatchSampler.state_dict`."""
        return self.batches.state_dict(batches_given)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes in the middle of an epoch; see `SplitModalityBatchSampler.load_state_dict`."""
        self.batches.load_state_dict(state)

    def get_modality_and_length_grouped_indices(self, generator: torch.Generator) -> list[int]:
        """Returns the indices of all ranks in an epoch of its own, that the generator draws.

        Each `global_batch_size` of them are of one group, and each `global_batch_size /
        num_replicas` of these are for one rank.
        """
        batches = self.batches
        steps = plan_steps(
            batches.lengths, batches.groups, step_size=batches.global_batch_size,
            window=batches.window, end=batches.end, longest_first=True, epoch=0,
            seed=int(torch.randint(2**62, (1,), generator=generator)),
        )  # fmt: skip
        ranks = range(batches.world_size)
        return [
            index
            for step in steps.indices
            for rank in ranks
            for index in deal(step, rank, len(ranks)).tolist()
        ]
