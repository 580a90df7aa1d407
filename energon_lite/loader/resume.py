"""From the states of all ranks of one topology to the position of a rank of another."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from math import gcd
from typing import Any

from energon_lite.core.dataset import SavableDataset, StreamRun
from energon_lite.core.errors import StateError
from energon_lite.core.state import JSON, Snapshot, as_damage
from energon_lite.core.topology import RankSlots, Stream, WorkerConfig
from energon_lite.loader.migration import Comparison, Migration
from energon_lite.loader.rank_feed import PassStart, StreamStart
from energon_lite.loader.rank_state import (
    LoaderPosition,
    Peers,
    Region,
    checked_states,
    newest_snapshots,
)  # fmt: skip
from energon_lite.loader.stats import PassFailures, SavedStats

logger = logging.getLogger(__name__)

# Batches of one stream that may be computed again, or that ranks may be ahead of one another.
_FURTHEST = 1_000_000
_WHY_IN_STEP = "but batches of one modality must be the same on all ranks at each step"

_State = dict[str, Any]


def resume(
    states: Sequence[Any],
    dataset: SavableDataset[Any],
    config: WorkerConfig,
    dataset_config: dict[str, JSON],
    migrate: bool = False,
) -> LoaderPosition:
    """Returns the position at which a rank resumes.

    Args:
        states: the states of all ranks that saved, in any order; or the state of this rank alone,
            if the topology is unchanged.
        dataset: the pipeline.
        config: the rank now.
        dataset_config: the configuration of the pipeline.
        migrate: whether sources may have been added, removed or weighted differently.

    Raises:
        StateError: The states do not fit each other, the pipeline or the topology, or are corrupt.
    """
    try:
        checked = checked_states(states)
        if not checked:
            raise StateError("there is no state in the list; pass the states of all ranks")
        found = Comparison(checked[0]["config"], dataset_config)
        _check_config(found, migrate)
        _check_same(checked, "config", show=False)
        fresh = StreamRun(dataset, Stream(0, checked[0]["num_streams"])).snapshot()
        if found.edits:
            checked = _migrated(checked, Migration(found, dataset_config, fresh), found.edits)
        position = _position(checked, config, dataset.endless, fresh)
        position.edits = found.edits
        check_steps(dataset, position.start.slots, StateError)
        return position
    except Exception as error:
        damage = as_damage(error, "the run")
        raise damage from (error if damage is not error else error.__cause__)


def _check_config(found: Comparison, migrate: bool) -> None:
    """Refuses differences that are more than edits of a blend, and edits if they are not allowed.

    Raises:
        StateError: With every difference.
    """
    if found.others:
        remedy = "Build the pipeline with the settings that it was saved with."
        raise StateError("\n".join([*found.others, *found.edits, remedy]))
    if found.edits and not migrate:
        raise StateError(
            "\n".join(found.edits) + "\nThe blend differs from the checkpoint. Restore with "
            "migrate=True to resume with it, or build the pipeline as it was."
        )


def _migrated(states: list[_State], migration: Migration, edits: list[str]) -> list[_State]:
    """Brings states into the form of this pipeline; adds to `edits` what is expanded again."""
    found = []
    for state in states:
        streams = {
            index: migration.stream(index, Snapshot.from_json(stream)).to_json()
            for index, stream in state["streams"].items()
        }
        found.append({**state, "streams": streams})
    if migration.expanded:
        edits.append(
            f"{len(migration.expanded)} streams stood inside a sample that a hook expands into "
            "several, and that cannot be re-created: it is expanded from its start, so what it "
            "yielded so far comes again. Mark the hooks before it @stateless to avoid that"
        )
    return found


def _position(
    states: list[_State], config: WorkerConfig, endless: bool, fresh: Snapshot
) -> LoaderPosition:
    """Returns the position of a rank in the run of which `states` are."""
    aligned = _aligned(states)
    for name in ("num_streams", "world_size", "base", "given"):
        _check_same(aligned, name)
    rank, world_size, old_world = config.rank, config.world_size, states[0]["world_size"]
    _check_num_streams(config.num_streams, states[0]["num_streams"])
    _check_ranks([state["rank"] for state in states], old_world, rank, world_size)
    if endless:
        _check_counts(states)
    if old_world == world_size:
        aligned = states
        counted = [state for state in states if state["rank"] == rank]
        position = _own_position(counted[0], states)
    else:
        position = _common_position(aligned, world_size)
        counted = states if rank == 0 else []  # so that no count is lost, and none counts twice
    start = position.start
    start.slots = start.slots._replace(rank=rank, world_size=world_size)
    start.streams = _stream_starts(aligned, position, fresh)
    position.failures = PassFailures.of(counted)
    position.skipped = dict(sum((Counter(state["skipped"]) for state in counted), Counter()))
    position.stats = SavedStats(
        [state["stats"] for state in counted],
        {name: row["asked"] for name, row in states[0]["stats"].items() if row["asked"]},
    )
    return position


def _check_num_streams(asked: int | None, saved: int) -> None:
    if asked not in (None, saved):
        raise StateError(
            f"the run has {saved} streams, and WorkerConfig asks for num_streams={asked}; the "
            f"number of streams cannot change in a run. Leave it out, or set num_streams={saved}"
        )


def _check_ranks(ranks: list[int], old_world: int, rank: int, world_size: int) -> None:
    is_own = ranks == [rank] and old_world == world_size
    if sorted(ranks) != list(range(old_world)) and not is_own:
        raise StateError(
            f"the states are of ranks {sorted(ranks)} where the run had {old_world} ranks "
            f"(0..{old_world - 1}); this is rank {rank} of {world_size}. Give the state of every "
            "rank once: restore_state_global([state of rank 0, state of rank 1, ...])"
        )


def _check_same(states: list[_State], name: str, show: bool = True) -> None:
    for state in states[1:]:
        if state[name] != states[0][name]:
            detail = f" ({states[0][name]} and {state[name]})" if show else ""
            raise StateError(
                f"rank {states[0]['rank']} and rank {state['rank']} have different {name!r}"
                f"{detail}: these are states of different runs or moments. Give the states that "
                "all ranks saved at the same time"
            )


def _aligned(states: list[_State]) -> list[_State]:
    """Moves ranks at the end of a pass to the start of the next pass, if other ranks are in it."""
    last_pass = max(state["pass"] for state in states)
    start = {
        "pass": last_pass, "base": 0, "count": 0, "ended": False, "given": [], "items_in_pass": 0,
        "streams": {},
    }  # fmt: skip
    return [
        {**state, **start} if state["ended"] and state["pass"] == last_pass - 1 else state
        for state in states
    ]


def _check_counts(states: list[_State]) -> None:
    if len({state["count"] for state in states}) > 1:
        steps = ", ".join(f"rank {s['rank']}: {s['count']}" for s in states)
        raise StateError(
            f"the ranks stand at different steps ({steps}); in endless training all ranks must "
            "save at the same step. Give each rank its own state only, on an unchanged topology, "
            "or the states of one step"
        )
    if states[0]["given"]:
        raise StateError(
            "the state reports that ranks were ahead of one another in endless training, where all "
            "are at one step; it was edited or is corrupt"
        )


def _peers(states: list[_State], pass_index: int) -> Peers | None:
    """Returns what all ranks had emitted of a pass; None for the state of one rank alone."""
    if len(states) == 1:
        return None
    by_rank = sorted(states, key=lambda state: int(state["rank"]))
    counts = [
        (-1 if s["ended"] else s["count"]) if s["pass"] == pass_index else -(s["pass"] > pass_index)
        for s in by_rank
    ]
    return Peers(states[0]["base"], counts, states)


def _own_position(state: _State, states: list[_State]) -> LoaderPosition:
    """Resumes exactly where this rank stood, on an unchanged topology."""
    slots = RankSlots(
        state["base"], state["rank"], state["world_size"], state["num_streams"], state["count"]
    )
    return LoaderPosition(
        PassStart(slots, state["pass"]),
        ended=state["ended"],
        given=_regions(state),
        items_in_pass=state["items_in_pass"],
        count=state["count"],
        num_steps=state["steps"],
        peers=_peers(states, state["pass"]),
    )


def _common_position(states: list[_State], world_size: int) -> LoaderPosition:
    """Finds the lowest slot that no rank emitted, and the slots beyond it that faster ranks did."""
    first_pass = min(s["pass"] for s in states)
    ahead = sorted(s["rank"] for s in states if s["pass"] > first_pass)
    if ahead:
        raise StateError(
            f"ranks {ahead} had begun another pass over the data than the others; save the state "
            "at the same step on all ranks"
        )
    old_world, base = states[0]["world_size"], states[0]["base"]
    start = PassStart(RankSlots(base, 0, old_world, states[0]["num_streams"]), first_pass)
    if all(s["ended"] for s in states):
        return LoaderPosition(start, ended=True)
    items = min(s["items_in_pass"] for s in states) * old_world // world_size
    position = LoaderPosition(start, given=_regions(states[0]), items_in_pass=items)
    position.peers = Peers(base, [0], states)  # `given` has what they emitted
    by_rank = sorted(states, key=lambda state: int(state["rank"]))
    counts = [-1 if s["ended"] else s["count"] for s in by_rank]
    if len(set(counts)) == 1:
        base += counts[0] * old_world
    else:
        position.given.append(Region(base, counts))
        base = min(base + c * old_world + rank for rank, c in enumerate(counts) if c >= 0)
    start.slots = start.slots._replace(base=base)
    return position


def _regions(state: _State) -> list[Region]:
    return [Region(entry["base"], entry["counts"]) for entry in state["given"]]


def _stream_starts(
    states: list[_State], position: LoaderPosition, fresh: Snapshot
) -> dict[int, StreamStart]:
    """Picks, for each stream of the rank, the furthest snapshot that skips no missing slot."""
    slots = position.start.slots
    step = slots.num_turns * slots.world_size  # slots between two visits of the rank to one stream
    starts = {}
    for visit, index in enumerate(slots.streams()):
        slot = slots.slot(visit)
        found = None
        snapshots = newest_snapshots(states, position.start.pass_index, index)
        for snapshot in [snapshot.expect_like(fresh) for snapshot in snapshots]:
            behind = range(slot, snapshot.count("items") * slots.num_streams + index, step)
            if len(behind) < _FURTHEST and all(position.is_given(own) for own in behind):
                found = snapshot
                slot += len(behind) * step
                break
        first = slot // slots.num_streams
        if first - (found.count("items") if found else 0) > _FURTHEST:
            raise StateError(
                f"stream {index} resumes with batch {first:,}, and the state has no snapshot of "
                "it anywhere near; it was edited or is corrupt, or the state of a rank is missing"
            )
        starts[index] = StreamStart(first, found)
    return starts


def check_steps(
    dataset: SavableDataset[Any], slots: RankSlots, error: type[ValueError] = ValueError
) -> None:
    """Refuses a topology in which ranks are in different cycles at one step, where that matters.

    Args:
        dataset: the pipeline.
        slots: of this rank.
        error: what to raise; `StateError` on a restore.

    Raises:
        ValueError: The world size does not divide the number of streams.
        StateError: The run stands inside a step of this world size.
    """
    if not dataset.traits.lockstep:
        return
    num_streams, world_size = slots.num_streams, slots.world_size
    if num_streams % world_size:
        raise error(
            f"world_size={world_size} does not divide num_streams={num_streams}, {_WHY_IN_STEP}. "
            "Start the run with WorkerConfig(num_streams=...) a multiple of every world size that "
            f"it may have; this run can resume with {_divisors(num_streams)} ranks"
        )
    if slots.base % world_size:
        raise StateError(
            f"The run has emitted {slots.base} batches, which are no whole steps of world_size="
            f"{world_size}, {_WHY_IN_STEP}. Pass states of ranks that together emitted a multiple "
            f"of {world_size} batches, or resume with {_divisors(gcd(slots.base, num_streams))} "
            "ranks"
        )


def warn_of_shared_streams(slots: RankSlots) -> None:
    """Logs what it costs if several ranks share a stream, and which world sizes cost nothing."""
    if slots.stride > 1:
        free = [d for d in range(1, slots.num_streams + 1) if slots.num_streams % d == 0]
        near = sorted(sorted(free, key=lambda d: abs(d - slots.world_size))[:2])
        logger.warning(
            "%d ranks share %d streams, so each batch is computed by %d ranks. World sizes %s "
            "would cost nothing extra; better, make num_streams a multiple of every world size "
            "that you may use.",
            slots.world_size,
            slots.num_streams,
            slots.stride,
            near,
        )


def _divisors(number: int) -> str:
    found = [str(n) for n in range(1, number + 1) if number % n == 0]
    return " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))
