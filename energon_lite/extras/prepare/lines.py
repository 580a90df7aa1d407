"""Prepares and checks a JSONL file: writes the index of its lines, and compares them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.jsonl.jsonl import (
    Lines,
    line_index_path,
    read_line_index,
    scan_lines,
    write_line_index,
)
from energon_lite.extras.prepare.decisions import Progress, Request
from energon_lite.extras.prepare.other_data import ONE_OBJECT_PER_LINE
from energon_lite.extras.prepare.report import PrepareReport
from energon_lite.storage.local_paths import local_path

_OF_FOLDERS = (
    "split_ratio", "split_parts", "sample_type", "field_map", "exclude", "shuffle_seed", "paths",
    "fix_duplicates", "media_filter",
)  # fmt: skip
_LISTED = 3


def prepare_lines(path: str | os.PathLike[str], request: Request | None = None) -> PrepareReport:
    """Writes `x.jsonl.idx`; an existing one is replaced.

    Lines that are no JSON objects are samples, too: a run skips and counts them.

    Args:
        path: the file.
        request: the arguments of `prepare_dataset`, of which few apply.

    Raises:
        ValueError: An argument is for folders of tars.
        FileNotFoundError: There is no such file.
        DatasetFormatError: No line is a JSON object.
        EmptyDatasetError: The file has no sample.
    """
    request = request or Request()
    for name in _OF_FOLDERS:
        if getattr(request, name):
            raise ValueError(
                f"{path}: {name} is for folders of tars. A JSONL file has no split parts and no "
                "sample type: all lines are in every split, as crude samples. Leave it out"
            )
    file = local_path(path)
    progress = request.progress

    def report(num_bytes: int, total_bytes: int, num_samples: int) -> None:
        if progress is not None:
            done = int(num_bytes == total_bytes)
            progress(Progress(done, 1, num_samples, num_bytes, total_bytes))

    lines = scan_lines(file, progress=report)
    num_samples, size = len(lines.offsets) - 1, int(lines.offsets[-1])
    if 2 * lines.num_broken > num_samples:
        count = f"{lines.num_broken:,} of {num_samples:,} lines are no JSON objects"
        what = "no line is a JSON object" if lines.num_broken == num_samples else count
        raise DatasetFormatError(f"{file}: {what}, from {{ to }}; {ONE_OBJECT_PER_LINE}")
    write_line_index(file, lines.offsets)
    return PrepareReport(
        file, shards=1, samples=num_samples, size_bytes=size, splits={},
        parts={"json": num_samples}, resumed_shards=0, written=(line_index_path(file).name,),
        warnings=_broken_lines(lines),
    )  # fmt: skip


def check_lines(path: Path, report: Any) -> None:
    """Compares a JSONL file with its index, and lists lines that are no objects."""
    lines = scan_lines(path)
    index, again = line_index_path(path), f"run `energon-lite prepare {path}`"
    try:
        offsets = read_line_index(path, int(lines.offsets[-1]))
        if not np.array_equal(offsets, lines.offsets):
            report.add_error(index, f"samples begin at other bytes than in {path.name}; {again}")
    except FileNotFoundError:
        report.add_warning(index, f"is missing: every run reads the whole file first; {again}")
    except DatasetFormatError as error:
        report.add_error(index, error)
    report.add_warning(path, *_broken_lines(lines))


def _broken_lines(lines: Lines) -> tuple[str, ...]:
    """Describes the lines that are no JSON objects."""
    if not lines.num_broken:
        return ()
    numbers = ", ".join(str(line) for _, line in lines.broken[:_LISTED])
    more = ", ..." if lines.num_broken > _LISTED else ""
    num_samples = len(lines.offsets) - 1
    if 2 * lines.num_broken > num_samples:
        more += f"; {ONE_OBJECT_PER_LINE}"
    return (
        f"{lines.num_broken:,} of {num_samples:,} lines are no JSON objects, from {{ to "
        f"}}, and will be skipped: line {numbers}{more}",
    )
