from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.steps import _windows_of_steps
from energon_lite.core.errors import StateError
from energon_lite.samplers import SplitModalityBatchSampler

from .shared import Steps, check_loader, distributed, steps_of

Pairs = list[tuple[Any, int]]


def mixed(num: int, share_of_text: float = 0.2) -> Pairs:
    """Samples with images, and fewer and shorter ones without."""
    random = np.random.Generator(np.random.Philox(7))
    is_text = random.random(num) < share_of_text
    lengths = np.rint(random.lognormal(np.log(300), 0.8, num)) + np.where(is_text, 1, 577)
    return [(not text, int(length)) for text, length in zip(is_text, lengths, strict=True)]


def ranks(world_size: int, *args: Any, **settings: Any) -> list[SplitModalityBatchSampler]:
    return [
        SplitModalityBatchSampler(*args, rank=rank, num_replicas=world_size, **settings)
        for rank in range(world_size)
    ]


def alone(*args: Any, **settings: Any) -> SplitModalityBatchSampler:
    return ranks(1, *args, **settings)[0]


def samples_of(steps: Steps) -> list[int]:
    return [index for step in steps for batch in step for index in batch]


def as_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


# Laws.


@st.composite
def settings_and_pairs(draw: st.DrawFn) -> tuple[Pairs, int, dict[str, Any]]:
    groups = st.sampled_from([True, False, "video", ("a", 1)])
    pairs = draw(st.lists(st.tuples(groups, st.integers(0, 30)), min_size=1, max_size=70))
    world_size, batch_size = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    return (
        pairs,
        world_size,
        {
            "global_batch_size": world_size * batch_size * draw(st.integers(1, 2)),
            "batch_size": batch_size,
            "window": draw(st.integers(1, 8)),
            "longest_first": draw(st.booleans()),
            "seed": draw(st.integers(0, 3)),
            "end": draw(st.sampled_from(["pad", "drop"])),
        },
    )


def fills_no_step(pairs: Pairs, settings: dict[str, Any]) -> bool:
    counts = Counter(group for group, _ in pairs)
    return settings["end"] == "drop" and max(counts.values()) < settings["global_batch_size"]


@given(settings_and_pairs(), st.integers(0, 5))
def test_every_sample_comes_once_on_some_rank_or_is_counted(
    drawn: tuple[Pairs, int, dict[str, Any]], epoch: int
) -> None:
    pairs, world_size, settings = drawn
    samplers = ranks(world_size, pairs, **settings)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    first = samplers[0]
    if fills_no_step(pairs, settings):
        with pytest.raises(ValueError, match="nothing would be given"):
            len(first)
        return
    steps = steps_of(samplers)
    counts = Counter(samples_of(steps))
    sizes = Counter(group for group, _ in pairs)
    step_size = settings["global_batch_size"]
    if settings["end"] == "drop":
        assert first.num_repeated == 0
        assert first.num_dropped == sum(size % step_size for size in sizes.values())
        assert max(counts.values()) == 1
        assert len(counts) == len(pairs) - first.num_dropped
    else:
        assert first.num_dropped == 0
        assert first.num_repeated == sum(-size % step_size for size in sizes.values())
        assert len(counts) == len(pairs)
        assert counts.total() == len(pairs) + first.num_repeated
        for group, size in sizes.items():
            times = [counts[i] for i, pair in enumerate(pairs) if pair[0] == group]
            # Whoever is repeated is so about as often as the others of the group.
            assert max(times) - min(times) <= 1
            assert sum(times) == size + -size % step_size


@given(settings_and_pairs())
def test_every_step_is_of_one_group_and_every_batch_is_whole(
    drawn: tuple[Pairs, int, dict[str, Any]],
) -> None:
    pairs, world_size, settings = drawn
    if fills_no_step(pairs, settings):
        return
    steps = steps_of(ranks(world_size, pairs, **settings))
    in_a_step = settings["global_batch_size"] // (world_size * settings["batch_size"])
    assert steps
    for start in range(0, len(steps), in_a_step):
        step = steps[start : start + in_a_step]
        assert len({pairs[i][0] for i in samples_of(step)}) == 1
        assert all(len(batch) == settings["batch_size"] for ranks in step for batch in ranks)
    if settings["longest_first"]:
        given_lengths = [pairs[i][1] for i in samples_of(steps)]
        assert max(given_lengths) in [pairs[i][1] for i in samples_of(steps[:in_a_step])]


