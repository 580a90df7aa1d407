"""Values of other types than their fields declare: found by `prepare`, by `lint`, and by a run."""

from __future__ import annotations

import io
import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from energon_lite import CrudeSample, WorkerConfig, get_loader, get_train_dataset
from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.prepare import PrepareReport, prepare_dataset
from energon_lite.sources.dataset_config import load_factory
from energon_lite.storage.files import warn_once

from ..conftest import jpeg, write_tar

ALL: dict[str, Any] = {"split_ratio": "1,0,0", "num_workers": 0}
CAPTIONS: dict[str, Any] = {"sample_type": "CaptioningSample"}
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


def prepared(folder: Path, parts: dict[str, bytes], **options: Any) -> PrepareReport:
    members = [(f"{i:03d}.{part}", data) for i in range(8) for part, data in parts.items()]
    write_tar(folder / "0.tar", members)
    return prepare_dataset(folder, **ALL, **options)


def batches(folder: Path, **options: Any) -> list[Any]:
    dataset = get_train_dataset(folder, batch_size=4, repeat=False, worker_config=CONFIG, **options)
    return list(get_loader(dataset))


def picture(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, kind)
    return buffer.getvalue()


def value(item: Any) -> bytes:
    return json.dumps({"x": item}).encode()


CAPTION, CLASS, VQA = "CaptioningSample", "ImageClassificationSample", "VQASample"
QA = {"context": "txt", "answers": "json[x]"}


@pytest.mark.parametrize(
    ("sample_type", "field_map", "parts", "words"),
    [
        (CAPTION, {"caption": "caption"}, {"caption": b"a"}, "str, and its part 'caption' becomes"),
        (
            CAPTION,
            {"caption": "prompt,txt"},
            {"prompt": b"a"},
            "part 'prompt' or 'txt' becomes bytes",
        ),
        (CAPTION, {"image": "img", "caption": "txt"}, {"img": b"a", "txt": b"a"}, "Tensor, and"),
        (CAPTION, {"caption": "json[x]"}, {"json": value(None)}, "'json[x]' becomes NoneType"),
        (CAPTION, {"caption": "json[x]"}, {"json": value(["a"])}, "becomes list of str"),
        (CAPTION, {"caption": "json"}, {"json": value("a")}, "'json' becomes dict"),
        (CAPTION, {"caption": "json[x]"}, {"json": value(1)}, "becomes int"),
        (
            CLASS,
            {"label": "label"},
            {"label": b"1"},
            "type int, and its part 'label' becomes bytes",
        ),
        (CLASS, {"label": "json[x]"}, {"json": value("1")}, "is of type int, and"),
        (CLASS, {"label": "json[x]"}, {"json": value(None)}, ""),
        (VQA, QA, {"txt": b"q", "json": value("yes")}, "list[str], and its part 'json[x]' becomes"),
        (VQA, QA, {"txt": b"q", "json": value([1, 2])}, "becomes list of int"),
        (VQA, QA, {"txt": b"q", "json": value(["yes"])}, ""),
        (VQA, QA, {"txt": b"q", "json": value(None)}, ""),
        ("TextSample", {"text": "md"}, {"md": b"a"}, "str, and its part 'md' becomes bytes"),
        ("ImageSample", {"image": "txt"}, {"txt": b"a"}, "Tensor, and its part 'txt' becomes str"),
        ("ImageSample", {"image": "jpg"}, {}, ""),
        ("InterleavedSample", {"sequence": ["txt", "jpg"]}, {"txt": b"a"}, ""),
        ("InterleavedSample", {"sequence": ["md", "jpg"]}, {"md": b"a"}, "becomes list of bytes"),
        ("VidQASample", {"video": "vid", "context": "txt"}, {"vid": b"a", "txt": b"q"}, ""),
    ],
)
def test_declared_types_are_compared(tmp_path, caplog, sample_type, field_map, parts, words):
    if sample_type in (CAPTION, CLASS, VQA):
        field_map = {"image": "jpg", **field_map}
    parts = {"jpg": jpeg(1), **parts}
    report = prepared(tmp_path, parts, sample_type=sample_type, field_map=field_map)
    assert len(report.warnings) == bool(words)
    assert words in "".join(report.warnings)
    assert all(len(warning) < 300 for warning in report.warnings)
    lint = lint_dataset(tmp_path, num_workers=0)
    assert [problem.message for problem in lint.errors] == list(report.warnings)
    with caplog.at_level(logging.WARNING):
        assert sum(len(batch.__key__) for batch in batches(tmp_path)) == 8
    found = [message for message in caplog.messages if str(tmp_path) in message]
    assert len(found) == bool(words)
    assert words in "".join(found)


