from __future__ import annotations

import copy
import json
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from energon_lite.batching.lists import Lists
from energon_lite.batching.sizes import check_sizes
from energon_lite.batching.stream import StreamingPacker, pack_sizes, pack_stream

from ..conftest import examples


def text_lengths(num: int, capacity: int, median: int = 400) -> np.ndarray:
    drawn = np.random.Generator(np.random.Philox(0)).lognormal(np.log(median), 1.0, num)
    return np.clip(np.rint(drawn), 1, capacity).astype(np.int64)


def image_lengths(num: int, share_of_texts: float = 0.0) -> np.ndarray:
    """Tokens and tiles, of one, three or five tiles with a text beside."""
    random = np.random.Generator(np.random.Philox(3))
    tiles = random.choice([1, 3, 5], num, p=[0.1, 0.34, 0.56])
    texts = np.clip(np.rint(random.lognormal(np.log(50), 0.8, num)), 1, 700).astype(np.int64)
    rows = np.stack([256 * tiles + 33 + texts, tiles], axis=1)
    is_text = random.random(num) < share_of_texts
    rows[is_text] = np.stack([text_lengths(num, 4000), np.zeros(num, np.int64)], axis=1)[is_text]
    return rows


def through_json(state: dict[str, Any]) -> Any:
    lists = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in state.items()
    }
    return json.loads(json.dumps(lists))


def fill(packer: StreamingPacker, rows: list[Any]) -> None:
    """Adds samples until it is full or there are none left."""
    while packer.num_added < len(rows) and not packer.is_full:
        packer.add(rows[packer.num_added])


def drive(packer: StreamingPacker, rows: list[Any]) -> list[list[int]]:
    packs = []
    fill(packer, rows)
    while packer.num_buffered:
        packs.append(packer.next_pack())
        fill(packer, rows)
    return packs


def as_rows(lengths: np.ndarray) -> list[Any]:
    return lengths.tolist() if lengths.ndim == 1 else [tuple(row) for row in lengths.tolist()]


