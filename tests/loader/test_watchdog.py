from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from energon_lite.loader.workers.watchdog import Watchdog

from ..helpers import Ranks, text_set, train


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_so()


def watching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "watchdog"}


def test_long_wait_is_reported_once_with_the_stacks_of_all_threads(caplog) -> None:
    watchdog = Watchdog(0.05, 0)
    with watchdog:
        wait_until(lambda: "watchdog_timeout_seconds=0.05" in caplog.text)
        time.sleep(0.1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "thread MainThread" in caplog.text
    assert "test_watchdog.py" in caplog.text
    with watchdog:
        wait_until(lambda: len(caplog.records) == 2)


def test_first_wait_may_be_longer(caplog) -> None:
    watchdog = Watchdog(0.05, 100)
    with watchdog:
        time.sleep(0.2)
    assert not caplog.records
    with watchdog:
        wait_until(lambda: len(caplog.records) == 1)


def test_zero_watches_nothing() -> None:
    before = watching()
    with Watchdog(0, 0):
        assert watching() <= before


@pytest.mark.parametrize("name", ["watchdog_timeout_seconds", "watchdog_initial_timeout_seconds"])
def test_limits_out_of_range_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be above 0, or None"):
        Ranks(train(text_set(tmp_path / "texts", 10)), 1, **{name: 0})


def test_watching_ends_with_the_loader(tmp_path: Path) -> None:
    gc.collect()
    before = watching()  # for loaders that records of earlier tests keep
    run = Ranks(train(text_set(tmp_path / "texts", 10)), 3)
    run.slots(3)
    own = watching() - before
    assert len(own) == 3
    del run
    wait_until(lambda: own.isdisjoint(watching()))
