"""Concatenation and repetition: each sample as often as asked for, over any number of streams."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    MapDataset,
    RepeatDataset,
    SavableDataset,
    SkipSample,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.errors import EmptyDatasetError
from energon_lite.core.topology import Stream
from energon_lite.stages.concat import total_items

from ..helpers import pairwise, source_of, text_set


def source(root: Path, name: str = "a", **order: Any) -> Any:
    return source_of(root, name=name, **order)


SIZES = (1, 3, 11)


@pytest.fixture(scope="session")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("sequence")
    return {n: text_set(root / f"texts-{n}", n) for n in SIZES}


def draws(dataset: SavableDataset[Any], num_streams: int, number: int = 0) -> list[list[Any]]:
    """(source, epoch, index) of what each stream gives in a pass."""
    found = []
    for index in range(num_streams):
        run = StreamRun(dataset, Stream(index, num_streams, number))
        found.append([run.key[:3] for _ in islice(run, 1000)])
    return found


def together(streams: list[list[Any]]) -> list[Any]:
    return [draw for stream in streams for draw in stream]


ORDERS: list[dict[str, Any]] = [
    {},
    {"shuffle_buffer_size": 4, "max_samples_per_sequence": 3},
    {"shuffle_over_epochs": None, "block": 2},
]


@pytest.mark.parametrize("order", ORDERS, ids=["permuted", "windows", "file order"])
@pytest.mark.parametrize("num_streams", [1, 9])
def test_concatenation_yields_each_sample_once_in_each_pass(roots, num_streams, order) -> None:
    names = dict(zip("abc", SIZES, strict=True))
    dataset = ConcatDataset(*(source(roots[n], name, **order) for name, n in names.items()))
    before: set[Any] = set()
    for number in range(3):
        streams = draws(dataset, num_streams, number)
        assert all(stream == sorted(stream, key=lambda draw: draw[0]) for stream in streams)
        found = together(streams)
        assert Counter((name, index) for name, _, index in found) == Counter(
            (name, index) for name, size in names.items() for index in range(size)
        )
        assert len(found) == total_items(dataset) == sum(SIZES)
        assert not before & set(found)
        before |= set(found)


@pytest.mark.parametrize(
    ("size", "num_streams", "repeats"),
    pairwise(SIZES, [1, 2, 3, 5, 9], [0.1, 0.5, 1, 1.3, 2.75, Fraction(7, 3)]),
)
def test_repetition_yields_exactly_its_share_in_each_pass(
    roots, size, num_streams, repeats
) -> None:
    dataset = RepeatDataset(source(roots[size]), repeats=repeats)
    share = Fraction(str(repeats))
    total = size * (share.numerator // share.denominator) + int(size * (share % 1))
    before: set[Any] = set()
    for number in range(4):
        streams = draws(dataset, num_streams, number)
        found = together(streams)
        assert len(found) == total
        assert [len(stream) for stream in streams] == [
            dataset.num_items(Stream(i, num_streams, number)) for i in range(num_streams)
        ]
        times = Counter(index for _, _, index in found)
        assert all(share // 1 <= times[i] <= -(-share // 1) for i in range(size))
        assert len(set(found)) == total
        assert not before & set(found)
        before |= set(found)


@pytest.mark.parametrize("num_streams", [1, 8])
@pytest.mark.parametrize("order", ORDERS, ids=["permuted", "windows", "file order"])
def test_round_without_a_part_for_a_stream_is_passed_over(roots, num_streams, order) -> None:
    for size in SIZES:
        dataset = RepeatDataset(source(roots[size], **order))
        found = []
        for index in range(num_streams):
            run = StreamRun(dataset, Stream(index, num_streams))
            found += [run.key[:3] for _ in islice(run, 12)]
        assert len(found) == len(set(found)) == 12 * num_streams


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("num_streams", [1, 3, 8])
def test_small_source_in_file_order_serves_each_stream_in_turn(roots, num_streams, block) -> None:
    dataset = source(roots[3], shuffle_over_epochs=None, block=block)
    served: Counter[int] = Counter()
    before: set[Any] = set()
    for number in range(num_streams):
        streams = draws(dataset, num_streams, number)
        slots = [draw for stream in streams for draw in stream]
        if num_streams >= -(-3 // block):
            assert [index for _, _, index in slots] == [0, 1, 2]
        assert sorted(index for _, _, index in slots) == [0, 1, 2]
        assert not before & set(slots)
        before |= set(slots)
        served.update(i for i, stream in enumerate(streams) if stream)
    assert set(served) == set(range(num_streams))


@pytest.mark.parametrize(("inner", "outer"), [(None, 2), (2, 1.5), (1.5, 2)])
def test_repetition_of_a_repetition_draws_nothing_twice(roots, inner, outer) -> None:
    below = RepeatDataset(source(roots[3]), repeats=inner)
    if inner is None:
        below = BlendDataset((below, 1), (source(roots[11], "b"), 2), until="first")
    dataset = RepeatDataset(below, repeats=outer)
    found = [draw for number in range(3) for draw in together(draws(dataset, 2, number))]
    assert len(found) == len(set(found)) > 3


def test_large_pass_numbers_keep_within_64_bits(roots) -> None:
    for order in ORDERS:
        dataset = source(roots[11], **order)
        for number in (2**32, 2**51):
            found = together(draws(dataset, 4, number))
            assert sorted(index for _, _, index in found) == list(range(11))
            assert all(epoch >= number for _, epoch, _ in found)


@stateless
def nothing(sample: Any) -> Any:
    raise SkipSample


def test_error_of_an_empty_repetition_comes_again_after_a_restore(roots) -> None:
    dataset = ConcatDataset(
        source(roots[3], "b"), RepeatDataset(MapDataset(source(roots[3]), nothing))
    )
    run = StreamRun(dataset, Stream(0, 1))
    assert len(list(islice(run, 3))) == 3
    again = StreamRun(dataset, Stream(0, 1))
    again.restore(run.snapshot())
    for each in (run, again):
        with pytest.raises(EmptyDatasetError, match="RepeatDataset: a had no item in"):
            next(each)
    assert RepeatDataset(source(roots[3]), restart=False).endless


def listed(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("num_streams", [1, 3])
def test_repeated_batches_are_counted_as_items(roots, num_streams) -> None:
    batches = BatchDataset(source(roots[11]), 2, listed)
    dataset = RepeatDataset(batches, repeats=1.5)
    whole = sum(batches.num_items(Stream(i, num_streams)) for i in range(num_streams))
    streams = draws(dataset, num_streams)
    assert sum(len(stream) for stream in streams) == whole + whole // 2
    tenths = RepeatDataset(batches, repeats=0.7)  # seven tenths, not the nearest binary number
    assert tenths.config()["repeats"] == "7/10"


def test_one_source_used_twice_has_another_id_and_order(roots) -> None:
    same = source(roots[11])
    dataset = ConcatDataset(same, RepeatDataset(same, repeats=1), ConcatDataset(same, same))
    names = [facts.name for facts in dataset.sources()]
    assert len(set(names)) == 4
    assert names[0] == "a"
    orders = {}
    for name, _, index in together(draws(dataset, 1)):
        orders.setdefault(name, []).append(index)
    assert set(orders) == set(names)
    assert len({tuple(order) for order in orders.values()}) == 4
    assert [facts.name for facts in same.sources()] == ["a"]


def test_expected_counts_have_the_parts_in_their_order(roots) -> None:
    dataset = ConcatDataset(source(roots[3]), source(roots[11], "b"))
    assert dataset.expected(2) == {"a": 2, "b": 0}
    assert dataset.expected(8) == {"a": 3, "b": 5}
    again = RepeatDataset(dataset)
    assert again.expected(14 + 5) == {"a": 3 + 3, "b": 11 + 2}
