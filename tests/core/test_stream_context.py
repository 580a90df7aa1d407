from __future__ import annotations

import logging
import threading

import pytest

from energon_lite.core.errors import FatalSampleError
from energon_lite.core.keys import leaves
from energon_lite.core.stream_context import (
    SkipRecord,
    StreamContext,
    context_of,
    current_context,
    current_sample_index,
    sample_rng,
)
from energon_lite.core.topology import Stream, current


def record(draw: int, *, on_purpose: bool = False, num_samples: int = 1) -> SkipRecord:
    key = ("source", 0, draw, draw)
    return SkipRecord(key, str(draw), "source", "load", "ValueError", on_purpose, num_samples)


def fail(context: StreamContext, draws: range) -> None:
    for draw in draws:
        context.count_skip(record(draw))


def test_leaves_of_nested_keys() -> None:
    a, b = ("a", 0, 5, 5), ("b", 1, 6, 9)
    assert list(leaves(a)) == [a]
    assert list(leaves(("batch", 3, a, ("encode", 1, b)))) == [a, b]
    assert list(leaves(())) == [()]


@pytest.mark.parametrize(("every", "stops"), [(200, False), (101, False), (50, True), (20, True)])
def test_limit_is_one_on_the_rate(every, stops) -> None:
    context = StreamContext(Stream(0, 1), max_skip_rate=0.01)
    draws = range(0, 60_000, every)
    assert len(draws) > 200

    if stops:
        with pytest.raises(FatalSampleError, match="max_skip_rate"):
            fail(context, draws)
    else:
        fail(context, draws)
    assert len(context.take_records()) > 100
    assert context.take_records() == []


def test_burst_of_a_hundred_failures_passes_and_drains() -> None:
    context = StreamContext(Stream(0, 1))
    for start in (0, 20_000):
        fail(context, range(start, start + 99))
    with pytest.raises(FatalSampleError):
        fail(context, range(20_100, 20_200))


def test_draws_are_those_of_the_stream_not_of_the_run() -> None:
    context = StreamContext(Stream(3, 64))
    with pytest.raises(FatalSampleError, match="max_skip_rate"):
        fail(context, range(3, 20_000 * 64, 50 * 64))


def test_skips_on_purpose_never_stop_but_are_reported_once_in_a_row(caplog) -> None:
    context = StreamContext(Stream(0, 1))
    for draw in range(5000):
        context.count_skip(record(draw, on_purpose=True, num_samples=3))
    assert len(caplog.records) == 1
    assert "skipped 10002 samples in a row on purpose" in caplog.text
    context.num_quiet = 0
    for draw in range(5000):
        context.count_skip(record(draw, on_purpose=True))
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert context.fill == 0


def test_activity_belongs_to_its_thread() -> None:
    seen: list[object] = []
    with context_of(StreamContext(Stream(0, 1))) as _:
        current_context()
        thread = threading.Thread(target=lambda: seen.append(current.context))
        thread.start()
        thread.join()
    assert seen == [None]
    with pytest.raises(RuntimeError, match="inside a hook"):
        current_context()


def test_rng_depends_on_seed_key_and_hook_alone() -> None:
    def draw(hook: str, seed: int, key: tuple[object, ...]) -> float:
        context = StreamContext(Stream(0, 1))
        with context_of(context):
            context.enter(hook, seed, key)
            first = sample_rng().random()
            assert sample_rng().random() != first
        return first

    base = draw("h", 0, ("a", 0, 1, 1))
    assert draw("h", 0, ("a", 0, 1, 1)) == base
    others = [
        draw("g", 0, ("a", 0, 1, 1)),
        draw("h", 1, ("a", 0, 1, 1)),
        draw("h", 0, ("a", 0, 2, 1)),
    ]
    assert len({base, *others}) == 4


def test_sample_index_of_a_batch_is_that_of_its_first_sample() -> None:
    context = StreamContext(Stream(0, 1))
    with context_of(context):
        context.enter("batch", 0, ("batch", 2, ("encode", 1, ("a", 0, 5, 17)), ("a", 0, 6, 18)))
        assert current_sample_index() == 17
        context.enter("batch", 0, ())
        with pytest.raises(RuntimeError):
            current_sample_index()
