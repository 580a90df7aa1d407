"""Checks a prepared folder: indexes against tars, split files, and that every sample decodes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError, describe
from energon_lite.core.stream_context import replaying
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.extras.prepare.indexing import scan_shard
from energon_lite.extras.prepare.odd_parts import odd_parts
from energon_lite.extras.prepare.pool import ordered_results
from energon_lite.formats.field_access import FieldMap
from energon_lite.formats.known import format_of
from energon_lite.formats.nvmeta import (
    DEFAULT_DATASET,
    DEFAULT_SPLIT,
    INFO_JSON,
    INFO_YAML,
    META,
    DatasetInfo,
    SplitFile,
    SplitPart,
    index_path,
    read_index,
    read_info,
    reindex,
)
from energon_lite.formats.sqlite import INDEX_SQLITE, IndexDatabase
from energon_lite.formats.stored_offsets import STORED_OFFSETS, stored_offsets
from energon_lite.formats.tar import BLOCK
from energon_lite.metadataset.nodes import leaves
from energon_lite.metadataset.read import is_metadataset, read_metadataset, split_names
from energon_lite.sources.dataset_config import load_factory
from energon_lite.sources.misfits import misfits
from energon_lite.storage.byte_file import NotLocalError
from energon_lite.storage.files import is_there, sizes_of
from energon_lite.storage.local_paths import local_path
from energon_lite.storage.yaml import load_yaml

# A part above this size is more often a mistake than a sample.
LARGE_PART_BYTES = 1 << 30
_SAMPLES_PER_TASK = 4096
_LISTED_PER_PLACE = 20

# Calls a function on tasks, and adds its reports; the text names what is done, for the progress.
_Each = Callable[["LintReport", Callable[[Any], "LintReport"], Sequence[Any], str], None]


class LintProblem(NamedTuple):
    """One thing that is wrong: the file, shard or sample, and what about it."""

    where: str
    message: str


@dataclasses.dataclass
class LintReport:
    """The findings of `lint_dataset`.

    Attributes:
        path: the dataset's folder.
        shards: tars that were read.
        samples: samples that were decoded.
        failed_samples: samples of them that raised an error.
        errors: what makes data unusable.
        warnings: what is odd, but loads.
    """

    path: PurePath
    shards: int = 0
    samples: int = 0
    failed_samples: int = 0
    errors: list[LintProblem] = dataclasses.field(default_factory=list)
    warnings: list[LintProblem] = dataclasses.field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    def add_error(self, where: object, *messages: object) -> None:
        """Adds errors of one place; of many, the first twenty."""
        self.errors += _listed(str(where), messages)

    def add_warning(self, where: object, *messages: object) -> None:
        """Adds warnings of one place; of many, the first twenty."""
        self.warnings += _listed(str(where), messages)

    def add(self, other: LintReport, place: str = "") -> None:
        """Adds the problems and counts of a part of the dataset, which `place` names."""
        self.shards += other.shards
        self.samples += other.samples
        self.failed_samples += other.failed_samples
        errors = (LintProblem(f"{place}{at}", text) for at, text in other.errors)
        self.errors += [problem for problem in errors if problem not in self.errors]
        self.warnings += [LintProblem(f"{place}{at}", text) for at, text in other.warnings]

    @contextlib.contextmanager
    def errors_at(
        self, where: object, kinds: tuple[type[Exception], ...] = (ValueError, OSError)
    ) -> Iterator[None]:
        """Adds what is raised as an error of one place, after which the checks continue."""
        try:
            yield
        except kinds as error:
            self.add_error(where, describe(error) if Exception in kinds else error)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON-serialisable values."""
        return {
            **vars(self),
            "path": str(self.path),
            "ok": self.is_ok,
            "errors": [problem._asdict() for problem in self.errors],
            "warnings": [problem._asdict() for problem in self.warnings],
        }


def _listed(where: str, messages: Sequence[object]) -> Iterator[LintProblem]:
    for message in messages[:_LISTED_PER_PLACE]:
        yield LintProblem(where, str(message))
    if len(messages) > _LISTED_PER_PLACE:
        more = len(messages) - _LISTED_PER_PLACE
        yield LintProblem(where, f"and {more} more of this kind")


