"""`prepare_dataset`: from a folder of tars to a dataset that can be loaded.

First all decisions, then one pass over the tars, then all files at once; `.info.json`, which makes
a folder a dataset, comes last. So a run that fails or is killed leaves no half-made dataset.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.media.av_streams import INSTALL
from energon_lite.extras.media.media_headers import MediaFilterConfig
from energon_lite.extras.prepare import decisions
from energon_lite.extras.prepare.choose_shards import Ratio, Shard, data_root, size_of_all
from energon_lite.extras.prepare.index_writer import keep_media, new_index, read_offsets
from energon_lite.extras.prepare.indexing import ORIGINAL, ShardResult, index_shard, rename_samples
from energon_lite.extras.prepare.odd_parts import odd_parts
from energon_lite.extras.prepare.pool import ordered_results, outcome
from energon_lite.extras.prepare.report import PrepareReport, SplitCount
from energon_lite.extras.prepare.shared_keys import SharedKeysError, shared_keys_error
from energon_lite.extras.prepare.tried_samples import odd_values
from energon_lite.extras.stores.owned_folders import work_folder
from energon_lite.extras.view.words import first_of
from energon_lite.formats import nvmeta
from energon_lite.formats.known import format_of
from energon_lite.formats.nvmeta import INFO_JSON, INFO_YAML, META
from energon_lite.formats.sqlite import INDEX_SQLITE
from energon_lite.formats.stored_offsets import STORED_OFFSETS, write_offsets
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

# The version of Energon whose formats these are.
FORMAT_VERSION = "7.4.1"
_ERRORS_SHOWN = 10
logger = logging.getLogger(__name__)

PARTIAL, CLAIM = "prepare.partial", "prepare.lock"
# Indexes that are written at the same time to a storage elsewhere.
_NUM_WRITERS = 16


@contextmanager
def partial_folder(plan: decisions.Plan) -> Iterator[Path]:
    """Yields the folder for the rows, locked against a second run; removed after success."""
    folder = work_folder(plan.root / META / PARTIAL)
    try:
        files.make_folder(folder)
        lock = os.fdopen(files.open_own(folder / "lock"), "w")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise files.explained(error, folder) from None
        raise PermissionError(
            f"{plan.root} cannot be written to ({error.strerror}: {folder}); a prepared dataset "
            f"has a folder {META} and an index next to each tar. Prepare a folder of links to the "
            f"tars: `mkdir FOLDER && ln -s {files.absolute(plan.root)}/*.tar FOLDER`"
        ) from None
    with lock:
        try:
            # Not flock: worker processes would inherit it, and hold it after a kill.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another run is preparing {plan.root}; wait for it") from None
        except OSError:
            pass  # no locks on this file system
        with _cleaned(plan) if files.is_local(plan.root) else _claimed(plan, folder):
            yield folder
        shutil.rmtree(folder)


@contextmanager
def _cleaned(plan: decisions.Plan) -> Iterator[None]:
    """Removes what killed runs left in a folder, if that can be written to."""
    tars = [shard.path for shard in plan.shards]
    written = {INFO_JSON, INFO_YAML, STORED_OFFSETS, *plan.texts}
    written.update(path.name for tar in tars for path in (tar, nvmeta.index_path(tar)))
    for place in (plan.root / META, *plan.folders):
        if not os.access(place, os.W_OK):
            raise PermissionError(f"{place} cannot be written to; the indexes go there")
        files.remove_leftovers(place, written)
    yield


@contextmanager
def _claimed(plan: decisions.Plan, folder: Path) -> Iterator[None]:
    """Locks a dataset elsewhere by a file in it, against runs on all machines.

    That of a killed run is taken over where it ran, from the rows in `folder`.
    """
    claim = plan.root / META / CLAIM
    own = json.dumps({"host": socket.gethostname(), "folder": str(folder)})
    try:
        files.write_over(claim, own.encode(), None)
    except FileExistsError:
        with suppress(OSError):
            own = files.read_file(claim).decode(errors="replace")
        raise RuntimeError(
            f"another run is preparing {plan.root} ({own:.200}); wait for it. If it was killed, "
            f"start it again there, or remove {claim}"
        ) from None
    except OSError as error:
        raise PermissionError(
            f"{plan.root} cannot be written to ({error.strerror}: {claim}); write its metadata to "
            "another place: --meta-dir DIR"
        ) from None
    try:
        yield
    finally:
        files.remove(claim)


def check_places(plan: decisions.Plan) -> None:
    """Refuses to write where links lead out of the dataset.

    Raises:
        DatasetFormatError: Names the folder, where the link leads, and how to allow it.
    """
    partial = plan.root / META / PARTIAL
    if work_folder(partial).is_symlink():
        raise DatasetFormatError(f"{partial} is a link; move it away")
    for folder in sorted({partial, *plan.folders}):
        if files.leads_out(folder, plan.root):
            raise DatasetFormatError(
                f"{folder}: a link leads out of the dataset, to {files.resolved(folder)}, where "
                "nothing is written unasked. If that is meant, let follow_links=True "
                "(--follow-links) write there; or link the tars themselves, not their folder"
            )


def prepare_dataset(
    path: str | os.PathLike[str],
    *,
    split_ratio: Ratio | None = None,
    split_parts: decisions.SplitParts | None = None,
    sample_type: str | None = None,
    field_map: Mapping[str, str | list[str]] | None = None,
    split_config: str = nvmeta.DEFAULT_SPLIT,
    dataset_config: str = nvmeta.DEFAULT_DATASET,
    exclude: str | None = None,
    num_workers: int | None = None,
    shuffle_seed: int | None = None,
    tar_index_only: bool = False,
    fix_duplicates: bool = False,
    force_overwrite: bool = False,
    progress: Callable[[decisions.Progress], None] | None = None,
    paths: Iterable[str | os.PathLike[str]] | None = None,
    follow_links: bool = False,
    media_filter: MediaFilterConfig | None = None,
) -> PrepareReport:
    """Indexes the tars of a folder and writes its `.nv-meta`; or indexes a JSONL file.

    A run that was interrupted resumes when it is started again.

    Args:
        path: the folder, with all `.tar` files in it and below; or a `.jsonl` file, to be indexed.
        split_ratio: shares of train, val and test, `"8,1,1"`; or by name, `{"train": 0.9, ...}`.
        split_parts: regular expressions by part, from the start of a shard's path; win over ratios.
        sample_type: `"CaptioningSample"`, ..., or `"CrudeWebdataset"`; None: no `dataset.yaml`.
        field_map: for each field of the sample type the part that it is taken from.
        split_config: file name in `.nv-meta`.
        dataset_config: file name in `.nv-meta`.
        exclude: regular expression; a tar whose relative path holds a match is skipped.
        num_workers: processes; by default one per core, at most 16. 0 and 1: this process.
        shuffle_seed: shuffles the shards before they are split by ratio.
        tar_index_only: only indexes a prepared dataset again, and corrects its counts.
        fix_duplicates: where tars have samples of the same key, writes new tars with
            `<tar>/<name>` as the names of members. The old ones stay, as `<tar>.orig`.
        force_overwrite: prepares again, and replaces existing configs.
        progress: called after each shard.
        paths: only these tars, in this order: names in the folder, brace patterns, globs. With
            `tar_index_only` only where it is not prepared: then indexes are all that is written.
        follow_links: whether to write also where links to folders lead out of the folder.
        media_filter: which files get media metadata; those of an earlier run are kept.

    Raises:
        ValueError: The options contradict each other, or do not fit the shards.
        OSError: There is no such folder or no tar, it is prepared already, or not writable.
        DatasetFormatError: Tars cannot be used; names file, key and members.
        RuntimeError: A worker process died, or another run prepares the folder at this time.
    """
    request = decisions.Request(
        split_ratio, split_parts, sample_type, field_map, split_config, dataset_config, exclude,
        shuffle_seed, force_overwrite, paths, follow_links=follow_links, num_workers=num_workers,
        tar_index_only=tar_index_only, fix_duplicates=fix_duplicates, progress=progress,
        media_filter=media_filter,
    )  # fmt: skip
    return prepare_as(path, request)


def prepare_as(path: str | os.PathLike[str], request: decisions.Request) -> PrepareReport:
    """Does what `prepare_dataset` does, with the arguments in one value."""
    place = local_path(path)
    report: PrepareReport = format_of(place).prepare(place, request)
    return report


def prepare_folder(path: PurePath, request: decisions.Request) -> PrepareReport:
    """Indexes the tars of a folder and writes its `.nv-meta`."""
    root = data_root(path)
    if request.fix_duplicates and not files.is_local(root):
        raise ValueError(f"{root}: fix_duplicates (--fix-duplicates) writes tars again; copy them")
    plan = (decisions.plan_again if request.tar_index_only else decisions.make_plan)(root, request)
    if not request.follow_links:
        check_places(plan)
    with files.errors_of(root), partial_folder(plan) as folder:
        try:
            results = read_shards(plan, folder)
        except SharedKeysError:
            if not request.fix_duplicates:
                raise
            # What would be refused afterwards is refused before a tar is replaced.
            _odd_parts(plan, folder, read_shards(plan, folder, is_renamed=True))
            _rename(plan)
            results = read_shards(plan, folder)
        odd = _odd_parts(plan, folder, results)
        dropped = _commit(plan, folder, results)
    return _report(plan, results, dropped, odd)


def read_shards(plan: decisions.Plan, folder: Path, is_renamed: bool = False) -> list[ShardResult]:
    """Reads all tars and makes the index database in `folder`.

    Args:
        plan: the tars.
        folder: for the database, and for the rows of each tar.
        is_renamed: whether keys get the name of their tar in front, as `rename_samples` would do.
    """
    index = partial(index_shard, media_filter=plan.request.media_filter)
    tasks = [(shard, folder) for shard in plan.shards]
    num_bytes = size_of_all(plan.root, plan.shards)
    return read_all(plan, folder, index, tasks, num_bytes, is_renamed=is_renamed)


def read_all(
    plan: decisions.Plan,
    folder: Path,
    read: Callable[[Any], ShardResult],
    tasks: Sequence[Any],
    num_bytes: int,
    has_samples: bool = True,
    is_renamed: bool = False,
) -> list[ShardResult]:
    """Reads tars, or groups of other files, in parallel; makes the index database in `folder`."""
    request, media = plan.request, plan.request.media_filter
    results: dict[int, ShardResult] = {}
    errors: list[Exception] = []
    samples = size = 0
    row = None if media is None else media.row()
    with new_index(folder / INDEX_SQLITE, row, has_samples=has_samples) as add:
        found = ordered_results(partial(outcome, read), tasks, request.num_workers)
        for number, result in enumerate(request.watch(found, len(tasks))):
            if isinstance(result, Exception):
                errors.append(result)
            else:
                earlier = add(result.rows, number, f"{result.shard.name}/" if is_renamed else "")
                if earlier is not None:
                    errors.append(shared_keys_error(results[earlier], result))
                results[number] = result
                samples, size = samples + result.samples, size + result.size_bytes
            if request.progress is not None:
                at = decisions.Progress(number + 1, len(tasks), samples, size, num_bytes)
                request.progress(at)
        if errors:
            raise _combined(errors, len(tasks))
    return [*results.values()]


def _rename(plan: decisions.Plan) -> None:
    """Writes the tars again, with sample keys that begin with the name of the tar."""
    if plan.splits is not None:  # what an earlier run wrote is wrong from here on
        for name in (INFO_JSON, INFO_YAML):
            files.remove(plan.root / META / name)
    rename: Callable[[Shard], int | Exception] = partial(outcome, rename_samples)
    found = list(ordered_results(rename, plan.shards, plan.request.num_workers))
    errors = [result for result in found if isinstance(result, Exception)]
    if errors:
        raise _combined(errors, len(plan.shards))
    renamed = sum(bool(result) for result in found)
    logger.warning(
        "%s: %d new tars with unique sample keys; the old ones are beside them, as *.tar%s. Remove "
        "those when the new ones are as you want them", plan.root, renamed, ORIGINAL,
    )  # fmt: skip


def _combined(errors: Sequence[Exception], num_shards: int) -> Exception:
    """Returns one error for those of several shards, or groups of files."""
    if len(errors) == 1:
        return errors[0]
    is_shared = all(isinstance(error, SharedKeysError) for error in errors)
    kind = SharedKeysError if is_shared else DatasetFormatError
    text = "\n  ".join(first_of(list(map(str, errors)), _ERRORS_SHOWN))
    return kind(f"{len(errors)} of {num_shards} shards cannot be used:\n  {text}")


def media_warnings(results: Sequence[ShardResult], dropped: int = 0) -> tuple[int, list[str]]:
    """Adds up what was found in parts of a dataset.

    Args:
        results: what was found in each.
        dropped: entries of an earlier run that are gone.

    Returns:
        The number of files with metadata, and what is odd.
    """
    found = [result.media for result in results]
    stored = sum(count[0] for count in found)
    unreadable, without_pyav = sum(c[1] for c in found), sum(c[2] for c in found)
    first = next((count[3] for count in found if count[3]), "")
    lines = []
    if unreadable:
        lines.append(f"{unreadable:,} media files cannot be read, and have no metadata: {first}")
    if without_pyav:
        lines.append(
            f"{without_pyav:,} video and audio files have no metadata, which need PyAV: {INSTALL}; "
            "then run the same command again"
        )
    if dropped:
        lines.append(
            f"media metadata of {dropped:,} files of an earlier run are dropped, since the files "
            "changed or are gone; choose them again with --media-metadata-by-..."
        )
    return stored, lines


def _odd_parts(plan: decisions.Plan, folder: Path, results: Sequence[ShardResult]) -> list[str]:
    """Checks that there are samples; returns what is odd about their parts."""
    index, parts = folder / INDEX_SQLITE, _counts_of_parts(results)
    num_samples = sum(result.samples for result in results)
    kind = decisions.sample_type_of(plan.request.sample_type or decisions.CRUDE)
    values: list[str] = []
    if plan.field_map is not None and kind is not None:
        try:
            decisions.check_samples(plan.field_map, index, parts, num_samples, plan.root)
        except DatasetFormatError as error:  # perhaps its parts are links
            warning = next((result.warning for result in results if result.warning), "")
            raise DatasetFormatError(f"{error}{warning and '. '}{warning}") from None
        values = odd_values(results, plan.field_map, kind)
    errors, warnings = odd_parts(index, parts, num_samples, plan.field_map)
    return [*values, *errors, *warnings]


def _counts_of_parts(results: Sequence[ShardResult]) -> dict[str, int]:
    parts: Counter[str] = Counter()
    for result in results:
        parts.update(result.parts)
    return dict(parts)


def _report(
    plan: decisions.Plan, results: Sequence[ShardResult], dropped: int, odd: list[str]
) -> PrepareReport:
    counts = {result.shard.name: result.samples for result in results}
    splits = {
        part: SplitCount(len(names), sum(counts[name] for name in names))
        for part, names in (plan.splits or {}).items()
    }
    parts: Counter[str] = Counter()
    for part, count in _counts_of_parts(results).items():
        parts[part.lower()] += count
    warnings = [result.warning for result in results if result.warning]
    warnings = [*first_of(warnings, _ERRORS_SHOWN), *odd]
    if plan.splits is not None:
        unused = len(counts) - len({name for names in plan.splits.values() for name in names})
        if unused:
            warnings.append(f"{unused} of {len(counts)} shards are in no split part")
        warnings += decisions.empty_parts(plan.request, plan.splits)
    media_files, lines = media_warnings(results, dropped)
    warnings += lines
    written = [INDEX_SQLITE, *plan.texts, *([INFO_JSON] if plan.writes_info(counts) else [])]
    return PrepareReport(
        path=plan.root,
        shards=len(results),
        samples=sum(counts.values()),
        size_bytes=sum(result.size_bytes for result in results),
        splits=splits,
        parts=dict(parts),
        resumed_shards=sum(result.is_resumed for result in results),
        written=("*.tar.idx", *(f"{META}/{name}" for name in (*written, STORED_OFFSETS))),
        warnings=tuple(warnings),
        media_files=None if plan.request.media_filter is None else media_files,
    )


def _commit(plan: decisions.Plan, folder: Path, results: Sequence[ShardResult]) -> int:
    """Writes all files; until the last one the folder is no dataset.

    Returns:
        Files of an earlier run that have no media metadata any more.
    """
    meta = plan.root / META
    counts = {result.shard.name: result.samples for result in results}
    before, had_yaml = files.status_of(meta / INFO_JSON), files.is_there(meta / INFO_YAML)
    dropped = 0
    try:
        dropped = keep_media(folder / INDEX_SQLITE, meta / INDEX_SQLITE)
    except DatasetFormatError as error:  # a corrupt index is one reason to prepare again
        logger.warning("%s. Its media metadata, if it had any, is not kept", error)
    if plan.splits is not None:
        files.remove(meta / INFO_JSON)
        files.remove(meta / INFO_YAML)
    with ThreadPoolExecutor(1 if files.is_local(meta) else _NUM_WRITERS) as pool:
        uuid = plan.texts[nvmeta.INDEX_UUID]
        write_offsets(plan.root, counts, uuid, pool.map(_write_index, results))
    files.move(folder / INDEX_SQLITE, meta / INDEX_SQLITE)
    for name, text in plan.texts.items():
        files.write_atomically(meta / name, text.encode())
    if plan.writes_info(counts):
        over = before.identity if before is not None and plan.splits is None else None
        info = nvmeta.DatasetInfo(counts, FORMAT_VERSION)
        nvmeta.write_info(plan.root, info, also_yaml=had_yaml, over=over)
    return dropped


def _write_index(result: ShardResult) -> tuple[int, str, int, list[int]]:
    """Writes the `.tar.idx` of a shard; returns what `write_offsets` takes of it."""
    first_key, offsets = read_offsets(result.rows)
    nvmeta.write_index(result.shard.path, offsets)
    return result.size_bytes, first_key, result.content, offsets


# ------------------------------------------------------------ with the arguments of Energon's class


def prepare_like_energon(
    parent_path: str | os.PathLike[str],
    paths: Iterable[str | os.PathLike[str]],
    *,
    split_parts_ratio: Sequence[tuple[str, float]] | None = None,
    split_parts_patterns: Sequence[tuple[str, str]] | None = None,
    split_config: str = "split.yaml",
    shuffle_seed: int | None = 42,
    progress_fn: decisions.Watch = decisions.unwatched,
    workers: int = 32,
    tar_index_only: bool = False,
    media_filter: MediaFilterConfig | None = None,
    fix_duplicates: bool = False,
    index_sqlite_tmp_path: str | os.PathLike[str] | None = None,
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
        media_filter: which files get media metadata.
        fix_duplicates: writes new tars where some share sample keys, with `<tar>/<name>` as names.
        index_sqlite_tmp_path: not used; the database is built beside its place.

    Returns:
        The names of the parts in the data.

    Raises:
        ValueError: As `prepare_dataset`; or an argument needs a feature that this version lacks.
    """
    del index_sqlite_tmp_path
    request = decisions.Request(
        None if tar_index_only else split_parts_ratio,
        None if tar_index_only else split_parts_patterns,
        split_config=split_config, shuffle_seed=shuffle_seed, force_overwrite=True, paths=paths,
        on_odd=logger.warning, num_workers=workers, tar_index_only=tar_index_only,
        fix_duplicates=fix_duplicates, watch=progress_fn, media_filter=media_filter,
    )  # fmt: skip
    report = prepare_as(parent_path, request)
    for warning in report.warnings:
        files.warn_once(f"{report.path}: {warning}")
    return set(report.parts)
