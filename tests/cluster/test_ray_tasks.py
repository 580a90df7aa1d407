"""`prepare`, `lengths` and `lint` on a cluster write what they write on this machine."""

from __future__ import annotations

import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from energon_lite import DefaultTaskEncoder
from energon_lite.extras.lengths.length_index import measure_lengths
from energon_lite.extras.prepare import pool
from energon_lite.extras.prepare.pool import ordered_results

from ..conftest import write_tar
from ..helpers import prepared, text_of

pytest.importorskip("ray", reason="Ray is not installed; see `make cluster`")
ray_tasks: Any = import_module("energon_lite.extras.cluster.ray_tasks")


@pytest.fixture
def elsewhere(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `--ray` sets."""
    monkeypatch.setattr(pool, "elsewhere", ray_tasks.results_of_cluster)


def contents(folder: Path) -> dict[str, bytes]:
    names = ".info.json", "split.yaml", "dataset.yaml", "offsets.bin", "index.uuid"
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tar"]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.name in names or (path.suffix in (".idx", ".npy") and "uuid" not in path.name)
    }


def tars(folder: Path) -> Path:
    for shard in range(6):
        own = range(shard * 5, shard * 5 + 5)
        write_tar(
            folder / f"shard-{shard}.tar", [(f"{n:05d}.txt", text_of(n).encode()) for n in own]
        )
    return folder


class Measuring(DefaultTaskEncoder):
    def sample_length(self, sample: Any) -> int:
        return len(sample.text)


def test_files_are_those_made_on_this_machine(
    tmp_path: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cluster", "here"):
        prepared(tars(tmp_path / name), "TextSample", {"text": "txt"})
        measure_lengths(tmp_path / name, Measuring())
        monkeypatch.setattr(pool, "elsewhere", None)
    found, expected = contents(tmp_path / "cluster"), contents(tmp_path / "here")
    assert found.keys() == expected.keys()
    assert any(name.endswith(".idx") for name in found)
    own = {".nv-meta/index.uuid", ".nv-meta/offsets.bin"}  # the latter has a hash of the former
    assert {name for name in found if found[name] != expected[name]} <= own


def test_corrupt_tar_is_named(tmp_path: Path, elsewhere: None) -> None:
    (tars(tmp_path) / "shard-3.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(ValueError, match=r"shard-3\.tar"):
        prepared(tmp_path, "TextSample", {"text": "txt"})


@pytest.mark.usefixtures("elsewhere")
def test_results_are_in_order_and_errors_are_those_of_the_function() -> None:
    def inverse(number: int) -> float:
        return 1 / number

    found = ordered_results(inverse, [4, 2, 0, 1], 3)
    assert [next(found), next(found)] == [0.25, 0.5]
    with pytest.raises(ZeroDivisionError):
        next(found)


class Result(NamedTuple):
    written: tuple[Path, ...]


def test_files_that_a_task_wrote_on_another_node_come_with_its_result(tmp_path: Path) -> None:
    def write(path: Path) -> Any:
        path.write_bytes(b"of a task")
        return Result((path,))

    path, dumps = tmp_path / "rows", ray_tasks.cloudpickle.dumps
    result, error, contents = ray_tasks.call(dumps(write), path)
    assert (result, error, contents) == (Result((path,)), None, {path: b"of a task"})
    for before in (b"of a task", b"of an earlier run", None):
        path.unlink(missing_ok=True)
        if before:
            path.write_bytes(before)
        ray_tasks.bring(contents)
        assert path.read_bytes() == b"of a task"


@pytest.mark.usefixtures("elsewhere")
def test_task_that_ends_its_process_is_an_error_after_some_tries() -> None:
    def end(number: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"lost on the cluster 4 times.*: 7\. Run the same"):
        next(ordered_results(end, [7], 1))
