"""The `Trainer` of transformers: a callback that keeps the loader's state and logs its figures."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from energon_lite.storage.files import write_atomically

logger = logging.getLogger(__name__)


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
