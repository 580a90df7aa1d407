"""A callback of two trainers that keeps the loader's state in checkpoints, and logs its figures."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from energon_lite.storage.files import write_atomically

logger = logging.getLogger(__name__)

_OTHER_EVENTS = ("setup", "teardown", "state_dict", "load_state_dict")  # of Lightning


class LoaderCallback:
    """Keeps the loader's state in checkpoints, and logs its figures, in two trainers.

        Trainer(..., callbacks=[LoaderCallback()])

    In the `Trainer` of transformers each checkpoint gets `loader_state.json`, with the states of
    all ranks of the loader that `get_train_dataloader` returned. Where the Trainer resumes, from
    `TrainingArguments.resume_from_checkpoint` or a checkpoint in `output_dir`, the state is
    restored: on any number of workers and ranks, and no batch is computed again. The `Trainer` of
    Lightning keeps the state of the loader in its checkpoints by itself.

    The logs of training get the actual share, the skipped samples and the seconds waited of each
    source, of the rank that logs; and its mean loss since the last log, if the training step calls
    `loader.record_loss(loss_by_source(losses, batch))`.

    It has all events of a `TrainerCallback` of transformers and of a `Callback` of Lightning, and
    imports nothing of these.

    Args:
        stats_file: a JSONL file for `energon-lite report`; each rank adds a line with all its
            counts at each logged step. `{rank}` in its name is replaced.
        migrate: whether the `Trainer` of transformers restores with `migrate=True`; Lightning does
            with a loader of `get_savable_loader(..., migrate=True)`.
    """

    file = "loader_state.json"
    logged = ("/actual_share", "/skipped", "/wait_sec")
    state_key = _legacy_state_key = "energon_lite.LoaderCallback"  # of Lightning

    def __init__(
        self, stats_file: str | PathLike[str] | None = None, *, migrate: bool = False
    ) -> None:
        self.stats_file = stats_file
        self.migrate = migrate
        self._last_step = 0
        self._losses: dict[str, tuple[float, float]] = {}  # up to the last step that was logged

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns what does nothing, for the other events."""
        if not name.startswith("on_") and name not in _OTHER_EVENTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return lambda *_, **__: None

    def _figures(self, loader: Any, step: int) -> dict[str, float]:
        """Returns the figures that are logged at a step; writes the line of the file."""
        stats = loader.stats()
        if self.stats_file is not None:
            stats.write_to(self.stats_file, step)
        figures = stats.scalars().items()
        found = {name: value for name, value in figures if name.endswith(self.logged)}
        for name, own in stats.items():
            total, count = self._losses.get(name, (0.0, 0.0))
            if own.loss_count > count:
                found[f"data/{name}/loss"] = (own.loss_sum - total) / (own.loss_count - count)
            self._losses[name] = own.loss_sum, own.loss_count
        return found

    # Lightning

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Looks whether there is a loader to log.

        Raises:
            TypeError: The trainer was given another loader, or several.
        """
        if not hasattr(trainer.train_dataloader, "stats"):
            raise TypeError(
                "LoaderCallback logs the loader of get_savable_loader(...), and the trainer has a "
                f"{type(trainer.train_dataloader).__name__}: pass it the loader itself, or leave "
                "the callback out"
            )

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Logs the figures every `log_every_n_steps` steps."""
        step = trainer.global_step
        if step % max(1, trainer.log_every_n_steps) == 0 and step != self._last_step:
            self._last_step = step
            figures = self._figures(trainer.train_dataloader, step)
            for own in trainer.loggers:
                own.log_metrics(figures, step=step)

    # transformers

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
                loader = kwargs["train_dataloader"]
                loader.load_state_dict(saved["loader"], migrate=self.migrate)
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
            own = self._figures(kwargs["train_dataloader"], state.global_step)
            kwargs["logs"].update(own)
            state.log_history[-1].update(own)
