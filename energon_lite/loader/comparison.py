"""Compares a pipeline with that of a checkpoint: which differences are edits of a blend.

Sources are known by their ids. Everything but the blend must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from energon_lite.core.state import config_differences
from energon_lite.loader.count_table import weights_in

# Undecoded pictures are no form: without decoding none is broken, so that other samples fail.
_OF_FORM = re.compile(r"decoder\.image_decode='(?!bytes')\w+' where this pipeline has '(?!bytes')")
BLENDS = ("blend", "token_blend")

Config = dict[str, Any]
# The sources of a blend, and of the blends directly inside it, by name.
_Units = dict[str, Config]


class Comparison:
    """The differences between the configuration of a checkpoint and that of this pipeline.

    Attributes:
        edits: sources added, removed, moved, or of another weight: what a migration can follow.
        forms: pictures that come in another form, such as a tensor: the order is the same.
        others: all other differences.
        partners: of each entry of a blend here that was in the checkpoint, its name there.
        changes_draws: whether an edit changes what is drawn, and not loss weights alone.
    """

    def __init__(self, saved: Any, here: Any) -> None:
        self.edits: list[str] = []
        self.forms: list[str] = []
        self.others: list[str] = []
        self.partners: dict[str, str] = {}
        self.changes_draws = False
        if saved != here:
            self._compare(saved, here)

    def _note(self, saved: Any, here: Any) -> None:
        for line in config_differences(saved, here):
            (self.forms if _OF_FORM.search(line) else self.others).append(line)

    def _edit(self, text: str) -> None:
        self.edits.append(text)
        self.changes_draws = True

    def _compare(self, saved: Any, here: Any, units: tuple[_Units, _Units] | None = None) -> None:
        """Compares both pipelines below one stage.

        Args:
            saved: the configuration of the checkpoint.
            here: that of this pipeline.
            units: of the blend directly around, in the checkpoint and here.
        """
        old, new = _as_blend(saved, here), _as_blend(here, saved)
        if old is not None and new is not None:
            self._compare_blends(old, new, units or (dict(_units(old)), dict(_units(new))))
        elif not isinstance(saved, dict) or not isinstance(here, dict):
            self._note(saved, here)
        elif saved.get("stage") != here.get("stage"):
            self._compare_stages(saved, here)
        elif "of" in saved and "of" in here:
            self._compare_settings(saved, here, "of")
            num_edits = len(self.edits)
            self._compare_below(saved, here)
            if saved["stage"] in ("plan_packs", "plan_batches"):
                # Other samples would share packs, in the middle of a plan.
                found, self.edits[num_edits:] = self.edits[num_edits:], []
                self.others += [f"what is planned from `lengths` changes: {edit}" for edit in found]
        elif saved.get("stage") == "source" and saved.get("name") == here.get("name"):
            weights = saved.get("loss_weight", 1.0), here.get("loss_weight", 1.0)
            if weights[0] != weights[1]:
                self.edits.append(
                    f"source {here['name']}: loss_weight {weights[0]} is now {weights[1]}"
                )
            self._compare_settings(saved, here, "loss_weight")
        else:
            self._note(saved, here)

    def _compare_settings(self, saved: Config, here: Config, but: str) -> None:
        old, new = ({k: config[k] for k in config if k != but} for config in (saved, here))
        self._note(old, new)

    def _compare_below(self, saved: Config, here: Config) -> None:
        old, new = saved["of"], here["of"]
        are_lists = isinstance(old, list) and isinstance(new, list)
        if are_lists and len(old) != len(new):
            self.others.append(
                f"Checkpoint has {len(old)} datasets in its {saved['stage']} where this pipeline "
                f"has {len(new)}: {', '.join(names_of(saved))} and {', '.join(names_of(here))}"
            )
            return
        for a, b in zip(old, new, strict=True) if are_lists else [(old, new)]:
            self._compare(a, b)

    def _compare_stages(self, saved: Config, here: Config) -> None:
        """Names the stages of both, and compares below the first that both have."""
        old, new = list(_chain(saved)), list(_chain(here))
        names = [" of ".join(str(stage.get("stage")) for stage in chain) for chain in (old, new)]
        self.others.append(f"Checkpoint has {names[0]} where this pipeline has {names[1]}")
        shared = ((a, b) for a in old for b in new if a.get("stage") == b.get("stage"))
        if pair := next(shared, None):
            self._compare(*pair)

    def _compare_blends(self, saved: Config, here: Config, units: tuple[_Units, _Units]) -> None:
        self._compare_settings(saved, here, "of")
        pairs = _pairs(saved, here)
        for entry in saved["of"]:
            new = pairs.get(entry["name"])
            if new is None:
                for name, _ in _units(entry):
                    if name not in units[1]:
                        what = "removed; if it comes back, it starts at its beginning"
                        self._edit(f"source {name}: {what}")
                continue
            self.partners[new["name"]] = entry["name"]
            before, after = entry["weight"], new["weight"]
            if before != after and None not in (before, after):
                self._edit(f"source {new['name']}: weight {before} is now {after}")
            self._compare_entries(entry, new, units)
        stayed = [new["name"] for new in pairs.values()]
        for entry in here["of"]:
            if entry["name"] not in stayed:
                self._compare_new(entry, units[0])
        now = [entry["name"] for entry in here["of"] if entry["name"] in stayed]
        if stayed != now or len(saved["of"]) != len(here["of"]):
            self.changes_draws = True
        if stayed != now:
            self.edits.append(
                f"sources stand in another order: {', '.join(stayed)} is now {', '.join(now)}"
            )

    def _compare_entries(
        self, saved: Config, here: Config, units: tuple[_Units, _Units] | None = None
    ) -> None:
        """Compares a dataset of a blend; of a blend by tokens, its stored lengths as well."""
        if "lengths" in saved and "lengths" in here and saved["lengths"] != here["lengths"]:
            self.others.append(
                f"Checkpoint has other stored lengths of {', '.join(names_of(here))} than this "
                "pipeline"
            )
        self._compare(saved["of"], here["of"], units)

    def _compare_new(self, entry: Config, old: _Units) -> None:
        for name, unit in _units(entry):
            if name in old:
                self._edit(f"source {name}: moved to another blend; it resumes there")
                self.partners[name] = name
                self._compare_entries(old[name], unit)
            else:
                self._edit(f"source {name}: added; it starts at its beginning")


def _is_blend(config: Any) -> bool:
    return isinstance(config, dict) and config.get("stage") == "blend"


def _as_blend(config: Any, other: Any) -> Config | None:
    """Returns a blend; if only the other pipeline has one here, a blend of the single source."""
    if _is_blend(config):
        return dict(config)
    names = names_of(config)
    is_single = len(names) == 1 and not isinstance([{}, *_chain(config)][-1].get("of"), list)
    if not is_single or not _is_blend(other):
        return None
    return {**other, "of": [{"name": names[0], "weight": None, "of": config}]}


def _units(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields the entries of a blend, or of an entry's blend, that are no blends; with names."""
    for entry in config["of"] if _is_blend(config) else [config]:
        if _is_blend(entry["of"]):
            yield from _units(entry["of"])
        else:
            yield entry["name"], entry


def _pairs(saved: Config, here: Config) -> dict[str, Config]:
    """Returns the entry here of each saved one: by name; of blends, by the sources in both."""
    free = {entry["name"]: entry for entry in here["of"]}
    found = {old["name"]: free.pop(old["name"], None) for old in saved["of"]}
    for old in saved["of"]:
        names = set(names_of(old["of"]))
        # The number of sources in both; of two equal counts, the one that is a blend itself.
        shared = {
            new["name"]: (len(names & set(other)), len(other))
            for new, other in ((new, names_of(new["of"])) for new in free.values())
            if names & set(other) and max(len(names), len(other)) > 1
        }
        if found[old["name"]] is None and shared:
            found[old["name"]] = free.pop(max(shared, key=lambda name: shared[name]))
    return {name: new for name, new in found.items() if new is not None}


def names_of(config: Any) -> list[str]:
    """Lists the names of all sources of a configuration."""
    return [*weights_in(config)]


def _chain(config: Any) -> Iterator[Config]:
    """Yields the stages from one down to several datasets, or to a leaf."""
    while isinstance(config, dict):
        yield config
        config = config.get("of")
