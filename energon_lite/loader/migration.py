"""Going on with an edited blend: which differences are such edits, and what becomes of the state.

Sources are known by their ids. Those that are still there go on where they were, new ones start at
their beginning, and what is left of removed ones is dropped. Everything else has to be as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress
from typing import Any, NamedTuple

from energon_lite.core.errors import StateError
from energon_lite.core.keys import leaves
from energon_lite.core.state import JSON, Snapshot, config_differences

_BLENDS = ("blend", "token_blend")
# Of a generator hook that stands before an input.
_NO_INPUT = {"given": 0, "slot": 0, "draws": 0, "tokens": 0, "input": ()}

Config = dict[str, Any]
_States = dict[str, Snapshot]


class Comparison(NamedTuple):
    """How two configurations differ.

    Attributes:
        edits: sources added, removed, moved, weighted anew: what a migration can follow.
        others: all the rest, which it cannot.
    """

    edits: list[str]
    others: list[str]


def compare(saved: Any, here: Any) -> Comparison:
    """Lists the differences of a checkpoint's configuration and this pipeline's."""
    found = _Comparer()
    found.compare(saved, here)
    return Comparison(found.edits, found.others)


class _Units(NamedTuple):
    """The sources by themselves of a blend and of those right inside it, before and now."""

    old: dict[str, Config]
    new: dict[str, Config]


class _Comparer:
    def __init__(self) -> None:
        self.edits: list[str] = []
        self.others: list[str] = []

    def compare(self, saved: Any, here: Any, units: _Units | None = None) -> None:
        """Compares what stands at one place of both pipelines.

        Args:
            saved: the configuration of the checkpoint.
            here: that of this pipeline.
            units: of the blend right around this place.
        """
        old, new = _as_blend(saved, here), _as_blend(here, saved)
        if old is not None and new is not None:
            units = units or _Units(dict(_units_of(old)), dict(_units_of(new)))
            self._compare_blends(old, new, units)
        elif not isinstance(saved, dict) or not isinstance(here, dict):
            self.others += config_differences(saved, here)
        elif saved.get("stage") != here.get("stage"):
            self._compare_stages(saved, here)
        elif "of" in saved and "of" in here:
            self.others += config_differences(_without(saved, "of"), _without(here, "of"))
            before = len(self.edits)
            self._compare_below(saved, here)
            if saved["stage"] in ("plan_packs", "plan_batches"):
                # Other samples would share packs, in the middle of a plan.
                found, self.edits[before:] = self.edits[before:], []
                self.others += [f"what is planned from `lengths` changes: {edit}" for edit in found]
        elif saved.get("stage") == "source" and saved.get("name") == here.get("name"):
            self._compare_sources(saved, here)
        else:
            self.others += config_differences(saved, here)

    def _compare_below(self, saved: Config, here: Config) -> None:
        old, new = saved["of"], here["of"]
        if not isinstance(old, list) or not isinstance(new, list):
            self.compare(old, new)
        elif len(old) == len(new):
            for a, b in zip(old, new, strict=True):
                self.compare(a, b)
        else:
            self.others.append(
                f"Checkpoint has {len(old)} datasets in its {saved['stage']} where this pipeline "
                f"has {len(new)}: {', '.join(_names(saved))} and {', '.join(_names(here))}"
            )

    def _compare_stages(self, saved: Config, here: Config) -> None:
        """Reports both chains of stages, and compares them from the first stage that both have."""
        old, new = list(_chain(saved)), list(_chain(here))
        names = [" of ".join(str(stage.get("stage")) for stage in chain) for chain in (old, new)]
        self.others.append(f"Checkpoint has {names[0]} where this pipeline has {names[1]}")
        for a in old:
            for b in new:
                if a.get("stage") == b.get("stage"):
                    self.compare(a, b)
                    return

    def _compare_sources(self, saved: Config, here: Config) -> None:
        old, new = saved.get("loss_weight", 1.0), here.get("loss_weight", 1.0)
        if old != new:
            self.edits.append(f"source {here['name']}: loss_weight {old} is now {new}")
        name = "loss_weight"
        self.others += config_differences(_without(saved, name), _without(here, name))

    def _compare_blends(self, saved: Config, here: Config, units: _Units) -> None:
        self.others += config_differences(_without(saved, "of"), _without(here, "of"))
        pairs = _pairs(saved, here)
        kept = {id(old): new for old, new in pairs}
        for entry in saved["of"]:
            new = kept.get(id(entry))
            if new is None:
                self._gone(entry, units)
                continue
            before, after = entry["weight"], new["weight"]
            if before != after and None not in (before, after):
                self.edits.append(f"source {new['name']}: weight {before} is now {after}")
            self.compare(entry["of"], new["of"], units)
        stayed = {id(new) for _, new in pairs}
        for entry in here["of"]:
            if id(entry) not in stayed:
                self._came(entry, units)
        order = {id(new): i for i, new in enumerate(here["of"])}
        places = [order[id(new)] for _, new in pairs]
        if places != sorted(places):
            new_pairs = sorted(pairs, key=lambda pair: order[id(pair[1])])
            was, now = (", ".join(new["name"] for _, new in p) for p in (pairs, new_pairs))
            self.edits.append(f"sources stand in another order: {was} is now {now}")

    def _gone(self, entry: Config, units: _Units) -> None:
        for name, _ in _units(entry):
            if name not in units.new:
                self.edits.append(
                    f"source {name}: removed; if it comes back, it starts at its beginning"
                )

    def _came(self, entry: Config, units: _Units) -> None:
        for name, unit in _units(entry):
            if name in units.old:
                self.edits.append(f"source {name}: moved to another blend; it goes on there")
                self.compare(units.old[name]["of"], unit["of"])
            else:
                self.edits.append(f"source {name}: added; it starts at its beginning")


def _is_blend(config: Any) -> bool:
    if not isinstance(config, dict) or config.get("stage") != "blend":
        return False
    entries = config.get("of")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and {"name", "weight", "of"} <= set(entry) for entry in entries
    ):
        raise StateError("the state's 'config' has a blend without names, weights and datasets")
    return True


def _as_blend(config: Any, other: Any) -> Config | None:
    """Returns a blend; where the other pipeline blends a single source, the blend of it alone."""
    if _is_blend(config):
        return dict(config)
    names = _names(config)
    if not _is_blend(other) or len(names) != 1 or isinstance(_end(config).get("of"), list):
        return None
    return {**other, "of": [{"name": names[0], "weight": None, "of": config}]}


def _units(entry: Config) -> Iterator[tuple[str, Config]]:
    """Yields the entries that are no blends themselves, of a blend's entry, with their names."""
    if _is_blend(entry["of"]):
        yield from _units_of(entry["of"])
    else:
        yield entry["name"], entry


