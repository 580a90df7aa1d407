from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from energon_lite import packing

REPO = Path(__file__).parents[2]

COMPILE = """
import energon_lite.batching.best
from energon_lite.core import compiled

compiled.compile_all()
kept = [kernel.dispatcher().stats for kernel in compiled._kernels]
print(sum(sum(s.cache_hits.values()) for s in kept),
      sum(sum(s.cache_misses.values()) for s in kept))
before = [len(kernel.dispatcher().signatures) for kernel in compiled._kernels]

from energon_lite.batching.fit import first_fit, first_fit_decreasing, sequential
from energon_lite.batching.best import pack_best
for pack in (first_fit, first_fit_decreasing, sequential, pack_best):
    pack([4, 3, 3, 2] * 50 + [5] * 20, 7, max_samples=2)
pack_best([[4, 1], [3, 3]] * 50, [7, 4])
first_fit_decreasing([1 << 30, 5], 1 << 31)
assert before == [len(kernel.dispatcher().signatures) for kernel in compiled._kernels]
"""

NO_CACHE = """
import logging
from numba.core import caching

logging.basicConfig(format="%(name)s: %(message)s")
(getattr(caching, "CacheImpl", None) or caching._CacheImpl)._locator_classes = []
from energon_lite.batching.fit import first_fit_decreasing

print(first_fit_decreasing([4, 3, 3, 2], 6).tolist())
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPO), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache that a first process has written, and what that printed."""
    cache = tmp_path_factory.mktemp("numba")
    return cache, run(COMPILE, NUMBA_CACHE_DIR=str(cache)).stdout


@pytest.fixture
def cache(first_run: tuple[Path, str], tmp_path: Path) -> Path:
    """That cache, to be changed."""
    return shutil.copytree(first_run[0], tmp_path / "cache")


def test_second_process_compiles_nothing(first_run: tuple[Path, str], cache: Path) -> None:
    hits, misses = map(int, first_run[1].split())
    assert hits == 0
    assert misses >= 7
    second = run(COMPILE, NUMBA_CACHE_DIR=str(cache))
    assert second.stdout.split() == [str(misses), "0"]
    assert "Compiling" not in second.stderr


def test_without_a_place_for_the_code_it_works_and_logs_once() -> None:
    done = run(NO_CACHE)
    assert done.stdout == "[[0, 3], [1, 2]]\n"
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1
    assert done.stderr.count("Compiling code for packs") == 1


def test_kernels_also_run_as_plain_python() -> None:
    code = NO_CACHE + "from energon_lite.core.compiled import compile_all\ncompile_all()\n"
    assert run(code, NUMBA_DISABLE_JIT="1").stdout == "[[0, 3], [1, 2]]\n"


def test_importing_the_package_imports_no_numba() -> None:
    code = "import sys, energon_lite.packing; print('numba' in sys.modules)"
    assert run(code).stdout == "False\n"


def test_names_of_the_package_are_functions_whatever_was_imported_before() -> None:
    code = (
        "import sys, energon_lite.packing as packing; assert 'numba' not in sys.modules;"
        "import energon_lite.batching.fit, energon_lite.batching.stream;"
        "assert all(callable(getattr(packing, name)) for name in packing.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'fastest'"):
        packing.fastest  # noqa: B018


def test_first_call_finds_what_was_compiled_before(cache: Path) -> None:
    code = (
        "from energon_lite.core import compiled\n"
        "from energon_lite.packing import first_fit_decreasing\n"
        "first_fit_decreasing([4, 3, 3, 2], 6)\n"
        "found = [k.dispatcher().stats.cache_misses.values() for k in compiled._kernels]\n"
        "print(sum(map(sum, found)))"
    )
    assert run(code, NUMBA_CACHE_DIR=str(cache)).stdout == "0\n"


DAMAGED = """
import logging
logging.basicConfig(format="%(name)s: %(message)s")
from energon_lite.packing import compile_all, first_fit_decreasing

first_fit_decreasing
compile_all()
print(first_fit_decreasing([4, 3, 3, 2], 6).tolist())
"""


@pytest.mark.parametrize("damage", [b"nothing", None])
def test_corrupt_cache_is_compiled_again(cache: Path, damage: bytes | None) -> None:
    # Those of one module, since each takes its time to compile.
    kept = list(cache.rglob("fit*.nbc"))
    assert kept
    for path in kept:
        # Or an object of a module that is gone, as numba writes them of code that was edited.
        path.write_bytes(b"cnowhere\nThing\n." if damage is None else damage)
    done = run(DAMAGED, NUMBA_CACHE_DIR=str(cache))
    assert done.stdout == "[[0, 3], [1, 2]]\n"
    assert "is corrupt; compiling it again" in done.stderr
    again = run(DAMAGED, NUMBA_CACHE_DIR=str(cache))
    assert (again.stdout, again.stderr) == (done.stdout, "")
