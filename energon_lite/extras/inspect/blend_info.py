"""The sources of each split of a metadataset, and their sizes."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.lengths.length_index import DEFAULT_NAME
from energon_lite.formats.known import format_of
from energon_lite.formats.length_files import read_facts, read_lengths
from energon_lite.formats.prepared_folder import open_part
from energon_lite.metadataset.nodes import (
    Blend,
    Concat,
    Leaf,
    Member,
    Node,
    Repetition,
    leaves,
    walk,
)
from energon_lite.metadataset.open import range_of
from energon_lite.metadataset.read import read_metadataset, split_names
from energon_lite.order.schedules import Weights
from energon_lite.storage.local_paths import local_path


def metadataset_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describes a metadataset in plain values, ready for JSON.

    Returns:
        `name`, `path`, and `metadataset`: by split a list of its sources, each with `name`, `path`,
        `split_part`, and `shards` and `samples` (those of its subset) of that part, or an `error`.
        Where they are known, and sources do not follow each other as in a concat,
        also `shares` (pairs of a draw of the run and the target share from 0 to 1 of the source
        there), `unit` (of which they are shares), `loss_weight` and `tokens`.

    Raises:
        FileNotFoundError: A metadataset is missing.
        DatasetFormatError: A file is wrong; names file, line and key.
    """
    file = local_path(path)
    splits = {split: _split_rows(read_metadataset(file, split)) for split in split_names(file)}
    return {"name": file.name, "path": str(file), "metadataset": splits}


def _split_rows(root: Node) -> list[dict[str, Any]]:
    blends = [node for node in walk(root) if isinstance(node, Blend)]
    index = next((node.lengths for node in blends if node.lengths), DEFAULT_NAME)
    unit = "tokens" if any(node.unit == "tokens" for node in blends) else "samples"
    in_turn = [id(x) for node in walk(root) if isinstance(node, Concat) for x in leaves(node)]
    rows = [[_source(folder, leaf, index) for folder in leaf.folders] for leaf in leaves(root)]
    # The first dataset of a join has the samples.
    _, weights = _sizes_and_weights(root, iter([own[0].get("samples", 0) for own in rows]))
    if weights is not None:
        places = [0.0, *(x for x in weights.breaks.tolist() if x > 0)]
        with suppress(ValueError):  # all weights are 0 at one of the places
            all_shares = weights.at(np.array(places)).T.tolist()
            for leaf, own, shares in zip(leaves(root), rows, all_shares, strict=True):
                if id(leaf) not in in_turn:
                    own[0] |= {"shares": list(zip(places, shares, strict=True)), "unit": unit}
    return [row for own in rows for row in own]


def _sizes_and_weights(node: Node, sizes: Iterator[int]) -> tuple[float, Weights | None]:
    """Returns the samples of an epoch, and the weights; None for a leaf, or if all are 0.

    Args:
        node: what is blended, repeated or concatenated; the last two have shares by their samples.
        sizes: samples of the leaves below, in their order.
    """
    if isinstance(node, Leaf):
        return next(sizes), None
    entries: list[Any] = []
    total = 0.0
    for member in node.members:
        inner = member if isinstance(member, Node) else member.node
        own, below = _sizes_and_weights(inner, sizes)
        own *= float(member.repetitions) if isinstance(member, Repetition) else 1
        total += own
        weight = member.weight if isinstance(member, Member) else own
        entries.append(weight if below is None else (weight, below))
    try:
        return total, Weights(entries)
    except ValueError:
        return total, None


def _source(leaf: Leaf, joined: Leaf, index: str) -> dict[str, Any]:
    """Describes a folder: a leaf, or one dataset of a join, whose subset the first one has."""
    is_primary = leaf is not joined and leaf is joined.folders[0]
    subset = (*leaf.subset, *joined.subset) if is_primary else leaf.subset
    found: dict[str, Any] = {
        "name": leaf.source_id,
        "path": str(leaf.path),
        "split_part": leaf.split_part,
    }
    try:
        known = format_of(leaf.path)
        if known.only_part is not None:
            start, stop = range_of(subset, known.info(leaf.path)["samples"])
            return {**found, "shards": 1, "samples": stop - start}
        _, part, _, excluded = open_part(leaf.path, leaf.split_part, leaf.split_config)
        total = sum(part.counts)
        first, last = (edge - bisect_left(excluded, edge) for edge in range_of(subset, total))
    except (OSError, DatasetFormatError) as error:
        return {**found, "error": str(error)}
    found |= {"shards": len(part.shards), "samples": last - first}
    if leaf.loss_weight != 1:
        found["loss_weight"] = leaf.loss_weight
    facts = read_facts(leaf.path, leaf.split_part, index)
    with suppress(OSError, DatasetFormatError):
        if facts is not None:
            data, samples = str(facts.get("data")), total - len(excluded)
            lengths = read_lengths(leaf.path, leaf.split_part, index, samples, data)
            found["tokens"] = int(lengths[first:last].sum())
    return found
