"""The state of a rank: written, checked, and read by the same or any other ranks.

`torch.distributed.checkpoint` flattens nested values, and on loading fills only the keys that the
state of a fresh loader has. So the states of all ranks together are one JSON string under one key.
In a state whatever grows with sources and streams is JSON that is compressed: much of it is equal.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import gcd, isqrt, lcm
from typing import Any

from energon_lite.core.dataset import SavableDataset, StreamRun
from energon_lite.core.errors import StateError
from energon_lite.core.json_text import read_json
from energon_lite.core.state import (
    COUNT,
    FLAG,
    FORMAT,
    JSON,
    STATE_KEY,
    VERSION,
    Kind,
    Snapshot,
    as_damage,
    checksum,
    digest,
)  # fmt: skip
from energon_lite.core.topology import MAX_STREAMS, RankSlots, Stream, WorkerConfig
from energon_lite.loader.count_table import CountTable, weights_in
from energon_lite.loader.rank_store import MAX_STATES_BYTES
from energon_lite.loader.workers.rank_feed import PassStart, StreamStart
from energon_lite.names.energon_modules import import_name

logger = logging.getLogger(__name__)

# Levels of stages and restore keys within one another: more than any run has.
_MAX_DEPTH = 300
# Batches of one stream that may be computed again, or that ranks may be ahead of one another.
_FURTHEST = 1_000_000
_WHY_IN_STEP = "but batches of one modality must be the same on all ranks at each step"

# Files are searched for the name of the format, also where a state in them is compressed.
_PACKED = f"{FORMAT}:"
_State = dict[str, Any]
# The configuration of a pipeline: the text in its states, the digest, and itself.
PipelineConfig = tuple[str, str, dict[str, JSON]]


def compressed(value: JSON) -> str:
    """Returns the text of a JSON value: compressed by zlib, in base64."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 6)).decode()


def decompressed(text: Any, name: str) -> Any:
    """Returns the value of which `compressed` returned the text; another value as it is.

    Raises:
        StateError: The text is another one.
    """
    if not isinstance(text, str):
        return text
    try:
        reader = zlib.decompressobj()
        content = reader.decompress(base64.b64decode(text, validate=True), MAX_STATES_BYTES)
        if not reader.eof:
            raise ValueError(f"it is cut short, or of more than {MAX_STATES_BYTES:,} bytes")
        return json.loads(content)
    except (ValueError, RecursionError, zlib.error) as error:
        raise StateError(f"the state's {name!r} cannot be decompressed: {error}") from error


@dataclass(eq=False)
class Region:
    """Slots from `base` on that ranks of an earlier topology emitted: the first `counts[r]` of r.

    A count of -1 stands for all slots: the rank had reached the end of the pass.
    """

    base: int
    counts: list[int]

    def has(self, slot: int, num_streams: int) -> bool:
        """Returns whether a slot, from the base on, was emitted."""
        slots = RankSlots(self.base, 0, len(self.counts), num_streams)
        count = self.counts[slots.rank_of(slot)]
        return count < 0 or slots.turn_of(slot) < count


@dataclass(eq=False)
class Peers(Region):
    """The part of a pass that all ranks had emitted when this one was resumed with them.

    Attributes:
        snapshots: returns where they had a stream, the furthest first.
    """

    snapshots: Callable[[int], list[Snapshot]] = lambda _: []


def _integer(lowest: int, highest: int) -> Kind:
    def fits(value: Any) -> bool:
        return type(value) is int and lowest <= value <= highest

    return Kind(lowest, fits, f"an integer of {lowest} to {highest:,}")


def _are_regions(value: Any) -> bool:
    return type(value) is list and all(
        isinstance(entry, dict)
        and COUNT.fits(entry.get("base"))
        and isinstance(counts := entry.get("counts"), list)
        and len(counts) > 0
        and all(count == -1 or COUNT.fits(count) for count in counts)
        for entry in value
    )


def _are_numbers(value: Any) -> bool:
    return type(value) is list and all(map(COUNT.fits, value)) and value == sorted({*value})


