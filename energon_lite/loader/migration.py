"""Going on with an edited blend: which differences are such edits, and what becomes of the state.

Sources are known by their ids. Those that are still there go on where they were, new ones start
fresh, and what is left of removed ones is dropped. Everything else has to be as it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from energon_lite.core.activity import leaves
from energon_lite.core.state import JSON, Snapshot, config_differences

_BLENDS = ("blend", "token_blend")


class Comparison(NamedTuple):
    """How two configurations differ.

    Attributes:
        edits: sources added, removed, weighted anew: what a migration can follow.
        others: all the rest, which it cannot.
    """

    edits: list[str]
    others: list[str]


def compare(saved: Any, here: Any) -> Comparison:
    """Lists the differences of a checkpoint's configuration and this pipeline's."""
    if not isinstance(saved, dict) or not isinstance(here, dict):
        return Comparison([], config_differences(saved, here))
    if _is_blend(saved) or _is_blend(here):
        return _compare_blends(_as_blend(saved, here), _as_blend(here, saved))
    if "stage" in saved and saved.get("stage") == here.get("stage") and "of" in saved:
        own = config_differences(_without(saved, "of"), _without(here, "of"))
        old, new = saved["of"], here.get("of")
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            below = [compare(a, b) for a, b in zip(old, new, strict=True)]
        else:
            below = [compare(old, new)]
        return Comparison(
            [line for found in below for line in found.edits],
            own + [line for found in below for line in found.others],
        )
    if saved.get("stage") == here.get("stage") == "source" and saved.get("name") == here["name"]:
        return _compare_sources(saved, here)
    return Comparison([], config_differences(saved, here))


def _compare_sources(saved: dict[str, Any], here: dict[str, Any]) -> Comparison:
    edits = []
    old, new = saved.get("loss_weight", 1.0), here.get("loss_weight", 1.0)
    if old != new:
        edits.append(f"source {here['name']}: loss_weight {old} is now {new}")
    others = config_differences(_without(saved, "loss_weight"), _without(here, "loss_weight"))
    return Comparison(edits, others)


def _compare_blends(saved: dict[str, Any], here: dict[str, Any]) -> Comparison:
    edits: list[str] = []
    others = config_differences(_without(saved, "of"), _without(here, "of"))
    old, new = _by_name(saved), _by_name(here)
    for name in old:
        if name not in new:
            edits.append(f"source {name}: removed; it stays where it was if it comes back")
    for name, entry in new.items():
        if name not in old:
            edits.append(f"source {name}: added; it starts at its beginning")
            continue
        if old[name]["weight"] != entry["weight"]:
            edits.append(f"source {name}: weight {old[name]['weight']} is now {entry['weight']}")
        below = compare(old[name]["of"], entry["of"])
        edits += below.edits
        others += below.others
    return Comparison(edits, others)


def _is_blend(config: Any) -> bool:
    return isinstance(config, dict) and config.get("stage") == "blend"


def _as_blend(config: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Gives a blend; of something else, the blend of that alone."""
    if _is_blend(config):
        return config
    entry = {"name": _name_below(config), "weight": 1.0, "of": config}
    return {**other, "of": [entry]}


def _name_below(config: Any) -> str:
    while isinstance(config, dict) and "name" not in config:
        config = config.get("of")
    return str(config["name"]) if isinstance(config, dict) else ""


def _by_name(config: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry for entry in config["of"]}


def _without(config: dict[str, Any], key: str) -> dict[str, JSON]:
    return {name: value for name, value in config.items() if name != key}


def migrated(old: Snapshot, fresh: Snapshot, saved: Any, here: Any) -> Snapshot:
    """Brings the state of a stream to an edited pipeline.

    Args:
        old: what was saved.
        fresh: a snapshot of a stream of this pipeline at its start.
        saved: the configuration that `old` was saved with.
        here: the configuration of this pipeline.
    """
    names = {
        source for source in _sources(here) if source is not None
    }
    return _migrated(old, fresh, _branch(saved), _branch(here), names)


