from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.batching.fit import first_fit_decreasing
from energon_lite.extras.samplers.best import lower_bound, pack_best
from energon_lite.extras.samplers.cutting_stock import full_packs

from ..conftest import examples

CASES = st.fixed_dictionaries(
    {
        "classes": st.lists(st.integers(1, 60), min_size=1, max_size=9, unique=True),
        "num": st.integers(1, 300),
        "above": st.integers(0, 60),
        "max_samples": st.sampled_from([1, 2, 3, 7, 1000]),
        "unit": st.sampled_from([1, 16]),
        "seed": st.integers(0, 99),
    }
)


def drawn(case: dict[str, Any]) -> tuple[Any, int]:
    random = np.random.Generator(np.random.Philox(case["seed"]))
    lengths = random.choice(case["classes"], case["num"]) * case["unit"]
    return lengths, int(lengths.max()) + case["above"]


@examples(150)
@given(case=CASES)
def test_patterns_lose_no_sample_and_overfill_no_pack(case: dict[str, Any]) -> None:
    lengths, capacity = drawn(case)
    lengths = np.tile(lengths, 8)  # so that there are enough of each
    found = full_packs(lengths, capacity, case["max_samples"])
    assert found is not None
    packs, rest = found
    assert sorted([*packs.indices.tolist(), *rest.tolist()]) == list(range(len(lengths)))
    assert (packs.sizes(lengths) <= capacity).all()
    assert (np.diff(packs.offsets) <= case["max_samples"]).all()
    assert len(packs) <= len(lengths)
    again = full_packs(lengths, capacity, case["max_samples"])
    assert again is not None
    assert again[0] == packs
    assert again[1].tolist() == rest.tolist()


@examples(100)
@given(case=CASES)
def test_few_lengths_need_never_more_packs_than_first_fit_decreasing(case: dict[str, Any]) -> None:
    lengths, capacity = drawn(case)
    limits = {"max_samples": case["max_samples"]}
    packs = pack_best(lengths, capacity, **limits)
    assert sorted(packs.indices.tolist()) == list(range(len(lengths)))
    assert (packs.sizes(lengths) <= capacity).all()
    assert (np.diff(packs.offsets) <= case["max_samples"]).all()
    fitted = first_fit_decreasing(lengths, capacity, **limits)
    assert lower_bound(lengths, capacity, **limits) <= len(packs) <= len(fitted)


@pytest.mark.parametrize(
    ("classes", "capacity", "max_samples", "optimum"),
    [
        # Three of 34 do not fit: pairs with the rest, as 34 + 34 + 31.
        ({34: 200, 31: 100}, 99, 1000, 100),
        # 51 + 26 + 23, and 27 + 27 + 23 + 23: first-fit decreasing begins with 51 + 27.
        ({51: 60, 27: 60, 26: 60, 23: 120}, 100, 1000, 90),
        ({60: 90, 40: 30, 20: 120}, 100, 2, 120),
    ],
)
def test_patterns_reach_the_optimum_where_it_is_known(
    classes: dict[int, int], capacity: int, max_samples: int, optimum: int
) -> None:
    lengths = np.repeat([*classes], [*classes.values()])
    assert len(pack_best(lengths, capacity, max_samples=max_samples)) == optimum


def test_lists_of_many_lengths_are_not_packed_by_patterns() -> None:
    lengths = np.arange(1, 4000)
    assert full_packs(np.repeat(lengths, 20), 8192, 4000) is None
    assert full_packs(lengths[:100], 8192, 4000) is None
    assert full_packs(np.repeat(lengths[:300], 8), 512, 3) is not None
