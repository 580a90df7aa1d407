"""What Energon's dataset class has for preparing data: `prepare_dataset` with its arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from os import PathLike
from typing import NoReturn

from energon_lite.prepare.decisions import Request, Watch, unwatched
from energon_lite.prepare.run import prepare_as
from energon_lite.storage.files import open_regular
from energon_lite.storage.local_paths import local_path
from energon_lite.storage.tar import iter_tar

logger = logging.getLogger(__name__)


def prepare_like_energon(
    parent_path: str | PathLike[str],
    paths: Iterable[str | PathLike[str]],
    *,
    split_parts_ratio: Sequence[tuple[str, float]] | None = None,
    split_parts_patterns: Sequence[tuple[str, str]] | None = None,
    split_config: str = "split.yaml",
    shuffle_seed: int | None = 42,
    progress_fn: Watch = unwatched,
    workers: int = 32,
    tar_index_only: bool = False,
    media_filter: None = None,
    fix_duplicates: bool = False,
    index_sqlite_tmp_path: str | PathLike[str] | None = None,
) -> set[str]:
    """Prepares the tars `paths` below `parent_path`, but writes no `dataset.yaml`.

    As in Energon a folder that is prepared is prepared again, a split part may be empty, and a
    shard may be in several; a warning is logged.

    Args:
        parent_path: the folder.
        paths: the tars, relative to the folder: names, brace patterns, globs.
        split_parts_ratio: (part, share) pairs, in order.
        split_parts_patterns: (part, regular expression) pairs; they win over the ratio.
        split_config: name of the split file in `.nv-meta`.
        shuffle_seed: shuffles the shards before they are split by ratio; None keeps their order.
        progress_fn: wraps the iterator over the shards: `progress_fn(iterator, total)`.
        workers: processes, at most.
        tar_index_only: only indexes the tars: of a prepared dataset those that it has.
        media_filter: not in this version.
        fix_duplicates: writes tars that share sample keys again, with `<tar>/<name>` as names.
        index_sqlite_tmp_path: not used; the database is built beside its place.

    Returns:
        The names of the parts in the data.

    Raises:
        ValueError: As `prepare_dataset`; or an argument needs a feature that this version lacks.
    """
    del index_sqlite_tmp_path
    if media_filter is not None:
        raise ValueError("media_filter: this version has no media metadata; leave it at None")
    request = Request(
        split_ratio=None if tar_index_only else split_parts_ratio,
        split_parts=None if tar_index_only else split_parts_patterns,
        split_config=split_config,
        shuffle_seed=shuffle_seed,
        force_overwrite=True,
        paths=paths,
        on_odd=logger.warning,
        num_workers=workers,
        tar_index_only=tar_index_only,
        fix_duplicates=fix_duplicates,
        watch=progress_fn,
    )
    report = prepare_as(parent_path, request)
    return set(report.part_names)


def iter_dataset_content(
    path: str | PathLike[str], extract_keys: Container[str] = ()
) -> Iterator[dict[str, bytes | None]]:
    """Yields the samples of a tar: for each part its bytes if it is in `extract_keys`, else None.

    Raises:
        DatasetFormatError: The tar is unreadable.
    """
    tar, key = local_path(path), None
    sample: dict[str, bytes | None] = {}
    with os.fdopen(open_regular(tar), "rb") as file:
        for header in iter_tar(tar):
            found = header.key_and_part()
            if found is None:
                continue
            if found[0] != key and sample:
                yield sample
                sample = {}
            key, part = found
            sample[part] = None
            if part in extract_keys:
                file.seek(header.data)
                sample[part] = file.read(header.size)
    if sample:
        yield sample


def add_media_metadata(parent_path: object, **kwargs: object) -> NoReturn:
    """Refuses: this version has no media metadata.

    Raises:
        NotImplementedError: Always.
    """
    del parent_path, kwargs
    raise NotImplementedError(
        "add_media_metadata: this version has no media metadata, and needs none for pictures"
    )
