from __future__ import annotations

import json

import pytest

from energon_lite import DefaultTaskEncoder
from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.inspect.blend_info import metadataset_info
from energon_lite.extras.inspect.forecast import plan
from energon_lite.extras.inspect.info import dataset_info
from energon_lite.extras.inspect.text import info_text
from energon_lite.extras.lengths.length_index import measure_lengths
from energon_lite.extras.prepare import prepare_dataset

from ..conftest import write_captions
from ..helpers import text_of, text_set


@pytest.fixture
def root(tmp_path):
    write_captions(tmp_path / "set", num_shards=4, samples_per_shard=2)
    return tmp_path / "set"


def test_info_has_sizes_type_parts_and_splits(root):
    prepare_dataset(
        root, split_ratio="2,1,1", sample_type="CaptioningSample",
        field_map={"image": "jpg", "caption": "txt"},
    )  # fmt: skip
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


class Lengths(DefaultTaskEncoder):
    def sample_length(self, sample):
        return len(sample.text)


def test_info_and_plan_count_the_samples_of_subsets(tmp_path):
    for name, number in (("a", 40), ("b", 10)):
        text_set(tmp_path / name, number)
    measure_lengths(tmp_path / "a", Lengths(), num_workers=0)
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n' * 20)
    split_yaml = tmp_path / "a/.nv-meta/split.yaml"
    split_yaml.write_text(split_yaml.read_text() + "exclude: [shard-000.tar/00003]\n")
    measure_lengths(tmp_path / "a", Lengths(), num_workers=0)
    parts = [
        {"path": "a", "split_part": "train", "subset": {"range": ["0%", "25%"]}},
        {"path": "b", "split_part": "train", "subset": {"range": [2, "end"]}},
        {"path": "c.jsonl", "subset": {"range": [3, 8]}},
    ]
    nested = [{"path": "b", "split_part": "train"}, {"concat": parts}]
    splits = {
        "train": {"blend": [*parts, {"path": "half.yaml", "split_part": "own", "subset": {
            "range": ["50%", "100%"]}}]},
        "val": {"concat": parts},
        "inner": {"blend": nested},
        "outer": {"concat": [{"blend": parts}, parts[0]]},
    }  # fmt: skip
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    path = tmp_path / "m.yaml"
    path.write_text(json.dumps({**head, "splits": splits}))
    (tmp_path / "half.yaml").write_text(json.dumps({**head, "splits": {"own": parts[1]}}))
    found = metadataset_info(path)["metadataset"]
    planned = plan(path, steps=1, batch_size=1).sources
    assert [row["samples"] for row in found["train"]] == [9, 8, 5, 4]
    assert [source.size for source in planned] == [9, 8, 5, 4]
    assert found["train"][0]["tokens"] == sum(len(text_of(i)) for i in range(10) if i != 3)
    assert all("shares" in row for row in found["train"])
    assert not any("shares" in row for name in ("val", "outer") for row in found[name])
    assert ["shares" in row for row in found["inner"]] == [True, False, False, False]


def test_a_metadataset_has_shares_schedules_loss_weights_and_tokens(tmp_path):
    for name, number in (("a", 40), ("b", 10), ("c", 20)):
        text_set(tmp_path / name, number)
    measure_lengths(tmp_path / "b", Lengths(), num_workers=0)
    changing = {"schedule": "linear", "points": {0: 0.5, 1000: 0.1}}
    nested = {"weight": 1, "blend": [{"path": "b", "weight": 3}, {"path": "c"}]}
    repeated = [{"path": "a", "repetitions": 2}, {"path": "b"}, {"path": "none"}]
    splits = {
        "train": {"blend": [{"path": "a", "weight": changing, "loss_weight": 0.5}, nested]},
        "epochs": {"blend_epochized": [{**own, "split_part": "train"} for own in repeated]},
        "one": {"path": "a", "split_part": "train"},
        "tokens": {"unit": "tokens", "blend": [{"path": n, "split_part": "train"} for n in "ab"]},
        "dead": {"blend": [{"path": "a", "split_part": "train", "weight": {**changing, "points": {
            0: 0, 10: 1}}}]},
    }  # fmt: skip
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    path = tmp_path / "m.yaml"
    path.write_text(json.dumps({**head, "splits": splits}))
    report = json.loads(json.dumps(metadataset_info(path)))
    found = report["metadataset"]
    first, second, third = found["train"]
    assert first["shares"] == [[0, 1 / 3], [1000, pytest.approx(1 / 11)]]
    assert [row["shares"][0][1] for row in (second, third)] == pytest.approx([1 / 2, 1 / 6])
    assert (first["loss_weight"], first["unit"]) == (0.5, "samples")
    assert second["tokens"] == sum(len(text_of(number)) for number in range(10))
    assert "tokens" not in first
    assert [row["shares"][0][1] for row in found["epochs"]] == pytest.approx([8 / 9, 1 / 9, 0])
    assert "error" in found["epochs"][2]
    assert "shares" not in found["one"][0]
    assert "shares" not in found["dead"][0]
    lines = [line.partition("; ")[2] for line in info_text(report)]
    assert lines[2] == "target share 33.3 % → 9.1 % over 1,000 samples; loss weight 0.5"
    assert lines[3].startswith("target share 50.0 % → 68.2 % over 1,000 samples; ")
    assert lines[3].endswith(" tokens")
    assert lines[-2 - 2] == "target share of tokens 50.0 %"
