"""Accelerate: its `skip_first_batches`, and batches on its device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from energon_lite.core.edataclass import converted, moving
from energon_lite.loader.trainers import OwnCollate


def teach_skipping() -> None:
    """Makes `accelerate.skip_first_batches(loader, n)` return a loader of ours, n batches on.

    It does nothing where accelerate is taught already.
    """
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


def on_accelerator(loader: Any, run: Any) -> Iterator[Any]:
    """Yields batches on the accelerator's device, while Accelerate knows of the loader."""
    from accelerate.state import GradientState, PartialState

    state = GradientState()
    move = moving(PartialState().device, None, non_blocking=True)
    state._add_dataloader(loader)
    try:
        for batch in run.iterate():
            loader.end_of_dataloader = run.is_last
            # What is not pinned is copied before this returns.
            yield converted(batch, "to", move)
    finally:
        loader.end_of_dataloader = False
        state._remove_dataloader(loader)
