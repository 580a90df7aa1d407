from __future__ import annotations

import threading
from itertools import islice

import pytest

from energon_lite import WorkerConfig
from energon_lite.core.dataset import StreamRun
from energon_lite.core.errors import StateError
from energon_lite.core.state import Snapshot
from energon_lite.core.topology import Stream
from energon_lite.testing import first_difference

from ..helpers import assert_same, train

NUM_TEXTS = 20


def config_of(**more: object) -> WorkerConfig:
    return WorkerConfig(**{"rank": 0, "world_size": 1, "num_workers": 0, **more})  # type: ignore[arg-type]


def test_skip_is_as_many_next_and_leaves_skipped_samples_uncounted(texts) -> None:
    dataset = train(texts, "skipping")(config_of())
    expected = list(islice(StreamRun(dataset, Stream(0, 2)), 12))
    run = StreamRun(dataset, Stream(0, 2), max_skip_rate=1)
    run.skip(5)
    assert run.context.take_records() == []
    assert run.num_returned == 5
    assert_same(list(islice(run, 7)), expected[5:])
    assert run.context.take_records() != []


def test_direct_iteration_ends_with_a_virtual_epoch_and_starts_again(texts) -> None:
    dataset = train(texts, virtual_epoch_length=4)(config_of())
    first = list(dataset)
    assert len(first) == 4
    assert_same(list(dataset), first)


def test_refused_snapshot_leaves_run_and_records_alone(texts) -> None:
    dataset = train(texts, "skipping")(config_of())
    run = StreamRun(dataset, Stream(0, 1), max_skip_rate=1)
    expected = list(islice(StreamRun(dataset, Stream(0, 1), max_skip_rate=1), 10))
    assert_same(list(islice(run, 4)), expected[:4])
    records = list(run.context.records)
    assert records
    for failures in ("x", -1, None):
        fields = {**run.snapshot().fields, "failures": failures}
        with pytest.raises(StateError, match="failures="):
            run.restore(Snapshot("stream", fields, run.snapshot().inner))
    assert run.context.records == records
    assert_same(list(islice(run, 6)), expected[4:])


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (1, 1.0, ": int 1 != float 1.0"),
        ([1, 2], [1], ": 2 != 1 entries"),
        ({"a": 1}, {"b": 1}, ": keys ['a'] != ['b']"),
        ({"a": (1, {"b": 2})}, {"a": (1, {"b": 3})}, "['a'][1]['b']: 2 != 3"),
        (float("nan"), 1.0, ": nan != 1.0"),
    ],
)
def test_first_difference_names_the_path(old, new, text) -> None:
    assert first_difference(old, new) == text


def test_first_difference_looks_into_arrays_tensors_and_objects() -> None:
    import numpy as np
    import torch

    class Plain:
        def __init__(self, value: object) -> None:
            self.value = value

    nan = float("nan")
    assert first_difference(torch.tensor([1.0, nan]), torch.tensor([1.0, nan])) is None
    assert first_difference(np.array([nan, "a"], object), np.array([nan, "a"], object)) is None
    assert first_difference([nan], [float("nan")]) is None
    assert first_difference(torch.zeros(2, 2), torch.eye(2)) == "[0, 0]: tensor(0.) != tensor(1.)"
    assert first_difference(torch.zeros(2), torch.zeros(2).long()) == (
        ": torch.float32 (2,) != torch.int64 (2,)"
    )
    assert first_difference(np.zeros(3), np.zeros(2)) == ": float64 (3,) != float64 (2,)"
    assert first_difference(np.array(["a", "b"]), np.array(["a", "c"])).startswith("[1]:")
    assert first_difference(Plain([1]), Plain([1])) is None
    assert first_difference(Plain([1]), Plain([2])) == "['value'][0]: 1 != 2"


class LockedNotes:
    """A store as the library has them: only its path is pickled."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path,)


def test_first_difference_compares_what_pickle_takes_along() -> None:
    assert first_difference({"a": LockedNotes("x")}, {"a": LockedNotes("x")}) is None
    found = first_difference({"a": LockedNotes("x")}, {"a": LockedNotes("y")})
    assert found == "['a'][1][0]: 'x' != 'y'"
