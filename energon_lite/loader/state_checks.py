"""What the state of a rank has to be, before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any

from energon_lite.core.errors import StateError
from energon_lite.core.state import FORMAT, JSON, MAX_COUNT, STATE_KEY, VERSION, checksum, digest
from energon_lite.core.topology import MAX_STREAMS, RankSlots
from energon_lite.loader.stats import check_counts

_FIELDS: dict[str, type] = {
    "num_streams": int, "rank": int, "world_size": int, "pass": int, "base": int, "count": int,
    "ended": bool, "given": list, "items_in_pass": int, "config": dict, "streams": dict,
    "skipped": dict, "stats": dict,
}  # fmt: skip
# States of these versions have no checksum.
_UNSIGNED = (1, 2)


def checked_states(states: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the states of ranks, if each is one of this format and as it was saved.

    Raises:
        StateError: One is not; says what is missing or wrong.
    """
    checked: list[dict[str, Any]] = []
    digests: list[tuple[Any, str]] = []
    for state in states:
        state = _checked(state)
        if state["version"] not in _UNSIGNED:
            config = state["config"]
            found = next((name for other, name in digests if other == config), None)
            if found is None:
                found = digest(config)
                digests.append((config, found))
            if state.get("checksum") != checksum(state, found):
                raise StateError(
                    f"the state of rank {state['rank']} does not have the checksum that it was "
                    "saved with: it was edited, or damaged on its way. Use another checkpoint"
                )
        checked.append(from_version_1(state) if state["version"] == 1 else state)
    return checked


def _checked(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        is_whole = isinstance(state, Mapping) and STATE_KEY in state
        raise StateError(
            "this is what state_dict() returned; give it to load_state_dict()"
            if is_whole
            else f"{type(state).__name__} is not a loader state of energon_lite "
            "(what save_state_rank() gives)"
        )
    version = state.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise StateError(
            f"the state has format version {version!r}; this version of energon_lite "
            f"reads versions 1 to {VERSION}"
        )
    for name, kind in _FIELDS.items():
        value: Any = state.get(name)
        if name == "stats" and version == 1:
            continue
        largest = MAX_STREAMS if name in ("num_streams", "world_size") else MAX_COUNT
        is_beyond = kind is int and isinstance(value, int) and not 0 <= value <= largest
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool) or is_beyond:
            limit = f" of 0 to {largest:,}" if kind is int else ""
            raise StateError(f"the state's {name!r} is {value!r:.80}, not {kind.__name__}{limit}")
    num_streams = state["num_streams"]
    is_whole = (
        num_streams > 0
        and _is_count(state.get("steps", 0))
        and _are_counts(state.get("failures", [0, 0]))
        and state["rank"] < state["world_size"]
        and all(_is_region(entry) for entry in state["given"])
        and all(_is_count(number) for number in state["skipped"].values())
        and all(_is_stream(index, num_streams) for index in state["streams"])
    )
    if not is_whole:
        raise StateError("the state contradicts itself; it was edited or damaged")
    _check_streams(state)
    if version > 1:
        check_counts(state["stats"])
    return dict(state)


def _is_count(value: Any, lowest: int = 0) -> bool:
    return type(value) is int and lowest <= value <= MAX_COUNT


def _are_counts(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair))


def _is_stream(index: Any, num_streams: int) -> bool:
    is_number = isinstance(index, str) and index.isdecimal() and len(index) < 20
    return is_number and int(index) < num_streams


def _is_region(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and _is_count(entry.get("base"))
        and isinstance(entry.get("counts"), list)
        and len(entry["counts"]) > 0
        and all(_is_count(count, -1) for count in entry["counts"])
    )


def _check_streams(state: dict[str, Any]) -> None:
    """Compares how far the streams are with what the rank, and others before it, gave.

    Raises:
        StateError: A stream is further than any slot that was given, or the one of the last slot
            is not that far.
    """
    num_streams, count = state["num_streams"], state["count"]
    slots = RankSlots(state["base"], state["rank"], state["world_size"], num_streams)
    last_slot = slots.slot(count - 1) if count else state["base"] - 1
    furthest: float = last_slot
    worlds = {slots.world_size, *(len(region["counts"]) for region in state["given"])}
    for region in state["given"]:
        end = region["base"] + max(region["counts"]) * len(region["counts"])
        furthest = max(furthest, float("inf") if -1 in region["counts"] else end)
    # Where ranks share a stream, each is up to one round of all slots ahead of what it gave.
    furthest += sum(lcm(num_streams, world) for world in worlds if num_streams % world)
    items: dict[int, int] = {}
    for index, stream in state["streams"].items():
        found: Any = stream.get("items") if isinstance(stream, dict) else None
        if not _is_count(found):
            raise StateError(f"the state of stream {index} has items={found!r:.80}, no count")
        items[int(index)] = found
    ahead = [
        index for index, given in items.items() if (given - 1) * num_streams + index > furthest
    ]
    behind = count and items.get(last_slot % num_streams, 0) <= last_slot // num_streams
    if ahead or behind:
        index = ahead[0] if ahead else last_slot % num_streams
        raise StateError(
            f"the state of rank {state['rank']} has given {count} batches from slot "
            f"{state['base']} on, and stream {index} stands at {items.get(index)} batches, which "
            "does not go together; it was edited or damaged"
        )


def from_version_1(state: dict[str, Any]) -> dict[str, Any]:
    """Adds what version 1 did not say; it knew one source only, whose position counts its draws."""

    def with_draws(stage: Any) -> Any:
        if not isinstance(stage, dict):
            return stage
        inner = [with_draws(entry) for entry in stage.get("inner", ())]
        stage = {**stage, "inner": inner} if inner else stage
        if stage.get("stage") == "stream" or "slot" in stage:
            source = stage
            while source.get("inner"):
                source = source["inner"][0]
            stage["draws"] = source.get("position")
        return stage

    streams = {index: with_draws(stream) for index, stream in state["streams"].items()}
    stats: dict[str, JSON] = {"counted": {}, "asked": {}}
    return {**state, "version": VERSION, "streams": streams, "stats": stats}
