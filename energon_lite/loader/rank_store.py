"""What the ranks exchange through the store of `torch.distributed`: votes and values."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from energon_lite.core.errors import StateError
from energon_lite.core.topology import WorkerConfig

logger = logging.getLogger(__name__)

# Bits of a counter for each of its sums.
_BITS = 15
_MASK = (1 << _BITS) - 1
# Votes that stay in the store. Processes that stand for one rank, such as pipeline stages, may be
# as many steps behind each other.
_NUM_KEPT = 1000
_FIRST_WARNING_SEC = 60.0
_SHORTEST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.0002, 0.05
_LONGEST_LEAVE_SEC = 10.0
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


def _waits(pause: float) -> Iterator[float]:
    """Yields the seconds waited so far, after longer and longer pauses from the second on."""
    since = time.monotonic()
    while True:
        yield time.monotonic() - since
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_SEC)


class CountedVotes:
    """Votes of ranks that cannot talk: known from the steps for which each has a batch.

    Args:
        steps: of each rank, in ascending order.
        can_pad: whether all batches can carry a mask.
    """

    def __init__(self, steps: Sequence[Sequence[int]], can_pad: bool) -> None:
        self._last = [max(own, default=-1) for own in steps]
        self._num_with = Counter(step for own in steps for step in own)
        self._can_pad = can_pad

    def cast(self, vote: Vote, step: int) -> Vote:
        """Returns the sum of the votes of all ranks on a step."""
        del vote
        is_left = sum(last >= step for last in self._last)
        return Vote(self._num_with[step], is_left, len(self._last) * self._can_pad)


class StoreVotes:
    """Votes of ranks that share a store.

    Each adds its vote to a counter; the last one writes the sum, for which the others wait.

    Args:
        store: of the process group.
        name: of the pipeline, the same on all ranks.
        config: rank and world size.
        has_peers: whether several processes may stand for one rank, as in tensor parallelism: then
            the first of them votes.
    """

    def __init__(self, store: Any, name: str, config: WorkerConfig, has_peers: bool) -> None:
        self._store = dist.distributed_c10d.PrefixStore("energon_lite/votes", store)
        self._name = name
        self._rank, self._world_size = config.rank, config.world_size
        self._has_peers = has_peers
        self._limit_sec = store.timeout.total_seconds()
        self._kept: deque[list[str]] = deque()
        self._total = 0

    def begin_pass(self) -> None:
        """Begins to count votes from 0, under another name."""
        self._pass_name = f"{self._name}/{_num_passes[self._name]}"
        _num_passes[self._name] += 1
        self._number = 0
        self._is_cast = self._is_last = False

    def cast(self, vote: Vote, step: int) -> Vote:
        """Returns the sum of the votes of all ranks on a step.

        Raises:
            RuntimeError: A rank did not vote in the time that the process group allows.
        """
        del step  # ranks vote equally often, so the number of the vote is enough
        name = f"{self._pass_name}/{self._number}"
        if not self._is_cast:  # else a wait was interrupted
            self._add(name, vote)
        if not self._is_last:
            self._wait_for(name)
            self._total = int(self._store.get(f"{name}/all"))
        self._kept.append(self._keys(name, "sum", "all"))
        self._forget_old()
        self._number += 1
        self._is_cast = self._is_last = False
        return Vote(*(self._total >> _BITS * i & _MASK for i in (1, 2, 3)))

    def end_pass(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Returns the sums of two counts over all ranks, at the end of a pass.

        Raises:
            RuntimeError: As of `cast`.
        """
        name = f"{self._pass_name}/end"
        if self._is_first_peer(name):
            self._store.add(f"{name}/first", counts[0])
            self._store.add(f"{name}/second", counts[1])
        self.cast(Vote(0, 0, 0), -1)  # now all have added theirs
        sums = self._store.add(f"{name}/first", 0), self._store.add(f"{name}/second", 0)
        self._kept.append(self._keys(name, "first", "second", "left"))
        self._leave(f"{name}/left")
        return sums

    def _leave(self, key: str) -> None:
        """Lets the process that mostly has the store wait for the others, as it may end now."""
        self._store.add(key, 1)
        end = time.monotonic() + _LONGEST_LEAVE_SEC
        if dist.is_initialized() and dist.get_rank() == 0:
            while self._store.add(key, 0) < self._world_size and time.monotonic() < end:
                time.sleep(_SHORTEST_PAUSE_SEC)

    def _is_first_peer(self, name: str) -> bool:
        return not self._has_peers or self._store.add(f"{name}/{self._rank}", 1) == 1

    def _keys(self, name: str, *keys: str) -> list[str]:
        peers = map(str, range(self._world_size)) if self._has_peers else ()
        return [f"{name}/{key}" for key in (*keys, *peers)]

    def _add(self, name: str, vote: Vote) -> None:
        self._is_cast = True
        if not self._is_first_peer(name):
            return
        packed = 1 + sum(value << _BITS * i for i, value in enumerate(vote, start=1))
        self._total = self._store.add(f"{name}/sum", packed)
        if self._total & _MASK == self._world_size:
            self._store.set(f"{name}/all", str(self._total))
            self._is_last = True

    def _forget_old(self) -> None:
        """Removes votes that all ranks saw long ago."""
        while len(self._kept) > _NUM_KEPT:
            keys = self._kept.popleft()
            for key in keys if self._is_last else ():
                self._store.delete_key(key)

    def _wait_for(self, name: str) -> None:
        warn_at = _FIRST_WARNING_SEC
        for waited in _waits(_SHORTEST_PAUSE_SEC):
            # Not `store.wait`: it would keep the store from the other threads of this process.
            if self._store.check([f"{name}/all"]):
                return
            if waited > min(_FIRST_WARNING_SEC, self._limit_sec) / 4:
                self._store.set(f"{name}/waits/{self._rank}", "")
            if waited > self._limit_sec:
                raise RuntimeError(
                    f"{self._message(name, waited)} That is the timeout of the process group. "
                    "Iterate on all ranks, and break on all of them at the same step; or make "
                    'the loader with end="uneven", with which ranks do not wait for each other.'
                )
            if waited > warn_at:
                logger.warning(
                    "%s The limit is %.0f s.", self._message(name, waited), self._limit_sec
                )
                warn_at *= 2

    def _message(self, name: str, waited_sec: float) -> str:
        missing = [
            rank
            for rank in range(self._world_size)
            if rank != self._rank and not self._store.check([f"{name}/waits/{rank}"])
        ]
        return (
            f"Rank {self._rank} of {self._world_size} has waited {waited_sec:.0f} s, at step "
            f"{self._number} of its pass, for ranks {missing} to ask for their batch."
        )


