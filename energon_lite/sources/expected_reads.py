"""The reads that a run will make of datasets elsewhere, announced to their storage."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import PurePath

from energon_lite.core.dataset import AnyDataset
from energon_lite.core.topology import RankSlots
from energon_lite.sources.source import WebdatasetSource, sources_in
from energon_lite.storage.byte_file import (
    Address,
    ExpectedReads,
    Folder,
    current_cache,
    registered,
)

logger = logging.getLogger(__name__)

_Found = tuple[WebdatasetSource[object], PurePath]


def _by_folder(dataset: AnyDataset) -> Iterator[tuple[Folder, list[_Found]]]:
    """Yields storages, and the sources that lie there with their names."""
    found: dict[Folder, list[_Found]] = {}
    for source in sources_in(dataset):
        root = getattr(source.reader, "root", None)
        place = registered(root) if isinstance(root, Address) else None
        if place:
            found.setdefault(place[0], []).append((source, place[1]))
    yield from found.items()


def _reads_of(
    dataset: AnyDataset, found: list[_Found], slots: RankSlots, num_ranks: int
) -> list[ExpectedReads]:
    """Returns what a rank reads of some sources, on a machine of so many ranks."""
    samples = sum(facts.num_samples for facts in dataset.sources())
    drawn = dataset.expected(samples)
    total = sum(drawn.values()) or samples
    return [
        ExpectedReads(
            name, source.order.num_samples, source.num_bytes,
            drawn.get(source.name, source.order.num_samples) / total, len(slots.streams()),
            source.order.window, source.order.slice_length(slots.num_streams),
            source.order.interleave, num_ranks,
        )
        for source, name in found
    ]  # fmt: skip


def announce(dataset: AnyDataset, slots: RankSlots, node_groups: int = 1) -> None:
    """Announces to storages what the run of a rank will read of them.

    Raises:
        ValueError: There is not enough place for it.
    """
    for folder, found in _by_folder(dataset):
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or slots.world_size)
        nodes = slots.world_size // num_ranks
        reads = _reads_of(dataset, found, slots, num_ranks)
        if (cache := current_cache()) and nodes > node_groups == 1 and not slots.rank:
            part = cache["max_bytes"] / sum(own.num_bytes for own in reads)
            logger.info(
                "With node_groups=%d each of the %d machines reads the same data in every epoch, "
                "of which its cache holds %.0f %%; without it, %.0f %%",
                nodes, nodes, min(100, 100 * nodes * part), min(100, 100 * part),
            )  # fmt: skip
        for (source, _), units in zip(found, folder.expect(reads), strict=True):
            source.reader.slice_length, source.reader.ahead_bytes = units


def fetched(dataset: AnyDataset) -> dict[str, dict[str, float]]:
    """Returns what was fetched for each source so far, by all programs of this machine."""
    return {
        source.name: counts[name]
        for folder, found in _by_folder(dataset)
        if (counts := folder.transfers([name for _, name in found]))
        for source, name in found
        if name in counts
    }
