"""Histograms count each value once, and the fill of packs is theirs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.extras.lengths.length_index import LengthFunction, measure_lengths
from energon_lite.extras.preview.browse import SplitBrowser
from energon_lite.extras.preview.charts import fills, histogram, sizes
from energon_lite.extras.preview.slots import SlotReader

from ..helpers import text_of, text_set
from .sets import PackedBytes, blend


@given(st.lists(st.integers(0, 10**9), max_size=300))
def test_a_histogram_counts_each_value_once(values):
    bars = histogram(values)
    assert sum(int(bar.text.replace(",", "")) for bar in bars) == len(values)
    assert len(bars) <= 21
    if values:
        assert max(bar.share for bar in bars) == 1
        assert bars[0].label.split("–")[0] == f"{min(values):,}"


def test_small_numbers_have_a_bar_each():
    assert [(b.label, b.text) for b in histogram([1, 2, 2, 4])] == [
        ("1", "1"), ("2", "2"), ("3", "0"), ("4", "1"),
    ]  # fmt: skip


def test_ranges_without_values_share_a_bar():
    assert [(b.label, b.text) for b in histogram([3] * 38 + [403] * 2)] == [
        ("3–23", "38"), ("24–401", "0"), ("402–403", "2"),
    ]  # fmt: skip


def test_sizes_are_those_of_samples_from_all_over(tmp_path):
    number, found = sizes(SplitBrowser(blend(tmp_path), "train"), 60)
    assert number == 80
    assert set(found) == {
        "text: characters", "image: longest edge in pixels", "caption: characters",
    }  # fmt: skip
    count, bars = found["image: longest edge in pixels"]
    assert (count, [bar.label for bar in bars]) == (20, ["24"])


def test_the_fill_is_that_of_the_packs(tmp_path):
    slots = SlotReader(text_set(tmp_path, 60), "train", PackedBytes(), batch_size=2)
    found = fills(slots, None, 60)
    assert len(found) == 24
    for number, bar in enumerate(found):
        batch = slots.read(number // 2).batch
        fill = float((batch.segment_ids[number % 2] > 0).float().mean())
        assert bar.share == pytest.approx(fill)
        assert bar.label == f"slot {number // 2}.{number % 2 + 1}"
    assert fills(slots, None, -1) == []


def test_stored_lengths_are_those_of_all_samples_of_the_split(tmp_path):
    root = text_set(tmp_path, 90)
    assert SplitBrowser(root, "train").stored_lengths() == {}
    length = LengthFunction(lambda sample: len(sample.text) * (sample.__key__ != "00003"))
    measure_lengths(root, length)
    found = SplitBrowser(root, "train").stored_lengths()
    assert list(found) == ["tokens, index default"]
    assert found["tokens, index default"].tolist() == [len(text_of(i)) for i in range(90) if i != 3]
    (root / ".nv-meta/energon_lite/lengths/default/train.npy").write_bytes(b"no array")
    assert SplitBrowser(root, "train").stored_lengths() == {}
