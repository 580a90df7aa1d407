"""Brings the states of a run into the form of a pipeline whose blend was edited.

Sources that are still there resume where they were, new ones start at their beginning, and what is
left of removed ones is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from energon_lite.core.errors import StateError
from energon_lite.core.keys import leaves
from energon_lite.core.state import Snapshot
from energon_lite.extras.migration.blend_positions import back, blends_in, by_name
from energon_lite.extras.migration.comparison import BLENDS, Comparison, names_of

# The snapshots below a blend, by name; of a blend of one source, that of the source.
_Named = dict[str, Snapshot]


class Migration:
    """Brings the snapshots of streams into the form of an edited pipeline.

    Args:
        comparison: of both configurations.
        saved: the configuration of the checkpoint.
        here: that of this pipeline.
        fresh: a snapshot of a stream of this pipeline at its start.
    """

    def __init__(self, comparison: Comparison, saved: Any, here: Any, fresh: Snapshot) -> None:
        self._comparison = comparison
        self._names = set(names_of(here))
        self._blends = dict(blends_in(saved))
        self._fresh = by_name(fresh, dict(blends_in(here)))
        # Streams that stood inside a sample that a hook expands into several, and that cannot be
        # re-created.
        self._expanded: set[int] = set()

    @property
    def notes(self) -> list[str]:
        """Lists what of the streams that were migrated comes again."""
        if not self._expanded:
            return []
        return [
            f"{len(self._expanded)} streams of this rank stood inside a sample that a hook expands "
            "into several, and that cannot be re-created: it is expanded from its start, so what "
            "it yielded so far comes again. Mark the hooks before it @stateless to avoid that"
        ]

    def stream(self, index: int, old: Snapshot) -> Snapshot:
        """Returns the snapshot of a stream, as this pipeline can restore it.

        Raises:
            StateError: It is corrupt.
        """
        self._stream = index
        return back(self._bring(by_name(old, self._blends), self._fresh))

    def _bring(
        self, old: Snapshot | None, fresh: Snapshot, around: _Named | None = None
    ) -> Snapshot:
        """Migrates the snapshot of a stage.

        Args:
            old: what was saved; None for what is new in a blend.
            fresh: what this pipeline has at its start.
            around: the snapshots of the blend directly around.
        """
        is_blend = fresh.kind in BLENDS
        if old is None:
            return self._bring_blend(None, fresh, around or {}) if is_blend else fresh
        if is_blend or old.kind in BLENDS:
            named = around or dict(_snapshots_by_name(old))
            if is_blend:
                return self._bring_blend(old, fresh, named)
            return self._bring_entry(_source_name(fresh), fresh, named)
        # Other kinds are refused by the cursors; what has no blend resumes as it is.
        is_same = old.kind == fresh.kind and len(old.inner) == len(fresh.inner)
        if not is_same or not (_has_blend(old) or _has_blend(fresh)):
            return old
        below = zip(old.below(fresh.names) if fresh.names else old.inner, fresh.inner, strict=True)
        inner = tuple(self._bring(*pair) for pair in below)
        return Snapshot(old.kind, self._kept_fields(old, fresh), inner, fresh.names)

    def _bring_blend(self, old: Snapshot | None, fresh: Snapshot, named: _Named) -> Snapshot:
        """Takes each snapshot by name; if there is none, the fresh one."""
        entries = zip(fresh.names, fresh.inner, strict=True)
        inner = tuple(self._bring_entry(name, start, named) for name, start in entries)
        fields = dict(fresh.fields)
        if old is not None:
            # A blend of one source does not count its draws.
            is_counting = old.kind in BLENDS and len(old.inner) > 1
            fields["draw"] = old.field("draw") if is_counting else _leaf_of(old).count("position")
            if fresh.kind == old.kind == "token_blend":
                partners = self._comparison.partners
                old_names = [partners.get(name, "") for name in fresh.names]
                fields.update(_token_fields(old, old_names))
        return Snapshot(fresh.kind, fields, inner, fresh.names)

    def _bring_entry(self, name: str, fresh: Snapshot, named: _Named) -> Snapshot:
        partner = self._comparison.partners.get(name, "")
        if partner and partner not in named:
            raise StateError(
                f"The checkpoint's blend lacks the dataset {partner!r}; it is corrupt."
            )
        return self._bring(named.get(partner), fresh, named)

    def _kept_fields(self, old: Snapshot, fresh: Snapshot) -> dict[str, Any]:
        """Returns the fields without buffered samples of sources that were removed."""
        fields = dict(old.fields)
        if "keys" in fields:  # of a stage that buffers samples, and their rows
            left = [_left_of(key, self._names) for key in fields["keys"]]
            pairs = zip(left, fields["rows"], strict=True)
            kept = [(key, row) for key, row in pairs if key is not None]
            fields.update(keys=tuple(k for k, _ in kept), rows=tuple(row for _, row in kept))
        elif fields.get("input"):
            # Without its source, what a hook makes of it is removed, too.
            return fields if _is_there(fields["input"], self._names) else fresh.fields
        elif "slot" in fields and fields.get("done"):
            # The blend below may take another sample at that draw: it is expanded from its start.
            self._expanded.add(self._stream)
            return fresh.fields
        return fields


def _snapshots_by_name(snapshot: Snapshot) -> Iterator[tuple[str, Snapshot]]:
    """Yields the snapshots below a blend and the blends in it; a single source's own."""
    if snapshot.kind not in BLENDS:
        yield _source_name(snapshot), snapshot
        return
    for name, inner in zip(snapshot.names, snapshot.inner, strict=True):
        yield name, inner
        if inner.kind in BLENDS:
            yield from _snapshots_by_name(inner)


def _has_blend(snapshot: Snapshot) -> bool:
    return snapshot.kind in BLENDS or any(map(_has_blend, snapshot.inner))


def _leaf_of(snapshot: Snapshot) -> Snapshot:
    while snapshot.inner:
        snapshot = snapshot.inner[0]
    return snapshot


def _source_name(snapshot: Snapshot) -> str:
    return str(_leaf_of(snapshot).fields.get("name"))


def _token_fields(old: Snapshot, old_names: list[str]) -> dict[str, Any]:
    """Returns debts and pending draws for the children now, which had these names."""
    debts = dict(zip(old.names, old.field("debts"), strict=True))
    now = {old.names.index(name): i for i, name in enumerate(old_names) if name in debts}
    pending = old.field("pending")
    return {
        "debts": tuple(debts.get(name, (0.0, 0.0, 0.0)) for name in old_names),
        "pending": tuple((now[row[0]], *row[1:]) for row in pending if row[0] in now),
        "measured": old.field("measured"),
    }


def _left_of(key: Any, names: set[str]) -> Any:
    """Returns what is left of a buffered restore key; of a pack some of its samples, or None."""
    if _is_there(key, names):
        return key
    if key[0] != "pack" or len(key) < 3 or not isinstance(key[2], tuple):
        return None
    members = [member for member in key[2:] if _is_there(member, names)]
    return (*key[:2], *members) if members else None


def _is_there(key: Any, names: set[str]) -> bool:
    return all(leaf[0] in names for leaf in leaves(key) if leaf)