def _units_of(blend: Config) -> Iterator[tuple[str, Config]]:
    """Yields those of all entries of a blend."""
    for entry in blend["of"]:
        yield from _units(entry)


def _pairs(saved: Config, here: Config) -> list[tuple[Config, Config]]:
    """Finds which entries of two blends are the same: by name; of blends, by sources in both."""
    free = {entry["name"]: entry for entry in here["of"]}
    found = {old["name"]: free.pop(old["name"], None) for old in saved["of"]}
    for old in saved["of"]:
        if found[old["name"]] is None:
            names = set(_names(old["of"]))
            # How many sources are in both; of two alike, the one that is a blend itself.
            shared = {
                new["name"]: (len(names & set(other)), len(other))
                for new, other in ((new, _names(new["of"])) for new in free.values())
                if names & set(other) and max(len(names), len(other)) > 1
            }
            if shared:
                found[old["name"]] = free.pop(max(shared, key=lambda name: shared[name]))
    return [(old, new) for old in saved["of"] if (new := found[old["name"]]) is not None]


def _names(config: Any) -> list[str]:
    """Lists the names of all sources of a configuration."""
    if isinstance(config, list):
        return [name for entry in config for name in _names(entry)]
    if not isinstance(config, dict):
        return []
    own = [str(config["name"])] if config.get("stage") == "source" and "name" in config else []
    return own + _names(config.get("of"))


