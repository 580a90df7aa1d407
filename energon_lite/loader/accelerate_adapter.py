"""What Accelerate and the Hugging Face Trainer ask of a loader that they did not make.

Accelerate's `prepare` makes another loader over `loader.dataset`, unless a loader says that it is
prepared. So ours says so, and does what a prepared one does: its batches are on the accelerator's
device, and it says which batch is the last, on which gradients are accumulated to the end.
`skip_first_batches` makes another loader, too; for ours it is taught to return the loader itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

_HOW_TO_HAND_OVER = (
    "Hand over the loader itself: accelerator.prepare(loader), or return it from "
    "get_train_dataloader() of a Trainer; docs/trainers.md has it for each trainer."
)


class OwnCollate:
    """The `collate_fn` that trainers read from a loader; it knows the loader, and never runs.

    Whoever runs it has made another loader from the attributes of this one, over the same dataset:
    each rank would get all data, and no state would be kept.
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
            f"worker of it would read all data. {_HOW_TO_HAND_OVER}"
        )

    def __reduce__(self) -> Any:
        """Pickles for worker processes, where it refuses as well."""
        return OwnCollate, (_Nobody(),)


class _Nobody:
    """Takes the place of a loader of another process."""


def teach_skipping() -> None:
    """Makes `accelerate.skip_first_batches(loader, n)` return a loader of ours, n batches on.

    It does nothing where accelerate is not imported, or is taught already.
    """
    if "accelerate.data_loader" not in sys.modules:
        return
    from accelerate.data_loader import SkipDataLoader

    if getattr(SkipDataLoader.__new__, "knows_savable_loaders", False):
        return
    made_before = SkipDataLoader.__new__

    def new(cls: type, *_: Any, skip_batches: int = 0, **kwargs: Any) -> Any:
        collate = kwargs.get("collate_fn")
        loader: Any = collate.loader() if isinstance(collate, OwnCollate) else None
        if loader is None:
            return made_before(cls)
        loader.skip_first_batches(skip_batches)
        return loader

    new.knows_savable_loaders = True  # type: ignore[attr-defined]
    SkipDataLoader.__new__ = new


class Prepared:
    """The part of a prepared loader that Accelerate asks while batches are given.

    Attributes:
        end_of_dataloader: whether the batch given last is the last of the `for`.
    """

    end_of_dataloader = False

    def batches(self, loader: Any, batches: Iterator[Any], run: Any) -> Iterator[Any]:
        """Yields batches on the accelerator's device, while Accelerate knows of the loader."""
        from accelerate.state import GradientState, PartialState
        from accelerate.utils import send_to_device

        state = GradientState()
        device = PartialState().device
        state._add_dataloader(loader)
        try:
            for batch in batches:
                self.end_of_dataloader = run.is_last
                # What is not pinned is copied before this returns.
                yield send_to_device(batch, device, non_blocking=True)
        finally:
            self.end_of_dataloader = False
            state._remove_dataloader(loader)
