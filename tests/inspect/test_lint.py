from __future__ import annotations

import json
import re
import sqlite3

import pytest

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.formats.nvmeta import write_index

from ..conftest import jpeg, write_captions, write_tar


@pytest.fixture
def root(tmp_path):
    write_captions(tmp_path / "set", num_shards=4, samples_per_shard=3)
    prepare_dataset(
        tmp_path / "set",
        split_ratio="2,1,1",
        sample_type="CaptioningSample",
        field_map={"image": "jpg", "caption": "txt"},
        num_workers=1,
    )
    return tmp_path / "set"


def lint(root, **options):
    """Errors and warnings as `where: message`."""
    report = lint_dataset(root, num_workers=0, **options)
    assert json.loads(json.dumps(report.to_json()))["ok"] == report.is_ok
    return (
        [": ".join(problem) for problem in report.errors],
        [": ".join(problem) for problem in report.warnings],
        report,
    )


def test_a_good_dataset_has_nothing_to_report(root):
    seen = []
    report = lint_dataset(root, num_workers=2, progress=lambda *args: seen.append(args))
    assert (report.errors, report.warnings) == ([], [])
    assert (report.shards, report.samples, report.failed_samples) == (4, 12, 0)
    assert ("Reading shards", 4, 4) in seen
    assert ("Decoding samples", 3, 3) in seen


def test_a_crude_dataset_is_decoded_too(root):
    (root / ".nv-meta/dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )
    errors, _, report = lint(root)
    assert (errors, report.samples) == ([], 12)


def test_broken_samples_are_listed_with_shard_key_and_part(root):
    members = [("000000.jpg", jpeg(0)), ("000000.txt", b"a"), ("000001.jpg", b"<html>")]
    members += [("000001.txt", b"b"), ("000002.jpg", jpeg(1)), ("000002.txt", b"\xff\xfe")]
    write_tar(root / "shard-0000.tar", members)
    prepare_dataset(root, tar_index_only=True, num_workers=1)
    errors, _, report = lint(root)
    assert report.failed_samples == 2
    assert "shard-0000.tar, sample '000001'" in errors[0]
    assert "jpg" in errors[0]
    assert "shard-0000.tar, sample '000002'" in errors[1]


def test_a_missing_field_is_listed(root):
    (root / ".nv-meta/dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
        "field_map: {text: 'json[a]'}\n"
    )
    errors, _, report = lint(root, split_parts=["val"])
    assert (report.samples, report.failed_samples) == (3, 3)
    assert all("json" in error and "shard-0002.tar" in error for error in errors)


def test_a_broken_dataset_yaml_is_one_error_for_each_part(root):
    (root / ".nv-meta/dataset.yaml").write_text("sample_type: 5\n")
    errors, _, report = lint(root)
    assert len(errors) == 3
    assert "dataset.yaml" in errors[0]
    assert report.samples == 0


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2048, 4608, 6656], r"sample 1 at byte 2048, the tar at \d+ \(\d of 4 offsets differ"),
        ([0, 2048], "index of 1 samples"),
    ],
)
def test_an_index_that_does_not_fit_its_tar_is_an_error(root, offsets, message):
    write_index(root / "shard-0001.tar", offsets)
    errors, _, _ = lint(root, decode=False)
    assert len(errors) == 1
    assert errors[0].startswith("shard-0001.tar: ")
    assert re.search(message, errors[0])


def test_missing_and_truncated_tars_are_errors_and_the_rest_is_checked(root):
    (root / "shard-0001.tar").unlink()
    path = root / "shard-0003.tar"
    path.write_bytes(path.read_bytes()[:1000])
    errors, _, report = lint(root, decode=False)
    assert len(errors) == 2
    assert "shard-0001.tar" in errors[0]
    assert "truncated" in errors[1]
    assert report.shards == 4


def test_counts_and_database_rows_that_differ_are_errors(root):
    write_tar(root / "shard-0000.tar", [("new.jpg", jpeg(0)), ("new.txt", b"a")])
    errors, _, _ = lint(root, decode=False)
    assert any("has 1 samples, .info.json lists 3" in error for error in errors)
    assert any("index.sqlite has other samples" in error for error in errors)


