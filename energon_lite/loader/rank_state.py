"""The position of a rank in the run, and its state: the position as JSON, written, checked, read.

`torch.distributed.checkpoint` flattens nested values, and on loading fills only the keys that the
state of a fresh loader has. So the states of all ranks together are one JSON string under one key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import lcm
from typing import Any

from energon_lite.core.dataset import SavableDataset, StreamRun
from energon_lite.core.errors import StateError
from energon_lite.core.json_text import read_json
from energon_lite.core.state import (
    FORMAT,
    JSON,
    MAX_COUNT,
    STATE_KEY,
    VERSION,
    Snapshot,
    checksum,
    digest,
)  # fmt: skip
from energon_lite.core.topology import MAX_STREAMS, RankSlots, Stream
from energon_lite.loader.columns import folded, unfolded
from energon_lite.loader.rank_feed import PassStart
from energon_lite.loader.stats import PassFailures, SavedStats, check_counts

# Levels of stages and restore keys within one another.
_MAX_DEPTH = 300
_FIELDS: dict[str, type] = {
    "num_streams": int, "rank": int, "world_size": int, "pass": int, "base": int, "count": int,
    "steps": int, "failures": list, "ended": bool, "given": list, "items_in_pass": int,
    "config": dict, "streams": dict, "skipped": dict, "stats": dict,
}  # fmt: skip


@dataclass
class Region:
    """Slots from `base` on that ranks of an earlier topology emitted: the first `counts[r]` of r.

    A count of -1 stands for all slots: the rank had reached the end of the pass.
    """

    base: int
    counts: list[int]

    def has(self, slot: int) -> bool:
        """Returns whether a slot was emitted."""
        visit, rank = divmod(slot - self.base, len(self.counts))
        return visit >= 0 and (self.counts[rank] < 0 or visit < self.counts[rank])


@dataclass
class Peers(Region):
    """What all ranks had emitted of a pass when this rank was resumed with them; their states."""

    states: Sequence[dict[str, Any]] = ()


@dataclass
class LoaderPosition:
    """Where a rank of a running loader stands; what it saves and restores.

    Attributes:
        count: visits since the base that are done.
        num_steps: batches emitted since the base, padding batches included.
        peers: the ranks that this one was resumed with; None once it has emitted a batch since.
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
    peers: Peers | None = None

    def is_given(self, slot: int) -> bool:
        """Returns whether another rank emitted a slot before this run was resumed."""
        return bool(self.given) and any(region.has(slot) for region in self.given)

    def all_are_given(self, dataset: SavableDataset[Any]) -> bool:
        """Whether no rank had a batch left in the pass when this rank was resumed.

        Each stream is computed from its furthest snapshot up to its first batch that is left.
        """
        slots, pass_index = self.start.slots, self.start.pass_index
        peers = self.peers or Peers(0, [0])
        for index in range(slots.num_streams):
            run = StreamRun(dataset, Stream(index, slots.num_streams, pass_index), max_skip_rate=1)
            for snapshot in newest_snapshots(peers.states, pass_index, index)[:1]:
                run.restore(snapshot)
            for batch in chain(range(run.num_given), (run.num_given - 1 for _ in run)):
                slot = batch * slots.num_streams + index
                if slot >= slots.base and not (self.is_given(slot) or peers.has(slot)):
                    return False
        return True

    def to_json(
        self, newest: Mapping[int, Snapshot], stats: JSON, config: dict[str, JSON]
    ) -> dict[str, Any]:
        """Returns the state of the rank.

        Args:
            newest: the snapshots of the streams that have emitted a batch here.
            stats: what the sources yielded.
            config: of the pipeline, folded.
        """
        slots, lost = self.start.slots, self.failures
        streams = {i: start.snapshot for i, start in self.start.streams.items() if start.snapshot}
        streams.update(newest)
        return {
            "format": FORMAT,
            "version": VERSION,
            "num_streams": slots.num_streams,
            "rank": slots.rank,
            "world_size": slots.world_size,
            "pass": self.start.pass_index,
            "base": slots.base,
            "count": self.count,
            "steps": self.num_steps,
            "ended": self.ended,
            "given": [vars(region).copy() for region in self.given],
            "items_in_pass": self.items_in_pass,
            "failures": [lost.failed, lost.drawn],
            "skipped": dict(self.skipped),
            "stats": folded(stats),
            "streams": folded({str(i): streams[i].to_json() for i in sorted(streams)}),
            "config": config,
        }


def newest_snapshots(
    states: Sequence[dict[str, Any]], pass_index: int, index: int
) -> list[Snapshot]:
    """Lists where ranks have a stream in a pass, the furthest first."""
    found = [
        Snapshot.from_json(state["streams"][str(index)])
        for state in states
        if str(index) in state["streams"] and state["pass"] == pass_index
    ]
    return sorted(found, key=lambda snapshot: snapshot.count("items"), reverse=True)


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
    error: Exception | None = None
    try:
        found = read_json(state_dict[STATE_KEY], STATE_KEY, _MAX_DEPTH, allow_nan=True)
        if isinstance(found, list) and found and all(isinstance(state, dict) for state in found):
            return found
    except (TypeError, ValueError, AttributeError) as caught:
        error = caught
    raise StateError(
        f"the state's {STATE_KEY!r} is {state_dict[STATE_KEY]!r:.80}, not what state_dict() "
        "returned; it was edited or is corrupt"
    ) from error


