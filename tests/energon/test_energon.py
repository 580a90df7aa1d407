"""Datasets go both ways between us and an installed Megatron-Energon.

Set ENERGON_PYTHON to a Python that has megatron-energon 7.4; without it these tests are skipped.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sqlite3
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from energon_lite import CaptioningSample, WorkerConfig, get_val_dataset
from energon_lite.extras.inspect.info import dataset_info
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.storage.yaml import parse_yaml

ENERGON_PYTHON = os.environ.get("ENERGON_PYTHON")
pytestmark = [
    pytest.mark.skipif(not ENERGON_PYTHON, reason="ENERGON_PYTHON is not set"),
    pytest.mark.processes,
]

# Prints [key, hash of caption and pixels] of every sample of the given split parts, as JSON.
READ_ALL = """
import hashlib, json, sys
from megatron.energon import WorkerConfig, get_loader, get_val_dataset

def content(sample):
    pixels = (sample.image * 255).round().byte().numpy().tobytes()
    return hashlib.sha1(sample.caption.encode() + pixels).hexdigest()

config = WorkerConfig(rank=0, world_size=1, num_workers=0)
found = {}
for part in sys.argv[2:]:
    dataset = get_val_dataset(sys.argv[1], split_part=part, batch_size=None, worker_config=config)
    found[part] = [[sample.__key__, content(sample)] for sample in get_loader(dataset)]
print("RESULT" + json.dumps(found))
"""
TYPED = {"sample_type": "CaptioningSample", "field_map": {"image": "png", "caption": "json[a][0]"}}


def energon(code: str, *args: object) -> object:
    assert ENERGON_PYTHON is not None
    result = subprocess.run(
        [ENERGON_PYTHON, "-W", "ignore", "-c", code, *map(str, args)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.rpartition("RESULT")[2])


def energon_prepare(root: Path, *options: str) -> None:
    assert ENERGON_PYTHON is not None
    script = Path(ENERGON_PYTHON).with_name("energon")
    command = [str(script), "prepare", str(root), "--non-interactive", "--num-workers", "2"]
    command += [*options, "--sample-type", "CaptioningSample"]
    command += ["--field-map", json.dumps(TYPED["field_map"])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def content(sample: CaptioningSample) -> str:
    pixels = (sample.image * 255).round().byte().numpy().tobytes()
    return hashlib.sha1(sample.caption.encode() + pixels).hexdigest()


def read_all(root: Path, *parts: str) -> dict[str, list[list[str]]]:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return {
        part: [
            [sample.__key__, content(sample)]
            for sample in get_val_dataset(
                root, split_part=part, batch_size=None, worker_config=config
            )
        ]
        for part in parts
    }


def write_set(root: Path) -> None:
    """Four shards with what is awkward: folders, long names, non-ASCII, members of no sample."""
    formats = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.PAX_FORMAT]
    folders = ["", "a/b.c/", "long" * 30 + "/", "größe/" + "x" * 120 + "/"]
    for shard, (tar_format, folder) in enumerate(zip(formats, folders, strict=True)):
        path = root / f"parts/data-{shard:02d}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w", format=tar_format) as tar:
            if folder:
                info = tarfile.TarInfo(folder)
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            for i in range(shard * 5, shard * 5 + 5):
                picture = io.BytesIO()
                pixels = np.full((8, 9, 3), (i, 2 * i, 3 * i), np.uint8)
                Image.fromarray(pixels).save(picture, "PNG")
                members = {
                    f"{folder}{i:05d}.json": json.dumps({"a": [f"caption {i}"]}).encode(),
                    f"{folder}{i:05d}.png": picture.getvalue(),
                    f"{folder}noext": b"no part of a sample",
                }
                for name, data in members.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def root(tmp_path):
    write_set(tmp_path / "set")
    return tmp_path / "set"


def test_energon_reads_what_we_prepared(root):
    prepare_dataset(root, split_ratio="2,1,1", **TYPED)
    found = energon(READ_ALL, root, "train", "val", "test")
    assert found == read_all(root, "train", "val", "test")
    assert [len(samples) for samples in found.values()] == [10, 5, 5]


def test_we_read_what_energon_prepared(root):
    energon_prepare(root, "--split-ratio", "2,1,1")
    ours = read_all(root, "train", "val", "test")
    assert ours == energon(READ_ALL, root, "train", "val", "test")
    assert [len(samples) for samples in ours.values()] == [10, 5, 5]
    report = lint_dataset(root, num_workers=1)
    assert report.errors == []
    assert report.samples == 20
    assert dataset_info(root)["dataset"]["class"] == "CaptioningSample"


def test_both_write_the_same_files(root):
    prepare_dataset(root, split_ratio="2,1,1", **TYPED)
    ours = _files(root)
    for path in [*root.rglob("*.idx"), *(root / ".nv-meta").iterdir()]:
        path.unlink()
    energon_prepare(root, "--split-ratio", "2,1,1")
    theirs = _files(root)
    assert {*ours} == {*theirs, ".nv-meta/offsets.bin"}  # the offsets and digests are ours alone
    for name in theirs:
        assert ours[name] == theirs[name], name


def _files(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in [*sorted(root.rglob("*.idx")), *sorted((root / ".nv-meta").iterdir())]:
        value: object
        if path.suffix == ".sqlite":
            with sqlite3.connect(path) as connection:
                value = {
                    table: sorted(connection.execute(f"SELECT * FROM {table}"))
                    for (table,) in connection.execute(
                        "SELECT name FROM sqlite_master WHERE type = 'table'"
                    ).fetchall()
                }
            connection.close()
        elif path.suffix in (".yaml", ".json"):
            value = parse_yaml(path.read_text(), path.name)
        else:
            value = len(path.read_bytes()) if path.suffix == ".uuid" else path.read_bytes()
        found[str(path.relative_to(root))] = value
    return found
