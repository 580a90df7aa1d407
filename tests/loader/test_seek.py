"""Epochs and batches that a trainer asks for: places, not distances, so who is there stays."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import SavableDataLoader, WorkerConfig, get_savable_loader

from ..conftest import examples
from ..helpers import keys_of, through_json, train

NUM_TEXTS = 30


def loader_of(
    path: Path, num_workers: int = 0, num_streams: int = 3, **settings: Any
) -> SavableDataLoader[Any]:
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, num_streams=num_streams)
    return get_savable_loader(train(path, "skipping", **settings)(config), max_skip_rate=1)


KINDS: dict[str, dict[str, Any]] = {
    "passes": {"repeat": False},
    "virtual epochs": {"virtual_epoch_length": 6},
    "virtual epochs of passes": {"repeat": False, "virtual_epoch_length": 6},
}


@cache
def unbroken_epochs(path: Path, kind: str) -> list[list[list[str]]]:
    loader = loader_of(path, **KINDS[kind])
    return [[keys_of(batch) for batch in loader] for _ in range(4)]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@examples(10)
def test_fresh_loader_goes_where_the_unbroken_one_came(
    kind: str, data: st.DataObject, texts: Path
) -> None:
    epochs = unbroken_epochs(texts, kind)
    assert len(epochs[0]) > 3
    assert epochs[0] != epochs[1]
    epoch = data.draw(st.integers(0, 3))
    skip = data.draw(st.integers(0, len(epochs[epoch]) - 1))
    loader = loader_of(texts, **KINDS[kind])
    loader.set_epoch(epoch)
    if skip or data.draw(st.booleans()):
        loader.skip_first_batches(skip)
    assert [keys_of(batch) for batch in loader] == epochs[epoch][skip:]
    for later in range(epoch + 1, 4):
        loader.set_epoch(later)
        assert [keys_of(batch) for batch in loader] == epochs[later]


@given(data=st.data())
@examples(10)
def test_restored_loader_stays_where_its_state_is(data: st.DataObject, texts: Path) -> None:
    kind = KINDS[data.draw(st.sampled_from(sorted(KINDS)))]
    unbroken = loader_of(texts, **kind)
    epoch = data.draw(st.integers(0, 2))
    for _ in range(epoch):
        list(unbroken)
    iterator = iter(unbroken)
    skip = data.draw(st.integers(0, 5))
    list(islice(iterator, skip))
    loader = loader_of(texts, **kind)
    loader.load_state_dict(unbroken.state_dict())
    # A trainer that knows the epoch, or begins to count anew, and one that skips by itself.
    loader.set_epoch(data.draw(st.sampled_from([epoch, 0])))
    loader.skip_first_batches(skip)
    rest = [keys_of(batch) for batch in iterator]
    if rest:  # else both stand at the end of a pass, and the next `iter` begins another
        assert [keys_of(batch) for batch in loader] == rest
    assert [keys_of(batch) for batch in loader] == [keys_of(batch) for batch in unbroken]


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        ("1", TypeError, "='1' must be an integer"),
        (1.0, TypeError, "=1.0 must be an integer"),
        (None, TypeError, "=None must be an integer"),
        (True, TypeError, "=True must be an integer"),
        (-1, ValueError, "=-1 must be at least 0"),
    ],
)
def test_what_is_no_epoch_is_refused(texts: Path, number: Any, error: Any, words: str) -> None:
    loader = loader_of(texts, repeat=False)
    for go, name in (
        (loader.set_epoch, "epoch"),
        (loader.sampler.set_epoch, "epoch"),  # type: ignore[attr-defined]
        (loader.skip_first_batches, "num_batches"),
    ):
        with pytest.raises(error, match=f"{name}{words}"):
            go(number)
    loader.set_epoch(np.int64(0))  # type: ignore[arg-type]
    assert len(list(loader)) == len(loader)


@pytest.mark.processes
def test_pass_that_is_left_early_ends_where_the_next_epoch_is_called(texts: Path) -> None:
    whole = loader_of(texts, repeat=False)
    epochs = [[keys_of(batch) for batch in whole] for _ in range(3)]
    loader = loader_of(texts, num_workers=2, repeat=False)
    for epoch in (0, 1, 2, 1):
        loader.sampler.set_epoch(epoch)  # as trainers call it
        assert [keys_of(batch) for batch in islice(loader, 2)] == epochs[epoch][:2]
    assert [keys_of(batch) for batch in loader] == epochs[1][2:]


def test_a_skip_that_contradicts_the_state_is_logged(
    texts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(texts, repeat=False)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    loader.skip_first_batches(3)
    next(iter(loader))
    assert "skip 3 batches of its epoch, and the restored state stands after 1" in caplog.text


def test_a_skip_in_endless_data_contradicts_no_state(
    texts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(texts)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    resumed = loader_of(texts)
    resumed.load_state_dict(loader.state_dict())
    resumed.skip_first_batches(3)  # as the Trainer of transformers does beside its callback
    assert keys_of(next(iter(resumed))) == keys_of(next(batches))
    assert caplog.text == ""


def test_looking_ahead_moves_no_state_and_delays_errors(texts: Path) -> None:
    plain, ahead = loader_of(texts, repeat=False), loader_of(texts, repeat=False)
    ahead._run.looks_ahead = True
    ends = []
    for one, other in zip(plain, ahead._run.iterate(), strict=True):
        assert keys_of(one) == keys_of(other)
        first, second = plain.save_state_rank(), ahead.save_state_rank()
        assert all(first[name] == second[name] for name in ("streams", "count", "items_in_pass"))
        ends.append(ahead._run.is_last)
    assert ends == [False] * (len(ends) - 1) + [True]
    assert [keys_of(batch) for batch in plain] == [keys_of(batch) for batch in ahead._run.iterate()]

    iterator = ahead._run.iterate()
    next(iterator)
    fails = ahead._run._fetch
    ahead._run._fetch = lambda: (_ for _ in ()).throw(OSError("lost"))  # type: ignore[method-assign]
    next(iterator)  # was there before the error
    with pytest.raises(OSError, match="lost"):
        next(iterator)
    ahead._run._fetch = fails  # type: ignore[method-assign]


@pytest.mark.parametrize("has_epochs", [False, True])
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_pass_left_with_its_last_batch_does_not_reach_into_the_next(
    texts: Path, looks_ahead: bool, has_epochs: bool
) -> None:
    """As trainers do that know the number of batches."""

    def new_loader() -> Any:
        loader = loader_of(texts, num_streams=12, repeat=False, batch_size=2)
        loader._run.looks_ahead = looks_ahead  # as with Accelerate
        return loader

    def keys(loader: Any, num: int | None = None) -> list[list[str]]:
        return [keys_of(batch) for batch in islice(loader._run.iterate(), num)]

    def num_skipped(loader: Any) -> int:
        return sum(source.skipped for source in loader.stats().values())

    whole = new_loader()
    passes = [keys(whole) for _ in range(3)]
    for num in range(1, len(passes[1])):
        loader = new_loader()
        assert keys(loader, len(passes[0])) == passes[0]
        if has_epochs:
            loader.set_epoch(1)
        assert keys(loader, num) == passes[1][:num]
        again = new_loader()
        again.load_state_dict(through_json(loader.state_dict()))
        assert [keys(again), keys(again)] == [passes[1][num:], passes[2]]
        assert num_skipped(again) == num_skipped(whole)
