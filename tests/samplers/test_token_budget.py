from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.core.errors import StateError
from energon_lite.samplers import TokenBudgetBatchSampler
from energon_lite.samplers.windows import cut_epoch

from .shared import Steps, check_loader, distributed, steps_of, text_lengths


def ranks(world_size: int, *args: Any, **settings: Any) -> list[TokenBudgetBatchSampler]:
    return [
        TokenBudgetBatchSampler(*args, rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]


def alone(*args: Any, **settings: Any) -> TokenBudgetBatchSampler:
    return ranks(1, *args, **settings)[0]


def batches_of(steps: Steps) -> list[list[int]]:
    return [batch for step in steps for batch in step]


def restored(state: dict[str, Any], world_size: int, **settings: Any) -> Any:
    samplers = ranks(world_size, **settings)
    for sampler in samplers:
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return samplers


# Laws.

BUDGET = 40


def rising_steps(length: int) -> int:
    """A function of the length that falls and rises again, and refuses what is above the budget."""
    return 0 if length > BUDGET else 1 + (length * 7) % 5


@st.composite
def settings_and_lengths(draw: st.DrawFn) -> dict[str, Any]:
    overlong = draw(st.sampled_from(["error", "drop", "alone"]))
    align = draw(st.sampled_from([1, 1, 8]))
    most = BUDGET if overlong == "error" else 2 * BUDGET
    lengths = draw(st.lists(st.integers(1, most), min_size=1, max_size=70))
    if overlong == "drop":
        lengths.append(1)  # one that is left
    how: dict[str, Any] = draw(
        st.sampled_from(
            [{"max_tokens": BUDGET}, {"batch_size": 3}, {"batch_size_fn": rising_steps}]
        )
    )
    keys = st.lists(st.sampled_from(["a", "b", 3]), min_size=len(lengths), max_size=len(lengths))
    return {
        "lengths": lengths,
        **how,
        "overlong": overlong,
        "align": align,
        "window": draw(st.integers(1, 80)),
        "boundary_key": draw(st.none() | keys),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "drop_last": draw(st.booleans()),
        "end": draw(st.sampled_from(["pad", "drop"])),
    }


def limit_of(settings: dict[str, Any], length: int) -> int:
    length = -(-length // settings["align"]) * settings["align"]
    if "max_tokens" in settings:
        return BUDGET // length
    return settings["batch_size"] if "batch_size" in settings else rising_steps(length)


def gives_nothing(sampler: TokenBudgetBatchSampler) -> bool:
    try:
        return len(sampler) == 0
    except ValueError as error:
        message = str(error)
    assert "nothing would be given" in message
    assert sampler.drop_last or sampler.end == "drop"
    return True


@given(settings_and_lengths(), st.integers(1, 9), st.integers(0, 5))
def test_every_sample_comes_once_on_some_rank_or_is_counted(
    settings: dict[str, Any], world_size: int, epoch: int
) -> None:
    samplers = ranks(world_size, **settings)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    first, lengths = samplers[0], settings["lengths"]
    if gives_nothing(first):
        return
    counts = Counter(index for batch in batches_of(steps_of(samplers)) for index in batch)
    num_long = sum(limit_of(settings, length) < 1 for length in lengths)
    assert first.num_overlong == num_long
    left_out = num_long if settings["overlong"] == "drop" else 0
    assert counts.total() == len(lengths) - left_out - first.num_dropped + first.num_repeated
    if settings["end"] == "drop":
        assert first.num_repeated == 0
        assert max(counts.values()) == 1
    elif not settings["drop_last"]:
        assert first.num_dropped == 0
        assert len(counts) == len(lengths) - left_out


@given(settings_and_lengths(), st.integers(1, 4))
def test_no_batch_is_above_its_limit_or_of_two_keys(
    settings: dict[str, Any], world_size: int
) -> None:
    samplers = ranks(world_size, **settings)
    if gives_nothing(samplers[0]):
        return
    keys = settings["boundary_key"] or [0] * len(settings["lengths"])
    for batch in batches_of(steps_of(samplers)):
        assert len({keys[i] for i in batch}) == 1
        limit = limit_of(settings, max(settings["lengths"][i] for i in batch))
        assert len(batch) <= limit or (len(batch) == 1 and settings["overlong"] == "alone")


@given(
    settings_and_lengths(),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 3),
    st.data(),
)
def test_resuming_gives_exactly_the_rest_on_any_number_of_ranks(
    settings: dict[str, Any], world_size: int, other_size: int, epoch: int, data: st.DataObject
) -> None:
    settings |= {"end": "pad"}
    samplers = ranks(world_size, **settings)
    if gives_nothing(samplers[0]):
        return
    for sampler in samplers:
        sampler.set_epoch(epoch)
    whole = steps_of(samplers)
    num_batches = len(samplers[0]._planned().batches)
    num_given = data.draw(st.integers(0, len(whole)))
    samplers = ranks(world_size, **settings)
    for rank, sampler in enumerate(samplers):
        sampler.set_epoch(epoch)
        given_batches = list(islice(sampler, num_given))
        assert given_batches == [step[rank] for step in whole[:num_given]]
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)

    again = restored(states[0], world_size, **settings)
    assert again[0].epoch == epoch
    assert steps_of(again) == whole[num_given:]

    elsewhere = restored(states[0], other_size, **settings)
    left = batches_of(whole)[num_given * world_size : num_batches]
    num_repeated, num_dropped = elsewhere[0].num_repeated, elsewhere[0].num_dropped
    again = restored(states[0], other_size, **settings)
    num_more = data.draw(st.integers(0, len(again[0])))
    for sampler in again:
        list(islice(sampler, num_more))
    twice = restored(again[0].state_dict(), 1, **settings)
    found = batches_of(steps_of(elsewhere))
    assert found[: len(left)] == left
    assert sum(map(len, found[len(left) :])) == num_repeated
    assert num_dropped == (samplers[0].num_dropped if settings["drop_last"] else 0)
    assert batches_of(steps_of(twice)) == left[num_more * other_size :]


