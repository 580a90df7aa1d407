"""A program that ends while a loader is alive prints nothing, and ends with its own exit code.

Where Python finds the last references decides what is left of the modules when objects go.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..conftest import REPO
from ..helpers import text_set
from ..programs import run_program

pytestmark = pytest.mark.processes

# Where a program keeps its loader, iterators, dataset, store and a batch when it ends.
PLACES = {
    "its module": "pass",
    "a class": "class Holder: all = kept\ndel kept",
    "a cycle": "import gc; gc.disable(); kept.append(kept); del kept",
    "a module that was imported before": "this.KEPT = kept; del kept",
    "a module that was imported later": "import later; later.KEPT = kept; del kept",
    "builtins": "import builtins; builtins.KEPT = kept; del kept",
    "sys": "sys.KEPT = kept; del kept",
    "a module that native code keeps": "import torch; torch.KEPT = kept; del kept",
    "a module of another library": "import numpy; numpy.random.KEPT = kept; del kept",
    "objects that are frozen": "import gc; gc.collect(); gc.freeze()",
    "modules that were removed": "for name in [*sys.modules]:\n"
    "    if name.startswith('energon_lite'): del sys.modules[name]",
    "an array": "import numpy; array = numpy.array(kept, dtype=object); del kept",
}
WORKERS = {
    "no worker": "num_workers=0",
    "threads": "num_workers=2, worker_type='thread'",
    "processes": "num_workers=2",
}
ENDS = {0: "", 3: "sys.exit(3)", 1: "raise LookupError('own')"}
OPTIONS = ([], ["-X", "dev"], ["-B", "-X", "dev"])

PROGRAM = """
import sys
import before as this
from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.stores.file_stores import WebdatasetFileStore

def things():
    config = WorkerConfig(rank=0, world_size=1, {workers})
    dataset = get_train_dataset({path!r}, batch_size=3, shuffle_buffer_size=8, worker_config=config)
    loader = get_savable_loader(dataset)
    iterator, direct, store = iter(loader), iter(dataset), WebdatasetFileStore({path!r})
    made = [next(iterator), next(direct), store["00003.txt"]]
    return [loader, iterator, dataset, direct, store, made]

kept = things()
{keep}
{end}
"""


def trouble(folder: Path, texts: Path, place: str, workers: str, code: int, options: list[str]):
    """What a program printed or returned that is not its own; empty where all is well."""
    folder.mkdir()
    for name in ("before", "later"):
        (folder / f"{name}.py").write_text("KEPT = None\n")
    values = {"path": str(texts), "workers": WORKERS[workers], "end": ENDS[code]}
    (folder / "program.py").write_text(PROGRAM.format(keep=PLACES[place], **values))
    if options:
        found = subprocess.run(
            [sys.executable, *options, folder / "program.py"],
            env={**os.environ, "PYTHONPATH": str(REPO)},
            capture_output=True,
            text=True,
        )
    else:
        found = run_program(folder / "program.py")
    printed = found.stdout + found.stderr
    if code == 1 and printed.endswith("LookupError: own\n") and printed.count("Error") == 2:
        printed = ""
    return printed if found.returncode == code else f"exit code {found.returncode}: {printed}"


def troubles(folder: Path, cases: list[tuple[str, str, int, list[str]]]) -> dict[str, str]:
    texts = text_set(folder / "texts", 1_200, num_shards=2)  # with indexes that are mapped
    with ThreadPoolExecutor(2) as pool:
        folders = (folder / str(number) for number in range(len(cases)))
        found = pool.map(trouble, folders, itertools.repeat(texts), *zip(*cases, strict=True))
        return {str(case): text for case, text in zip(cases, found, strict=True) if text}


def test_a_program_that_ends_with_a_live_loader_prints_nothing(tmp_path) -> None:
    native, cycle = "a module that native code keeps", "a cycle"
    cases = [
        (native, "processes", 1, []),
        (cycle, "processes", 0, ["-X", "dev"]),
        (cycle, "no worker", 3, []),
        ("builtins", "threads", 0, []),
    ]
    assert troubles(tmp_path, cases) == {}


@pytest.mark.soak
def test_a_program_may_keep_its_loader_anywhere(tmp_path) -> None:
    pairs = itertools.product(PLACES, WORKERS)
    rest = itertools.cycle(itertools.product(OPTIONS, ENDS))
    cases = [(*pair, code, options) for pair, (options, code) in zip(pairs, rest, strict=False)]
    assert len(cases) == 36
    assert troubles(tmp_path, cases) == {}
