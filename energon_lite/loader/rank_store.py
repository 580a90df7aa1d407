"""Votes and values that ranks exchange through the store of `torch.distributed`."""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
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
# How long ranks wait for one another, by default.
TIMEOUT_SEC = 300.0
# After so long a wait it is logged which ranks are missing, and after twice as long again.
QUIET_SEC = 10.0
_SHORTEST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.0002, 0.05
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
    is_there: Callable[[], bool],
    limit_sec: float,
    warn: Callable[[float], None] = lambda _: None,
    quiet_sec: float = math.inf,
) -> bool:
    """Waits until something is in the store; returns whether it came in time.

    It asks again and again: `store.wait` would keep the store from other threads of this process.

    Args:
        is_there: asks the store.
        limit_sec: the longest wait.
        warn: called with the seconds waited after `quiet_sec`, after twice as long, and so on.
        quiet_sec: how long nothing is said.
    """
    since, pause = time.monotonic(), _SHORTEST_PAUSE_SEC
    while not is_there():
        waited = time.monotonic() - since
        if waited > limit_sec:
            return False
        if waited > quiet_sec:
            warn(waited)
            quiet_sec *= 2
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_SEC)
    return True


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
        self._peers = [str(rank) for rank in range(self._world_size) if has_peers]
        self._limit_sec = store.timeout.total_seconds()
        self._kept: deque[list[str]] = deque()

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
        if self._own is None:  # else a wait was interrupted
            packed = 1 + sum(value << _BITS * i for i, value in enumerate(vote, start=1))
            self._own = self._store.add(f"{name}/sum", packed) if self._is_first_peer(name) else 0
        is_last = self._own & _MASK == self._world_size
        if is_last:
            self._store.set(f"{name}/all", str(self._own))
        else:
            self._wait_for(name)
        total = self._own if is_last else int(self._store.get(f"{name}/all"))
        self._keep(name, "sum", "all")
        while len(self._kept) > _NUM_KEPT:  # votes that all ranks saw long ago
            for key in self._kept.popleft():
                if is_last:
                    self._store.delete_key(key)
        self._number += 1
        self._own = None
        return Vote(*(total >> _BITS * i & _MASK for i in (1, 2, 3)))

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
        self._keep(name, "first", "second", "left")
        self._store.add(f"{name}/left", 1)
        if dist.is_initialized() and dist.get_rank() == 0:
            # It mostly has the store, and may end now: so it waits for the others.
            _comes(lambda: self._store.add(f"{name}/left", 0) >= self._world_size, QUIET_SEC)
        return first, second

    def _is_first_peer(self, name: str) -> bool:
        return not self._peers or self._store.add(f"{name}/{self._rank}", 1) == 1

    def _keep(self, name: str, *keys: str) -> None:
        self._kept.append([f"{name}/{key}" for key in (*keys, *self._peers)])

    def _wait_for(self, name: str) -> None:
        is_known = False

        def message(waited_sec: float) -> str:
            others = [rank for rank in range(self._world_size) if rank != self._rank]
            missing = [r for r in others if not self._store.check([f"{name}/waits/{r}"])]
            return (
                f"Rank {self._rank} of {self._world_size} has waited {waited_sec:.0f} s, at step "
                f"{self._number} of its pass, for ranks {missing} to ask for their batch."
            )

        def warn(waited_sec: float) -> None:
            nonlocal is_known
            self._store.set(f"{name}/waits/{self._rank}", "")  # so that others do not miss it
            if is_known:
                logger.warning("%s The limit is %.0f s.", message(waited_sec), self._limit_sec)
            is_known = True

        def is_there() -> bool:
            return bool(self._store.check([f"{name}/all"]))

        if not _comes(is_there, self._limit_sec, warn, min(QUIET_SEC, self._limit_sec / 4)):
            raise RuntimeError(
                f"{message(self._limit_sec)} That is the timeout of the process group. Iterate on "
                "all ranks, and break on all of them at the same step; or make the loader with "
                'end="uneven", with which ranks do not wait for each other.'
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
        ranks = [global_rank] if self._is_alone else self._global_ranks()
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
        ranks, rank, values = self._global_ranks(), self._config.rank, []
        shared = group_store(self._config)
        assert shared is not None  # all ranks are there
        this = _Round(shared[0], what, rank, len(ranks))
        collects = rank == collector
        try:
            this.post(value)
            _comes(
                lambda: this.is_decided() or (collects and this.is_complete()),
                self._timeout_sec, this.warn, QUIET_SEC,
            )  # fmt: skip
            if collects and not this.is_decided() and this.is_complete():
                values = this.collect(is_shared)
            elif not this.is_decided():
                this.fail(self._timeout_sec)
            found = this.result()
        finally:  # also where the wait is interrupted: a late round must not find an old value
            this.take_back()
            if ranks[rank] == 0:  # mostly the process that has the store, and may end now
                _comes(this.is_left, min(self._timeout_sec, QUIET_SEC))
        if collects:
            this.forget_earlier()
        return values if collects else found


class _Round:
    """One round of a group of ranks in the store, the first that has no outcome yet."""

    def __init__(self, store: Any, what: str, rank: int, num_ranks: int) -> None:
        self._store: Any = dist.distributed_c10d.PrefixStore("energon_lite/rounds", store)
        self._what, self._rank = what, rank
        self._number = self._last_good = self._store.add("last good", 0)
        while self.is_decided():
            self._number += 1
        self._posts = [f"{self._number}/{rank}" for rank in range(num_ranks)]

    def is_decided(self) -> bool:
        return bool(self._store.check([f"{self._number}/outcome"]))

    def is_complete(self) -> bool:
        return not self._missing()

    def _missing(self) -> list[int]:
        if self._store.check(self._posts):
            return []
        return [rank for rank, post in enumerate(self._posts) if not self._store.check([post])]

    def is_left(self) -> bool:
        return not any(self._store.check([post]) for post in self._posts)

    def post(self, value: Any) -> None:
        """Posts the value of this rank; what is no JSON fails the round on all ranks."""
        try:
            text = json.dumps([self._what, value, ""])
        except (TypeError, ValueError) as error:
            text = json.dumps([self._what, 0, f"rank {self._rank} passed no plain JSON: {error}"])
        self._store.set(self._posts[self._rank], zlib.compress(text.encode(), 1))

    def take_back(self) -> None:
        self._store.delete_key(self._posts[self._rank])

    def warn(self, waited_sec: float) -> None:
        logger.warning(
            "Rank %d has waited %.0f s in %s for ranks %s to call it, too.",
            self._rank, waited_sec, self._what, self._missing(),
        )  # fmt: skip

    def collect(self, is_shared: bool) -> list[Any]:
        """Reads what all ranks posted, and tries to decide that the round has succeeded."""
        posted = [_unpacked(self._store.get(post)) for post in self._posts]
        values = [value for _, value, _ in posted]
        error = next((error for *_, error in posted if error), "")
        calls = {what: rank for rank, (what, *_) in enumerate(posted)}
        if len(calls) > 1:
            each = ", ".join(f"rank {rank} {what}" for what, rank in calls.items())
            error = f"the ranks called different things at once, such as {each}"
        shared = zlib.compress(json.dumps(values).encode(), 1) if is_shared else b""
        self._decide(b"-" + error.encode() if error else b"+" + shared)
        return values

    def fail(self, timeout_sec: float) -> None:
        """Tries to decide that the round has failed, as some ranks did not come."""
        missing = self._missing()
        text = (
            f"ranks {missing} did not call {self._what} within {timeout_sec:g} s of the others "
            "(state_timeout_sec). Call it on all data-parallel ranks, or save each rank's own "
            "state with save_state_rank(), which waits for no rank"
            if missing
            else f"the ranks waited {timeout_sec:g} s (state_timeout_sec) for one another in "
            f"{self._what}, with different arguments, or one of them is slow"
        )
        self._decide(b"-" + text.encode())

    def _decide(self, outcome: bytes) -> None:
        """Sets the outcome, unless another rank has set one."""
        self._store.compare_set(f"{self._number}/outcome", "", outcome)

    def result(self) -> list[Any]:
        """Returns the values, if they are shared.

        Raises:
            StateError: The round has failed.
        """
        outcome = self._store.get(f"{self._number}/outcome")
        if outcome[:1] == b"-":
            raise StateError(outcome[1:].decode())
        return _unpacked(outcome[1:]) if len(outcome) > 1 else []

    def forget_earlier(self) -> None:
        """Deletes outcomes that no rank can ask for: all have left the rounds before this one."""
        number = self._last_good - 1
        while self._store.check([f"{number}/outcome"]):
            self._store.delete_key(f"{number}/outcome")
            number -= 1
        self._store.set("last good", str(self._number))


def _unpacked(text: bytes) -> list[Any]:
    found: list[Any] = json.loads(zlib.decompress(text))
    return found