def test_results_of_a_sample_loader_are_compared(tmp_path: Path, caplog) -> None:
    prepared(
        tmp_path, {"txt": b"a", "bin": b"a"}, sample_type="TextSample", field_map={"text": "txt"}
    )
    (tmp_path / ".nv-meta/loader.py").write_text(
        "def sample_loader(parts):\n    return {'text': parts['bin']}\n"
        "def part_filter(part):\n    return part == 'bin'\n"
    )
    (tmp_path / ".nv-meta/dataset.yaml").write_text(
        "sample_type: {__module__: energon_lite, __class__: TextSample}\n"
        "sample_loader: loader.py\npart_filter: loader.py\n"
    )
    with caplog.at_level(logging.WARNING):
        batches(tmp_path, trust=True)
    assert (
        "field 'text' is of type str, and what the code of the dataset returns becomes bytes"
        in caplog.text
    )


def test_rare_values_are_found_by_lint(tmp_path: Path) -> None:
    captions = [value("a")] * 99 + [value(None)]
    members = [(f"{i}.json", text) for i, text in enumerate(captions)]
    write_tar(tmp_path / "0.tar", members)
    prepare_dataset(tmp_path, **ALL, sample_type="TextSample", field_map={"text": "json[x]"})
    (problem,) = lint_dataset(tmp_path, num_workers=0).errors
    assert "'json[x]' becomes NoneType" in problem.message


def test_samples_that_fail_are_named_by_prepare(tmp_path: Path) -> None:
    options = {**CAPTIONS, "field_map": {"image": "jpg", "caption": "json[y]"}}
    report = prepared(tmp_path, {"jpg": b"<html>", "json": value("a")}, **options)
    assert (
        "4 of 4 samples that were tried would be skipped, the first for Decod" in report.warnings[0]
    )
    (warning,) = prepared(
        tmp_path, {"jpg": jpeg(1), "json": value("a")}, **options, force_overwrite=True
    ).warnings
    assert "json[y]: no [y], json has the keys 'x'" in warning


# Pictures of newer formats


@pytest.mark.parametrize("part", ["avif", "AVIF", "jpg"])
def test_avif_is_decoded(tmp_path: Path, part: str) -> None:
    options = {**CAPTIONS, "field_map": {"image": part, "caption": "txt"}}
    report = prepared(tmp_path, {part: picture("AVIF"), "txt": b"a"}, **options)
    assert report.warnings == ()
    assert batches(tmp_path)[0].image.shape == (4, 3, 8, 8)


@pytest.mark.parametrize(
    ("part", "brand"), [("heic", b"heic"), ("HEIF", b"mif1"), ("jpg", b"heix")]
)
def test_heic_without_a_plug_in_is_named(tmp_path: Path, part: str, brand: bytes) -> None:
    heic = b"\0\0\0\x18ftyp" + brand + bytes(30)
    options = {**CAPTIONS, "field_map": {"image": part, "caption": "txt"}}
    (warning,) = prepared(tmp_path, {part: heic, "txt": b"a"}, **options).warnings
    assert f"part '{part.lower()}' is HEIF: Pillow has no plug-in for it here" in warning
    assert "pip install pillow-heif" in warning
    assert "broken" not in warning
    (problem,) = {p.message for p in lint_dataset(tmp_path, num_workers=0).errors[:1]}
    assert "pip install pillow-heif" in problem


# Capitals