def _are_streams(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(index, str)
        and index.isdecimal()
        and len(index) < 20
        and isinstance(stream, dict)
        and COUNT.fits(stream.get("items"))
        for index, stream in value.items()
    )


# The fields of a state: first those that are attributes of a position, under the same names.
_OWN = {
    "count": COUNT, "num_steps": COUNT, "ended": FLAG, "items_in_pass": COUNT, "failed": COUNT,
    "drawn": COUNT,
}  # fmt: skip
_FIELDS = {
    **_OWN, "num_streams": _integer(1, MAX_STREAMS), "rank": COUNT,
    "world_size": _integer(1, MAX_STREAMS), "pass": COUNT, "base": COUNT,
    "emitted": Kind([], _are_regions, "a list of slots, each with base and counts"),
    "begun": Kind([], _are_numbers, "numbers of streams, ascending"),
    "config": Kind({}, lambda value: isinstance(value, dict), "a configuration"),
    "streams": Kind({}, _are_streams, "snapshots of streams with numbers of items, by number"),
}  # fmt: skip


@dataclass(eq=False)
class LoaderPosition:
    """The place of a rank of a running loader, which it saves and restores.

    Attributes:
        start: where its pass begins.
        count: visits since the base that are done.
        num_steps: batches emitted since the base, padding batches included.
        ended: whether the rank is at the end of the pass.
        items_in_pass: batches emitted in the pass or virtual epoch.
        failed: samples that failed in a validation pass, of the batches emitted.
        drawn: samples drawn for these.
        emitted: slots that ranks of earlier topologies emitted.
        counted: what ranks counted before the run was resumed; this one continues them.
        before: what a rank counted, with the target samples of each source up to there.
        edits: how the blend differs from that of the checkpoint.
        peers: the ranks that this one was resumed with; None once it has emitted a batch since.
    """

    start: PassStart
    count: int = 0
    num_steps: int = 0
    ended: bool = False
    items_in_pass: int = 0
    failed: int = 0
    drawn: int = 0
    emitted: list[Region] = field(default_factory=list)
    counted: list[CountTable] = field(default_factory=list)
    before: CountTable | None = None
    edits: list[str] = field(default_factory=list)
    peers: Peers | None = None

    def is_emitted(self, slot: int) -> bool:
        """Returns whether another rank emitted a slot before this run was resumed."""
        num_streams = self.start.slots.num_streams
        return any(region.has(slot, num_streams) for region in self.emitted)

    def all_are_emitted(self, dataset: SavableDataset[Any]) -> bool:
        """Whether no rank had a batch left in the pass when this rank was resumed.

        Each stream is computed from its furthest snapshot up to its first batch that is left.
        """
        slots, pass_index = self.start.slots, self.start.pass_index
        peers = self.peers or Peers(0, [0])
        for index in range(slots.num_streams):
            run = StreamRun(dataset, Stream(index, slots.num_streams, pass_index), max_skip_rate=1)
            for snapshot in peers.snapshots(index)[:1]:
                run.restore(snapshot)
            for batch in chain(range(run.num_returned), (run.num_returned - 1 for _ in run)):
                slot = batch * slots.num_streams + index
                is_emitted = self.is_emitted(slot) or peers.has(slot, slots.num_streams)
                if slot >= slots.base and not is_emitted:
                    return False
        return True

    def to_json(self, newest: Mapping[int, Snapshot], stats: JSON) -> _State:
        """Returns the state of the rank, but for its configuration and checksum.

        Args:
            newest: the snapshots of the streams that have emitted a batch here.
            stats: what the sources yielded.
        """
        slots = self.start.slots
        streams = {i: start.snapshot for i, start in self.start.streams.items() if start.snapshot}
        streams.update(newest)
        return {
            "format": FORMAT, "version": VERSION, "num_streams": slots.num_streams,
            "rank": slots.rank, "world_size": slots.world_size, "pass": self.start.pass_index,
            "base": slots.base,
            **{name: getattr(self, name) for name in _OWN},
            "emitted": [vars(region).copy() for region in self.emitted],
            "stats": stats, "begun": sorted(streams),
            "streams": {str(i): streams[i].to_json() for i in sorted(streams)},
        }  # fmt: skip


