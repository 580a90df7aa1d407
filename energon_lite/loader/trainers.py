"""Epochs and batches to skip that trainers ask for, and attributes that they read."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from torch.utils.data import Sampler

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Seek:
    """The requests of a trainer since the last `iter`.

    Places are absolute, so that a loader that is there already stays: after its state was restored,
    and where a trainer only counts its epochs aloud.

    Attributes:
        epoch: of the trainer; None if it has set none.
        batch: how many batches of the epoch are done; None if it has set none.
        is_restored: whether a state was restored since.
        is_fresh: whether the run has not begun.
        offset: number of a pass less that of the trainer's epoch; None where these do not begin
            together, so that each epoch of the trainer continues the pass.
    """

    epoch: int | None = None
    batch: int | None = None
    is_restored: bool = False
    is_fresh: bool = True
    offset: int | None = 0

    def target(self, here: int) -> int | None:
        """Returns the pass to be in, where the loader would be in pass `here`; None for any."""
        if self.epoch is None:
            return None
        if self.is_restored and self.epoch not in (here, here + 1):
            # The state decides. A trainer that begins to count at 0 continues from there; where one
            # is inside of an epoch, it counts epochs by a length that is too high.
            self.offset = None if self.batch else here - self.epoch
        return None if self.offset is None else self.epoch + self.offset

    def num_to_discard(self, has_passes: bool, num_returned: int, num_steps: int) -> int:
        """Counts the batches to skip before the first is yielded.

        Args:
            has_passes: whether the data or a virtual epoch ends.
            num_returned: batches yielded in this pass or virtual epoch.
            num_steps: batches of an epoch.
        """
        if num_returned >= num_steps:
            num_returned = 0  # all of the pass, so the next one begins
        if self.is_restored:
            num_behind = (self.batch or num_returned) - num_returned
            if num_behind and has_passes:  # a trainer alone counts epochs of endless data
                logger.warning(
                    "The trainer asks to skip %d batches of its epoch, and the restored state "
                    "stands after %d; the state decides.",
                    self.batch,
                    num_returned,
                )
            return 0
        if self.is_fresh and not has_passes:
            return (self.epoch or 0) * num_steps + (self.batch or 0)
        return max(0, (self.batch or 0) - num_returned)


class EpochSampler(Sampler[None]):
    """The `sampler` that trainers read from a loader: draws nothing, passes `set_epoch` on."""

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[None]:
        """Yields None for ever, as torch's sampler of an `IterableDataset` does."""
        return repeat(None)

    def set_epoch(self, epoch: int) -> None:
        """Calls `set_epoch` of the loader."""
        loader = self._loader()
        if loader is not None:
            loader.set_epoch(epoch)


class OwnCollate:
    """The `collate_fn` that trainers read from a loader; it knows the loader, and never runs.

    Its caller has made another loader from the attributes of this one, over the same dataset: each
    rank would get all data, and no state would be kept.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = weakref.ref(loader)

    def __call__(self, *_: Any) -> Any:
        """Refuses.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "A torch DataLoader was made from the attributes of a SavableDataLoader: each rank and "
            "worker of it would read all data. Hand over the loader itself: "
            "accelerator.prepare(loader), or return it from get_train_dataloader() of a Trainer; "
            "docs/trainers.md has it for each trainer."
        )

    def __reduce__(self) -> Any:
        """Pickles for worker processes, where it refuses as well."""
        return OwnCollate, (set(),)  # which is gone at once, as its loader is in another process
