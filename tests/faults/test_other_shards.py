"""Shards that are not those that were prepared: their keys are compared with the index."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.core.errors import describe
from energon_lite.formats.shards import ShardReader
from energon_lite.storage.files import warn_once

from ..conftest import write_tar
from ..helpers import prepared, text_set
from .hostile_sets import run_script

BROKEN = "shard-001.tar"


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("sound") / "set", 30)


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    warn_once.cache_clear()
    return shutil.copytree(sound, tmp_path / "set")


def read(folder: Path) -> tuple[list[str], list[str]]:
    """The keys of an epoch in the order of the files, and the errors of what was skipped."""
    errors: list[str] = []
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=0,
        global_error_handler=lambda error, *rest: errors.append(describe(error)),
    )  # fmt: skip
    dataset = get_train_dataset(
        folder, worker_config=config, batch_size=None, repeat=False,
        shuffle_over_epochs_multiplier=None, shuffle_buffer_size=0,
    )  # fmt: skip
    return [sample.__key__ for sample in get_savable_loader(dataset)], errors


def keys(*numbers: range) -> list[str]:
    return [f"{i:05d}" for some in numbers for i in some]


def test_shard_with_other_keys_in_the_same_places_is_an_error(copied: Path) -> None:
    shutil.copy(copied / "shard-002.tar", copied / BROKEN)
    found, errors = read(copied)
    assert found == keys(range(10), range(20, 30))
    assert len(errors) == 10
    for error in errors:
        assert f"{copied / BROKEN}: sample 0 has the key '00020'" in error
        assert "where index.sqlite has '00010'" in error
        assert f"run `energon-lite prepare {copied} --tar-index-only`" in error


INDEXES: dict[str, str | None] = {
    "absent": None,
    "damaged": "",
    "of other tables": "DROP TABLE samples",
    "without the index": "DROP INDEX idx_samples_by_tar_and_idx",
    "without rows": "DELETE FROM samples WHERE tar_file_id = 1",
    "with other values": "UPDATE samples SET sample_key = x'00' WHERE tar_file_id = 1 "
    "AND sample_index = 0",
}


@pytest.mark.parametrize("case", INDEXES)
def test_index_is_not_needed_for_reading(copied: Path, case: str, caplog: Any) -> None:
    index, statement = copied / ".nv-meta/index.sqlite", INDEXES[case]
    if statement is None:
        index.unlink()
    elif statement:
        run_script(index, statement)
    else:
        index.write_bytes(b"\0" * 4096 + index.read_bytes()[4096:])
    assert read(copied) == (keys(range(30)), [])
    warnings = [record for record in caplog.records if "not compared" in record.getMessage()]
    assert len(warnings) == (case in ("damaged", "with other values"))
    for warning in warnings:
        assert f"run `energon-lite prepare {copied} --tar-index-only`" in warning.getMessage()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="lists open files by /proc")
def test_index_is_open_only_while_it_is_queried(copied: Path) -> None:
    dataset = get_train_dataset(
        copied, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0), batch_size=1
    )
    loader = get_savable_loader(dataset)
    iterator = iter(loader)
    next(iterator)
    opened = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    own = [path.name for path in opened if path.is_relative_to(copied)]
    assert any(name.endswith(".tar") for name in own)
    assert "index.sqlite" not in own


def test_first_members_that_are_no_part_of_a_sample_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, size in (("d", 0), ("noext", 9000), ("__meta__/x.txt", 9000), ("0.txt", 5)):
            info = tarfile.TarInfo(name)
            info.size = size
            info.type = tarfile.REGTYPE if size else tarfile.DIRTYPE
            tar.addfile(info, io.BytesIO(bytes(size)))
    prepared(folder, "TextSample", {"text": "txt"})
    assert read(folder) == (["0"], [])
    run_script(folder / ".nv-meta/index.sqlite", "UPDATE samples SET sample_key = '1'")
    found, errors = read(folder)
    assert found == []
    assert "sample 0 has the key '0', where index.sqlite has '1'" in errors[0]


def test_index_that_assigns_a_part_to_another_sample_is_an_error(tmp_path: Path) -> None:
    """Sample 1 would have the first part of sample 2, which would lack it without a word."""
    members = [(f"{i}.{part}", b"text") for i in range(4) for part in ("a.txt", "b.txt")]
    write_tar(tmp_path / "set/a.tar", members)
    folder = prepared(tmp_path / "set", "CrudeWebdataset")
    reader = ShardReader(folder, ["a.tar"], [4], [0])
    # An index that lacks a sample is compared with nothing.
    index, other = folder / ".nv-meta/index.sqlite", tmp_path / "index.sqlite"
    shutil.copy(index, other)
    run_script(index, "DELETE FROM samples WHERE sample_index = 2")
    assert len(reader.read(np.array([3])).members[0]) == 2
    shutil.copy(other, index)
    offsets = np.fromfile(folder / "a.tar.idx", dtype="<u8")
    offsets[2] += 1024
    offsets.tofile(folder / "a.tar.idx")
    (error,) = ShardReader(folder, ["a.tar"], [4], [0]).read(np.array([3])).members
    assert f"{folder / 'a.tar.idx'}: samples begin at other bytes than in index.sqlite" in str(
        error
    )
    assert f"run `energon-lite prepare {folder} --tar-index-only`" in str(error)
