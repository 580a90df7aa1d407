"""In a notebook a sample has its picture, a pack its segments, and no text of data is HTML."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from energon_lite import (
    Batch,
    CaptioningSample,
    CrudeSample,
    InterleavedSample,
    MockLazy,
    PackedBatch,
    Packing,
    TextSample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
)
from energon_lite.extras.view.notebook import html_of
from energon_lite.stages.packed_sample import pack_samples

from ..conftest import examples, jpeg

KEYS = {"__key__": "<k>", "__restore_key__": ()}
EVIL = "<script>alert(1)</script>"


class Tags(HTMLParser):
    """Collects the tags and the text of a document."""

    def __init__(self, document):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(document)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def pictures(self):
        found = [attrs["src"] for tag, attrs in self.tags if tag == "img"]
        return [Image.open(io.BytesIO(base64.b64decode(s.partition(",")[2]))) for s in found]


def shown(item):
    return Tags(item._repr_html_())


PICTURE = torch.zeros(3, 600, 300, dtype=torch.uint8)
PICTURE[0] = 255


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (PICTURE, 1),
        (PICTURE.float() / 255, 1),
        (PICTURE.permute(1, 2, 0).numpy(), 1),
        (PICTURE.expand(20, 3, 600, 300), 4),
        (jpeg(5, (600, 300)), 1),
        (Image.new("RGB", (600, 300)), 1),
        (["a", PICTURE, [jpeg(5)]], 2),
        ([1] * 100 + [PICTURE], 0),
        (jpeg(5)[:100], 0),
        (torch.zeros(3, 4, device="meta"), 0),
        (torch.zeros(3, 40, 40, device="meta"), 0),
        (np.zeros((3, 4, 5, 6)), 0),
        ("text", 0),
        (None, 0),
    ],
)
def test_pictures_of_any_kind_are_small_and_inline(value, number):
    found = shown(TextSample(**KEYS, text=value)).pictures()
    assert len(found) == number
    for picture in found:
        assert max(picture.size) <= 256


def test_a_sample_has_a_row_for_each_field():
    html = shown(CaptioningSample(**KEYS, image=PICTURE, caption="c" * 500))
    assert [tag for tag, _ in html.tags if tag == "th"] == ["th"] * 2
    assert html.text == f"CaptioningSample '<k>'image3 x 600 x 300 uint8caption{'c' * 400}…"
    many = shown(CrudeSample({f"part{i}": i for i in range(1000)}))
    assert many.text.endswith("part3939and 960 more fields")


def test_all_text_of_data_is_escaped():
    turns = [{"role": EVIL, "content": EVIL}]
    items = [
        TextSample(**{**KEYS, "__key__": EVIL}, text=EVIL),
        CrudeSample(**KEYS, **{EVIL: EVIL}, json=turns, list=[EVIL]),
        InterleavedSample(**KEYS, sequence=[EVIL, PICTURE]),
        Batch(__key__=[EVIL], __restore_key__=()),
        packs([EVIL, EVIL]),
        type(EVIL, (TextSample,), {})(**KEYS, text="a"),
    ]
    for item in items:
        html = shown(item)
        assert "script" not in [tag for tag, _ in html.tags]
        assert "<script" not in item._repr_html_()


def packs(keys, size=10):
    samples = [{"__key__": k, "input_ids": torch.ones(size, dtype=torch.long)} for k in keys]
    return pack_samples(samples, Packing(1 << 20))


def test_a_pack_has_a_bar_for_each_sample_and_its_padding():
    batch = PackedBatch.from_packs([packs("ab"), packs("c", 5)])
    bars = [attrs for tag, attrs in shown(batch).tags if tag == "span"]
    assert [bar["title"] for bar in bars] == [
        "a: 10 tokens", "b: 10 tokens", "c: 5 tokens", "padding: 15 tokens",
    ]  # fmt: skip
    assert [re.match(r"flex:(\d+);", bar["style"])[1] for bar in bars] == ["10", "10", "5", "15"]
    assert len({bar["style"] for bar in bars[:3]}) == 3
    assert "PackedBatch 2 x 20, 3 samples, 62.5 % full" in shown(batch).text
    assert shown(batch.to("meta")).text == "PackedBatch 2 x 20, 3 samples, on meta"
    batch.__key__ = []
    assert next(a["title"] for tag, a in shown(batch).tags if tag == "span") == ": 10 tokens"
    assert "and 4 more rows" in shown(PackedBatch.from_packs([packs("a")] * 20)).text


def test_datasets_and_loaders_are_trees(texts):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(texts, batch_size=2, worker_config=config)
    for item in (dataset, get_savable_loader(dataset)):
        assert shown(item).text == repr(item)
        assert shown(item).tags == [("pre", {})]


@edataclass
class Own(TextSample):
    def __repr__(self):
        return "<own>"


@edataclass
class OwnThatRaises(TextSample):
    def __repr__(self):
        raise RuntimeError("no")


def test_a_repr_of_the_user_is_shown_in_its_place():
    assert Own(**KEYS, text="a")._repr_html_() == "<pre>&lt;own&gt;</pre>"
    assert "OwnThatRaises object at" in OwnThatRaises(**KEYS, text="a")._repr_html_()
    assert html_of(3) == "<pre>3</pre>"


def test_a_lazy_value_stays_closed():
    def refuse(name):
        raise AssertionError(name)

    assert "MockLazy('a.jpg')" in shown(TextSample(**KEYS, text=MockLazy("a.jpg", refuse))).text


@examples(15)
@given(st.dictionaries(st.text(), st.text() | st.binary() | st.lists(st.text() | st.floats())))
def test_any_item_is_html_of_few_tags(parts):
    html = shown(CrudeSample(parts))
    assert {tag for tag, _ in html.tags} <= {"div", "b", "table", "tr", "th", "td", "img", "pre"}