@given(settings_and_pairs(), st.integers(0, 4), st.data())
def test_resuming_gives_exactly_the_rest_and_after_whole_steps_on_any_number_of_ranks(
    drawn: tuple[Pairs, int, dict[str, Any]], epoch: int, data: st.DataObject
) -> None:
    pairs, world_size, settings = drawn
    if fills_no_step(pairs, settings):
        return
    samplers = ranks(world_size, pairs, **settings)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    whole = steps_of(samplers)
    step_size = settings["global_batch_size"]
    num_given = data.draw(st.integers(0, len(whole)))
    samplers = ranks(world_size, pairs, **settings)
    for rank, sampler in enumerate(samplers):
        sampler.set_epoch(epoch)
        before = list(islice(sampler, num_given))
        assert before == [step[rank] for step in whole[:num_given]]
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)

    again = ranks(world_size, pairs, **settings)
    for sampler in again:
        sampler.load_state_dict(as_json(states[0]))
    assert again[0].epoch == epoch
    num_repeated = again[0].num_repeated
    assert steps_of(again) == whole[num_given:]

    if num_given * settings["batch_size"] * world_size % step_size:
        return
    other_size = data.draw(st.sampled_from([n for n in range(1, 9) if step_size % n == 0]))
    elsewhere = ranks(other_size, pairs, **settings | {"batch_size": None})
    for sampler in elsewhere:
        sampler.load_state_dict(as_json(states[0]))
    assert elsewhere[0].num_repeated == num_repeated
    left, found = samples_of(whole[num_given:]), steps_of(elsewhere)
    assert len(found) * step_size == len(left)
    for number, step in enumerate(found):
        expected = left[number * step_size : (number + 1) * step_size]
        assert sorted(samples_of([step])) == sorted(expected)


@given(settings_and_pairs())
def test_efficiency_and_padding_are_of_what_is_given(
    drawn: tuple[Pairs, int, dict[str, Any]],
) -> None:
    pairs, world_size, settings = drawn
    if fills_no_step(pairs, settings):
        return
    samplers = ranks(world_size, pairs, **settings)
    tokens = area = room = 0
    for step in steps_of(samplers):
        areas = [len(batch) * max(pairs[i][1] for i in batch) for batch in step]
        tokens += sum(pairs[i][1] for batch in step for i in batch)
        area += sum(areas)
        room += max(areas) * world_size
    for sampler in samplers:
        assert sampler.efficiency() == pytest.approx(tokens / room if room else 1)
        assert sampler.padding() == pytest.approx(1 - tokens / area if area else 0)


def test_set_epoch_gives_other_steps_and_the_same_again() -> None:
    sampler = alone(mixed(2000), 50)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert epochs[0] == epochs[2]
    sets = [{frozenset(batch) for batch in batches} for batches in epochs]
    assert not sets[0] & sets[1]


def test_samples_of_a_small_group_meet_others_in_each_epoch() -> None:
    sampler = alone([(True, length) for length in range(800)], 50, window=64)
    first = {frozenset(batch) for batch in sampler}
    sampler.set_epoch(1)
    assert not first & {frozenset(batch) for batch in sampler}


def test_seed_gives_another_order() -> None:
    first, second = (list(alone(mixed(100), 8, seed=seed)) for seed in (0, 1))
    assert first != second


def test_order_of_an_epoch_is_the_same_in_every_version() -> None:
    # To change it would break the resuming of runs that are under way.
    pairs = [("a", 6), ("b", 5), ("a", 4), ("a", 3), ("b", 2), ("a", 5), ("a", 5)]
    assert steps_of(ranks(2, pairs, 2)) == GOLDEN


GOLDEN: Steps = [[[0], [2]], [[6], [3]], [[6], [5]], [[1], [4]]]


# What the steps are like.


def test_ranks_of_a_step_have_samples_of_like_lengths() -> None:
    pairs = mixed(20_000)
    narrow, wide = (ranks(8, pairs, 128, window=window)[0] for window in (64, 1))
    assert narrow.efficiency() > 0.88 > 0.6 > wide.efficiency()
    assert narrow.padding() < 0.1


def test_order_of_steps_is_shuffled_over_groups_and_lengths() -> None:
    pairs = mixed(20_000)
    steps = steps_of(ranks(2, pairs, 16))
    longest = [max(pairs[i][1] for i in samples_of([step])) for step in steps]
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.1


def test_a_small_group_is_sorted_in_windows_as_large_as_any() -> None:
    # 6,400 of 128,000 samples: in windows of all groups they would come 32 at a time.
    lengths = np.random.Generator(np.random.Philox(3)).permutation(128_000) % 6400
    groups = np.arange(128_000) < 6400
    sampler = alone(lengths, 64, groups=groups, window=10)
    spreads: dict[bool, list[int]] = {True: [], False: []}
    for batch in sampler:
        spreads[bool(groups[batch[0]])].append(int(np.ptp(lengths[batch])))
    assert len(spreads[True]) == 100
    # The groups draw from one range. Each tenth of a window would have 640, sorted twice 320.
    assert np.median(spreads[False]) == pytest.approx(320, rel=0.2)
    assert np.median(spreads[True]) == pytest.approx(320, rel=0.2)