def text_of(packed: bytes) -> str:
    """Returns what a trainer keeps of the states of all ranks, compressed JSON, as a text."""
    return _PACKED + base64.b64encode(packed).decode()


def states_of(state_dict: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Returns the states of the ranks in what a trainer kept.

    Args:
        state_dict: what `state_dict()` returned, or the state of a rank, or a list of either.

    Raises:
        StateError: It is none of these.
    """
    if isinstance(state_dict, (list, tuple)):
        return [state for entry in state_dict for state in states_of(entry)]
    if not isinstance(state_dict, Mapping) or STATE_KEY not in state_dict:
        return [state_dict]  # it is checked when it is read
    text, error = state_dict[STATE_KEY], None
    try:
        if text.startswith(_PACKED):
            found = decompressed(text[len(_PACKED) :], STATE_KEY)
        else:
            found = read_json(text, STATE_KEY, _MAX_DEPTH, allow_nan=True)
    except (TypeError, ValueError, AttributeError) as caught:
        found, error = None, caught
    if isinstance(found, list) and found and all(isinstance(state, dict) for state in found):
        return found
    raise StateError(
        f"the state's {STATE_KEY!r} is {text!r:.80}, not what state_dict() returned; it was edited "
        "or is corrupt"
    ) from error


def _checked_states(states: Sequence[Any], own: PipelineConfig) -> list[_State]:
    """Returns the states of ranks, if each is of this version and unchanged since it was saved.

    They have the configuration, which is the same object in all, and `own` where it is equal; their
    tables are not read.

    Raises:
        StateError: A state is not; reports what is missing or wrong.
    """
    read = cache(lambda text: own[1:] if text == own[0] else _read_config(text))
    whole = dict(filter(None, [_checked_config(state, read) for state in states]))
    checked = []
    for state in states:
        if state.get("pipeline") not in whole:
            raise StateError(
                f"the state of rank {state.get('rank')} has its configuration in the state of "
                "another rank, which is not in the list; pass the whole list of "
                "save_state_global()"
            )
        checked.append({**state, "config": whole[state["pipeline"]]})
        for name in _FIELDS.keys() - {"streams"}:
            _check_field(checked[-1], name)
    return checked


def _check_field(state: _State, name: str) -> None:
    kind, value = _FIELDS[name], state.get(name)
    if not kind.fits(value):
        raise StateError(f"the state's {name!r} is {value!r:.80}, not {kind.text}")


def _streams_of(state: _State) -> Any:
    """Returns the streams of a checked state.

    Raises:
        StateError: They cannot be read, or contradict the rest of the state.
    """
    state = {**state, "streams": decompressed(state.get("streams"), "streams")}
    _check_field(state, "streams")
    _check_streams(state)
    return state["streams"]


def _read_config(text: Any) -> tuple[str, Any]:
    config = decompressed(text, "config")
    return digest(config), config


def counts_in(states: Sequence[Mapping[str, Any]]) -> list[dict[str, dict[str, float]]]:
    """Returns targets and counts by source of each of some states; none where they are not known.

    A state without its configuration needs another one that has it.

    Raises:
        StateError: They are corrupt.
    """
    texts = {state.get("pipeline"): state["config"] for state in states if state.get("config")}
    weights = {name: weights_in(decompressed(text, "config")) for name, text in texts.items()}

    def rows(state: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        own = weights.get(state.get("pipeline"))
        if own is None or state.get("version") != VERSION:
            return {}
        return CountTable.from_json(state.get("stats"), own).rows()

    return [*map(rows, states)]


def _checked_config(state: Any, read: Callable[[Any], tuple[str, Any]]) -> tuple[str, Any] | None:
    """Returns digest and configuration of an unchanged state; None if another rank's has it."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        what = f"{type(state).__name__} is not a loader state of energon_lite; read its file"
        if isinstance(state, Mapping) and STATE_KEY in state:
            what = "this is what state_dict() returned; pass it to load_state_dict()"
        raise StateError(what)
    version = state.get("version")
    if version != VERSION or type(version) is not int:
        raise StateError(
            f"the state has format version {version!r}; this version of energon_lite reads version "
            f"{VERSION} only. Resume with the version of energon_lite that saved it"
        )
    text = state.get("config")
    found = None if text is None else read(text) if isinstance(text, str) else _read_config(text)
    is_own = found is None or state.get("pipeline") == found[0]
    if not is_own or state.get("checksum") != checksum(state):
        raise StateError(
            f"the state of rank {state.get('rank')} does not have the checksum that it was saved "
            "with: it was edited, or is corrupt. Use another checkpoint"
        )
    return found


def _check_streams(state: _State) -> None:
    """Compares the positions of the streams with what this rank, and ranks before it, emitted.

    Raises:
        StateError: A stream is further than any slot that was emitted, or the stream of the last
            slot is not that far; or a rank or a stream is none of the run.
    """
    num_streams, count = state["num_streams"], state["count"]
    items = {int(index): stream["items"] for index, stream in state["streams"].items()}
    are_begun = sorted(items) == state["begun"]
    if (
        state["rank"] >= state["world_size"]
        or max(items, default=0) >= num_streams
        or not are_begun
    ):
        raise StateError("the state contradicts itself; it was edited or is corrupt")
    slots = RankSlots(state["base"], state["rank"], state["world_size"], num_streams)
    last_slot = slots.slot(count - 1) if count else state["base"] - 1
    furthest: float = last_slot
    worlds = {slots.world_size, *(len(region["counts"]) for region in state["emitted"])}
    for region in state["emitted"]:
        end = region["base"] + max(region["counts"]) * len(region["counts"])
        furthest = max(furthest, float("inf") if -1 in region["counts"] else end)
    # Where ranks share a stream, each is up to one round of all slots ahead of what it emitted.
    furthest += sum(lcm(num_streams, world) for world in worlds if num_streams % world)
    ahead = [i for i, number in items.items() if (number - 1) * num_streams + i > furthest]
    behind = count and items.get(last_slot % num_streams, 0) <= last_slot // num_streams
    if ahead or behind:
        index = ahead[0] if ahead else last_slot % num_streams
        raise StateError(
            f"the state of rank {state['rank']} has emitted {count} batches from slot "
            f"{state['base']} on, and stream {index} stands at {items.get(index)} batches, which "
            "contradict each other; it was edited or is corrupt"
        )


def resume(
    states: Sequence[Any],
    dataset: SavableDataset[Any],
    config: WorkerConfig,
    own: PipelineConfig,
    migrate: bool = False,
) -> LoaderPosition:
    """Returns the position at which a rank resumes.

    Args:
        states: the states of all ranks that saved, in any order; or the state of this rank alone,
            if the topology is unchanged.
        dataset: the pipeline.
        config: the rank now.
        own: the configuration of the pipeline.
        migrate: whether sources may have been added, removed or weighted differently, and batches
            may have another size.

    Raises:
        StateError: The states do not fit each other, the pipeline or the topology, or are corrupt.
    """
    try:
        checked = _checked_states(states, own)
        if not checked:
            raise StateError("there is no state in the list; pass the states of all ranks")
        saved, here = checked[0]["config"], own[-1]
        found = migration = None
        if saved != here:
            compare = import_name("energon_lite.extras.migration.comparison:Comparison")
            found = compare(saved, here)
            found.check(migrate)
        _check_same(checked, "pipeline")
        fresh = StreamRun(dataset, Stream(0, checked[0]["num_streams"])).snapshot()
        if found and found.changes_draws:
            make = import_name("energon_lite.extras.migration.migration:Migration")
            migration = make(found, saved, here, fresh)
        position = _position(checked, config, dataset.endless, fresh, migration)
        if found:
            position.edits = found.edits + (migration.notes if migration else [])
        if found and found.changes_batches:
            _check_batches(position)
        check_steps(dataset, position.start.slots, StateError)
        return position
    except Exception as error:
        damage = as_damage(error, "the run")
        raise damage from (error if damage is not error else error.__cause__)


def _position(
    states: list[_State], config: WorkerConfig, endless: bool, fresh: Snapshot, migration: Any
) -> LoaderPosition:
    """Returns the position of a rank in the run of which `states` are."""
    states = sorted(states, key=lambda state: int(state["rank"]))
    aligned = _aligned(states)
    for name in ("num_streams", "world_size", "base", "emitted"):
        _check_same(aligned, name)
    rank, world_size, old_world = config.rank, config.world_size, states[0]["world_size"]
    num_streams, ranks = states[0]["num_streams"], sorted(state["rank"] for state in states)
    if config.num_streams not in (None, num_streams):
        raise StateError(
            f"the run has {num_streams} streams, and WorkerConfig asks for num_streams="
            f"{config.num_streams}; the number of streams cannot change in a run. Leave it out, or "
            f"set num_streams={num_streams}"
        )
    if ranks != list(range(old_world)) and (ranks, old_world) != ([rank], world_size):
        raise StateError(
            f"the states are of ranks {ranks} where the run had {old_world} ranks "
            f"(0..{old_world - 1}); this is rank {rank} of {world_size}. Give the state of every "
            "rank once: restore_state_global([state of rank 0, state of rank 1, ...])"
        )
    if endless:
        _check_counts(states)
    if old_world == world_size:
        aligned = states
        position = _own_position(next(s for s in states if s["rank"] == rank), states)
    else:
        position = _common_position(aligned, world_size)
    start = position.start
    start.slots = start.slots._replace(rank=rank, world_size=world_size)
    snapshots = _snapshots_of(aligned, start.pass_index, fresh, migration)
    if position.peers:
        position.peers.snapshots = snapshots
    start.streams = _stream_starts(snapshots, position)
    # So that no count is lost, and none counts twice.
    counted = [state for state in states if state["rank"] % world_size == rank]
    position.failed = sum(state["failed"] for state in counted)
    position.drawn = sum(state["drawn"] for state in counted)
    weights = weights_in(states[0]["config"])
    tables = [CountTable.from_json(state.get("stats"), weights) for state in counted or states[:1]]
    # Each rank estimates the target of the run from its own draws: a rank keeps its own estimate.
    position.before, position.counted = tables[0], tables[: len(counted)]
    return position


def _check_batches(position: LoaderPosition) -> None:
    """Refuses another batch size where a stream computes batches of the old size again.

    Raises:
        StateError: It does.
    """
    starts = position.start.streams.values()
    is_behind = any(s.first != (s.snapshot.count("items") if s.snapshot else 0) for s in starts)
    if is_behind or position.emitted:
        raise StateError(
            "batch_size can change only between two batches of each stream, and here some must be "
            "computed again, as ranks stood at different steps or share streams. Resume on "
            f"{_divisors(position.start.slots.num_streams)} ranks from states of one step, or with "
            "the old batch_size"
        )


def _check_same(states: list[_State], name: str) -> None:
    for state in states[1:]:
        if state[name] != states[0][name]:
            raise StateError(
                f"rank {states[0]['rank']} and rank {state['rank']} have different {name!r} "
                f"({states[0][name]} and {state[name]}): these are states of different runs or "
                "moments. Give the states that all ranks saved at the same time"
            )


def _aligned(states: list[_State]) -> list[_State]:
    """Moves ranks at the end of a pass to the start of the next pass, if other ranks are in it."""
    last_pass = max(state["pass"] for state in states)
    start = {
        "pass": last_pass, "base": 0, "count": 0, "ended": False, "emitted": [], "items_in_pass": 0,
        "begun": [],
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
    if states[0]["emitted"]:
        raise StateError(
            "the state reports that ranks were ahead of one another in endless training, where all "
            "are at one step; it was edited or is corrupt"
        )


def _peers(states: list[_State], pass_index: int) -> Peers:
    """Returns what all ranks had emitted of a pass."""
    counts = [
        (-1 if s["ended"] else s["count"]) if s["pass"] == pass_index else -(s["pass"] > pass_index)
        for s in states
    ]
    return Peers(states[0]["base"], counts)


def _own_position(state: _State, states: list[_State]) -> LoaderPosition:
    """Resumes exactly where this rank stood, on an unchanged topology."""
    slots = RankSlots(
        state["base"], state["rank"], state["world_size"], state["num_streams"], state["count"]
    )
    start, own = PassStart(slots, state["pass"]), {name: state[name] for name in _OWN}
    peers = _peers(states, state["pass"]) if len(states) > 1 else None
    return LoaderPosition(start, emitted=_regions(state), peers=peers, **own)


def _common_position(states: list[_State], world_size: int) -> LoaderPosition:
    """Finds the lowest slot that no rank emitted, and the slots beyond it that faster ranks did."""
    first_pass = min(s["pass"] for s in states)
    ahead = [s["rank"] for s in states if s["pass"] > first_pass]
    if ahead:
        raise StateError(
            f"ranks {ahead} had begun another pass over the data than the others; save the state "
            "at the same step on all ranks"
        )
    old_world, peers = states[0]["world_size"], _peers(states, first_pass)
    start = PassStart(RankSlots(peers.base, 0, old_world, states[0]["num_streams"]), first_pass)
    if all(s["ended"] for s in states):
        return LoaderPosition(start, ended=True)
    items = min(s["items_in_pass"] for s in states) * old_world // world_size
    emitted = _regions(states[0])
    if len(set(peers.counts)) > 1:
        emitted.append(Region(peers.base, peers.counts))
    ranks = (start.slots._replace(rank=rank) for rank in range(old_world))
    left = (own.slot(c) for own, c in zip(ranks, peers.counts, strict=True) if c >= 0)
    start.slots = start.slots._replace(base=min(left))
    return LoaderPosition(start, emitted=emitted, items_in_pass=items, peers=peers)


def _snapshots_of(
    states: Sequence[_State], pass_index: int, fresh: Snapshot, migration: Any
) -> Callable[[int], list[Snapshot]]:
    """Returns what lists where ranks have a stream in a pass, the furthest first.

    It reads only the states of ranks that have begun this stream.
    """
    there = [state for state in states if state["pass"] == pass_index]
    table = cache(lambda number: _streams_of(there[number]))

    def newest(index: int) -> list[Snapshot]:
        numbers = (number for number, state in enumerate(there) if index in state["begun"])
        found = [Snapshot.from_json(table(number)[str(index)]) for number in numbers]
        if migration is not None:
            found = [migration.stream(index, snapshot) for snapshot in found]
        found = [snapshot.expect_like(fresh) for snapshot in found]
        return sorted(found, key=lambda snapshot: snapshot.count("items"), reverse=True)

    return cache(newest)


def _regions(state: _State) -> list[Region]:
    return [Region(entry["base"], entry["counts"]) for entry in state["emitted"]]


def _stream_starts(
    snapshots: Callable[[int], list[Snapshot]], position: LoaderPosition
) -> dict[int, StreamStart]:
    """Picks, for each stream of the rank, the furthest snapshot that skips no missing slot."""
    slots = position.start.slots
    starts = {}
    for index in slots.streams():
        slot = slots.next_slot(index, slots.slot(0))
        found = None
        for snapshot in snapshots(index):
            end = snapshot.count("items") * slots.num_streams + index
            behind = range(slot, end, slots.num_streams)
            own = (slot for slot in behind if slots.rank_of(slot) == slots.rank)
            if len(behind) < _FURTHEST and all(map(position.is_emitted, own)):
                found, slot = snapshot, slots.next_slot(index, max(slot, end))
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
        logger.warning(
            "%d ranks share streams, as %d streams cannot be dealt evenly: rank %d computes %.2f "
            "batches for each one that it returns. %s ranks would cost nothing extra; the more "
            "streams a run has for each rank, the less it costs.",
            slots.world_size, slots.num_streams, slots.rank, slots.cost,
            _divisors(slots.num_streams),
        )  # fmt: skip


def _divisors(number: int) -> str:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    found = [str(n) for n in sorted({*small, *(number // n for n in small)})]
    return " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))
