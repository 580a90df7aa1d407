"""What the state of a blend of sources holds, and the positions of these sources by name.

Where weights are constant and the blend is exact, the position of a source is the number of its
draws, which follows from the number of the next draw. So a state has only how far a source is ahead
of its draws, and nothing where none is. With schedules, and in mode "random", it has the positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import StateError
from energon_lite.core.seeds import key_of
from energon_lite.core.state import COLUMN, COUNT, FLAG, TEXT, Names, Snapshot
from energon_lite.core.topology import Stream
from energon_lite.order.blending import BlendOrder
from energon_lite.order.schedules import Weights
from energon_lite.sources.source import SourcePlaces

_STATE = {"draw": COUNT, "ahead": COLUMN, "counted": FLAG, "order": TEXT, "stream": COLUMN}


def hash_of(key: int, names: Names) -> str:
    """Returns what tells a blend of these sources, with this key, from others in a state."""
    return f"{key_of(key, names.text) >> 96:08x}"


def checked_place(snapshot: Snapshot, of: str, num_sources: int) -> dict[str, Any]:
    """Returns the fields of a snapshot of a blend of K sources.

    `ahead`, shape (K,), is by how much sources are ahead of their draws, if these are `counted`;
    else it is their positions.

    Raises:
        StateError: The snapshot is not of the blend with the hash `of`.
    """
    fields = snapshot.expect("blend", 0).checked(_STATE)
    saved, ahead = fields["ahead"], np.zeros(num_sources, np.int64)
    if fields["order"] != of or len(saved) not in (0, num_sources):
        raise StateError(
            "The checkpoint has the state of a blend of other sources, or with another seed, than "
            f"the {num_sources} sources of this pipeline. Build the pipeline as it was when the "
            "state was saved."
        )
    ahead[: len(saved)] = saved
    return {**fields, "ahead": ahead}


# The names of sources and the order of the draws in a stream, by the hash of a blend.
Blends = Mapping[str, tuple[Names, Sequence[Any], str, int]]


def by_name(snapshot: Snapshot, blends: Blends) -> Snapshot:
    """Returns a snapshot in which blends of sources have snapshots of these, by name.

    Args:
        snapshot: of a pipeline.
        blends: what `blends_in` yields of its configuration.

    Raises:
        StateError: A blend is not among them.
    """
    if "ahead" not in snapshot.fields:
        inner = tuple(by_name(below, blends) for below in snapshot.inner)
        return dataclasses.replace(snapshot, inner=inner)
    of = snapshot.field("order")
    names, rows, mode, key = blends.get(of, (Names(()), [], "", 0))
    place = checked_place(snapshot, of if names else "", len(names))
    positions: Int64Array = place["ahead"]
    if place["counted"]:
        order = BlendOrder(_weights_of(rows), mode, key, Stream(*place["stream"]))
        positions = positions + order.counts(place["draw"])
    return dataclasses.replace(snapshot, inner=SourcePlaces(names, positions), names=names)


def back(snapshot: Snapshot) -> Snapshot:
    """Returns a snapshot as it is restored, of one by name."""
    if "ahead" not in snapshot.fields:
        return dataclasses.replace(snapshot, inner=tuple(map(back, snapshot.inner)))
    positions = tuple(inner.count("position") for inner in snapshot.inner)
    return Snapshot("blend", {**snapshot.fields, "ahead": positions, "counted": False})


def blends_in(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields hash, names, weights, mode and key of the blends of sources in a configuration."""
    for below in config if isinstance(config, list) else ():
        yield from blends_in(below)
    if isinstance(config, dict):
        if config.get("stage") == "blend":
            names = Names(entry["name"] for entry in config["of"])
            key = key_of("blend", config["seed"], 1)
            weights = [entry["weight"] for entry in config["of"]]
            yield hash_of(key, names), (names, weights, config["blend_mode"], key)
        yield from blends_in(config.get("of"))


def _weights_of(rows: Sequence[Any]) -> Weights:
    """Returns the constant weights of which `leaf_weights` returned the rows."""
    entries: list[Any] = []
    parts = [row if isinstance(row, list) else [row] for row in rows]
    for above, group in groupby(parts, lambda row: row[:-1][:1]):
        if above:
            entries.append((above[0][1], _weights_of([row[1:] for row in group])))
        else:
            entries += [row[0] for row in group]
    return Weights(entries)