def _chain(config: Config) -> Iterator[Config]:
    """Yields the stages from one down to where several datasets lie below, or to the leaf."""
    while True:
        yield config
        below = config.get("of")
        if not isinstance(below, dict):
            return
        config = below


def _end(config: Any) -> Config:
    """Returns the last of those stages."""
    return list(_chain(config))[-1] if isinstance(config, dict) else {}


def _without(config: Config, key: str) -> dict[str, JSON]:
    return {name: value for name, value in config.items() if name != key}


class Migration:
    """Moves the states of streams into the shape of an edited pipeline.

    Args:
        saved: the configuration that they were saved with.
        here: the configuration of this pipeline.
        fresh: a snapshot of a stream of this pipeline at its start.

    Attributes:
        expanded: streams that stood inside a sample of which a hook makes several, and which
            cannot be made again.
    """

    def __init__(self, saved: Any, here: Any, fresh: Snapshot) -> None:
        self.expanded: set[str] = set()
        self._saved = saved
        self._here = here
        self._fresh = fresh
        self._names = set(_names(here))
        self._same_draws = _without_loss_weights(saved) == _without_loss_weights(here)
        self._stream = ""

    def stream(self, index: str, old: Snapshot) -> Snapshot:
        """Returns the state of a stream, as this pipeline can restore it."""
        if self._same_draws:
            return old
        self._stream = index
        return self._bring(old, self._fresh, self._saved, self._here)

    def _bring(
        self, old: Snapshot, fresh: Snapshot, saved: Any, here: Any, units: _States | None = None
    ) -> Snapshot:
        """Migrates what stands at one place of both pipelines.

        Args:
            old: what was saved.
            fresh: what this pipeline has at its start.
            saved: the configuration of the checkpoint.
            here: that of this pipeline.
            units: the states of the single sources of the blend right around this place.
        """
        if old.kind in _BLENDS or fresh.kind in _BLENDS:
            was, now = _blend_at(old, _end(saved)), _blend_at(fresh, _end(here))
            return self._bring_blend(old, fresh, was, now, units)
        if old.kind != fresh.kind or len(old.inner) != len(fresh.inner):
            return old  # it will be refused
        befores, afters = [saved] * len(old.inner), [here] * len(old.inner)
        if old.kind == "concat":
            befores, afters = _end(saved)["of"], _end(here)["of"]
            old.expect("concat", len(befores))
        below = tuple(
            self._bring(*four) for four in zip(old.inner, fresh.inner, befores, afters, strict=True)
        )
        return Snapshot(old.kind, self._kept_fields(old), below)

    def _bring_blend(
        self, old: Snapshot, fresh: Snapshot, saved: Config, here: Config, units: _States | None
    ) -> Snapshot:
        olds, starts = _inner(old, saved), _inner(fresh, here)
        units = units or dict(_states(old, saved))
        partner = {id(new): entry for entry, new in _pairs(saved, here)}
        places = {id(entry): i for i, entry in enumerate(saved["of"])}
        inner = []
        rows: list[int | None] = []
        for entry, start in zip(here["of"], starts, strict=True):
            before = partner.get(id(entry))
            if before is None:
                rows.append(None)
                inner.append(_moved(entry, start, units))
                continue
            place = places[id(before)]
            rows.append(place)
            has_blend = any(_is_blend(_end(config)) for config in (before["of"], entry["of"]))
            inner.append(
                self._bring(olds[place], start, before["of"], entry["of"], units)
                if has_blend
                else olds[place]  # whatever stands in it goes on as it is
            )
        if fresh.kind not in _BLENDS:
            return inner[0]
        fields = dict(fresh.fields)
        # A blend of one source does not count its draws.
        fields["draw"] = old.field("draw") if len(saved["of"]) > 1 else _draws_below(old)
        if fresh.kind == old.kind == "token_blend":
            fields.update(_token_fields(old, rows))
        return Snapshot(fresh.kind, fields, tuple(inner))

    def _kept_fields(self, old: Snapshot) -> dict[str, Any]:
        """Returns the fields without held samples of sources that are gone."""
        fields = without_sources(old, self._names)
        if "slot" in fields and fields.get("given") and not fields.get("input"):
            # The blend below may take another sample at that draw: it is expanded from its start.
            fields = dict(_NO_INPUT)
            self.expanded.add(self._stream)
        return fields