@pytest.mark.parametrize(
    "change",
    [
        "sample_key = 'other' WHERE sample_key = 'KEY0'",
        "byte_offset = byte_offset + 512 WHERE sample_key = 'KEY1'",
        "sample_index = sample_index + 1 WHERE tar_file_id = 0",
        "sample_index = 1 - sample_index WHERE sample_key IN ('KEY0', 'KEY1')",
    ],
)
def test_every_key_and_place_in_the_database_is_compared(root, change):
    with sqlite3.connect(root / ".nv-meta/index.sqlite") as connection:
        query = "SELECT sample_key FROM samples WHERE tar_file_id = 0 ORDER BY sample_index"
        for number, (key,) in enumerate(connection.execute(query).fetchall()):
            change = change.replace(f"KEY{number}", key)
        connection.execute(f"UPDATE samples SET {change}")
    connection.close()
    errors, _, _ = lint(root, decode=False)
    assert len(errors) == 1
    assert errors[0].startswith("shard-0000.tar: .nv-meta/index.sqlite has other samples")


def test_a_database_that_is_missing_is_a_warning_and_a_strange_one_an_error(root):
    database = root / ".nv-meta/index.sqlite"
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE samples SET tar_file_id = 9 WHERE tar_file_id = 3")
    connection.close()
    errors, _, _ = lint(root, decode=False)
    assert any("shard number 9" in error for error in errors)
    database.unlink()
    errors, warnings, _ = lint(root, decode=False)
    assert errors == []
    assert "index.sqlite is missing" in warnings[0]


def test_empty_members_are_warnings(root):
    members = [("000000.jpg", jpeg(0)), ("000000.txt", b"")]
    write_tar(root / "shard-0000.tar", members)
    prepare_dataset(root, tar_index_only=True, num_workers=1)
    errors, warnings, _ = lint(root)
    assert errors == []
    assert warnings == ["shard-0000.tar: member '000000.txt' is empty"]


def test_odd_splits_are_warnings(root):
    (root / ".nv-meta/split.yaml").write_text(
        "split_parts:\n  train: [shard-0000.tar, shard-0000.tar]\n  val: [shard-0000.tar]\n"
        "  empty: []\nexclude: [nothing]\n"
    )
    errors, warnings, _ = lint(root)
    assert errors == []
    assert [warning.partition(": ")[2] for warning in warnings] == [
        "part 'train' lists shard 'shard-0000.tar' twice; its samples come twice",
        "shard 'shard-0000.tar' is in the parts 'train' and 'val'",
        "3 shards are in no split part, the first is 'shard-0001.tar'",
        "exclude entry 'nothing' fits no shard and excludes nothing",
    ]


def test_wrong_splits_are_errors(root):
    (root / ".nv-meta/split.yaml").write_text("split_parts: {train: ['{'], val: [none.tar]}\n")
    errors, _, _ = lint(root)
    assert len(errors) == 2
    (root / ".nv-meta/split.yaml").write_text("split_part: {}\n")
    errors, _, _ = lint(root)
    assert "unknown key 'split_part'" in errors[0]


def test_a_split_part_that_does_not_exist_is_refused(root):
    with pytest.raises(DatasetFormatError, match="no split part 'trian'"):
        lint(root, split_parts=["trian"])


def test_an_old_info_yaml_that_differs_is_a_warning(root):
    (root / ".nv-meta/.info.yaml").write_text("shard_counts:\n  a.tar: 1\n")
    errors, warnings, _ = lint(root, decode=False)
    assert errors == []
    assert "differs from .info.json" in warnings[0]


def test_keys_that_are_twice_are_warnings_and_the_last_counts(root):
    split = root / ".nv-meta/split.yaml"
    split.write_text(split.read_text() + "exclude:\n- shard-0003.tar\n")
    errors, warnings, report = lint(root)
    assert errors == []
    assert re.search(
        r"split.yaml:\d+: key 'exclude' is there twice .*; the last counts", warnings[0]
    )
    assert report.samples == 9


def test_all_datasets_of_a_metadataset_are_read_once(root, tmp_path):
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
    (tmp_path / "m.yaml").write_text(
        f"{head}  train:\n    blend:\n    - path: set\n    - {{path: set, split_part: val}}\n"
        "  val: {path: set}\n"
    )
    errors, _, report = lint(tmp_path / "m.yaml")
    assert (errors, report.shards, report.samples) == ([], 4, 9)
    _, _, report = lint(tmp_path / "m.yaml", split_parts=["val"])
    assert report.samples == 3
    (tmp_path / "m.yaml").write_text(f"{head}  train: {{path: gone}}\n")
    errors, _, _ = lint(tmp_path / "m.yaml")
    assert len(errors) == 1
    assert "gone" in errors[0]
    with pytest.raises(ValueError, match=r"names the files in \.nv-meta itself"):
        lint(tmp_path / "m.yaml", split_config="other.yaml")
