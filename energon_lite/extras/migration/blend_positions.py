"""The positions of the sources of a blend by name, from a snapshot that has only its draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import key_of
from energon_lite.core.state import Names, Snapshot
from energon_lite.core.topology import Stream
from energon_lite.order.blending import BlendOrder
from energon_lite.order.schedules import Weights
from energon_lite.sources.source import SourcePlaces
from energon_lite.stages.blend_refs import checked_place, hash_of

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
