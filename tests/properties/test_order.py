"""The order of a source is arithmetic: what must hold for any sizes and settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from energon_lite.core.seeds import key_of
from energon_lite.core.topology import NodeGroups, Stream
from energon_lite.order import permutation, source_order
from energon_lite.order.permutation import Permutation
from energon_lite.order.source_order import Segment, ShuffledDealing, SourceOrder, WindowShuffle

from ..conftest import examples

Pair = tuple[int, int]

sizes = st.integers(1, 90) | st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257])
stream_counts = st.integers(1, 13)


@st.composite
def orders(draw: st.DrawFn, **fixed: Any) -> SourceOrder:
    """Any source order, as far as it is not fixed."""
    values: dict[str, Any] = {
        "source": draw(st.sampled_from(["a", "b/train", "ü"])),
        "num_samples": draw(sizes),
        "seed": draw(st.integers(0, 3)),
        "endless": draw(st.booleans()),
        "multiplier": draw(st.sampled_from([1, 1, 1, 2, 3, None])),
        "max_slice": draw(st.integers(1, 30)),
        "interleave": draw(st.integers(1, 5)),
        "window": draw(st.sampled_from([0, 1, 2, 3, 7, 20, 200])),
        "block": draw(st.integers(1, 7)),
    }
    return SourceOrder(**{**values, **fixed})


@st.composite
def runs(draw: st.DrawFn, **fixed: Any) -> tuple[SourceOrder, int]:
    """Any source order, and a number of streams, which may be in groups."""
    order, num_streams = draw(orders(**fixed)), draw(stream_counts)
    if order.multiplier is None:
        return order, num_streams
    nodes = groups_of(num_streams)
    return replace(order, nodes=draw(st.sampled_from(nodes))), num_streams


def groups_of(num_streams: int) -> list[NodeGroups]:
    """Returns the groups that so many streams can have."""
    pairs = product(range(1, num_streams + 1), repeat=2)
    return [NodeGroups(*pair) for pair in pairs if num_streams % (pair[0] * pair[1]) == 0]


def first(order: SourceOrder, stream: Stream, count: int) -> list[Pair]:
    """The first (epoch, index) of a stream, read at once."""
    epochs, indices = order.stream(stream).block(0, count)
    return list(zip(epochs.tolist(), indices.tolist(), strict=True))


def whole_pass(order: SourceOrder, num_streams: int, pass_index: int = 0) -> list[list[Pair]]:
    """All of a finite pass, by stream."""
    found = []
    for index in range(num_streams):
        stream = Stream(index, num_streams, pass_index)
        length = order.stream(stream).length
        assert length is not None
        found.append(first(order, stream, length + 5))
        assert len(found[-1]) == length
    return found


@given(runs(endless=False), st.integers(0, 3))
def test_finite_pass_has_each_sample_once(run, pass_index) -> None:
    order, num_streams = run
    streams = whole_pass(order, num_streams, pass_index)
    pairs = Counter(pair for stream in streams for pair in stream)
    copies = order.multiplier or 1
    epochs = range(pass_index * copies, (pass_index + 1) * copies)
    expected = {(epoch, index) for epoch in epochs for index in range(order.num_samples)}
    assert set(pairs) == expected
    assert set(pairs.values()) == {1}


@given(orders(endless=False, multiplier=-1), stream_counts)
def test_pass_with_replacement_is_as_long_as_an_epoch_and_labels_each_draw(
    order, num_streams
) -> None:
    pairs = [pair for stream in whole_pass(order, num_streams) for pair in stream]
    assert len(pairs) == order.num_samples
    assert len(set(pairs)) == len(pairs)
    assert {index for _, index in pairs} <= set(range(order.num_samples))


@given(runs(endless=True), st.integers(1, 60))
def test_endless_run_never_repeats_an_epoch_and_index(run, count) -> None:
    order, num_streams = run
    pairs = [
        pair for s in range(num_streams) for pair in first(order, Stream(s, num_streams), count)
    ]
    assert len(pairs) == num_streams * count
    assert len(set(pairs)) == len(pairs)


@given(orders(endless=True, multiplier=1), st.integers(1, 64), st.integers(1, 6))
@example(SourceOrder("small", 3, 1, endless=True, max_slice=10, interleave=4), 64, 1)
def test_places_dealt_so_far_fill_epoch_after_epoch(order, num_streams, rounds) -> None:
    """All streams at the same position: at most the last epoch (or a block) is partial."""
    count = -(-order.num_samples * rounds // num_streams)
    pairs = [
        pair for s in range(num_streams) for pair in first(order, Stream(s, num_streams), count)
    ]
    served = Counter(index for _, index in pairs)
    counts = [served[i] for i in range(order.num_samples)]
    # The window shuffles inside a stream's share of an epoch, so that a share begun may be any of.
    slack = 1 if order.window <= 1 else 2
    assert max(counts) - min(counts) <= slack


@given(runs(), st.data())
def test_order_does_not_depend_on_the_blocks_it_is_worked_out_in(run, data) -> None:
    order, num_streams = run
    stream = Stream(data.draw(st.integers(0, num_streams - 1)), num_streams)
    total = 60
    expected = first(order, stream, total)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=8))})
    worked_out = order.stream(stream)
    found: list[Pair] = []
    pieces = list(pairwise(cuts))
    for start, stop in data.draw(st.permutations(pieces)):  # and in any order
        epochs, indices = worked_out.block(start, stop - start)
        found += zip(range(start, stop), epochs.tolist(), indices.tolist(), strict=False)
    assert [pair for _, *pair in sorted(found)] == [list(pair) for pair in expected]


@given(orders(endless=True, multiplier=1), stream_counts, st.integers(1, 5))
def test_epochs_of_a_stream_follow_each_other(order, num_streams, count) -> None:
    for index in range(num_streams):
        pairs = first(order, Stream(index, num_streams), count * order.num_samples)
        epochs = [epoch for epoch, _ in pairs]
        assert epochs == sorted(epochs)


@given(runs(endless=False, multiplier=1), st.integers(0, 2), st.sampled_from([1, 2, 3]))
@examples(200)
def test_groups_read_the_same_samples_in_all_epochs(run, size, multiplier) -> None:
    """Passes of less, of as much, and of more than an epoch; the ends may move by a sample."""
    order, num_streams = run
    n, nodes = order.num_samples, order.nodes
    per_pass = (None, -(-n // 3), 2 * n + 1)[size]
    order = replace(order, multiplier=multiplier, pass_samples=per_pass)
    served: Counter[Pair] = Counter()
    samples: dict[Pair, set[int]] = {}
    per_epoch, num_passes = n * multiplier, 7 if size == 1 else 2
    for number in range(num_passes):
        streams = whole_pass(order, num_streams, number)
        lengths = [len(stream) for stream in streams]
        assert sum(lengths) == (per_pass or per_epoch)
        assert max(lengths) - min(lengths) <= 1
        for index, stream in enumerate(streams):
            group = index // nodes.ranks % nodes.num_groups
            served.update(stream)
            for epoch, sample in stream:
                samples.setdefault((epoch, group), set()).add(sample)
    assert set(served.values()) == {1}
    num_whole = num_passes * (per_pass or per_epoch) // per_epoch * multiplier
    epochs = Counter(epoch for epoch, _ in served)
    assert all(epochs[epoch] == n for epoch in range(num_whole))
    for group in range(nodes.num_groups if nodes.num_groups > 1 else 0):
        own = [samples.get((epoch, group), set()) for epoch in range(num_whole)]
        assert all(len(a ^ b) <= (2 if n % nodes.num_groups else 0) for a, b in pairwise(own))
        assert len(set.union(*own) - set.intersection(*own)) <= 4 if own else True


@given(st.integers(1, 200), stream_counts, st.integers(0, 40), st.integers(0, 100))
def test_share_of_a_stream_follows_the_floor_formula(n, num_streams, epoch, shift) -> None:
    shares, starts = [], []
    for index in range(num_streams):
        dealing = ShuffledDealing(n, Stream(index, num_streams), shift)
        turn = (index + shift) % num_streams
        share = dealing.first(epoch + 1) - dealing.first(epoch)
        assert share == ((epoch + 1) * n + turn) // num_streams - (epoch * n + turn) // num_streams
        shares.append(share)
        starts.append((int(dealing.places(epoch, np.array([0]))[0]), share))
        for position in range(dealing.first(epoch), dealing.first(epoch + 1)):
            assert dealing.segment(position).number == epoch
    assert sum(shares) == n
    assert max(shares) - min(shares) <= 1
    places = sorted(place for start, share in starts for place in range(start, start + share))
    assert places == list(range(n))


@given(orders(multiplier=None, window=0), stream_counts, st.integers(0, 2))
def test_unshuffled_slots_read_in_order_are_the_file_order(order, num_streams, pass_index) -> None:
    count = (2 * order.num_samples // num_streams // order.block + 2) * order.block
    streams = [first(order, Stream(s, num_streams, pass_index), count) for s in range(num_streams)]
    indices: list[int] = []
    for block in range(0, count, order.block):
        for stream in streams:
            indices += [index for _, index in stream[block : block + order.block]]
    whole = 1 if not order.endless else len(indices) // order.num_samples
    assert whole >= 1
    expected = list(range(order.num_samples)) * whole
    assert indices[: len(expected)] == expected
    if not order.endless:
        assert len(indices) == order.num_samples


@given(orders(endless=False, multiplier=None, window=0), stream_counts)
def test_unshuffled_pass_has_at_most_one_partial_batch(order, num_streams) -> None:
    lengths = [len(stream) for stream in whole_pass(order, num_streams)]
    assert sum(length % order.block > 0 for length in lengths) <= 1


@pytest.mark.parametrize("limit", [0, 1 << 20])
@given(n=st.integers(1, 700), name=st.integers(0, 50), counter=st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection_below_and_above_the_table_limit(
    limit, n, name, counter
) -> None:
    before = permutation.TABLE_LIMIT
    permutation.TABLE_LIMIT = limit  # everything above, everything below
    try:
        shuffled = Permutation(n, key_of("test", name), counter)(np.arange(n))
        parts = Permutation(n, key_of("test", name), counter)
        alone = [int(parts(np.array([i]))[0]) for i in range(0, n, 37)]
    finally:
        permutation.TABLE_LIMIT = before
    assert sorted(shuffled.tolist()) == list(range(n))
    assert alone == shuffled[::37].tolist()


def test_permutation_of_a_real_size_above_the_table_limit_is_a_bijection() -> None:
    n = permutation.TABLE_LIMIT + 12_345
    shuffled = Permutation(n, key_of("large"))(np.arange(n))
    assert np.array_equal(np.sort(shuffled), np.arange(n))
    neighbours = np.mean(np.diff(shuffled) == 1)
    assert neighbours < 20 / n
    assert abs(np.corrcoef(np.arange(n), shuffled)[0, 1]) < 0.01


@given(st.integers(1, 60), st.integers(1, 300), st.integers(0, 5), st.booleans())
@example(7, 7, 0, False)
def test_window_is_a_bijection_that_moves_a_sample_less_than_one_and_a_half_windows(
    window, length, number, is_open
) -> None:
    start = 1000 * number
    segment = Segment(number, start, None if is_open else start + length)
    shuffle = WindowShuffle(window, key_of("window", number))
    # An open segment is read to the end of a window, twice.
    positions = np.arange(length if not is_open else 4 * window * (-(-length // window)))
    moved = shuffle(segment, positions)
    assert np.abs(moved - positions).max() < max(1.5 * window, 1)
    if not is_open:
        assert sorted(moved.tolist()) == positions.tolist()
    else:
        assert len(set(moved.tolist())) == len(positions)
        safe = positions[: len(positions) - 2 * window]
        assert set(safe.tolist()) <= set(moved.tolist())


@given(st.integers(9, 40), st.integers(1, 60), st.integers(1, 9), st.integers(0, 3))
def test_window_too_large_for_tables_is_read_alike_in_blocks_of_any_size(
    window, length, block, number
) -> None:
    segment, key = Segment(number, 100, 100 + length), key_of("window", number)
    with (
        mock.patch.object(permutation, "TABLE_LIMIT", 8),
        mock.patch.object(source_order, "TABLE_LIMIT", 8),
    ):
        whole = WindowShuffle(window, key)(segment, np.arange(length))
        shuffle = WindowShuffle(window, key)
        shuffle(segment._replace(number=number + 1), np.arange(length))
        blocks = [np.arange(at, min(at + block, length)) for at in range(0, length, block)]
        parts = [shuffle(segment, positions) for positions in blocks]
    assert sorted(whole.tolist()) == list(range(length))
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_window_larger_than_any_table_orders_each_of_its_pieces_once(monkeypatch) -> None:
    made: list[tuple[int, ...]] = []

    class Counted(Permutation):
        def __init__(self, n: int, key: int, *counter: int) -> None:
            made.append(counter)
            super().__init__(n, key, *counter)

    monkeypatch.setattr(source_order, "Permutation", Counted)
    # Two runs of 5,000 positions, each a piece of a window of a million in both rounds.
    order = SourceOrder("s", 40_000, 0, True, max_slice=100, window=1_000_000)
    stream = order.stream(Stream(3, 8))
    for at in range(0, 10_000, 100):
        stream.block(at, 100)
    windows = [counter for counter in made if len(counter) == 3]
    assert len(windows) == len(set(windows)) == 2 * 2


@given(orders(endless=True, multiplier=3, window=0), stream_counts)
@examples(30)
def test_multiplier_permutes_all_copies_as_one_epoch(order, num_streams) -> None:
    count = -(-3 * order.num_samples // num_streams)
    pairs = [
        pair for s in range(num_streams) for pair in first(order, Stream(s, num_streams), count)
    ]
    served = Counter(index for _, index in pairs)
    assert all(served[i] >= 3 for i in range(order.num_samples))
    copies = {(label, index) for label, index in pairs if label < 3}
    assert len(copies) == 3 * order.num_samples


@pytest.mark.parametrize(("max_slice", "num_samples"), [(1000, 7777), (100, 1 << 40), (7, 80_003)])
def test_slices_of_groups_are_those_of_the_data(max_slice, num_samples) -> None:
    """Neighbours stay together, and groups mix, however large the source."""
    order = SourceOrder("a", num_samples, 3, True, max_slice=max_slice, nodes=NodeGroups(4, 2))
    for index in (0, 2, 7):
        _, indices = order.stream(Stream(index, 16)).block(10 * num_samples // 16, 400)
        assert ((indices >= 0) & (indices < num_samples)).all()
        length = min(max_slice, num_samples // 16)
        assert np.mean(np.diff(indices) == 1) > 1 - 2 / length - 3 / 400


def test_groups_have_samples_from_everywhere() -> None:
    order = SourceOrder("a", 8000, 3, True, max_slice=20, interleave=4, nodes=NodeGroups(4))
    for index in range(4):
        indices = order.stream(Stream(index, 4)).block(0, 2000)[1]
        eighths = np.bincount(indices // 1000, minlength=8)
        assert eighths.min() > 100


# Quality, with fixed seeds: loose bounds that a broken shuffle misses by far.


@pytest.mark.parametrize(
    ("max_slice", "interleave", "window", "most"),
    [(1, 1, 0, 0.01), (50, 16, 0, 0.06), (50, 1, 1000, 0.02), (50, 4, 200, 0.04)],
)
def test_neighbours_of_the_file_are_apart(max_slice, interleave, window, most) -> None:
    order = SourceOrder(
        "a", 6000, seed=5, endless=True, max_slice=max_slice, interleave=interleave, window=window
    )
    indices = np.array([index for _, index in first(order, Stream(0, 2), 3000)])
    assert np.mean(np.abs(np.diff(indices)) == 1) < most


@pytest.mark.parametrize(("max_slice", "interleave", "window"), [(1, 1, 0), (2, 1, 4), (1, 3, 0)])
def test_every_sample_comes_to_every_position(max_slice, interleave, window) -> None:
    n, epochs = 6, 900
    order = SourceOrder(
        "a", n, seed=7, endless=True, max_slice=max_slice, interleave=interleave, window=window
    )
    pairs = first(order, Stream(0, 1), n * epochs)
    table = np.zeros((n, n))
    for place, (_, index) in enumerate(pairs):
        table[place % n, index] += 1
    # Chi-square of 25 degrees of freedom: 52.6 has probability 0.001.
    expected = epochs / n
    assert ((table - expected) ** 2 / expected).sum() < 70
    assert table.min() > 0.6 * expected


def test_epochs_seeds_and_sources_have_different_orders() -> None:
    def one(seed: int = 0, source: str = "a") -> list[Pair]:
        order = SourceOrder(source, 40, seed=seed, endless=True, max_slice=4, window=10)
        return first(order, Stream(0, 1), 80)

    indices = [index for _, index in one()]
    orders_seen = [indices[:40], indices[40:], [i for _, i in one(seed=1)][:40]]
    orders_seen.append([i for _, i in one(source="b")][:40])
    for i, left in enumerate(orders_seen):
        for right in orders_seen[i + 1 :]:
            assert sum(a == b for a, b in zip(left, right, strict=True)) < 12


def test_samples_change_streams_from_epoch_to_epoch() -> None:
    order = SourceOrder("a", 64, seed=0, endless=True, max_slice=4)
    owners: dict[int, set[int]] = {}
    for s in range(8):
        for _, index in first(order, Stream(s, 8), 160):
            owners.setdefault(index, set()).add(s)
    assert len(owners) == 64
    assert min(len(streams) for streams in owners.values()) >= 4


def test_small_sources_do_not_all_start_in_the_same_stream() -> None:
    starts = set()
    for name in "abcdefgh":
        order = SourceOrder(name, 1, seed=0, endless=False)
        owner = [s for s in range(16) if order.stream(Stream(s, 16)).length]
        assert len(owner) == 1
        starts.add(owner[0])
    assert len(starts) > 3


@examples(40)
@given(
    st.integers(1, 1 << 40), st.integers(1, 64), st.integers(0, 5), st.integers(1, 1000),
    st.integers(1, 16),
)  # fmt: skip
def test_source_of_any_size_has_valid_indices_anywhere(
    num_samples, num_streams, stream, max_slice, interleave
) -> None:
    order = SourceOrder(
        "huge", num_samples, seed=0, endless=True, max_slice=max_slice * 1000,
        interleave=interleave, window=100,
    )  # fmt: skip
    assume(stream < num_streams)
    epochs, indices = order.stream(Stream(stream, num_streams)).block(12_345_678, 50)
    assert len(indices) == 50
    assert (indices >= 0).all()
    assert (indices < num_samples).all()
    assert len({*zip(epochs.tolist(), indices.tolist(), strict=True)}) == 50
