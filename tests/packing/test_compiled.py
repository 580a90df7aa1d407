from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import packing
from energon_lite.batching.stream import StreamingPacker
from energon_lite.core import compiled
from energon_lite.extras.samplers.best import pack_best

REPO = Path(__file__).parents[2]

COMPILE = """
from energon_lite.core import compiled
from energon_lite.extras.samplers.best import pack_best

compiled.compile_all()
kernels = sum(compiled._kernels.values(), [])
kept = [kernel.compiled.stats for kernel in kernels]
print(sum(sum(s.cache_hits.values()) for s in kept),
      sum(sum(s.cache_misses.values()) for s in kept))
before = [len(kernel.compiled.signatures) for kernel in kernels]

from energon_lite.batching.fit import first_fit, first_fit_decreasing, sequential
for pack in (first_fit, first_fit_decreasing, sequential, pack_best):
    pack([4, 3, 3, 2] * 50 + [5] * 20, 7, max_samples=2)
pack_best([[4, 1], [3, 3]] * 50, [7, 4])
first_fit_decreasing([1 << 30, 5], 1 << 31)
assert before == [len(kernel.compiled.signatures) for kernel in kernels]
"""

NO_CACHE = """
import logging
from numba.core import caching

logging.basicConfig(format="%(name)s: %(message)s")
(getattr(caching, "CacheImpl", None) or caching._CacheImpl)._locator_classes = []
from energon_lite.core.compiled import compile_all
from energon_lite.batching.fit import first_fit_decreasing

compile_all()
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
def first_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, str]]]:
    """A cache that two processes have written at once, with what they printed."""
    cache = tmp_path_factory.mktemp("numba")
    environment = {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(REPO)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST], env={**os.environ, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    return cache, [process.communicate(timeout=300) for process in processes]


@pytest.fixture
def cache(first_runs: tuple[Path, Any], tmp_path: Path) -> Path:
    """That cache, to be changed."""
    return shutil.copytree(first_runs[0], tmp_path / "cache")


def test_second_process_compiles_nothing() -> None:
    assert callable(pack_best)  # which is compiled with all others, in the cache of all tests
    compiled.compile_all()
    second = run(COMPILE)
    hits, misses = map(int, second.stdout.split())
    assert misses == 0
    assert hits >= 7
    assert "Compiling" not in second.stderr


@pytest.mark.parametrize(("is_plain", "num_messages"), [("0", 1), ("1", 0)])
def test_without_a_place_for_the_code_it_works_and_logs_once(is_plain, num_messages) -> None:
    done = run(NO_CACHE, NUMBA_DISABLE_JIT=is_plain)
    assert done.stdout == "[[0, 3], [1, 2]]\n"
    assert done.stderr.count("NUMBA_CACHE_DIR") == num_messages
    assert done.stderr.count("Compiling code for packs") == num_messages


NO_NUMBA = """
import sys
import energon_lite.balance
import energon_lite.extras.samplers as s
import energon_lite.packing as packing

s.MultipackBatchSampler([1], 5)
s.SplitModalityBatchSampler([(1, 2)], 1, rank=0, num_replicas=1).padding()
s.TokenBudgetBatchSampler([2], max_tokens=2, rank=0, world_size=1).padding()
assert "numba" not in sys.modules
import energon_lite.batching.fit, energon_lite.batching.stream
assert all(callable(getattr(packing, name)) for name in packing.__all__)
"""


def test_importing_the_packages_imports_no_numba_and_their_names_are_functions() -> None:
    run(NO_NUMBA)
    with pytest.raises(AttributeError, match="has no attribute 'fastest'"):
        packing.fastest  # noqa: B018


FIRST = """
import sys
from energon_lite.core import compiled
from energon_lite.packing import first_fit

assert "numba" not in sys.modules
assert first_fit([2, 3, 4, 3], 6).tolist() == [[0, 1], [2], [3]]
found = [k.compiled.stats.cache_misses.values() for k in compiled._kernels[first_fit.__module__]]
print(sum(map(sum, found)))
"""


def test_the_first_call_reads_what_was_compiled_before(cache: Path) -> None:
    done = run(FIRST, NUMBA_CACHE_DIR=str(cache))
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_of_processes_that_want_the_same_code_one_compiles(first_runs: tuple[Path, Any]) -> None:
    found = first_runs[1]
    misses = sorted(int(output) for output, _ in found)
    assert misses[0] == 0 < misses[1]
    assert sum(errors.count("Compiling code for packs, once") for _, errors in found) == 1


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Kernels run as plain Python in a `with` block."""
    found = [(kernel, kernel.compiled) for file in compiled._kernels.values() for kernel in file]
    for kernel, _ in found:
        kernel.compiled = kernel.function
    try:
        yield
    finally:
        for kernel, dispatcher in found:
            kernel.compiled = dispatcher


def streamed(lengths: list[Any], capacity: Any) -> list[Any]:
    packer = StreamingPacker(capacity, buffer_size=32)
    found: list[Any] = []
    for length in lengths:
        packer.add(length)
        while packer.is_full:
            found += [packer.next_pack(), packer.state()]
    while packer.num_buffered:
        found.append(packer.next_pack())
    return found


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=120))
@settings(max_examples=25, deadline=None)
def test_plain_python_returns_what_compiled_code_returns(rows: list[tuple[int, int]]) -> None:
    compiled.compile_all()
    one = [length for length, _ in rows]

    def results() -> list[str]:
        packers: list[Any] = [packing.first_fit, packing.first_fit_decreasing, packing.sequential]
        packers += [packing.pack_best, packing.pack_stream]
        made = [pack(one, 40).tolist() for pack in packers]
        made += [pack(rows, (40, 9)).tolist() for pack in packers] if rows else []
        return [repr(made), repr(streamed(one, 40)), repr(streamed(rows, (40, 9)))]

    with plain_kernels():
        plain = results()
    assert plain == results()


DAMAGED = """
import logging
logging.basicConfig(format="%(name)s: %(message)s")
from energon_lite.packing import first_fit_decreasing

print(first_fit_decreasing([4, 3, 3, 2], 6).tolist())
"""


@pytest.mark.parametrize("damage", [b"nothing", None])
def test_corrupt_cache_is_compiled_again(cache: Path, damage: bytes | None) -> None:
    (kept,) = cache.rglob("fit._next_fit-*.nbc")  # one, since each takes its time to compile
    # Or an object of a module that is gone, as numba writes them of code that was edited.
    kept.write_bytes(b"cnowhere\nThing\n." if damage is None else damage)
    done = run(DAMAGED, NUMBA_CACHE_DIR=str(cache))
    assert done.stdout == "[[0, 3], [1, 2]]\n"
    assert "is corrupt; compiling it again" in done.stderr
    again = run(DAMAGED, NUMBA_CACHE_DIR=str(cache))
    assert (again.stdout, again.stderr) == (done.stdout, "")
