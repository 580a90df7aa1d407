"""Values exchanged by the data-parallel ranks, through the store of `torch.distributed`.

A store needs no backend that can move objects, and a wait for it can end. Exchanges are rounds in
the store: each rank posts its value; one of them, the collector, reads the values when all are
there, and decides the outcome by one atomic operation. A rank that waited too long decides by the
same operation that the round has failed. So all ranks agree on what became of a round, and the next
call begins another one. Keys below the prefix of the ranks:

    <round>/<rank>      what a rank posted, until it knows the outcome
    <round>/outcome     b"+" and the values, or b"-" and what went wrong
    rounds              two numbers: the oldest round with an outcome, the last one that succeeded
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from typing import Any

import torch.distributed as dist

from energon_lite.core.errors import StateError
from energon_lite.core.topology import WorkerConfig

logger = logging.getLogger(__name__)

# How long ranks wait for one another, unless they were told otherwise.
TIMEOUT_SEC = 300.0
# After so long a wait it is logged which ranks are missing.
QUIET_SEC = 10.0
_LONGEST_PAUSE_SEC = 0.05


class Exchange:
    """Exchanges plain JSON between the ranks of a run; every rank must call the same.

    Without `torch.distributed`, or in a run of one rank, it returns what this rank gave.

    Args:
        config: the place of this rank, and its group.
        timeout_sec: longest wait for the other ranks.
    """

    def __init__(self, config: WorkerConfig, timeout_sec: float) -> None:
        self._config = config
        self._timeout_sec = timeout_sec

    def gather(self, value: Any, what: str, collector: int) -> list[Any] | None:
        """Returns the values of all ranks on the rank `collector`; None on the others.

        Args:
            value: of this rank.
            what: the call, for errors.
            collector: a rank inside the group.

        Raises:
            StateError: Some ranks did not call it in time, or called something else.
        """
        if self._is_alone:
            return [value]
        values = self._round(value, what, collector, is_shared=False)
        return values if self._config.rank == collector else None

    def gather_all(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all ranks, on all ranks; see `gather`."""
        return [value] if self._is_alone else self._round(value, what, 0, is_shared=True)

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
        ranks = [0] if self._is_alone else self._global_ranks()
        if global_rank in ranks:
            return ranks.index(global_rank)
        if self._is_alone:
            return 0
        raise ValueError(
            f"rank {global_rank} is not in the data-parallel group of this rank, which has the "
            f"ranks {ranks} of the whole world; give one of these"
        )

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
        values: list[Any] = []
        since, pause, is_quiet = time.monotonic(), 0.001, True
        while not this.is_decided:
            waited = time.monotonic() - since
            if is_shared is not None and this.is_complete:
                values = this.collect(is_shared)
            elif waited > self._timeout_sec:
                this.fail(self._timeout_sec)
            elif is_quiet and waited > QUIET_SEC:
                is_quiet = False
                logger.warning(
                    "Rank %d waits in %s for ranks %s to call it, too; it gives up after %g s.",
                    this.rank, this.what, this.missing(), self._timeout_sec,
                )  # fmt: skip
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SEC)
        return values


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
        while self.is_decided:
            self._number += 1
        self._posts = [f"{self._number}/{rank}" for rank in range(num_ranks)]

    @property
    def _outcome(self) -> str:
        return f"{self._number}/outcome"

    @property
    def is_decided(self) -> bool:
        """Whether it is known what becomes of the round."""
        return bool(self._store.check([self._outcome]))

    def post(self, value: Any) -> None:
        """Posts the value of this rank; what is no JSON fails the round on all ranks."""
        try:
            text = json.dumps([self.what, value])
        except (TypeError, ValueError) as error:
            text = json.dumps([self.what, None, f"rank {self.rank} gave no plain JSON: {error}"])
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
            "state with save_state_rank(), which waits for nobody"
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