def test_windows_of_a_group_are_of_about_equal_size() -> None:
    # No more than a quarter of the group, so four windows; and not three of 3 and none.
    steps = np.zeros(9, int)
    windows, halves = _windows_of_steps(np.array([9]), 4, steps, np.arange(9))
    assert (windows - windows[0]).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert (np.bincount((halves - halves[0] + 1) // 2)).max() <= 4


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 12))
def test_windows_and_those_half_a_window_on_are_of_one_group_and_not_too_large(
    counts: list[int], window: int
) -> None:
    groups = np.repeat(np.arange(len(counts)), counts)
    places = np.array([place for count in counts for place in range(count)], int)
    windows, halves = _windows_of_steps(np.array(counts), window, groups, places)
    for cut in (windows, (halves + 1) // 2):
        assert (np.diff(cut) >= 0).all()
        for number in set(cut.tolist()):
            inside = groups[cut == number]
            assert len(set(inside.tolist())) == 1
            assert len(inside) <= window
            assert len(inside) <= max(1, -(-counts[inside[0]] // 4))


def test_dropping_does_not_choose_by_length() -> None:
    lengths = np.arange(1, 100)
    sampler = alone(lengths, 10, groups=np.zeros(99, int), end="drop", window=2)
    dropped = Counter[int]()
    for epoch in range(30):
        sampler.set_epoch(epoch)
        assert sampler.num_dropped == 9
        dropped.update(set(range(99)) - {i for batch in sampler for i in batch})
    assert len(dropped) > 60
    assert 40 < sum(lengths[i] * n for i, n in dropped.items()) / dropped.total() < 60


def test_several_batches_of_a_step_are_of_like_lengths_on_all_ranks() -> None:
    pairs = [(True, length) for length in range(16)]
    steps = steps_of(ranks(2, pairs, 16, batch_size=2))
    assert [sorted(samples_of([step]), reverse=True) for step in steps] == [
        [15, 14, 13, 12], [11, 10, 9, 8], [7, 6, 5, 4], [3, 2, 1, 0],
    ]  # fmt: skip


def test_longest_first_swaps_one_step_with_the_first() -> None:
    pairs = mixed(500)
    plain, swapped = (list(alone(pairs, 10, longest_first=flag)) for flag in (False, True))
    place = plain.index(swapped[0])
    assert max(length for _, length in pairs) in [pairs[i][1] for i in swapped[0]]
    plain[0], plain[place] = plain[place], plain[0]
    assert plain == swapped


# Ways to call it.


def test_prismatics_keywords_are_taken() -> None:
    pairs = mixed(100)
    sampler = SplitModalityBatchSampler(
        dataset=range(100), modality_lengths=pairs, global_batch_size=8, num_replicas=4, rank=1,
        seed=3, drop_last=False,
    )  # fmt: skip
    assert list(sampler) == list(ranks(4, pairs, 8, seed=3)[1])
    assert alone(pairs, 8, drop_last=True).end == "drop"


def test_groups_and_lengths_may_be_arrays_tensors_or_lists() -> None:
    pairs = mixed(100)
    groups, lengths = [group for group, _ in pairs], [length for _, length in pairs]
    expected = list(alone(pairs, 8))
    for given_lengths in (lengths, np.array(lengths, np.uint16), torch.tensor(lengths)):
        for given_groups in (groups, np.array(groups), torch.tensor(groups), map(str, groups)):
            assert list(alone(given_lengths, 8, groups=given_groups)) == expected
    assert list(alone(torch.tensor(pairs), 8)) == expected


def test_rank_comes_from_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed(monkeypatch, rank=1, world_size=4)
    sampler = SplitModalityBatchSampler(mixed(100), 8)
    assert (sampler.rank, sampler.world_size, sampler.batch_size) == (1, 4, 2)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_loader_gives_the_batches_of_each_epoch_and_resumes(num_workers: int) -> None:
    check_loader(alone(mixed(200), 16), 200, num_workers)


# State.


def test_set_epoch_to_the_epoch_of_the_state_goes_on_in_its_middle() -> None:
    sampler = alone(mixed(100), 8)
    sampler.set_epoch(2)
    whole = list(sampler)
    again = alone(mixed(100), 8)
    again.load_state_dict(as_json(sampler.state_dict(batches_given=1)))
    again.set_epoch(2)
    assert len(again) == len(whole) - 1
    assert list(again) == whole[1:]
    assert len(again) == len(whole), "what was left is given; the epoch is whole again"
    assert list(again) == whole


def test_state_after_an_epoch_leaves_nothing_of_it() -> None:
    sampler, again = alone(mixed(100), 8), alone(mixed(100), 8)
    list(sampler)
    again.load_state_dict(as_json(sampler.state_dict()))
    assert (len(again), again.efficiency(), again.padding(), list(again)) == (0, 1, 0, [])
    again.load_state_dict(as_json(sampler.state_dict()))
    again.set_epoch(1)
    sampler.set_epoch(1)
    assert list(again) == list(sampler) != []


def test_resuming_twice_in_one_epoch_counts_from_its_start() -> None:
    whole = list(alone(mixed(100), 8))
    state = alone(mixed(100), 8).state_dict(batches_given=0)
    for batch in whole:
        again = alone(mixed(100), 8)
        again.load_state_dict(as_json(state))
        assert next(iter(again)) == batch
        state = again.state_dict()
    assert len(whole) > 8


def test_abandoned_iteration_does_not_count_and_keeps_to_its_epoch() -> None:
    sampler = alone(mixed(100), 8)
    whole = list(sampler)
    old, new = iter(sampler), iter(sampler)
    next(old)
    next(new)
    next(old)
    assert sampler.state_dict()["samples_given"] == 8
    sampler.set_epoch(1)
    assert list(old) == whole[2:]


def test_state_within_a_step_is_refused_where_no_whole_batches_are_left() -> None:
    pairs = [(True, 1)] * 24
    sampler = ranks(2, pairs, 12, batch_size=2)[0]
    state = sampler.state_dict(batches_given=1)
    other = ranks(3, pairs, 12)[0]
    other.load_state_dict(state)
    with pytest.raises(StateError, match=r"within a step, of which 8 samples are left.*whole"):
        len(other)
    same = ranks(1, pairs, 12, batch_size=4)[0]
    same.load_state_dict(state)
    assert len(same) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 3}, "window=64 where this pipeline has 3"),
        ({"seed": 1}, "seed=0 where this pipeline has 1"),
        ({"global_batch_size": 4}, "global_batch_size=8 where this pipeline has 4"),
        ({"end": "drop"}, "end='pad'"),
        ({"longest_first": True}, "longest_first=False"),
        ({"modality_lengths": mixed(100)[::-1]}, "lengths="),
        ({"modality_lengths": [(0, length) for _, length in mixed(100)]}, "groups="),
        ({"modality_lengths": mixed(99)}, "num_samples=100 where this pipeline has 99"),
    ],
)
def test_state_of_other_settings_is_refused_with_their_names(
    change: dict[str, Any], message: str
) -> None:
    settings = {"modality_lengths": mixed(100), "global_batch_size": 8}
    with pytest.raises(StateError, match=message):
        alone(**settings | change).load_state_dict(alone(**settings).state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"format": "energon_lite.multipack"}, {"version": 2}, {"epoch": -1}, {"epoch": None},
        {"samples_given": "1"}, {"config": None},
    ],
)  # fmt: skip
def test_damaged_state_is_refused(change: dict[str, Any]) -> None:
    sampler = alone(mixed(100), 8)
    with pytest.raises(StateError):
        sampler.load_state_dict(sampler.state_dict() | change)