@given(settings_and_lengths(), st.integers(1, 4))
def test_efficiency_and_padding_are_of_what_is_given(
    settings: dict[str, Any], world_size: int
) -> None:
    samplers = ranks(world_size, **settings)
    if gives_nothing(samplers[0]):
        return
    lengths, align = settings["lengths"], settings["align"]
    tokens = area = room = 0
    for step in steps_of(samplers):
        areas = [-(-max(lengths[i] for i in batch) // align) * align * len(batch) for batch in step]
        tokens += sum(lengths[i] for batch in step for i in batch)
        area += sum(areas)
        room += max(areas) * world_size
    for sampler in samplers:
        assert sampler.efficiency() == pytest.approx(tokens / room)
        assert sampler.padding() == pytest.approx(1 - tokens / area)


# What the batches are like.


def test_set_epoch_gives_other_batches_and_the_same_again() -> None:
    for lengths in (text_lengths(20_000), np.arange(1, 1500)):
        sampler = alone(lengths, max_tokens=16_384)
        epochs = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            epochs.append(list(sampler))
        assert epochs[0] == epochs[2]
        sets = [{frozenset(batch) for batch in batches} for batches in epochs]
        assert len(sets[0] & sets[1]) < len(sets[0]) / 10


def test_seed_gives_another_order() -> None:
    first, second = (list(alone(text_lengths(99), max_tokens=4096, seed=seed)) for seed in (0, 1))
    assert first != second


def test_order_of_an_epoch_is_the_same_in_every_version() -> None:
    # To change it would break the resuming of runs that are under way.
    assert steps_of(ranks(2, [6, 5, 4, 3, 2, 5, 5, 1], max_tokens=10, window=3)) == GOLDEN


GOLDEN: Steps = [[[1, 5], [7, 4, 3]], [[0], [6, 2]]]


def test_little_is_padded() -> None:
    sampler = alone(text_lengths(50_000), max_tokens=16_384)
    assert sampler.padding() < 0.02
    assert sampler.efficiency() > 0.95


def test_without_shuffling_windows_go_from_long_to_short_and_back() -> None:
    sampler = alone([1, 3, 2, 4, 6, 5, 8, 7, 9], batch_size=1, window=3, shuffle=False)
    assert [sampler.lengths[i] for [i] in sampler] == [3, 2, 1, 4, 5, 6, 9, 8, 7]


def test_what_one_window_carries_over_the_next_one_cuts_first() -> None:
    lengths = np.tile(np.arange(1, 8), 2)
    cut = cut_epoch(np.arange(14), lengths, np.full(14, 3), window=7)
    assert [lengths[batch].tolist() for batch in cut.batches] == [
        [7, 6, 5], [4, 3, 2], [1, 1, 2], [3, 4, 5], [6, 7],
    ]  # fmt: skip
    assert cut.windows.tolist() == [0, 0, 1, 1, 1]
    assert cut.num_dropped == 0


def test_nothing_is_carried_over_for_long() -> None:
    # One shortest sample of all: in windows that all begin with the long ones, it would be last.
    lengths = text_lengths(50_000)
    lengths[0] = 1
    lengths[1:] += 5
    cut = cut_epoch(np.arange(50_000), lengths, 8192 // lengths, window=1000)
    waits = np.empty(50_000, int)
    waits[cut.batches.indices] = np.repeat(cut.windows, np.diff(cut.batches.offsets))
    waits -= np.arange(50_000) // 1000
    assert waits.min() == 0
    assert waits.max() == 1


def test_ranks_of_a_step_have_batches_of_like_lengths() -> None:
    lengths = text_lengths(20_000)
    samplers = ranks(8, lengths, batch_size=16, window=10_000)
    assert samplers[0].efficiency() > 0.93
    assert ranks(8, lengths, batch_size=16, window=16)[0].efficiency() < 0.4
    steps = steps_of(samplers)
    longest = [max(lengths[i] for i in step[0]) for step in steps]
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.2


def test_steps_stay_in_their_window() -> None:
    window = 1000
    sampler = alone(np.full(10_000, 7), batch_size=10, window=window)
    plain = alone(np.full(10_000, 7), batch_size=10, window=window, shuffle=False)
    assert [batch[0] // window for batch in plain] == [i // 100 for i in range(1000)]
    order = [index for batch in sampler for index in batch]
    assert sorted(order) == list(range(10_000)) != order


def test_overlong_sample_alone_is_counted_and_the_others_keep_the_budget() -> None:
    for window in (2, 5):
        sampler = alone([4, 30, 5, 5, 40], max_tokens=10, overlong="alone", window=window)
        batches = list(sampler)
        assert [1] in batches
        assert [4] in batches
        assert sampler.num_overlong == 2


def test_aligned_lengths_keep_the_budget() -> None:
    sampler = alone([9, 9, 9, 9], max_tokens=32, align=16)
    assert [len(batch) for batch in sampler] == [2, 2]
    assert sampler.padding() == pytest.approx(1 - 9 / 16)
    with pytest.raises(ValueError, match=r"length 33, above max_tokens=40 \(padded to a mult.* 16"):
        alone([33], max_tokens=40, align=16)


def test_batch_size_fn_is_called_once_for_each_length() -> None:
    calls: list[int] = []

    def size(length: int) -> int:
        calls.append(length)
        return 100 // length

    sampler = alone([5, 7, 5, 8, 5], batch_size_fn=size, align=4)
    assert sorted(calls) == [8]
    assert len(sampler) == 1
    assert calls == [8]


def test_lengths_may_be_a_tensor_or_a_list_or_small_integers() -> None:
    lengths = text_lengths(30)
    expected = list(alone(lengths, max_tokens=8192))
    for given_lengths in (lengths.tolist(), torch.tensor(lengths), lengths.astype(np.uint16)):
        assert list(alone(given_lengths, max_tokens=8192)) == expected


def test_rank_comes_from_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed(monkeypatch, rank=1, world_size=4)
    sampler = TokenBudgetBatchSampler([3] * 8, max_tokens=6)
    assert (sampler.rank, sampler.world_size) == (1, 4)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_loader_gives_the_batches_of_each_epoch_and_resumes(num_workers: int) -> None:
    check_loader(alone(text_lengths(200), max_tokens=8192), 200, num_workers)


# State.


def test_steps_stay_together_on_another_number_of_ranks() -> None:
    lengths = text_lengths(5000)
    settings: dict[str, Any] = {"lengths": lengths, "batch_size": 4, "window": 2500}
    first = ranks(8, **settings)[0]
    resumed = restored(first.state_dict(batches_given=5), 4, **settings)
    assert resumed[0].efficiency() > 0.9
    resumed[0].set_epoch(1)
    assert resumed[0].state_dict()["planned_for"] == 4


def test_set_epoch_to_the_epoch_of_the_state_goes_on_in_its_middle() -> None:
    settings: dict[str, Any] = {"lengths": text_lengths(100), "max_tokens": 8192}
    sampler = alone(**settings)
    sampler.set_epoch(2)
    whole = list(sampler)
    [again] = restored(sampler.state_dict(batches_given=1), 1, **settings)
    again.set_epoch(2)
    assert len(again) == len(whole) - 1
    assert list(again) == whole[1:]
    assert len(again) == len(whole), "what was left is given; the epoch is whole again"
    assert list(again) == whole


def test_state_after_an_epoch_leaves_nothing_of_it() -> None:
    settings: dict[str, Any] = {"lengths": text_lengths(100), "max_tokens": 8192}
    for end in ("pad", "drop"):
        samplers = ranks(3, **settings, end=end)
        steps_of(samplers)
        [again] = restored(samplers[0].state_dict(), 1, **settings, end="drop")
        left = [] if end == "pad" else list(again)
        assert len(left) < 3
        [again] = restored(ranks(1, **settings)[0].state_dict(), 1, **settings)
        list(again)
        [again] = restored(again.state_dict(), 1, **settings)
        assert (len(again), again.efficiency(), again.padding(), list(again)) == (0, 1, 0, [])


def test_abandoned_iteration_does_not_count_and_keeps_to_its_epoch() -> None:
    sampler = alone([5] * 10, max_tokens=5)
    whole = list(sampler)
    old, new = iter(sampler), iter(sampler)
    next(old)
    next(new)
    next(old)
    assert sampler.state_dict()["batches_given"] == 1
    sampler.set_epoch(1)
    assert list(old) == whole[2:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 3}, "window=10000 where this pipeline has 3"),
        ({"seed": 1}, "seed=0 where this pipeline has 1"),
        ({"max_tokens": 9000}, "max_tokens=8192 where this pipeline has 9000"),
        ({"align": 8}, "align=1 where this pipeline has 8"),
        ({"max_tokens": None, "batch_size": np.int64(2)}, "batch_size=None where .* has 2"),
        ({"max_tokens": None, "batch_size_fn": lambda length: 2}, "limits="),
        ({"shuffle": False}, "shuffle=True"),
        ({"drop_last": True}, "drop_last=False"),
        ({"overlong": "alone"}, "overlong='error'"),
        ({"boundary_key": range(100)}, "boundary_key=None"),
        ({"lengths": text_lengths(100)[::-1]}, "lengths="),
        ({"lengths": text_lengths(99)}, "num_samples=100 where this pipeline has 99"),
    ],
)
def test_state_of_other_settings_is_refused_with_their_names(
    change: dict[str, Any], message: str
) -> None:
    settings = {"lengths": text_lengths(100), "max_tokens": 8192}
    with pytest.raises(StateError, match=message):
        restored(alone(**settings).state_dict(), 1, **settings | change)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "x"}, {"version": 2}, {"epoch": -1}, {"epoch": None}, {"batches_given": "1"},
        {"config": None}, {"planned_for": 0}, {"planned_for": "2"},
    ],
)  # fmt: skip
def test_damaged_state_is_refused(change: dict[str, Any]) -> None:
    state = alone([3] * 9, max_tokens=6).state_dict()
    with pytest.raises(StateError):
        restored(state | change, 1, lengths=[3] * 9, max_tokens=6)


