"""The order of a few configurations, written down: a change of it is a change for every user.

A commit that means it writes the file again and says ITERATION ORDER in CHANGELOG.md:

    UPDATE_GOLDEN=1 pytest tests/order/test_golden_order.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from energon_lite.core.topology import NodeGroups, Stream
from energon_lite.order.source_order import SourceOrder

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "order.json"

BASE: dict[str, Any] = {"source": "demo/train", "num_samples": 100, "seed": 0, "endless": True}
CONFIGURATIONS: dict[str, tuple[dict[str, Any], Stream]] = {
    "one stream": ({"max_slice": 10, "interleave": 4}, Stream(0, 1)),
    "stream 2 of 3": ({"max_slice": 10, "interleave": 4}, Stream(2, 3)),
    "another seed": ({"max_slice": 10, "interleave": 4, "seed": 1}, Stream(2, 3)),
    "window": ({"max_slice": 10, "interleave": 2, "window": 20}, Stream(1, 2)),
    "window of two": ({"max_slice": 10, "interleave": 2, "window": 2}, Stream(0, 1)),
    "few samples": ({"num_samples": 3}, Stream(5, 64)),
    "three copies": ({"num_samples": 20, "multiplier": 3, "max_slice": 4}, Stream(0, 2)),
    "with replacement": ({"multiplier": -1, "max_slice": 10}, Stream(0, 2)),
    "third pass": ({"endless": False, "max_slice": 5}, Stream(1, 4, 2)),
    "file order": ({"multiplier": None, "block": 4, "num_samples": 30}, Stream(1, 2)),
    "groups": (
        {"max_slice": 10, "interleave": 2, "window": 5, "nodes": NodeGroups(2, 2)},
        Stream(2, 8),
    ),
    "groups of copies": (
        {"num_samples": 31, "multiplier": 3, "max_slice": 4, "nodes": NodeGroups(3)},
        Stream(1, 3),
    ),
    "millions": ({"num_samples": 3_000_000, "max_slice": 5, "window": 100}, Stream(3, 8)),
    "window above tables": (
        {"num_samples": 6_000_000, "max_slice": 5, "window": 300_000},
        Stream(3, 8),
    ),
    "window longer than an epoch": ({"max_slice": 5, "window": 300_000}, Stream(0, 2)),
}


def order_of(name: str) -> list[list[int]]:
    settings, stream = CONFIGURATIONS[name]
    epochs, indices = SourceOrder(**{**BASE, **settings}).stream(stream).block(0, 60)
    return [list(pair) for pair in zip(epochs.tolist(), indices.tolist(), strict=True)]


def test_update_is_requested_by_name() -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        rows = {name: json.dumps(order_of(name)) for name in CONFIGURATIONS}
        body = ",\n".join(f"{json.dumps(name)}: {row}" for name, row in rows.items())
        GOLDEN.write_text("{\n" + body + "\n}\n")
    assert set(json.loads(GOLDEN.read_text())) == set(CONFIGURATIONS)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_order_is_the_one_written_down(name: str) -> None:
    assert order_of(name) == json.loads(GOLDEN.read_text())[name]
