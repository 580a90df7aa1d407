"""What to read and what to write: decided and checked before a single tar is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from energon_lite.prepare.config import SAMPLE_LOADER, check_config, config_text, loader_text
from energon_lite.prepare.shards import Shard, find_shards
from energon_lite.prepare.splits import (
    Ratio,
    parse_ratio,
    patterns_of,
    refuse,
    split_by_patterns,
    split_by_ratio,
)
from energon_lite.storage.field_access import FieldMap
from energon_lite.storage.files import is_there, read_file
from energon_lite.storage.nvmeta import (
    DEFAULT_DATASET,
    DEFAULT_SPLIT,
    INFO_JSON,
    META,
    config_path,
    is_prepared,
    read_info,
)
from energon_lite.storage.split_file import split_text

SplitParts = Mapping[str, str | Sequence[str]] | Iterable[tuple[str, str]]


class Plan(NamedTuple):
    """All decisions: what is read, and what is written when that went well.

    `splits` is None where those that are there stay, or where only indexes are made.
    """

    root: Path
    shards: list[Shard]
    splits: dict[str, list[str]] | None
    field_map: FieldMap | None
    texts: dict[str, str]  # files of .nv-meta that users may edit
    old_counts: dict[str, int] | None  # of the info file that stays (tar_index_only)

    def writes_info(self, counts: dict[str, int]) -> bool:
        """Returns whether the info file is written: it is new, or its counts are other ones."""
        return self.splits is not None or self.old_counts not in (None, counts)


class Request(NamedTuple):
    """What the caller of `prepare_dataset` asked for, under its argument names.

    `on_odd` is called with what is wrong about a split: it raises, or warns. With `loader_parts`,
    parts of the data, a `sample_loader.py` that the user edits stands for a field map.
    """

    split_ratio: Ratio | None = None
    split_parts: SplitParts | None = None
    sample_type: str | None = None
    field_map: Mapping[str, str | list[str]] | None = None
    split_config: str = DEFAULT_SPLIT
    dataset_config: str = DEFAULT_DATASET
    exclude: str | None = None
    shuffle_seed: int | None = None
    force_overwrite: bool = False
    paths: Iterable[str | os.PathLike[str]] | None = None
    on_odd: Callable[[str], None] = refuse
    loader_parts: Sequence[str] | None = None
    follow_links: bool = False


def decide_splits(names: Sequence[str], request: Request) -> dict[str, list[str]]:
    """Returns the shards of each split part.

    Raises:
        ValueError: There is no split, or it does not fit the shards.
    """
    if request.split_parts is not None:
        return split_by_patterns(names, patterns_of(request.split_parts), request.on_odd)
    if request.split_ratio is None:
        raise ValueError(
            "give a split: split_ratio (--split-ratio 8,1,1) or split_parts (--split-parts)"
        )
    shares = parse_ratio(request.split_ratio)
    return split_by_ratio(names, shares, request.shuffle_seed, request.on_odd)


def prepared_already(root: Path) -> FileExistsError:
    """Returns the error for a folder that is prepared, and that nobody wants to prepare again."""
    return FileExistsError(
        f"{root} is already prepared; use force_overwrite (--force-overwrite) to do it again, "
        "or tar_index_only (--tar-index-only) to make the indexes only"
    )


def make_plan(root: Path, request: Request) -> Plan:
    """Decides about a new dataset; errors are those of `prepare_dataset`."""
    by_loader = request.loader_parts is not None
    field_map = None if by_loader else check_config(request.sample_type, request.field_map)
    if request.split_ratio is not None:
        parse_ratio(request.split_ratio)
    shards = find_shards(root, request.exclude, request.paths)
    if is_prepared(root) and not request.force_overwrite:
        raise prepared_already(root)
    splits = decide_splits([shard.name for shard in shards], request)
    texts = {request.split_config: split_text(splits, (), request.split_config)}
    if request.sample_type is not None:
        texts[request.dataset_config] = config_text(request.sample_type, field_map, by_loader)
    _check_existing(root, texts, request.force_overwrite)
    if request.loader_parts is not None and not is_there(root / META / SAMPLE_LOADER):
        texts[SAMPLE_LOADER] = loader_text(str(request.sample_type), request.loader_parts)
    return Plan(root, shards, splits, field_map, texts, None)


def plan_again(root: Path, request: Request) -> Plan:
    """Decides about making the indexes of a prepared dataset again."""
    if any(request[:4]) or request.exclude:
        raise ValueError("tar_index_only keeps split and sample type; do not give them again")
    if request.paths is not None and not is_prepared(root):
        return Plan(root, find_shards(root, None, request.paths), None, None, {}, None)
    counts = read_info(root).shard_counts
    missing = [name for name in counts if not is_there(root / name)]
    if missing:
        raise FileNotFoundError(
            f"{root / missing[0]} is listed in {META}/{INFO_JSON} but does not exist "
            f"({len(missing)} such shards); prepare the dataset again with --force-overwrite"
        )
    shards = [Shard(name, root / name) for name in counts]
    return Plan(root, shards, None, None, {}, counts)


def _check_existing(root: Path, texts: Mapping[str, str], force_overwrite: bool) -> None:
    for name, text in texts.items():
        file = config_path(root, name)
        if force_overwrite or not is_there(file):
            continue
        if read_file(file) != text.encode():
            raise FileExistsError(
                f"{file} exists and would be changed; use force_overwrite (--force-overwrite), "
                "another file name, or leave out the options that write it"
            )
