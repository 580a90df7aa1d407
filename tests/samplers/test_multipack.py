from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from energon_lite.batching.bounds import lower_bound
from energon_lite.core.errors import StateError
from energon_lite.samplers import MultipackBatchSampler

from .shared import check_loader, distributed, steps_of, text_lengths

ALGORITHMS = ("best", "first_fit_decreasing", "best_fit_decreasing", "first_fit", "sequential")
WORLD_SIZES = (1, 2, 3, 8)
# One pack in a batch, on one rank: a batch for each pack there is.
AS_THEY_ARE = {"batch_size": 1, "drop_last": False, "rank": 0, "world_size": 1}


def ranks(world_size: int, *args: Any, **settings: Any) -> list[MultipackBatchSampler]:
    return [
        MultipackBatchSampler(*args, rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]


def packs_of(samplers: list[MultipackBatchSampler]) -> list[list[int]]:
    """What all ranks give, step by step and rank by rank; asserts that `len()` was right."""
    steps: Any = steps_of(samplers)
    for step in steps:
        assert len({len(batch) for batch in step}) == 1, "ranks have equally many packs in a step"
    return [pack for step in steps for batch in step for pack in batch]


def restored(state: dict[str, Any], *args: Any, **settings: Any) -> MultipackBatchSampler:
    sampler = MultipackBatchSampler(*args, **settings)
    sampler.load_state_dict(json.loads(json.dumps(state)))
    return sampler


# Laws.


@st.composite
def settings_and_lengths(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    align = draw(st.sampled_from([1, 1, 4]))
    capacity = draw(st.integers(align, 60))
    lengths = draw(st.lists(st.integers(1, 2 * capacity), min_size=1, max_size=70))
    overlong = draw(st.sampled_from(["error", "drop", "alone"]))
    limit = capacity // align * align
    if overlong == "error":
        lengths = [min(length, limit) for length in lengths]
    if overlong == "drop":
        lengths.append(1)  # one that is left
    return lengths, {
        "capacity": capacity,
        "align": align,
        "overlong": overlong,
        "algorithm": draw(st.sampled_from(ALGORITHMS)),
        "max_samples": draw(st.sampled_from([None, 1, 3])),
        "batch_size": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 3)),
        "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "end": draw(st.sampled_from(["pad", "drop"])),
    }


