"""Data on a storage that the library does not know are read like local files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.inspect.info import dataset_info
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.formats.length_files import read_lengths, write_lengths
from energon_lite.sources.dataset_config import load_factory
from energon_lite.storage import byte_file, files
from energon_lite.storage.local_paths import local_path
from energon_lite.testing import check_dataset

from ..architecture.code_size import code_lines
from ..architecture.source_tree import REPO
from ..helpers import Ranks, metadataset, text_set
from .memory_folder import MemoryFile, MemoryFolder

ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=5)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sets of texts, a JSONL file, and metadatasets of them; all in memory, too."""
    root = tmp_path / "data"
    text_set(root / "sets/a", 40, 3)
    text_set(root / "sets/b", 30, 2)
    lines = "".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(20))
    (root / "lines.jsonl").write_text(lines)
    blend = [{"path": "sets/a", "weight": 1}, {"path": "sets/b", "weight": 2}]
    (root / "local.yaml").write_text(json.dumps(metadataset({"blend": blend})))
    far = [{"path": "memory://sets/a", "weight": 1}, {"path": "sets/b", "weight": 2}]
    (root / "far.yaml").write_text(json.dumps(metadataset({"blend": far})))
    monkeypatch.setattr(byte_file, "_folders", {})
    files.register("memory", MemoryFolder(root))
    shutil.rmtree(root / "sets/a")  # so that it can only be read in memory
    return root


def making(path: Any) -> Any:
    def make(config: WorkerConfig) -> Any:
        return get_train_dataset(path, worker_config=config, batch_size=2, shuffle_buffer_size=5)

    return make


def texts(found: dict[int, Any]) -> dict[int, Any]:
    return {slot: (batch.__key__, batch.text) for slot, batch in found.items()}


def test_the_storage_is_one_file_of_at_most_60_lines() -> None:
    assert code_lines((REPO / "tests/doors/memory_folder.py").read_text()) <= 60


@pytest.mark.parametrize("path", ["memory://sets/b", "memory://lines.jsonl"])
def test_its_samples_obey_the_laws_and_are_those_of_local_files(data, path) -> None:
    near = str(data / path.removeprefix("memory://"))
    for options in ({"training": False}, {"subset": (3, 17)}):
        far, local = (
            load_factory(one, worker_config=ONE, **options).build(shuffle_buffer_size=5)
            for one in (path, near)
        )
        check_dataset(far)
        assert far.config() == local.config()


@pytest.mark.parametrize(
    ("path", "ranks", "workers"),
    [
        ("far.yaml", (2, 3), (0, 0)),
        ("memory://local.yaml", (3, 1), (0, 0)),
        pytest.param("memory://far.yaml", (1, 1), (2, 1), marks=pytest.mark.processes),
    ],
)
def test_a_blend_with_it_trains_as_locally_and_resumes_on_other_ranks_and_workers(
    data, tmp_path, path, ranks, workers
) -> None:
    text_set(tmp_path / "near/sets/a", 40, 3)
    text_set(tmp_path / "near/sets/b", 30, 2)
    shutil.copy(data / "local.yaml", tmp_path / "near")
    whole = Ranks(making(tmp_path / "near/local.yaml"), 1, num_streams=6).steps(24)
    make = making(path if "://" in path else data / path)
    first = Ranks(make, ranks[0], workers[0], num_streams=6, start_method="fork")
    found = first.steps(12 // ranks[0])
    resumed = Ranks(make, ranks[1], workers[1], start_method="fork", states=first.save())
    found |= resumed.steps(12 // ranks[1])
    assert texts(found) == texts(whole)


def test_a_damaged_file_costs_what_it_costs_locally(data) -> None:
    text_set(data.parent / "near/b", 30, 2)
    folder, _ = byte_file.registered(local_path("memory://x")) or (None, None)
    assert isinstance(folder, MemoryFolder)
    name = PurePath("sets/b/shard-001.tar")
    cut = folder.contents[name][:-6000]
    folder.contents[name] = cut
    (data.parent / "near/b/shard-001.tar").write_bytes(cut)
    keys, errors = [], []
    for path in ("memory://sets/b", str(data.parent / "near/b")):
        loader = get_savable_loader(making(path)(ONE), max_skip_rate=1)
        batches = [batch for _, batch in zip(range(40), loader, strict=False)]
        keys.append([key for batch in batches for key in batch.__key__])
        errors.append(loader.num_skipped)
    assert keys[0] == keys[1]
    assert errors[0] == errors[1] != {}


def test_it_is_linted_and_described_without_the_index_that_only_local_programs_read(data) -> None:
    path = "memory://sets/b"
    report = lint_dataset(path)
    assert (report.shards, report.samples, report.errors) == (2, 30, [])
    ((where, text),) = report.warnings
    assert where == ".nv-meta/index.sqlite"
    assert "MemoryFolder is not a file of this machine, " in text
    assert "copy or mount the data" in text
    near, far = dataset_info(data / "sets/b"), dataset_info(path)
    assert near.pop("parts")
    assert far.pop("parts") is None
    assert {**far, "path": near["path"]} == near
    file = PurePath("sets/b/shard-001.tar")
    folder, _ = byte_file.registered(local_path(path)) or (None, None)
    assert isinstance(folder, MemoryFolder)
    folder.contents[file] = folder.contents[file][:-6000]
    assert [where for where, _ in lint_dataset(path).errors][:1] == ["shard-001.tar"]
    assert lint_dataset("memory://lines.jsonl").is_ok
    assert dataset_info("memory://lines.jsonl")["samples"] == 20


def test_lengths_lie_on_this_machine(data) -> None:
    root, name = local_path("memory://sets/b"), str(data.parent / "lengths/own")
    file = write_lengths(root, "train", name, np.arange(30), "hash")
    assert file.is_relative_to(data.parent)
    assert read_lengths(root, "train", name, 30, "hash").tolist() == [*range(30)]
    with pytest.raises(DatasetFormatError, match="is not a file of this machine"):
        write_lengths(root, "train", "own", np.arange(30), "hash")


def test_what_needs_real_files_says_so_and_unknown_schemes_are_refused(data) -> None:
    with pytest.raises(DatasetFormatError, match=r"is not a file of this machine.*copy"):
        files.real_path(local_path("memory://sets/b/.nv-meta/index.sqlite"))
    with pytest.raises(ValueError, match="remote"):
        load_factory("other://sets/b")
    with pytest.raises(FileNotFoundError, match="memory://sets/c is not a prepared dataset"):
        load_factory("memory://sets/c")
    assert files.entries(local_path("memory://sets")) == ["a/", "b/"]
    file = MemoryFile(PurePath("x"), b"1234")
    assert file.read(1, 3) == b"23"
    with pytest.raises(OSError, match="reading ended at byte 4, before byte 6"):
        file.read(1, 6)
    with pytest.raises(ValueError, match="'file' is no scheme"):
        files.register("file", MemoryFolder(data))
