"""Storage that fails for a moment, for a minute, or in one place: what heals, and what is lost.

Faults are put in between the readers and the system's calls; nothing waits, as in all tests.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import FatalSampleError, WorkerConfig, get_savable_loader
from energon_lite.core import failures

from ..helpers import text_set, through_json, train

NUM_SHARDS, PER_SHARD = 4, 30
# A text sample of `text_set` is one header and one block.
SAMPLE_BYTES = 1024
BROKEN = "shard-002.tar"

ERRORS = [
    "EIO", "ESTALE", "EAGAIN", "EINTR", "ETIMEDOUT", "ENOTCONN", "ECONNRESET", "EREMOTEIO",
    "ENETDOWN", "EHOSTDOWN", "EBUSY", "ENOLCK", "ENOMEM", "EBADF",
]  # fmt: skip


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("storage") / "set", NUM_SHARDS * PER_SHARD, NUM_SHARDS)


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    """A copy that a test may change, under the same name, so that its order is the same."""
    return shutil.copytree(sound, tmp_path / "copy" / sound.name)


class Storage:
    """Answers the calls of the readers, with faults.

    Attributes:
        fault: called before each read with path, first byte and byte after the last; raises, or
            returns how many bytes may be read (None for all).
        at_opening: called with the path before each file is opened.
        reads: how many reads of shards there were.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fault: Callable[[str, int, int], int | None] = lambda path, start, stop: None
        self.at_opening: Callable[[str], None] = lambda path: None
        self.reads = 0
        self._open, self._preadv = os.open, os.preadv
        patch.setattr(os, "open", self._opened)
        patch.setattr(os, "preadv", self._read)

    def _opened(self, path: Any, flags: int, *more: Any, **named: Any) -> int:
        self.at_opening(str(path))
        return self._open(path, flags, *more, **named)

    def _read(self, descriptor: int, buffers: Any, offset: int) -> int:
        self.reads += 1
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        limit = self.fault(path, offset, offset + len(buffers[0]))
        if limit is not None:
            buffers = [buffers[0][:limit]]
        return self._preadv(descriptor, buffers, offset)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setattr(failures, "_counts", Counter())
    return Storage(monkeypatch)


def loader_of(path: Path, **settings: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1)
    settings = {"batch_size": 1, "repeat": False, **settings}
    return get_savable_loader(train(path, **settings)(config))


def keys_in(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch.__key__]


def fails(name: str, number: float, only: str = BROKEN) -> Callable[[str, int, int], None]:
    """Fails the first `number` reads of a shard."""
    left = [number]

    def fault(path: str, start: int, stop: int) -> None:
        if path.endswith(only) and left[0] > 0:
            left[0] -= 1
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))

    return fault


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_that_passes_costs_nothing(sound, storage, name, number, caplog) -> None:
    expected = keys_in(loader_of(sound))
    storage.fault = fails(name, number)
    loader = loader_of(sound)
    assert keys_in(loader) == expected
    assert loader.num_skipped == {}
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{BROKEN} could be read at try {number + 1}, after " in line


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_that_stays_costs_the_shard_and_says_how_often_it_was_tried(
    sound, storage, name, caplog
) -> None:
    expected = keys_in(loader_of(sound))
    storage.fault = fails(name, float("inf"))
    loader = loader_of(sound)
    lost = {f"{2 * PER_SHARD + i:05d}" for i in range(PER_SHARD)}
    assert keys_in(loader) == [key for key in expected if key not in lost]
    assert loader.num_skipped == {"set/train": PER_SHARD}
    assert "tried 7 times in 4.0 s" in caplog.text
    assert os.strerror(getattr(errno, name)) in caplog.text
    assert len(caplog.records) <= 2  # the first, and the tenth


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_at_one_place_costs_the_sample_that_lies_there(sound, storage, name) -> None:
    expected = keys_in(loader_of(sound))
    bad = 7 * SAMPLE_BYTES + 600

    def fault(path: str, start: int, stop: int) -> None:
        if path.endswith(BROKEN) and start <= bad < stop:
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))

    storage.fault = fault
    loader = loader_of(sound)
    assert keys_in(loader) == [key for key in expected if key != f"{2 * PER_SHARD + 7:05d}"]
    assert loader.num_skipped == {"set/train": 1}


@pytest.mark.parametrize("name", ["ESTALE", "EBADF", "EIO"])
def test_a_descriptor_that_went_bad_is_opened_again(sound, storage, name) -> None:
    expected = keys_in(loader_of(sound))
    opened: list[str] = []
    storage.at_opening = opened.append

    def fault(path: str, start: int, stop: int) -> None:
        if sum(name == path for name in opened) < 2:
            raise OSError(getattr(errno, name), "")

    storage.fault = fault
    loader = loader_of(sound)
    assert keys_in(loader) == expected
    assert loader.num_skipped == {}


def test_while_nothing_can_be_read_nothing_is_skipped_and_the_run_ends_with_one_error(
    sound, storage, caplog
) -> None:
    expected = keys_in(loader_of(sound))
    loader = loader_of(sound)
    iterator = iter(loader)
    found = keys_in([next(iterator) for _ in range(10)])

    def away(path: str, *range_: int) -> None:
        if str(sound) in path:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", path)

    storage.fault = storage.at_opening = away  # type: ignore[assignment]
    with pytest.raises(FatalSampleError, match="no file of the dataset can be read") as caught:
        found.extend(batch.__key__[0] for batch in iterator)
    assert "Transport endpoint is not connected" in str(caught.value)
    assert "times in 300.0 s" in str(caught.value)
    assert loader.num_skipped == {}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("waiting for 300 s at most")
    state = through_json(loader.save_state_rank())
    storage.fault = storage.at_opening = lambda *call: None
    resumed = loader_of(sound)
    resumed.restore_state_rank(state)
    assert found + keys_in(resumed) == expected
    assert found + keys_in(loader) == expected


def test_an_outage_that_ends_costs_nothing(sound, storage, monkeypatch) -> None:
    expected = keys_in(loader_of(sound))
    now = [0.0]

    def away(path: str, *range_: int) -> None:
        if str(sound) in path and 0 < now[0] < 100:
            raise OSError(errno.EIO, "Input/output error", path)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("energon_lite.storage.retry.sleep", sleep)
    loader = loader_of(sound)
    storage.fault = storage.at_opening = away  # type: ignore[assignment]
    iterator = iter(loader)
    found = keys_in([next(iterator) for _ in range(3)])
    now[0] = 1.0
    assert found + keys_in(iterator) == expected
    assert now[0] >= 100
    assert loader.num_skipped == {}
