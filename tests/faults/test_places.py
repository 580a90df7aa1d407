"""Nothing is written outside of a dataset unasked, by links or by names, and nothing by halves."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import prepare_dataset
from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.lengths.length_index import LengthFunction, measure_lengths
from energon_lite.extras.lengths.partial_lengths import PartialLengths
from energon_lite.formats.length_files import lengths_path, write_lengths
from energon_lite.formats.nvmeta import META, read_info
from energon_lite.formats.tar import iter_tar
from energon_lite.sources.dataset_config import load_factory

from ..helpers import text_set

OPTIONS: dict[str, Any] = {
    "split_parts": {"train": ".*"}, "sample_type": "TextSample", "field_map": {"text": "txt"},
    "num_workers": 0, "force_overwrite": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("places") / "data", 12, num_shards=2)


@pytest.fixture
def root(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that is not to change."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("kept")
    return tmp_path / "outside"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def measure(root: Path, **more: Any) -> Any:
    return measure_lengths(root, LengthFunction(lambda s: len(s.text)), num_workers=0, **more)


# ---------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(
    "name",
    [
        ".nv-meta/.info.json", ".nv-meta/split.yaml", ".nv-meta/dataset.yaml",
        ".nv-meta/index.uuid", ".nv-meta/index.sqlite", "shard-000.tar.idx",
        ".nv-meta/.info.json.tmp", "shard-000.tar.idx.tmp", ".nv-meta/prepare.partial/lock",
        ".nv-meta/prepare.partial/index.sqlite",
    ],
)  # fmt: skip
def test_preparing_writes_through_no_planted_link(root: Path, outside: Path, name: str) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(outside / "file")
    if name.endswith("lock"):
        with pytest.raises(OSError, match="lock"):
            prepare_dataset(root, **OPTIONS)
    else:
        assert prepare_dataset(root, **OPTIONS).samples == 12
    assert content(outside) == {str(outside / "file"): b"kept"}


@pytest.mark.parametrize("name", [".nv-meta", ".nv-meta/prepare.partial", "linked"])
def test_a_folder_that_leads_out_is_written_to_only_with_follow_links(
    root: Path, outside: Path, name: str
) -> None:
    place = root / name
    if name == ".nv-meta":
        shutil.move(place, outside / "meta")
    elif name == "linked":
        (outside / "meta").mkdir()
        shutil.move(root / "shard-001.tar", outside / "meta" / "shard-001.tar")
    else:
        (outside / "meta").mkdir()
    place.symlink_to(outside / "meta")
    before = content(outside)
    for options in (OPTIONS, {"tar_index_only": True, "num_workers": 0}):
        if name == "linked" and "tar_index_only" in options:
            continue
        with pytest.raises(DatasetFormatError, match=r"follow_links=True|is a link; move it away"):
            prepare_dataset(root, **options)
    assert content(outside) == before
    if "partial" not in name:
        assert prepare_dataset(root, **OPTIONS, follow_links=True).samples == 12
        assert content(outside) != before


@pytest.mark.parametrize("shard", ["../b.tar", "/etc/b.tar", "a/../../b.tar", "\0.tar", "\ud800"])
def test_shards_outside_of_the_dataset_are_refused(root: Path, outside: Path, shard: str) -> None:
    shutil.copy(root / "shard-000.tar", root.parent / "b.tar")
    info = root / META / ".info.json"
    info.write_text(json.dumps({"shard_counts": {shard: 6}}))
    for attempt in (
        lambda: read_info(root),
        lambda: prepare_dataset(root, tar_index_only=True, num_workers=0),
        lambda: load_factory(root),
    ):
        with pytest.raises(DatasetFormatError, match=r"\.info\.json"):
            attempt()
    assert not (root.parent / "b.tar.idx").exists()
    with pytest.raises(ValueError, match="not below the dataset"):
        prepare_dataset(root, **OPTIONS, paths=["../b.tar"])


@pytest.mark.parametrize("part", ["../../../../../outside/x", "/tmp/x", "a\0b"])
def test_a_length_index_leaves_the_folder_by_no_split_part(
    root: Path, outside: Path, part: str
) -> None:
    with pytest.raises(DatasetFormatError, match="has no slash"):
        write_lengths(root, part, "tok", np.array([1]), "data")
    split = {"split_parts": {part: ["shard-000.tar"]}}
    (root / META / "split.yaml").write_text(json.dumps(split))
    with pytest.raises(ValueError):  # noqa: PT011  the reader of YAML may refuse it before
        measure(root)
    assert content(outside) == {str(outside / "file"): b"kept"}


def test_lengths_are_written_outside_only_with_meta_dir(root: Path, outside: Path) -> None:
    (root / META / "energon_lite").symlink_to(outside)
    with pytest.raises(DatasetFormatError, match="--meta-dir"):
        measure(root)
    with pytest.raises(DatasetFormatError, match="--meta-dir"):
        write_lengths(root, "train", "tok", np.array([1]), "data")
    assert content(outside) == {str(outside / "file"): b"kept"}
    (report,) = measure(root, meta_dir=outside)
    assert report.measured == 12


@pytest.mark.parametrize("name", ["train.npy.partial", "train.npy.partial.json", "train.npy"])
def test_lengths_are_written_through_no_planted_link(root: Path, outside: Path, name: str) -> None:
    folder = lengths_path(root, "train", "default").parent
    folder.mkdir(parents=True)
    (folder / name).symlink_to(outside / "file")
    measure(root)
    assert content(outside) == {str(outside / "file"): b"kept"}
    assert sorted(path.name for path in folder.iterdir()) == ["train.json", "train.npy"]


# ------------------------------------------------------------------------------ what is left over


def test_what_killed_runs_left_is_removed_and_nothing_else(root: Path) -> None:
    left = [f".nv-meta/.info.json.{'a' * 16}.tmp", f"shard-000.tar.idx.{'0' * 16}.tmp",
            f"shard-001.tar.{'f' * 16}.tmp"]  # fmt: skip
    others = [f"other.tar.idx.{'0' * 16}.tmp", "shard-000.tar.idx.tmp", "x.tmp",
              f"shard-000.tar.idx.{'g' * 16}.tmp", f".nv-meta/x.yaml.{'a' * 16}.tmp"]  # fmt: skip
    for name in (*left, *others):
        (root / name).write_text("x")
    (root / f"shard-001.tar.idx.{'1' * 16}.tmp").mkdir()
    prepare_dataset(root, tar_index_only=True, num_workers=0)
    assert not [name for name in left if (root / name).exists()]
    assert all((root / name).exists() for name in others)


def test_what_another_process_writes_of_lengths_at_this_time_stays(root: Path) -> None:
    folder = lengths_path(root, "train", "default").parent
    folder.mkdir(parents=True)
    new, old = (folder / f"train.npy.{digit * 16}.tmp" for digit in "01")
    for path in (new, old):
        path.write_text("x")
    os.utime(old, (0, 0))
    measure(root)
    assert new.exists()
    assert not old.exists()


# ---------------------------------------------------------------------------- errors of the system

FAULTS = {
    errno.ENOSPC: "free some space", errno.EDQUOT: "free some space",
    errno.EROFS: "mount the file system for writing", errno.EACCES: "permission",
    errno.EIO: "storage failed",
}  # fmt: skip


# The call that fails; the first ones to open a file are of databases.
CALLS: dict[str, Any] = {
    "create": (Path, "open", 6), "write": (os, "fchmod", 2), "replace": (Path, "replace", 3),
}  # fmt: skip


@pytest.mark.parametrize(
    ("number", "place"), [*zip(FAULTS, 5 * [*CALLS], strict=False), (errno.EIO, "replace")]
)
def test_a_write_that_fails_is_one_error_and_a_second_run_works(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, place: str
) -> None:
    owner, name, call = CALLS[place]
    calls, function = itertools.count(1), getattr(owner, name)

    def failing(*arguments: Any, **more: Any) -> Any:
        if next(calls) == call:
            raise OSError(number, os.strerror(number))
        return function(*arguments, **more)

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(OSError, match=FAULTS[number]) as caught:
        prepare_dataset(root, **OPTIONS)
    assert caught.value.errno == number
    assert str(root) in str(caught.value)
    monkeypatch.undo()
    assert not list(root.rglob("*.tmp"))
    assert prepare_dataset(root, **OPTIONS).samples == 12
    assert read_info(root).shard_counts == {"shard-000.tar": 6, "shard-001.tar": 6}


def test_no_room_for_lengths_is_an_error_before_a_sample_is_measured(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"free some space.*train\.npy\.partial"):
        measure(root)
    monkeypatch.undo()
    assert measure(root)[0].measured == 12


def test_a_partial_index_of_another_size_is_not_resumed(root: Path) -> None:
    arguments: Any = (root, "train", "tok", 12, ("tokens",), "data", "me")
    partial = PartialLengths(*arguments)
    partial.put(np.arange(4), np.ones((4, 1), dtype=np.int64))
    assert len(PartialLengths(*arguments).missing()) == 8
    path = lengths_path(root, "train", "tok")
    with path.with_name("train.npy.partial").open("ab") as file:
        file.write(b"x")
    assert len(PartialLengths(*arguments).missing()) == 12


def test_a_hole_after_the_end_of_a_tar_is_passed_over_and_data_there_are_found(root: Path) -> None:
    path = root / "shard-000.tar"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size + (1 << 26))
    assert len(list(iter_tar(path))) == 6
    with path.open("r+b") as file:
        file.seek(size + (1 << 25))
        file.write(b"x")
    with pytest.raises(DatasetFormatError, match=f"data at byte {size + (1 << 25)}, after the end"):
        list(iter_tar(path))