def _without_loss_weights(config: Any) -> Any:
    if isinstance(config, list):
        return [_without_loss_weights(entry) for entry in config]
    if not isinstance(config, dict):
        return config
    return {k: _without_loss_weights(v) for k, v in config.items() if k != "loss_weight"}


def _blend_at(snapshot: Snapshot, config: Config) -> Config:
    """Returns the configuration of a blend; of a single source, that of the blend of it alone."""
    if snapshot.kind in _BLENDS:
        return config
    return {"of": [{"name": next(iter(_names(config)), ""), "weight": None, "of": config}]}


def _inner(snapshot: Snapshot, blend: Config) -> tuple[Snapshot, ...]:
    if snapshot.kind not in _BLENDS and not _is_blend(blend):
        return (snapshot,)
    kind = snapshot.kind if snapshot.kind in _BLENDS else "blend"
    return snapshot.expect(kind, len(blend["of"]) if _is_blend(blend) else 0).inner


def _states(old: Snapshot, saved: Config) -> Iterator[tuple[str, Snapshot]]:
    """Yields the states of the single sources of a blend, and of the blends right inside it."""
    for inner, entry in zip(_inner(old, saved), saved["of"], strict=True):
        if _is_blend(entry["of"]):
            yield from _states(inner, entry["of"])
        else:
            yield entry["name"], inner


def _moved(entry: Config, fresh: Snapshot, units: _States) -> Snapshot:
    """Returns an entry that is new in its blend: at its start, or as it was elsewhere."""
    if not _is_blend(entry["of"]):
        return units.get(entry["name"], fresh)
    inner = zip(entry["of"]["of"], fresh.inner, strict=True)
    return Snapshot(fresh.kind, fresh.fields, tuple(_moved(*pair, units) for pair in inner))


def _draws_below(old: Snapshot) -> int:
    """Counts the draws of a single source's stream."""
    while old.inner:
        old = old.inner[0]
    return old.count("position")


def _token_fields(old: Snapshot, places: list[int | None]) -> dict[str, Any]:
    """Returns debts and pending draws for the children now, `places` being what they were."""
    rows, pending = old.field("debts"), old.field("pending")
    if not all(
        isinstance(table, tuple) and all(isinstance(row, tuple) and row for row in table)
        for table in (rows, pending)
    ) or len(rows) != len(old.inner):
        raise StateError(f"The checkpoint's token blend has debts={rows!r:.80}; it was damaged.")
    now = {place: i for i, place in enumerate(places) if place is not None}
    return {
        "debts": tuple((0.0, 0.0, 0.0) if p is None else rows[p] for p in places),
        "pending": tuple((now[row[0]], *row[1:]) for row in pending if row[0] in now),
        "measured": old.field("measured"),
    }


def without_sources(snapshot: Snapshot, names: set[str]) -> dict[str, Any]:
    """Returns the fields of a stage's snapshot, without samples of other sources than `names`.

    Raises:
        StateError: A field is damaged.
    """
    fields = dict(snapshot.fields)
    try:
        if "keys" in fields:  # of a stage that buffers samples, and their rows
            pairs = zip(fields["keys"], fields["rows"], strict=True)
            left = [(_left_of(key, names), row) for key, row in pairs]
            kept = [(key, row) for key, row in left if key is not None]
            fields.update(keys=tuple(k for k, _ in kept), rows=tuple(row for _, row in kept))
            return fields
        if fields.get("input") and not _is_there(fields["input"], names):
            return dict(_NO_INPUT)  # what a hook was making of it is gone with its source
        if isinstance(fields.get("held"), tuple):
            fields["held"] = _kept(fields["held"], names)
        if snapshot.kind == "bucket_batch":
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
