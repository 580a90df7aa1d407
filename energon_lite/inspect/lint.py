"""Checks a prepared folder: indexes against tars, split files, and that every sample decodes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError, describe
from energon_lite.prepare.indexing import scan_shard
from energon_lite.prepare.pool import default_workers, ordered_results
from energon_lite.sources.dataset_config import load_factory
from energon_lite.storage.decoding import SampleDecoder
from energon_lite.storage.files import is_there
from energon_lite.storage.local_paths import local_path
from energon_lite.storage.nvmeta import (
    DEFAULT_DATASET,
    DEFAULT_SPLIT,
    INFO_JSON,
    INFO_YAML,
    META,
    DatasetInfo,
    index_path,
    read_index,
    read_info,
)
from energon_lite.storage.split_file import SplitFile, SplitPart, read_split_part
from energon_lite.storage.sqlite import INDEX_SQLITE, IndexDatabase
from energon_lite.storage.tar import BLOCK
from energon_lite.storage.yaml import load_yaml

# A part above this size is more often a mistake than a sample.
LARGE_PART_BYTES = 1 << 30
_SAMPLES_PER_TASK = 4096
_LISTED_PER_SHARD = 20


class LintProblem(NamedTuple):
    """One thing that is wrong: the file, shard or sample, and what about it."""

    where: str
    message: str


@dataclasses.dataclass
class LintReport:
    """What `lint_dataset` found.

    Attributes:
        path: the dataset's folder.
        shards: tars that were read.
        samples: samples that were decoded.
        failed_samples: samples of them that gave an error.
        errors: what makes data unusable.
        warnings: what is odd, but loads.
    """

    path: Path
    shards: int = 0
    samples: int = 0
    failed_samples: int = 0
    errors: list[LintProblem] = dataclasses.field(default_factory=list)
    warnings: list[LintProblem] = dataclasses.field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain values."""
        return {
            "path": str(self.path),
            "ok": self.is_ok,
            "shards": self.shards,
            "samples": self.samples,
            "failed_samples": self.failed_samples,
            "errors": [problem._asdict() for problem in self.errors],
            "warnings": [problem._asdict() for problem in self.warnings],
        }


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
        path: the folder.
        split_parts: the split parts whose samples are decoded; by default all that have shards.
        split_config: file name in `.nv-meta`, by default `split.yaml`.
        dataset_config: file name in `.nv-meta`, by default `dataset.yaml`.
        num_workers: processes; by default one per usable core, at most 16. 0 and 1: this process.
        decode: whether samples are decoded, after the indexes are checked.
        trust: whether code that the dataset names (`sample_loader.py`) may be run.
        progress: called with what is being done, how many shards (or samples) are done, of how
            many.

    Raises:
        FileNotFoundError: The folder is not prepared.
        DatasetFormatError: `.info.json` cannot be read, or a split part does not exist.
        RuntimeError: A worker process died.
    """
    root = local_path(path)
    info = read_info(root)
    report = LintReport(root)
    workers = default_workers() if num_workers is None else num_workers
    _check_info(root, info, report)
    _check_doubles(root, (split_config or DEFAULT_SPLIT, dataset_config or DEFAULT_DATASET), report)
    _check_shards(root, info, workers, report, progress)
    parts = _check_splits(root, info, split_config, report)
    if split_parts is not None:
        for name in set(split_parts) - {part.name for part in parts}:
            with contextlib.suppress(EmptyDatasetError):  # there is nothing to decode
                read_split_part(root, info, name, split_config)  # says what there is
        parts = [part for part in parts if part.name in split_parts]
    if decode:
        tasks = [
            _DecodeTask(root, part.name, split_config, dataset_config, trust, start)
            for part in parts
            for start in range(0, _length(root, part), _SAMPLES_PER_TASK)
        ]
        _decode_all(tasks, workers, report, progress)
    return report


# ------------------------------------------------------------------------- tars and their indexes


def _check_info(root: Path, info: DatasetInfo, report: LintReport) -> None:
    old = root / META / INFO_YAML
    if not (is_there(old) and is_there(root / META / INFO_JSON)):
        return
    try:
        value = load_yaml(old)
    except DatasetFormatError as error:
        report.warnings.append(LintProblem(str(old), str(error)))
        return
    if not isinstance(value, dict) or value.get("shard_counts") != info.shard_counts:
        message = f"differs from {INFO_JSON}, which is what counts; prepare again or delete it"
        report.warnings.append(LintProblem(str(old), message))


def _check_doubles(root: Path, configs: Iterable[str], report: LintReport) -> None:
    """Lists keys that are twice in a file, of which only the last one counts."""
    for name in (INFO_JSON, *configs):
        path, doubles = root / META / name, list[str]()
        # What cannot be read is reported where it is used.
        with contextlib.suppress(DatasetFormatError, FileNotFoundError):
            load_yaml(path, doubles.append)
        report.warnings += [LintProblem(str(path), f"{text}; the last counts") for text in doubles]


class _ShardTask(NamedTuple):
    root: Path
    name: str
    number: int
    num_samples: int
    has_index: bool


def _check_shards(
    root: Path,
    info: DatasetInfo,
    num_workers: int,
    report: LintReport,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    has_index = _check_database(root, info, report)
    tasks = [
        _ShardTask(root, name, number, count, has_index)
        for number, (name, count) in enumerate(info.shard_counts.items())
    ]
    for number, result in enumerate(ordered_results(_check_shard, tasks, num_workers)):
        if isinstance(result, Exception):
            report.errors.append(LintProblem(tasks[number].name, str(result)))
        else:
            errors, warnings = result
            report.errors += errors
            report.warnings += warnings
        report.shards += 1
        if progress is not None:
            progress("Reading shards", number + 1, len(tasks))


def _check_database(root: Path, info: DatasetInfo, report: LintReport) -> bool:
    """Checks `index.sqlite` as a whole; tells whether its rows can be compared."""
    file = f"{META}/{INDEX_SQLITE}"
    again = f"run `energon-lite prepare {root} --tar-index-only`"
    try:
        with IndexDatabase(root) as index:
            counts = index.shard_counts()
            if counts is None:
                report.warnings.append(LintProblem(file, f"has no table 'samples'; {again}"))
                return False
            if not index.has_unique_keys():
                report.errors.append(LintProblem(file, "two samples have the same key"))
    except FileNotFoundError as error:
        report.warnings.append(LintProblem(file, str(error)))
        return False
    except DatasetFormatError as error:
        report.errors.append(LintProblem(file, str(error)))
        return False
    unknown = sorted(set(counts) - set(range(len(info.shard_counts))))
    if unknown:
        message = f"has samples of shard number {unknown[0]}, which {INFO_JSON} does not have; "
        report.errors.append(LintProblem(file, message + again))
    return True


def _check_shard(task: _ShardTask) -> tuple[list[LintProblem], list[LintProblem]]:
    """Compares a tar with its index, its count and its rows in `index.sqlite`."""
    errors: list[str] = []
    warnings: list[str] = []
    path = task.root / task.name
    again = f"run `energon-lite prepare {task.root} --tar-index-only`"
    rows, end = scan_shard(path)
    starts = [start for _, _, start, _ in rows.samples]
    if len(starts) != task.num_samples:
        errors.append(f"has {len(starts)} samples, {INFO_JSON} says {task.num_samples}; {again}")
    try:
        offsets = read_index(path, task.num_samples).tolist()
    except (DatasetFormatError, OSError) as error:
        errors.append(str(error))
    else:
        # The index gives 0 for the first sample, also where a folder entry comes before it.
        true = [0, *starts[1:], end]
        wrong = [i for i, (a, b) in enumerate(zip(offsets, true, strict=False)) if a != b]
        if wrong:
            i = wrong[0]
            errors.append(
                f"{index_path(path).name} has sample {i} at byte {offsets[i]}, the tar at "
                f"{true[i]} ({len(wrong)} of {len(true)} offsets differ); {again}"
            )
    if task.has_index:
        with IndexDatabase(task.root) as index:
            stored = index.shard_rows(task.number)
        if [(key, start) for key, start, _ in stored] != [(k, at) for _, k, at, _ in rows.samples]:
            errors.append(f"{META}/{INDEX_SQLITE} has other samples or offsets; {again}")
    keys = [key for _, key, _, _ in rows.samples]
    for index_, part, _, size in rows.parts:
        if size == 0:
            warnings.append(f"member '{keys[index_]}.{part}' is empty")
        elif size > LARGE_PART_BYTES:
            warnings.append(f"member '{keys[index_]}.{part}' has {size / 2**30:.1f} GiB")
    return _listed(task.name, errors), _listed(task.name, warnings)


def _listed(where: str, messages: Sequence[str]) -> list[LintProblem]:
    problems = [LintProblem(where, message) for message in messages[:_LISTED_PER_SHARD]]
    if len(messages) > _LISTED_PER_SHARD:
        more = len(messages) - _LISTED_PER_SHARD
        problems.append(LintProblem(where, f"and {more} more of this kind"))
    return problems


# ------------------------------------------------------------------------------------ split parts


def _check_splits(
    root: Path, info: DatasetInfo, config: str | None, report: LintReport
) -> list[SplitPart]:
    """Checks the split file; returns the parts that have samples."""
    file = f"{META}/{config or 'split.yaml'}"
    usable: list[SplitPart] = []
    owners: dict[str, str] = {}
    try:
        split = SplitFile(root, info, config)
        excludes = split.excludes
    except (FileNotFoundError, DatasetFormatError) as error:
        report.errors.append(LintProblem(file, str(error)))
        return usable
    for name in split.names:
        try:
            part = split.part(name)
        except EmptyDatasetError:
            continue  # `prepare` writes parts without shards on purpose
        except DatasetFormatError as error:
            report.errors.append(LintProblem(file, str(error)))
            continue
        usable.append(part)
        for shard in part.shards:
            owner = owners.setdefault(shard, name)
            if owner != name:
                message = f"shard {shard!r} is in the parts {owner!r} and {name!r}"
                report.warnings.append(LintProblem(file, message))
        twice = _first_double(part.shards)
        if twice is not None:
            message = f"part {name!r} lists shard {twice!r} twice; its samples come twice"
            report.warnings.append(LintProblem(file, message))
    unused = [s for s in info.shard_counts if s not in owners and s not in excludes.shards]
    if unused:
        message = (
            f"shard {unused[0]!r} is in no split part"
            if len(unused) == 1
            else f"{len(unused)} shards are in no split part, the first is {unused[0]!r}"
        )
        report.warnings.append(LintProblem(file, message))
    for entry in excludes.unknown[:_LISTED_PER_SHARD]:
        message = f"exclude entry {entry!r} fits no shard and excludes nothing"
        report.warnings.append(LintProblem(file, message))
    return usable


def _first_double(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _length(root: Path, part: SplitPart) -> int:
    # At least as many as come: excluded samples are skipped later. A tar has a header for each.
    with contextlib.suppress(OSError):  # said where the tars are checked
        return sum(
            min(count, (root / shard).stat().st_size // BLOCK)
            for shard, count in zip(part.shards, part.counts, strict=True)
        )
    return 1


# ---------------------------------------------------------------------------------------- samples


class _DecodeTask(NamedTuple):
    root: Path
    part: str
    split_config: str | None
    dataset_config: str | None
    trust: bool | None
    start: int


def _decode_all(
    tasks: Sequence[_DecodeTask],
    num_workers: int,
    report: LintReport,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    broken: set[str] = set()
    for number, result in enumerate(ordered_results(_decode, tasks, num_workers)):
        part = tasks[number].part
        if isinstance(result, Exception):
            if part not in broken:  # the same for every task of the part
                report.errors.append(LintProblem(f"split part {part!r}", describe(result)))
            broken.add(part)
        else:
            samples, errors = result
            report.samples += samples
            report.failed_samples += len(errors)
            report.errors += _listed(f"split part {part!r}", errors)
        if progress is not None:
            progress("Decoding samples", number + 1, len(tasks))


def _decode(task: _DecodeTask) -> tuple[int, list[str]]:
    """Makes up to 4,096 samples of a split part; gives their number, and an error text each."""
    factory = load_factory(
        task.root,
        dataset_config=task.dataset_config,
        trust=task.trust,
        split_part=task.part,
        split_config=task.split_config,
        training=False,
        decoder=SampleDecoder(),
    )
    source = factory.build()
    errors: list[str] = []
    numbers = range(task.start, min(task.start + _SAMPLES_PER_TASK, len(factory)))
    for number in numbers:
        try:
            source.restore_sample((source.name, 0, number, number))
        except Exception as error:  # what user code and decoders raise is not known
            errors.append(describe(error))
    return len(numbers), errors
