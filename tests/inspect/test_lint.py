from __future__ import annotations

import json
import os
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
        tmp_path / "set", split_ratio="2,1,1", sample_type="CaptioningSample",
        field_map={"image": "jpg", "caption": "txt"}, num_workers=1,
    )  # fmt: skip
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


def meta(name, text):
    """Writes a file of the metadata."""
    return lambda root: (root / ".nv-meta" / name).write_text(text)


def tar(*members):
    """Writes another first shard."""
    return lambda root: write_tar(root / "shard-0000.tar", list(members))


def indexed(*members):
    """The same, and the indexes again."""
    return lambda root: (
        tar(*members)(root), prepare_dataset(root, tar_index_only=True, num_workers=1)
    )  # fmt: skip


def index(*offsets):
    return lambda root: write_index(root / "shard-0001.tar", offsets)


def sql(change):
    """Changes the database; KEY0 and KEY1 are the first keys of the first shard."""

    def run(root):
        with sqlite3.connect(root / ".nv-meta/index.sqlite") as connection:
            query = "SELECT sample_key FROM samples WHERE tar_file_id = 0 ORDER BY sample_index"
            text = change
            for number, (key,) in enumerate(connection.execute(query).fetchall()):
                text = text.replace(f"KEY{number}", key)
            connection.execute(f"UPDATE samples SET {text}")
        connection.close()

    return run


def lose_tars(root):
    (root / "shard-0001.tar").unlink()
    os.truncate(root / "shard-0003.tar", 1000)


def exclude_twice(root):
    split = root / ".nv-meta/split.yaml"
    split.write_text(split.read_text() + "exclude:\n- shard-0003.tar\n")


CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
TYPED = "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
SPLITS = (
    "split_parts:\n  train: [shard-0000.tar, shard-0000.tar]\n  val: [shard-0000.tar]\n"
    "  empty: []\nexclude: [nothing]\n"
)
PAIR = [("000000.jpg", jpeg(0)), ("000000.txt", b"a")]
BROKEN = [*PAIR, ("000001.jpg", b"<html>"), ("000001.txt", b"b"), ("000002.jpg", jpeg(1)),
          ("000002.txt", b"\xff\xfe")]  # fmt: skip
DIFFER = ["shard-0000.tar: .nv-meta/index.sqlite has other samples"]
# What is done, options, errors, warnings, and the numbers of samples that were decoded and failed.
FINDINGS = {
    "crude": (meta("dataset.yaml", CRUDE), {}, [], [], (12, 0)),
    "broken samples": (
        indexed(*BROKEN), {},
        ["'jpg' .*shard-0000.tar, sample '000001'", "0000.tar, sample '000002'"], [], (12, 2)),
    "missing field": (
        meta("dataset.yaml", TYPED + "field_map: {text: 'json[a]'}\n"), {"split_parts": ["val"]},
        ["json.*shard-0002.tar"] * 3, ["12 of 12 samples: no part 'json'"], (3, 3)),
    "broken dataset.yaml": (
        meta("dataset.yaml", "sample_type: 5\n"), {}, ["dataset.yaml"] * 3, [], (0, 0)),
    "other offsets": (
        index(0, 2048, 4608, 6656), {},
        [r"^shard-0001.tar: .*sample 1 at byte 2048, the tar at \d+ \(\d of 4 offsets differ"],
        [], None),
    "short index": (index(0, 2048), {}, ["^shard-0001.tar: .*index of 1 samples"], [], None),
    "lost tars": (lose_tars, {}, ["shard-0001.tar", "truncated"], [], None),
    "other samples": (
        tar(("new.jpg", jpeg(0)), ("new.txt", b"a")), {},
        ["has 1 samples, .info.json lists 3", *DIFFER], [], None),
    "other key": (sql("sample_key = 'other' WHERE sample_key = 'KEY0'"), {}, DIFFER, [], None),
    "other place": (
        sql("byte_offset = byte_offset + 512 WHERE sample_key = 'KEY1'"), {}, DIFFER, [], None),
    "other number": (
        sql("sample_index = sample_index + 1 WHERE tar_file_id = 0"), {}, DIFFER, [], None),
    "exchanged numbers": (
        sql("sample_index = 1 - sample_index WHERE sample_key IN ('KEY0', 'KEY1')"), {}, DIFFER,
        [], None),
    "strange shard": (
        sql("tar_file_id = 9 WHERE tar_file_id = 3"), {}, ["shard number 9", ""], [], None),
    "no database": (
        lambda root: (root / ".nv-meta/index.sqlite").unlink(), {}, [],
        ["index.sqlite is missing"], None),
    "empty member": (
        indexed(("000000.jpg", jpeg(0)), ("000000.txt", b"")), {}, [],
        ["^shard-0000.tar: member '000000.txt' is empty$"], (10, 0)),
    "odd splits": (
        meta("split.yaml", SPLITS), {}, [],
        ["part 'train' lists shard 'shard-0000.tar' twice; its samples come twice$",
         "shard 'shard-0000.tar' is in the parts 'train' and 'val'$",
         "3 shards are in no split part, the first is 'shard-0001.tar'$",
         "exclude entry 'nothing' fits no shard and excludes nothing$"], None),
    "wrong splits": (
        meta("split.yaml", "split_parts: {train: ['{'], val: [none.tar]}\n"), {}, ["", ""],
        ["4 shards are in no split part"], None),
    "unknown key": (
        meta("split.yaml", "split_part: {}\n"), {}, ["unknown key 'split_part'"], [], None),
    "old info": (
        meta(".info.yaml", "shard_counts:\n  a.tar: 1\n"), {}, [], ["differs from .info.json"],
        None),
    "key twice": (
        exclude_twice, {}, [], [r"split.yaml:\d+: key .exclude. is there twice .*; the last c"],
        (9, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", FINDINGS)
def test_what_is_wrong_is_listed_with_its_place(root, name):
    do, options, *expected, counts = FINDINGS[name]
    do(root)
    *found, report = lint(root, decode=counts is not None, **options)
    for lines, wanted in zip(found, expected, strict=True):
        assert len(lines) == len(wanted), lines
        for line, pattern in zip(lines, wanted, strict=True):
            assert re.search(pattern, line), line
    assert counts in (None, (report.samples, report.failed_samples))
    assert name == "broken dataset.yaml" or report.shards == 4


def test_a_split_part_that_does_not_exist_is_refused(root):
    with pytest.raises(DatasetFormatError, match="no split part 'trian'"):
        lint(root, split_parts=["trian"])


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