def check_packs(packs: list[list[int]], lengths: list[int], settings: dict[str, Any]) -> None:
    align, capacity = settings["align"], settings["capacity"]
    for pack in packs:
        assert 1 <= len(pack) <= (settings["max_samples"] or len(lengths))
        aligned = sum(-(-lengths[i] // align) * align for i in pack)
        is_alone = len(pack) == 1 and settings["overlong"] == "alone"
        assert aligned <= capacity or is_alone


@given(settings_and_lengths(), st.integers(1, 9), st.integers(0, 5))
def test_every_sample_comes_once_on_some_rank_or_is_counted(
    drawn: tuple[list[int], dict[str, Any]], world_size: int, epoch: int
) -> None:
    lengths, settings = drawn
    samplers = ranks(world_size, lengths, **settings)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    first = samplers[0]
    as_they_are = MultipackBatchSampler(lengths, **settings | AS_THEY_ARE)
    as_they_are.set_epoch(epoch)
    num_packs = len(as_they_are)
    needed = settings["batch_size"] * world_size if settings["drop_last"] else world_size
    if num_packs < needed and (settings["drop_last"] or settings["end"] == "drop"):
        with pytest.raises(ValueError, match="nothing would be given"):
            len(first)
        return
    packs = packs_of(samplers)
    check_packs(packs, lengths, settings)
    counts = Counter(index for pack in packs for index in pack)
    limit = settings["capacity"] // settings["align"] * settings["align"]
    num_long = sum(length > limit for length in lengths)
    assert first.num_overlong == num_long
    left_out = num_long if settings["overlong"] == "drop" else 0
    assert counts.total() == len(lengths) - left_out - first.num_dropped + first.num_repeated
    if settings["drop_last"] or settings["end"] == "drop":
        assert first.num_repeated == 0
        assert max(counts.values()) == 1
    else:
        assert first.num_dropped == 0
        assert len(counts) == len(lengths) - left_out
    sizes = [sum(lengths[i] for i in pack) for pack in packs]
    room = sum(max(size, settings["capacity"]) for size in sizes)
    assert first.efficiency() == pytest.approx(sum(sizes) / room)
    assert all(sampler.gather_efficiency() == first.efficiency() for sampler in samplers)


@given(
    settings_and_lengths(),
    st.sampled_from(WORLD_SIZES),
    st.sampled_from(WORLD_SIZES),
    st.integers(1, 5),
    st.data(),
)
def test_resuming_gives_exactly_the_rest_on_any_number_of_ranks(
    drawn: tuple[list[int], dict[str, Any]],
    world_size: int,
    other_size: int,
    other_batch: int,
    data: st.DataObject,
) -> None:
    lengths, settings = drawn
    other = settings | {"batch_size": other_batch}
    settings |= {"drop_last": False, "end": "pad"}
    whole = packs_of([MultipackBatchSampler(lengths, **settings | AS_THEY_ARE)])
    samplers = ranks(world_size, lengths, **settings)
    given_batches = data.draw(st.integers(0, len(samplers[0])))
    before: list[list[list[list[int]]]] = []
    for sampler in samplers:
        iterator = iter(sampler)
        before.append([next(iterator) for _ in range(given_batches)])
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)
    served = [pack for step in zip(*before, strict=True) for batch in step for pack in batch]
    assert served[: len(whole)] == whole[: len(served)]

    if not served:  # a whole epoch of which nothing is given is an error, see below
        other |= {"drop_last": False, "end": "pad"}
    resumed = ranks(other_size, lengths, **other)
    for sampler in resumed:
        sampler.load_state_dict(json.loads(json.dumps(states[0])))
    num_dropped, num_repeated = resumed[0].num_dropped, resumed[0].num_repeated
    rest = packs_of(resumed)
    left = whole[len(served) :]
    assert rest[: len(left)] == left[: len(rest)]
    assert sum(map(len, left[len(rest) :])) == num_dropped
    assert sum(map(len, rest[len(left) :])) == num_repeated


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_set_epoch_gives_another_order_and_other_packs(algorithm: Any) -> None:
    # Sorted packing puts a sample of a length that it alone has beside the same others again.
    lengths = text_lengths(2000) // 100 + 1
    sampler = MultipackBatchSampler(lengths, 41, 4, algorithm=algorithm)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        epochs.append([pack for batch in sampler for pack in batch])
    assert epochs[0] == epochs[2]
    sets = [{frozenset(pack) for pack in packs} for packs in epochs]
    assert len(sets[0] & sets[1]) < len(sets[0]) / 10


def test_seed_gives_another_order() -> None:
    first, second = (list(MultipackBatchSampler(text_lengths(99), 4096, seed=s)) for s in (0, 1))
    assert first != second


def test_order_of_an_epoch_is_the_same_in_every_version() -> None:
    # To change it would break the resuming of runs that are under way.
    sampler = MultipackBatchSampler([6, 5, 4, 3, 2, 5, 5], 10, 2, algorithm="first_fit_decreasing")
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    assert found == [
        [[[0, 2], [5, 1]], [[6, 3, 4]]],
        [[[0, 2], [5, 6]], [[1, 3, 4]]],
    ]


def test_packs_do_not_go_from_long_samples_to_short_ones() -> None:
    lengths = text_lengths(20_000)
    sampler = MultipackBatchSampler(lengths, 4096, algorithm="first_fit_decreasing")
    longest = [max(lengths[i] for i in pack) for batch in sampler for pack in batch]
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.1
    sorted_longest = [
        max(lengths[i] for i in pack)
        for batch in MultipackBatchSampler(
            lengths, 4096, algorithm="first_fit_decreasing", shuffle=False
        )
        for pack in batch
    ]
    assert sorted_longest == sorted(sorted_longest, reverse=True)


@pytest.mark.parametrize("num", [2**k + 1 for k in (0, 1, 5, 10, 18)])
def test_sizes_next_to_powers_of_two_lose_nothing(num: int) -> None:
    packs = packs_of(ranks(2, np.full(num, 3), 10, 4, algorithm="first_fit_decreasing"))
    counts = Counter(index for pack in packs for index in pack)
    assert set(counts) == set(range(num))


def test_best_takes_no_more_than_a_thousandth_above_the_bound() -> None:
    lengths = text_lengths(20_000)
    sampler = MultipackBatchSampler(lengths, 4096)
    assert len(sampler) <= 1.001 * lower_bound(lengths, 4096)
    assert sampler.efficiency() > 0.998


def test_flatten_gives_one_list_of_indices_for_a_batch() -> None:
    nested, flat = (
        list(MultipackBatchSampler(text_lengths(50), 4096, 2, flatten=flatten))
        for flatten in (False, True)
    )
    assert flat == [[i for pack in batch for i in pack] for batch in nested]


def test_overlong_sample_alone_keeps_its_place_in_a_sequence() -> None:
    sampler = MultipackBatchSampler(
        [4, 4, 30, 5, 5], 10, algorithm="sequential", overlong="alone", shuffle=False
    )
    assert list(sampler) == [[[0, 1]], [[2]], [[3, 4]]]
    assert sampler.num_overlong == 1
    assert sampler.efficiency() == 48 / 50


# Axolotl's way to call it.


def test_axolotls_call_gives_batches_of_packs_in_the_order_of_the_sampler() -> None:
    lengths = text_lengths(1000, 2048)
    sampler = MultipackBatchSampler(
        sampler=RandomSampler(range(1000)),
        lengths=lengths,
        batch_size=4,
        batch_max_len=2048,
        drop_last=True,
        packing_efficiency_estimate=1.0,
        num_count_samples=4,
        group_size=100_000,
        bin_size=5,
        num_processes=1,
        safe_mode=True,
        mp_start_method="fork",
        sequential=False,
    )
    packs = packs_of([sampler])
    assert all(len(batch) == 4 for batch in sampler)
    assert all(len(pack) <= 5 and lengths[pack].sum() <= 2048 for pack in packs)
    counts = Counter(index for pack in packs for index in pack)
    assert counts.total() == len(counts) == 1000 - sampler.num_dropped


def test_defaults_with_a_sampler_are_axolotls() -> None:
    sampler = MultipackBatchSampler(
        sampler=SequentialSampler(range(999)), lengths=np.ones(999, int), batch_max_len=500
    )
    assert sampler.drop_last
    assert sampler.settings.algorithm == "best"
    assert max(len(pack) for batch in sampler for pack in batch) == 200


def test_sequential_packs_keep_the_order_of_the_sampler() -> None:
    order = [4, 2, 0, 1, 3, 5]
    sampler = MultipackBatchSampler(
        sampler=order, lengths=[4] * 6, batch_max_len=10, sequential=True, drop_last=False
    )
    assert list(sampler) == [[[4, 2]], [[0, 1]], [[3, 5]]]


def test_random_sampler_is_drawn_once_for_each_epoch() -> None:
    lengths = text_lengths(500)
    sampler = MultipackBatchSampler(
        sampler=RandomSampler(range(500)), lengths=lengths, batch_max_len=4096
    )
    first = (len(sampler), list(sampler))
    assert first == (len(sampler), list(sampler))
    sampler.set_epoch(1)
    assert len(sampler) == len(list(sampler))
    assert list(sampler) != first[1]


def test_samplers_own_epoch_is_set() -> None:
    order = DistributedSampler(range(40), num_replicas=1, rank=0)
    sampler = MultipackBatchSampler(sampler=order, lengths=[4] * 40, batch_max_len=10)
    first = list(sampler)
    sampler.set_epoch(3)
    assert order.epoch == 3
    assert list(sampler) != first


def test_sampler_of_some_samples_is_enough() -> None:
    sampler = MultipackBatchSampler(
        sampler=[1, 3, 5], lengths=[3] * 9, batch_max_len=6, drop_last=False
    )
    assert sorted(i for batch in sampler for pack in batch for i in pack) == [1, 3, 5]


def test_with_a_sampler_every_rank_has_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed(monkeypatch, rank=1, world_size=4)
    sampler = MultipackBatchSampler(sampler=range(8), lengths=[3] * 8, batch_max_len=6)
    assert (sampler.rank, sampler.world_size) == (0, 1)


def test_rank_comes_from_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed(monkeypatch, rank=1, world_size=4)
    sampler = MultipackBatchSampler([3] * 8, 6)
    assert (sampler.rank, sampler.world_size) == (1, 4)


# State.


def test_state_after_an_epoch_leaves_nothing_of_it_and_then_the_next() -> None:
    sampler = MultipackBatchSampler(text_lengths(100), 4096, 3)
    list(sampler)
    again = restored(sampler.state_dict(), text_lengths(100), 4096, 3)
    assert (len(again), list(again)) == (0, [])
    sampler.set_epoch(1)
    again.set_epoch(1)
    assert list(again) == list(sampler) != []


def test_set_epoch_to_the_epoch_of_the_state_goes_on_in_its_middle() -> None:
    sampler = MultipackBatchSampler(text_lengths(100), 4096, 3)
    sampler.set_epoch(2)
    whole = list(sampler)
    iterator = iter(sampler)
    next(iterator)
    again = restored(sampler.state_dict(), text_lengths(100), 4096, 3)
    assert again.epoch == 2
    again.set_epoch(2)
    assert len(again) == len(whole) - 1
    assert list(again) == whole[1:]
    assert len(again) == len(whole), "what was left is given; the epoch is whole again"
    assert list(again) == whole


def test_resuming_twice_in_one_epoch_counts_from_its_start() -> None:
    sampler = MultipackBatchSampler(text_lengths(200), 4096, 2)
    whole = list(sampler)
    state = sampler.state_dict(batches_given=3)
    for position in range(4, len(whole)):
        again = restored(state, text_lengths(200), 4096, 2)
        assert next(iter(again)) == whole[position - 1]
        state = again.state_dict(batches_given=1)
    assert len(whole) > 8


def test_abandoned_iteration_does_not_count() -> None:
    sampler = MultipackBatchSampler([5] * 10, 5)
    old, new = iter(sampler), iter(sampler)
    next(old)
    next(new)
    next(old)
    assert sampler.state_dict()["packs_given"] == 1


def test_state_of_a_seeded_sampler_is_resumed_and_of_another_order_refused() -> None:
    def made(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        order = RandomSampler(range(50), generator=generator)
        return {"sampler": order, "lengths": text_lengths(50), "batch_max_len": 4096}

    sampler = MultipackBatchSampler(**made(1))
    whole = list(sampler)
    state = sampler.state_dict(batches_given=2)
    assert list(restored(state, **made(1))) == whole[2:]
    with pytest.raises(StateError, match="another order in epoch 0"):
        len(restored(state, **made(2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 5000}, "capacity=4096 where this pipeline has 5000"),
        ({"seed": 1}, "seed=0 where this pipeline has 1"),
        ({"algorithm": "first_fit"}, "algorithm='best'"),
        ({"lengths": text_lengths(100)[::-1]}, "lengths="),
        ({"lengths": text_lengths(99)}, "num_samples=100 where this pipeline has 99"),
    ],
)
def test_state_of_other_settings_is_refused_with_their_names(
    change: dict[str, Any], message: str
) -> None:
    settings = {"lengths": text_lengths(100), "capacity": 4096}
    state = MultipackBatchSampler(**settings).state_dict()
    with pytest.raises(StateError, match=message):
        restored(state, **settings | change)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "x"}, {"version": 2}, {"epoch": -1}, {"epoch": None}, {"packs_given": "1"},
        {"config": None},
    ],
)  # fmt: skip
def test_damaged_state_is_refused(change: dict[str, Any]) -> None:
    state = MultipackBatchSampler([3] * 9, 6).state_dict()
    with pytest.raises(StateError):
        restored(state | change, [3] * 9, 6)


