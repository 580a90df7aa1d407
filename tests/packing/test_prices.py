"""Prices at which the streaming search values lengths where few samples fill a pack."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest

from energon_lite.batching.stream import StreamingPacker, pack_stream
from energon_lite.extras.samplers.best import lower_bound

from .test_streaming import as_rows, fill, text_lengths


def question_lengths(capacity: int) -> np.ndarray:
    """Questions with a passage: two or three fill a pack."""
    drawn = np.random.Generator(np.random.Philox(1)).gamma(6, 28, 20_000)
    return np.clip(np.rint(drawn), 30, capacity).astype(np.int64)


def middling_lengths(num: int) -> np.ndarray:
    """Lengths of which two leave much of 384 free, and three seldom fit."""
    drawn = np.random.Generator(np.random.Philox(5)).normal(150, 40, num)
    return np.clip(np.rint(drawn), 10, 384).astype(np.int64)


@pytest.mark.parametrize(
    ("lengths", "capacity", "max_samples", "above"),
    [
        pytest.param(question_lengths(384), 384, None, 0.006, id="questions"),  # 0.0147 by length
        pytest.param(middling_lengths(20_000), 384, None, 0.0095, id="middling"),  # 0.0184
        pytest.param(text_lengths(20_000, 1024), 1024, None, 0.002, id="texts"),  # 0.0029
        pytest.param(
            np.random.Generator(np.random.Philox(4)).choice([34, 31, 55], 20_000), 100, None, 0,
            id="three lengths",
        ),
        pytest.param(question_lengths(512), 512, 3, 0.006, id="at most three"),  # 0.0094
        pytest.param(text_lengths(20_000, 8192), 8192, 16, 0.003, id="at most 16"),  # 0.0046
    ],
)  # fmt: skip
def test_packs_where_few_fit_or_few_are_allowed_stay_near_the_bound(
    lengths: np.ndarray, capacity: int, max_samples: int | None, above: float
) -> None:
    packs = pack_stream(lengths, capacity, max_samples=max_samples)
    bound = lower_bound(lengths, capacity, max_samples=max_samples)
    assert len(packs) <= ceil((1 + above) * bound)


@pytest.mark.parametrize("capacity", [512, 2048])
def test_lengths_of_which_many_fill_a_pack_have_no_price(capacity: int) -> None:
    packer = StreamingPacker(capacity, buffer_size=64)
    rows = as_rows(text_lengths(2000, capacity, median=60))
    fill(packer, rows)
    while packer.num_buffered:
        assert packer.state()["price"] == 0
        packer.next_pack()
        fill(packer, rows)
