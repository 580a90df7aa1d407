"""Every kind of value gets a kind and a short summary; nothing is decoded or run for it."""

from __future__ import annotations

import io
from collections import namedtuple

import numpy as np
import pytest
import torch
from PIL import Image

from energon_lite import AVData, CaptioningSample, CrudeSample, TextSample, generic_batch
from energon_lite.extras.view.fields import (
    MAX_ITEMS,
    field_views,
    sample_facts,
    short_text,
    turns_of,
    view_of,
)

from ..conftest import jpeg

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def bmp() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4)).save(buffer, "BMP")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("value", "kind", "summary"),
    [
        ("abc", "text", "3 characters"),
        (7, "number", ""),
        (True, "number", ""),
        (np.float32(0.5), "number", ""),
        (torch.zeros(3, 480, 640, dtype=torch.uint8), "picture", "3 x 480 x 640 uint8"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), "tensor", "3 x 4 x 4 int64"),
        (torch.zeros(3, 0, 4), "tensor", "3 x 0 x 4 float32"),
        (torch.zeros(5), "tensor", "5 float32"),
        (np.zeros((4, 5, 3), np.uint8), "picture", "4 x 5 x 3 uint8"),
        (np.zeros((4, 5), np.uint8), "picture", "4 x 5 uint8"),
        (Image.new("L", (5, 4)), "picture", "5 x 4, L"),
        (jpeg(3), "picture", "24 x 16 JPEG, 635 B"),
        (bmp(), "picture", "5 x 4 BMP, 118 B"),
        (b"\xff\xd8\xff no picture", "bytes", "14 B"),
        (bytes(3 << 20), "bytes", "3 MiB"),
        ({"a": [1, None]}, "json", "1 key"),
        ({(1, 2): 3}, "list", "1 key"),
        (TURNS, "conversation", "2 turns"),
        ([{"from": "human", "value": "Hi"}], "conversation", "1 turn"),
        ([torch.zeros(3, 2, 2), "text"], "list", "2 items"),
        (torch.zeros(2, 3, 4, 4), "list", "2 x 3 x 4 x 4 float32"),
        (object, "other", "type"),
    ],
)  # fmt: skip
def test_values_have_a_kind_and_a_summary(value, kind, summary):
    view = view_of("x", value)
    assert (view.name, view.kind, view.summary) == ("x", kind, summary)
    assert view.value is value or view.value == value


def test_dataclasses_dicts_and_named_tuples_are_described_without_service_fields():
    sample = CaptioningSample(
        __key__="k", __restore_key__=("s", 0, 1, 2), image=torch.zeros(3, 2, 2), caption="cat",
        __subflavors__={"a": 1},
    )  # fmt: skip
    assert [(v.name, v.kind) for v in field_views(sample)] == [
        ("image", "picture"), ("caption", "text"),
    ]  # fmt: skip
    facts = sample_facts(sample)
    assert facts.keys == ("k",)
    assert facts.type_name == "CaptioningSample"
    assert facts.restore_key == ("s", 0, 1, 2)
    assert facts.subflavors == ({"a": 1},)
    assert facts.loss_weights == (1.0,)
    crude = CrudeSample({"__key__": "k", "__shard__": "a.tar", "txt": "t", 5: 1})
    assert [v.name for v in field_views(crude)] == ["txt", "5"]
    assert [v.name for v in field_views(namedtuple("T", "a b")(1, 2))] == ["a", "b"]
    assert [v.name for v in field_views(5)] == ["value"]
    assert sample_facts(5).keys == ()


def test_facts_of_a_batch_list_its_samples():
    samples = [TextSample(__key__=str(i), __restore_key__=(i,), text="t") for i in range(3)]

    facts = sample_facts(generic_batch(samples))
    assert facts.keys == ("0", "1", "2")
    assert facts.loss_weights == (1.0, 1.0, 1.0)


def test_lists_are_described_up_to_a_number_and_a_depth():
    view = view_of("x", [torch.zeros(3, 2, 2)] * (MAX_ITEMS + 5))
    assert len(view.items) == MAX_ITEMS
    assert view.summary == f"{MAX_ITEMS + 5} items"
    deep = object()
    for _ in range(1000):
        deep = [deep]
    while view.items:
        view = view.items[0]
    assert view_of("x", deep).kind == "list"
    clips = AVData(
        video_clips=[torch.zeros(2, 3, 4, 4, dtype=torch.uint8)], video_timestamps=None,
        audio_clips=None, audio_timestamps=None,
    )  # fmt: skip
    frames = view_of("x", clips).items[0].items[0]
    assert [item.kind for item in frames.items] == ["picture", "picture"]


def test_turns_have_speaker_and_content():
    assert turns_of({"conversations": [{"from": "a", "value": "b"}]}) == [("a", "b")]
    for other in ([], [1], [{"role": "user"}], {"messages": 3}, "text", None):
        assert turns_of(other) is None


def test_short_text_is_short_for_anything():
    for value in ("x" * 10**6, list(range(10**6)), {"a": "y" * 10**6}, object()):
        assert len(short_text(value, 100)) <= 101
    assert short_text({"a": "é"}) == '{"a": "é"}'
