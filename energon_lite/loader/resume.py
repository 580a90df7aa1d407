"""From the states of all ranks of one topology to the start of a rank of another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import StateError
from energon_lite.core.state import JSON, Snapshot, as_damage
from energon_lite.core.topology import RankSlots
from energon_lite.loader.migration import Migration, compare
from energon_lite.loader.rank_feed import PassStart, StreamStart
from energon_lite.loader.rank_state import (
    LoaderPosition,
    Peers,
    Region,
    checked_states,
    newest_snapshots,
)
from energon_lite.loader.stats import PassFailures, SavedStats

logger = logging.getLogger(__name__)

# Batches that are computed again, or were given beyond the others, of one stream.
_FURTHEST = 1_000_000


def resume(states: Sequence[Any], **settings: Any) -> LoaderPosition:
    """Works out where a rank goes on; see `_resume`.

    Raises:
        StateError: The states do not fit each other, the pipeline, or the topology; or are damaged.
    """
    try:
        return _resume(states, **settings)
    except Exception as error:
        damage = as_damage(error, "the run")
        raise damage from (error if damage is not error else error.__cause__)


def _resume(
    states: Sequence[Any],
    *,
    rank: int,
    world_size: int,
    num_streams: int | None,
    config: dict[str, JSON],
    endless: bool,
    fresh: Callable[[int], Snapshot],
    migrate: bool = False,
) -> LoaderPosition:
    """Works out where a rank goes on.

    Args:
        states: the states of all ranks that saved, in any order; or this rank's own alone, if
            the topology is unchanged.
        rank: this rank.
        world_size: ranks now.
        num_streams: the streams that the user asked for; None takes those of the states.
        config: the configuration of the pipeline here.
        endless: whether the pass never ends; then ranks must stand at the same step.
        fresh: gives a snapshot of a stream of this pipeline, for a number of streams; those of the
            states must be like it.
        migrate: whether sources may have been added, removed or weighted anew.

    Raises:
        StateError: The states do not fit each other, the pipeline, or the topology.
    """
    checked = checked_states(states)
    if not checked:
        raise StateError("there is no state in the list; give the states of all ranks")
    edits = check_config(checked[0]["config"], config, migrate)
    _check_same(checked, "config", show=False)
    if edits:
        checked = _migrated(checked, config, fresh(checked[0]["num_streams"]), edits)
    aligned = _aligned(checked)
    for name in ("num_streams", "world_size", "base", "given"):
        _check_same(aligned, name)
    old_world = checked[0]["world_size"]
    _check_num_streams(num_streams, checked[0]["num_streams"])
    _check_ranks([state["rank"] for state in checked], old_world, rank, world_size)
    if endless:
        _check_steps(checked)
    if old_world == world_size:
        aligned = checked
        counted = [state for state in checked if state["rank"] == rank]
        position = _own_position(counted[0], checked)
    else:
        position = _common_position(aligned, world_size)
        counted = checked if rank == 0 else []  # so that none is lost and none counts twice
    position.start.slots = position.start.slots._replace(rank=rank, world_size=world_size)
    position.start.streams = _stream_starts(
        aligned, position, fresh(position.start.slots.num_streams)
    )
    position.failures = PassFailures.of(counted)
    for source, number in (pair for state in counted for pair in state["skipped"].items()):
        position.skipped[source] = position.skipped.get(source, 0) + number
    position.edits = edits
    position.stats = SavedStats(
        [state["stats"]["counted"] for state in counted], checked[0]["stats"]["asked"]
    )
    return position


def check_config(saved: Any, here: Any, migrate: bool) -> list[str]:
    """Compares the configurations; gives how the blend was edited, if it was.

    Raises:
        StateError: With every difference, where they are more than edits of a blend, or those may
            not be.
    """
    edits, others = compare(saved, here)
    if others:
        raise StateError(
            "\n".join(others + edits)
            + "\nBuild the pipeline with the settings that it was saved with."
        )
    if edits and not migrate:
        raise StateError(
            "\n".join(edits) + "\nThe blend is another than that of the checkpoint. Restore with "
            "migrate=True to go on with it, or build the pipeline as it was."
        )
    return edits


def _migrated(
    states: list[dict[str, Any]], config: dict[str, JSON], fresh: Snapshot, edits: list[str]
) -> list[dict[str, Any]]:
    """Brings states to this pipeline; adds to `edits` what else there is to know."""
    migration = Migration(states[0]["config"], config, fresh)
    found = []
    for state in states:
        streams = {
            index: migration.stream(index, Snapshot.from_json(stream)).to_json()
            for index, stream in state["streams"].items()
        }
        found.append({**state, "streams": streams})
    if migration.expanded:
        edits.append(
            f"{len(migration.expanded)} streams stood inside a sample of which a hook makes "
            "several, and which cannot be made again: it is expanded from its start, so what it "
            "gave so far comes again. Hooks before that one that are marked @stateless avoid it"
        )
    return found


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


def _check_same(states: list[dict[str, Any]], name: str, show: bool = True) -> None:
    for state in states[1:]:
        if state[name] != states[0][name]:
            detail = f" ({states[0][name]} and {state[name]})" if show else ""
            raise StateError(
                f"rank {states[0]['rank']} and rank {state['rank']} have different {name!r}"
                f"{detail}: these are states of different runs or moments. Give the states that "
                "all ranks saved at the same time"
            )


def _aligned(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts ranks that stand at the end of a pass to the start of the next, if others are in it."""
    last_pass = max(state["pass"] for state in states)
    start = {
        "pass": last_pass, "base": 0, "count": 0, "ended": False, "given": [], "items_in_pass": 0,
        "streams": {},
    }  # fmt: skip
    return [
        {**state, **start} if state["ended"] and state["pass"] == last_pass - 1 else state
        for state in states
    ]


