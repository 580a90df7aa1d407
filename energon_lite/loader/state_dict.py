"""The states of all ranks as one dict that every trainer can keep, and back.

`torch.distributed.checkpoint` takes nested values apart, and on loading fills only the keys that
the state of a fresh loader has. So there is one key, with a JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from energon_lite.core.errors import StateError
from energon_lite.core.state import FORMAT, JSON

KEY = "loader_state"


def as_state_dict(states: Sequence[dict[str, Any]], config: dict[str, JSON]) -> dict[str, str]:
    """Returns the states of all ranks as one leaf.

    Args:
        states: of all ranks, without their configuration.
        config: the configuration that they share.
    """
    return {KEY: json.dumps({"format": FORMAT, "config": config, "ranks": list(states)})}


def states_of(state_dict: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Returns the states of the ranks in what a trainer kept.

    Args:
        state_dict: what `as_state_dict` returned, or the state of a rank, or a list of either.

    Raises:
        StateError: It is none of these.
    """
    if isinstance(state_dict, (list, tuple)):
        return [state for entry in state_dict for state in states_of(entry)]
    if not isinstance(state_dict, Mapping) or KEY not in state_dict:
        return [state_dict]  # whether that is the state of a rank shows when it is read
    try:
        found = json.loads(state_dict[KEY])
        return [{**state, "config": found["config"]} for state in found["ranks"]]
    except (TypeError, ValueError, KeyError) as error:
        raise StateError(
            f"the state's {KEY!r} is {state_dict[KEY]!r:.80}, not what state_dict() gave; it was "
            "edited or damaged"
        ) from error
