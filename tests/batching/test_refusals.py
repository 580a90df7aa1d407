"""What `energon_lite.batching` refuses: the value, the error, its words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from energon_lite import Buckets, ModalitySplit, Packing
from energon_lite.balance import CostModel
from energon_lite.batching.fit import first_fit, first_fit_decreasing, sequential
from energon_lite.batching.lists import Lists
from energon_lite.batching.stream import StreamingPacker, pack_stream
from energon_lite.extras.samplers.best import lower_bound, pack_best
from energon_lite.order.schedules import Schedule

PACKERS: list[Callable[..., Any]] = [
    first_fit_decreasing, first_fit, sequential, pack_best, lower_bound, pack_stream,
]  # fmt: skip
COST = CostModel(token=1, token_squared=0.05)
BOTH = {"images": 15, "text": 1}
Row = tuple[dict[str, Any], type[Exception], str]

SETTINGS: dict[Any, list[Row]] = {
    Packing: [
        ({"capacity": 0}, ValueError, "capacity=0 must be at least 1"),
        ({"capacity": 8.5}, TypeError, r"capacity=8\.5 must be an integer"),
        ({"capacity": {"tiles": 4}}, ValueError, 'lacks an entry "tokens"'),
        ({"algorithm": "bfd"}, ValueError, "algorithm='bfd' is not one of streaming, best"),
        ({"overlong": None}, ValueError, "overlong=None is not one of error, drop"),
        ({"group_by": "length"}, ValueError, "group_by='length' is not one of source, modality"),
        ({"buffer_size": 0}, ValueError, "buffer_size=0 must be at least 1"),
        ({"max_samples": 0}, ValueError, "max_samples=0 must be at least 1"),
        ({"align": 9}, ValueError, "align=9 is above capacity=8"),
        ({"align": {"tiles": 2}}, ValueError, "align names tiles"),
        ({"loss": "mean"}, ValueError, "loss='mean' is not one of token, sample, sqrt"),
        ({"layout": "flat"}, ValueError, "layout='flat' is not one of padded, thd"),
        ({"balance": "quantile_sync"}, ValueError, "by their cost; say what it is: cost="),
        ({"balance": "quantile_sync", "balance_window": 0, "cost": COST}, ValueError,
         "balance_window=0 must be at least 1"),
        ({"output": "huggingface", "labels_are_shifted": True}, ValueError,
         "the models shift labels"),
        ({"output": "hf"}, ValueError, "output='hf' is not one of packed_batch, huggingface"),
        ({"balance": "global_window", "cost": COST}, ValueError, "needs a length index"),
        ({"plan_window": 5}, ValueError, "needs a length index"),
        ({"lengths": "x", "group_by": len}, ValueError, "before samples are read"),
        ({"lengths": "x", "plan_window": 0}, ValueError, "at least 1"),
        ({"algoritm": "best"}, TypeError,
         r"^Packing has no argument .*Did you mean 'algorithm'\?$"),
    ],
    Buckets: [
        ({"max_tokens": 0}, ValueError, "max_tokens=0 must be at least 1"),
        ({"max_tokens": 2.5}, TypeError, "max_tokens=2.5 must be an integer"),
        ({"max_tokens": True}, TypeError, "max_tokens=True must be an integer"),
        ({"max_tokens": 9, "batch_size_fn": int}, TypeError, "both say how large a batch is"),
        ({"batch_size_fn": 4}, TypeError, "batch_size_fn=4 is no function of a length"),
        ({"window": 0}, ValueError, "window=0 must be at least 1"),
        ({"window": None}, TypeError, "window=None must be an integer"),
        ({"align": -1}, ValueError, "align=-1 must be at least 1"),
        ({"max_tokens": 7, "align": 8}, ValueError, "align=8 is above max_tokens=7"),
        ({"overlong": "cut"}, ValueError, "overlong='cut' is not one of error, drop, alone"),
        ({"group_by": "length"}, ValueError, "group_by='length' is not one of source, modality"),
        ({"overlng": "drop"}, TypeError, r"^Buckets has no argument .*Did you mean 'overlong'\?$"),
    ],
    ModalitySplit: [
        ({"window": 0}, ValueError, "window=0 must be at least 1"),
        ({"window": 8.0}, TypeError, "window=8.0 must be an integer"),
        ({"end": "stop"}, ValueError, "end='stop' is not one of keep, drop, pad"),
        ({"max_surplus": 2}, ValueError, r"max_surplus=2 must lie in 0..1"),
        ({"group_by": "images"}, ValueError, "group_by='images' is not one of modality, source"),
        ({"group_by": None}, ValueError, "group_by=None is not one of"),
        ({"group_by": {}}, ValueError, "names no source"),
        ({"shares": None}, ValueError, "Set the part of each group in the data"),
        ({"group_by": len, "shares": None}, ValueError, "group_by='function' does not follow"),
        ({"shares": {}}, ValueError, "no group with a share above 0"),
        ({"shares": {"text": 0}}, ValueError, "no group with a share above 0"),
        ({"shares": {"text": -1}}, ValueError, r"shares\['text'\]=-1 must be finite"),
        ({"shares": {"text": float("nan")}}, ValueError, "must be finite"),
        ({"shares": {"text": float("inf")}}, ValueError, "must be finite"),
        ({"shares": {"text": "1"}}, TypeError, "must be a number"),
        ({"shares": {2.5: 1}}, TypeError, "shares has a group 2.5"),
        ({"shares": ["text"]}, TypeError, "must be a dict of groups"),
        ({"shares": {"text": Schedule("linear", ((0, 1.0), (9, 2.0)))}}, TypeError,
         "what changes in the run cannot be the same on all ranks"),
        ({"lengths": "x", "shares": {"images": 1}}, ValueError, "leave `shares` out"),
        ({"lengths": "x", "group_by": len, "shares": None}, ValueError, "before samples are read"),
        ({"windw": 8}, TypeError, r"^ModalitySplit has no argument .*Did you mean 'window'\?$"),
    ],
    StreamingPacker: [
        ({"capacity": 0}, ValueError, "capacity is 0"),
        ({"buffer_size": 0}, ValueError, "buffer_size=0 must be at least 1"),
        ({"max_samples": 0}, ValueError, "max_samples=0 must be at least 1"),
        ({"max_steps": 0}, ValueError, "max_steps=0 must be at least 1"),
        ({"align": 0}, ValueError, "align is 0"),
        ({"align": 11}, ValueError, "align is 11, above the capacity of 8"),
        ({"align": (2, 2)}, ValueError, "align has 2 values for 1"),
    ],
}  # fmt: skip
REQUIRED = {
    Packing: {"capacity": 8}, Buckets: {}, StreamingPacker: {"capacity": 8},
    ModalitySplit: {"group_by": "modality", "shares": BOTH},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "error", "words"),
    [(kind, *row) for kind, rows in SETTINGS.items() for row in rows],
)
def test_settings_that_mean_nothing_are_refused(kind, settings, error, words) -> None:
    with pytest.raises(error, match=words):
        kind(**{**REQUIRED[kind], **settings})


LENGTHS: list[tuple[Any, Any, dict[str, Any], str]] = [
    ([5, 8, 30, 40], 8, {}, r"^Sample 2 has length 30, above the capacity of 8\. Truncate, split"),
    ([5, 0, 9], 8, {}, "^Sample 1 has length 0, below 1"),
    ([5, -1, 9], 8, {}, "^Sample 1 has length -1, below 1"),
    ([[1, 1], [9, 1]], (8, 2), {}, r"Sample 1 has length \[9, 1\], above the capacity of \[8, 2\]"),
    ([[1, 1], [0, 0]], (8, 2), {}, r"Sample 1 has length \[0, 0\], below 1"),
    ([[1, 1], [3, -1]], (8, 2), {}, r"Sample 1 has length \[3, -1\], negative"),
    ([96, 97], 100, {"align": 16}, "Sample 1 of length 97 is 112 when aligned to 16, above the"),
    (np.array([1, 2**63 + 5], np.uint64), 8, {}, f"Sample 1 has length {2**63 + 5}, above"),
    *((lengths, capacity, {}, "shape") for lengths, capacity in (
        ([[1, 2]], 8), ([1, 2], [8, 9]), ([[1, 2]], [8]), (5, 8), ([[[1]]], [8]), ([1], [[8]]),
    )),
    ([1], 0, {}, "capacity is 0"),
    ([1], 1 << 40, {}, "capacity is 1099511627776"),
    ([1], 8, {"max_samples": 0}, "max_samples=0"),
    ([1], 8, {"align": 0}, "align is 0"),
    ([1], 8, {"align": [1, 2]}, "align has 2 values for 1 resources"),
]  # fmt: skip


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize(("lengths", "capacity", "limits", "words"), LENGTHS)
def test_lengths_and_limits_out_of_range_are_refused(pack, lengths, capacity, limits, words):
    with pytest.raises(ValueError, match=words):
        pack(lengths, capacity, **limits)


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize(
    ("lengths", "capacity", "words"),
    [
        *((own, 8, "lengths must be integers") for own in (
            [float("nan")], np.array([True]), np.array(["a"]), [1, None], [1 << 70],
        )),
        ([1.5], 8, r"lengths must be integers.*\.astype\(np\.int64\)"),
        ([1], 8.0, "capacity must be integers"),
    ],
)  # fmt: skip
def test_what_is_not_integers_is_refused(pack, lengths, capacity, words) -> None:
    with pytest.raises(TypeError, match=words):
        pack(lengths, capacity)


@pytest.mark.parametrize(
    ("capacity", "lengths", "error", "message"),
    [
        (10, 11, ValueError, r"Sample 2 has length 11, above the capacity of 10\. Truncate"),
        (10, 0, ValueError, r"Sample 2 has length 0, below 1\. Drop empty"),
        (10, -3, ValueError, "length -3, below 1"),
        ((10, 4), (3, 5), ValueError, r"length \[3, 5\], above the capacity of \[10, 4\]"),
        ((10, 4), (-1, 4), ValueError, r"length \[-1, 4\], negative"),
        ((10, 4), (0, 0), ValueError, r"length \[0, 0\], below 1"),
        ((10, 4), (1, 2, 3), ValueError, r"lengths \(1, 2, 3\); give 2"),
        ((10, 4), (1,), ValueError, "give 2"),
        *((10, own, TypeError, None) for own in (3.0, "3", None, [3])),
        *(((10, 4), (1, own), TypeError, None) for own in (3.0, "3", None, [3])),
    ],
)
def test_sample_that_is_refused_leaves_the_packer_as_it_was(
    capacity, lengths, error, message
) -> None:
    packer = StreamingPacker(capacity)
    for _ in range(2):
        packer.add(5 if capacity == 10 else (5, 2))
    with pytest.raises(error, match=message):
        packer.add(lengths)
    assert packer.num_added == packer.num_buffered == 2
    assert packer.next_pack() == [0, 1]


@pytest.mark.parametrize(
    ("indices", "offsets", "message"),
    [
        (np.array([0], np.int32), np.array([0, 1]), "indices must be int64"),
        (np.array([0]), np.array([0.0, 1.0]), "offsets must be int64"),
        (np.array([[0]]), np.array([0, 1]), r"shape \(1, 1\)"),
        (np.array([0]), np.array([0, 2]), r"end with len\(indices\) = 1"),
        (np.array([0]), np.array([], np.int64), "start with 0"),
    ],
)
def test_arrays_that_are_no_lists_are_refused(indices, offsets, message) -> None:
    with pytest.raises(ValueError, match=message):
        Lists(indices, offsets)