def _check_steps(states: list[dict[str, Any]]) -> None:
    if len({state["count"] for state in states}) > 1:
        steps = ", ".join(f"rank {s['rank']}: {s['count']}" for s in states)
        raise StateError(
            f"the ranks stand at different steps ({steps}); in endless training all ranks must "
            "save at the same step. Give each rank its own state only, on an unchanged topology, "
            "or the states of one step"
        )
    if states[0]["given"]:
        raise StateError(
            "the state says that ranks were ahead of one another in endless training, where all "
            "are at one step; it was edited or damaged"
        )


def _peers(states: list[dict[str, Any]], pass_index: int) -> Peers | None:
    """Returns what all ranks had given of a pass; None for the state of one rank alone."""
    if len(states) == 1:
        return None
    by_rank = sorted(states, key=lambda state: int(state["rank"]))
    counts = [
        (-1 if s["ended"] else s["count"]) if s["pass"] == pass_index else -(s["pass"] > pass_index)
        for s in by_rank
    ]
    return Peers(states[0]["base"], counts, states)


def _own_position(state: dict[str, Any], states: list[dict[str, Any]]) -> LoaderPosition:
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
        num_steps=state.get("steps", state["count"]),
        peers=_peers(states, state["pass"]),
    )


def _common_position(states: list[dict[str, Any]], world_size: int) -> LoaderPosition:
    """Finds the lowest slot that is not given, and what faster ranks gave beyond it."""
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
    position.peers = Peers(base, [0], states)  # the regions have what they gave
    by_rank = sorted(states, key=lambda state: int(state["rank"]))
    counts = [-1 if s["ended"] else s["count"] for s in by_rank]
    if len(set(counts)) == 1:
        base += counts[0] * old_world
    else:
        position.given.append(Region(base, counts))
        base = min(base + c * old_world + rank for rank, c in enumerate(counts) if c >= 0)
    start.slots = start.slots._replace(base=base)
    return position


def _regions(state: dict[str, Any]) -> list[Region]:
    return [Region(entry["base"], entry["counts"]) for entry in state["given"]]


def _stream_starts(
    states: list[dict[str, Any]], position: LoaderPosition, fresh: Snapshot
) -> dict[int, StreamStart]:
    """Picks, for each stream of the rank, the furthest snapshot that passes over nothing."""
    slots = position.start.slots
    step = slots.num_turns * slots.world_size  # slots between two own turns on one stream
    starts = {}
    for turn, index in enumerate(slots.streams()):
        slot = slots.slot(turn)
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
    why = "but batches of one modality must be the same on all ranks at each step"
    if num_streams % world_size:
        raise error(
            f"world_size={world_size} does not divide num_streams={num_streams}, {why}. Start the "
            "run with WorkerConfig(num_streams=...) a multiple of every world size that it may "
            f"have; this one goes on with {_divisors(num_streams)} ranks"
        )
    if slots.base % world_size:
        raise StateError(
            f"The run has given {slots.base} batches, which are no whole steps of world_size="
            f"{world_size}, {why}. Give a state of which all ranks together have given a multiple "
            f"of {world_size} batches, or go on with {_divisors(gcd(slots.base, num_streams))} "
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
