"""Samples of a block that are decoded together equal those that are made one by one."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_lite import Sample, TextSample, edataclass
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream
from energon_lite.sources.dataset_config import load_factory
from energon_lite.sources.sample_loader import SampleLoader
from energon_lite.stages.batching import BatchLists
from energon_lite.stages.blend import BlendDataset

from ..conftest import write_tar
from ..helpers import prepared, take_singly, text_set

# Of one sample: the parts besides the text, and the bytes of the text. Some cannot be read.
PARTS = st.sampled_from([(), (), (), ("jpg",), ("seg.txt",)])
TEXTS = st.sampled_from([b"", b"abc", "zwölf".encode(), b"\xff\xfe", b"x" * 3000, b"y" * 40_000])
FOLDERS = st.sampled_from(["", "", "", "a/", "a.b/"])
SAMPLES = st.lists(st.tuples(FOLDERS, PARTS, TEXTS), min_size=1, max_size=40)


def run_of(dataset: Any, num: int, size: int) -> list[Any]:
    """Returns samples, keys, states, skips and draws of the first lists of a stream."""
    run = StreamRun(BatchLists(dataset, size), Stream(0, 1), max_skip_rate=1)
    found: list[Any] = []
    for samples in islice(run, num):
        draws = [(row[0], row[1]) for row in run.context.take_costs()]
        found.append((samples, run.key, run.snapshot().to_json(), draws))
    return [*found, run.context.take_records()]


def one_by_one(dataset: Any, num: int, size: int) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleLoader, "together", lambda self, block: None)
        return run_of(dataset, num, size)


def source_of(path: Path, **keywords: Any) -> Any:
    return load_factory(path, split_part="train", training=True, **keywords).build(
        shuffle_buffer_size=10, repeat=True
    )


# "bin" is a part that no decoder changes.
@given(samples=SAMPLES, size=st.integers(1, 9), part=st.sampled_from(["txt", "bin"]))
@example(samples=[("", (), b"abc")], size=1, part="bin")  # bytes where text is declared
@settings(max_examples=30, deadline=None)
def test_equal_with_any_names_parts_and_texts(samples: list[Any], size: int, part: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "set"
        root.mkdir()
        members = [
            (f"{lead}{i:03d}.{other}", text)
            for i, (lead, parts, text) in enumerate(samples)
            for other in (*parts, part)
        ]
        write_tar(root / "a.tar", members)
        source = source_of(prepared(root, "TextSample", {"text": part}))
        is_read = part == "bin" or any(text != b"\xff\xfe" for _, _, text in samples)
        num = 20 if is_read else 0
        assert run_of(source, num, size) == one_by_one(source, num, size)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (5.0, 1.0)])
def test_equal_in_a_blend(tmp_path, shares) -> None:
    blend = BlendDataset(
        *(
            (source_of(text_set(tmp_path / name, number), subflavors={"of": name}), share)
            for name, number, share in zip("ab", (30, 300), shares, strict=True)
        )
    )
    found = run_of(blend, 60, 7)
    assert found == one_by_one(blend, 60, 7)
    assert sum(len(samples) for samples, *_ in found[:-1]) == 420


@pytest.mark.parametrize("until", [None, "first", "all_once", "forever"])
@pytest.mark.parametrize("size", [1, 5, 40])
def test_lists_of_a_blend_are_its_next_samples(tmp_path, monkeypatch, until, size) -> None:
    parts = [
        load_factory(text_set(tmp_path / name, num), split_part="train", training=True).build()
        for name, num in zip("abc", (3, 17, 60), strict=True)
    ]
    blend = BlendDataset(*zip(parts, (1.0, 1.0, 3.0), strict=True), until=until)
    found = run_of(blend, 30, size)
    take_singly(monkeypatch, type(blend.cursor(Stream(0, 1))))
    assert found == run_of(blend, 30, size)
    assert len(found) >= 2


def test_texts_are_decoded_together(tmp_path, monkeypatch) -> None:
    together, found = SampleLoader.together, []
    monkeypatch.setattr(
        SampleLoader, "together", lambda self, block: found.append(together(self, block))
    )
    run_of(source_of(text_set(tmp_path / "a", 30)), 20, 7)
    assert found
    assert None not in found


def test_a_type_of_the_user_is_made_by_its_constructor(tmp_path) -> None:
    @edataclass
    class Checked(TextSample):
        def __post_init__(self) -> None:
            assert isinstance(self, Sample)
            self.text = self.text.upper()

    source = source_of(text_set(tmp_path / "a", 30))
    maker = copy.copy(source.loader.maker)  # which sources of equal settings share
    maker.sample_type = Checked
    source = replace(source, loader=replace(source.loader, maker=maker))
    samples, *_ = run_of(source, 1, 30)[0]
    assert all(sample.text.startswith("TEXT") for sample in samples)


def test_every_sample_has_subflavors_of_its_own(tmp_path) -> None:
    samples, *_ = run_of(source_of(text_set(tmp_path / "a", 30), subflavors={"a": 1}), 1, 2)[0]
    first, second = samples
    first.__subflavors__["a"] = 2
    assert second.__subflavors__ == {"a": 1}
