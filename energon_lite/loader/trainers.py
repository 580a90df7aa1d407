"""What trainers ask of a loader: epochs, batches to skip, and attributes that Accelerate reads."""

from __future__ import annotations

import json
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from torch.utils.data import Sampler

from energon_lite.core.edataclass import converted, moving
from energon_lite.storage.files import write_atomically

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Seek:
    """What a trainer asked for since the last `iter`.

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
            # is inside of an epoch, it counts epochs by an estimate of their length.
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
            if num_behind:
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


class LoaderCallback:
    """Keeps the loader's state in the checkpoints of transformers' `Trainer`, and logs its figures.

        Trainer(..., callbacks=[LoaderCallback()])

    Each checkpoint gets `loader_state.json`, with the states of all ranks of the loader that
    `get_train_dataloader` returned. Where the Trainer resumes, from
    `TrainingArguments.resume_from_checkpoint` or a checkpoint in `output_dir`, the state is
    restored: on any number of workers and ranks, and no batch is computed again. The logs of
    training get the actual share, the skipped samples and the seconds waited of each source, of the
    rank that logs.

    It has all events of a `TrainerCallback`, and imports nothing of transformers.
    """

    file = "loader_state.json"
    logged = ("/actual_share", "/skipped", "/wait_sec")

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns what does nothing, for the other events."""
        if not name.startswith("on_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return lambda *_, **__: None

    def on_train_begin(self, args: Any, state: Any, _: Any, **kwargs: Any) -> None:
        """Restores the state, where the Trainer resumes.

        Raises:
            StateError: It does not fit the pipeline.
        """
        own = Path(args.output_dir, f"checkpoint-{state.global_step}")
        for folder in (args.resume_from_checkpoint or own, own) if state.global_step else ():
            path = Path(folder, self.file)
            saved = json.loads(path.read_bytes()) if path.is_file() else {}
            # The Trainer read its log from the checkpoint that it resumes from.
            if saved.get("log") == json.dumps(state.log_history, sort_keys=True):
                kwargs["train_dataloader"].load_state_dict(saved["loader"])
                return
        if state.global_step:
            logger.warning(
                "The Trainer resumes at step %d of a checkpoint without %s, or one that lies "
                "elsewhere: %s was looked for. Batches are computed again up to there, on as many "
                "ranks as before. Set TrainingArguments(resume_from_checkpoint=...) to its folder.",
                state.global_step, self.file, path,
            )  # fmt: skip

    def on_save(self, args: Any, state: Any, _: Any, **kwargs: Any) -> None:
        """Saves the states of all ranks into the checkpoint; all ranks call it.

        Raises:
            StateError: Some ranks did not call it in time.
        """
        loader = kwargs["train_dataloader"].state_dict()
        saved = {"log": json.dumps(state.log_history, sort_keys=True), "loader": loader}
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if args.should_save and folder.is_dir():  # a search of hyperparameters has other folders
            write_atomically(folder / self.file, json.dumps(saved).encode())

    def on_log(self, _: Any, state: Any, __: Any, **kwargs: Any) -> None:
        """Adds the figures to the logs of training."""
        if "loss" in kwargs["logs"]:
            figures = kwargs["train_dataloader"].stats().scalars().items()
            own = {name: value for name, value in figures if name.endswith(self.logged)}
            kwargs["logs"].update(own)
            state.log_history[-1].update(own)
