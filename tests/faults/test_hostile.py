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
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import (
    DefaultTaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
)
from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.energon.energon_api import prepare_metadataset
from energon_lite.extras.inspect.blend_info import metadataset_info
from energon_lite.extras.inspect.forecast import plan
from energon_lite.extras.inspect.info import dataset_info
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.lengths.length_index import LengthFunction, measure_lengths
from energon_lite.formats.length_files import write_lengths

from ..helpers import text_set
from .hostile_sets import CASES, EVIL, EXECUTED

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


class TextLengths(LengthFunction):
    def __init__(self) -> None:
        super().__init__(lambda sample: len(sample.text))


# ------------------------------------------------------------------------------ ways to open it


def train(path: Path) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(
        path, batch_size=2, worker_config=config, shuffle_buffer_size=4,
        max_samples_per_sequence=None, task_encoder=DefaultTaskEncoder(),
    )  # fmt: skip
    for _ in islice(get_savable_loader(dataset), 20):
        pass


def info(path: Path) -> None:
    (metadataset_info if path.suffix == ".yaml" else dataset_info)(path)


def foresee(path: Path) -> None:
    plan(path, steps=10, batch_size=2, world_size=2)


def lint(path: Path) -> None:
    if path.suffix != ".yaml":
        report = lint_dataset(path, num_workers=0)
        for problem in report.errors:
            if not problem.message:
                raise AssertionError("a problem without a text")


def lengths(path: Path) -> None:
    measure_lengths(path, TextLengths(), num_workers=0)


def index(path: Path) -> None:
    if path.suffix != ".yaml":
        prepare_dataset(path, tar_index_only=True, num_workers=0)


def prepare(path: Path) -> None:
    if path.suffix == ".yaml":
        prepare_metadataset(path)
        return
    prepare_dataset(
        path, split_parts={"train": ".*"}, sample_type="TextSample", field_map={"text": "txt"},
        num_workers=0, force_overwrite=True,
    )  # fmt: skip


ACTIONS: tuple[Callable[[Path], None], ...] = (train, info, foresee, lint, lengths, index, prepare)


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
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[str(path)] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return found


def run_case(name: str, base: Path, folder: Path, out: Path) -> None:
    """Opens one hostile dataset in all ways, in the current process."""
    shutil.copytree(base, folder, symlinks=True)
    root, outside = folder / "data", folder / "outside"
    os.environ["HOSTILE_OUTSIDE"] = str(outside)
    sys.path.insert(0, str(outside))
    target = CASES[name](root, outside) or root
    before = state_of(outside)
    with out.open("a", buffering=1) as log:
        for action in ACTIONS:
            log.write(f"begin {action.__name__}\n")
            try:
                action(target)
                problem = ""
            except BaseException as error:
                problem = judged(error, folder)
            if (outside / EXECUTED).exists() or "hostile_code" in sys.modules:
                problem = "executed"
            elif state_of(outside) != before:
                problem = "wrote outside"
            if problem:
                log.write(f"fault {action.__name__} {json.dumps(problem)}\n")
        log.write("end\n")


def faults_of(name: str, base: Path, folder: Path) -> list[str]:
    """Opens one hostile dataset in a process of its own; returns what is wrong."""
    out = folder.with_suffix(".log")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            logging.disable(logging.CRITICAL)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            run_case(name, base, folder, out)
            status = 0
        finally:
            os._exit(status)
    start = time.monotonic()
    done, code, usage = 0, 0, None
    while not done and time.monotonic() - start < SECONDS:
        done, code, usage = os.wait4(child, os.WNOHANG)
        time.sleep(0 if done else 0.01)
    if not done:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    lines = out.read_text().splitlines() if out.exists() else []
    faults = [line.removeprefix("fault ") for line in lines if line.startswith("fault ")]
    last = next((line[6:] for line in reversed(lines) if line.startswith("begin ")), "setup")
    if not done:
        faults.append(f"{last}: hang")
    elif os.WIFSIGNALED(code) or lines[-1:] != ["end"]:
        faults.append(f"{last}: crash ({code}: {lines[-1:]})")
    elif usage is not None and usage.ru_maxrss - _resident() > MAX_RESIDENT:
        faults.append(f"memory: {usage.ru_maxrss - _resident():,} KiB")
    return faults


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ----------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "base"
    root = text_set(folder / "data", 12, num_shards=2)
    write_lengths(root, "train", "default", np.arange(12), "none", "none")
    (folder / "outside").mkdir()
    (folder / "outside" / "file").write_text("kept")
    (folder / "outside" / "hostile_code.py").write_text(EVIL)
    train(root)  # what is imported late is imported now
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "case"
    # Of folders that are 1,500 deep; Python's own way goes as deep on its stack.
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


def test_the_dataset_without_anything_planted_has_no_fault(base: Path, folder: Path) -> None:
    CASES["nothing"] = lambda root, outside: None
    try:
        assert faults_of("nothing", base, folder) == []
        assert (folder / "data" / ".nv-meta" / "index.sqlite").exists()
    finally:
        del CASES["nothing"]


def test_faults_are_seen(base: Path, folder: Path) -> None:
    """The judgement itself: what raises KeyError, writes or ends by a signal is seen."""
    CASES["bad"] = lambda root, outside: (_ for _ in ()).throw(KeyError("x"))
    CASES["dies"] = lambda root, outside: os.kill(os.getpid(), signal.SIGKILL)
    try:
        assert "crash" in faults_of("bad", base, folder)[0]
        assert "crash" in faults_of("dies", base, folder.with_name("other"))[0]
    finally:
        del CASES["bad"], CASES["dies"]
    assert judged(KeyError("x"), folder).startswith("unclear")
    assert judged(DatasetFormatError("no"), folder).startswith("unclear, no place")
    assert judged(DatasetFormatError(f"{folder}: no"), folder).startswith("unclear, no remedy")


@pytest.mark.parametrize("name", list(CASES)[::24])
def test_a_hostile_dataset_ends_in_a_result_or_a_clear_error(
    name: str, base: Path, folder: Path
) -> None:
    assert faults_of(name, base, folder) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_every_hostile_dataset_ends_in_a_result_or_a_clear_error(
    name: str, base: Path, folder: Path
) -> None:
    assert faults_of(name, base, folder) == []