def test_state_with_more_samples_than_there_are_is_refused() -> None:
    sampler = alone([(True, 1)] * 9, 3)
    sampler.load_state_dict(sampler.state_dict() | {"samples_given": 12})
    with pytest.raises(StateError, match="12 samples given of 9"):
        len(sampler)


# Faults of prismatic's and LLaVA's samplers, each reproduced there.


@pytest.mark.parametrize("group", [True, False])
def test_regression_a_data_set_of_one_modality_is_not_an_error(group: bool) -> None:
    steps = steps_of(ranks(2, [(group, i) for i in range(16)], 8))
    assert sorted(samples_of(steps)) == list(range(16))


@pytest.mark.parametrize("num", [1, 3, 7])
def test_regression_a_group_smaller_than_half_a_global_batch_fills_one(num: int) -> None:
    pairs = [(True, 5)] * 32 + [(False, 5)] * num
    samplers = ranks(4, pairs, 16)
    counts = Counter(samples_of(steps_of(samplers)))
    assert samplers[0].num_repeated == 16 - num
    assert len(counts) == 32 + num
    assert sum(counts[i] for i in range(32, 32 + num)) == 16


def test_regression_a_global_batch_that_ranks_cannot_share_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"=10 is not a multiple of num_replicas=4.* 8 or 12"):
        ranks(4, mixed(100), 10)
    with pytest.raises(ValueError, match="batch_size=3 times num_replicas=2"):
        ranks(2, mixed(100), 8, batch_size=3)


