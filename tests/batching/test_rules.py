"""What becomes of samples that are too long for a list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from energon_lite import Buckets, ModalitySplit
from energon_lite.batching.rules import WHOLE, LengthRules, OverlongError
from energon_lite.packing import Packing

LENGTHS = np.array([[3, 1], [10, 0], [25, 0], [2, 2]])
TWO = {"tokens": 10, "tiles": 2}


def parts_of(rules: LengthRules, lengths: Any = LENGTHS) -> list[tuple[int, ...]]:
    found = rules.parts(np.array(lengths)[:, : len(rules.resources)])
    tokens = found.lengths[:, 0]
    return list(
        zip(*(a.tolist() for a in (found.samples, found.starts, found.stops, tokens)), strict=True)
    )


@pytest.mark.parametrize("capacity", [10, TWO])
@pytest.mark.parametrize(
    ("overlong", "of_the_long_one"),
    [
        ("drop", []),
        ("alone", [(2, WHOLE, WHOLE, 25)]),
        ("truncate", [(2, 0, 10, 10)]),
        ("split", [(2, 0, 10, 10), (2, 10, 20, 10), (2, 20, 25, 5)]),
    ],
)
def test_parts_of_a_sample_that_is_too_long(capacity, overlong, of_the_long_one) -> None:
    whole = [(0, WHOLE, WHOLE, 3), (1, WHOLE, WHOLE, 10), (3, WHOLE, WHOLE, 2)]
    rules = Packing(capacity, overlong=overlong)
    assert parts_of(rules) == [*whole[:2], *of_the_long_one, whole[2]]
    found = rules.parts(LENGTHS[:, : len(rules.resources)])
    assert found.is_overlong.tolist() == [False, False, True, False]
    one = parts_of(rules, LENGTHS[2:3])
    assert one == [(0, *part[1:]) for part in of_the_long_one]


@pytest.mark.parametrize("tokens", [1, 10, 11, 25])
@pytest.mark.parametrize("overlong", ["drop", "alone", "truncate", "split"])
@pytest.mark.parametrize("align", [1, 4])
def test_kept_tokens_are_those_of_the_parts(tokens: int, overlong: Any, align: int) -> None:
    rules = Packing(10, overlong=overlong, align=align)
    kept = sum(part[-1] for part in parts_of(rules, [[tokens]]))
    assert rules.kept_tokens(tokens) == kept
    assert rules.kept_tokens({"tokens": tokens, "tiles": 3}) == kept


@pytest.mark.parametrize(
    ("rules", "lengths", "text"),
    [
        (
            Packing(10),
            [[3], [11]],
            r"'tokens': 11.*a pack takes .*\"split\" or \"alone\"\)",
        ),
        (Packing(TWO, overlong="truncate"), [[1, 1], [1, 3]], "truncate cuts tokens only"),
        (Packing(TWO, overlong="split"), [[1, 1], [11, 1]], "split cannot divide what is not"),
        (
            Buckets(max_tokens=10),
            [[3], [11]],
            r"11 is above max_tokens=10.*\"alone\"\)",
        ),
        (Buckets(max_tokens=10, align=4), [[3], [9]], "padded to a multiple of 4"),
        (Buckets(batch_size_fn=lambda n: 9 // n), [[3], [11]], "above what batch_size_fn allows"),
    ],
)
def test_error_names_the_sample_and_remedies(rules: LengthRules, lengths: Any, text: str) -> None:
    with pytest.raises(OverlongError, match=text) as caught:
        rules.parts(np.array(lengths))
    assert caught.value.sample == 1


def test_rules_without_a_limit_keep_every_sample() -> None:
    for rules in (Buckets(), ModalitySplit("source")):
        assert parts_of(rules, [[1], [10**9]]) == [(0, WHOLE, WHOLE, 1), (1, WHOLE, WHOLE, 10**9)]
