"""`prepare_dataset` with the arguments that Energon's dataset class has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from energon_lite.prepare.dataset import prepare_dataset

_RATIO_PARTS = ("train", "val", "test")


def prepare_like_energon(
    parent_path: str | PathLike[str],
    paths: Iterable[str | PathLike[str]],
    *,
    split_parts_ratio: Sequence[tuple[str, float]] | None = None,
    split_parts_patterns: Sequence[tuple[str, str]] | None = None,
    split_config: str = "split.yaml",
    shuffle_seed: int | None = 42,
    progress_fn: Callable[[Any, int], Any] | None = None,
    workers: int = 32,
    tar_index_only: bool = False,
    media_filter: None = None,
    fix_duplicates: bool = False,
    index_sqlite_tmp_path: str | PathLike[str] | None = None,
) -> set[str]:
    """Prepares the tars `paths` below `parent_path`, but writes no `dataset.yaml`.

    Args:
        parent_path: the folder.
        paths: the tars, relative to the folder.
        split_parts_ratio: (part, share) for train, val and test.
        split_parts_patterns: (part, regular expression on relative paths).
        split_config: name of the split file in `.nv-meta`.
        shuffle_seed: shuffles the shards before they are split by ratio; None keeps their order.
        progress_fn: called as `progress_fn(iterator, total)`, gives the iterator.
        workers: processes, at most.
        tar_index_only: only indexes a prepared dataset again.
        media_filter: not in this version.
        fix_duplicates: not in this version: the tars are the user's only copy.
        index_sqlite_tmp_path: not used; the database is built beside its place.

    Returns:
        The names of the parts in the data.

    Raises:
        ValueError: As `prepare_dataset`; or an argument asks for what this version does not have.
    """
    del index_sqlite_tmp_path
    if media_filter is not None:
        raise ValueError("media_filter: this version writes no media metadata; leave it at None")
    if fix_duplicates:
        raise ValueError(
            "fix_duplicates: tars are never rewritten in place; write them again with unique keys"
        )
    total = [Path(path) for path in paths]
    if progress_fn is not None:
        # Energon's callers wrap an iterator of shards in a bar; here the shards are known at once.
        total = list(progress_fn(iter(total), len(total)))
    report = prepare_dataset(
        parent_path,
        paths=total,
        split_ratio=_ratio(split_parts_ratio) if split_parts_ratio else None,
        split_parts=list(split_parts_patterns) if split_parts_patterns else None,
        split_config=split_config,
        shuffle_seed=shuffle_seed,
        num_workers=workers,
        tar_index_only=tar_index_only,
        force_overwrite=True,
    )
    return set(report.part_names)


def _ratio(shares: Sequence[tuple[str, float]]) -> list[float]:
    unknown = [part for part, _ in shares if part not in _RATIO_PARTS]
    if unknown:
        raise ValueError(
            f"split_parts_ratio names {unknown[0]!r}; by ratio there are train, val and test. "
            "Use split_parts_patterns for other parts"
        )
    return [dict(shares).get(part, 0) for part in _RATIO_PARTS]
