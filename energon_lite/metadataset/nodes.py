"""What a metadataset says, as a tree: the leaves are datasets, nothing of which is opened yet."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

from energon_lite.order.schedules import Weight


@dataclass(frozen=True)
class SubsetRange:
    """Samples `start` to `stop`, the latter excluded.

    Attributes:
        start: a sample's number; or, as `Fraction` in 0..1, a share of the samples there are.
        stop: likewise; None for the end. Of the same type as `start`.
    """

    start: Fraction | int
    stop: Fraction | int | None


@dataclass(frozen=True)
class Leaf:
    """One dataset folder, with all that the nodes around it say about it.

    Attributes:
        path: the folder: absolute, `.` and `..` resolved by text alone, links not followed.
        written: the path as it is in the file.
        source_id: `name`, or the path relative to the root metadataset plus the split part. Two
            leaves may have the same.
        name: what the file calls it.
        split_part: which split of the dataset.
        subflavors: tags; those of outer nodes won.
        loss_weight: product of the factors down the tree.
        shuffle_over_epochs_multiplier: product down the tree; -1 (with replacement) if any is -1,
            None (not shuffled) if any is null.
        dataset_config: name of a file in `.nv-meta`; None for the default.
        split_config: likewise.
        subset: ranges to be taken one after the other: its own, then those of the nodes around
            it, outwards.
        place: where it is written, as `FILE:LINE, KEYPATH`.
    """

    path: Path
    written: str
    source_id: str
    name: str | None
    split_part: str
    subflavors: dict[str, Any]
    loss_weight: float
    shuffle_over_epochs_multiplier: int | None
    dataset_config: str | None
    split_config: str | None
    subset: tuple[SubsetRange, ...]
    place: str


@dataclass(frozen=True)
class Member:
    """An entry of a blend: its weight is above 0, or a schedule that is so somewhere."""

    weight: Weight
    node: Node


@dataclass(frozen=True)
class Blend:
    """One of several nodes per sample, by weight; entries of weight 0 are left out.

    Attributes:
        members: at least one, in the file's order.
        mode: "exact" or "random".
        unit: what the weights count, "samples" or "tokens".
        lengths: name of a stored length index.
        until: when it ends: None, "first", "all_once" or "forever".
        name: what the file calls it.
        place: where it is written, as `FILE:LINE, KEYPATH`.
    """

    members: tuple[Member, ...]
    mode: str
    unit: str
    lengths: str | None
    until: str | None
    name: str | None
    place: str


@dataclass(frozen=True)
class Repetition:
    """An entry of an epochized blend: how often an epoch holds each sample; above 0."""

    repetitions: Fraction
    node: Node


@dataclass(frozen=True)
class BlendEpochized:
    """Several nodes, each so many times per epoch; entries of 0 repetitions are left out."""

    members: tuple[Repetition, ...]
    name: str | None
    place: str


@dataclass(frozen=True)
class Concat:
    """One node after the other."""

    members: tuple[Node, ...]
    name: str | None
    place: str


Node: TypeAlias = Leaf | Blend | BlendEpochized | Concat


def children(node: Node) -> tuple[Node, ...]:
    """Returns the nodes right below `node`, in the file's order."""
    if isinstance(node, Leaf):
        return ()
    if isinstance(node, Concat):
        return node.members
    return tuple(member.node for member in node.members)


def leaves(node: Node) -> list[Leaf]:
    """Returns the leaves of a tree, in the file's order."""
    if isinstance(node, Leaf):
        return [node]
    return [leaf for child in children(node) for leaf in leaves(child)]


def combined_multiplier(outer: int | None, inner: int | None) -> int | None:
    """Multiplies `shuffle_over_epochs_multiplier` down the tree.

    None (file order) anywhere wins, then -1 (with replacement).
    """
    if outer is None or inner is None:
        return None
    return -1 if -1 in (outer, inner) else outer * inner