def test_state_with_more_batches_than_there_are_is_refused() -> None:
    state = alone([3] * 9, max_tokens=6).state_dict()
    [again] = restored(state | {"batches_given": 6}, 1, lengths=[3] * 9, max_tokens=6)
    with pytest.raises(StateError, match="6 batches given of 5"):
        len(again)


# Faults of infinibatch's bucketed read-ahead, each reproduced there.


def test_regression_windows_are_not_flushed() -> None:
    # Infinibatch's ends each window with a smaller batch: 40 % of these.
    lengths = text_lengths(20_000)
    batches = list(alone(lengths, batch_size=32, window=75))
    assert [len(batch) for batch in batches].count(32) == len(batches) == 625
    wasted = alone(text_lengths(20_000), max_tokens=16_384, window=1000)
    areas = [len(batch) * max(lengths[i] for i in batch) for batch in wasted]
    assert np.mean(areas) > 0.93 * 16_384


def test_regression_a_sample_above_the_budget_is_never_silent() -> None:
    with pytest.raises(ValueError, match=r"Sample 1 has length 11, above max_tokens=10.*'drop'"):
        alone([1, 11], max_tokens=10)
    with pytest.raises(ValueError, match=r"Sample 1 has length 11, for which batch_size_fn gives"):
        alone([1, 11], batch_size_fn=lambda length: 10 // length)
    sampler = alone([1, 11], batch_size_fn=lambda length: 10 // length, overlong="drop")
    assert (list(sampler), sampler.num_overlong) == ([[0]], 1)


def test_regression_keys_do_not_make_tiny_batches() -> None:
    # Infinibatch's looks at the key of neighbours only, when they are sorted by length.
    lengths = text_lengths(4000)
    sampler = alone(lengths, batch_size=20, boundary_key=np.arange(4000) % 4)
    batches = list(sampler)
    assert {len(batch) for batch in batches} == {20}
    assert all(len({i % 4 for i in batch}) == 1 for batch in batches)


def test_regression_resuming_reads_nothing_but_the_plan() -> None:
    # Infinibatch's reads the whole window again; here the state is a count.
    state = alone(text_lengths(20_000), max_tokens=16_384).state_dict(batches_given=100)
    assert len(json.dumps(state)) < 1000


def test_regression_a_window_smaller_than_a_batch_makes_whole_batches() -> None:
    sampler = alone([3] * 96, batch_size=32, window=10)
    assert [len(batch) for batch in sampler] == [32, 32, 32]


def test_regression_every_rank_has_as_many_batches() -> None:
    numbers = set()
    for epoch in range(20):
        samplers = ranks(3, text_lengths(300), max_tokens=4096, window=50)
        for sampler in samplers:
            sampler.set_epoch(epoch)
        numbers.add(len(steps_of(samplers)))
    assert len(numbers) > 1, "epochs differ, or this test shows nothing"


# Errors.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lengths": []}, ValueError, "lengths is empty"),
        ({"lengths": [1.5]}, TypeError, "must be integers, not float64"),
        ({"lengths": [1, 0]}, ValueError, "Sample 1 has length 0, below 1"),
        ({"lengths": [[1, 2]]}, ValueError, r"shape \(N,\)"),
        ({"max_tokens": None}, TypeError, "give one of max_tokens.*not none"),
        ({"batch_size": 2}, TypeError, "give one of max_tokens.*not several"),
        ({"max_tokens": 0}, ValueError, "max_tokens=0 must be at least 1"),
        ({"max_tokens": 5.5}, TypeError, "max_tokens=5.5 must be an integer"),
        ({"max_tokens": None, "batch_size": 0}, ValueError, "batch_size=0"),
        ({"max_tokens": None, "batch_size_fn": 3}, TypeError, "no function"),
        (
            {"max_tokens": None, "batch_size_fn": lambda length: length / 2},
            TypeError,
            r"batch_size_fn\(1\) gives 0.5",
        ),
        ({"window": 0}, ValueError, "window=0"),
        ({"align": 0}, ValueError, "align=0"),
        ({"boundary_key": [1]}, ValueError, "boundary_key has 1 entries, but lengths 2"),
        ({"boundary_key": [[], []]}, TypeError, "unhashable"),
        ({"overlong": "cut"}, ValueError, "overlong='cut'"),
        ({"end": "cut"}, ValueError, "end='cut'"),
        ({"seed": "x"}, TypeError, "seed='x'"),
        ({"rank": None}, TypeError, "rank=None and world_size=1: give both"),
        ({"rank": 1}, ValueError, "rank=1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings = {"lengths": [1, 2], "max_tokens": 5, "rank": 0, "world_size": 1}
    with pytest.raises(error, match=message):
        TokenBudgetBatchSampler(**settings | change)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": [6, 7], "max_tokens": 5, "overlong": "drop"}, "leaves out 2, which is all"),
        ({"lengths": [1, 2], "batch_size": 3, "drop_last": True}, "Use drop_last=False"),
        ({"lengths": [1, 2], "batch_size": 2, "end": "drop", "world_size": 2}, "there are 1"),
    ],
)
def test_epochs_without_any_batch_are_a_clear_error(settings: Any, message: str) -> None:
    sampler = ranks(settings.pop("world_size", 1), **settings)[0]
    with pytest.raises(ValueError, match=message):
        len(sampler)


def test_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="epoch=-1 is negative"):
        alone([1], max_tokens=5).set_epoch(-1)
