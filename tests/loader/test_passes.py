"""Finite passes: where they end, what a new `iter` does, virtual epochs and limits."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest

from energon_lite import SavableDataLoader, WorkerConfig
from energon_lite.core.errors import StateError

from ..helpers import (
    Ranks,
    assert_same,
    keys_of,
    through_json,
    train,
    validation,
)
from .workers import loader_from


def again(make: Any, loader: SavableDataLoader[Any], **config: Any) -> SavableDataLoader[Any]:
    """A fresh loader that goes on where `loader` stands."""
    resumed = loader_from(make, **config)
    resumed.load_state_dict(through_json(loader.state_dict()))
    return resumed


def keys(batches: Any) -> list[list[str]]:
    return [keys_of(batch) for batch in batches]


# -------------------------------------------------------------------- exactly as many as there are


@pytest.mark.parametrize("length", [7, 20])
def test_consumer_of_exactly_all_batches_of_virtual_epochs(texts, length) -> None:
    one = loader_from(train(texts, repeat=False))
    expected = [batch for _ in range(3) for batch in one]
    make = train(texts, repeat=False, virtual_epoch_length=length)
    loader = loader_from(make)
    found: list[Any] = []
    while len(found) < 42:
        # A pass of 14 batches ends an epoch early.
        number = min(length, 14 - len(found) % 14, length - len(found) % 14 % length)
        epoch = list(islice(iter(loader), number))
        assert len(epoch) == number
        found += epoch
        loader = again(make, loader)
    assert_same(found, expected)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_virtual_epoch_resumed_on_other_ranks_has_what_is_left_of_its_slots(
    texts, world_size
) -> None:
    make = train(texts, virtual_epoch_length=12)
    run = Ranks(make, 2, num_streams=4)
    run.steps(4)
    for loader in Ranks(make, world_size, states=run.save()).loaders:
        assert [len(list(loader)) for _ in range(2)] == [12 - 8 // world_size, 12]


def test_passes_of_no_data_stay_empty(texts) -> None:
    make = train(texts, repeat=False, batch_size=50, batch_drop_last=True)
    loader = loader_from(make)
    for _ in range(3):
        assert list(loader) == []
    assert list(again(make, loader)) == []


# ------------------------------------------------------------------------------------ uneven ranks


def test_rank_in_the_next_pass_while_another_has_not_ended_is_refused(texts) -> None:
    make = train(texts, repeat=False)
    run = Ranks(make, 2, num_streams=2)
    run.next(1)
    for _ in run.iterators[0]:
        pass
    run.iterators[0] = iter(run.loaders[0])
    run.next(0)
    with pytest.raises(StateError, match=r"ranks \[0\] had begun another pass"):
        Ranks(make, 3, states=run.save())


# ---------------------------------------------------------------------------------- validation


def test_limit_ends_validation_passes_early(texts) -> None:
    expected = list(loader_from(validation(texts), num_streams=3))
    make = validation(texts, limit=4)
    loader = loader_from(make, num_streams=3)
    assert len(loader) == 4
    for _ in range(3):
        assert_same(list(loader), expected[:4])
    assert len(list(islice(iter(loader), 2))) == 2
    resumed = again(make, loader)
    assert_same(list(resumed), expected[2:4])
    assert_same(list(resumed), expected[:4])
    # Saved at the end of a pass, the next one starts from the beginning.
    assert_same(list(again(make, resumed)), expected[:4])


def test_limit_of_0_and_none_is_none_and_a_long_one_changes_nothing(texts) -> None:
    expected = list(loader_from(validation(texts)))
    for limit in (0, None, 1000):
        assert_same(list(loader_from(validation(texts, limit=limit))), expected)
    with pytest.raises(ValueError, match="limit=-1"):
        validation(texts, limit=-1)(WorkerConfig(rank=0, world_size=1, num_workers=0))


# ------------------------------------------------------------------------------- virtual epochs


@pytest.mark.parametrize("length", [3, 7, 14, 100])
def test_virtual_epochs_without_repeat_are_never_empty(texts, length) -> None:
    """40 samples are 14 batches a pass."""
    one = loader_from(train(texts, repeat=False))
    expected = [batch for _ in range(3) for batch in one]
    assert len(expected) == 42
    loader = loader_from(train(texts, repeat=False, virtual_epoch_length=length))
    found: list[Any] = []
    while len(found) < 42:
        epoch = list(loader)
        assert 0 < len(epoch) <= length
        found += epoch
    assert_same(found[:42], expected)


def test_length_of_a_virtual_epoch_may_change_in_a_run(texts) -> None:
    expected = list(islice(iter(loader_from(train(texts))), 12))
    loader = loader_from(train(texts, virtual_epoch_length=7))
    assert len(list(islice(iter(loader), 5))) == 5
    resumed = loader_from(train(texts, virtual_epoch_length=3))
    resumed.load_state_dict(through_json(loader.state_dict()))
    found: list[Any] = []
    while len(found) < 7:
        found += list(resumed)
    assert_same(found[:7], expected[5:])


# --------------------------------------------------------------------------------- two iterators

ENDING = {
    "validation": lambda path: validation(path),
    "finite": lambda path: train(path, repeat=False),
    "virtual": lambda path: train(path, virtual_epoch_length=7),
}
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "process": {"num_workers": 1},
    "thread": {"num_workers": 1, "worker_type": "thread"},
}


@pytest.mark.parametrize("workers", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("kind", ENDING)
def test_iterators_of_one_loader_never_share_an_epoch(texts, kind, workers) -> None:
    with loader_from(ENDING[kind](texts), **workers) as loader:
        epochs = [keys(loader) for _ in range(15)]
    choice, newest, earlier = random.Random(1), None, []
    yielded: list[list[str]] = []
    num_ended = num_refused = 0
    with loader_from(ENDING[kind](texts), **workers) as loader:
        for _ in range(100):
            action = choice.random()
            if newest is None or action < 0.07:
                earlier += [newest] if newest is not None else []
                newest, own = iter(loader), []
            elif action < 0.2 and earlier:
                with pytest.raises(RuntimeError, match=r"make a second loader: get_loader\("):
                    next(earlier.pop(0))
                num_refused += 1
            if (batch := next(newest, None)) is not None:
                own.append(keys_of(batch))
                yielded.append(own[-1])
                continue
            assert kind != "validation" or own == epochs[0]
            newest, num_ended = None, num_ended + 1
    assert num_ended
    assert num_refused
    if kind != "validation":
        assert yielded == [batch for epoch in epochs for batch in epoch][: len(yielded)]


@pytest.mark.parametrize("kind", ENDING)
def test_a_peek_in_a_loop_is_refused_with_the_next_batch(texts, kind) -> None:
    loader = loader_from(ENDING[kind](texts))
    for use in (zip(loader, loader, strict=False), ((a, b) for a in loader for b in loader)):
        with pytest.raises(RuntimeError, match="one epoch"):
            list(use)


def test_a_loop_that_was_left_is_no_second_iterator(texts) -> None:
    loader = loader_from(train(texts, repeat=False))
    found = []
    try:
        for batch in loader:
            found.append(keys_of(batch))
            if len(found) == 3:
                raise KeyError("in the loop")
    except KeyError as error:
        kept = error  # and with it the frame of the loop
        found += keys(loader)
    assert found == keys(loader_from(train(texts, repeat=False)))
    assert kept.__traceback__ is not None


def test_iterators_of_endless_training_continue_one_another(texts) -> None:
    loader = loader_from(train(texts))
    found = [
        keys_of(batch) for pair in islice(zip(loader, loader, strict=True), 6) for batch in pair
    ]
    assert found == keys(islice(loader_from(train(texts)), 12))


# ------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("batch_size", "drop_last"), [(1, False), (3, True), (3, False), (50, True)]
)
def test_length_is_the_number_of_batches(texts, batch_size, drop_last) -> None:
    for make_from, settings in ((train, {"repeat": False}), (validation, {})):
        make = make_from(texts, batch_size=batch_size, batch_drop_last=drop_last, **settings)
        for world_size, num_streams in ((1, 1), (2, 4), (3, 4)):
            run = Ranks(make, world_size, num_streams=num_streams)
            lengths = [len(loader) for loader in run.loaders]
            assert lengths == [len(list(iterator)) for iterator in run.iterators]


def test_length_of_single_samples_and_of_an_endless_run_is_an_epoch(texts) -> None:
    assert len(loader_from(train(texts, batch_size=None))) == 40
    assert len(loader_from(train(texts, batch_size=4))) == 10
    dataset = train(texts, batch_size=4)(WorkerConfig(rank=0, world_size=2, num_workers=0))
    assert len(dataset) == 5
    # 14 batches of all streams are as many steps on each of four ranks, rounded up.
    dataset = train(texts, batch_size=3)(WorkerConfig(rank=3, world_size=4, num_workers=0))
    assert len(dataset) == 4
