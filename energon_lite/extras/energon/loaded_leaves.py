"""Opens the leaves of a metadataset as a list, if a list can express it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from energon_lite.metadataset.loaded import DatasetBlendMode, LoadedDataset, LoadedDatasetList
from energon_lite.metadataset.nodes import Blend, BlendEpochized, Concat, Leaf, Node, walk
from energon_lite.metadataset.open import LeafOpener
from energon_lite.order.schedules import Schedule

_MODES = {
    Blend: DatasetBlendMode.DATASET_WEIGHT,
    BlendEpochized: DatasetBlendMode.SAMPLE_REPETITIONS,
}


def loaded_datasets(node: Node, opener: LeafOpener) -> LoadedDatasetList:
    """Opens the leaves of a tree, in which all blends are of one kind."""
    name = "weight" if any(isinstance(inner, Blend) for inner in walk(node)) else "repetitions"
    found = []
    for leaf, amount in _amounts(node, None):
        number: Any = {} if amount is None else {name: float(amount)}
        factory = opener.open(leaf)
        aux = opener.stores(leaf, factory) or None
        found.append(LoadedDataset(dataset=factory, aux=aux, **number))
    return LoadedDatasetList(
        datasets=found, blend_mode=_MODES.get(type(node), DatasetBlendMode.NONE)
    )


def check_is_list(node: Node, who: str) -> None:
    """Checks that a list of datasets with numbers can express a tree.

    Args:
        node: the tree.
        who: the function that takes the list, for the error.

    Raises:
        ValueError: The list cannot; names the place and the setting that would be lost.
    """
    kinds = {Blend: "blend", BlendEpochized: "blend_epochized", Concat: "concat"}
    for inner in walk(node):
        problems: dict[str, bool] = {}
        if not isinstance(inner, (Leaf, type(node))):
            problems[f"{kinds[type(inner)]} inside {kinds[type(node)]}"] = True
        elif isinstance(inner, Blend):
            problems = {
                "unit: tokens": inner.unit == "tokens",
                f"until: {inner.until}": inner.until not in (None, "forever"),
                f"blend_mode: {inner.mode}": inner.mode != "exact",
                "a weight that changes": any(isinstance(m.weight, Schedule) for m in inner.members),
            }
        for problem in (name for name, is_there in problems.items() if is_there):
            raise ValueError(
                f"{who} gets a list of datasets, each with a weight or repetitions, which cannot "
                f"express {inner.place}: {problem}. Remove that from the metadataset, or do not "
                "override the function"
            )


def _amounts(node: Node, amount: Any) -> Iterator[tuple[Leaf, Any]]:
    """Yields each leaf with its share of the blend, or its repetitions; None outside of blends."""
    outer = 1 if amount is None else amount
    if isinstance(node, Leaf):
        yield node, amount
    elif isinstance(node, Concat):
        for below in node.members:
            yield from _amounts(below, amount)
    elif isinstance(node, Blend):
        weights, start = [member.weight for member in node.members], np.zeros(1, dtype=np.int64)
        own = [float(w.at(start)[0] if isinstance(w, Schedule) else w) for w in weights]
        for member, part in zip(node.members, own, strict=True):
            yield from _amounts(member.node, outer * part / (sum(own) or 1.0))
    else:
        for entry in node.members:
            yield from _amounts(entry.node, outer * entry.repetitions)