def test_state_with_more_packs_than_there_are_is_refused() -> None:
    state = MultipackBatchSampler([3] * 9, 6).state_dict()
    with pytest.raises(StateError, match="6 packs given of 5"):
        len(restored(state | {"packs_given": 6}, [3] * 9, 6))


@pytest.mark.parametrize("batches_given", [-1, 6])
def test_batches_that_were_never_given_are_refused(batches_given: int) -> None:
    with pytest.raises(ValueError, match=r"is not in 0\.\.5"):
        MultipackBatchSampler([3] * 9, 6).state_dict(batches_given=batches_given)


# Through a DataLoader.


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
@pytest.mark.parametrize("has_sampler", [False, True])
def test_loader_gives_the_batches_of_each_epoch_and_resumes(
    num_workers: int, has_sampler: bool
) -> None:
    lengths = text_lengths(200)
    settings: dict[str, Any] = {"lengths": lengths, "capacity": 4096, "batch_size": 2}
    if has_sampler:
        settings["sampler"] = RandomSampler(range(200))
    # The same sampler again: a random one of torch's would have to be seeded.
    check_loader(MultipackBatchSampler(**settings), 200, num_workers, resumes=not has_sampler)


def test_lengths_may_be_a_tensor_or_a_list_or_small_integers() -> None:
    lengths = text_lengths(30)
    expected = list(MultipackBatchSampler(lengths, 4096))
    for given_lengths in (lengths.tolist(), torch.tensor(lengths), lengths.astype(np.uint16)):
        assert list(MultipackBatchSampler(given_lengths, 4096)) == expected


