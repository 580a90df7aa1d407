"""Makes the indexes of the joins of a metadataset before a run needs them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from energon_lite.extras.joins.join_keys import JoinReport
from energon_lite.extras.joins.joined import open_side, prepared_index
from energon_lite.formats.nvmeta import read_dataset_config
from energon_lite.metadataset.nodes import Join, JoinMember, Node, leaves
from energon_lite.metadataset.open import located, range_of


def prepare_joins(
    node: Node, num_workers: int | None = None
) -> Iterator[tuple[Path, JoinReport | None]]:
    """Makes the indexes of all joins of a tree; those that are there already stay.

    Args:
        node: the tree.
        num_workers: processes; by default one per usable core.

    Yields:
        The file of each, and its `JoinReport`, or None if the file was there.

    Raises:
        DatasetFormatError: Keys are there twice, or do not match as `nonmatch` asks for.
    """
    for join in leaves(node):
        if isinstance(join, Join) and join.cache is not None:
            with located(join.place):
                sides = list(map(_side, join.members))
                made: tuple[Any, JoinReport | None] = prepared_index(join.cache, sides, num_workers)
                yield made


def _side(member: JoinMember) -> Any:
    # What dataset.yaml sets wins, as in the factories; nothing is imported for it here.
    own = read_dataset_config(member.path, member.dataset_config)
    return open_side(
        member.path,
        own.get("split_part", member.split_part),
        own.get("split_config", member.split_config),
        partial(range_of, member.subset) if member.subset else None,
        member.nonmatch,
    )
