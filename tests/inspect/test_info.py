from __future__ import annotations

import json

import pytest

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.inspect.info import dataset_info
from energon_lite.extras.prepare import prepare_dataset

from ..conftest import write_captions


@pytest.fixture
def root(tmp_path):
    write_captions(tmp_path / "set", num_shards=4, samples_per_shard=2)
    return tmp_path / "set"


def test_info_has_sizes_type_parts_and_splits(root):
    prepare_dataset(
        root,
        split_ratio="2,1,1",
        sample_type="CaptioningSample",
        field_map={"image": "jpg", "caption": "txt"},
    )
    report = dataset_info(root)
    assert json.loads(json.dumps(report)) == report
    assert (report["name"], report["samples"], report["shards"]) == ("set", 8, 4)
    assert report["size_bytes"] == sum(tar.stat().st_size for tar in root.glob("*.tar"))
    assert report["dataset"]["class"] == "CaptioningSample"
    assert report["dataset"]["field_map"] == {"image": "jpg", "caption": "txt"}
    assert report["parts"]["txt"] == {"count": 8, "size_bytes": 8 * len("grey number 0")}
    assert report["splits"]["train"] == {
        "shards": 2, "samples": 4, "excluded_samples": 0, "share": 0.5,
    }  # fmt: skip


def test_crude_sets_sets_without_dataset_yaml_and_empty_parts_are_described_too(root):
    prepare_dataset(root, split_ratio="1,0,0", sample_type="CrudeWebdataset")
    report = dataset_info(root)
    assert report["dataset"]["class"] == "CrudeWebdataset"
    assert report["splits"]["val"]["samples"] == 0
    (root / ".nv-meta/dataset.yaml").unlink()
    (root / ".nv-meta/index.sqlite").unlink()
    (root / "shard-0000.tar").unlink()
    report = dataset_info(root)
    assert (report["dataset"], report["parts"], report["size_bytes"]) == (None, None, None)


def test_a_part_that_cannot_be_read_is_reported_and_the_others_described(root):
    prepare_dataset(root, split_ratio="1,0,0")
    (root / ".nv-meta/split.yaml").write_text(
        "split_parts:\n  train: [shard-0000.tar]\n  val: [none.tar]\n"
        "exclude: [shard-0000.tar/000001]\n"
    )
    splits = dataset_info(root)["splits"]
    assert splits["train"]["excluded_samples"] == 1
    assert "'none.tar' is not in" in splits["val"]["error"]


def test_a_config_that_was_named_must_be_there(root):
    prepare_dataset(root, split_ratio="1,0,0")
    with pytest.raises(FileNotFoundError, match=r"other\.yaml is missing"):
        dataset_info(root, split_config="other.yaml")
    with pytest.raises(FileNotFoundError, match=r"other\.yaml is missing"):
        dataset_info(root, dataset_config="other.yaml")
    (root / ".nv-meta/.info.json").write_text("{}")
    with pytest.raises(DatasetFormatError, match="'shard_counts' is missing"):
        dataset_info(root)
