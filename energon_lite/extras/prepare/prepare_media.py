"""Media metadata of what is there already: prepared WebDatasets, and folders of plain files.

A folder of plain files gets an `index.sqlite` with nothing but the metadata. Of a WebDataset the
index is written again, from the tars and with the metadata; no other file changes. Both runs resume
when they are started again, and both replace the index at the end, when all is done.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.media.media_headers import MediaFile, MediaFilterConfig, media_rows
from energon_lite.extras.prepare import decisions
from energon_lite.extras.prepare.choose_shards import Shard, data_root, files_below
from energon_lite.extras.prepare.index_writer import ShardRows, keep_media, read_offsets
from energon_lite.extras.prepare.indexing import ShardResult, kept_or_made, made_by, rows_path, seen
from energon_lite.extras.prepare.run import (
    check_places,
    media_warnings,
    partial_folder,
    read_all,
    read_shards,
)
from energon_lite.formats import nvmeta
from energon_lite.formats.nvmeta import META, is_utf8
from energon_lite.formats.sqlite import INDEX_SQLITE
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

_FILES_PER_TASK = 256
# For each file of a folder: name, size and identity.
_Files = list[tuple[str, int, Any]]


@dataclasses.dataclass(frozen=True)
class MediaReport:
    """The findings of `prepare_media`.

    Attributes:
        path: the folder.
        stored: number of files whose metadata were stored.
        is_webdataset: whether the files are members of tars.
        warnings: what is odd: files that cannot be read, that need PyAV, or are gone.
    """

    path: PurePath
    stored: int
    is_webdataset: bool
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON-serialisable values."""
        return {**dataclasses.asdict(self), "path": str(self.path)}


def prepare_media(
    path: str | os.PathLike[str],
    media_filter: MediaFilterConfig,
    *,
    num_workers: int | None = None,
    progress: Callable[[decisions.Progress], None] | None = None,
    watch: decisions.Watch = decisions.unwatched,
) -> MediaReport:
    """Stores the metadata of the images, videos and recordings of a folder.

    What an earlier run stored of other files is kept.

    Args:
        path: a prepared WebDataset, or a folder of files.
        media_filter: which files get metadata: `MediaFilterConfig.parse(...)`.
        num_workers: processes; by default one per core, at most 16. 0 and 1: this process.
        progress: called after each shard, or after some files.
        watch: wraps the iterator over the shards, or over groups of files.

    Raises:
        ValueError: It is no folder, or has no file that is chosen.
        OSError: There is no such folder, or it cannot be written to.
        DatasetFormatError: The tars are not those that were prepared.
        RuntimeError: A worker process died, or another run prepares the folder at this time.
    """
    file = local_path(path)
    if files.is_file(file):
        raise ValueError(
            f"{file}: 'prepare-media' only supports WebDatasets or filesystem datasets; name the "
            "folder that has the media files"
        )
    root = data_root(path)
    request = decisions.Request(
        tar_index_only=True, media_filter=media_filter, num_workers=num_workers,
        progress=progress, watch=watch,
    )  # fmt: skip
    is_webdataset = nvmeta.is_prepared(root)
    if is_webdataset:
        plan = decisions.plan_again(root, request)
    else:
        plan = decisions.Plan(root, request, [], None, None, {}, None)
    target = root / META / INDEX_SQLITE
    written = plan._replace(shards=[], texts={})
    check_places(written)
    with files.errors_of(root), partial_folder(written) as folder:
        results = (_read_tars if is_webdataset else _read_folder)(plan, folder)
        is_there = None if is_webdataset else lambda key: files.is_file(root / key)
        dropped = keep_media(folder / INDEX_SQLITE, target, is_there)
        files.move(folder / INDEX_SQLITE, target)
    stored, warnings = media_warnings(results, dropped)
    return MediaReport(root, stored, is_webdataset, tuple(warnings))


def _read_tars(plan: decisions.Plan, folder: Path) -> list[ShardResult]:
    """Writes the index of a WebDataset again, with media metadata, in `folder`."""
    results = read_shards(plan, folder)
    for result in results:
        offsets = nvmeta.read_index(result.shard.path, (plan.old_counts or {})[result.shard.name])
        if offsets.tolist()[1:] != read_offsets(result.rows)[1][1:]:
            raise DatasetFormatError(
                f"{result.shard.path}: is not the tar that was prepared; run `energon-lite prepare "
                f"{plan.root} --tar-index-only` first"
            )
    return results


