"""What part of the batches each group has, where it follows from the weights of a blend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_lite.batching.rules import ModalitySplit, is_group
from energon_lite.core.dataset import SavableDataset
from energon_lite.stages.blend import BlendDataset


def shares_of(dataset: SavableDataset[Any], split: ModalitySplit) -> dict[Any, float]:
    """Adds up the weights of a blend by group.

    Raises:
        ValueError: They are not known, or change.
    """
    way_out = "Give ModalitySplit the parts of the batches, as shares={group: part, ...}"
    if dataset.traits.unit == "tokens":
        raise ValueError(
            "the blend's weights are shares of tokens, and batches are of samples: how many "
            f"samples a group has is not known before they are read. {way_out}"
        )
    if _has_schedule(dataset):
        raise ValueError(
            "a weight of the blend follows a schedule, and which group a step has must be known "
            f"from its number alone. {way_out} that stay the same"
        )
    by_source = dataset.expected(1.0)
    found: dict[Any, float] = {}
    for facts in dataset.sources():
        if not by_source.get(facts.name):
            raise ValueError(f"the share of source {facts.name!r} is not known. {way_out}")
        group = group_of_source(split, facts.name)
        found[group] = found.get(group, 0.0) + by_source[facts.name]
    return found


def group_of_source(split: ModalitySplit, name: str) -> Any:
    """Returns the group of a source: its name, or its entry in a dict `group_by`.

    Raises:
        ValueError: The dict has no group for it, or none that a checkpoint can keep.
    """
    if not isinstance(split.group_by, Mapping):
        return name
    if name not in split.group_by:
        raise ValueError(
            f"group_by has no group for source {name!r}; it names "
            f"{', '.join(map(repr, split.group_by))}. Add {name!r}"
        )
    group = split.group_by[name]
    if not is_group(group):
        raise ValueError(
            f"group_by[{name!r}]={group!r:.80} is no group; make it a text, number, bool, None or "
            "a tuple of these"
        )
    return group


def _has_schedule(dataset: SavableDataset[Any]) -> bool:
    if isinstance(dataset, BlendDataset) and not dataset.weights.is_constant:
        return True
    return any(map(_has_schedule, dataset.children))


def check_sources(dataset: SavableDataset[Any], split: ModalitySplit, groups: list[Any]) -> None:
    """Refuses sources whose group has no share, before one of their samples is read.

    Raises:
        ValueError: There is one; names it.
    """
    if not split.follows_from_source:
        return
    for facts in dataset.sources():
        group = group_of_source(split, facts.name)
        if group not in groups:
            raise ValueError(
                f"shares has no entry for group {group!r} of source {facts.name!r}; it has "
                f"{', '.join(map(repr, groups))}. Add its part of the batches"
            )
