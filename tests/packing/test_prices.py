"""Prices at which the streaming search values lengths where few samples fill a pack."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from energon_lite.batching.collector import Samples
from energon_lite.batching.rules import Packing
from energon_lite.batching.stream import StreamingPacker, pack_stream
from energon_lite.batching.stream_packs import StreamPacks
from energon_lite.extras.samplers.best import lower_bound

from ..conftest import examples
from .test_streaming import Case, as_rows, fill, short_cases, text_lengths

PRICES = [p for p in range(8, 32) if p % 8]


def price_of(price: int, capacity: int, length: int) -> Fraction:
    """The part of a pack that a price asks for, by the definition."""
    steps = Fraction(price, 8) * Fraction(length, capacity)
    whole, rest = divmod(steps, 1)
    free = Fraction(price % 8, 8)
    return (whole + max(Fraction(0), rest - free) / (1 - free)) / (price // 8)


def worth_of(price: int, capacity: int, max_samples: int | None, length: int) -> Fraction:
    """What the search values a length at."""
    if price in PRICES:
        return (3 * price_of(price, capacity, length) + Fraction(length, capacity)) / 4
    of_each = 3 * capacity // max_samples if price and max_samples else 0
    return Fraction(length + of_each)


def best_price(lengths: list[int], capacity: int, max_samples: int | None, is_few: bool) -> int:
    """The price that proves the most packs, 0 for lengths, 32 for numbers of samples."""
    length, number = (
        Fraction(sum(lengths), capacity),
        Fraction(len(lengths), max_samples or 1 << 60),
    )
    proved = {0: length, 32: number}
    for price in PRICES if is_few else ():
        asked = sum((price_of(price, capacity, own) for own in lengths), Fraction(0))
        proved[price] = (3 * asked + length) / 4
    return max(proved, key=lambda price: proved[price])


@given(
    price=st.sampled_from(PRICES),
    capacity=st.integers(1, 500),
    parts=st.lists(st.integers(1, 500), min_size=1, max_size=8),
)
def test_samples_that_share_a_pack_are_worth_at_most_one(
    price: int, capacity: int, parts: list[int]
) -> None:
    while sum(parts) > capacity:
        parts = [part // 2 for part in parts]
    asked = [price_of(price, capacity, part) for part in parts]
    assert sum(asked) <= price_of(price, capacity, sum(parts)) <= 1
    assert price_of(price, capacity, capacity) == 1
    assert asked == [price_of(price, 7 * capacity, 7 * part) for part in parts]


@given(
    price=st.sampled_from([0, *PRICES, 32]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    above=st.integers(0, 40),
    max_samples=st.sampled_from([1, 2, 3, 4, None]),
)
@example(19, [15, 18, 20, 23, 6], 16, None)
@examples(300)
def test_the_search_finds_what_is_worth_most_with_the_oldest_sample(
    price: int, lengths: list[int], above: int, max_samples: int | None
) -> None:
    capacity, num = max(lengths) + above, len(lengths)
    # The next oldest samples fill what has room for more than these.
    assume(capacity - lengths[0] <= 4 * sum(lengths) // num)
    packer = StreamingPacker(capacity, max_samples=max_samples, max_steps=10_000)
    rows = [[length] for length in lengths]
    totals = [sum(lengths)]
    packer.restore(
        {"numbers": range(num), "lengths": rows, "added": num, "totals": totals, "price": price}
    )
    pack = packer.next_pack()
    assert pack[0] == 0
    assert sum(lengths[i] for i in pack) <= capacity
    most = max(
        sum(worth_of(price, capacity, max_samples, lengths[i]) for i in others)
        for size in range(min(num, max_samples or num))
        for others in combinations(range(1, num), size)
        if lengths[0] + sum(lengths[i] for i in others) <= capacity
    )
    assert sum(worth_of(price, capacity, max_samples, lengths[i]) for i in pack[1:]) == most


@given(short_cases())
def test_the_price_is_the_one_that_proves_the_most_packs_for_what_is_buffered(case: Case) -> None:
    lengths, capacity, settings = case.rows, case.capacity, case.arguments
    packer = case.packer()
    price = 0
    for length in lengths:
        packer.add(length)
        if packer.num_added % settings["buffer_size"] == 0:
            buffered = [lengths[number] for number in packer.buffered()]
            total, added = sum(lengths[: packer.num_added]), packer.num_added
            if settings["buffer_size"] >= 32:
                is_few = 3 * (total // added) >= capacity
                price = best_price(buffered, capacity, settings["max_samples"], is_few)
        assert packer.state()["price"] == price
        if packer.is_full:
            packer.next_pack()
            assert packer.state()["price"] == price


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


def test_a_collector_resumes_with_its_price() -> None:
    packing = Packing(capacity=384)
    lengths = middling_lengths(800)

    def feed(packs: StreamPacks, start: int, stop: int) -> list[Any]:
        found = []
        for number in range(start, stop):
            if packs.add_one(number, 0, (int(lengths[number]),)):
                while (pack := packs.next(0, False)) is not None:
                    found.append(pack)
        return found

    packs = StreamPacks(packing)
    returned = {number for pack in feed(packs, 0, 500) for number in pack}
    state = packs.state()
    counts, rows = state.counts, state.rows([n for n in range(500) if n not in returned])
    assert counts["groups"][0][-1] > 0  # the price
    numbers = rows[:, 0]
    buffered = Samples(numbers, np.zeros_like(numbers), lengths[numbers][:, None])
    wanted = feed(packs, 500, 800)
    same = StreamPacks(packing)
    same.restore(counts, buffered, rows[:, 1:])
    assert feed(same, 500, 800) == wanted