# Faults of axolotl's and imoneoi's samplers, each reproduced there.


def test_regression_overlong_sample_does_not_silently_overfill_a_pack() -> None:
    with pytest.raises(ValueError, match=r"Sample 1 has length 3000.*overlong='drop'"):
        MultipackBatchSampler(sampler=range(2), lengths=[100, 3000], batch_max_len=2048)
    with pytest.raises(ValueError, match=r"capacity of 100 \(aligned to 64\)"):
        MultipackBatchSampler([64, 65], 100, align=64)


def test_regression_no_sample_is_dropped_silently() -> None:
    lengths = [100, 3000, 200, 5000]
    sampler = MultipackBatchSampler(lengths, 2048, overlong="drop")
    assert sampler.num_overlong == 2
    assert sorted(i for batch in sampler for pack in batch for i in pack) == [0, 2]


@pytest.mark.parametrize("sequential", [False, True])
def test_regression_drop_last_with_few_packs_is_a_clear_error(sequential: bool) -> None:
    # Axolotl's raised IndexError.
    sampler = MultipackBatchSampler(
        sampler=range(3), lengths=[9] * 3, batch_size=5, batch_max_len=10, sequential=sequential
    )
    with pytest.raises(ValueError, match=r"3 packs .* a step of 5 .*Use drop_last=False"):
        len(sampler)


