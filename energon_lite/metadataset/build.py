"""Builds a tree of datasets from a tree of nodes: stages and weights."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from energon_lite.core.arguments import at_least
from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import AnyDataset
from energon_lite.core.errors import DatasetFormatError
from energon_lite.metadataset.nodes import Blend, BlendEpochized, Leaf, Node, leaves
from energon_lite.metadataset.open import LeafOpener, located
from energon_lite.names.energon_modules import uncollected
from energon_lite.order.schedules import Weight, Weights
from energon_lite.stages.blend import BlendDataset, TokenBlendDataset
from energon_lite.stages.concat import ConcatDataset, RepeatDataset, total_items, unique_sources

# More than any run draws, and few enough that sample numbers fit 64 bits.
_LARGEST_EPOCH = 10**15


def build_training(opener: LeafOpener, repeat: bool | int) -> AnyDataset:
    """Builds the dataset of a training split.

    Args:
        opener: the split, and what opens its leaves.
        repeat: True if epochs follow each other without end, unless the blend sets `until`; False
            for passes of one epoch; or the epochs of a pass.

    Raises:
        ValueError: `repeat` is not True, and a blend has no end; or it is below 1.
        TypeError: `repeat` is no number.
    """
    node = opener.node
    if isinstance(repeat, bool):
        is_open = not (isinstance(node, Blend) and node.until in ("first", "all_once"))
        return _build(node, opener, endless=repeat and is_open)
    repeat = at_least("repeat", repeat, 1, ", True for no end, or False for one epoch")
    if isinstance(node, Leaf):
        return opener(node, repeat=False, repetitions=Fraction(repeat))
    return RepeatDataset(_build(node, opener, endless=False), repeats=repeat)


def build_validation(node: Node, opener: LeafOpener) -> AnyDataset:
    """Builds the dataset of a validation split: each leaf once, in the order of the file."""
    datasets = [opener(leaf, repeat=False) for leaf in leaves(node)]
    return datasets[0] if len(datasets) == 1 else ConcatDataset(*datasets)


def _build(node: Node, opener: LeafOpener, endless: bool) -> AnyDataset:
    if isinstance(node, Leaf):
        return opener(node, repeat=endless)
    if isinstance(node, Blend):
        return _blend(node, opener, endless)
    if isinstance(node, BlendEpochized):
        dataset = _blend_epochized(node, opener)
    else:
        dataset = ConcatDataset(*(_build(member, opener, False) for member in node.members))
    return RepeatDataset(dataset) if endless else dataset


def _blend(node: Blend, opener: LeafOpener, endless: bool) -> AnyDataset:
    until = node.until or ("forever" if endless else None)
    if until is None:
        raise ValueError(
            f"{node.place}: a blend is endless by default, and must end here (repeat=False, or a "
            "node above it that has an end). Write `until: first` or `until: all_once`, or use "
            "blend_epochized"
        )
    if until == "forever" and not endless:
        raise ValueError(
            f"{node.place}: `until: forever` where the data must end (repeat=False, or a node "
            "above it that has an end); remove it, or write `until: all_once`"
        )
    with located(node.place):
        flat, weights = _flattened(node, node)
    with uncollected():
        members = [_build(member, opener, until == "forever") for member in flat]
    pairs = [(member, 1.0) for member in members]
    dataset: AnyDataset
    with located(node.place):
        if node.unit == "tokens":
            dataset = TokenBlendDataset(
                *pairs, until=until, weights=weights, lengths=_indexed(opener, node, flat, members)
            )
        else:
            dataset = BlendDataset(*pairs, until=until, weights=weights, blend_mode=node.mode)
    return RepeatDataset(dataset) if endless and not dataset.endless else dataset


def _indexed(
    opener: LeafOpener, blend: Blend, nodes: list[Node], members: list[AnyDataset]
) -> dict[str, Int64Array] | None:
    """Returns the stored lengths of all sources, if the blend names an index of them."""
    if blend.lengths is None:
        return None
    found = {}
    for node, member in zip(nodes, unique_sources(members), strict=True):
        if not isinstance(node, Leaf):
            raise DatasetFormatError(
                f"{blend.place}: `lengths` needs a dataset folder for each entry of a blend by "
                "tokens; remove it to have the lengths measured"
            )
        try:
            with located(node.place):
                source = _source_below(member)
                opener.check_index(source, blend.lengths)
                found[source.name] = source.stored_lengths(blend.lengths)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}, or remove `lengths` from the blend to have lengths measured"
            ) from error
    return found


def _source_below(dataset: Any) -> Any:
    """Returns the source of a leaf, without what is above it, as a cooker."""
    for child in dataset.children:
        return _source_below(child)
    return dataset


def _blend_epochized(node: BlendEpochized, opener: LeafOpener) -> AnyDataset:
    members = []
    for repetitions, member in _repeated(node, Fraction(1)):
        if isinstance(member, Leaf):
            times = None if repetitions == 1 else repetitions
            members.append(opener(member, repeat=False, repetitions=times))
        else:
            dataset = _build(member, opener, False)
            if repetitions != 1:
                dataset = RepeatDataset(dataset, repeats=repetitions)
            members.append(dataset)
    # Weighted by their sizes, all members end at the same time.
    sizes = [total_items(dataset) for dataset in members]
    if sum(sizes) > _LARGEST_EPOCH:
        raise DatasetFormatError(
            f"{node.place}: the repetitions make an epoch of more than {_LARGEST_EPOCH:,} "
            "samples; lower them"
        )
    return BlendDataset(*zip(members, map(float, sizes), strict=True))


def _is_one_with(inner: Blend, outer: Blend) -> bool:
    """Returns whether a nested blend can be read as a part of the blend around it."""
    same = (inner.mode, inner.unit, inner.lengths) == (outer.mode, outer.unit, outer.lengths)
    return same and inner.until in (None, outer.until)


def _flattened(blend: Blend, outer: Blend) -> tuple[list[Node], Weights]:
    """Returns the members of a blend, nested ones flattened, and the tree of weights."""
    nodes: list[Node] = []
    entries: list[Weight | tuple[Weight, Weights]] = []
    for member in blend.members:
        if isinstance(member.node, Blend) and _is_one_with(member.node, outer):
            inner, weights = _flattened(member.node, outer)
            nodes += inner
            entries.append((member.weight, weights))
        else:
            nodes.append(member.node)
            entries.append(member.weight)
    return nodes, Weights(entries)


def _repeated(node: BlendEpochized, times: Fraction) -> Iterator[tuple[Fraction, Node]]:
    """Yields the members, including those of nested blends, with the products of repetitions."""
    for member in node.members:
        repetitions = times * member.repetitions
        if isinstance(member.node, BlendEpochized):
            yield from _repeated(member.node, repetitions)
        else:
            yield repetitions, member.node
