"""Votes and values that ranks exchange through the store of `torch.distributed`.

One server answers all ranks: some 60,000 requests and 500 MiB in a second, and values of up to
8 MiB. A larger value ends the connection of its process. So values are stored in pieces, and ranks
that wait ask the less often the more they are.
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from energon_lite.core.errors import StateError
from energon_lite.core.state import config_differences, digest
from energon_lite.core.topology import WorkerConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Bits of a counter for each of its sums: more than a million ranks.
_BITS = 21
_MASK = (1 << _BITS) - 1
# Votes that stay in the store. Processes that stand for one rank, such as pipeline stages, may be
# as many steps behind each other.
_NUM_KEPT = 1000
# How long ranks wait for one another, by default.
TIMEOUT_SEC = 300.0
# After so long a wait it is logged which ranks are missing, and after twice as long again.
QUIET_SEC = 10.0
# How long the process of the store waits for the others to read what is in it.
_LEAVE_SEC = 30.0
# Between two questions of a rank that waits; and the same for each rank, so that all of them ask at
# most 50,000 times in the first second, and 5,000 times in each second of a longer wait.
_SHORTEST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.0002, 0.05
_SHORTEST_OF_RANK_SEC, _LONGEST_OF_RANK_SEC = 0.00002, 0.0002
# Bytes of a piece of a value, and of the values of all ranks in a round.
_PIECE_BYTES = 4 << 20
MAX_STATES_BYTES = 1 << 30
# Ranks that ask for those that are missing, and log them.
_MAX_LOGGING = 8
# Keys that a store is asked for at once, and missing ranks that a message names.
_MAX_KEYS, _MAX_NAMED = 100, 20
_NOTHING = "nothing"
# Differences of settings that a message lists.
_MAX_SHOWN = 3
# How many passes were begun in this process, by pipeline; all ranks begin them in the same order.
_num_passes: Counter[str] = Counter()


class Vote(NamedTuple):
    """The vote of a rank on a step, or the sum of all votes.

    Attributes:
        has: it has a batch for this step.
        is_left: it has a batch for this step or a later one.
        can_pad: its batch can carry a mask; so can no batch.
    """

    has: int
    is_left: int
    can_pad: int


def _comes(
    find: Callable[[], T],
    limit_sec: float,
    num_ranks: int,
    warn: Callable[[float], None] = lambda _: None,
    quiet_sec: float = math.inf,
) -> T | None:
    """Waits until something is in the store; returns it, or None if it did not come in time.

    It asks again and again: `store.wait` would keep the store from other threads of this process.

    Args:
        find: asks the store; returns something false while it is not there.
        limit_sec: the longest wait.
        num_ranks: how many processes wait.
        warn: called with the seconds waited after `quiet_sec`, after twice as long, and so on.
        quiet_sec: how long nothing is said.
    """
    since, pause = time.monotonic(), max(_SHORTEST_PAUSE_SEC, _SHORTEST_OF_RANK_SEC * num_ranks)
    longest = max(_LONGEST_PAUSE_SEC, _LONGEST_OF_RANK_SEC * num_ranks)
    while not (found := find()):
        waited = time.monotonic() - since
        if waited >= limit_sec:
            return None
        if waited > quiet_sec:
            warn(waited)
            quiet_sec *= 2
        time.sleep(min(pause, limit_sec - waited))
        pause = min(1.5 * pause, longest)
    return found


def _absent(store: Any, keys: Sequence[str], most: int = _MAX_NAMED) -> list[str]:
    """Returns the keys that a store lacks, the first of them if they are more than `most`."""
    parts = (keys[start : start + _MAX_KEYS] for start in range(0, len(keys), _MAX_KEYS))
    lacking = (part for part in parts if not store.check(part))
    return [*islice((key for part in lacking for key in part if not store.check([key])), most)]


def _ranks_of(keys: Sequence[str]) -> str:
    """Returns the ranks in the names of keys, for messages; not all, if they are many."""
    more = ", ..." * (len(keys) == _MAX_NAMED)
    return f"[{', '.join(key.split('/')[-1] for key in keys)}{more}]"


def _look(store: Any, key: str) -> bytes:
    """Returns what is stored; nothing if it is not there, where `store.get` would wait for it."""
    found: bytes = store.compare_set(key, _NOTHING, _NOTHING)
    return b"" if found == _NOTHING.encode() else found


def _put(store: Any, key: str, value: bytes) -> None:
    """Stores a value in pieces, after its size in 8 bytes; once the first is there, all are."""
    value = len(value).to_bytes(8, "big") + value
    for start in (*range(_PIECE_BYTES, len(value), _PIECE_BYTES), 0):
        store.set(f"{start}/{key}", value[start : start + _PIECE_BYTES])


def _read(store: Any, key: str) -> bytes:
    """Returns a value that was put; nothing if some of it is not there."""
    pieces = [_look(store, f"0/{key}")]
    while pieces[-1] and len(pieces) * _PIECE_BYTES < 8 + int.from_bytes(pieces[0][:8], "big"):
        pieces.append(_look(store, f"{len(pieces) * _PIECE_BYTES}/{key}"))
    return b"".join(pieces)[8:] if pieces[-1] else b""


def _delete(store: Any, key: str) -> None:
    """Deletes a value, also one that was put in part."""
    start = _PIECE_BYTES
    while store.check([f"{start}/{key}"]):
        store.delete_key(f"{start}/{key}")
        start += _PIECE_BYTES
    store.delete_key(f"0/{key}")


def _zipped(values: list[Any]) -> bytes:
    return zlib.compress(json.dumps(values).encode(), 6)


class StoreVotes:
    """Votes of ranks that share a store.

    Each adds itself to a counter, after it added what its vote lacks to another one; the last one
    writes the sum, for which the others wait.

    Args:
        store: of the process group.
        name: of the pipeline, the same on all ranks.
        config: rank and world size.
        num_processes: of all ranks. Several may stand for one rank, as in tensor parallelism: then
            the first of them votes.
    """

    def __init__(self, store: Any, name: str, config: WorkerConfig, num_processes: int) -> None:
        self._store = dist.distributed_c10d.PrefixStore("energon_lite/votes", store)
        self._settings = _settings_in(store)
        self._name = name
        self._rank, self._world_size = config.rank, config.world_size
        self._num_processes = num_processes
        self._limit_sec = store.timeout.total_seconds()
        # The keys that this process made, by vote.
        self._kept: deque[list[str]] = deque([[]])

    def begin_pass(self) -> None:
        """Begins to count votes from 0, under another name."""
        self._pass_name = f"{self._name}/{_num_passes[self._name]}"
        _num_passes[self._name] += 1
        self._number = 0
        self._own: int | None = None

    def cast(self, vote: Vote, step: int) -> Vote:
        """Returns the sum of the votes of all ranks on a step.

        Raises:
            RuntimeError: A rank did not vote in the time that the process group allows.
        """
        del step  # ranks vote equally often, so the number of the vote is enough
        name = f"{self._pass_name}/{self._number}"
        sums, lacking, known = (f"{name}/{key}" for key in ("sum", "lacking", "all"))
        if self._own is None:  # else a wait was interrupted
            self._own = 0
            if self._is_first_peer(name):
                lacks = sum((1 - value) << _BITS * i for i, value in enumerate(vote))
                if lacks:
                    self._store.add(lacking, lacks)
                self._own = self._store.add(sums, 1)
        if self._own == self._world_size:
            self._kept[-1] += sums, lacking, known
            total = self._store.add(lacking, 0)
            self._store.set(known, str(total))
        else:
            total = int(self._wait_for(name))
        while len(self._kept) > _NUM_KEPT:  # votes that all ranks saw long ago
            for key in self._kept.popleft():
                self._store.delete_key(key)
        self._kept.append([])
        self._number += 1
        self._own = None
        return Vote(*(self._world_size - (total >> _BITS * i & _MASK) for i in range(3)))

    def end_pass(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Returns the sums of two counts over all ranks, at the end of a pass.

        Raises:
            RuntimeError: As of `cast`.
        """
        name = f"{self._pass_name}/end"
        is_first = self._is_first_peer(name)
        keys = f"{name}/first", f"{name}/second"
        for key, count in zip(keys, counts, strict=True):
            self._store.add(key, count * is_first)
        self.cast(Vote(0, 0, 0), -1)  # now all have added theirs
        first, second = (self._store.add(key, 0) for key in keys)
        left = f"{name}/left"
        if self._store.add(left, 1) == 1:
            self._kept[-1] += *keys, left
        if dist.is_initialized() and dist.get_rank() == 0:
            # It mostly has the store, and may end now: so it waits for the others.
            num_ranks = self._world_size
            _comes(lambda: self._store.add(left, 0) >= num_ranks, QUIET_SEC, self._num_processes)
        return first, second

    def _is_first_peer(self, name: str) -> bool:
        if self._num_processes == self._world_size:
            return True
        self._kept[-1].append(f"{name}/{self._rank}")
        return bool(self._store.add(self._kept[-1][-1], 1) == 1)

    def _wait_for(self, name: str) -> bytes:
        own = f"{name}/waits/{self._rank}"

        def message(waited_sec: float) -> str:
            others = (rank for rank in range(self._world_size) if rank != self._rank)
            missing = _ranks_of(_absent(self._store, [f"{name}/waits/{r}" for r in others]))
            return (
                f"Rank {self._rank} of {self._world_size} has waited {waited_sec:.0f} s, at step "
                f"{self._number} of its pass, for ranks {missing} to ask for their batch."
            )

        def warn(waited_sec: float) -> None:
            _check_difference(self._settings)
            if own not in self._kept[-1]:
                self._kept[-1].append(own)
                self._store.set(own, "")  # so that others do not miss it
            elif self._rank % (1 + self._world_size // _MAX_LOGGING) == 0:
                logger.warning("%s The limit is %.0f s.", message(waited_sec), self._limit_sec)

        found = _comes(
            lambda: _look(self._store, f"{name}/all"),
            self._limit_sec, self._num_processes, warn, min(QUIET_SEC, self._limit_sec / 4),
        )  # fmt: skip
        if not found:
            _check_difference(self._settings)
            raise RuntimeError(
                f"{message(self._limit_sec)} That is the timeout of the process group. Iterate on "
                "all ranks, and break on all of them at the same step; or make the loader with "
                'end="uneven", with which ranks do not wait for each other.'
            )
        return found


def group_store(config: WorkerConfig) -> tuple[Any, int] | None:
    """Returns the store of the data-parallel ranks, and how many processes share it.

    None where the ranks cannot talk: `torch.distributed` is not initialized, or does not have them
    all.
    """
    group = config.data_parallel_group
    if not (dist.is_available() and dist.is_initialized()):
        return None
    size = dist.get_world_size(group)
    if size < config.world_size or (group is not None and size > config.world_size):
        return None
    whole: Any = dist.group.WORLD
    store = dist.distributed_c10d._get_process_group_store(whole if group is None else group)
    return store, size


def compare_settings(config: WorkerConfig, kind: str, settings: Mapping[str, Any]) -> None:
    """Compares the settings of a loader with those of the rank that was the first to begin it.

    It does not wait for ranks that have not begun. Ranks that have, and wait for this one later,
    get its error then.

    Args:
        config: rank, world size and process group.
        kind: loaders of one kind are begun in the same order on all ranks.
        settings: as JSON.

    Raises:
        RuntimeError: They differ; names the settings.
    """
    shared = group_store(config)
    if config.world_size == 1 or shared is None or shared[1] != config.world_size:
        return  # the processes of the store may have loaders of their own
    whole, rank, own = _settings_in(shared[0]), config.rank, digest(settings)
    store = dist.distributed_c10d.PrefixStore(kind, whole)
    number = store.add(f"{rank}/number", 1)
    store.set(f"{own}/{rank}", str(number))
    mark = store.compare_set(f"{number}/first", "", json.dumps([rank, own]))
    first_rank, first = json.loads(mark)
    if first_rank == rank:
        _put(store, f"{number}/settings", _zipped([settings]))
    elif first != own:
        # It may have looked at a batch of another loader alone, and begin this one now. If not, the
        # error is there when a rank that waits looks for missing ranks, after QUIET_SEC.
        of_first = f"{own}/{first_rank}"
        ahead = _comes(
            lambda: max(0, int(_look(store, of_first) or 0) - number),
            0.8 * QUIET_SEC, config.world_size,
        )  # fmt: skip
        if not ahead:
            (theirs,) = json.loads(zlib.decompress(_read(store, f"{number}/settings")))
            whole.set("difference", _settings_error(first_rank, theirs, rank, settings))
            _check_difference(whole)
        store.add(f"{rank}/number", ahead or 0)
    if number > 1:
        whole.delete_key("difference")  # this rank had other settings, and begins again


def _settings_in(store: Any) -> Any:
    return dist.distributed_c10d.PrefixStore("energon_lite/settings", store)


def _check_difference(settings: Any) -> None:
    """Raises the error of a rank that has found other settings than its own."""
    if text := _look(settings, "difference"):
        raise RuntimeError(text.decode())


def _settings_error(first_rank: int, theirs: Any, rank: int, own: Any) -> str:
    """Describes how the settings of two ranks differ."""
    lines = "; ".join(config_differences(theirs, own)[:_MAX_SHOWN])
    lines = lines.replace("Checkpoint has", f"rank {first_rank} has")
    shown = lines.replace("this pipeline has", f"rank {rank} has")
    return (
        f"The ranks have different settings: {shown:.400}. Give all ranks of a run the same "
        "settings and data (num_streams is by default world_size * num_workers)"
    )


class Exchange:
    """Exchanges plain JSON between the ranks of a run; every rank must call the same.

    Without `torch.distributed`, or in a run of one rank, it returns the value of this rank.

    Args:
        config: rank, world size and process group.
        timeout_sec: longest wait for the other ranks.
    """

    def __init__(self, config: WorkerConfig, timeout_sec: float) -> None:
        self._config = config
        self._timeout_sec = timeout_sec

    def gather(self, value: Any, what: str, collector: int | None = None) -> list[Any] | None:
        """Returns the values of all ranks on the rank `collector`, None on the others.

        Args:
            value: of this rank.
            what: the call, for errors.
            collector: a rank inside the group; None for all ranks.

        Raises:
            StateError: Some ranks did not call it in time, or called something else.
        """
        packed = self.gather_packed(value, what, collector)
        found: list[Any] | None = json.loads(zlib.decompress(packed)) if packed else None
        return found

    def gather_packed(self, value: Any, what: str, collector: int | None = None) -> bytes:
        """Returns the list that `gather` returns as JSON, compressed by zlib; nothing for None."""
        if self.is_alone:
            return _zipped([value])
        return self._round(value, what, collector or 0, is_shared=collector is None)

    def broadcast(self, value: Any, what: str, src_rank: int) -> Any:
        """Returns the value of the rank `src_rank` of the group on all ranks; see `gather`."""
        if not 0 <= src_rank < self._config.world_size:
            raise ValueError(f"src_rank={src_rank} is none of {self._config.world_size} ranks")
        if self.is_alone:
            return value
        own = value if self._config.rank == src_rank else None
        packed = self._round(own, what, src_rank, is_shared=True)
        return json.loads(zlib.decompress(packed))[src_rank]

    def rank_of(self, global_rank: int) -> int:
        """Returns the rank inside the group of a rank of the whole world.

        Raises:
            ValueError: It is not in the group.
        """
        ranks = [global_rank] if self.is_alone else self._global_ranks()
        if global_rank not in ranks:
            raise ValueError(
                f"rank {global_rank} is not in the data-parallel group of this rank, which has the "
                f"ranks {ranks} of the whole world; give one of these"
            )
        return ranks.index(global_rank)

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks, or none that it can talk to."""
        self._config.check_place()
        is_running = dist.is_available() and dist.is_initialized()
        return self._config.world_size == 1 or not is_running

    def _global_ranks(self) -> list[int]:
        """Lists the ranks of the group, as they are in the whole world."""
        config = self._config
        group: Any = config.data_parallel_group or dist.group.WORLD
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) != config.world_size or ranks[config.rank] != dist.get_rank():
            raise StateError(
                f"The loader is rank {config.rank} of {config.world_size}, and this process is "
                f"rank {dist.get_rank()} in a group of ranks {ranks}; so it is not known which "
                "processes are the other ranks. Give WorkerConfig(data_parallel_group=...), or "
                "save each rank's own state with save_state_rank()."
            )
        return ranks

    def _round(self, value: Any, what: str, collector: int, *, is_shared: bool) -> bytes:
        ranks, rank, values = self._global_ranks(), self._config.rank, b""
        shared = group_store(self._config)
        assert shared is not None  # all ranks are there
        this = _Round(shared[0], what, rank, len(ranks), collector)
        quiet_sec = QUIET_SEC if rank % (1 + len(ranks) // _MAX_LOGGING) == 0 else math.inf
        end = time.monotonic() + self._timeout_sec
        try:
            this.post(value)
            while not this.is_decided():
                is_ready = _comes(
                    lambda: this.is_decided() or (rank == collector and not this.missing(1)),
                    end - time.monotonic(), len(ranks), this.warn, quiet_sec,
                )  # fmt: skip
                if not is_ready:
                    this.fail(self._timeout_sec)
                elif not this.is_decided():
                    values = this.collect(is_shared)
            found = this.result()
        finally:  # also where the wait is interrupted: a late round must not find an old value
            this.take_back()
            if ranks[rank] == 0 and this.is_decided():
                # It mostly has the store, and may end now: so it waits for the others.
                this.wait_for(range(len(ranks)), self._timeout_sec)
        if rank == collector:
            this.forget_earlier()
        return values if rank == collector else found


class _Round:
    """One round of a group of ranks in the store, the first that has no outcome yet."""

    def __init__(self, store: Any, what: str, rank: int, num_ranks: int, collector: int) -> None:
        self._store: Any = dist.distributed_c10d.PrefixStore("energon_lite/rounds", store)
        self._settings = _settings_in(store)
        self._what, self._rank, self._num_ranks = what, rank, num_ranks
        self._collector = collector
        self._number = self._last_good = self._store.add("last good", 0)
        while self.is_decided():
            self._number += 1
        self._post = f"{self._number}/{rank}"

    def is_decided(self) -> bool:
        return bool(self._store.check([f"{self._number}/outcome"]))

    def missing(self, most: int = _MAX_NAMED) -> list[str]:
        return _absent(
            self._store, [f"0/{self._number}/{rank}" for rank in range(self._num_ranks)], most
        )

    def wait_for(self, ranks: range, limit_sec: float) -> None:
        """Waits until ranks have taken back their values, which they do last; not for long."""
        posts = [f"0/{self._number}/{rank}" for rank in ranks]
        limit_sec = min(limit_sec, _LEAVE_SEC)
        _comes(lambda: not any(self._store.check([p]) for p in posts), limit_sec, self._num_ranks)

    def post(self, value: Any) -> None:
        """Posts the value of this rank; what is no JSON, or too large, fails the round for all."""
        try:
            text = json.dumps([self._what, value, ""])
            if self._store.add(f"{self._number}/size", len(text)) > MAX_STATES_BYTES:
                raise ValueError(
                    f"its {len(text):,} bytes and those of other ranks are more than "
                    f"{MAX_STATES_BYTES:,}; save each rank's own state with save_state_rank()"
                )
        except (TypeError, ValueError) as error:
            text = json.dumps([self._what, 0, f"rank {self._rank} cannot post its value: {error}"])
        _put(self._store, self._post, zlib.compress(text.encode(), 1))

    def take_back(self) -> None:
        _delete(self._store, self._post)

    def warn(self, waited_sec: float) -> None:
        _check_difference(self._settings)
        missing = self.missing()
        what = (
            f"ranks {_ranks_of(missing)} to call it, too" if missing else "the values of all ranks"
        )
        logger.warning(
            "Rank %d has waited %.0f s in %s for %s.", self._rank, waited_sec, self._what, what
        )

    def collect(self, is_shared: bool) -> bytes:
        """Reads what all ranks posted, and tries to decide that the round has succeeded.

        A rank that is interrupted meanwhile takes its value back; then nothing is decided.
        """
        packed = [_read(self._store, f"{self._number}/{rank}") for rank in range(self._num_ranks)]
        posted = [json.loads(zlib.decompress(text)) for text in packed if text]
        if len(posted) < self._num_ranks:
            return b""
        values = _zipped([value for _, value, _ in posted])
        error = next((error for *_, error in posted if error), "")
        calls = {what: rank for rank, (what, *_) in enumerate(posted)}
        if len(calls) > 1:
            each = ", ".join(f"rank {rank} {what}" for what, rank in calls.items())
            error = (
                f"the ranks called different things at once, such as {each}. Call it on all ranks "
                "at the same step, with the same settings and data"
            )
        if is_shared and not error:
            _put(self._store, f"{self._number}/all", values)
        self._decide(error, is_shared)
        return values

    def fail(self, timeout_sec: float) -> None:
        """Tries to decide that the round has failed, as some ranks did not come."""
        missing = self.missing()
        text = (
            f"ranks {_ranks_of(missing)} did not call {self._what} within {timeout_sec:g} s of the "
            "others (state_timeout_sec). Call it on all data-parallel ranks, or save each rank's "
            "own state with save_state_rank(), which waits for no rank"
            if missing
            else f"the ranks waited {timeout_sec:g} s (state_timeout_sec) for one another in "
            f"{self._what}, with different arguments, or one of them is slow"
        )
        self._decide(text)

    def _decide(self, error: str, is_shared: bool = False) -> None:
        """Sets the outcome, unless another rank has set one: an error, or what is shared."""
        outcome = json.dumps([error[:5000], is_shared])
        self._store.compare_set(f"{self._number}/outcome", "", outcome)

    def result(self) -> bytes:
        """Returns the values, if they are shared; nothing on the rank that collected them.

        Raises:
            StateError: The round has failed.
        """
        error, is_shared = json.loads(self._store.get(f"{self._number}/outcome"))
        if error:
            raise StateError(error)
        if not is_shared or self._rank == self._collector:
            return b""
        return _read(self._store, f"{self._number}/all")

    def forget_earlier(self) -> None:
        """Deletes outcomes that no rank can ask for: all have left the rounds before this one."""
        for number in range(self._last_good, self._number):
            _delete(self._store, f"{number}/all")
            self._store.delete_key(f"{number}/size")
        number = self._last_good - 1
        while self._store.check([f"{number}/outcome"]):
            self._store.delete_key(f"{number}/outcome")
            number -= 1
        self._store.set("last good", str(self._number))