def test_regression_statistics_are_those_of_what_is_given() -> None:
    # 7 packs; the last batch, of 3, is left out. Axolotl's counted its tokens, and not its room.
    sampler = MultipackBatchSampler(
        sampler=range(7), lengths=[9] * 7, batch_size=4, batch_max_len=10, drop_last=True
    )
    assert sum(len(pack) for batch in sampler for pack in batch) == 4
    assert sampler.num_dropped == 3
    assert sampler.efficiency() == 0.9


def test_regression_gathered_efficiency_is_not_0() -> None:
    sampler = MultipackBatchSampler([9] * 7, 10)
    assert sampler.gather_efficiency() == 0.9


def test_regression_length_is_that_of_the_new_epoch() -> None:
    # An order that packs badly first: 6 packs of long and short, then 8.
    class Orders:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([0, 1, 2, 3] if self.epoch == 0 else [0, 2, 1, 3])

    sampler = MultipackBatchSampler(
        sampler=Orders(), lengths=[6, 6, 4, 4], batch_max_len=10, sequential=True
    )
    found = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        found.append((len(sampler), len(list(sampler))))
    assert found == [(3, 3), (2, 2), (3, 3)]


def test_regression_every_epoch_has_as_many_batches_as_len_says() -> None:
    lengths = text_lengths(300)
    samplers = ranks(3, lengths, 4096, 2, algorithm="sequential")
    numbers = set()
    for epoch in range(20):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        numbers.add(len(packs_of(samplers)))
    assert len(numbers) > 1, "epochs differ, or this test shows nothing"


def test_regression_one_oversize_sample_does_not_end_the_epoch() -> None:
    lengths = text_lengths(1000, 2048)
    lengths[700] = 5000
    for overlong, num in (("drop", 999), ("alone", 1000)):
        packs = packs_of(ranks(2, lengths, 2048, overlong=overlong, end="pad"))
        assert len({i for pack in packs for i in pack}) == num


