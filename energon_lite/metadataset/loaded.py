"""Opened datasets in a list, with weights or repetitions: a metadataset as Energon passes it on."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from energon_lite.metadataset.nodes import Blend, BlendEpochized, Concat, Leaf, Node, children
from energon_lite.metadataset.open import LeafOpener
from energon_lite.order.schedules import Schedule, weight_at
from energon_lite.sources.webdataset import BaseCoreDatasetFactory


class DatasetBlendMode(enum.Enum):
    """What the numbers of a list of datasets mean."""

    NONE = "none"
    DATASET_WEIGHT = "dataset_weight"
    SAMPLE_REPETITIONS = "sample_repetitions"


@dataclass(kw_only=True)
class LoadedDataset:
    """One leaf, opened.

    Attributes:
        dataset: builds the source.
        weight: its share of the whole blend, at the start of the run; None outside of blends.
        repetitions: how many times an epoch has it; None outside of epochized blends.
        aux: always None: auxiliary data are not in this version.
    """

    dataset: BaseCoreDatasetFactory[Any]
    weight: float | None = None
    repetitions: float | None = None
    aux: dict[str, Any] | None = None


@dataclass(kw_only=True)
class LoadedDatasetList:
    """The leaves of a split, in the order of the file."""

    datasets: list[LoadedDataset]
    blend_mode: DatasetBlendMode = DatasetBlendMode.NONE


def loaded_datasets(node: Node, opener: LeafOpener) -> LoadedDatasetList:
    """Opens the leaves of a tree."""
    found = [
        LoadedDataset(dataset=opener.open(leaf), weight=weight, repetitions=repetitions)
        for leaf, weight, repetitions in _amounts(node, 1.0, 1)
    ]
    mode = DatasetBlendMode.NONE
    if isinstance(node, Blend):
        mode = DatasetBlendMode.DATASET_WEIGHT
    elif isinstance(node, BlendEpochized):
        mode = DatasetBlendMode.SAMPLE_REPETITIONS
    return LoadedDatasetList(datasets=found, blend_mode=mode)


def check_is_list(node: Node, who: str) -> None:
    """Checks that a tree says no more than a list of datasets with numbers can.

    Args:
        node: the tree.
        who: what gets the list, for the error.

    Raises:
        ValueError: It does; names the place, and what is lost.
    """
    found = _beyond_a_list(node, type(node))
    if found is not None:
        raise ValueError(
            f"{who} gets a list of datasets, each with a weight or repetitions, which cannot say "
            f"{found}. Take that out of the metadataset, or do not override it"
        )


def _beyond_a_list(node: Node, kind: type[Any]) -> str | None:
    """Returns what a list cannot say of a tree, whose root is of a kind; None if nothing."""
    if isinstance(node, Leaf):
        return None
    if not isinstance(node, kind):
        names = {Blend: "blend", BlendEpochized: "blend_epochized", Concat: "concat"}
        return f"{node.place}: {names[type(node)]} inside {names[kind]}"
    if isinstance(node, Blend):
        settings = {
            "unit: tokens": node.unit == "tokens",
            f"until: {node.until}": node.until not in (None, "forever"),
            f"blend_mode: {node.mode}": node.mode != "exact",
            "a weight that changes": any(isinstance(m.weight, Schedule) for m in node.members),
        }
        for name, is_set in settings.items():
            if is_set:
                return f"{node.place}: {name}"
    return next((f for f in (_beyond_a_list(n, kind) for n in children(node)) if f), None)


def _amounts(
    node: Node, weight: float, repetitions: Fraction | int
) -> Iterator[tuple[Leaf, float | None, float | None]]:
    """Yields each leaf with its share of the blend, or its repetitions."""
    if isinstance(node, Leaf):
        yield node, None, None
    elif isinstance(node, Blend):
        start = np.zeros(1, dtype=np.int64)
        own = [float(weight_at(member.weight, start)[0]) for member in node.members]
        for member, part in zip(node.members, own, strict=True):
            share = weight * part / (sum(own) or 1.0)
            for leaf, inner, _ in _amounts(member.node, share, 1):
                yield leaf, share if inner is None else inner, None
    elif isinstance(node, BlendEpochized):
        for entry in node.members:
            times = repetitions * entry.repetitions
            for leaf, _, inner in _amounts(entry.node, 1.0, times):
                yield leaf, None, float(times) if inner is None else inner
    else:
        for below in node.members:
            yield from _amounts(below, weight, repetitions)
