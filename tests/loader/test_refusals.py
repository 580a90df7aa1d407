"""What the loader refuses: settings and states, by value, error and words."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from energon_lite import WorkerConfig, get_savable_loader
from energon_lite.core.errors import StateError
from energon_lite.loader import resume

from ..helpers import Ranks, assert_same, signed, through_json, train, validation
from .workers import loader_from

# --------------------------------------------------------------------------------------- settings


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prefetch_factor": 0}, "prefetch_factor=0 must be at least 1"),
    ({"prefetch_factor": 1.5}, "prefetch_factor=1.5 must be an integer"),
    ({"prefetch_factor": None}, "prefetch_factor=None must be an integer"),
    ({"restart_workers": "3"}, "restart_workers='3' must be an integer"),
    ({"shuffle": True}, "SavableDataLoader has no argument 'shuffle': use get_train_dataset"),
    ({"batch_size": 2}, "use get_train_dataset(batch_size=n)"),
    ({"collate_fn": list}, "use the method `batch` of a task encoder"),
    ({"prefetch": 3}, "has no argument 'prefetch'. Did you mean 'prefetch_factor'?"),
    ({"restart_workers": -1}, "restart_workers=-1 must be"),
    ({"stall_timeout_sec": "1"}, "stall_timeout_sec='1' must be above 0, or None"),
    ({"stall_timeout_sec": 0}, "stall_timeout_sec=0 must be above 0, or None"),
    ({"watchdog_timeout_seconds": 0}, "watchdog_timeout_seconds=0 must be above 0, or None"),
    ({"watchdog_initial_timeout_seconds": 0}, "watchdog_initial_timeout_seconds=0 must be above 0"),
    ({"max_skip_rate": "all"}, "max_skip_rate='all' must lie in 0..1"),
    ({"cache_pool": "x"}, "cache_pool='x' must be a cache pool"),
    ({"workers": -1}, "workers=-1 must be at least 0, or RayWorkers(...)"),
    ({"workers": "4"}, "workers='4' must be an integer, or RayWorkers(...)"),
    ({"end": "pad"}, "end='pad', but the data never end"),
    ({"end": "stop"}, "end='stop' is not one of drop, pad, uneven, or None"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_settings_of_a_loader_out_of_range_are_refused_by_name(texts, settings, words) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        Ranks(train(texts), 1, 2, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"worker_type": "threads"}, "worker_type='threads' is not one of process, thread"),
        ({"worker_type": "thread", "start_method": "fork"}, "'fork' is of worker processes"),
    ],
)
def test_settings_of_workers_that_cannot_be_are_refused(settings, words) -> None:
    with pytest.raises(ValueError, match=words):
        WorkerConfig(rank=0, world_size=1, num_workers=1, **settings)


PLACE = {"rank": 0, "world_size": 1, "num_workers": 0}


@pytest.mark.parametrize("name", [*PLACE, "seed_offset", "num_streams", "node_groups", "peers"])
@pytest.mark.parametrize("value", ["1", 1.0, True, None, np.float32(1)])
def test_integers_of_workers_are_checked_by_name(name: str, value: Any) -> None:
    if (name, value) == ("num_streams", None):
        return
    with pytest.raises(TypeError, match=rf"{name}=.* must be an integer"):
        WorkerConfig(**{**PLACE, name: value})


def test_the_name_of_a_file_is_no_state(texts) -> None:
    loader = loader_from(train(texts))
    with pytest.raises(StateError, match=r"str is not a loader state .*; read its file"):
        loader.load_state_dict("last.pt")  # type: ignore[arg-type]


def test_arguments_without_names_are_refused(texts) -> None:
    with pytest.raises(TypeError, match="4 needs the name of its argument, such as rank, world"):
        WorkerConfig(4)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"2 needs the name of its argument"):
        get_savable_loader(train(texts)(WorkerConfig(**PLACE)), 2)  # type: ignore[misc]


def test_integers_of_numpy_are_integers(texts) -> None:
    """They change no batch and no state, wherever they are settings."""

    def run(number: Callable[[int], Any]) -> Any:
        config = WorkerConfig(
            rank=number(0), world_size=number(1), num_workers=number(0), num_streams=number(3),
            seed_offset=number(5), worker_log_level=number(0),
        )  # fmt: skip
        dataset = train(
            texts, batch_size=number(4), shuffle_buffer_size=number(9), repeat=number(2),
            max_samples_per_sequence=number(3), virtual_epoch_length=number(4),
            parallel_shard_iters=number(2), shuffle_over_epochs_multiplier=number(2),
            subset=(number(0), number(30)), loss_weight=number(2),
        )(config)  # fmt: skip
        loader = get_savable_loader(dataset, prefetch_factor=number(3), restart_workers=number(2))
        batches = [batch.__key__ for _ in range(2) for batch in loader]
        state = through_json(loader.save_state_rank())
        del state["stats"], state["checksum"]  # seconds
        return batches, state

    expected = run(int)
    for number in (np.int64, np.uint8):
        assert_same(run(number), expected)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("texts", r"get_train_dataset\(path"), (None, r"needs a dataset")],
)
def test_what_is_no_dataset_is_refused(wrong, words) -> None:
    with pytest.raises(TypeError, match=words):
        get_savable_loader(wrong)


# ----------------------------------------------------------------------------------------- states

Changed = Callable[[list[dict[str, Any]]], Any]


def refused(make: Any, states: Any, **config: Any) -> str:
    """Returns the message of the refusal, after seeing that the loader works on as before."""
    untouched = loader_from(make, **config)
    expected = list(islice(iter(untouched), 4))
    loader = loader_from(make, **config)
    iterator = iter(loader)
    assert_same(list(islice(iterator, 2)), expected[:2])
    before = through_json(loader.save_state_rank())
    with pytest.raises(StateError) as caught:
        loader.restore_state_global(states)
    assert through_json(loader.save_state_rank()) == before
    assert_same(list(islice(iterator, 2)), expected[2:])
    return str(caught.value)


def each(**changes: Any) -> Changed:
    """Changes each state, and signs it again."""
    return lambda states: [signed({**state, **changes}) for state in states]


def first(**changes: Any) -> Changed:
    return lambda states: [signed({**states[0], **changes}), states[1]]


def other_stage(states: Any) -> Any:
    inner = {**states[0]["streams"]["0"]["inner"][0], "stage": "no such stage"}
    streams = {**states[0]["streams"]}
    streams["0"] = {**streams["0"], "inner": [inner, *streams["0"]["inner"][1:]]}
    return first(streams=streams)(states)


ENERGONS = {"__class__": "SavableDataLoaderState", "worker_states": []}
ALONE = "the states are of ranks [1] where the run had 2 ranks (0..1)"
ONCE = "Give the state of every rank once"
STATES: list[tuple[Changed, dict[str, Any], str]] = [
    *((lambda _, garbage=garbage: garbage, {}, "") for garbage in (None, {}, "state", 7, [None])),
    *((lambda _, garbage=garbage: garbage, {}, "") for garbage in (["x"], [[]], [{}])),
    (lambda _: [], {}, "there is no state in the list"),
    (lambda _: [ENERGONS], {}, "not a loader state of energon_lite"),
    *((each(version=version), {}, f"format version {version!r}; ") for version in (0, 6, 8, "7")),
    (each(version=True), {}, "format version True; this version of energon_lite reads version 7 "),
    (lambda s: [{**s[0], "items_in_pass": 5}, s[1]], {}, "rank 0 does not have the checksum"),
    *((each(**{n: v}), {}, f"{n!r}") for n in ("base", "count") for v in (10**30, -1, True)),
    *((first(streams=text), {}, "'streams'") for text in ("garbage", "e\u0301", "eJw=", "", 7)),
    (other_stage, {}, "'no such stage'"),
    # Of other ranks, or of other moments.
    (lambda s: s[1:], {}, ALONE),
    (lambda s: s[1:], {"world_size": 3}, ALONE),
    (lambda s: s[1:], {"world_size": 2}, "this is rank 0 of 2"),
    (lambda s: [s[0], s[0]], {}, ONCE),
    (lambda s: [*s, s[1]], {}, ONCE),
    (first(count=2), {}, "stand at different steps (rank 0: 2, rank 1: 3)"),
    (each(count=2), {}, "contradict each other"),
    (each(count=5), {}, "contradict each other"),
    (each(num_streams=3), {}, "contradict"),
    (
        lambda s: s,
        {"num_streams": 3},
        "the run has 4 streams, and WorkerConfig asks for num_streams=3",
    ),
    (lambda s: s, {"seed_offset": 3}, "seed_offset=0 where this pipeline has 3"),
]


@pytest.mark.parametrize(("changed", "config", "words"), STATES)
def test_states_that_do_not_fit_are_refused(texts, states, changed, config, words) -> None:
    assert words in refused(train(texts, "skipping"), changed(states), **config)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"shuffle_buffer_size": 100}, "shuffle_buffer_size=8 where this pipeline has 100"),
    ({"max_samples_per_sequence": 2}, "max_samples_per_sequence=5 where this pipeline has 2"),
    ({"parallel_shard_iters": 2}, "parallel_shard_iters=16 where this pipeline has 2"),
    ({"shuffle_over_epochs_multiplier": 2}, "_multiplier=1 where this pipeline has 2"),
    ({"repeat": False}, "repeat=True where this pipeline has False"),
    ({"encoder": "plain"}, "encode"),
    ({"batch_size": None}, "batch"),
    ({"batch_drop_last": True}, "batch_drop_last=False where this pipeline has True"),
    # All differences are named.
    ({"batch_size": 4, "shuffle_buffer_size": 9}, "batch_size=3 is now 4"),
    ({"batch_size": 4, "shuffle_buffer_size": 9}, "shuffle_buffer_size=8"),
    ({"batch_size": 4, "shuffle_buffer_size": 9}, "source texts/train"),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS)
def test_other_settings_are_refused_by_name(texts, states, settings, words) -> None:
    make = train(texts, **{"encoder": "skipping", **settings})
    with pytest.raises(StateError, match=re.escape(words)) as caught:
        loader_from(make).restore_state_global(states)
    assert "Build the pipeline with the settings that it was saved with" in str(caught.value)


def test_training_state_is_refused_by_validation(texts, states) -> None:
    assert "training=True" in refused(validation(texts, "skipping"), states)


def test_states_of_other_moments_and_runs_are_refused(texts, states) -> None:
    make = train(texts, "skipping")
    run = Ranks(make, 2, states=states)
    run.steps(2)
    assert "different" in refused(make, [run.save()[0], states[1]])
    # Four ranks saved into a folder before two did, and their files still lie around.
    old = Ranks(make, 4, num_streams=4)
    old.steps(1)
    message = refused(make, [*states, *old.save()[2:]], world_size=2)
    assert "rank 0 and rank 2 have different 'world_size' (2 and 4)" in message


def test_small_table_of_a_huge_value_is_refused(texts, states, monkeypatch) -> None:
    table = resume.compressed([0] * 10_000)
    monkeypatch.setattr(resume, "MAX_STATES_BYTES", 20_000)
    message = refused(train(texts, "skipping"), first(streams=table)(states))
    assert "of more than 20,000 bytes" in message


@pytest.mark.processes
def test_refused_state_after_worker_processes_have_started_changes_nothing(texts, states) -> None:
    broken = [{**states[0], "version": 9}]
    assert "version 9" in refused(train(texts, "skipping"), broken, num_workers=1)
