"""Compares a pipeline with that of a checkpoint: which differences are edits of a blend.

Sources are known by their ids. Everything but the blend must be equal.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from energon_lite.core.errors import StateError
from energon_lite.core.state import config_differences
from energon_lite.loader.count_table import weights_in

logger = logging.getLogger(__name__)

# Undecoded pictures are no form: without decoding none is broken, so that other samples fail.
_OF_FORM = re.compile(r"decoder\.image_decode='(?!bytes')\w+' where this pipeline has '(?!bytes')")
BLENDS = ("blend", "token_blend")
# What follows from the data of a source, where the user did not set it; the last is a digest.
_OF_DATA = "samples", "data", "max_samples_per_sequence", "content"
_RESTORE = "Shards may have been removed: restore them, or begin a new run"
_ADDED = (
    "If shards were added, leave those of the checkpoint in this split part, put the new shards "
    "into another part or folder, and blend it in as another source (migrate=True)"
)

Config = dict[str, Any]
# The sources of a blend, and of the blends directly inside it, by name.
_Units = dict[str, Config]


class Comparison:
    """The differences between the configuration of a checkpoint and that of this pipeline.

    Attributes:
        edits: sources added, removed, moved, or of another weight, and other batch sizes: what a
            migration can follow.
        forms: pictures that come in another form, such as a tensor: the order is the same.
        data: sources of other data, each with what to do.
        others: all other differences.
        partners: of each entry of a blend here that was in the checkpoint, its name there.
        changes_draws: whether an edit changes what is drawn, and not loss weights alone.
        changes_batches: whether an edit changes the size of batches.
    """

    def __init__(self, saved: Any, here: Any) -> None:
        self.edits: list[str] = []
        self.forms: list[str] = []
        self.data: list[str] = []
        self.others: list[str] = []
        self.partners: dict[str, str] = {}
        self.changes_draws = self.changes_batches = False
        if saved != here:
            self._compare(saved, here)

    def check(self, migrate: bool) -> None:
        """Refuses differences that are more than edits, and edits if they are not allowed.

        Raises:
            StateError: With every difference.
        """
        if self.others or self.data:
            lines = [*self.data, *self.others, *self.edits]
            if self.others:
                lines.append("Build the pipeline with the settings that it was saved with.")
            raise StateError("\n".join(lines))
        if self.edits and not migrate:
            raise StateError(
                "\n".join(self.edits) + "\nRestore with migrate=True, also an argument of "
                "get_savable_loader, to resume with what changed; or build the pipeline as it was."
            )
        for form in dict.fromkeys(self.forms):
            logger.warning("Resumed with pictures in another form: %s", form)

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
            sizes = saved.get("batch_size"), here.get("batch_size")
            if saved["stage"] == "batch" and sizes[0] != sizes[1]:  # it has no state
                self.edits.append(f"batch_size={sizes[0]} is now {sizes[1]}")
                self.changes_batches, saved = True, {**saved, "batch_size": sizes[1]}
            self._compare_settings(saved, here, "of")
            num_edits = len(self.edits)
            self._compare_below(saved, here)
            if saved["stage"] in ("plan_packs", "plan_batches"):
                # Other samples would share packs, in the middle of a plan.
                found, self.edits[num_edits:] = self.edits[num_edits:], []
                self.others += [f"what is planned from `lengths` changes: {edit}" for edit in found]
        elif saved.get("stage") == "source":
            self._compare_sources(saved, here)
        else:
            self._note(saved, here)

    def _compare_sources(self, saved: Config, here: Config) -> None:
        name = here["name"]
        weights = saved.get("loss_weight", 1.0), here.get("loss_weight", 1.0)
        if weights[0] != weights[1]:
            self.edits.append(f"source {name}: loss_weight {weights[0]} is now {weights[1]}")
        is_same, is_named = _has_same_data(saved, here), saved.get("name") == name
        if is_same and not is_named:
            self.data.append(_renamed(saved.get("name"), name))
            saved = {**saved, "name": name}
        elif is_named and not is_same:
            self.data.append(_data_difference(saved, here))
        self._compare_settings(saved, here, "loss_weight", *_OF_DATA[-1 if is_same else 0 :])

    def _compare_settings(self, saved: Config, here: Config, *but: str) -> None:
        old, new = ({k: config[k] for k in config if k not in but} for config in (saved, here))
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
            self._compare(entry["of"], new["of"], units)
        stayed = [new["name"] for new in pairs.values()]
        for entry in here["of"]:
            if entry["name"] not in stayed:
                self._compare_new(entry, units)
        now = [entry["name"] for entry in here["of"] if entry["name"] in stayed]
        if stayed != now or len(saved["of"]) != len(here["of"]):
            self.changes_draws = True
        if stayed != now:
            self.edits.append(
                f"sources stand in another order: {', '.join(stayed)} is now {', '.join(now)}"
            )

    def _compare_new(self, entry: Config, units: tuple[_Units, _Units]) -> None:
        old = units[0]
        for name, unit in _units(entry):
            if name in old:
                self._edit(f"source {name}: moved to another blend; it resumes there")
                self.partners[name] = name
                self._compare(old[name]["of"], unit["of"])
            elif twin := _removed_twin(unit, units):
                self.data.append(_renamed(twin, name))
            else:
                self._edit(f"source {name}: added; it starts at its beginning")


def _is_blend(config: Any) -> bool:
    return isinstance(config, dict) and config.get("stage") == "blend"


def _as_blend(config: Any, other: Any) -> Config | None:
    """Returns a blend; if only the other pipeline has one here, a blend of the single source."""
    if _is_blend(config):
        return dict(config)
    names = names_of(config)
    is_single = len(names) == 1 and not isinstance(_innermost(config).get("of"), list)
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


def _has_same_data(saved: Config, here: Config) -> bool:
    """Whether sources have the same data, as far as both configurations describe them."""
    contents = {saved.get("content"), here.get("content")} - {None}
    return saved.get("data") == here.get("data") and len(contents) < 2


def _data_difference(saved: Config, here: Config) -> str:
    """Describes other data of a source, and what to do."""
    name, num, before = here["name"], here["samples"], saved.get("samples", 0)
    if saved.get("data") == here["data"]:
        return (
            f"source {name}: its data were written again after the checkpoint: names and sizes "
            "are the same, keys or bytes are not, so samples would come again or never. Restore "
            "the old data, or begin a new run"
        )
    lead = f"Checkpoint has samples={before} where this pipeline has {num} (source {name})"
    if num == before:
        lead = f"source {name}: its shards have other names or sizes, or are in another order"
    return f"{lead}. {_RESTORE if num < before else _ADDED}"


def _renamed(before: Any, name: str) -> str:
    return (
        f"Checkpoint has name={before!r} where this pipeline has {name!r}, with the same data. Set "
        f"name={before!r}, an argument of get_train_dataset and a key in a metadataset"
    )


def _removed_twin(unit: Config, units: tuple[_Units, _Units]) -> str:
    """Returns the name of a removed source with the data of a new one; empty if there is none."""

    def data_of(entry: Config) -> tuple[Any, ...]:
        leaf = _innermost(entry["of"])
        return leaf.get("data"), leaf.get("content", entry["name"]), leaf.get("subset")

    removed = (name for name in units[0] if name not in units[1])
    return next((name for name in removed if data_of(units[0][name]) == data_of(unit)), "")


def _innermost(config: Any) -> Config:
    return [{}, *_chain(config)][-1]


def names_of(config: Any) -> list[str]:
    """Lists the names of all sources of a configuration."""
    return [*weights_in(config)]


def _chain(config: Any) -> Iterator[Config]:
    """Yields the stages from one down to several datasets, or to a leaf."""
    while isinstance(config, dict):
        yield config
        config = config.get("of")