@pytest.mark.parametrize("names", ["jpg txt", "JPG TXT", "Jpg tXt"])
@pytest.mark.parametrize("asked", ["jpg txt", "JPG TXT"])
def test_names_of_parts_have_no_case(tmp_path: Path, names: str, asked: str) -> None:
    image, text = asked.split()
    parts = dict(zip(names.split(), (jpeg(1), b"a"), strict=True))
    options = {**CAPTIONS, "field_map": {"image": image, "caption": text}}
    report = prepared(tmp_path, parts, **options)
    assert (report.warnings, report.parts) == ((), {"jpg": 8, "txt": 8})
    assert lint_dataset(tmp_path, num_workers=0).is_ok
    batch = batches(tmp_path)[0]
    assert (batch.image.shape[0], batch.caption) == (4, ["a"] * 4)


def test_mixed_capitals_in_one_dataset(tmp_path: Path) -> None:
    names = ["0.txt", "1.TXT", "2.Txt", "3.txt"]
    write_tar(tmp_path / "0.tar", [(name, name.encode()) for name in names])
    report = prepare_dataset(tmp_path, **ALL, sample_type="TextSample", field_map={"text": "txt"})
    assert (report.warnings, report.parts) == ((), {"txt": 4})
    (batch,) = batches(tmp_path)
    assert sorted(batch.text) == names


def test_crude_samples_have_small_letters(tmp_path: Path) -> None:
    prepared(tmp_path, {"JPG": jpeg(1), "TXT": b"a"}, sample_type="CrudeWebdataset")
    for wanted in (None, ["JPG", "txt"], lambda part: part in ("jpg", "TXT")):
        sample = next(iter(load_factory(tmp_path, part_filter=wanted).build()))
        assert isinstance(sample, CrudeSample)
        assert isinstance(sample["jpg"], torch.Tensor)
        assert (sample["txt"], sample["TXT"]) == ("a", "a")
        assert sample.get("png") is None
        with pytest.raises(KeyError, match="PNG"):
            sample["PNG"]
    only = next(iter(load_factory(tmp_path, part_filter=["Txt"]).build()))
    assert "jpg" not in only


def test_two_parts_that_differ_by_capitals_are_refused(tmp_path: Path) -> None:
    members = [("0.txt", b"x"), ("0.TXT", b"y")]
    write_tar(tmp_path / "0.tar", members)
    with pytest.raises(DatasetFormatError, match=r"'0\.TXT' is there twice in a row"):
        prepare_dataset(tmp_path, **ALL)
    write_tar(tmp_path / "0.tar", [("0.txt", b"x"), ("0.md", b"y")])
    prepare_dataset(tmp_path, **ALL, sample_type="CrudeWebdataset")
    write_tar(tmp_path / "0.tar", members)
    (problem,) = lint_dataset(tmp_path, num_workers=0).errors[-1:]
    assert "two parts of one name, apart from capitals: 0.txt, 0.TXT" in problem.message


# Links


def write_links(path: Path, kinds: dict[str, bytes], part: str = "jpg") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for i in range(4):
            for name, data in ((f"{i}.txt", b"a"), (f"{i}.{part}", jpeg(i))):
                member = tarfile.TarInfo(name)
                if name in kinds:
                    member.type, member.linkname = kinds[name], f"0.{part}"
                    tar.addfile(member)
                else:
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_are_named(tmp_path: Path, caplog, kind: bytes) -> None:
    write_links(tmp_path / "0.tar", {"1.jpg": kind, "2.jpg": kind})
    options = {**CAPTIONS, "field_map": {"image": "jpg", "caption": "txt"}}
    report = prepare_dataset(tmp_path, **ALL, **options)
    assert (
        "0.tar: 2 links, as '1.jpg'; a link in a tar is no part of a sample" in report.warnings[0]
    )
    assert "--hard-dereference" in report.warnings[0]
    assert "2 links" in str(lint_dataset(tmp_path, num_workers=0).warnings)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert sum(len(batch.__key__) for batch in batches(tmp_path)) == 2
    assert "Samples lack parts, as tars of this run have links" in caplog.text


def test_a_part_of_links_only_is_explained(tmp_path: Path) -> None:
    write_links(tmp_path / "0.tar", dict.fromkeys([f"{i}.jpg" for i in range(4)], tarfile.SYMTYPE))
    options = {**CAPTIONS, "field_map": {"image": "jpg", "caption": "txt"}}
    with pytest.raises(DatasetFormatError, match=r"has a part 'jpg'.*4 links"):
        prepare_dataset(tmp_path, **ALL, **options)
