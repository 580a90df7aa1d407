"""Prepared folders of tars: their split parts, and the places of samples that are excluded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError
from energon_lite.formats import nvmeta
from energon_lite.formats.format import Format, Opened
from energon_lite.formats.shards import MAX_OPEN, ShardReader
from energon_lite.formats.sqlite import INDEX_SQLITE, sample_indices
from energon_lite.formats.stored_offsets import stored_offsets
from energon_lite.formats.tar import iter_tar
from energon_lite.names.energon_modules import LazyFunction

logger = logging.getLogger(__name__)
_LISTED = 20
# A few `.tar.idx` are opened as fast as the file of all offsets.
_FEWEST_SHARDS = 16


class PreparedFolder(Format):
    """Folders of tars with `.nv-meta`; also stands for paths that are no dataset at all."""

    name = "WebDataset"
    suffix = ""
    only_part = None
    factory: Any = LazyFunction("energon_lite.sources.dataset_config:folder_factory")
    prepare: Any = LazyFunction("energon_lite.extras.prepare.run:prepare_folder")
    info: Any = LazyFunction("energon_lite.extras.inspect.info:folder_info")
    lint: Any = LazyFunction("energon_lite.extras.inspect.lint:lint_folder")
    files: Any = LazyFunction("energon_lite.extras.stores.file_stores:WebdatasetFileStore")

    def is_mine(self, path: PurePath) -> bool:
        """Returns True: what is wrong with a path is reported when it is opened."""
        del path
        return True

    def open(
        self,
        path: PurePath,
        *,
        split_part: str = "train",
        split_config: str | None = None,
        max_open: int = MAX_OPEN,
        **_: Any,
    ) -> Opened:
        """Opens a split part.

        Raises:
            FileNotFoundError: The folder, its split file, or a shard is missing.
            DatasetFormatError: A file of the dataset is not as it should be.
            EmptyDatasetError: The split part has no sample.
        """
        split, part, ids, excluded = open_part(path, split_part, split_config)
        reader = ShardReader(path, part.shards, part.counts, ids, excluded, max_open)
        if reader.num_samples == 0:
            raise EmptyDatasetError(
                f"{path}: every sample of split part {split_part!r} is excluded"
            )
        rest = tuple(sorted(part.excluded.items()))
        data, sizes = nvmeta.fingerprint(path, part.shards, part.counts, rest)
        stored = stored_offsets(path, split.info.shard_counts, ids, sizes)
        if stored is not None and len(split.info.shard_counts) >= _FEWEST_SHARDS:
            reader.stored = stored
        else:
            nvmeta.check_indexes(path, part.shards, part.counts)
        mean_shard = -(-sum(part.counts) // len(part.counts))
        content = "" if stored is None else stored.digest()
        return Opened(reader, data, sum(sizes), mean_shard, excluded, content)

    def split_parts(self, path: PurePath) -> Sequence[str]:
        """Returns the names in the split file."""
        return nvmeta.SplitFile(path, nvmeta.read_info(path)).names

    def beside(self, path: PurePath, name: str) -> tuple[PurePath, PurePath]:
        """Returns the folder, and where files of a kind lie in `.nv-meta`."""
        return path, path / nvmeta.META / "energon_lite" / name


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


def open_part(root: PurePath, split_part: str, split_config: str | None) -> OpenedPart:
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
    root: PurePath, numbers: Mapping[str, int], part: nvmeta.SplitPart
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
            wrong = [key for key, place in places.items() if not 0 <= place < count]
            if wrong:
                raise DatasetFormatError(
                    f"{root / nvmeta.META / INDEX_SQLITE}: sample {wrong[0]!r} is number "
                    f"{places[wrong[0]]} of {shard}, which has {count} samples; run "
                    f"`energon-lite prepare {root} --tar-index-only`"
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


def _places_in_shard(shard: PurePath) -> dict[str, int]:
    """Reads the sample keys of a shard that has no usable `index.sqlite`."""
    names = (header.key_and_part() for header in iter_tar(shard))
    keys = dict.fromkeys(name[0] for name in names if name is not None)
    return {key: place for place, key in enumerate(keys)}