def _migrated(old: Snapshot, fresh: Snapshot, saved: Any, here: Any, names: set[str]) -> Snapshot:
    if old.kind in _BLENDS or fresh.kind in _BLENDS:
        return _migrated_blend(old, fresh, saved, here, names)
    if old.kind != fresh.kind or len(old.inner) != len(fresh.inner):
        return old  # it will be refused
    befores = saved["of"] if len(old.inner) > 1 else [saved]
    afters = here["of"] if len(old.inner) > 1 else [here]
    inner = tuple(
        _migrated(a, b, _branch(before), _branch(after), names)
        for a, b, before, after in zip(old.inner, fresh.inner, befores, afters, strict=True)
    )
    return Snapshot(old.kind, _kept_fields(old, names), inner)


def _migrated_blend(
    old: Snapshot, fresh: Snapshot, saved: Any, here: Any, names: set[str]
) -> Snapshot:
    olds = list(old.inner) if old.kind in _BLENDS else [old]
    old_entries = saved["of"] if _is_blend(saved) else [_as_blend(saved, here)["of"][0]]
    if fresh.kind not in _BLENDS:  # one source is left of a blend
        name = _name_below(here)
        index = next((i for i, e in enumerate(old_entries) if e["name"] == name), None)
        return fresh if index is None else olds[index]
    place = {entry["name"]: i for i, entry in enumerate(old_entries)}
    inner = []
    for entry, start in zip(here["of"], fresh.inner, strict=True):
        i = place.get(entry["name"])
        if i is None:
            inner.append(start)
            continue
        before, after = _branch(old_entries[i]["of"]), _branch(entry["of"])
        inner.append(_migrated(olds[i], start, before, after, names))
    fields = dict(fresh.fields)
    if old.kind in _BLENDS:
        fields["draw"] = old.fields.get("draw")
    elif old.kind == "source":
        fields["draw"] = old.fields.get("position")
    if fresh.kind == old.kind == "token_blend":
        fields.update(_token_fields(old, [place.get(e["name"]) for e in here["of"]]))
    return Snapshot(fresh.kind, fields, tuple(inner))


def _token_fields(old: Snapshot, places: list[int | None]) -> dict[str, Any]:
    """Gives debts and pending draws for the children now, `places` being what they were."""
    rows = old.field("debts")
    now = {place: i for i, place in enumerate(places) if place is not None}
    return {
        "debts": tuple((0.0, 0.0, 0.0) if p is None else rows[p] for p in places),
        "pending": tuple(
            (now[row[0]], *row[1:]) for row in old.field("pending") if row[0] in now
        ),
    }


def _kept_fields(old: Snapshot, names: set[str]) -> dict[str, Any]:
    """Gives the fields without held samples of sources that are gone."""
    fields = dict(old.fields)
    if isinstance(fields.get("held"), tuple):
        fields["held"] = _kept(fields["held"], names)
    if "slot" in fields and fields.get("given"):
        # The blend below may take another sample at that draw: it is expanded from its start.
        fields = {"given": 0}
    return fields


def _kept(held: tuple[Any, ...], names: set[str]) -> tuple[Any, ...]:
    kept = []
    for entry in held:
        if entry and isinstance(entry[0], tuple):  # a list of keys
            kept.append(_kept(entry, names))
        elif all(leaf[0] in names for leaf in leaves(entry) if leaf):
            kept.append(entry)
    return tuple(kept)


def _branch(config: Any) -> Any:
    """Goes down to where several datasets lie below one, or to the leaf."""
    while isinstance(config, dict) and not isinstance(config.get("of"), list) and "of" in config:
        config = config["of"]
    return config


def _sources(config: Any) -> list[str | None]:
    """Lists the names of all sources of a configuration."""
    if isinstance(config, list):
        return [name for entry in config for name in _sources(entry)]
    if not isinstance(config, dict):
        return []
    own = [config.get("name")] if config.get("stage") == "source" else []
    return own + _sources(config.get("of"))
