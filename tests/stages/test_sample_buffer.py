"""Buffered samples as rows of one array, and what a snapshot of them costs."""

from __future__ import annotations

import pickle
import pickletools
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from energon_lite.batching.collector import Collector, CollectorState, Samples
from energon_lite.batching.one_by_one import SelectedPacks, ShuffleCollector
from energon_lite.batching.rules import Packing
from energon_lite.batching.stream_packs import StreamPacks
from energon_lite.batching.window_packs import WindowPacks
from energon_lite.stages.sample_buffer import SampleBuffer

from ..conftest import examples


def added(buffer: SampleBuffer, numbers: range, keys: list[Any]) -> None:
    units = [(n, n % 3, (n % 5,), key) for n, key in zip(numbers, keys, strict=True)]
    buffer.add(units, [*numbers])


KEYS = [
    lambda n: ("a", 0, n * 7, n),
    lambda n: ("a", 0, n, 0.5),
    lambda n: ("piece", n, 9, ("b", 0, n, n)),
]


@examples(50)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 90), st.floats(0, 1), st.booleans(), st.sampled_from(KEYS)),
        max_size=12,
    )
)
def test_snapshots_of_a_buffer_have_all_its_samples_also_after_pickling(steps: list[Any]) -> None:
    buffer, num_added, kept = SampleBuffer(1), 0, []
    for num, share, is_old_first, key_of in steps:
        numbers = range(num_added, num_added + num)
        keys = [*map(key_of, numbers)]
        added(buffer, numbers, keys)
        num_added += num
        old = sorted(buffer.keys, reverse=not is_old_first)
        buffer.taken(old[: int(share * len(old))])
        left = np.array([*buffer.keys], np.int64)
        rows = partial(np.column_stack, (left, left % 11))
        fields = buffer.fields({"read": num_added}, CollectorState({}, rows))
        kept.append((fields, dict(buffer.keys)))
        found = buffer.rows_of([*buffer.keys])
        assert found.groups.tolist() == [number % 3 for number in buffer.keys]
        assert found.lengths.tolist() == [[number % 5] for number in buffer.keys]
    for fields, left in kept:
        for own in (fields, pickle.loads(pickle.dumps(fields))):
            assert own["keys"] == tuple(left.values())
            assert own["rows"] == tuple((n, n % 3, n % 5, n % 11) for n in left)
            assert {*own} == {"read", "counts", "keys", "rows"}


def test_entries_of_keys_that_left_do_not_pile_up() -> None:
    buffer, sizes = SampleBuffer(1), []
    for first in range(0, 20_000, 10):
        numbers = range(first, first + 10)
        added(buffer, numbers, [("a", f"file {number}") for number in numbers])
        buffer.taken([*buffer.keys][:-50])
        fields = buffer.fields({}, CollectorState({}, dict))
        sizes.append(len(pickle.dumps(fields)))
    assert max(sizes) < 12_000


def _chosen(numbers: list[int], _: bool) -> Any:
    return [numbers[at : at + 8] for at in range(0, len(numbers), 8)], []


COLLECTORS: dict[str, Any] = {
    "selected": lambda size: SelectedPacks(size, _chosen),
    "shuffled": lambda size: ShuffleCollector(size, 1),
    "streamed packs": lambda size: StreamPacks(Packing(capacity=64, buffer_size=size)),
    "packs of windows": lambda size: WindowPacks(
        Packing(capacity=64, algorithm="best_fit_decreasing"), size, grows=True
    ),
}


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_snapshot_has_as_many_objects_with_a_large_buffer_as_with_a_small_one(name: str) -> None:
    def num_objects(size: int) -> int:
        collector: Collector = COLLECTORS[name](size)
        buffer, num_added, num_returned, most = SampleBuffer(1), 0, 0, 0
        while num_returned < 100:
            found = collector.next(num_returned, False)
            if found is None:
                num = min(1000, collector.num_wanted)
                numbers = range(num_added, num_added + num)
                num_added += num
                keys = [("a", 0, number * 7, number) for number in numbers]
                lengths = [(3 + number % 17,) for number in numbers]
                rows = Samples(np.array(numbers), np.zeros(num, np.int64), np.array(lengths))
                own = [
                    (*unit, key)
                    for *unit, key in zip(numbers, [0] * num, lengths, keys, strict=True)
                ]
                buffer.add(own, [*numbers])
                collector.add(rows)
                continue
            num_returned += 1
            buffer.taken(found)
            fields = buffer.fields({"read": num_added}, collector.state())
            if num_returned % 20 == 0:
                most = max(most, sum(1 for _ in pickletools.genops(pickle.dumps(fields))))
        return most

    assert num_objects(32_768) < 1.5 * num_objects(512)
