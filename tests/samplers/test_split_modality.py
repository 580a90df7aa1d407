from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite.core.errors import StateError
from energon_lite.extras.samplers import SplitModalityBatchSampler

from .shared import Steps, steps_of

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


def test_samples_of_a_small_group_meet_others_in_each_epoch() -> None:
    sampler = alone([(True, length) for length in range(800)], 50, window=64)
    first = {frozenset(batch) for batch in sampler}
    sampler.set_epoch(1)
    assert not first & {frozenset(batch) for batch in sampler}


def test_order_of_an_epoch_is_the_same_in_every_version() -> None:
    # To change it would break the resuming of runs that are under way.
    pairs = [("a", 6), ("b", 5), ("a", 4), ("a", 3), ("b", 2), ("a", 5), ("a", 5)]
    assert steps_of(ranks(2, pairs, 2)) == GOLDEN


GOLDEN: Steps = [[[0], [2]], [[6], [3]], [[6], [5]], [[1], [4]]]


# What the steps are like.


def test_ranks_of_a_step_have_samples_of_similar_length() -> None:
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


def test_several_batches_of_a_step_are_of_similar_length_on_all_ranks() -> None:
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


def test_groups_and_lengths_may_be_arrays_tensors_or_lists() -> None:
    pairs = mixed(100)
    groups, lengths = [group for group, _ in pairs], [length for _, length in pairs]
    expected = list(alone(pairs, 8))
    for as_lengths in (lengths, np.array(lengths, np.uint16), torch.tensor(lengths)):
        for as_groups in (groups, np.array(groups), torch.tensor(groups), map(str, groups)):
            assert list(alone(as_lengths, 8, groups=as_groups)) == expected
    assert list(alone(torch.tensor(pairs), 8)) == expected


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


# Faults of prismatic's and LLaVA's samplers, each reproduced there.


def test_regression_a_global_batch_that_ranks_cannot_share_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"=10 is not a multiple of num_replicas=4.* 8 or 12"):
        ranks(4, mixed(100), 10)
    with pytest.raises(ValueError, match="batch_size=3 times num_replicas=2"):
        ranks(2, mixed(100), 8, batch_size=3)


def test_groups_that_fill_no_step_with_drop_are_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"of 6 samples yields .* a step takes 4 .*end='pad'"):
        len(alone([(i % 2, 1) for i in range(6)], 4, end="drop"))
