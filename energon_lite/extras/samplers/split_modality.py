"""The samplers of steps in which all samples are of one group, such as a modality.

Axes: N samples, S steps, G samples of a step over all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from energon_lite.batching.lists import Lists
from energon_lite.batching.modality_steps import step_groups
from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import StateError
from energon_lite.extras.samplers.epoch_sampler import (
    EpochSettings,
    PaddedEpochBatchSampler,
    also_called,
    as_groups,
    as_lengths,
    either,
)
from energon_lite.extras.samplers.sample_order import check_sampler

End = Literal["pad", "drop"]


@dataclass(frozen=True, kw_only=True)
class StepSettings(EpochSettings):
    """The size and windows of steps, and what all samplers have."""

    global_batch_size: int
    window: int = 64
    longest_first: bool = False
    end: End = "pad"


class SplitModalityBatchSampler(PaddedEpochBatchSampler):
    """Makes each step of one group only, and of similar length, the same on all ranks of a run.

    All ranks together take `global_batch_size` samples in a step, and all of these are of one
    group: with images, say, or only text. So no rank runs the image encoder while another has
    nothing for it. Samples of a group are shuffled, sorted by length within windows of many steps,
    cut into steps, and assigned to ranks in turn: within a step the longest sample of each rank is
    about as long as any other, so that no rank waits for another and little is padded. Then the
    steps are shuffled over the whole epoch.

    It takes the arguments of prismatic's `SplitModalitySampler`, also by position, but yields
    batches; the class of that name yields indices.

        sampler = SplitModalityBatchSampler(dataset.get_modality_lengths(), 128, window=64)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

    Call `set_epoch` before each epoch, as for `DistributedSampler`.

    Args:
        modality_lengths: N pairs (group, length), where the group is any hashable value, such as
            whether the sample has an image; or with `groups` the lengths, shape (N,). Lengths are
            integers from 0 on. Only how they compare within a group has an effect, but for
            `longest_first`, `efficiency()` and `padding()`, for which image tokens should count.
        global_batch_size: samples of a step over all ranks, G.
        groups: N groups.
        batch_size: samples of a batch, if a step has several on each rank, since gradients are
            accumulated. By default, `global_batch_size / num_replicas`.
        window: steps of a window; more leave less padding: 8 leave about 5 %, 64 about 1 %. Windows
            have at most a quarter of a group, or samples would meet the same others in each epoch.
        longest_first: whether the epoch begins with the step that has the longest sample, to find
            out early if memory is enough for it.
        seed: another value yields other epochs.
        end: what becomes of samples of a group that fill no step: "pad" repeats others of the
            group, "drop" drops them, other ones in each epoch. `num_repeated` and `num_dropped`
            count them.
        drop_last: True is the same as `end="drop"`.
        rank: index of this data-parallel process, passed together with `num_replicas`. By default
            as in `torch.distributed`.
        num_replicas: number of data-parallel processes.
        world_size: another name of `num_replicas`.
        dataset: if passed, its length must be N.
        sampler: refused. Lightning puts one here; the error names the remedy.

    Raises:
        TypeError: An argument is passed twice, or not an integer; or a group is not hashable.
        ValueError: There are no lengths; one is negative; numbers of lengths, groups or samples
            differ; `global_batch_size` is not a multiple of the number of ranks, or of it times
            `batch_size`; or another setting is out of range. Iteration and `len()` raise it, too,
            if no group fills a step with `end="drop"`.

    Example:
        >>> lengths = [(True, 9), (True, 3), (False, 5), (True, 8), (True, 2), (False, 4)]
        >>> sampler = SplitModalityBatchSampler(lengths, 2, num_replicas=1, rank=0)
        >>> [[lengths[i] for i in batch] for batch in sampler]
        [[(True, 9), (True, 8)], [(False, 5), (False, 4)], [(True, 3), (True, 2)]]
    """

    _name, _unit = "split_modality", "samples in steps of one group"
    _saved = ("groups", "global_batch_size", "window", "longest_first", "end")

    @also_called(
        "dataset", "modality_lengths", "global_batch_size", "num_replicas", "rank", "seed",
        "drop_last",
    )  # fmt: skip
    def __init__(
        self,
        modality_lengths: Sequence[tuple[Hashable, int]] | npt.ArrayLike,
        global_batch_size: int,
        *,
        groups: Iterable[Hashable] | None = None,
        batch_size: int | None = None,
        window: int = 64,
        longest_first: bool = False,
        seed: int = 0,
        end: End | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
        world_size: int | None = None,
        dataset: Sized | None = None,
        sampler: None = None,
    ) -> None:
        check_sampler(sampler, has_own_order=True)
        self.groups, lengths_N = _groups_and_lengths(modality_lengths, groups)
        if dataset is not None and len(dataset) != len(lengths_N):
            raise ValueError(
                f"dataset has {len(dataset):,} samples, but modality_lengths {len(lengths_N):,}"
            )
        if drop_last and end == "pad":
            raise ValueError("drop_last=True contradicts end='pad'; pass one.")
        end = end or ("drop" if drop_last else "pad")
        self.settings: StepSettings = StepSettings(
            global_batch_size=global_batch_size, window=window, longest_first=longest_first,
            seed=seed, end=end,
        )  # fmt: skip
        size = 1 if batch_size is None else batch_size
        super().__init__(lengths_N, None, size, end == "drop", self.settings)
        self._set_place(
            rank, either("num_replicas", num_replicas, "world_size", world_size), "num_replicas"
        )
        self._is_whole_step = batch_size is None
        self._fit_batches()

    def _fit_batches(self) -> None:
        """Sets the batch size by the number of ranks; refuses ranks that cannot share a step."""
        factors = {"num_replicas": self.world_size}
        if not self._is_whole_step:
            factors = {"batch_size": self._batch_size or 1} | factors
        product = int(np.prod(list(factors.values())))
        step_size = self.settings.global_batch_size
        if rest := step_size % product:
            named = " times ".join(f"{name}={value}" for name, value in factors.items())
            raise ValueError(
                f"global_batch_size={step_size} is not a multiple of {named}: ranks would get "
                f"different numbers of samples. {step_size - rest} or {step_size - rest + product} "
                "would be one."
            )
        if self._is_whole_step:
            self._batch_size = step_size // self.world_size

    def _move(self, rank: int, world_size: int) -> None:
        if world_size != self.world_size and self._is_sharded:
            raise ValueError(
                f"accelerate shards whole batches to {world_size} processes, but the sampler was "
                f"made for {self.world_size}, with {self.batch_size} samples in a batch. Make it "
                "after Accelerator() or TrainingArguments; with split_batches=True, pass rank=0 "
                "and num_replicas=1."
            )
        super()._move(rank, world_size)
        self._fit_batches()

    def plan(self, order_N: Int64Array, epoch: int) -> Lists:
        """Returns the samples of an epoch, each a list: step after step, the longest first."""
        steps_SG = step_groups(
            order_N, self.lengths, self.groups, step_size=self.settings.global_batch_size,
            window=self.settings.window, end=self.settings.end,
        )  # fmt: skip
        steps_SG = steps_SG[self.permutation(len(steps_SG), epoch, 1)]
        if self.settings.longest_first and len(steps_SG):
            longest = int(self.lengths[steps_SG[:, 0]].argmax())
            steps_SG[[0, longest]] = steps_SG[[longest, 0]]
        return Lists(steps_SG.ravel(), np.arange(steps_SG.size + 1))

    def _rows(self) -> Int64Array:
        step_size = self.settings.global_batch_size
        num_left = len(self._planned().lists) - self._first
        if num_left % (self._lists_per_batch * self.world_size):
            raise StateError(
                f"The state was saved within a step, of which {num_left % step_size:,} samples are "
                f"left. These are no whole batches of batch_size={self._batch_size} for each of "
                f"num_replicas={self.world_size}. Save after whole steps, or resume with the "
                "settings of the run that saved."
            )
        return super()._rows()


class SplitModalitySampler(Sampler[int]):
    """Yields the indices of `SplitModalityBatchSampler`'s batches one by one.

    For `DataLoader(dataset, batch_size=global_batch_size // num_replicas, sampler=...)`, as
    prismatic's class of this name; `batch_size` may be a divisor of this, or groups would meet in a
    batch. Each epoch begins with the step that has the longest sample.

    Args:
        dataset: its length must be N.
        modality_lengths: N pairs (group, length), as those of `SplitModalityBatchSampler`.
        global_batch_size: samples of a step over all ranks.
        num_replicas: number of data-parallel processes, passed together with `rank`. By default as
            in `torch.distributed`. Omit both where accelerate shards batches.
        rank: index of this process.
        seed: another value yields other epochs.
        drop_last: whether samples that fill no step of their group are dropped; else others of the
            group come twice.
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
        # Attributes of the sampler itself, which torchdata looks for.
        self.set_epoch, self.state_dict = self.batches.set_epoch, self.batches.state_dict
        self.load_state_dict = self.batches.load_state_dict

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the batch sampler or a setting: `rank`, `epoch`, `seed`, ..."""
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches if hasattr(self.batches, name) else self.batches.settings, name)

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
        return len(self.batches._planned().lists)


def _groups_and_lengths(pairs: Any, groups: Any) -> tuple[Int64Array, Int64Array]:
    """Returns groups as numbers, and lengths: of pairs, or of lengths where there are groups."""
    lengths = pairs
    if groups is None:
        try:
            pairs = pairs.tolist() if hasattr(pairs, "tolist") else list(pairs)
            groups, lengths = [group for group, _ in pairs], [length for _, length in pairs]
        except (TypeError, ValueError):
            raise TypeError(
                "modality_lengths must be pairs (group, length), or lengths together with groups"
            ) from None
    lengths_N = as_lengths(lengths, least=0)
    return as_groups("groups", groups, len(lengths_N)), lengths_N
