"""A repr is short, tells what is in an item, and neither reads nor raises."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    AVDecoder,
    Batch,
    CaptioningSample,
    CrudeSample,
    MockLazy,
    PackedBatch,
    PackedSample,
    Packing,
    Sample,
    TextSample,
    edataclass,
)
from energon_lite.extras.view.reprs import brief, text_of
from energon_lite.stages.packed_sample import pack_samples

from ..conftest import examples

KEYS = {"__key__": "00012", "__restore_key__": ()}


def text(value: object) -> TextSample:
    return TextSample(**KEYS, text=value)


def packs(*lengths: int, images: int = 0, capacity: int = 1024) -> list[PackedSample]:
    samples = [
        {"__key__": str(i), "input_ids": torch.arange(1, n + 1), "images": [torch.zeros(3, 2, 2)]}
        for i, n in enumerate(lengths)
    ]
    for sample in samples[images:]:
        del sample["images"]
    return [pack_samples(samples, Packing(capacity))]


class OddTensor(torch.Tensor):
    @property
    def shape(self):
        raise RuntimeError("no shape here")


def test_a_sample_has_its_key_shapes_and_the_start_of_texts():
    picture = torch.zeros(3, 480, 640, dtype=torch.uint8)
    caption = "A man rides a wave on a surfboard while two other surfers watch him"
    assert repr(CaptioningSample(**KEYS, image=picture, caption=caption)) == (
        "CaptioningSample('00012', image: 3 x 480 x 640 uint8, "
        "caption: 'A man rides a wave on a surfboard while two other surfers...')"
    )
    crude = CrudeSample(
        **KEYS, __shard__="a.tar", jpg=bytes(2048), txt="a", json={"a": [1, 2, 3, 4]}
    )
    assert repr(crude) == (
        "CrudeSample('00012', jpg: 2.0 KiB, txt: 'a', json: {'a': [1, 2, 3, and 1 more]})"
    )
    assert repr(dict(crude)) == dict.__repr__(crude)
    assert pickle.loads(pickle.dumps(crude)) == crude
    assert not hasattr(crude, "__dict__")


def test_a_batch_has_its_number_of_samples():
    batch = Batch(__key__=["a", "b"], __restore_key__=())
    assert repr(batch) == "Batch(2 samples)"
    assert repr(dataclasses.replace(batch, __key__=["a"])) == "Batch(1 sample)"


def test_a_pack_has_its_shape_its_samples_and_how_full_it_is():
    (pack,) = packs(500, 300, 224, images=2)
    assert repr(pack) == "PackedSample(1,024 tokens, 3 samples, 2 images, 100 % full)"
    batch = PackedBatch.from_packs([pack, *packs(1, 2, 700, images=1)])
    assert repr(batch) == "PackedBatch(2 x 1,024, 6 samples, 3 images, 84.3 % full)"
    nearly = PackedBatch.from_packs([p for n in (9999, 9998) for p in packs(n, capacity=9999)])
    assert "99.9 % full" in repr(nearly)
    assert repr(batch.to("meta")) == "PackedBatch(2 x 1,024, 6 samples, 3 images, on meta)"

    @edataclass
    class Own(PackedBatch):
        tag: str = "x"

    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(PackedBatch)}
    assert repr(Own(**values)).endswith("% full, tag: 'x')")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.zeros(2, 3, device="meta"), "2 x 3 float32 on meta"),
        (torch.zeros(2).as_subclass(OddTensor), "OddTensor"),
        (np.zeros((0, 2000), np.uint8), "0 x 2,000 uint8"),
        (bytearray(3 << 20), "3.0 MiB"),
        ("\x1b[31m\n", r"'\x1b[31m\n'"),
        ("\ud800", r"'\ud800'"),
        ([[[["deep"]]]], "[[list of 1]]"),
        (dict.fromkeys(range(5)), "{0: None, 1: None, 2: None, and 2 more}"),
        (object(), "object"),
    ],
)
def test_values_of_any_kind_are_shown_in_few_words(value, shown):
    assert repr(text(value)) == f"TextSample('00012', text: {shown})"


def test_long_values_are_cut():
    assert len(repr(text("x" * 10_000_000))) < 100
    assert len(repr(text(["\U0010ffff" * 60] * 3))) < 300
    many = CrudeSample({f"part{i}": i for i in range(1000)})
    assert repr(many).endswith("part19: 19, and 980 more fields)")
    assert repr(text(10**5000)) == "TextSample('00012', text: int)"
    own = [1]
    own.append(own)
    assert repr(text(own)) == "TextSample('00012', text: [1, [1, list of 2]])"


def test_what_is_lazy_stays_closed():
    def refuse(*_):
        raise AssertionError("this was opened")

    class Closed:
        name = "a.mp4"
        read = seek = tell = refuse

        def __repr__(self):
            refuse()

    pytest.importorskip("av")
    assert repr(text(AVDecoder(Closed()))) == "TextSample('00012', text: AVDecoder)"
    assert repr(text(MockLazy("a.jpg", refuse))) == "TextSample('00012', text: MockLazy('a.jpg'))"
    assert repr(text(Closed())) == "TextSample('00012', text: Closed)"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    | st.builds(torch.empty, st.lists(st.integers(0, 3), max_size=5), device=st.just("meta")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)  # fmt: skip


@examples(8)
@given(value=VALUES, parts=st.dictionaries(st.text(), VALUES))
def test_any_item_is_one_short_printable_line(value, parts):
    for item in (text(value), CrudeSample(parts), CrudeSample(**KEYS, **{"x" * 500: value})):
        found = repr(item)
        assert len(found) <= 800
        assert found.isprintable()
    assert len(brief(value)) <= 200


def test_half_made_objects_have_a_repr():
    for kind in (TextSample, PackedBatch, PackedSample, Batch, CrudeSample):
        assert kind.__name__ in repr(kind.__new__(kind))
    assert text_of(3) == "int(value: 3)"


@edataclass
class Plain:
    number: int
    hidden: str = dataclasses.field(default="h", repr=False)


@dataclasses.dataclass(kw_only=True)
class OfDataclass(Sample):
    number: int = 1


@edataclass
class Own(TextSample):
    def __repr__(self):
        return "my own"


class OfOwn(Own):
    """Not a dataclass by itself."""


@dataclasses.dataclass
class Mixin:
    size: int = 3


@edataclass
class Mixed(Mixin, Sample):
    number: int = 1


def test_classes_of_users_have_short_reprs_or_their_own():
    assert repr(Plain(number=3)) == "Plain(number: 3)"
    assert repr(OfDataclass(**KEYS)) == "OfDataclass('00012', number: 1)"
    assert repr(Mixed(**KEYS)) == "Mixed('00012', size: 3, number: 1)"
    assert repr(Own(**KEYS, text="a")) == repr(OfOwn(**KEYS, text="a")) == "my own"
    without = edataclass(repr=False)(type("Without", (), {"__annotations__": {"x": int}}))
    assert repr(without(x=1)).startswith("<")
    unprintable = dataclasses.make_dataclass(
        "Unprintable", [("x", int)], bases=(Sample,), kw_only=True
    )
    assert repr(unprintable(**KEYS, x=object())) == "Unprintable('00012', x: object)"
