"""`prepare` and `lint` describe what training would meet: odd keys, odd parts, missing parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.cli import app
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.prepare import PrepareReport, prepare_dataset

from ..conftest import jpeg, write_tar

CRUDE: dict[str, Any] = {"sample_type": "CrudeWebdataset"}
TEXT: dict[str, Any] = {"sample_type": "TextSample", "field_map": {"text": "txt"}}
Members = list[tuple[str, bytes]]


def texts(*names: str, count: int = 300) -> Members:
    return [(name.format(f"{i:03d}"), b"x") for i in range(count) for name in names]


def prepared_set(folder: Path, members: Members, **options: Any) -> PrepareReport:
    for start in range(0, len(members), 200):
        write_tar(folder / f"{start:04d}.tar", members[start : start + 200])
    # A key goes on in no second shard.
    paths = ["0000.tar"] if len({name.split(".")[0] for name, _ in members}) == 1 else None
    return prepare_dataset(
        folder, split_parts={"train": ".*"}, num_workers=0, paths=paths, **options
    )


@pytest.mark.parametrize(
    ("name", "first", "fixed"),
    [
        ("img.v1.{}.txt", "'img.v1.000.txt', 'img.v1.001.txt'", "'img_v1_000'"),
        ("0.{}_a.txt", "'0.000_a.txt', '0.001_a.txt'", "'0_000_a'"),
        ("img.v{}.txt", "'img.v000.txt', 'img.v001.txt'", "'img_v000'"),
    ],
)
def test_keys_with_dots_are_found(tmp_path: Path, name, first, fixed) -> None:
    (warning,) = prepared_set(tmp_path, texts(name), **CRUDE).warnings
    assert "200 parts that differ by numbers only: " + first in warning
    assert "and 190 more" in warning
    assert "ends at the first dot" in warning
    assert f"keys without dots ({fixed})" in warning
    assert len(warning) < 700
    report = lint_dataset(tmp_path, num_workers=0)
    assert [problem.message for problem in report.errors] == [warning]


@pytest.mark.parametrize("name", ["img.v1.{}.txt", "0.{}_a.txt", "0.5_a.txt"])
def test_a_part_that_no_sample_has_is_explained_by_the_first_dot(tmp_path: Path, name) -> None:
    members = list(dict.fromkeys(texts(name)))
    with pytest.raises(DatasetFormatError, match="ends at the first dot") as caught:
        prepared_set(tmp_path, members, **TEXT)
    assert "Did you mean" not in str(caught.value)
    assert len(str(caught.value)) < 700
    assert ("and 190 more" in str(caught.value)) == (len(members) == 300)


@pytest.mark.parametrize(
    ("names", "options", "num_warnings"),
    [
        (["{}.txt", "{}.jpg"], CRUDE, 0),
        (["{}.cam0.txt", "{}.cam1.txt"], CRUDE, 0),
        (["{}.txt.0", "{}.txt.1"], CRUDE, 0),
        (["{}.0.txt", "{}.1.txt"], CRUDE, 1),  # several texts, or a dot in the key: a warning
        (["{}.0.txt", "{}.1.txt"], {**TEXT, "field_map": {"text": "0.txt,1.txt"}}, 0),
    ],
)
def test_parts_with_numbers_that_all_samples_have_are_no_error(
    tmp_path: Path, names, options, num_warnings
) -> None:
    report = prepared_set(tmp_path, texts(*names, count=20), **options)
    assert len(report.warnings) == num_warnings
    checked = lint_dataset(tmp_path, num_workers=0, decode=False)
    assert (len(checked.errors), len(checked.warnings)) == (0, 0)
    if "jpg" not in names[1]:
        checked = lint_dataset(tmp_path, num_workers=0)
        assert (checked.errors, len(checked.warnings)) == ([], num_warnings)


PAIRS = [
    member
    for i in range(6)
    for member in ((f"{i}.jpg", jpeg(i)), (f"{i}.txt", b"a"), (f"{i}.cls", b"1"))
]


@pytest.mark.parametrize(
    ("sample_type", "field_map", "words"),
    [
        ("TextSample", {"text": "jpg"}, "field 'text' is of type str, and its part 'jpg' becomes"),
        ("TextSample", {"text": "cls"}, "'cls' becomes int"),
        ("TextSample", {"text": "md,jpg"}, "'jpg' becomes Tensor"),
        ("CaptioningSample", {"image": "txt", "caption": "txt"}, "'txt' becomes str"),
        ("ImageClassificationSample", {"image": "jpg", "label": "txt"}, "is of type int, and"),
        ("ImageClassificationSample", {"image": "jpg", "label": "cls"}, ""),
        ("VidQASample", {"video": "jpg", "context": "txt"}, ""),
        ("TextSample", {"text": "txt"}, ""),
    ],
)
def test_a_part_of_another_type_than_its_field_is_found(tmp_path, sample_type, field_map, words):
    report = prepared_set(tmp_path, PAIRS, sample_type=sample_type, field_map=field_map)
    assert len(report.warnings) == bool(words)
    assert words in "".join(report.warnings)
    checked = lint_dataset(tmp_path, num_workers=0)
    assert [problem.message for problem in checked.errors] == list(report.warnings)
    result = CliRunner().invoke(app, ["lint", str(tmp_path)])
    assert result.exit_code == bool(words)


def test_samples_without_a_part_of_a_field_are_counted(tmp_path: Path) -> None:
    members = [member for member in PAIRS if member[0] not in ("2.txt", "0.cls", "1.cls")]
    captions = {"sample_type": "CaptioningSample", "field_map": {"image": "jpg", "caption": "txt"}}
    report = prepared_set(tmp_path, members, **captions)
    assert report.warnings == ("1 of 6 samples: no part 'txt' (field 'caption'); a run skips them",)
    again = prepared_set(tmp_path, members, **TEXT, force_overwrite=True)
    assert "(field 'text')" in again.warnings[0]
    either = {"sample_type": "TextSample", "field_map": {"text": "txt,cls"}}
    mixed = prepared_set(tmp_path, members, **either, force_overwrite=True).warnings
    assert not any("no part" in warning for warning in mixed)
    assert prepared_set(tmp_path, members, **CRUDE, force_overwrite=True).warnings == ()
    crude = ["--sample-type", "CrudeWebdataset", "--split-ratio", "1,0", "--force-overwrite"]
    printed = CliRunner().invoke(app, ["prepare", str(tmp_path), *crude]).output
    assert "parts: jpg (6), txt (5 of 6), cls (4 of 6)" in printed


def test_parts_named_as_service_fields_are_named(tmp_path: Path) -> None:
    members = texts("{}.txt", "{}.__key__", "{}.__url__", count=9)
    for options in (CRUDE, TEXT):
        (warning,) = prepared_set(tmp_path, members, **options, force_overwrite=True).warnings
        assert "parts '__key__', '__url__' are not read" in warning
        assert [p.message for p in lint_dataset(tmp_path, num_workers=0).warnings] == [warning]


@pytest.mark.parametrize("text", [json.dumps([{"a": 1}]), '[\n{"a": 1},\n{"a": 2}\n]\n'])
def test_a_json_array_is_no_jsonl_file(tmp_path: Path, text: str) -> None:
    for name in ("array.jsonl", "array.json"):
        (tmp_path / name).write_text(text)
        for command in ("prepare", "lint"):
            result = CliRunner().invoke(app, [command, str(tmp_path / name)])
            assert result.exit_code == 1
            assert "one object into each line (of a JSON array: `jq -c" in result.output
    assert not (tmp_path / "array.jsonl.idx").exists()
