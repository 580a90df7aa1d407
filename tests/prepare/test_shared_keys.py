"""Equal keys in several tars: errors name the cause; tars are replaced only if that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.prepare import prepare_dataset

from ..conftest import write_tar

TEXT: dict[str, Any] = {"sample_type": "TextSample", "field_map": {"text": "txt"}}
CRUDE: dict[str, Any] = {"sample_type": "CrudeWebdataset"}
ALL: dict[str, Any] = {"split_parts": {"train": ".*"}, "num_workers": 0}
FIX = "--fix-duplicates"
Members = list[tuple[str, bytes]]


def members(*names: str, content: bytes = b"x", numbers: range = range(20)) -> Members:
    return [(name.format(f"{i:03d}"), content) for i in numbers for name in names]


COPY = members("{}.txt")
CAUSES: dict[str, tuple[list[Members], str]] = {
    "copy": ([COPY, COPY], "with the same content (20 of 20 samples): one is a copy"),
    "part of a copy": (
        [COPY, members("{}.txt", numbers=range(15, 30))],
        "with the same content (5 of 15 samples)",
    ),
    "columns": ([members("{}.jpg"), members("{}.txt")], "`join:` the folders"),
    "columns with a shared part": (
        [members("{}.jpg", "{}.json"), members("{}.json", "{}.txt")],
        "`join:` the folders",
    ),
    "columns of other lengths": (
        [members("{}.jpg", numbers=range(12)), members("{}.txt", numbers=range(8, 30))],
        "`join:` the folders",
    ),
    "numbered columns": ([members("{}.0.jpg"), members("{}.1.jpg")], "`join:` the folders"),
    "divided sample": (
        [[*members("{}.jpg", "{}.txt"), ("020.jpg", b"")], [("020.txt", b""), *members("9{}.txt")]],
        "divided between two tars",
    ),
    "divided numbered sample": (
        [[*members("{}.0.jpg", "{}.1.jpg"), ("020.0.jpg", b"")], [("020.1.jpg", b"")]],
        "divided between two tars",
    ),
    "dates": (
        [members(f"2024.0{month}.{{}}.txt") for month in (1, 2, 3)],
        "ends at the first dot",
    ),
    "versions": ([members("img.v1.{}.txt"), members("img.v1.{}.txt")], "ends at the first dot"),
    "one version each": ([[("img.v1.txt", b"")], [("img.v2.txt", b"")]], "ends at the first dot"),
    "dots in some keys": (
        [[*members("a_{}.txt"), *members("img.v1.{}.txt")], members("img.v2.{}.txt")],
        "ends at the first dot",
    ),
    "dots in one tar": (
        [[("img.v1.000.txt", b""), ("other.txt", b""), ("img.v1.001.txt", b"")]],
        "ends at the first dot",
    ),
}


def write_tars(folder: Path, shards: list[Members]) -> dict[str, bytes]:
    for number, shard in enumerate(shards):
        write_tar(folder / f"{number}.tar", shard)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.tar*")}


@pytest.mark.parametrize("cause", CAUSES)
def test_cause_of_equal_keys_is_named_and_nothing_is_replaced(tmp_path: Path, cause: str) -> None:
    shards, words = CAUSES[cause]
    before = write_tars(tmp_path, shards)
    for options in ({}, {"fix_duplicates": True}):
        with pytest.raises(DatasetFormatError) as caught:
            prepare_dataset(tmp_path, **ALL, **CRUDE, **options)
        text = str(caught.value).replace(str(tmp_path), "data")
        assert words in text
        assert FIX not in text
        assert "--sort=name" not in text
        assert len(text) < 400 * max(1, len(shards) - 1)
        assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**TEXT, "field_map": {"text": "md"}}, "no sample has a part 'md'"),
        ({**TEXT, "sample_type": "CaptioningSample"}, "CaptioningSample has no field 'text'"),
        (
            {"sample_type": "CaptioningSample", "field_map": {"image": "jpg", "caption": "txt"}},
            "none of 41 samples has the parts of all fields",
        ),
    ],
)
def test_all_else_is_checked_before_a_tar_is_replaced(tmp_path: Path, options, words) -> None:
    shards = [members("{}.txt"), members("{}.txt", content=b"y"), [("picture.jpg", b"x")]]
    before = write_tars(tmp_path, shards)
    with pytest.raises(DatasetFormatError, match=words):
        prepare_dataset(tmp_path, **ALL, **options, fix_duplicates=True)
    assert contents(tmp_path) == before
    assert prepare_dataset(tmp_path, **ALL, **TEXT, fix_duplicates=True).samples == 41
    assert contents(tmp_path) != before


def test_a_whole_sample_in_a_later_tar_counts(tmp_path: Path) -> None:
    write_tars(tmp_path, [members("{}.jpg", content=b"y"), members("{}.jpg", "{}.txt")])
    options = {"sample_type": "CaptioningSample", "field_map": {"image": "jpg", "caption": "txt"}}
    report = prepare_dataset(tmp_path, **ALL, **options, fix_duplicates=True)
    assert report.samples == 40


def test_dots_in_the_keys_of_some_samples_are_found(tmp_path: Path) -> None:
    write_tars(tmp_path, [[*members("{}.txt", numbers=range(99)), *members("img.v1.{}.txt")]])
    (warning,) = prepare_dataset(tmp_path, **ALL, **CRUDE).warnings
    assert "sample 'img' has 20 parts that differ by numbers only" in warning
    assert [problem.message for problem in lint_dataset(tmp_path).warnings] == [warning]
