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


EVERY_KEY = [f"{i:05d}" for i in range(40)]


# ------------------------------------------------------------------------------- training passes


def test_each_pass_has_every_sample_once_in_another_order(texts) -> None:
    loader = loader_from(train(texts, repeat=False), num_streams=2)
    passes = [keys(loader) for _ in range(3)]
    for found in passes:
        assert sorted(key for batch in found for key in batch) == EVERY_KEY
    assert passes[0] != passes[1] != passes[2]


def test_save_at_every_place_of_a_finite_pass_and_after_it(texts) -> None:
    make = train(texts, "skipping", repeat=False, batch_size=5)
    loader = loader_from(make, num_streams=3)
    passes = [list(loader), list(loader)]
    assert len(passes[0]) > 4
    loader = loader_from(make, num_streams=3)
    iterator = iter(loader)
    for at in range(len(passes[0]) + 1):
        resumed = again(make, loader)
        if at < len(passes[0]):
            assert_same(list(resumed), passes[0][at:])
            next(iterator)
        assert_same(list(resumed), passes[1])
    # After the last batch, but before the loader has seen the end; then after StopIteration.
    assert next(iterator, None) is None
    resumed = again(make, loader)
    assert_same(list(resumed), passes[1])
    # And after the next pass was begun without a batch.
    iter(loader)
    assert_same(list(again(make, loader)), passes[1])


def test_save_of_a_restored_state_is_that_state(texts) -> None:
    make = train(texts, "skipping")
    loader = loader_from(make, num_streams=3)
    iterator = iter(loader)
    for step in range(12):
        if step:
            next(iterator)
        # The base moves; what comes is the same, and the next save of it is equal.
        once = again(make, loader)
        twice = again(make, once)
        assert through_json(twice.save_state_rank()) == through_json(once.save_state_rank())


# -------------------------------------------------------------------- exactly as many as there are


# With 3 and 6 streams some ranks share them; 30 samples in batches of 3 are equally many for all.
@pytest.mark.parametrize(("num_streams", "world_size"), [(3, 2), (6, 1), (3, 5), (6, 3)])
def test_state_saved_at_the_last_batch_begins_the_next_pass_on_any_topology(
    texts, num_streams, world_size
) -> None:
    make = train(texts, repeat=False, batch_size=1)
    one = loader_from(make, num_streams=num_streams)
    passes = [list(one) for _ in range(3)]
    run = Ranks(make, 2, num_streams=num_streams)
    assert [len(loader) for loader in run.loaders] == [20, 20]
    assert_same(list(run.slots(40).values()), passes[0])
    run.iterators = [iter(loader) for loader in run.loaders]
    assert_same(list(run.slots(40).values()), passes[1])
    resumed = Ranks(make, world_size, states=run.save())
    assert_same(list(resumed.rest().values()), passes[2])


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


def test_len_of_a_virtual_epoch_stays_what_it_is(texts) -> None:
    loader = loader_from(train(texts, "skipping", repeat=False, virtual_epoch_length=5))
    for _ in range(5):
        assert len(loader) == 5
        list(loader)


def test_passes_of_no_data_stay_empty(texts) -> None:
    make = train(texts, repeat=False, batch_size=50, batch_drop_last=True)
    loader = loader_from(make)
    for _ in range(3):
        assert list(loader) == []
    assert list(again(make, loader)) == []


# ------------------------------------------------------------------------------------ uneven ranks


@pytest.mark.parametrize("ended", [[0], [1, 2]])
def test_on_an_unchanged_topology_each_rank_resumes_where_it_stood(texts, ended) -> None:
    make = train(texts, "skipping", repeat=False, batch_size=2)
    run = Ranks(make, 3, num_streams=6)
    for rank in (0, 0, 1, 2, 2, 2):
        run.next(rank)
    for rank in ended:
        assert len(list(run.iterators[rank])) > 0
    resumed = Ranks(make, 3, states=run.save())
    for rank in range(3):
        # An ended rank begins its next pass, as it would have without the restart.
        iterator = iter(run.loaders[rank]) if rank in ended else run.iterators[rank]
        unbroken = list(iterator)
        assert len(unbroken) > 0
        assert_same(list(resumed.iterators[rank]), unbroken)


def test_one_rank_has_begun_the_next_pass_and_another_stands_at_the_end(texts) -> None:
    make = train(texts, "skipping", repeat=False)
    one = loader_from(make, num_streams=2)
    passes = [list(one), list(one)]
    run = Ranks(make, 2, num_streams=2)
    run.rest()
    run.iterators[0] = iter(run.loaders[0])
    for world_size in (1, 2, 3):
        resumed = Ranks(make, world_size, states=run.save())
        assert_same(list(resumed.rest().values()), passes[1])


@pytest.mark.parametrize("ranks", [(0, 1), (0, 0)])  # that have a batch before: both, or one
def test_ranks_have_begun_the_next_pass_and_only_one_has_emitted_of_it(texts, ranks) -> None:
    make = train(texts, "skipping", repeat=False)
    one = loader_from(make, num_streams=2)
    passes = [list(one), list(one)]
    run = Ranks(make, 2, num_streams=2)
    for rank in ranks:
        run.next(rank)
    run = Ranks(make, 3, states=run.save())
    run.rest()
    run.iterators[1] = iter(run.loaders[1])
    slot, item = run.next(1)
    assert (slot, keys_of(item)) == (1, keys_of(passes[1][1]))
    for world_size in (1, 2):
        rest = Ranks(make, world_size, states=run.save()).rest()
        assert_same([rest[0], *list(rest.values())[1:]], [passes[1][0], *passes[1][2:]])