def test_regression_the_ragged_tail_is_not_lost() -> None:
    samplers = ranks(4, [10] * 13, 10, 2)
    packs = packs_of(samplers)
    assert len(packs) == 16
    assert {i for pack in packs for i in pack} == set(range(13))
    assert samplers[0].num_repeated == 3
    assert packs[13:] == packs[:3], "repeated from the start of the epoch"


def test_regression_no_rank_is_left_without_batches() -> None:
    samplers = ranks(8, [10] * 3, 10)
    packs = packs_of(samplers)
    assert [len(sampler) for sampler in samplers] == [1] * 8
    assert Counter(i for pack in packs for i in pack).total() == 8
    assert samplers[0].num_repeated == 5
    with pytest.raises(ValueError, match=r"3 packs nothing would be given.*world_size=8.*'pad'"):
        len(ranks(8, [10] * 3, 10, end="drop")[0])


# Errors.


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lengths": [], "capacity": 5}, ValueError, "lengths is empty"),
        ({"lengths": [1]}, TypeError, "capacity is missing"),
        ({"lengths": [1], "capacity": 5, "batch_max_len": 5}, TypeError, "mean the same"),
        ({"lengths": [1], "capacity": 5.5}, TypeError, "capacity=5.5 must be an integer"),
        ({"lengths": [1], "capacity": 0}, ValueError, "capacity is 0"),
        ({"lengths": [1.5], "capacity": 5}, TypeError, "lengths must be integers"),
        ({"lengths": [1, 0], "capacity": 5}, ValueError, "Sample 1 has length 0, below 1"),
        ({"lengths": [[1, 2]], "capacity": 5}, ValueError, "shape"),
        ({"lengths": [1], "capacity": 5, "align": 0}, ValueError, "align is 0"),
        ({"lengths": [1], "capacity": 5, "align": 6}, ValueError, "align=6 is above capacity=5"),
        ({"lengths": [1], "capacity": 5, "max_samples": 0}, ValueError, "max_samples is 0"),
        ({"lengths": [1], "capacity": 5, "batch_size": 0}, ValueError, "batch_size"),
        ({"lengths": [1], "capacity": 5, "algorithm": "ffd"}, ValueError, "algorithm='ffd'"),
        ({"lengths": [1], "capacity": 5, "overlong": "cut"}, ValueError, "overlong='cut'"),
        ({"lengths": [1], "capacity": 5, "end": "cut"}, ValueError, "end='cut'"),
        ({"lengths": [1], "capacity": 5, "rank": 1}, TypeError, "give both"),
        ({"lengths": [1], "capacity": 5, "rank": 1, "world_size": 1}, ValueError, "rank=1"),
        ({"lengths": [1], "capacity": 5, "algin": 8}, TypeError, "Did you mean 'align'"),
        (
            {"lengths": [1], "capacity": 5, "sequential": True, "algorithm": "best"},
            ValueError,
            "contradicts",
        ),
        (
            {"lengths": RandomSampler(range(3)), "capacity": 5},
            TypeError,
            "lengths is a RandomSampler. With a sampler, give the arguments",
        ),
        (
            {
                "lengths": [1],
                "capacity": 5,
                "sampler": DistributedSampler(range(4), num_replicas=2, rank=0),
            },
            TypeError,
            "each of 2 ranks samples of its own",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MultipackBatchSampler(**settings)


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        ([], ValueError, "gives no index"),
        ([0, 2], ValueError, "gives index 2, but lengths has 2 entries"),
        ([-1], ValueError, "gives index -1"),
        ([[0], [1]], TypeError, "integer"),
    ],
)
def test_wrong_orders_are_refused(sampler: Any, error: type[Exception], message: str) -> None:
    multipack = MultipackBatchSampler([1, 1], 5, sampler=sampler)
    with pytest.raises(error, match=message):
        len(multipack)


def test_nothing_but_overlong_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="leaves out all 2, which are above the capacity of 5"):
        len(MultipackBatchSampler([6, 7], 5, overlong="drop"))


def test_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="epoch=-1 is negative"):
        MultipackBatchSampler([1], 5).set_epoch(-1)


def test_import_leaves_numba_alone() -> None:
    code = (
        "import sys, energon_lite.samplers as s; s.MultipackBatchSampler; "
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
