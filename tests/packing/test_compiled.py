from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import packing
from energon_lite.batching.stream import StreamingPacker
from energon_lite.core import compile_ahead, compiled
from energon_lite.core.compile_ahead import CompileAhead

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
    assert run(NO_CACHE, NUMBA_DISABLE_JIT="1").stdout == "[[0, 3], [1, 2]]\n"


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


MUCH = """
import sys
import time
from energon_lite.core import compile_ahead, compiled
from energon_lite.packing import first_fit_decreasing

lengths = [4, 3, 3, 2] * 50_000
assert len(first_fit_decreasing(lengths, 6)) == 100_000
found = [k.dispatcher().stats.cache_misses.values() for k in compiled._kernels]
print(sum(map(sum, found)))
"""


def test_much_at_once_finds_what_was_compiled_before(cache: Path) -> None:
    assert run(MUCH, NUMBA_CACHE_DIR=str(cache)).stdout == "0\n"


AHEAD = """
import sys, time
from pathlib import Path
from energon_lite.batching import fit
from energon_lite.core import compiled
from energon_lite.packing import first_fit

def pack():
    assert first_fit([2, 3, 4, 3], 6).tolist() == [[0, 1], [2], [3]]

compiled.prepare_kernels()
pack()
print("numba" in sys.modules)
end = time.monotonic() + 100
while "numba" not in sys.modules and time.monotonic() < end:
    pack()
    time.sleep(0.05)
found = [k.dispatcher().stats.cache_misses.values() for k in compiled._kernels]
print(sum(map(sum, found)))
"""


def test_nobody_waits_for_the_first_pack_and_code_that_another_process_compiled_is_used(
    tmp_path: Path,
) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    first = run(AHEAD, **environment)
    assert first.stdout.split() == ["False", "0"]
    assert "Compiling" not in first.stderr
    assert len(list(tmp_path.glob("*.compiled"))) == 1
    # Now it is read at once.
    assert run(AHEAD, **environment).stdout.split() == ["True", "0"]


LONG = """
import numpy as np
from energon_lite.batching import cutting_stock, stream_search
from energon_lite.packing import pack_best, pack_stream

lengths = np.clip(np.random.default_rng(1).gamma(6, 28, 3_000) // 4, 8, 96).astype(int)
assert len(pack_stream(lengths, 96)) < 1.05 * lengths.sum() / 96
assert len(pack_best(lengths, 96)) < 1.05 * lengths.sum() / 96
kernels = (cutting_stock._solve, stream_search.choose_all)
print([kernel._dispatcher is not None for kernel in kernels])
"""


def test_what_takes_minutes_in_plain_python_is_compiled_at_once(tmp_path: Path) -> None:
    # One call packs all samples, and would not look whether the code is there.
    assert run(LONG, NUMBA_CACHE_DIR=str(tmp_path)).stdout == "[True, True]\n"


def test_of_processes_that_want_the_same_code_one_compiles(tmp_path: Path) -> None:
    mark = tmp_path / "code.compiled"
    compiled.fill_cache(str(mark))  # of no module
    code = (
        "import sys; from energon_lite.core.compiled import fill_cache;"
        "fill_cache(sys.argv[1], 'energon_lite.batching.fit'); print('numba' in sys.modules)"
    )

    def fill() -> str:
        return subprocess.run(
            [sys.executable, "-c", code, str(mark)],
            env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    assert fill() == "False\n"  # done before
    mark.unlink()
    with Path(f"{mark}.lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        assert fill() == "False\n"  # another process is at it
    assert not mark.exists()


def test_scripts_that_pack_little_start_no_process(tmp_path: Path) -> None:
    code = "from energon_lite.packing import first_fit\nprint(first_fit([2, 3], 6).tolist())"
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)).stdout == "[[0, 1]]\n"
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_that_can_be_written_the_process_compiles_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "folder"))
    ahead = CompileAhead([])
    assert ahead.allows_plain(())
    assert ahead.begin()
    assert not ahead.allows_plain(())


@pytest.mark.parametrize("program", ["true", "false"])
def test_compiling_that_fails_or_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", shutil.which(program))
    now = [1000.0]
    monkeypatch.setattr(compile_ahead, "monotonic", lambda: now[0])
    ahead = CompileAhead([])
    assert not ahead.begin()
    assert ahead._child is not None
    child = ahead._child
    child.wait(30)
    assert not ahead.begin()  # for another pipeline
    assert ahead._child is child
    assert not ahead.allows_plain((np.zeros(1 << 20),))
    now[0] += 299
    assert ahead.allows_plain((np.zeros(9),)) == (program == "true")
    now[0] += 2
    assert not ahead.allows_plain(())


def test_compiling_process_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "hashlib.py").write_text("open('imported', 'w').close()\nraise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compile_ahead, "_LOOK_SEC", 0.0)
    ahead = CompileAhead([])
    assert not ahead.begin()
    deadline = time.monotonic() + 60
    while ahead.allows_plain(()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not (tmp_path / "imported").exists()
    assert ahead._child is not None
    assert ahead._child.wait(5) == 0
    assert len(list((tmp_path / "cache").glob("*.compiled"))) == 1


def test_system_that_allows_no_more_processes_lets_the_process_compile_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", refused)
    ahead = CompileAhead([])
    assert ahead.begin()
    assert not ahead.allows_plain(())


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Kernels run as plain Python in a `with` block."""
    found = [(kernel, kernel._dispatcher) for kernel in compiled._kernels]
    for kernel, _ in found:
        kernel._dispatcher = kernel.function
    try:
        yield
    finally:
        for kernel, dispatcher in found:
            kernel._dispatcher = dispatcher


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
@settings(max_examples=60, deadline=None)
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