def group_store(config: WorkerConfig) -> tuple[Any, bool] | None:
    """Returns the store of the data-parallel ranks, and whether a rank may have peers in it.

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
    return store, size > config.world_size


# How long ranks wait for one another, by default.
TIMEOUT_SEC = 300.0
# After so long a wait it is logged which ranks are missing.
QUIET_SEC = 10.0


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
        if self._is_alone:
            return [value]
        values = self._round(value, what, collector or 0, is_shared=collector is None)
        return values if collector in (None, self._config.rank) else None

    def broadcast(self, value: Any, what: str, src_rank: int) -> Any:
        """Returns the value of the rank `src_rank` of the group on all ranks; see `gather`."""
        if not 0 <= src_rank < self._config.world_size:
            raise ValueError(f"src_rank={src_rank} is none of {self._config.world_size} ranks")
        if self._is_alone:
            return value
        own = value if self._config.rank == src_rank else None
        return self._round(own, what, src_rank, is_shared=True)[src_rank]

    def rank_of(self, global_rank: int) -> int:
        """Returns the rank inside the group of a rank of the whole world.

        Raises:
            ValueError: It is not in the group.
        """
        if self._is_alone:
            return 0
        ranks = self._global_ranks()
        if global_rank not in ranks:
            raise ValueError(
                f"rank {global_rank} is not in the data-parallel group of this rank, which has the "
                f"ranks {ranks} of the whole world; give one of these"
            )
        return ranks.index(global_rank)

    @property
    def _is_alone(self) -> bool:
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

    def _round(self, value: Any, what: str, collector: int, *, is_shared: bool) -> list[Any]:
        ranks = self._global_ranks()
        name = hashlib.sha256(json.dumps(ranks).encode()).hexdigest()[:16]
        store = dist.distributed_c10d.PrefixStore(f"energon_lite/{name}", _default_store())
        rank = self._config.rank
        this = _Round(store, what, rank, len(ranks))
        this.post(value)
        try:
            values = self._wait(this, is_shared) if rank == collector else self._wait(this)
            shared = this.result()
        finally:  # also where the wait is interrupted: a late round must not find an old value
            this.take_back()
            if ranks[rank] == 0:  # mostly the process that has the store, and may end now
                this.wait_for_leaving(min(self._timeout_sec, QUIET_SEC))
        if rank == collector:
            this.forget_earlier()
        return values if rank == collector else shared

    def _wait(self, this: _Round, is_shared: bool | None = None) -> list[Any]:
        """Waits until a round is decided; returns all values if it is this rank that collects them.

        Args:
            this: the round.
            is_shared: on the collector, whether all ranks get the values; None on the others.
        """
        is_quiet = True
        for waited in _waits(0.001):
            if this.is_decided:
                break
            if is_shared is not None and this.is_complete:
                return this.collect(is_shared)
            if waited > self._timeout_sec:
                this.fail(self._timeout_sec)
            elif is_quiet and waited > QUIET_SEC:
                is_quiet = False
                logger.warning(
                    "Rank %d waits in %s for ranks %s to call it, too; it times out after %g s.",
                    this.rank, this.what, this.missing(), self._timeout_sec,
                )  # fmt: skip
        return []


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


class _Round:
    """One round of a group of ranks in the store, the first that has no outcome yet."""

    def __init__(self, store: Any, what: str, rank: int, num_ranks: int) -> None:
        self._store = store
        self.what, self.rank = what, rank
        self._oldest, self._last = 0, 0
        if store.check(["rounds"]):
            self._oldest, self._last = map(int, store.get("rounds").split())
        self._number = self._last
        while store.check([f"{self._number}/outcome"]):
            self._number += 1
        self._outcome = f"{self._number}/outcome"
        self._posts = [f"{self._number}/{rank}" for rank in range(num_ranks)]

    @property
    def is_decided(self) -> bool:
        """Whether it is known what becomes of the round."""
        return bool(self._store.check([self._outcome]))

    def post(self, value: Any) -> None:
        """Posts the value of this rank; what is no JSON fails the round on all ranks."""
        try:
            text = json.dumps([self.what, value])
        except (TypeError, ValueError) as error:
            text = json.dumps([self.what, None, f"rank {self.rank} passed no plain JSON: {error}"])
        self._store.set(self._posts[self.rank], zlib.compress(text.encode(), 1))

    def take_back(self) -> None:
        """Deletes what this rank posted."""
        self._store.delete_key(self._posts[self.rank])

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have posted."""
        return bool(self._store.check(self._posts))

    def missing(self) -> list[int]:
        """Lists the ranks that did not post yet."""
        return [r for r, post in enumerate(self._posts) if not self._store.check([post])]

    def collect(self, is_shared: bool) -> list[Any]:
        """Reads what all ranks posted, and tries to decide that the round has succeeded."""
        posted = [_unpacked(self._store.get(post)) for post in self._posts]
        values = [entry[1] for entry in posted]
        errors = [entry[2] for entry in posted if len(entry) > 2]
        calls: dict[str, list[int]] = {}
        for rank, entry in enumerate(posted):
            calls.setdefault(entry[0], []).append(rank)
        if len(calls) > 1:
            each = "; ".join(f"ranks {ranks}: {what}" for what, ranks in calls.items())
            errors.append(f"the ranks called different things at once ({each})")
        if errors:
            self._decide(b"-" + errors[0].encode())
        else:
            shared = zlib.compress(json.dumps(values).encode(), 1) if is_shared else b""
            self._decide(b"+" + shared)
        return values

    def fail(self, timeout_sec: float) -> None:
        """Tries to decide that the round has failed, as some ranks did not come."""
        missing = self.missing()
        text = (
            f"ranks {missing} did not call {self.what} within {timeout_sec:g} s of the others "
            "(state_timeout_sec). Call it on all data-parallel ranks, or save each rank's own "
            "state with save_state_rank(), which waits for no rank"
            if missing
            else f"the ranks waited {timeout_sec:g} s (state_timeout_sec) for one another in "
            f"{self.what}, with different arguments, or one of them is slow"
        )
        self._decide(b"-" + text.encode())

    def _decide(self, outcome: bytes) -> None:
        """Sets the outcome, unless another rank has set one."""
        self._store.compare_set(self._outcome, "", outcome)

    def result(self) -> list[Any]:
        """Returns the values, if they are shared.

        Raises:
            StateError: The round has failed.
        """
        outcome = self._store.get(self._outcome)
        if outcome[:1] == b"-":
            raise StateError(outcome[1:].decode())
        return _unpacked(outcome[1:]) if len(outcome) > 1 else []

    def wait_for_leaving(self, timeout_sec: float) -> None:
        """Waits until all ranks that posted know the outcome, or for so long."""
        end = time.monotonic() + timeout_sec
        while time.monotonic() < end and any(self._store.check([p]) for p in self._posts):
            time.sleep(0.001)

    def forget_earlier(self) -> None:
        """Deletes outcomes that no rank can ask for: all ranks have left the rounds before."""
        for number in range(self._oldest, self._last):
            self._store.delete_key(f"{number}/outcome")
        self._store.set("rounds", f"{self._last} {self._number}")


def _unpacked(text: bytes) -> Any:
    return json.loads(zlib.decompress(text))
