"""From the states of all ranks of one topology to the start of a rank of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from energon_lite.core.dataset import SavableDataset, StreamRun
from energon_lite.core.errors import StateError
from energon_lite.core.state import JSON, Snapshot, as_damage
from energon_lite.core.topology import RankSlots, Stream
from energon_lite.loader.migration import Migration, compare
from energon_lite.loader.pass_failures import PassFailures
from energon_lite.loader.state_checks import checked_states
from energon_lite.loader.stats import SavedStats
from energon_lite.loader.turns import PassStart, StreamStart

# Batches that are computed again, or were given beyond the others, of one stream.
_FURTHEST = 1_000_000


@dataclass
class Region:
    """Slots from `base` on that the ranks of an earlier topology gave: the first `counts[r]` of r.

    A count of -1 stands for all: that rank had come to the end of the pass.
    """

    base: int
    counts: list[int]

    def has(self, slot: int) -> bool:
        """Returns whether a slot was given."""
        turn, rank = divmod(slot - self.base, len(self.counts))
        return turn >= 0 and (self.counts[rank] < 0 or turn < self.counts[rank])

    def to_json(self) -> JSON:
        """Returns the region as plain JSON."""
        return {"base": self.base, "counts": list(self.counts)}


@dataclass
class Beside(Region):
    """What the ranks had given of a pass when a rank was resumed with them, and their states."""

    states: Sequence[dict[str, Any]] = ()


@dataclass
class Place:
    """Where a rank of a running loader stands; what it saves and restores.

    Attributes:
        count: turns since the base that are done.
        num_steps: batches given since the base, with those that only filled a step up.
        beside: the ranks that this one was resumed with; None once it has given a batch since.
    """

    start: PassStart
    ended: bool = False
    given: list[Region] = field(default_factory=list)
    items_in_pass: int = 0
    count: int = 0
    num_steps: int = 0
    failures: PassFailures = field(default_factory=PassFailures)
    skipped: dict[str, int] = field(default_factory=dict)
    stats: SavedStats = field(default_factory=SavedStats)
    edits: list[str] = field(default_factory=list)
    beside: Beside | None = None

    def is_given(self, slot: int) -> bool:
        """Returns whether another rank gave a slot before this run was resumed."""
        return bool(self.given) and any(region.has(slot) for region in self.given)

    def all_are_given(self, dataset: SavableDataset[Any]) -> bool:
        """Whether no rank had anything left of the pass when this one was resumed.

        Each stream is computed up to its first batch that is left, from where the furthest rank had
        it.

        Args:
            dataset: the pipeline.
        """
        slots, pass_index = self.start.slots, self.start.pass_index
        beside = self.beside or Beside(0, [0])
        for index in range(slots.num_streams):
            run = StreamRun(dataset, Stream(index, slots.num_streams, pass_index), max_skip_rate=1)
            for snapshot in _snapshots(beside.states, pass_index, index)[:1]:
                run.restore(snapshot)
            for batch in chain(range(run.num_given), (run.num_given - 1 for _ in run)):
                slot = batch * slots.num_streams + index
                if slot >= slots.base and not (self.is_given(slot) or beside.has(slot)):
                    return False
        return True


def resume(states: Sequence[Any], **settings: Any) -> Place:
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
) -> Place:
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
        place = _own_place(counted[0], checked)
    else:
        place = _common_place(aligned, world_size)
        counted = checked if rank == 0 else []  # so that none is lost and none counts twice
    place.start.slots = place.start.slots._replace(rank=rank, world_size=world_size)
    place.start.streams = _stream_starts(aligned, place, fresh(place.start.slots.num_streams))
    place.failures = PassFailures.of(counted)
    for source, number in (pair for state in counted for pair in state["skipped"].items()):
        place.skipped[source] = place.skipped.get(source, 0) + number
    place.edits = edits
    place.stats = SavedStats(
        [state["stats"]["counted"] for state in counted], checked[0]["stats"]["asked"]
    )
    return place


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


def _beside(states: list[dict[str, Any]], pass_index: int) -> Beside | None:
    """Returns what all ranks had given of a pass; None for the state of one rank alone."""
    if len(states) == 1:
        return None
    by_rank = sorted(states, key=lambda state: int(state["rank"]))
    counts = [
        (-1 if s["ended"] else s["count"]) if s["pass"] == pass_index else -(s["pass"] > pass_index)
        for s in by_rank
    ]
    return Beside(states[0]["base"], counts, states)


def _own_place(state: dict[str, Any], states: list[dict[str, Any]]) -> Place:
    """Resumes exactly where this rank stood, on an unchanged topology."""
    slots = RankSlots(
        state["base"], state["rank"], state["world_size"], state["num_streams"], state["count"]
    )
    return Place(
        PassStart(slots, state["pass"]),
        ended=state["ended"],
        given=_regions(state),
        items_in_pass=state["items_in_pass"],
        count=state["count"],
        num_steps=state.get("steps", state["count"]),
        beside=_beside(states, state["pass"]),
    )


def _common_place(states: list[dict[str, Any]], world_size: int) -> Place:
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
        return Place(start, ended=True)
    items = min(s["items_in_pass"] for s in states) * old_world // world_size
    place = Place(start, given=_regions(states[0]), items_in_pass=items)
    place.beside = Beside(base, [0], states)  # the regions have what they gave
    by_rank = sorted(states, key=lambda state: int(state["rank"]))
    counts = [-1 if s["ended"] else s["count"] for s in by_rank]
    if len(set(counts)) == 1:
        base += counts[0] * old_world
    else:
        place.given.append(Region(base, counts))
        base = min(base + c * old_world + rank for rank, c in enumerate(counts) if c >= 0)
    start.slots = start.slots._replace(base=base)
    return place


def _regions(state: dict[str, Any]) -> list[Region]:
    return [Region(entry["base"], entry["counts"]) for entry in state["given"]]


def _stream_starts(
    states: list[dict[str, Any]], place: Place, fresh: Snapshot
) -> dict[int, StreamStart]:
    """Picks, for each stream of the rank, the furthest snapshot that passes over nothing."""
    slots = place.start.slots
    step = slots.num_turns * slots.world_size  # slots between two own turns on one stream
    starts = {}
    for turn, index in enumerate(slots.streams()):
        slot = slots.slot(turn)
        found = None
        snapshots = _snapshots(states, place.start.pass_index, index)
        for snapshot in [snapshot.expect_like(fresh) for snapshot in snapshots]:
            behind = range(slot, snapshot.count("items") * slots.num_streams + index, step)
            if len(behind) < _FURTHEST and all(place.is_given(own) for own in behind):
                found = snapshot
                slot += len(behind) * step
                break
        first = slot // slots.num_streams
        if first - (found.count("items") if found else 0) > _FURTHEST:
            raise StateError(
                f"stream {index} is to resume with batch {first:,}, and the state has no place of "
                "it anywhere near; it was edited or damaged, or the state of a rank is missing"
            )
        starts[index] = StreamStart(first, found)
    return starts


def _snapshots(states: Sequence[dict[str, Any]], pass_index: int, index: int) -> list[Snapshot]:
    """Lists where ranks have a stream in a pass, the furthest first."""
    found = [
        Snapshot.from_json(state["streams"][str(index)])
        for state in states
        if str(index) in state["streams"] and state["pass"] == pass_index
    ]
    return sorted(found, key=lambda snapshot: snapshot.count("items"), reverse=True)
