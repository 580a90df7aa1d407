"""Hostile datasets, opened in every way, end soon: in a result, or in an error with a remedy.

Each case is opened in a process of its own, which may take so long and so much memory.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset, prepare_dataset
from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.energon.energon_api import prepare_metadataset
from energon_lite.extras.inspect.blend_info import metadataset_info
from energon_lite.extras.inspect.forecast import plan
from energon_lite.extras.inspect.info import dataset_info
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.lengths.length_index import LengthFunction, measure_lengths
from energon_lite.formats.length_files import read_facts, read_lengths, write_lengths

from ..helpers import is_true_in_fork, text_set
from .hostile_sets import CASES, EVIL, EXECUTED, META_YAML, Case, put_json

SECONDS = 60.0
MEMORY = 1 << 30
MAX_RESIDENT = 600 << 10  # [Unit: KiB], beyond what the process had

# What an error says that somebody can do about it.
REMEDY = re.compile(
    r"run `|remove|rename|move it|write|give|restore|correct|link|prepare|must|allowed|should|"
    r"did you mean|trust|check|exclude|put|unpack|import|free some|raise the|mount|try again|"
    r"copy|set it|keep|use |make |can be|name|leave|at most|has no|no valid|expected|save|"
    r"such as|is there twice|list shards|needs",
    re.IGNORECASE,
)


# ------------------------------------------------------------------------------ ways to open it


def train(path: Path) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(
        path, batch_size=2, worker_config=config, shuffle_buffer_size=4,
        max_samples_per_sequence=None,
    )  # fmt: skip
    for _ in islice(get_savable_loader(dataset), 20):
        pass


def info(path: Path) -> None:
    (metadataset_info if path.suffix == ".yaml" else dataset_info)(path)


def foresee(path: Path) -> None:
    plan(path, steps=10, batch_size=2, world_size=2)


def lengths(path: Path) -> None:
    measure_lengths(path, LengthFunction(lambda sample: len(sample.text)), num_workers=0)


def lint(path: Path) -> None:
    assert all(problem.message for problem in lint_dataset(path, num_workers=0).errors)


def stored(path: Path) -> None:
    facts = read_facts(path, "train", "default")
    assert facts is None or isinstance(facts["resources"], list)
    read_lengths(path, "train", "default", 12, "none")


def index(path: Path) -> None:
    prepare_dataset(path, tar_index_only=True, num_workers=0)


def prepare(path: Path) -> None:
    prepare_dataset(
        path, split_parts={"train": ".*"}, sample_type="TextSample", field_map={"text": "txt"},
        num_workers=0, force_overwrite=True,
    )  # fmt: skip


OF_ALL: tuple[Callable[[Path], Any], ...] = (train, info, foresee, lengths)
OF_FOLDERS: tuple[Callable[[Path], Any], ...] = (lint, stored, index, prepare)


# ------------------------------------------------------------------------------------- judgement


def judged(error: BaseException, folder: Path) -> str:
    """Returns what is wrong with an error, or an empty text."""
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    kind = type(error)
    if kind is MemoryError:
        return "memory: MemoryError"
    is_ours = kind.__module__.startswith("energon_lite") or kind in (ValueError, RuntimeError)
    if not (is_ours or isinstance(error, OSError)):
        return f"unclear: {kind.__module__}.{kind.__qualname__}: {text[:200]}"
    places = (str(folder), "meta.yaml", ".nv-meta", "shard-0", "path")
    if not any(place in text for place in places):
        return f"unclear, no place: {kind.__name__}: {text[:200]}"
    if not REMEDY.search(re.sub(r"\S*/\S*", "", text)):  # paths do not count
        return f"unclear, no remedy: {kind.__name__}: {text[:200]}"
    return ""


def state_of(folder: Path) -> dict[str, Any]:
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path): (s.st_size, s.st_mtime_ns, s.st_ino) for path, s in found.items()}


def run_case(case: Case, base: Path, folder: Path, out: Path) -> bool:
    """Opens one hostile dataset in all ways, in the current process; writes a line of each."""
    logging.disable(logging.CRITICAL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    shutil.copytree(base, folder, symlinks=True)
    root, outside = folder / "data", folder / "outside"
    os.environ["HOSTILE_OUTSIDE"] = str(outside)
    sys.path.insert(0, str(outside))
    target = case(root, outside) or root
    kept = state_of(outside)
    with out.open("a", buffering=1) as log:
        of_kind = (prepare_metadataset,) if target.suffix == ".yaml" else OF_FOLDERS
        for action in (*OF_ALL, *of_kind):
            log.write(f"{action.__name__}: ")
            problem = ""
            try:
                action(target)
            except BaseException as error:
                problem = judged(error, folder)
            if (outside / EXECUTED).exists() or "hostile_code" in sys.modules:
                problem = "executed"
            elif state_of(outside) != kept:
                problem = "wrote outside"
            elif resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > MAX_RESIDENT:
                problem = "memory: too much is resident"
            log.write(f"{json.dumps(problem) if problem else 'ok'}\n")
        log.write("end\n")
    return True


def faults_of(case: Case, base: Path, folder: Path) -> list[str]:
    """Opens one hostile dataset in a process of its own; returns what is wrong."""
    out = folder.with_suffix(".log")
    out.touch()
    is_true_in_fork(lambda: run_case(case, base, folder, out), SECONDS)
    lines = out.read_text().splitlines()
    faults = [line for line in lines if not line.endswith((": ok", "end"))]
    return faults if lines[-1:] == ["end"] else [*faults, f"crash or hang after {lines[-1:]}"]


# ----------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "base"
    root = text_set(folder / "data", 12, num_shards=2)
    write_lengths(root, "train", "default", np.arange(12), "none", "none")
    outside = folder / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (outside / "hostile_code.py").write_text(EVIL)
    put_json(META_YAML, {"splits": {"train": {"path": "data"}}})(root, outside)
    for action in (train, info, foresee, stored):  # what is imported late is imported now
        action(root)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "case"
    # Of folders that are 1,500 deep; Python's own way goes as deep on its stack.
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


def test_faults_are_seen(base: Path, folder: Path) -> None:
    """The judgement itself: what raises KeyError or ends by a signal is seen."""

    def dies(root: Path, outside: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert "crash" in faults_of(dies, base, folder)[-1]
    assert judged(KeyError("x"), folder).startswith("unclear")
    assert judged(DatasetFormatError("no"), folder).startswith("unclear, no place")
    assert judged(DatasetFormatError(f"{folder}: no"), folder).startswith("unclear, no remedy")


NAMES = [name for name in CASES if not name.endswith("damaged")][::16]
NAMES += [name for name in CASES if name.endswith("damaged")]


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_dataset_ends_in_a_result_or_a_clear_error(
    name: str, base: Path, folder: Path
) -> None:
    assert faults_of(CASES[name], base, folder) == []