def test_regression_length_counts_the_remainders_of_all_groups() -> None:
    # Prismatic's said 36 samples and gave 40.
    pairs = [(True, 5)] * 18 + [(False, 5)] * 18
    samplers = ranks(2, pairs, 4)
    assert [len(sampler) for sampler in samplers] == [10, 10]
    assert len(steps_of(samplers)) == 10
    assert samplers[0].num_repeated == 4


def test_regression_ranks_do_not_mix_long_and_short_samples() -> None:
    # Prismatic's deals each rank long samples and short ones, until the sums are alike.
    pairs = [(True, 1000)] * 20 + [(True, 10)] * 20
    sampler, other = ranks(2, pairs, 4, window=5)
    assert len(steps_of([sampler, other])) == 10
    assert sampler.padding() < 0.2


def test_regression_remainders_of_groups_are_no_mixed_batch() -> None:
    # LLaVA's puts the two last batches into one.
    pairs = [(True, 5)] * 13 + [(False, 5)] * 11
    for end in ("pad", "drop"):
        for step in steps_of(ranks(2, pairs, 4, end=end)):
            assert len({pairs[i][0] for i in samples_of([step])}) == 1


def test_regression_lengths_of_zero_are_allowed() -> None:
    # LLaVA's wants none, since the sign says what has an image.
    assert sorted(samples_of(steps_of(ranks(1, [(True, 0), (False, 0)], 1)))) == [0, 1]


def test_regression_torchs_global_randomness_has_no_effect() -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        found.append(list(alone(mixed(100), 8)))
        assert torch.initial_seed() == seed
    assert found[0] == found[1]


def test_regression_dropping_is_supported() -> None:
    sampler = alone(mixed(100), 8, drop_last=True)
    counts = Counter(i for batch in sampler for i in batch)
    assert max(counts.values()) == 1
    assert counts.total() == 100 - sampler.num_dropped
    assert sampler.num_dropped > 0


# Errors.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"modality_lengths": []}, ValueError, "lengths is empty"),
        ({"modality_lengths": [1, 2]}, TypeError, "pairs"),
        ({"modality_lengths": [(True, 1, 2)]}, TypeError, "pairs"),
        ({"modality_lengths": [([], 1)]}, TypeError, "unhashable"),
        ({"modality_lengths": [(True, 1.5)]}, TypeError, "must be integers, not float64"),
        ({"modality_lengths": [(True, 1), (True, -1)]}, ValueError, "Sample 1 has length -1"),
        ({"modality_lengths": [1, 2], "groups": [1]}, ValueError, "groups has 1 entries"),
        ({"dataset": range(3)}, ValueError, "dataset has 3 samples, but modality_lengths 2"),
        ({"global_batch_size": 0}, ValueError, "global_batch_size=0 must be at least 1"),
        ({"global_batch_size": 2.0}, TypeError, "global_batch_size=2.0 must be an integer"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"window": 0}, ValueError, "window=0"),
        ({"seed": "x"}, TypeError, "seed='x'"),
        ({"end": "cut"}, ValueError, "end='cut' is not one of pad, drop"),
        ({"end": "pad", "drop_last": True}, ValueError, "contradicts"),
        ({"world_size": 1}, TypeError, "mean the same"),
        ({"rank": None}, TypeError, "rank=None and num_replicas=1: give both"),
        ({"rank": 1}, ValueError, "rank=1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings = {
        "modality_lengths": [(True, 1), (False, 2)], "global_batch_size": 2, "rank": 0,
        "num_replicas": 1,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        SplitModalityBatchSampler(**settings | change)


def test_groups_that_fill_no_step_with_drop_are_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"epoch of 6 samples nothing .* step of 4 .*end='pad'"):
        len(alone([(i % 2, 1) for i in range(6)], 4, end="drop"))


def test_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="epoch=-1 is negative"):
        alone([(True, 1)], 1).set_epoch(-1)


def test_import_leaves_numba_alone() -> None:
    code = (
        "import sys, energon_lite.samplers as s; "
        "s.SplitModalityBatchSampler([(1, 2)], 1, rank=0, num_replicas=1).padding(); "
        "s.TokenBudgetBatchSampler([2], max_tokens=2, rank=0, world_size=1).padding(); "
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
