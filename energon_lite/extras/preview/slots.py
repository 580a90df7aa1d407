"""The batches of a run by their slots, as the model gets them; also those of a saved run."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from threading import Lock
from typing import Any, NamedTuple

from energon_lite.core.dataset import SavableDataset, StreamRun
from energon_lite.core.state import RestoreKey, Snapshot
from energon_lite.core.topology import ORDER_SETTINGS, Stream, WorkerConfig
from energon_lite.extras.preview.page_jobs import report_progress
from energon_lite.extras.view.stage_tree import saved_stages
from energon_lite.loader.resume import resume
from energon_lite.pipeline import get_train_dataset

# Arguments that a state has kept by their own names, and that are the same for all sources.
_SAVED = (
    "batch_size", "batch_drop_last", "packing_buffer_size", "shuffle_buffer_size",
    "max_samples_per_sequence", "parallel_shard_iters", "repeat", *ORDER_SETTINGS,
)  # fmt: skip


class Slot(NamedTuple):
    """A batch of a run, and the key from which it can be re-created."""

    batch: Any
    restore_key: RestoreKey


def saved_settings(states: Sequence[Any]) -> dict[str, Any]:
    """Returns `num_streams`, and the arguments of `get_train_dataset` that a state names.

    Arguments that differ between the sources of the run are omitted.
    """
    stages = [stage for state in states for stage in saved_stages(state)]
    for stage in stages:
        if stage.get("joins_epochs") is False:  # a size that is passed would join epochs
            stage.pop("packing_buffer_size", None)
    same: dict[str, Any] = {}
    for name in _SAVED:
        values = [stage[name] for stage in stages if name in stage]
        if values and all(value == values[0] for value in values):
            same[name] = values[0]
    return {"num_streams": states[0]["num_streams"], **same} if states else {}


class SlotReader:
    """Computes the batches of a run, one stream at a time; from any thread.

    Args:
        path: a prepared folder, a file of samples or a metadataset.
        split_part: the split.
        encoder: the task encoder of the run; None for the default.
        states: the states of the ranks of a run, or of one of them; the run continues from there.
        settings: `num_streams`, and arguments of `get_train_dataset`; see `saved_settings`.

    Raises:
        ValueError: An argument or a file of the dataset is invalid.
        StateError: The states are not of a run with these settings.
    """

    def __init__(
        self, path: str | PathLike[str], split_part: str, encoder: Any,
        states: Sequence[Any] = (), **settings: Any,
    ) -> None:  # fmt: skip
        self.num_streams: int = settings.pop("num_streams", 1)
        is_one = len(states) == 1  # of a rank, whose streams are known; others start from scratch
        config = WorkerConfig(
            rank=states[0]["rank"] if is_one else 0,
            world_size=states[0]["world_size"] if is_one else 1, num_workers=0,
            num_streams=self.num_streams,
            **{name: settings.pop(name) for name in ORDER_SETTINGS if name in settings},
        )  # fmt: skip
        self._dataset: SavableDataset[Any] = get_train_dataset(
            path, split_part=split_part, task_encoder=encoder, worker_config=config, **settings
        )
        self._pass, self._lock = 0, Lock()
        # The known places of each stream, by the number of its next batch.
        self._places: dict[int, dict[int, Snapshot]] = {}
        self.first = 0
        if states:
            start = resume(states, self._dataset, config, ("", "", self._dataset.config())).start
            self._pass, self.first = start.pass_index, start.slots.slot(0)
            for index, own in start.streams.items():
                if own.snapshot is not None:
                    self._places[index] = {own.snapshot.count("items"): own.snapshot}

    def read(self, slot: int) -> Slot | None:
        """Computes the batch of a slot; None if its stream ends before.

        A batch before those of the state is computed from the start of the run.

        Raises:
            TimeoutError: No browser waits for it any more. The next call continues from there.
            Exception: What a hook or a sample raised.
        """
        number, index = divmod(slot, self.num_streams)
        with self._lock:
            places = self._places.setdefault(index, {})
            run = StreamRun(self._dataset, Stream(index, self.num_streams, self._pass))
            known = max((place for place in places if place <= number), default=None)
            if known is not None:
                run.restore(places[known])
            try:
                while run.num_returned < number:
                    run.skip(1)
                    try:
                        report_progress(run.num_returned, number)
                    except TimeoutError:
                        places[run.num_returned] = run.snapshot()
                        raise
                places[number] = run.snapshot()
                batch = next(run)
                places[number + 1] = run.snapshot()
                return Slot(batch, run.key)
            except StopIteration:
                return None
