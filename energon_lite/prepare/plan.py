"""What to read and what to write: decided and checked before a single tar is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from energon_lite.prepare.config import check_config, config_text
from energon_lite.prepare.shards import Shard, find_shards
from energon_lite.prepare.splits import (
    parse_ratio,
    patterns_of,
    split_by_patterns,
    split_by_ratio,
)
from energon_lite.storage.field_access import FieldMap
from energon_lite.storage.nvmeta import (
    INFO_JSON,
    META,
    config_path,
    is_prepared,
    read_info,
    split_text,
)

SplitRatio = str | Sequence[float | str | Fraction]
SplitParts = Mapping[str, str | Sequence[str]] | Iterable[tuple[str, str]]


class Plan(NamedTuple):
    """All decisions: what is read, and what is written when that went well."""

    root: Path
    shards: list[Shard]
    splits: dict[str, list[str]] | None  # None: keep what is there
    field_map: FieldMap | None
    texts: dict[str, str]  # files of .nv-meta that users may edit
    old_counts: dict[str, int] | None  # of the info file that stays (tar_index_only)


class Request(NamedTuple):
    """What the caller of `prepare_dataset` asked for, under its argument names."""

    split_ratio: SplitRatio | None
    split_parts: SplitParts | None
    sample_type: str | None
    field_map: Mapping[str, str] | None
    split_config: str
    dataset_config: str
    exclude: str | None
    shuffle_seed: int | None
    force_overwrite: bool
    paths: Iterable[Path | str] | None


def make_plan(root: Path, request: Request) -> Plan:
    """Decides about a new dataset; errors are those of `prepare_dataset`."""
    field_map = check_config(request.sample_type, request.field_map)
    ratio, patterns = request.split_ratio, request.split_parts
    shares = parse_ratio(ratio) if ratio is not None else ()
    if not shares and patterns is None:
        raise ValueError(
            "give a split: split_ratio (--split-ratio 8,1,1) or split_parts (--split-parts)"
        )
    shards = find_shards(root, request.exclude, request.paths)
    if is_prepared(root) and not request.force_overwrite:
        raise FileExistsError(
            f"{root} is already prepared; use force_overwrite (--force-overwrite) to do it again, "
            "or tar_index_only (--tar-index-only) to make the indexes only"
        )
    names = [shard.name for shard in shards]
    if patterns is not None:
        splits = split_by_patterns(names, patterns_of(patterns))
    else:
        splits = split_by_ratio(names, shares, request.shuffle_seed)
    texts = {request.split_config: split_text(splits, (), request.split_config)}
    if request.sample_type is not None:
        texts[request.dataset_config] = config_text(request.sample_type, field_map)
    _check_existing(root, texts, request.force_overwrite)
    return Plan(root, shards, splits, field_map, texts, None)


def plan_again(root: Path, request: Request) -> Plan:
    """Decides about making the indexes of a prepared dataset again."""
    if any(request[:4]) or request.exclude:
        raise ValueError("tar_index_only keeps split and sample type; do not give them again")
    counts = read_info(root).shard_counts
    missing = [name for name in counts if not (root / name).is_file()]
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
        if file.is_file() and not force_overwrite and file.read_text() != text:
            raise FileExistsError(
                f"{file} exists and would be changed; use force_overwrite (--force-overwrite), "
                "another file name, or leave out the options that write it"
            )
