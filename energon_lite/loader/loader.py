"""The loader: a `torch.utils.data.DataLoader` over the run of a rank, and the state of the run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from os import PathLike
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader
from typing_extensions import Self, deprecated

from energon_lite.core.arguments import at_least, hinting
from energon_lite.core.cache_pool import CachePool
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import StateError, log_exception
from energon_lite.core.samples import PADDING
from energon_lite.core.state import JSON, STATE_KEY, RestoreKey, as_key
from energon_lite.core.stream_context import DEFAULT_MAX_SKIP_RATE, replaying
from energon_lite.core.topology import WorkerConfig
from energon_lite.loader.ends import End, PassEnds, as_padding
from energon_lite.loader.rank_run import RankRun
from energon_lite.loader.rank_store import TIMEOUT_SEC, Exchange
from energon_lite.loader.resume import states_of, text_of
from energon_lite.loader.stats import Stats
from energon_lite.loader.trainers import EpochSampler, OwnCollate
from energon_lite.loader.workers.executor import Limits, RunSettings
from energon_lite.loader.workers.watchdog import Watchdog
from energon_lite.loss.source_losses import SourceLosses
from energon_lite.names.energon_modules import Described, LazyFunction
from energon_lite.sources.expected_reads import fetched
from energon_lite.storage.local_paths import growing_path

T = TypeVar("T")

logger = logging.getLogger(__name__)

_TIME = (lambda value: value is None or value > 0), "be above 0, or None"
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "cache_pool": (
        lambda value: value is None or isinstance(value, CachePool),
        "be a cache pool, such as FileStoreCachePool(), or None",
    ),
    "max_skip_rate": (lambda value: value is None or 0 <= value <= 1, "lie in 0..1, or be None"),
    "state_timeout_sec": (lambda value: value > 0, "be above 0"),
    "stall_timeout_sec": _TIME,
    "watchdog_timeout_seconds": _TIME,
    "watchdog_initial_timeout_seconds": _TIME,
}


def _check_option(name: str, value: Any) -> None:
    is_right, must = _CHECKS[name]
    with suppress(TypeError):  # of a value that cannot be compared
        if is_right(value):
            return
    raise ValueError(f"{name}={value!r} must {must}")


class SavableDataLoader(Described, DataLoader[T]):
    """Yields the batches of this rank, and the state of the run at any moment between two of them.

    In training each `iter` resumes after the last batch; in validation it starts a new pass.
    It is a `torch.utils.data.DataLoader`, with `batch_size=None` as batches come from the dataset,
    and a stateful one as torchdata's `StatefulDataLoader` is.

    Args:
        dataset: the pipeline.
        worker_config: rank and workers of this process; by default the dataset's.
        prefetch_factor: batches that each worker computes ahead; a worker process computes up to 32
            ahead as long as they are small (512 KiB together) and take less than 1 ms each.
        cache_pool: what cookers with `@cooker(need_cache=True)` get; None for a `NoCachePool`. Each
            worker process has its own threads and folder of a `FileStoreCachePool`.
        checkpoint_every_sec: accepted for Energon's signature; every batch carries its snapshot.
        checkpoint_every_min_n_samples: likewise.
        n_checkpoints: likewise.
        gc_collect_every_n_steps: likewise; nothing here leaves reference cycles behind.
        gc_freeze_at_start: likewise.
        watchdog_timeout_seconds: after so long without a batch stacks are logged; None for never.
        watchdog_initial_timeout_seconds: the same for the first batch.
        fail_on_timeout: whether such a wait is an error (with worker processes).
        max_skip_rate: failures per sample that a stream may have over a longer time; 1 for any
            number. None is 0.01; the limit of a validation pass is then left to a
            `global_error_handler` of the user's.
        skip_log: a JSONL file of all skipped samples; `{rank}` in its name is replaced.
        state_timeout_sec: how long a rank waits for the others where all save or restore
            together, before that is an error.
        end: how the ranks end a pass over finite data. "pad": all with the last; the others repeat
            a batch whose mask `valid` is False and whose loss weights are 0. "drop": all with the
            first that has no batch left. "uneven": each by itself. The default pads where ranks
            share a process group, or drops where a batch cannot carry the mask; else it is uneven.
            Several ranks need a process group for "pad" and "drop".
        restart_workers: how many worker processes that die may be replaced within ten minutes;
            no batch changes.
        workers: `RayWorkers`, or another maker of workers, in the place of those of the
            `worker_config`.
        stall_timeout_sec: a worker process that takes longer for a batch, or to start, is reported
            and replaced; None for never.
        migrate: whether each restore, also by a trainer, is one with `migrate=True`.

    Raises:
        TypeError: `dataset` is not one, or an argument is unknown or not an integer.
        ValueError: An argument is out of range, or a blend never reaches the end that it waits for.
    """

    @hinting
    def __init__(
        self,
        dataset: SavableDataset[T],
        *,
        worker_config: WorkerConfig | None = None,
        checkpoint_every_sec: float = 60,
        checkpoint_every_min_n_samples: int | None = None,
        n_checkpoints: int | None = None,
        gc_collect_every_n_steps: int = 10,
        gc_freeze_at_start: bool = True,
        prefetch_factor: int = 2,
        cache_pool: CachePool | None = None,
        watchdog_timeout_seconds: float | None = 60,
        watchdog_initial_timeout_seconds: float | None = None,
        fail_on_timeout: bool = False,
        max_skip_rate: float | None = None,
        skip_log: str | PathLike[str] | None = None,
        state_timeout_sec: float = TIMEOUT_SEC,
        end: End | None = None,
        restart_workers: int = 3,
        stall_timeout_sec: float | None = None,
        workers: Any = None,
        migrate: bool = False,
    ) -> None:
        options = {name: value for name, value in locals().items() if name in _CHECKS}
        del checkpoint_every_sec, checkpoint_every_min_n_samples, n_checkpoints
        del gc_collect_every_n_steps, gc_freeze_at_start
        config = _worker_config_of(dataset, worker_config, workers)
        for name, value in options.items():
            _check_option(name, value)
        handler = (dataset.worker_config or config).global_error_handler
        is_own_limit = max_skip_rate is None and handler is not log_exception
        max_skip_rate = DEFAULT_MAX_SKIP_RATE if max_skip_rate is None else max_skip_rate
        waits = (watchdog_timeout_seconds or 0, watchdog_initial_timeout_seconds or 0)
        # Workers report what they do themselves.
        watchdog = Watchdog(*((0, 0) if config.num_workers else waits))
        own_log = growing_path(str(skip_log).replace("{rank}", str(config.rank))).absolute()
        settings = RunSettings(
            prefetch_factor=at_least("prefetch_factor", prefetch_factor),
            limits=Limits(waits[0], stall_timeout_sec or 0, max(waits) if fail_on_timeout else 0),
            first_report_sec=max(waits),
            restart_workers=at_least("restart_workers", restart_workers, 0),
            max_skip_rate=max_skip_rate,
            max_pass_rate=1.0 if is_own_limit else max_skip_rate,
            skip_log=own_log if skip_log else None,
            cache_pool=cache_pool,
        )
        self.cache_pool, self._migrates = cache_pool, migrate
        self._ends = PassEnds(dataset, config, end)
        self._run = RankRun(dataset, config, settings, watchdog, self._ends)
        self._losses: dict[str, tuple[float, float]] = {}
        self.worker_config = config
        self.max_skip_rate = max_skip_rate
        self._exchange = Exchange(config, state_timeout_sec)
        settings_of_torch = _torch_settings(config, settings)
        counted = copy(dataset)
        counted.worker_config, counted.counts_samples = config, True
        super().__init__(counted, batch_size=None, collate_fn=OwnCollate(self), **settings_of_torch)
        # torch takes no sampler for an IterableDataset; trainers call set_epoch of what is here.
        self.__dict__["sampler"] = EpochSampler(self)

    # ------------------------------------------------------------------------------ iteration

    @property
    def num_streams(self) -> int:
        """The number of streams of the run."""
        return self._run.position.start.slots.num_streams

    @property
    def num_skipped(self) -> dict[str, int]:
        """Counts, by source, the samples skipped on the way to the batches yielded here."""
        return {name: stats.skipped for name, stats in self.stats().items() if stats.skipped}

    def stats(self) -> Stats:
        """Returns what each source yielded here, and its target in the blend.

        Counts of this rank since the run began; `stats().reduced()` is that of all ranks.
        """
        found, config = (
            self._run.counter.stats(self._run.num_run_items, self._losses.items()),
            self.worker_config,
        )
        found.num_streams, found.memory_bytes = self.num_streams, self._run.memory_bytes
        found.place = config.rank, config.world_size, config.most_workers
        found.fetched = fetched(self._run.dataset)
        return found

    def record_loss(self, losses: SourceLosses) -> None:
        """Adds mean losses to `stats()`, which has their means since the loader was made.

        Args:
            losses: what `loss_by_source(losses, batch)` returned.
        """
        for name, weight in losses.weights.items():
            total, count = self._losses.get(name, (0.0, 0.0))
            self._losses[name] = total + weight * losses[name], count + weight

    def check_worker_number_rationality(self) -> None:
        """Warns of more worker processes than cores, as torch does; of threads it does not."""
        if self.worker_config.worker_type == "process":
            super().check_worker_number_rationality()

    def __len__(self) -> int:
        """Counts the batches of this rank in this pass (an epoch, if endless).

        It is worked out before the pass, so samples that will be skipped or expanded are not
        predicted. In packs and buckets without a length index, and in groups, each sample counts as
        one. After a whole pass over finite data it is the number of batches of that pass.
        """
        self._meet_accelerate()  # transformers.Trainer asks for the length before all else
        return self._ends.num_steps(self._run.position)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # torch names its own iterator
        """Yields the rest of the pass in training; a new pass in validation."""
        self.worker_config.check_place()
        run = self._run
        return self._on_accelerator(self, run) if run.looks_ahead else run.iterate()

    def set_epoch(self, epoch: int) -> None:
        """Begins the next `iter` in an epoch, counted from 0; a run that is in it stays there.

        Over finite training data an epoch is a pass. In endless training it is `len(loader)`
        batches, and only a run that has not begun is moved; validation has no epochs.

        Args:
            epoch: as a trainer counts them.

        Raises:
            TypeError: `epoch` is not an integer.
            ValueError: `epoch` is negative.
        """
        self._run.seek.epoch = at_least("epoch", epoch, 0)

    def skip_first_batches(self, num_batches: int) -> None:
        """Begins the next `iter` after `num_batches` of its epoch; they are computed, not yielded.

        A run that is there already, as its state was restored, stays there.

        Args:
            num_batches: batches of this rank.

        Raises:
            TypeError: `num_batches` is not an integer.
            ValueError: `num_batches` is negative.
        """
        self._run.seek.batch = at_least("num_batches", num_batches, 0)

    def shutdown(self) -> None:
        """Ends the worker processes; the position stays, and the next `iter` starts others."""
        self._run.stop_workers()

    def __enter__(self) -> Self:
        """Returns the loader; its worker processes end with the `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the worker processes."""
        self.shutdown()

    __getitem__ = LazyFunction("energon_lite.extras.trainers.habits:refuse_batch_index")
    __reduce_ex__ = LazyFunction("energon_lite.extras.trainers.habits:refuse_copy")

    # Read by Accelerate; see accelerate_adapter.

    _teach_skipping = LazyFunction("energon_lite.extras.trainers.accelerate_adapter:teach_skipping")
    _on_accelerator = LazyFunction("energon_lite.extras.trainers.accelerate_adapter:on_accelerator")
    use_stateful_dataloader = True  # its checkpoints have the state
    remainder = -1  # of rows in the last step: not known; padded rows have a mask
    end_of_dataloader = False  # whether the last batch was the end of the `for`

    def _meet_accelerate(self) -> None:
        if "accelerate.data_loader" in sys.modules:
            self._teach_skipping()

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether `accelerator.prepare` may take the loader as it is; Accelerate asks."""
        self._meet_accelerate()
        self._run.looks_ahead = True
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Ignores the value: Accelerate sets it on what it has prepared."""

    # ---------------------------------------------------------------------------------- state

    def save_state_rank(self) -> dict[str, Any]:
        """Returns the state of this rank, as plain JSON; asks no worker and waits for nothing."""
        return self._run.state()

    def restore_state_rank(self, state: dict[str, Any] | None, *, migrate: bool = False) -> None:
        """Resumes where this rank stood when it saved, on the same topology; None does nothing.

        Args:
            state: of this rank.
            migrate: as in `restore_state_global`.

        Raises:
            StateError: The state does not fit.
        """
        if state is not None:
            self.restore_state_global([state], migrate=migrate)

    def save_state_global(self, global_dst_rank: int = 0) -> list[dict[str, Any]] | None:
        """Gathers the states of all ranks on one; every rank must call it.

        Args:
            global_dst_rank: the rank, in the whole `torch.distributed` world, that gets the list.

        Returns:
            The list on that rank, None on the others.

        Raises:
            StateError: Some ranks did not call it within `state_timeout_sec`.
        """
        collector, state = self._exchange.rank_of(global_dst_rank), self.save_state_rank()
        return self._exchange.gather(*self._to_gather(state, "save_state_global()"), collector)

    def _to_gather(self, state: dict[str, Any], call: str) -> tuple[dict[str, Any], str]:
        """Returns a state for those of all ranks, of which the first has the configuration."""
        if self.worker_config.rank and not self._exchange.is_alone:
            state["config"] = None
        return state, f"{call} of pipeline {state['pipeline'][:8]}"

    def restore_state_global(
        self,
        state: Sequence[dict[str, Any]] | None,
        *,
        src_rank: int | None = None,
        migrate: bool = False,
    ) -> list[str]:
        """Resumes where a run stood, from the states of all its ranks, on any topology.

        Args:
            state: the states of all ranks that saved.
            src_rank: the rank, inside the data-parallel group, that has the list; the others give
                None. By default every rank passes it.
            migrate: whether the blend may have been edited: unchanged sources resume where they
                were, new ones start at their beginning. Batches may have another size, too.

        Returns:
            What was edited, source by source; it is logged too.

        Raises:
            StateError: The states do not fit each other or this pipeline; nothing was changed. Or
                some ranks did not call it within `state_timeout_sec`.
        """
        if src_rank is not None:
            what = "restore_state_global(src_rank=...)"
            state = self._exchange.broadcast(state, what, src_rank)
        if not isinstance(state, (list, tuple)):
            raise StateError(
                f"{type(state).__name__} is no list of the states of all ranks; give the list, or "
                "src_rank of the rank that has it"
            )
        position = self._run.resumed(list(state), migrate or self._migrates)
        for edit in position.edits:
            logger.warning("Restored with a change: %s", edit)
        self._run.go_to(position)
        return position.edits

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all ranks as one that each of them can load; all must call it.

        It has one key, with the states as a text, so that `torch.distributed.checkpoint`
        and any trainer keep it whole. Without `torch.distributed` it is the state of this rank.

        Raises:
            StateError: Some ranks did not call it within `state_timeout_sec`.
        """
        own = self._to_gather(self._run.state(as_text=False), "state_dict()")
        return {STATE_KEY: text_of(self._exchange.gather_packed(*own))}

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Any], *, migrate: bool = False
    ) -> None:
        """Resumes from what `state_dict` returned, on any topology; needs no other rank.

        Args:
            state_dict: of any rank; or the state of this rank, or a list of those of all.
            migrate: as in `restore_state_global`.

        Raises:
            StateError: The state does not fit; nothing was changed.
        """
        self.restore_state_global(states_of(state_dict), migrate=migrate)

    def with_restored_state_rank(self, state: dict[str, Any] | None) -> Self:
        """Calls `restore_state_rank`, and returns the loader."""
        self.restore_state_rank(state)
        return self

    def with_restored_state_global(
        self, state: Sequence[dict[str, Any]] | None, *, src_rank: int | None = None
    ) -> Self:
        """Calls `restore_state_global`, and returns the loader."""
        self.restore_state_global(state, src_rank=src_rank)
        return self

    @deprecated("save_state is deprecated; use save_state_global", category=FutureWarning)
    def save_state(self, dst_rank: int) -> list[dict[str, Any]] | None:
        """Calls `save_state_global`, under a name of earlier versions of Energon."""
        return self.save_state_global(dst_rank)

    @deprecated("restore_state is deprecated; use restore_state_global", category=FutureWarning)
    def restore_state(self, state: Sequence[dict[str, Any]] | None) -> None:
        """Calls `restore_state_global`, under a name of earlier versions of Energon."""
        self.restore_state_global(state)

    # ---------------------------------------------------------------------------- inspection

    def config(self) -> dict[str, JSON]:
        """Returns the settings that decide the content."""
        return self._run.config[-1]

    def can_restore_sample(self) -> bool:
        """Whether every stage can be run again on one sample."""
        return self._run.dataset.can_restore_sample()

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the item again that carried `restore_key` (also as JSON), in this process."""
        key = as_key(restore_key)
        if key[:1] == (PADDING,):
            item: T = as_padding(self.restore_sample(key[1]))
            return item
        with replaying() as context, torch.device("cpu"):
            before, context.cache_pool = context.cache_pool, self.cache_pool
            try:
                return self._run.dataset.restore_sample(key)
            finally:
                context.cache_pool = before


def _torch_settings(config: WorkerConfig, settings: RunSettings) -> dict[str, Any]:
    """Returns what a torch `DataLoader` has as attributes; torch starts no workers."""
    if config.num_workers == 0:
        return {"num_workers": 0}
    return {
        "num_workers": config.most_workers,
        "prefetch_factor": settings.prefetch_factor,
        "persistent_workers": True,
        "pin_memory": torch.cuda.is_available(),
        "multiprocessing_context": config.start_method,
        "timeout": settings.limits.timeout_sec,
    }


def _worker_config_of(dataset: Any, config: WorkerConfig | None, workers: Any) -> WorkerConfig:
    if not isinstance(dataset, SavableDataset):
        raise TypeError(
            f"the loader got {dataset!r:.80}, a {type(dataset).__name__}, where it needs a "
            "dataset: pass it what get_train_dataset(path, ...) or get_val_dataset(path, ...) "
            "returns"
        )
    own = dataset.worker_config
    if config is not None and own is not None and config.seed_offset != own.seed_offset:
        raise ValueError(
            f"The loader's worker_config has seed_offset={config.seed_offset}, the dataset's has "
            f"{own.seed_offset}; pass it to the dataset only"
        )
    config = config or own or WorkerConfig.default_worker_config()
    if workers is None:
        return config
    config = copy(config)
    if hasattr(workers, "num_workers"):
        config.worker_type, config.start_method, workers = workers, None, workers.num_workers
    config.num_workers = at_least("workers", workers, 0, ", or RayWorkers(...)")
    return config


# Every loader saves and restores, so Energon's two functions and its other class are this class.
BasicDataLoader = get_loader = get_savable_loader = SavableDataLoader
