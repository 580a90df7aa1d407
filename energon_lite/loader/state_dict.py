"""The place of a rank as JSON; the states of all ranks as one dict that every trainer can keep.

`torch.distributed.checkpoint` takes nested values apart, and on loading fills only the keys that
the state of a fresh loader has. So there is one key, with a JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from energon_lite.core.errors import StateError
from energon_lite.core.json_text import read_json
from energon_lite.core.state import FORMAT, JSON, STATE_KEY, VERSION, Snapshot
from energon_lite.loader.resume import Place

# Of stages and restore keys within one another.
_MAX_DEPTH = 300


def rank_state(
    place: Place, newest: Mapping[int, Snapshot], stats: JSON, config: dict[str, JSON]
) -> dict[str, Any]:
    """Returns where a rank stands, as plain JSON.

    Args:
        place: of the rank.
        newest: the snapshots of the streams that have given a batch here.
        stats: what the sources gave.
        config: of the pipeline.
    """
    slots = place.start.slots
    snapshots = {
        stream: start.snapshot
        for stream, start in place.start.streams.items()
        if start.snapshot is not None
    }
    snapshots.update(newest)
    # As many as turns, but where turns were passed over, or steps only filled up.
    steps = {"steps": place.num_steps} if place.num_steps != place.count else {}
    lost = place.failures
    failures = {"failures": [lost.failed, lost.drawn]} if lost.drawn or lost.failed else {}
    return {
        "format": FORMAT,
        "version": VERSION,
        "num_streams": slots.num_streams,
        "rank": slots.rank,
        "world_size": slots.world_size,
        "pass": place.start.pass_index,
        "base": slots.base,
        "count": place.count,
        **steps,
        "ended": place.ended,
        "given": [region.to_json() for region in place.given],
        "items_in_pass": place.items_in_pass,
        **failures,
        "skipped": dict(place.skipped),
        "stats": stats,
        "streams": {str(s): snapshots[s].to_json() for s in sorted(snapshots)},
        "config": config,
    }


def as_state_dict(states: Sequence[dict[str, Any]], config: dict[str, JSON]) -> dict[str, str]:
    """Returns the states of all ranks as one leaf.

    Args:
        states: of all ranks, without their configuration.
        config: the configuration that they share.
    """
    return {STATE_KEY: json.dumps({"format": FORMAT, "config": config, "ranks": list(states)})}


def states_of(state_dict: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Returns the states of the ranks in what a trainer kept.

    Args:
        state_dict: what `as_state_dict` returned, or the state of a rank, or a list of either.

    Raises:
        StateError: It is none of these.
    """
    if isinstance(state_dict, (list, tuple)):
        return [state for entry in state_dict for state in states_of(entry)]
    if not isinstance(state_dict, Mapping) or STATE_KEY not in state_dict:
        return [state_dict]  # whether that is the state of a rank shows when it is read
    try:
        found = read_json(state_dict[STATE_KEY], STATE_KEY, _MAX_DEPTH, allow_nan=True)
        return [{**state, "config": found["config"]} for state in found["ranks"]]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise StateError(
            f"the state's {STATE_KEY!r} is {state_dict[STATE_KEY]!r:.80}, not what state_dict() "
            "gave; it was edited or damaged"
        ) from error