class Case:
    """Lengths and arguments of a packer."""

    def __init__(self, lengths: np.ndarray, capacity: Any, **arguments: Any) -> None:
        self.lengths, self.capacity, self.arguments = lengths, capacity, arguments
        self.rows = as_rows(lengths)

    def packer(self) -> StreamingPacker:
        return StreamingPacker(self.capacity, **self.arguments)

    def packs(self) -> Lists:
        return pack_stream(self.lengths, self.capacity, **self.arguments)

    def aligned(self) -> np.ndarray:
        align = np.array(self.arguments["align"])
        return -(-self.lengths // align) * align

    def __repr__(self) -> str:
        return f"Case({self.rows}, {self.capacity}, {self.arguments})"


@st.composite
def cases(draw: st.DrawFn, max_size: int = 60) -> Case:
    num = draw(st.integers(0, 3))  # resources; 0 for a plain number
    align = draw(st.sampled_from([1, 1, 1, 2, 5]))
    sizes = st.sampled_from([5, 7, 10, 33, 64, 65, 1000, 70_000, (1 << 36) - 1])
    capacities = draw(st.lists(sizes, min_size=max(num, 1), max_size=max(num, 1)))
    limits = [size // align * align for size in capacities]
    if num:
        row: Any = st.tuples(*(st.integers(0, limit) for limit in limits)).filter(any)
    else:
        limit = limits[0]
        row = st.one_of(
            st.integers(1, limit),
            st.integers(1, min(limit, 9)),
            st.sampled_from([1, (limit + 1) // 2, limit // 2 + 1, (limit + 2) // 3, limit]),
        )
    rows = draw(st.lists(row, max_size=max_size))
    lengths = np.array(rows, np.int64).reshape((len(rows), num) if num else len(rows))
    return Case(
        lengths,
        tuple(capacities) if num else capacities[0],
        buffer_size=draw(st.sampled_from([1, 2, 5, 20, 100])),
        max_samples=draw(st.one_of(st.none(), st.integers(1, 6))),
        align=align,
        max_steps=draw(st.sampled_from([1, 3, 50, 2000])),
    )


def wanted_size(case: Case, num_added: int) -> int:
    """The target size by its definition."""
    totals = np.atleast_1d(case.aligned()[:num_added].sum(axis=0)).tolist()
    capacities = np.atleast_1d(case.capacity).tolist()
    sizes = [-(-4 * c * num_added // t) for c, t in zip(capacities, totals, strict=True) if t]
    if case.arguments["max_samples"] is not None:
        sizes.append(4 * case.arguments["max_samples"])
    return (
        max(case.arguments["buffer_size"], min(sizes))
        if num_added
        else (case.arguments["buffer_size"])
    )


@given(cases())
def test_each_sample_leaves_once_and_no_pack_is_too_full(case: Case) -> None:
    packs = case.packs()
    assert sorted(packs.indices.tolist()) == list(range(len(case.rows)))
    assert (packs.sizes(case.aligned()) <= case.capacity).all()
    counts = np.diff(packs.offsets)
    assert (counts >= 1).all()
    most = case.arguments["max_samples"]
    assert most is None or (counts <= most).all()


@given(cases(), st.data())
@examples(200)
def test_pack_stream_is_the_packer_driven_by_hand_with_restores_anywhere(
    case: Case, data: st.DataObject
) -> None:
    wanted = case.packs().tolist()
    packer = case.packer()
    restores = data.draw(st.sets(st.integers(0, 3 * len(case.rows))))
    step = 0

    def maybe_restored() -> StreamingPacker:
        nonlocal step
        step += 1
        if step not in restores:
            return packer
        other = case.packer()
        other.restore(through_json(packer.state()))
        return other

    packs: list[list[int]] = []
    while packer.num_buffered or packer.num_added < len(case.rows):
        while packer.num_added < len(case.rows) and not packer.is_full:
            packer.add(case.rows[packer.num_added])
            packer = maybe_restored()
        packs.append(packer.next_pack())
        packer = maybe_restored()
    assert packs == wanted


@given(cases())
def test_the_oldest_buffered_sample_is_in_every_pack(case: Case) -> None:
    packer = case.packer()
    fill(packer, case.rows)
    while packer.num_buffered:
        buffered = packer.buffered()
        assert buffered == sorted(buffered)
        assert len(buffered) == packer.num_buffered
        pack = packer.next_pack()
        assert pack == sorted(pack)
        assert pack[0] == buffered[0]
        assert packer.buffered() == [number for number in buffered if number not in pack]
        fill(packer, case.rows)


@given(cases())
def test_a_sample_leaves_within_as_many_packs_as_samples_are_buffered(case: Case) -> None:
    packer = case.packer()
    entered: dict[int, tuple[int, int]] = {}
    num_packs = 0
    while packer.num_buffered or packer.num_added < len(case.rows):
        while packer.num_added < len(case.rows) and not packer.is_full:
            packer.add(case.rows[packer.num_added])
            entered[packer.num_added - 1] = num_packs, packer.num_buffered
        num_packs += 1
        for number in packer.next_pack():
            since, num_buffered = entered[number]
            assert num_packs - since <= num_buffered


@given(cases())
def test_full_is_when_the_target_size_is_buffered(case: Case) -> None:
    packer = case.packer()
    for row in case.rows:
        assert packer.target_size == wanted_size(case, packer.num_added)
        assert packer.is_full == (packer.num_buffered >= packer.target_size)
        if packer.is_full:
            packer.next_pack()
        packer.add(row)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda packer: pickle.loads(pickle.dumps(packer))]
)
def test_copies_go_their_own_way(copied: Any) -> None:
    rows = text_lengths(2000, 2048).tolist()
    packer = StreamingPacker(2048, buffer_size=32)
    fill(packer, rows)
    packer.next_pack()
    packer.add(rows[packer.num_added])
    other = copied(packer)
    wanted = drive(packer, rows)
    assert drive(other, rows) == wanted


def test_target_size_grows_with_the_samples_in_a_pack() -> None:
    packer = StreamingPacker(1000, buffer_size=16)
    assert packer.target_size == 16
    packer.add(1000)
    assert packer.target_size == 16
    for _ in range(99):
        packer.add(10)
    assert packer.target_size == -(-4 * 1000 * 100 // 1990) == 202
    assert not packer.is_full
    while not packer.is_full:
        packer.add(990)
    assert packer.target_size <= packer.num_buffered < 202


def test_target_size_counts_no_more_samples_than_a_pack_may_have() -> None:
    packer = StreamingPacker((1 << 36, 10), buffer_size=2, max_samples=5)
    for _ in range(20):
        packer.add((1, 0))
    assert packer.target_size == 20
    assert packer.is_full


@pytest.mark.parametrize("buffer_size", [64, 256, 1000])
@pytest.mark.parametrize("capacity", [2048, 8192, 32_768])
def test_long_samples_do_not_come_in_turns(capacity: int, buffer_size: int) -> None:
    lengths = text_lengths(100_000, capacity)
    packs = pack_stream(lengths, capacity, buffer_size=buffer_size)
    means = packs.sizes(lengths) / np.diff(packs.offsets)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) <= 0.1


@pytest.mark.parametrize(
    ("capacity", "share"), [(2048, 0.999), (4096, 0.9995), (8192, 0.9995), (32_768, 0.998)]
)
def test_text_fills_the_packs(capacity: int, share: float) -> None:
    lengths = text_lengths(50_000, capacity)
    assert pack_stream(lengths, capacity).efficiency(lengths, capacity) >= share


@pytest.mark.parametrize(("capacity", "share"), [(4096, 0.99), (8192, 0.996), (32_768, 0.998)])
def test_clustered_lengths_fill_the_packs(capacity: int, share: float) -> None:
    # First-fit decreasing reaches 97 % at 4096: it pairs long samples until none fit.
    lengths = image_lengths(20_000)[:, 0]
    assert pack_stream(lengths, capacity).efficiency(lengths, capacity) >= share


@pytest.mark.parametrize(
    ("capacity", "limit", "share"),
    [(8192, 16, 0.99), (8192, 32, 0.998), (4096, 8, 0.985), (32_768, 64, 0.985), (2048, 5, 0.998)],
)
def test_a_tight_limit_on_samples_leaves_packs_full(
    capacity: int, limit: int, share: float
) -> None:
    lengths = text_lengths(50_000, capacity)
    packs = pack_stream(lengths, capacity, max_samples=limit)
    assert packs.efficiency(lengths, capacity) >= share


@pytest.mark.parametrize("share_of_texts", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("capacity", [(8192, 30), (20_000, 18), (4096, 18)])
def test_the_scarcest_resource_is_filled(capacity: tuple[int, int], share_of_texts: float) -> None:
    # With many texts, whether tokens or tiles are scarcest depends on the capacities.
    rows = image_lengths(20_000, share_of_texts)
    packs = pack_stream(rows, capacity)
    assert len(packs) <= 1.01 * (rows.sum(axis=0) / capacity).max()


def test_more_samples_in_a_pack_than_the_buffer_was_made_for() -> None:
    lengths = np.ones(30_000, np.int64)
    packs = pack_stream(lengths, 5000, buffer_size=2)
    assert np.diff(packs.offsets).tolist() == [5000] * 6
    assert packs.tolist() == drive(StreamingPacker(5000, buffer_size=2), lengths.tolist())


def test_texts_without_tiles_join_packs_whose_tiles_are_full() -> None:
    rows = [(500, 5), (500, 0), (500, 5), (500, 0), (500, 5)]
    assert pack_stream(rows, (1000, 5)).tolist() == [[0, 1], [2, 3], [4]]


def test_the_scarcest_resource_may_change() -> None:
    half = [(9, 1), (1, 1)] * 200 + [(1, 9), (1, 1)] * 400
    packs = pack_stream(half, (10, 10), buffer_size=8)
    assert packs.tolist() == drive(StreamingPacker((10, 10), buffer_size=8), half)
    assert (packs.sizes(half) <= 10).all()


def test_an_empty_buffer_makes_no_pack() -> None:
    packer = StreamingPacker(10)
    with pytest.raises(IndexError, match="No sample is buffered"):
        packer.next_pack()
    packer.add(3)
    packer.next_pack()
    with pytest.raises(IndexError, match="No sample is buffered"):
        packer.next_pack()


def test_integers_of_numpy_are_lengths() -> None:
    packer = StreamingPacker(10)
    packer.add(np.int32(7))  # type: ignore[arg-type]
    packer.add(np.uint8(3))  # type: ignore[arg-type]
    assert packer.next_pack() == [0, 1]
    several = StreamingPacker((10, 10))
    several.add(np.array([7, 1]))  # type: ignore[arg-type]
    assert several.state()["lengths"].tolist() == [[7, 1]]


@pytest.mark.parametrize(
    ("capacity", "lengths", "message"),
    [
        (10, 11, r"Sample 2 has length 11, above the capacity of 10\. Truncate"),
        (10, 0, r"Sample 2 has length 0, below 1\. Drop empty"),
        (10, -3, "length -3, below 1"),
        ((10, 4), (3, 5), r"length \[3, 5\], above the capacity of \[10, 4\]"),
        ((10, 4), (-1, 4), r"length \[-1, 4\], negative"),
        ((10, 4), (0, 0), r"length \[0, 0\], below 1"),
        ((10, 4), (1, 2, 3), r"lengths \(1, 2, 3\); give 2"),
        ((10, 4), (1,), "give 2"),
    ],
)
def test_lengths_out_of_range_are_refused_and_leave_it_as_it_was(
    capacity: Any, lengths: Any, message: str
) -> None:
    packer = StreamingPacker(capacity)
    fine = 5 if capacity == 10 else (5, 2)
    packer.add(fine)
    packer.add(fine)
    before = through_json(packer.state())
    with pytest.raises(ValueError, match=message):
        packer.add(lengths)
    assert through_json(packer.state()) == before
    assert packer.next_pack() == [0, 1]


def test_a_length_that_no_longer_fits_when_aligned_is_refused() -> None:
    packer = StreamingPacker(100, align=16)
    packer.add(96)
    with pytest.raises(ValueError, match=r"Sample 1 of length 97 is 112 when aligned to 16, above"):
        packer.add(97)


@pytest.mark.parametrize("lengths", [3.0, "3", None, [3]])
def test_lengths_that_are_no_integers_are_refused(lengths: Any) -> None:
    with pytest.raises(TypeError):
        StreamingPacker(10).add(lengths)
    with pytest.raises(TypeError):
        StreamingPacker((10, 10)).add((1, lengths))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"buffer_size": 0}, "buffer_size=0 must be at least 1"),
        ({"max_samples": 0}, "max_samples=0 must be at least 1"),
        ({"max_steps": 0}, "max_steps=0 must be at least 1"),
        ({"align": 0}, "align is 0"),
        ({"align": 11}, "align is 11, above the capacity of 10"),
        ({"align": (2, 2)}, "align has 2 values for 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamingPacker(**{"capacity": 10, **arguments})
    if "above" not in message:
        with pytest.raises(ValueError, match=message):
            pack_stream([1], **{"capacity": 10, **arguments})


def test_pack_stream_names_the_sample_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="Sample 1 has length 11"):
        pack_stream([3, 11], 10)


GOOD = {"numbers": [3, 5], "lengths": [[4], [7]], "added": 6, "totals": [21], "price": 19}


@pytest.mark.parametrize(
    "damage",
    [
        {"numbers": [5, 3]},
        {"numbers": [3, 3]},
        {"numbers": [-1, 5]},
        {"numbers": [3, 6]},
        {"numbers": [3]},
        {"numbers": [3.0, 5.0]},
        {"numbers": ["3", "5"]},
        {"numbers": [3, 1 << 70]},
        {"numbers": 3},
        {"numbers": None},
        {"lengths": [[4], [7], [1]]},
        {"lengths": [[4, 1], [7, 1]]},
        {"lengths": [[4], [7, 1]]},
        {"lengths": [4, 7]},
        {"lengths": [[4], [0]]},
        {"lengths": [[4], [-7]]},
        {"lengths": [[4], [11]]},
        {"lengths": [[4], [7.5]]},
        {"lengths": [[True], [True]]},
        {"lengths": []},
        {"added": 5},
        {"added": 1},
        {"added": -6},
        {"added": "6"},
        {"added": None},
        {"added": True},
        {"added": 1 << 63},
        {"totals": [10]},
        {"totals": [14]},
        {"totals": [52]},
        {"totals": [1 << 62]},
        {"totals": [-21]},
        {"totals": [21, 3]},
        {"totals": 21},
        {"totals": []},
        {"price": -1},
        {"price": 33},
        {"price": 19.5},
        {"price": "19"},
        {"price": None},
        {"price": True},
    ],
)
def test_corrupt_states_are_refused_and_leave_it_as_it_was(damage: dict[str, Any]) -> None:
    packer = StreamingPacker(10)
    packer.restore(GOOD)
    with pytest.raises(ValueError, match="The state of a packer"):
        packer.restore({**GOOD, **damage})
    assert through_json(packer.state()) == GOOD


@pytest.mark.parametrize("state", [None, [], 3, {}, *({k: GOOD[k]} for k in GOOD)])
def test_states_without_all_entries_are_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="The state of a packer"):
        StreamingPacker(10).restore(state)


def test_states_of_a_packer_with_other_arguments_are_refused() -> None:
    packer = StreamingPacker((100, 10))
    packer.add((50, 9))
    state = packer.state()
    for other in (StreamingPacker(100), StreamingPacker((100, 5)), StreamingPacker((40, 10))):
        with pytest.raises(ValueError, match="saved by a packer with other arguments"):
            other.restore(state)


def test_a_state_of_nothing_is_restored() -> None:
    packer = StreamingPacker(10)
    empty = through_json(packer.state())
    assert empty == {"numbers": [], "lengths": [], "added": 0, "totals": [0], "price": 0}
    packer.add(3)
    packer.restore(empty)
    assert packer.num_buffered == packer.num_added == 0
    packer.add(4)
    packer.next_pack()
    packer.restore(through_json(packer.state()))
    packer.add(5)
    assert packer.buffered() == [1]


def test_wait_and_size_of_the_state_stay_bounded_over_a_long_stream() -> None:
    packer = StreamingPacker(2048, buffer_size=64)
    rows = text_lengths(20_000, 2048).tolist()
    longest_wait = 0
    for start in range(0, len(rows), 1000):
        for row in rows[start : start + 1000]:
            packer.add(row)
            if packer.is_full:
                longest_wait = max(longest_wait, packer.num_added - packer.next_pack()[0])
        assert len(packer.state()["numbers"]) <= packer.target_size
    assert 0 < longest_wait < 64 * 6


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(12, 24))
@example([12, 11, 1], 12)
def test_the_first_pack_is_the_fullest_with_the_oldest_sample(
    lengths: list[int], capacity: int
) -> None:
    sums = {lengths[0]}
    for length in lengths[1:]:
        sums |= {total + length for total in sums if total + length <= capacity}
    first = pack_stream(lengths, capacity).tolist()[0]
    if len(lengths) <= 9:  # so few that a pack is never filled with the oldest ones
        assert sum(lengths[i] for i in first) == max(sums)
    assert first[0] == 0


def test_packs_come_in_the_order_of_their_oldest_samples() -> None:
    packs = pack_stream(text_lengths(2000, 2048), 2048).tolist()
    assert all(a[0] < b[0] for a, b in pairwise(packs))


@examples(50)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=80),
    num_resources=st.sampled_from([1, 2]),
    max_samples=st.sampled_from([None, 1, 3]),
)
def test_packing_is_given_up_only_where_there_would_be_more_packs_than_allowed(
    lengths: list[tuple[int, int]], num_resources: int, max_samples: int | None
) -> None:
    rows, capacity = np.array(lengths)[:, :num_resources], [20, 12][:num_resources]
    sizes = check_sizes(rows, capacity, max_samples=max_samples)
    packs = pack_stream(rows, capacity, buffer_size=16, max_samples=max_samples)
    for most in range(len(packs) + 2):
        found = pack_sizes(sizes, 16, 2000, most)
        assert found == (packs if most >= len(packs) else None)
