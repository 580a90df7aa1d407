"""Who computes what: streams, ranks, workers, and the arithmetic of slots.

Slot m of a run holds batch `m // S` of stream `m % S`. From slot `base` on, the n-th items of the R
ranks of a run are the slots `base + n * R` to `base + n * R + R - 1`. Everything here is integers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from math import ceil, gcd, inf
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist
from torch.utils.data import get_worker_info

from energon_lite.core.arguments import at_least, hinting
from energon_lite.core.errors import ErrorHandler, append, log_exception, reraise_exception
from energon_lite.names.energon_modules import LazyFunction

logger = logging.getLogger(__name__)

_warn_once = functools.cache(logger.warning)
_ASSUMED_PLACE = (
    "torch.distributed is not initialised: this process reads as rank %d of %d, by RANK and "
    "WORLD_SIZE of the environment. Give WorkerConfig(rank=0, world_size=1, ...) to read all."
)
_OTHER_PLACE = (
    "By its WorkerConfig the loader is rank %d of %d, but this process is rank %d of %d. Processes "
    "of one rank read the same samples: use WorkerConfig.default_worker_config(num_workers), or, "
    "where they are to do so, as in tensor parallelism, give data_parallel_group as well."
)


class _DefaultWorkers(int):
    """A number of workers that the user did not choose."""


_DEFAULT_WORKERS = _DefaultWorkers(4)

START_METHODS = ("fork", "forkserver", "spawn")
# Executors that are registered add theirs (loader/workers/executor.py).
WORKER_TYPES = ["process", "thread", "ray"]


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """One of the deterministic sequences that a run consists of.

    `pass_index` numbers the passes over finite training data, so that each has another order.
    `share` is the part of the stream's draws that a dataset inside a blend gets, and `num_beside`
    how many streams the process computes: hints on how far to read ahead, on which no content
    depends. `is_measured` is set where a stage above counts the
    tokens of samples, so that no stage below does.
    """

    index: int
    num_streams: int
    pass_index: int = 0
    share: float = 1.0
    is_measured: bool = False
    num_beside: int = 1

    def part(self, mean: float) -> int:
        """Returns its part where all streams, of about `mean` each, are rounded up together."""
        mean *= 1 - 1e-12  # what floats are off makes no item more
        return ceil((self.index + 1) * mean) - ceil(self.index * mean)


class NodeGroups(NamedTuple):
    """Groups of streams; the samples of each stay the same in all epochs.

    Attributes:
        num_groups: how many there are; with one, samples change to any stream.
        ranks: data-parallel ranks of a machine: machine m of as many as there are groups has the
            ranks from `m * ranks` on, and the streams of group m.
    """

    num_groups: int = 1
    ranks: int = 1

    def place_of(self, stream: Stream) -> int:
        """Numbers the streams so that stream n is of group `n % num_groups`.

        Raises:
            ValueError: Groups would have different numbers of streams.

        Example:
            2 groups, machines of 2 ranks: streams 0 to 7 are of the groups 0 0 1 1 0 0 1 1, and get
            the numbers 0 2 1 3 4 6 5 7.
        """
        self.check(stream.num_streams)
        block, rank = divmod(stream.index, self.ranks)
        row, group = divmod(block, self.num_groups)
        return (row * self.ranks + rank) * self.num_groups + group

    def check(self, num_streams: int) -> None:
        """Refuses a number of streams that cannot be dealt evenly; see `place_of`."""
        least = self.num_groups * self.ranks
        if self.num_groups > 1 and num_streams % least:
            raise ValueError(
                f"num_streams={num_streams} cannot be dealt evenly to node_groups="
                f"{self.num_groups} of machines with ranks_per_node={self.ranks}; set num_streams "
                f"to a multiple of {least}, as {-(-num_streams // least) * least}"
            )


NO_GROUPS = NodeGroups()
# Settings of a WorkerConfig that decide the order, besides the number of streams.
ORDER_SETTINGS = ("seed_offset", "node_groups", "ranks_per_node")
# The most streams, and the most ranks, that a run may have.
MAX_STREAMS = 1 << 24
# The most machines, and the most ranks of each.
_MAX_NODES = 1 << 20


class RankSlots(NamedTuple):
    """The slots that one rank emits; `first` of its visits since `base` are done already.

    In each step the ranks emit the next `world_size` slots, one each. If the world size divides the
    number of streams, rank r always emits the r-th of them. If it does not, other streams are due
    in each step. Then most streams belong to one rank each, which emits all of their batches. The
    others are shared: in a step in which no stream that belongs to a rank is due, the rank emits a
    batch of a shared stream. So it computes all batches of that stream.

    Example:
        With 8 streams, rank 1 of 2 runs streams 1, 3, 5 and 7. With 3 ranks, streams 0 to 5 belong
        to the ranks 0, 1, 2, 0, 1, 2. Streams 6 and 7 are shared: the slots of the steps
        0 1 2 | 3 4 5 | 6 7 8 | 9 10 11 are those of the ranks 0 1 2 | 0 1 2 | 1 2 0 | 1 2 0.
    """

    base: int
    rank: int
    world_size: int
    num_streams: int
    first: int = 0

    def slot(self, n: int) -> int:
        """Returns the slot of this rank's n-th turn from here."""
        ring = self._ring
        number, remainder = divmod(self.rank, ring.step)
        first = self.base + (self.first + n) * self.world_size + remainder
        return first + ring.step * ring.offset_of(number, first // ring.step)

    def turns(self) -> Iterator[int]:
        """Yields the slots of this rank's turns from here, without an end."""
        if self.stride == 1:
            return count(self.slot(0), self.world_size)
        return map(self.slot, count())

    def turn_of(self, slot: int) -> int:
        """Returns in which turn since `base` the ranks emit a slot."""
        return (slot - self.base) // self.world_size

    def rank_of(self, slot: int) -> int:
        """Returns which rank emits a slot."""
        ring, place = self._ring, (slot - self.base) % self.world_size
        offset, remainder = divmod(place, ring.step)
        return remainder + ring.step * ring.rank_at(offset, slot // ring.step - offset)

    def next_slot(self, stream: int, slot: int) -> int:
        """Returns the first slot from `slot` on of a stream's batches that this rank emits."""
        slots = count(slot + (stream - slot) % self.num_streams, self.num_streams)
        return next(own for own in slots if self.rank_of(own) == self.rank)

    @property
    def _ring(self) -> _Ring:
        step = gcd(self.num_streams, self.world_size)
        return _Ring(step, self.num_streams // step, self.world_size // step)

    @property
    def num_turns(self) -> int:
        """The number of turns after which the same streams are due again."""
        return self._ring.num_streams

    @property
    def stride(self) -> int:
        """The number of batches of each stream until then; 1 if no stream is shared."""
        return self._ring.num_ranks

    def count(self, num_batches: Mapping[int, int] | Sequence[int]) -> int:
        """Counts the batches that the rank emits from here, by the batches of each stream."""
        total, stride = 0, self.stride
        for slot in islice(self.turns(), self.num_turns):
            # The rank emits batch k of the stream for k = start, start + stride, ...
            start, index = divmod(slot, self.num_streams)
            total += max(0, -((start - num_batches[index]) // stride))
        return total

    def streams(self) -> list[int]:
        """Lists the streams that this rank runs, by their first slot from here, of any rank."""
        ring, here = self._ring, self.base + self.first * self.world_size
        places = ring.streams_of(self.rank // ring.step)
        found = [place * ring.step + (here + self.rank) % ring.step for place in places]
        return sorted(found, key=lambda stream: (stream - here) % self.num_streams)

    def is_shared(self, stream: int) -> bool:
        """Whether several ranks run a stream."""
        return stream // self._ring.step >= self._ring.num_owned

    @property
    def cost(self) -> float:
        """The number of batches that this rank computes for each one that it emits."""
        return len(self.streams()) * self.world_size / self.num_streams


class _Ring(NamedTuple):
    """The streams with one remainder modulo `step`, and the ranks that run them, numbered from 0.

    The streams are due in turn, `num_ranks` of them in each step; the two numbers have no common
    divisor. As many streams as can be dealt evenly are owned: stream i by rank `i % num_ranks`. The
    others are shared. In the steps in which those are due, as many ranks have no owned stream that
    is due. These ranks follow each other, and are `num_shared` ranks further down in each round.
    Rank i emits shared stream `i % num_shared`, except where these ranks are the last and the first
    ones: only the last `num_shared` ranks run a second shared stream.
    """

    step: int
    num_streams: int
    num_ranks: int

    @property
    def num_owned(self) -> int:
        """The number of owned streams; none if there are fewer streams than ranks."""
        return self.num_streams - self.num_shared

    @property
    def num_shared(self) -> int:
        """The number of shared streams."""
        return self.num_streams % self.num_ranks

    def offset_of(self, rank: int, slot: int) -> int:
        """Returns which slot, from the first `slot` of a step on, a rank emits."""
        start, num_ranks = slot % self.num_streams, self.num_ranks
        num_owned, num_shared = self.num_owned, self.num_shared
        if not num_owned:
            return rank
        offset = (rank - start) % num_ranks
        if start + offset < num_owned:
            return offset
        if (offset := self.num_streams - start + rank) < num_ranks:  # of the next round
            return offset
        shared = rank % num_shared if start < num_owned else rank - num_ranks + num_shared
        return num_owned - start + shared

    def rank_at(self, offset: int, slot: int) -> int:
        """Returns which rank emits a slot, by its offset from the first `slot` of its step."""
        start, num_ranks = slot % self.num_streams, self.num_ranks
        num_owned, num_shared = self.num_owned, self.num_shared
        stream = (start + offset) % self.num_streams
        if stream < num_owned:
            return stream % num_ranks
        if not num_owned:
            return offset
        if start >= num_owned:
            return stream - num_owned + num_ranks - num_shared
        last = start % num_ranks - 1
        return last - (last - stream + num_owned) % num_shared

    def streams_of(self, rank: int) -> list[int]:
        """Lists the streams that a rank runs."""
        num_owned, num_shared = self.num_owned, self.num_shared
        if not num_owned:
            return [*range(self.num_streams)]
        shared = {rank % num_shared} if rank < self.num_ranks - 1 else set[int]()
        if rank >= self.num_ranks - num_shared:
            shared.add(rank - self.num_ranks + num_shared)
        return [*range(rank, num_owned, self.num_ranks), *(num_owned + i for i in shared)]


class _Current(threading.local):
    context: Any = None
    worker_id: int | None = None  # of a worker thread
    # Set by `worker_activate`, where a user's code plays the loader.
    config: Any = None
    indices: tuple[int, ...] = ()
    cache_pool: Any = None


current = _Current()


def own_worker_id() -> int | None:
    """Returns which worker of the rank runs this code; None outside of one."""
    if current.worker_id is not None:
        return current.worker_id
    info = get_worker_info()
    return None if info is None else info.id


class _ActiveConfig:
    """`WorkerConfig.active_worker_config`, of the class and of instances."""

    def __get__(self, instance: object, owner: type) -> Any:
        return current.config or getattr(current.context, "worker_config", None)


# Each integer of a `WorkerConfig`, and its minimum.
_INTEGERS = {
    "rank": 0, "world_size": 1, "num_workers": 0, "seed_offset": -inf, "worker_log_level": 0,
    "num_streams": 1, "node_groups": 1, "ranks_per_node": 1, "peers": 1, "peer": 0,
}  # fmt: skip
_OPTIONAL = ("num_streams", "ranks_per_node")


@hinting
@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class WorkerConfig:
    """The place of this process in the run, and how its workers are made.

    Args:
        rank: index of this data-parallel process.
        world_size: number of data-parallel processes.
        num_workers: workers of this rank; 0 loads in the calling thread.
        data_parallel_group: the `torch.distributed` group of the data-parallel ranks.
        seed_offset: the seed of the run: another value means another order.
        worker_debug_path: file of the lines of `LogSampleDataset`; `{worker_id}` and `{pid}` in it
            are replaced.
        worker_log_level: 1 to write them for training, 2 for validation, too.
        global_error_handler: called with (exception, sample, sources) for each failed sample; the
            sample is skipped if it returns.
        restore_error_handler: the same, while samples are re-created from restore keys.
        num_streams: how many streams the run consists of; by default
            `world_size * max(1, num_workers)` when the run first starts. It stays the same over
            the whole run, on whatever ranks and workers it resumes.
        node_groups: groups of streams, of which each reads the same samples in all epochs: as many
            as there are machines with a cache of remote data, or a divisor of it. It stays the same
            over the whole run.
        ranks_per_node: data-parallel ranks of a machine, for `node_groups`; by default as torchrun
            set them, or else `world_size / node_groups`. It stays the same, too.
        start_method: of worker processes: "fork", "forkserver" or "spawn"; by default that of
            `multiprocessing`, and after `as_energon()` "fork", as in Energon.
        worker_type: "process", "thread", "ray" (actors of a cluster), the name of an executor that
            was registered, or what makes one, as `RayWorkers`. No content depends on it, and a
            resume may change it.
        peers: ranks that have this place among the data-parallel ranks, as in tensor, pipeline or
            context parallelism. The first computes each batch and sends it to the others.
        peer: which of them this one is.
        peer_group: the `torch.distributed` group of the peers, with the backend gloo.
        cache: where what is fetched from object stores stays over epochs and runs:
            `{"path": folder, "max_bytes": number}`. It counts for the whole process, from then on.
    """

    rank: int
    world_size: int
    num_workers: int
    data_parallel_group: Any = None
    seed_offset: int = 0
    worker_debug_path: str | None = None
    worker_log_level: int = 0
    global_error_handler: ErrorHandler = log_exception
    restore_error_handler: ErrorHandler = reraise_exception
    num_streams: int | None = None
    node_groups: int = 1
    ranks_per_node: int | None = None
    start_method: str | None = None
    worker_type: str | Callable[..., Any] = "process"
    peers: int = 1
    peer: int = 0
    peer_group: Any = None
    cache: Mapping[str, Any] | None = None
    # Of worker processes of configs without a `start_method`; None: that of `multiprocessing`.
    default_start_method: ClassVar[str | None] = None
    _set_cache = LazyFunction("energon_lite.storage.byte_file:set_cache")
    # Whether rank and world size were taken while torch.distributed was not initialised.
    is_assumed: bool = dataclasses.field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuses a place that cannot be."""
        for name, least in _INTEGERS.items():
            value, is_optional = getattr(self, name), name in _OPTIONAL
            if not (is_optional and value is None):
                also = ", or None" if is_optional else ""
                setattr(self, name, at_least(name, value, least, also))
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank={self.rank} does not lie in 0..world_size-1 (world_size={self.world_size})"
            )
        if self.peer >= self.peers:
            raise ValueError(f"peer={self.peer} does not lie in 0..peers-1 (peers={self.peers})")
        if self.peer_group is None and self.peers > 1:
            raise ValueError(
                f"peers={self.peers} needs peer_group: pass the gloo group of the ranks that "
                "take the same batches, or each computes all of them again. "
                "Ranks that only share streams need a larger num_streams instead, with peers=1"
            )
        num_streams, default = self.num_streams, ""
        if num_streams is None:
            num_streams = self.default_num_streams
            default = (
                f", by default of {self.world_size} ranks and {self.num_workers} workers each,"
            )
        if num_streams > MAX_STREAMS:
            raise ValueError(f"num_streams={num_streams}{default} must lie in 1..{MAX_STREAMS:,}")
        for name in ("node_groups", "ranks_per_node"):
            if (getattr(self, name) or 0) > _MAX_NODES:
                raise ValueError(f"{name}={getattr(self, name)} must lie in 1..{_MAX_NODES:,}")
        if self.num_streams is not None:
            self.nodes.check(self.num_streams)
        if self.cache is not None:
            self._set_cache(self.cache)
        for name, allowed in (("start_method", START_METHODS), ("worker_type", WORKER_TYPES)):
            value = getattr(self, name)
            is_own = callable(value) or (name, value) == ("start_method", None)
            if value not in allowed and not is_own:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
        if self.worker_type != "process" and self.start_method is not None:
            raise ValueError(
                f"start_method={self.start_method!r} is of worker processes; leave it out with "
                f"worker_type={self.worker_type!r}"
            )

    def __eq__(self, other: object) -> bool:
        """Compares rank, world size and number of workers, as Energon does."""
        if not isinstance(other, WorkerConfig):
            return NotImplemented
        place_of = attrgetter("rank", "world_size", "num_workers")
        return bool(place_of(self) == place_of(other))

    __hash__ = None  # type: ignore[assignment]

    @property
    def most_workers(self) -> int:
        """The number of workers started at most: where none was chosen, one for each core."""
        is_default = isinstance(self.num_workers, _DefaultWorkers)
        return min(self.num_workers, num_cores()) if is_default else self.num_workers

    @property
    def default_num_streams(self) -> int:
        """The number of streams of a new run; the number of cores has no part in it."""
        return self.num_streams or self.world_size * max(1, self.num_workers)

    @property
    def nodes(self) -> NodeGroups:
        """The groups of streams whose samples stay the same."""
        ranks = self.ranks_per_node
        if self.node_groups == 1:
            return NO_GROUPS
        if ranks is None and os.environ.get("WORLD_SIZE") == str(self.world_size):
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or None
        if ranks is None:
            ranks = max(1, self.world_size // self.node_groups)
        return NodeGroups(self.node_groups, ranks)

    @staticmethod
    def default_worker_config(
        num_workers: int = _DEFAULT_WORKERS, data_parallel_group: Any = None, **settings: Any
    ) -> WorkerConfig:
        """Makes the config of this process from `torch.distributed`.

        Before `init_process_group` it takes `RANK` and `WORLD_SIZE` of the environment, as
        torchrun sets them; without these it is rank 0 of 1. A process group that is initialised
        later and differs is an error when the loader is iterated.

        Args:
            num_workers: workers of this rank; by default 4, of which not more are started than the
                process has cores. The order is that of 4 on any machine.
            data_parallel_group: the `torch.distributed` group of the data-parallel ranks.
            settings: the other arguments of a `WorkerConfig`, as `num_streams`.

        Raises:
            ValueError: `RANK` and `WORLD_SIZE` of the environment are no place in a run, or a
                setting is out of range.
            TypeError: There is no such setting.
        """
        is_known, rank, world_size = _place_of_process(data_parallel_group)
        config = WorkerConfig(
            rank=rank, world_size=world_size, num_workers=num_workers,
            data_parallel_group=data_parallel_group, **settings,
        )  # fmt: skip
        config.is_assumed = not is_known
        return config

    def check_place(self) -> None:
        """Compares this place with that of the process, by `torch.distributed` or its launcher.

        A place that was passed with its group is right. One that was passed without, and differs,
        is worth a warning: all processes may have the same.

        Raises:
            RuntimeError: The place was taken before there was a process group, which differs.
        """
        if self.data_parallel_group is not None and not self.is_assumed:
            return
        try:
            is_known, rank, world_size = _place_of_process(self.data_parallel_group)
        except ValueError:  # the environment has no place
            return
        is_here = (rank, world_size) == (self.rank, self.world_size)
        if not self.is_assumed:
            if not is_here and self.world_size in (1, world_size):
                _warn_once(_OTHER_PLACE, self.rank, self.world_size, rank, world_size)
        elif not is_known and self.world_size > 1:
            _warn_once(_ASSUMED_PLACE, self.rank, self.world_size)
        elif is_known and not is_here:
            raise RuntimeError(
                f"The loader is rank {self.rank} of {self.world_size}, which it took before "
                "torch.distributed was initialised; the process group now has rank "
                f"{rank} of {world_size}. Call WorkerConfig.default_worker_config() after "
                "init_process_group (in Lightning: in train_dataloader()), or give "
                "WorkerConfig(rank=..., world_size=..., data_parallel_group=...)."
            )

    def global_rank(self) -> int:
        """Returns this process's rank in the whole `torch.distributed` world."""
        if self.data_parallel_group is None:
            return self.rank
        return int(dist.get_global_rank(self.data_parallel_group, self.rank))

    active_worker_config = _ActiveConfig()

    def rank_worker_id(self) -> int:
        """Returns the number of this worker in its rank; 0 outside of one."""
        return own_worker_id() or 0

    def global_worker_id(self, override_local_worker_id: int | None = None) -> int:
        """Returns a number of this worker in the run, for logs; no content depends on it.

        Args:
            override_local_worker_id: the worker in the rank; by default this one.
        """
        local = override_local_worker_id
        return self.rank * self.num_workers + (self.rank_worker_id() if local is None else local)

    def worker_seed(self, override_local_worker_id: int | None = None) -> int:
        """Returns Energon's seed of a worker, in 0..2^32-1; no content here depends on it.

        Args:
            override_local_worker_id: the worker in the rank; by default this one.
        """
        worker = self.global_worker_id(override_local_worker_id) if self.num_workers else self.rank
        digest = hashlib.sha1(f"{worker},{self.seed_offset}".encode()).digest()
        return int.from_bytes(digest[-4:], "big")

    @property
    def active_worker_sample_index(self) -> int:
        """The number of the sample being processed, as `TaskEncoder.current_sample_index`.

        Raises:
            RuntimeError: No sample is being processed.
        """
        self.assert_worker()
        return self._index(-1) if current.indices else int(current.context.current_sample_index())

    @property
    def active_worker_batch_index(self) -> int:
        """The number of the batch being made, as `TaskEncoder.current_batch_index`.

        Raises:
            RuntimeError: No sample is being processed.
        """
        self.assert_worker()
        return self._index(0) if current.indices else int(current.context.batch_index)

    def _index(self, place: int) -> int:
        return current.indices[place] * max(1, self.num_workers) + self.rank_worker_id()

    def assert_worker(self) -> None:
        """Checks that a sample is being processed.

        Raises:
            RuntimeError: None is.
        """
        if current.context is None and not current.indices:
            raise RuntimeError(
                "No sample is being processed: this is known only inside a hook that a loader (or "
                "a `for` over a dataset) calls, or after worker_activate(sample_index)."
            )

    def worker_activate(
        self, sample_index: int, override_global_rank: int | None = None, cache_pool: Any = None
    ) -> None:
        """Makes this the active config until `worker_deactivate`, for code that runs hooks itself.

        Args:
            sample_index: what `active_worker_sample_index` counts from.
            override_global_rank: accepted for Energon's signature; no content depends on it.
            cache_pool: what cookers get as their cache; None for a `NoCachePool`.

        Raises:
            RuntimeError: One is active.
        """
        del override_global_rank
        if current.config is not None:
            raise RuntimeError("A worker is active already; call worker_deactivate() first.")
        current.config, current.indices, current.cache_pool = self, (sample_index,), cache_pool

    def worker_deactivate(self) -> None:
        """Ends what `worker_activate` began."""
        current.config, current.indices, current.cache_pool = None, (), None

    def worker_push_sample_index(self, sample_index: int) -> None:
        """Makes another index the innermost one."""
        current.indices += (sample_index,)

    def worker_pop_sample_index(self) -> int:
        """Takes the innermost index away, and returns it."""
        *rest, last = current.indices
        current.indices = tuple(rest)
        return last

    def should_log(self, level: int) -> bool:
        """Returns whether lines of this level are wanted."""
        return self.worker_log_level >= level

    def worker_log(self, data: dict[str, Any]) -> None:
        """Writes a line of JSON to the end of `worker_debug_path`; without one, to the logger."""
        line = json.dumps(data, default=str)
        if self.worker_debug_path is None:
            logger.info("%s", line)
            return
        append(self.debug_path(), line + "\n")

    def debug_path(self) -> Path:
        """Returns the file of this worker; the ids of rank r start at `r * (num_workers + 1)`."""
        own = own_worker_id()
        worker_id = self.rank * (self.num_workers + 1) + (0 if own is None else 1 + own)
        path = str(self.worker_debug_path).format(worker_id=worker_id, pid=os.getpid())
        return Path(path).expanduser()

    def config(self) -> dict[str, Any]:
        """Returns rank, world size, number of workers, and the group as text."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "num_workers": self.num_workers,
            "data_parallel_group": self.data_parallel_group and str(self.data_parallel_group),
        }


def num_cores() -> int:
    """Returns how many cores this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def _place_of_process(group: Any) -> tuple[bool, int, int]:
    """Returns whether `torch.distributed` knows this process; its rank, and the world size."""
    if dist.is_available() and dist.is_initialized():
        return True, dist.get_rank(group), dist.get_world_size(group)
    return False, *_place_in_environment()


def _place_in_environment() -> tuple[int, int]:
    """Returns rank and world size as a launcher set them; 0 of 1 without one."""
    names = ("RANK", "WORLD_SIZE")
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    if not found:
        return 0, 1
    try:
        rank, world_size = (int(found[name]) for name in names)
    except (KeyError, ValueError):
        rank = world_size = 0
    if not 0 <= rank < world_size:
        raise ValueError(
            f"The environment has {found} where torch.distributed is not initialised; torchrun "
            "sets RANK and WORLD_SIZE to integers, RANK below WORLD_SIZE. Initialise "
            "torch.distributed first (in Lightning: make the loader in train_dataloader()), or "
            "give WorkerConfig(rank=..., world_size=...)."
        )
    return rank, world_size


def count_rank_items(dataset: Any, config: WorkerConfig | None, pass_index: int = 0) -> int:
    """Counts the items of a rank in a pass; of endless data in an epoch, equally on all ranks."""
    config = config or WorkerConfig(rank=0, world_size=1, num_workers=0)
    if dataset.pass_length is not None and dataset.training:
        return int(dataset.pass_length)
    slots = RankSlots(0, config.rank, config.world_size, config.default_num_streams)
    items = {
        index: dataset.num_items(Stream(index, slots.num_streams, pass_index))
        for index in (range(slots.num_streams) if dataset.endless else slots.streams())
    }
    # Where epoch follows epoch, trainers that count them by this must stop at one step.
    total = -(-sum(items.values()) // slots.world_size) if dataset.endless else slots.count(items)
    return total if dataset.pass_length is None else min(total, int(dataset.pass_length))