# -------------------------------------------------------------------------------- plain files


def _read_folder(plan: decisions.Plan, folder: Path) -> list[ShardResult]:
    """Makes the index of a folder of files in `folder`."""
    media_filter = plan.request.media_filter
    assert media_filter is not None
    found = _files_of(plan.root, media_filter)
    tasks = [found[i : i + _FILES_PER_TASK] for i in range(0, len(found), _FILES_PER_TASK)]
    read = partial(_read_group, plan.root, folder, media_filter)
    return read_all(plan, folder, read, tasks, _size_bytes(found), has_samples=False)


def _files_of(root: PurePath, media_filter: MediaFilterConfig) -> _Files:
    """Returns the files of a folder that may get metadata.

    Raises:
        ValueError: There is none.
    """
    names = files_below(root)
    chosen = sorted(n for n in names if is_utf8(n) and media_filter.should_consider_media(n))
    if not chosen:
        hint = ""
        if any(name.lower().endswith(".tar") for name in names):
            hint = f". To use its tars as a dataset, run `energon-lite prepare {root}` first"
        raise ValueError(
            f"{root}: No media files found to process: none of {len(names):,} files is chosen by "
            f"{media_filter.strategy.value} {', '.join(media_filter.patterns)}".rstrip()
            + hint
        )
    return [(name, *seen(root / name)) for name in chosen]


def _size_bytes(some: _Files) -> int:
    return sum(size for _, size, _ in some)


def _read_group(
    root: PurePath, folder: Path, media_filter: MediaFilterConfig, group: _Files
) -> ShardResult:
    """Writes the metadata of some files, or takes those of an earlier run."""

    def make() -> tuple[ShardRows, dict[str, Any]]:
        found = media_rows((MediaFile(n, root / n) for n, _, _ in group), media_filter)
        return ShardRows([], [], found.rows), {"media": [len(found.rows), *found[1:]]}

    name = f"files {group[0][0]}"
    rows = rows_path(folder, name)
    record, is_resumed = kept_or_made(rows, [group, *made_by(media_filter)], make)
    return ShardResult(
        Shard(name, root), rows, _size_bytes(group), is_resumed,
        samples=len(group), parts={}, warning="", content=0, **record,
    )  # fmt: skip


# ------------------------------------------------------------ with the arguments of Energon's


def add_media_metadata(
    parent_path: str | os.PathLike[str],
    *,
    media_filter: MediaFilterConfig,
    workers: int = 32,
    progress_fn: decisions.Watch = decisions.unwatched,
    index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
) -> int:
    """Adds media metadata to the index of a prepared WebDataset.

    Args:
        parent_path: the folder.
        media_filter: which files get metadata.
        workers: processes, at most.
        progress_fn: wraps the iterator over the shards: `progress_fn(iterator, total)`.
        index_sqlite_tmp_path: not used; the index is built beside its place.

    Returns:
        The number of files with metadata.

    Raises:
        FileNotFoundError: The folder is no prepared WebDataset.
    """
    del index_sqlite_tmp_path
    nvmeta.read_info(data_root(parent_path))
    report = prepare_media(parent_path, media_filter, num_workers=workers, watch=progress_fn)
    return _stored(report)


def prepare_filesystem_dataset(
    root_path: str | os.PathLike[str],
    media_filter: MediaFilterConfig,
    *,
    progress: bool = False,
    workers: int = 16,
    index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
) -> int:
    """Stores the media metadata of a folder of files.

    Args:
        root_path: the folder.
        media_filter: which files get metadata.
        progress: accepted, without effect: `prepare_media` has a function for it.
        workers: processes, at most.
        index_sqlite_tmp_path: not used; the index is built beside its place.

    Returns:
        The number of files with metadata.
    """
    del progress, index_sqlite_tmp_path
    return _stored(prepare_media(root_path, media_filter, num_workers=workers))


def _stored(report: MediaReport) -> int:
    for warning in report.warnings:
        files.warn_once(f"{report.path}: {warning}")
    return report.stored