def lint_dataset(
    path: str | os.PathLike[str],
    *,
    split_parts: Sequence[str] | None = None,
    split_config: str | None = None,
    dataset_config: str | None = None,
    num_workers: int | None = None,
    decode: bool = True,
    trust: bool | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> LintReport:
    """Reads a whole dataset and lists what is wrong with it.

    Args:
        path: the folder, a file of samples, or a metadataset, all of whose datasets are read.
        split_parts: the split parts, or splits of a metadataset, that are decoded; by default all.
        split_config: file name in `.nv-meta`, by default `split.yaml`.
        dataset_config: file name in `.nv-meta`, by default `dataset.yaml`.
        num_workers: processes; by default one per usable core, at most 16. 0 and 1: this process.
        decode: whether samples are decoded, after the indexes are checked.
        trust: whether code that the dataset names (`sample_loader.py`) may be run.
        progress: called with the step, and how many shards (or samples) are done, of how many.

    Raises:
        FileNotFoundError: The folder is not prepared.
        DatasetFormatError: `.info.json` cannot be read, or a split part does not exist.
        RuntimeError: A worker process died.
    """
    root = local_path(path)
    if is_metadataset(root):
        check = partial(
            lint_dataset, num_workers=num_workers, decode=decode, trust=trust, progress=progress
        )
        return _lint_folders(root, split_parts, split_config or dataset_config, trust, check)
    each: _Each = partial(_with_progress, num_workers, progress)
    report: LintReport = format_of(root).lint(
        root, each, decode=decode, trust=trust, split_parts=split_parts,
        split_config=split_config, dataset_config=dataset_config,
    )  # fmt: skip
    return report


def lint_folder(
    root: Path,
    each: _Each,
    *,
    split_parts: Sequence[str] | None,
    split_config: str | None,
    dataset_config: str | None,
    decode: bool,
    trust: bool | None,
) -> LintReport:
    """Compares a folder with its indexes and configs, and decodes its samples."""
    info = read_info(root)
    report = LintReport(root)
    files = split_config or DEFAULT_SPLIT, dataset_config or DEFAULT_DATASET
    _check_yaml(root, info, files, report)
    has_index, stored = _check_database(root, info, report), stored_offsets(root, info.shard_counts)
    read = partial(_check_shard, root, reindex(root / META), has_index, stored)
    shards = [(n, *item) for n, item in enumerate(info.shard_counts.items())]
    each(report, read, shards, "Reading shards")
    parts = _check_splits(root, info, split_config, report)
    if split_parts is not None:
        for name in set(split_parts) - {part.name for part in parts}:
            with contextlib.suppress(EmptyDatasetError):  # there is nothing to decode
                SplitFile(root, info, split_config).part(name)  # the error lists what there is
        parts = [part for part in parts if part.name in split_parts]
    if decode:
        configs = {"dataset_config": dataset_config, "split_config": split_config, "trust": trust}
        open_part = partial(_opened, root, tuple(configs.items()))
        _opened.cache_clear()
        _check_parts(open_part, info, parts, report)
        _decode_all(
            open_part, {part.name: _most_samples(root, part) for part in parts}, report, each
        )
    return report


def _lint_folders(
    file: PurePath,
    splits: Sequence[str] | None,
    config: str | None,
    trust: bool | None,
    check: Callable[..., LintReport],
) -> LintReport:
    """Reads each dataset of a metadataset once."""
    if config:
        raise ValueError(f"{file} is a metadataset, which names the files in .nv-meta itself")
    parts: dict[tuple[PurePath, str | None, str | None], set[str]] = {}
    for split in splits or split_names(file):
        for leaf in leaves(read_metadataset(file, split, trust)):
            for folder in leaf.folders:
                key = folder.path, folder.split_config, folder.dataset_config
                parts.setdefault(key, set()).add(folder.split_part)
    report = LintReport(file)
    for (path, split_config, dataset_config), names in parts.items():
        with report.errors_at(path):
            found = check(path, split_parts=sorted(names), split_config=split_config,
                          dataset_config=dataset_config)  # fmt: skip
            report.add(found, f"{path}: ")
    return report


def _with_progress(
    num_workers: int | None,
    progress: Callable[[str, int, int], None] | None,
    report: LintReport,
    function: Callable[[Any], LintReport],
    tasks: Sequence[Any],
    what: str,
) -> None:
    """Adds the report of each task, and draws the progress."""
    for number, found in enumerate(ordered_results(function, tasks, num_workers), 1):
        report.add(found)
        if progress is not None:
            progress(what, number, len(tasks))


# ------------------------------------------------------------------------- tars and their indexes


def lint_file(path: PurePath, each: _Each, *, decode: bool, **_: Any) -> LintReport:
    """Checks what lies beside a file of samples, and decodes all of them."""
    report, known = LintReport(path, shards=1), format_of(path)
    known.check(path, report)
    if decode and report.is_ok:
        _opened.cache_clear()
        _decode_all(partial(_opened, path, ()), {"": sys.maxsize}, report, each)
    return report


def _check_yaml(
    root: PurePath, info: DatasetInfo, files: Sequence[str], report: LintReport
) -> None:
    """Compares the info file of old versions, and lists keys that are twice in a file."""
    old = root / META / INFO_YAML
    if is_there(old) and is_there(root / META / INFO_JSON):
        try:
            value = load_yaml(old)
            if not isinstance(value, dict) or value.get("shard_counts") != info.shard_counts:
                what = f"differs from {INFO_JSON}, which is what counts"
                report.add_warning(old, f"{what}; prepare again or delete it")
        except DatasetFormatError as error:
            report.add_warning(old, error)
    for path in (root / META / name for name in files):
        doubles: list[str] = []
        # What cannot be read is reported where it is used.
        with contextlib.suppress(DatasetFormatError, FileNotFoundError):
            load_yaml(path, doubles.append)
        report.add_warning(path, *(f"{text}; the last counts" for text in doubles))


def _check_database(root: PurePath, info: DatasetInfo, report: LintReport) -> bool:
    """Checks `index.sqlite` as a whole; returns whether its rows can be compared."""
    file = f"{META}/{INDEX_SQLITE}"
    counts: dict[int, int] | None = None
    try:
        with IndexDatabase(root) as index:
            if "samples" not in index.tables:
                report.add_warning(file, f"has no table 'samples'; {reindex(root / file)}")
            elif not index.has_unique_keys():
                report.add_error(file, "two samples have the same key")
            counts = index.shard_counts()
    except (FileNotFoundError, NotLocalError) as error:
        report.add_warning(file, error)
    except DatasetFormatError as error:
        report.add_error(file, error)
    for unknown in sorted(set(counts or ()) - set(range(len(info.shard_counts))))[:1]:
        what = f"has samples of shard number {unknown}, which {INFO_JSON} does not have"
        report.add_error(file, f"{what}; {reindex(root / file)}")
    return counts is not None


def _check_shard(
    root: Path, again: str, has_index: bool, stored: Any, task: tuple[int, str, int]
) -> LintReport:
    """Compares a tar with its index, the stored offsets, its count and its rows in `index.sqlite`.

    Args:
        root: the dataset's folder.
        again: what to do about a wrong index.
        has_index: whether there are such rows.
        stored: the `StoredOffsets` of the dataset, if it has them.
        task: number, name and samples of the shard.
    """
    number, name, num_samples = task
    path = root / name
    report = LintReport(path, shards=1)
    with report.errors_at(name):
        rows, end, linked = scan_shard(path)
        report.add_warning(name, *filter(None, [linked]))
        starts = [start for _, _, start, _ in rows.samples]
        reads: list[tuple[str, Any]] = [(index_path(path).name, partial(read_index, path))]
        if stored is not None:
            reads.append((STORED_OFFSETS, partial(stored.read, number)))
        if len(starts) != num_samples:
            what = f"has {len(starts)} samples, {INFO_JSON} lists {num_samples}"
            report.add_error(name, f"{what}; {again}")
        for file, read in reads:
            with report.errors_at(name):
                offsets = read(num_samples).tolist()
                # It has 0 for the first sample, also where a folder entry comes before it.
                true = [0, *starts[1:], end]
                wrong = [i for i, (a, b) in enumerate(zip(offsets, true, strict=False)) if a != b]
                for i in wrong[:1]:
                    report.add_error(
                        name,
                        f"{file} has sample {i} at byte {offsets[i]}, the tar at {true[i]} "
                        f"({len(wrong)} of {len(true)} offsets differ); {again}",
                    )
        sizes = ((f"{rows.samples[n][1]}.{part}", size) for n, part, _, size in rows.parts)
        report.add_warning(
            name,
            *(f"member '{member}' {f'has {size / 2**30:.1f} GiB' if size else 'is empty'}"
              for member, size in sizes if not 0 < size <= LARGE_PART_BYTES),
        )  # fmt: skip
        if has_index:
            with IndexDatabase(root) as index:
                stored = index.shard_rows(number)
            if stored != [row[:3] for row in rows.samples]:
                report.add_error(
                    name, f"{META}/{INDEX_SQLITE} has other samples or offsets; {again}"
                )
    return report


# ------------------------------------------------------------------------------------ split parts


def _check_splits(
    root: PurePath, info: DatasetInfo, config: str | None, report: LintReport
) -> list[SplitPart]:
    """Checks the split file; returns the parts that have samples."""
    file = f"{META}/{config or DEFAULT_SPLIT}"
    usable: list[SplitPart] = []
    with report.errors_at(file):
        split = SplitFile(root, info, config)
        excludes = split.excludes
        for name in split.names:
            # `prepare` writes parts without shards on purpose.
            with report.errors_at(file), contextlib.suppress(EmptyDatasetError):
                usable.append(split.part(name))
        owners: dict[str, str] = {}
        for part in usable:
            doubles = [shard for shard, count in Counter(part.shards).items() if count > 1]
            shared = [s for s in part.shards if owners.setdefault(s, part.name) != part.name]
            report.add_warning(
                file,
                *(f"shard {s!r} is in the parts {owners[s]!r} and {part.name!r}" for s in shared),
                *(f"part {part.name!r} lists shard {s!r} twice; its samples come twice"
                  for s in doubles),
            )  # fmt: skip
        unused = [s for s in info.shard_counts if s not in owners and s not in excludes.shards]
        if len(unused) == 1:
            report.add_warning(file, f"shard {unused[0]!r} is in no split part")
        elif unused:
            what = f"{len(unused)} shards are in no split part, the first is {unused[0]!r}"
            report.add_warning(file, what)
        report.add_warning(
            file,
            *(f"exclude entry {e!r} fits no shard and excludes nothing" for e in excludes.unknown),
        )
    return usable


def _check_parts(
    open_part: Callable[..., Any], info: DatasetInfo, parts: Sequence[SplitPart], report: LintReport
) -> None:
    """Checks the parts of all samples, by the index, against the fields of the sample type."""
    try:
        with IndexDatabase(report.path) as index:
            sizes = index.part_sizes() or {}
        factory: Any = open_part(parts[0].name)[0] if parts else None
        settings = factory.sample_settings() if factory else {}
    except Exception:  # is reported where the index is checked, or samples are decoded
        return
    field_map = FieldMap(settings["field_map"]) if settings.get("field_map") else None
    counts = {name: count for name, (count, _) in sizes.items()}
    num_samples = sum(info.shard_counts.values())
    errors, warnings = odd_parts(index.path, counts, num_samples, field_map)
    report.add_error(report.path, *errors)
    report.add_warning(report.path, *warnings)


def _most_samples(root: PurePath, part: SplitPart) -> int:
    """Returns how many samples the tars may have at most, each of which has a header."""
    with contextlib.suppress(OSError):  # reported where the tars are checked
        return sum(sizes_of(root, part.shards)) // BLOCK
    return 1


# ---------------------------------------------------------------------------------------- samples


@lru_cache(None)
def _opened(path: PurePath, settings: tuple[tuple[str, Any], ...], part: str) -> tuple[Any, Any]:
    """Opens a split part, once in a process and all that it forks; returns factory and source."""
    factory = load_factory(path, split_part=part, decoder=SampleDecoder(), **dict(settings))
    return factory, factory.build()


def _decode_all(
    open_part: Callable[[str], tuple[Any, Any]],
    most: Mapping[str, int],
    report: LintReport,
    each: _Each,
) -> None:
    """Decodes the samples of split parts, at most the number in `most` of each."""
    tasks = []
    for name, limit in most.items():
        with report.errors_at(f"split part {name!r}", (Exception,)):  # what user code may raise
            num_samples = min(limit, len(open_part(name)[0]))
            tasks += [(name, n) for n in range(0, num_samples, _SAMPLES_PER_TASK)]
    each(report, partial(_decode, open_part), tasks, "Decoding samples")
    _opened.cache_clear()


def _decode(open_part: Callable[[str], tuple[Any, Any]], task: tuple[str, int]) -> LintReport:
    """Decodes up to 4,096 samples of a split part."""
    name, start = task
    factory, source = open_part(name)
    errors, odd = list[str](), list[str]()
    numbers = range(start, min(start + _SAMPLES_PER_TASK, len(factory)))
    left, loader = iter(numbers), source.loader
    loader.num_unchecked = 0  # the differences are errors here
    try:
        for block in source.reader.blocks(np.array(numbers, np.int64)):
            # Numbers come last: `zip` takes none of them after the last sample of a block.
            samples = zip(block.members, block.shards, block.places, left, strict=False)
            for *sample, number in samples:
                try:
                    with replaying():
                        made = loader(block.data, *sample, (source.name, 0, number, number))
                    odd += misfits(loader.maker, made) if loader.decoder else []
                except Exception as error:  # what user code and decoders raise is not known
                    errors.append(describe(error))
    except Exception as error:  # nothing of the dataset can be read any more
        errors += [describe(error)] * len([*left])
    report = LintReport(factory.path, samples=len(numbers), failed_samples=len(errors))
    where = f"split part {name!r}" if name else "samples"
    report.add_error(where, *errors, *dict.fromkeys(odd))
    return report