def checked_states(states: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the states of ranks, without tables, if each is of this version and unchanged since.

    Raises:
        StateError: A state is not; reports what is missing or wrong.
    """
    for state in states:
        _check_fields(state)
    configs = {digest(s["config"]): s["config"] for s in states if isinstance(s["config"], dict)}
    whole = {name: unfolded(config) for name, config in configs.items()}  # equal ones once
    checked = []
    for state in states:
        name = state["config"] if isinstance(state["config"], str) else digest(state["config"])
        if state.get("checksum") != checksum(state, name):
            raise StateError(
                f"the state of rank {state['rank']} does not have the checksum that it was saved "
                "with: it was edited, or is corrupt. Use another checkpoint"
            )
        if name not in whole:
            raise StateError(
                f"the state of rank {state['rank']} has its configuration in the state of another "
                "rank, which is not in the list; pass the whole list of save_state_global()"
            )
        tables = {table: unfolded(state[table]) for table in ("streams", "stats")}
        checked.append({**state, **tables, "config": whole[name]})
        _check_content(checked[-1])
    return checked


def _check_fields(state: Any) -> None:
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        is_whole = isinstance(state, Mapping) and STATE_KEY in state
        raise StateError(
            "this is what state_dict() returned; pass it to load_state_dict()"
            if is_whole
            else f"{type(state).__name__} is not a loader state of energon_lite "
            "(what save_state_rank() returns)"
        )
    version = state.get("version")
    if version != VERSION or type(version) is not int:
        raise StateError(
            f"the state has format version {version!r}; this version of energon_lite reads version "
            f"{VERSION} only. Resume with the version of energon_lite that saved it"
        )
    for name, kind in _FIELDS.items():
        value: Any = state.get(name)
        if name == "config" and isinstance(value, str):
            continue  # that of another state
        largest = MAX_STREAMS if name in ("num_streams", "world_size") else MAX_COUNT
        is_beyond = kind is int and isinstance(value, int) and not 0 <= value <= largest
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool) or is_beyond:
            limit = f" of 0 to {largest:,}" if kind is int else ""
            raise StateError(f"the state's {name!r} is {value!r:.80}, not {kind.__name__}{limit}")


def _check_content(state: dict[str, Any]) -> None:
    num_streams, streams = state["num_streams"], state["streams"]
    is_whole = (
        num_streams > 0
        and len(state["failures"]) == 2
        and all(map(_is_count, state["failures"]))
        and state["rank"] < state["world_size"]
        and all(map(_is_region, state["given"]))
        and all(map(_is_count, state["skipped"].values()))
        and isinstance(streams, dict)
        and all(_is_stream(index, num_streams) for index in streams)
    )
    if not is_whole:
        raise StateError("the state contradicts itself; it was edited or is corrupt")
    _check_streams(state)
    check_counts(state["stats"])


def _is_count(value: Any, lowest: int = 0) -> bool:
    return type(value) is int and lowest <= value <= MAX_COUNT


def _is_stream(index: Any, num_streams: int) -> bool:
    is_number = isinstance(index, str) and index.isdecimal() and len(index) < 20
    return is_number and int(index) < num_streams


def _is_region(entry: Any) -> bool:
    counts = entry.get("counts") if isinstance(entry, dict) else None
    return (
        isinstance(counts, list)
        and len(counts) > 0
        and _is_count(entry.get("base"))
        and all(_is_count(count, -1) for count in counts)
    )


def _check_streams(state: dict[str, Any]) -> None:
    """Compares the positions of the streams with what this rank, and ranks before it, emitted.

    Raises:
        StateError: A stream is further than any slot that was emitted, or the stream of the last
            slot is not that far.
    """
    num_streams, count = state["num_streams"], state["count"]
    slots = RankSlots(state["base"], state["rank"], state["world_size"], num_streams)
    last_slot = slots.slot(count - 1) if count else state["base"] - 1
    furthest: float = last_slot
    worlds = {slots.world_size, *(len(region["counts"]) for region in state["given"])}
    for region in state["given"]:
        end = region["base"] + max(region["counts"]) * len(region["counts"])
        furthest = max(furthest, float("inf") if -1 in region["counts"] else end)
    # Where ranks share a stream, each is up to one round of all slots ahead of what it emitted.
    furthest += sum(lcm(num_streams, world) for world in worlds if num_streams % world)
    items: dict[int, int] = {}
    for index, stream in state["streams"].items():
        found: Any = stream.get("items") if isinstance(stream, dict) else None
        if not _is_count(found):
            raise StateError(f"the state of stream {index} has items={found!r:.80}, not a count")
        items[int(index)] = found
    ahead = [i for i, number in items.items() if (number - 1) * num_streams + i > furthest]
    behind = count and items.get(last_slot % num_streams, 0) <= last_slot // num_streams
    if ahead or behind:
        index = ahead[0] if ahead else last_slot % num_streams
        raise StateError(
            f"the state of rank {state['rank']} has emitted {count} batches from slot "
            f"{state['base']} on, and stream {index} stands at {items.get(index)} batches, which "
            "contradict each other; it was edited or is corrupt"
        )
