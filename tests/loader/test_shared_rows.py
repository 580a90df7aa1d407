"""Rows of buffered samples, which a worker process shares with the training loop."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from energon_lite import DefaultTaskEncoder, Packing, get_train_dataset, stateless
from energon_lite.batching.collector import CollectorState
from energon_lite.core import batch_memory
from energon_lite.core.state import Snapshot
from energon_lite.loader.workers.codec import packed_delivery
from energon_lite.loader.workers.rank_feed import Delivery
from energon_lite.stages.sample_buffer import SampleBuffer

from ..conftest import examples
from ..helpers import Ranks, assert_same, is_true_in_fork, number_of
from .test_messages import Line
from .test_restarts import kill
from .workers import counts_of

NUM_TEXTS = 3000


class Places:
    """Knows the places of all samples."""

    def places(self, name: str, epochs: Any, indices: Any) -> Any:
        return indices * 2


KEYS: list[Any] = [
    lambda n: ("a", 0, n * 7, n),
    lambda n: ("b", n, n, 0),
    lambda n: ("piece", n % 5, ("b", 0, n, n)),
]


def add(buffer: SampleBuffer, first: int, num: int, key_of: Any) -> None:
    numbers = range(first, first + num)
    units = [(n, n % 3, (n % 5,), key_of(n)) for n in numbers]
    buffer.add(units, [*numbers])


def snapshot_of(buffer: SampleBuffer, read: int) -> Snapshot:
    left = np.array([*buffer.keys], np.int64)
    rows = partial(np.column_stack, (left, left % 11))
    fields: Any = buffer.fields({"read": read}, CollectorState({}, rows))
    return Snapshot("packed", fields)


def at_once(snapshot: Snapshot) -> Any:
    """What a snapshot is now, whatever comes after it."""
    return pickle.loads(pickle.dumps(snapshot)).to_json()


ACTS = ["keep", "drop", "other pass", "other arena"]


@examples(20)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 900), st.floats(0, 1), st.booleans(), st.sampled_from(KEYS),
            st.sampled_from(ACTS),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_snapshots_that_were_sent_stay_what_they_were(steps: list[Any]) -> None:
    with Line() as line, pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_memory, "new_block", line.outlet.empty)
        buffer: Any = SampleBuffer(1, Places())  # type: ignore[arg-type]
        num_added, kept = 0, []
        for num, share, is_old_first, key_of, act in steps:
            add(buffer, num_added, num, key_of)
            num_added += num
            old = sorted(buffer.keys, reverse=not is_old_first)
            buffer.taken(old[: int(share * len(old))])
            snapshot = snapshot_of(buffer, num_added)
            expected = at_once(snapshot)
            delivery = Delivery("", 0, 0, snapshot, [], [])
            if act == "other pass":
                line.outlet.send(7, packed_delivery(delivery, "here"))
                assert line.inlet.take(8) is None
                line.take_back()
            elif act == "drop":
                del kept[::2]
            else:
                line.inlet.arena.is_left |= act == "other arena"
                kept.append((line.send(delivery).snapshot, expected))
            del snapshot, delivery
        for found, expected in kept:
            again = pickle.loads(pickle.dumps(found))
            assert type(again) is Snapshot
            assert again.to_json() == found.to_json() == expected


class Packs(DefaultTaskEncoder):
    """Packs of texts, for which some hundred are buffered."""

    packing = Packing(capacity=40, buffer_size=700)

    @stateless
    def sample_length(self, sample: Any) -> int:
        return 1 + number_of(sample) * 7 % 23

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return [number_of(sample) for sample in samples]


@pytest.mark.processes
@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_states_with_workers_are_those_without_also_when_one_was_replaced(
    texts: Any, start_method: str
) -> None:
    def make(config: Any) -> Any:
        return get_train_dataset(
            texts, worker_config=config, batch_size=None, task_encoder=Packs(),
            shuffle_buffer_size=300, max_samples_per_sequence=None,
        )  # fmt: skip

    expected = Ranks(make, 1, num_streams=3)
    run = Ranks(make, 1, 2, num_streams=3, start_method=start_method, restart_workers=5)
    states = []
    for step in range(90):
        assert_same(run.next(0), expected.next(0))
        if step % 3 == 0:
            assert_same(counts_of(run), counts_of(expected))
        if step in (40, 70):
            states.append(run.save())
            kill(run, {step % 4 // 2})
        if step == 50:
            assert is_true_in_fork(lambda: counts_of(run) == counts_of(expected))
    again = Ranks(make, 1, 2, start_method=start_method, states=states[-1])
    behind = again.slots(30)
    more = Ranks(make, 1, states=states[-1]).slots(30)
    assert_same(behind, more)
    assert_same(counts_of(again), counts_of(Ranks(make, 1, states=again.save())))
