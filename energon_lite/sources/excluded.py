"""Opens split parts: their shards, and the places of the samples that are excluded."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage import nvmeta
from energon_lite.storage.sqlite import INDEX_SQLITE, IndexDatabase, sample_indices
from energon_lite.storage.tar import iter_tar

logger = logging.getLogger(__name__)
_LISTED = 20


class OpenedPart(NamedTuple):
    """A split part of a prepared folder.

    Attributes:
        split: the file that describes it.
        part: its shards.
        tar_file_ids: number of each shard in `index.sqlite`.
        excluded: positions of the excluded samples in the concatenated shards, rising.
    """

    split: nvmeta.SplitFile
    part: nvmeta.SplitPart
    tar_file_ids: tuple[int, ...]
    excluded: list[int]


def open_part(root: Path, split_part: str, split_config: str | None) -> OpenedPart:
    """Opens a split part.

    Args:
        root: the folder.
        split_part: which part.
        split_config: name of the split file in `.nv-meta`.

    Raises:
        FileNotFoundError: The folder, its split file, or a shard is missing.
        DatasetFormatError: A file of the dataset is not as it should be.
    """
    info = nvmeta.read_info(root)
    split = nvmeta.SplitFile(root, info, split_config)
    part = split.part(split_part)
    numbers = {shard: number for number, shard in enumerate(info.shard_counts)}
    ids = tuple(numbers[shard] for shard in part.shards)
    return OpenedPart(split, part, ids, _excluded_positions(root, numbers, part))


def _excluded_positions(
    root: Path, numbers: Mapping[str, int], part: nvmeta.SplitPart
) -> list[int]:
    """Finds where the excluded samples lie in the concatenated shards of a split part."""
    wanted = {key for keys in part.excluded.values() for key in keys}
    if not wanted:
        return []
    found = sample_indices(root, sorted(wanted))
    positions, unknown, start = list[int](), list[str](), 0
    for shard, count in zip(part.shards, part.counts, strict=True):
        keys = part.excluded.get(shard, ())
        places: dict[str, int] = {}
        if keys and found is None:
            places = _places_in_shard(root / shard)
        elif keys and found is not None:
            number = numbers[shard]
            places = {key: found[key][1] for key in keys if found.get(key, (-1, 0))[0] == number}
            what = _misfit(root, number, count, places, set(keys) - places.keys())
            if what:
                raise DatasetFormatError(
                    f"{root / nvmeta.META / INDEX_SQLITE}: {what} of {shard}, which has {count} "
                    f"samples; run `energon-lite prepare {root} --tar-index-only`"
                )
        positions += [start + places[key] for key in keys if key in places]
        unknown += [f"{shard}/{key}" for key in keys if key not in places]
        start += count
    for entry in unknown[:_LISTED]:  # Energon passes over such entries, so this is no error
        logger.warning(
            "%s: split part %r excludes sample %r, which is not there (%d such entries); correct "
            "`exclude` in the split file",
            root, part.name, entry, len(unknown),
        )  # fmt: skip
    return sorted(set(positions))


def _misfit(
    root: Path, number: int, count: int, places: Mapping[str, int], missing: Collection[str]
) -> str:
    """Returns what is wrong with the index of a shard; it may be corrupt at the rows of a query."""
    with IndexDatabase(root) as index:
        stored = index.keys_at([(number, place) for place in places.values()])
        rows = index.shard_rows(number) if missing else []
    for key, place in places.items():
        if not 0 <= place < count or stored.get((number, place), key) != key:
            return f"sample {key!r} is number {place}"
    if missing and len(rows) != count:
        return f"has {len(rows)} samples"
    unlisted = {key for key, _, _ in rows} & set(missing)
    return f"has no entry of sample {min(unlisted)!r}" if unlisted else ""


def _places_in_shard(shard: Path) -> dict[str, int]:
    """Reads the sample keys of a shard that has no usable `index.sqlite`."""
    names = (header.key_and_part() for header in iter_tar(shard))
    keys = dict.fromkeys(name[0] for name in names if name is not None)
    return {key: place for place, key in enumerate(keys)}
