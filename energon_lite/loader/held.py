"""The samples that a state holds back, without those of sources that are gone."""

from __future__ import annotations

from itertools import compress
from typing import Any

from energon_lite.core.errors import StateError
from energon_lite.core.state import Snapshot
from energon_lite.core.stream_context import leaves


def without_sources(snapshot: Snapshot, names: set[str]) -> dict[str, Any]:
    """Returns the fields of a stage's snapshot, without samples of other sources than `names`.

    Raises:
        StateError: A field is damaged.
    """
    fields = dict(snapshot.fields)
    try:
        if snapshot.kind == "balance_packs":
            fields.update(_kept_packs(snapshot, names))
            return fields
        if fields.get("input") and not _is_there(fields["input"], names):
            return {"given": 0}  # what a hook was making of it is gone with its source
        for name in ("held", "packs"):
            if isinstance(fields.get(name), tuple):
                fields[name] = _kept(fields[name], names)
        if snapshot.kind in ("pack", "bucket_batch"):
            groups = snapshot.field("groups")
            fields["groups"] = tuple(_kept_group(*group, names=names) for group in groups)
        if snapshot.kind == "modality_batch":
            fields["groups"] = tuple(
                (*_kept_group(counts, keys, rows, names=names), _kept(given, names))
                for counts, keys, rows, given in snapshot.field("groups")
            )
    except (TypeError, ValueError, IndexError) as error:
        raise StateError(f"The checkpoint's stage {snapshot.kind!r} is damaged: {error}") from error
    return fields


def _kept(held: tuple[Any, ...], names: set[str]) -> tuple[Any, ...]:
    """Returns the entries that stay; each is a restore key, or a list of such."""
    entries = [_kept(e, names) if e and isinstance(e[0], tuple) else e for e in held]
    return tuple(compress(entries, [_is_there(entry, names) for entry in entries]))


def _kept_group(name: Any, keys: Any, rows: Any, *totals: Any, names: set[str]) -> tuple[Any, ...]:
    is_there = [_is_there(key, names) for key in keys]
    return (name, tuple(compress(keys, is_there)), tuple(compress(rows, is_there)), *totals)


def _kept_packs(snapshot: Snapshot, names: set[str]) -> dict[str, Any]:
    """Returns packs that wait, with what stays of each; those of which nothing does are gone."""
    held, rows, next_number = [], [], snapshot.count("first")
    for key, (number, place, cost) in zip(
        snapshot.field("held"), snapshot.field("rows"), strict=True
    ):
        members = [member for member in key[2:] if _is_there(member, names)]
        if not members:
            continue
        is_waiting = place < 0  # for its window; such packs are numbered without a gap
        rows.append((next_number if is_waiting else number, place, cost))
        next_number += is_waiting
        held.append((*key[:2], *members))
    return {"held": tuple(held), "rows": tuple(rows)}


def _is_there(key: Any, names: set[str]) -> bool:
    return all(leaf[0] in names for leaf in leaves(key) if leaf)
