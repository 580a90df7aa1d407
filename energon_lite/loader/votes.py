"""How ranks find out, step by step, how many of them have a batch.

Every rank casts one vote a step, and learns the sum of all. With a process group votes go through
its store: no collective, so nothing that a training loop does meanwhile can get between. Without
one they are counted beforehand, by computing all streams here.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from energon_lite.core.topology import WorkerConfig

logger = logging.getLogger(__name__)

# Bits of a counter for each of its sums.
_BITS = 15
_MASK = (1 << _BITS) - 1
# Votes that stay in the store. Processes that stand for one rank, such as pipeline stages, may be
# so many steps behind each other.
_NUM_KEPT = 1000
_FIRST_WARNING_SEC = 60.0
_SHORTEST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.0002, 0.05
_LONGEST_LEAVE_SEC = 10.0
# How many passes were begun in this process, by pipeline; all ranks begin them in the same order.
_num_passes: Counter[str] = Counter()


class Vote(NamedTuple):
    """What a rank says of a step, or how many ranks say so.

    Attributes:
        has: it has a batch for this step.
        is_left: it has a batch for this step or a later one.
        can_pad: its batch can carry a mask; so can no batch.
    """

    has: int
    is_left: int
    can_pad: int


class Votes(Protocol):
    """Where the ranks vote in a pass."""

    def cast(self, vote: Vote, step: int) -> Vote:
        """Returns the sum of the votes of all ranks on a step."""

    def end_pass(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Returns the sums of two counts over all ranks that can talk, at the end of a pass."""


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

    def end_pass(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Returns the counts: they are this rank's alone."""
        return counts


class StoreVotes:
    """Votes of ranks that share a store.

    Each adds its vote to a counter; who comes last writes the sum, which the others wait for.

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
        self.begin_pass()

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
        start, pause, warn_at = time.monotonic(), _SHORTEST_PAUSE_SEC, _FIRST_WARNING_SEC
        # Not `store.wait`: it would keep the store from the other threads of this process.
        while not self._store.check([f"{name}/all"]):
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SEC, 1.5 * pause)
            waited = time.monotonic() - start
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