def test_rank_in_the_next_pass_takes_no_snapshot_of_the_pass_before(texts) -> None:
    make = train(texts, "grouping", repeat=False, batch_size=2)
    run = Ranks(make, 3, num_streams=2)
    assert run.next(1)[0] == 1  # of stream 1, which rank 0 visits next
    for _ in run.iterators[0]:
        pass
    run.iterators[0] = iter(run.loaders[0])
    assert run.next(0)[0] == 0
    resumed = Ranks(make, 3, states=run.save())
    for rank in (0, 1):
        assert_same([resumed.next(rank) for _ in range(3)], [run.next(rank) for _ in range(3)])


def test_rank_resumes_a_shared_stream_behind_slots_that_are_left_to_others(texts) -> None:
    make = train(texts, repeat=False, batch_size=1)
    run = Ranks(make, 3, num_streams=2)
    for slot in (0, 3, 6, 9):
        assert run.next(0)[0] == slot
    # Rank 2 has the slots 3, 8, 13, ...; the slots 5 and 7 of its stream are those of others.
    run = Ranks(make, 5, states=run.save())
    start = run.loaders[2]._run.position.start.streams[1]
    assert start.snapshot is not None
    assert (start.first, start.snapshot.count("items")) == (6, 5)
    assert run.next(2)[0] == 8


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


def test_more_ranks_than_batches_end_without_a_batch(texts) -> None:
    run = Ranks(train(texts, repeat=False, batch_size=20), 5)
    counts = [len(list(iterator)) for iterator in run.iterators]
    assert sum(counts) >= 2
    for loader in run.loaders:
        assert loader.save_state_rank()["ended"]


# ---------------------------------------------------------------------------------- validation


def test_validation_yields_every_sample_once_in_file_order_also_after_a_break(texts) -> None:
    loader = loader_from(validation(texts), num_streams=3)
    for stop in (None, 4, None):
        found = [key for batch in islice(loader, stop) for key in keys_of(batch)]
        assert found == EVERY_KEY[: stop and 3 * stop]


def test_validation_resumes_in_the_middle_only_after_a_restore(texts) -> None:
    make = validation(texts)
    loader = loader_from(make, num_streams=3)
    expected = list(loader)
    assert len(list(islice(iter(loader), 5))) == 5
    resumed = again(make, loader)
    assert_same(list(resumed), expected[5:])
    assert_same(list(resumed), expected)


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


def test_limit_counts_items_of_each_rank(texts) -> None:
    run = Ranks(validation(texts, limit=2), 3, num_streams=3)
    assert sorted(run.rest()) == list(range(6))


# ------------------------------------------------------------------------------- virtual epochs


def test_virtual_epoch_is_resumed_in_its_middle(texts) -> None:
    make = train(texts, virtual_epoch_length=7)
    expected = list(islice(iter(loader_from(train(texts))), 21))
    loader = loader_from(make)
    assert len(list(loader)) == 7
    for at in range(7):
        resumed = again(make, loader)
        assert_same(list(resumed), expected[7 + at : 14])
        assert_same(list(resumed), expected[14:21])
        next(iter(loader))


def test_leaving_a_virtual_epoch_with_its_last_item_does_not_leave_an_empty_one(texts) -> None:
    make = train(texts, virtual_epoch_length=7)
    expected = list(islice(iter(loader_from(train(texts))), 21))
    loader = loader_from(make)
    assert_same(list(islice(iter(loader), 7)), expected[:7])
    resumed = again(make, loader)
    assert_same(list(loader), expected[7:14])
    assert_same(list(resumed), expected[7:14])


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


def test_dropped_last_batches_leave_the_rest_as_it_is(texts) -> None:
    kept = Ranks(train(texts, repeat=False), 1, num_streams=4).rest()
    dropped = Ranks(train(texts, repeat=False, batch_drop_last=True), 1, num_streams=4).rest()
    full = {slot: batch for slot, batch in kept.items() if len(keys_of(batch)) == 3}
    assert 0 < len(full) < len(kept)
    assert_same(dropped, full)


@pytest.mark.parametrize("encoder", ["skipping", "expanding"])
def test_rank_with_nothing_left_waits_for_those_that_have(texts, encoder) -> None:
    """Hooks that skip or expand make the number of batches unknown before they are computed."""
    make = train(texts, encoder, repeat=False, batch_size=2)
    whole = Ranks(make, 1, num_streams=2).rest()
    for slot in sorted(whole)[-3:]:  # this and what comes after it on its rank is left
        run = Ranks(make, 4, num_streams=2)
        left = {other for other in whole if other >= slot and other % 4 == slot % 4}
        for other in sorted(whole.keys() - left):
            next(run.iterators[other % 4])
        resumed = Ranks(make, 3, states=run.save())
        assert set(resumed.rest()) == left
        assert {state["pass"] for state in resumed.save()} == {0}
    # Where nothing is left, no `for` is empty.
    run = Ranks(make, 2, num_streams=2)
    for slot in sorted(whole):
        next(run.iterators[slot % 2])
    resumed = Ranks(make, 3, states=run.save())
    assert resumed.rest()
    assert {state["pass"] for state in resumed.save()} == {1}


def test_rank_waits_for_one_that_has_not_begun_the_pass(texts) -> None:
    make = train(texts, repeat=False)
    run = Ranks(make, 2, num_streams=2)
    run.rest()
    iterator = iter(run.loaders[1])
    second = [next(iterator) for _ in range(len(run.loaders[1]))]
    assert second
    resumed = Ranks(make, 2, states=run.save())
    assert not list(resumed.iterators[1])
    assert list(resumed.iterators[0])
    assert [state["pass"] for state in resumed.save()] == [1, 1]
