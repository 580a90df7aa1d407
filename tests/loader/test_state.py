"""What a state is, and which states are refused; nothing is half applied."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import SavableDataLoader, WorkerConfig, get_savable_loader
from energon_lite.core.errors import StateError
from energon_lite.loader import resume

from ..helpers import (
    Ranks,
    assert_same,
    signed,
    text_set,
    through_json,
    train,
    validation,
    write_tar,
)


@pytest.fixture
def states(texts: Path) -> list[dict[str, Any]]:
    """The states of two ranks of four streams, after three steps."""
    run = Ranks(train(texts, "skipping"), 2, num_streams=4)
    run.steps(3)
    return run.save()


def loader_of(make: Any, **config: Any) -> SavableDataLoader[Any]:
    place = {"rank": 0, "world_size": 1, "num_workers": 0, **config}
    return get_savable_loader(make(WorkerConfig(**place)))


def refused(make: Any, states: Any, **config: Any) -> str:
    """Returns the message of the refusal, after seeing that the loader works on as before."""
    untouched = loader_of(make, **config)
    expected = list(islice(iter(untouched), 6))
    loader = loader_of(make, **config)
    iterator = iter(loader)
    assert_same(list(islice(iterator, 2)), expected[:2])
    before = through_json(loader.save_state_rank())
    with pytest.raises(StateError) as caught:
        loader.restore_state_global(states)
    assert through_json(loader.save_state_rank()) == before
    assert_same(list(islice(iterator, 4)), expected[2:])
    return str(caught.value)


# ------------------------------------------------------------------------------- what a state is


def test_state_is_plain_json_with_format_and_version(states) -> None:
    for rank, state in enumerate(states):
        assert (state["format"], state["version"]) == ("energon_lite.loader", 5)
        assert (state["rank"], state["world_size"], state["num_streams"]) == (rank, 2, 4)
        assert sorted(state["streams"]) == [str(s) for s in (rank, rank + 2)]
        assert json.loads(json.dumps(state)) == state


def test_size_of_a_state_does_not_grow_with_steps_or_payload(tmp_path) -> None:
    sizes = []
    for length in (10, 5000):
        folder = tmp_path / f"texts-{length}"
        members = [(f"{i:05d}.txt", b"x" * length) for i in range(30)]
        write_tar(folder / "shard-0.tar", members)
        from ..helpers import prepared

        loader = loader_of(train(prepared(folder, "TextSample", {"text": "txt"})), num_streams=3)
        for steps in (10, 90):
            assert len(list(islice(iter(loader), steps))) == steps
            sizes.append(len(json.dumps(loader.save_state_rank())))
    assert max(sizes) - min(sizes) < 60


def test_state_of_a_loader_is_a_copy(texts) -> None:
    loader = loader_of(train(texts))
    iterator = iter(loader)
    next(iterator)
    state = loader.save_state_rank()
    saved = through_json(state)
    next(iterator)
    assert through_json(state) == saved
    state["emitted"].append(1)
    assert loader.save_state_rank()["emitted"] == []


def test_torch_save_with_weights_only_keeps_a_state(texts, states, tmp_path) -> None:
    torch.save(states, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    run = Ranks(train(texts, "skipping"), 2, states=loaded)
    assert_same(run.slots(6), Ranks(train(texts, "skipping"), 2, states=states).slots(6))


def test_state_dict_is_one_leaf_and_load_state_dict_takes_every_form(texts) -> None:
    make = train(texts)
    loader = loader_of(make)
    expected = list(islice(iter(loader_of(make)), 8))
    assert len(list(islice(iter(loader), 3))) == 3
    [leaf] = loader.state_dict().values()
    assert isinstance(leaf, str)
    for state in (
        loader.state_dict(),
        [loader.state_dict()],
        loader.save_state_rank(),
        loader.save_state_global(),
    ):
        resumed = loader_of(make)
        resumed.load_state_dict(through_json(state))
        assert_same(list(islice(iter(resumed), 5)), expected[3:])


def test_none_restores_nothing(texts) -> None:
    loader = loader_of(train(texts))
    loader.restore_state_rank(None)
    assert_same(next(iter(loader)), next(iter(loader_of(train(texts)))))


def test_restore_in_the_middle_of_iteration_takes_effect_at_the_next_iter(texts) -> None:
    make = train(texts)
    expected = list(islice(iter(loader_of(make)), 10))
    loader = loader_of(make)
    iterator = iter(loader)
    next(iterator)
    state = through_json(loader.save_state_rank())
    next(iterator)
    next(iterator)
    loader.restore_state_rank(state)
    assert_same(list(islice(iter(loader), 4)), expected[1:5])


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_saving_asks_no_worker_and_reads_nothing(texts, monkeypatch, num_workers) -> None:
    loader = loader_of(train(texts), num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    monkeypatch.setattr(loader._run, "_deliveries", None)  # whoever asked for more would fail
    monkeypatch.setattr(type(loader.dataset), "cursor", None)
    assert through_json(loader.save_state_rank())["count"] == 1


# ------------------------------------------------------------------------------------ refusals


def test_states_of_all_ranks_are_accepted_in_any_order(texts, states) -> None:
    make = train(texts, "skipping")
    for world_size in (1, 2, 3):
        forward = Ranks(make, world_size, states=states).slots(12)
        backward = Ranks(make, world_size, states=states[::-1]).slots(12)
        assert_same(forward, backward)


def test_own_state_alone_is_accepted_though_ranks_stand_at_different_steps(texts) -> None:
    make = train(texts, "skipping")
    run = Ranks(make, 2, num_streams=4)
    for rank, steps in ((0, 5), (1, 2)):
        for _ in range(steps):
            run.next(rank)
    states = run.save()
    for rank in range(2):
        loader = loader_of(make, rank=rank, world_size=2)
        loader.restore_state_rank(states[rank])
        assert_same(list(islice(iter(loader), 10)), list(islice(run.iterators[rank], 10)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_of_an_endless_run_at_different_steps_are_refused_by_name(texts, world_size) -> None:
    make = train(texts)
    run = Ranks(make, 2, num_streams=4)
    for rank, steps in ((0, 5), (1, 2)):
        for _ in range(steps):
            run.next(rank)
    message = refused(make, run.save(), world_size=world_size)
    assert "the ranks stand at different steps (rank 0: 5, rank 1: 2)" in message
    assert "own state only" in message


def test_missing_rank_is_refused(texts, states) -> None:
    for world_size in (1, 3):
        message = refused(train(texts, "skipping"), states[1:], world_size=world_size)
        assert "the states are of ranks [1] where the run had 2 ranks (0..1)" in message


def test_state_of_another_rank_alone_is_refused(texts, states) -> None:
    message = refused(train(texts, "skipping"), states[1:], rank=0, world_size=2)
    assert "this is rank 0 of 2" in message


def test_duplicate_rank_is_refused(texts, states) -> None:
    for given in ([states[0], states[0]], [*states, states[1]]):
        message = refused(train(texts, "skipping"), given, world_size=1)
        assert "Give the state of every rank once" in message


def test_stale_rank_state_is_refused(texts, states) -> None:
    make = train(texts, "skipping")
    run = Ranks(make, 2, states=states)
    run.steps(2)
    stale = [run.save()[0], states[1]]
    assert "different" in refused(make, stale, world_size=1)


def test_old_file_of_a_larger_run_is_refused(texts, states) -> None:
    """Four ranks saved into a folder before two did, and their files still lie around."""
    make = train(texts, "skipping")
    old = Ranks(make, 4, num_streams=4)
    old.steps(1)
    message = refused(make, [*states, *old.save()[2:]], world_size=2)
    assert "rank 0 and rank 2 have different 'world_size' (2 and 4)" in message


def test_dp_2_to_1_and_1_to_2_lose_and_repeat_nothing(texts) -> None:
    make = train(texts, "skipping")
    whole = Ranks(make, 1, num_streams=2).slots(60)
    run = Ranks(make, 2, num_streams=2)
    found = dict(run.steps(5))
    run = Ranks(make, 1, states=run.save())
    found.update(run.steps(11))
    run = Ranks(make, 2, states=run.save())
    found.update(run.steps(15))
    assert_same(dict(sorted(found.items())), {m: whole[m] for m in range(51)})


def test_another_number_of_streams_is_refused(texts, states) -> None:
    message = refused(train(texts, "skipping"), states, world_size=1, num_streams=3)
    assert message.startswith("the run has 4 streams, and WorkerConfig asks for num_streams=3")
    assert "num_streams=4" in message
    run = Ranks(train(texts, "skipping"), 1, num_streams=4, states=states)
    assert len(run.slots(3)) == 3


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"batch_size": 4}, "batch_size=3 where this pipeline has 4"),
        ({"shuffle_buffer_size": 100}, "shuffle_buffer_size=8 where this pipeline has 100"),
        ({"max_samples_per_sequence": 2}, "max_samples_per_sequence=5 where this pipeline has 2"),
        ({"parallel_shard_iters": 2}, "parallel_shard_iters=16 where this pipeline has 2"),
        ({"shuffle_over_epochs_multiplier": 2}, "_multiplier=1 where this pipeline has 2"),
        ({"repeat": False}, "repeat=True where this pipeline has False"),
        ({"encoder": "plain"}, "encode"),
        ({"batch_size": None}, "batch"),
        ({"batch_drop_last": True}, "batch_drop_last=False where this pipeline has True"),
    ],
)  # fmt: skip
def test_other_settings_are_refused_by_name(texts, states, settings, text) -> None:
    settings = {"encoder": "skipping", **settings}
    message = refused(train(texts, **settings), states, world_size=1)
    assert text in message
    assert "Build the pipeline with the settings that it was saved with" in message


def test_several_differences_are_all_named(texts, states) -> None:
    make = train(texts, "skipping", batch_size=4, shuffle_buffer_size=9)
    message = refused(make, states, world_size=1)
    assert "batch_size=3" in message
    assert "shuffle_buffer_size=8" in message
    assert "source texts/train" in message


def test_another_seed_is_refused(texts, states) -> None:
    message = refused(train(texts, "skipping"), states, world_size=1, seed_offset=3)
    assert "seed_offset=0 where this pipeline has 3" in message


def test_training_state_is_refused_by_validation(texts, states) -> None:
    assert "training=True" in refused(validation(texts, "skipping"), states, world_size=1)


def test_changed_data_are_noticed(tmp_path) -> None:
    folder = text_set(tmp_path / "texts", 20)
    make = train(folder)
    loader = loader_of(make)
    next(iter(loader))
    state = [through_json(loader.save_state_rank())]
    for file in folder.glob("*.tar"):
        file.unlink()
    (folder / ".nv-meta").rename(tmp_path / "old-meta")
    text_set(folder, 21)
    message = refused(make, state)
    assert "samples=20 where this pipeline has 21" in message
    assert "source texts/train" in message


def test_changed_bytes_of_the_same_number_of_samples_are_noticed(tmp_path) -> None:
    folder = text_set(tmp_path / "texts", 20, num_shards=1)
    make = train(folder)
    loader = loader_of(make)
    next(iter(loader))
    state = [through_json(loader.save_state_rank())]
    (folder / ".nv-meta").rename(tmp_path / "old-meta")
    write_tar(folder / "shard-000.tar", [(f"{i:05d}.txt", b"y" * 3000) for i in range(20)])
    from ..helpers import prepared

    prepared(folder, "TextSample", {"text": "txt"})
    assert "data=" in refused(make, state)


def test_moved_dataset_resumes(tmp_path) -> None:
    folder = text_set(tmp_path / "here" / "texts", 20)
    loader = loader_of(train(folder))
    expected = list(islice(iter(loader_of(train(folder))), 5))
    next(iter(loader))
    state = [through_json(loader.save_state_rank())]
    (tmp_path / "there").mkdir()
    folder = folder.rename(tmp_path / "there" / "texts")
    resumed = loader_of(train(folder))
    resumed.restore_state_global(state)
    assert [b.text for b in islice(iter(resumed), 4)] == [b.text for b in expected[1:]]


GARBAGE: list[Any] = [None, [], {}, "state", 7, [None], ["x"], [[]], [{}], [{"format": "other"}]]


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
def test_garbage_is_refused(texts, garbage) -> None:
    assert refused(train(texts), garbage)


def test_pickled_state_of_energon_is_refused_with_a_word(texts) -> None:
    message = refused(train(texts), [{"__class__": "SavableDataLoaderState", "worker_states": []}])
    assert "not a loader state of energon_lite" in message


@pytest.mark.parametrize("version", [0, 4, 6, "5", True, None])
def test_other_version_is_refused(texts, states, version) -> None:
    changed = [{**state, "version": version} for state in states]
    message = refused(train(texts, "skipping"), changed, world_size=1)
    assert f"format version {version!r}" in message
    assert "reads version 5 only" in message


def broken_states(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """States that lack one thing, or have something senseless in its place, at any depth."""
    for key in list(state) if isinstance(state, dict) else range(len(state)):
        where = f"{path}/{key}"
        if isinstance(state, dict):
            yield f"{where} missing", {k: v for k, v in state.items() if k != key}
        for garbage in (None, "garbage", -3, {"a": 1}, [[1]], 1.5):
            changed = copy.copy(state)
            changed[key] = garbage
            yield f"{where}={garbage!r}", changed
        if isinstance(state[key], (dict, list)) and where not in ("/config", "/stats"):
            for name, inner in broken_states(state[key], where):
                changed = copy.copy(state)
                changed[key] = inner
                yield name, changed


def resigned(state: Any) -> Any:
    """A broken state of which the checksum does not tell."""
    try:
        return signed(state)
    except (KeyError, TypeError):
        return state


def leaf_changes(value: Any) -> Iterator[Any]:
    """What is left of a plain JSON value if one leaf of it changes a little."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from ({**value, key: changed} for changed in leaf_changes(entry))
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from ([*value[:i], changed, *value[i + 1 :]] for changed in leaf_changes(entry))
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (value + 1, value + 10**18, str(value))
    elif isinstance(value, str):
        yield value + "é"


def test_any_change_of_a_saved_state_is_refused(texts, states) -> None:
    (loader,) = Ranks(train(texts, "skipping"), 1).loaders
    number = 0
    for broken in leaf_changes(states[0]):
        number += 1
        with pytest.raises(StateError):
            loader.restore_state_global([broken, states[1]])
    assert number > 100
    with pytest.raises(StateError, match="rank 0 does not have the checksum"):
        loader.restore_state_global([{**states[0], "items_in_pass": 5}, states[1]])


@pytest.mark.parametrize("name", ["base", "count"])
@pytest.mark.parametrize("value", [10**30, -1, True])
def test_counts_that_cannot_be_are_refused(texts, states, name, value) -> None:
    changed = [signed({**state, name: value}) for state in states]
    assert refused(train(texts, "skipping"), changed, world_size=1)


def test_state_is_the_same_after_json_and_torch_save(texts, tmp_path) -> None:
    make = train(texts, "skipping")
    run = Ranks(make, 1, num_streams=3)
    run.steps(7)
    (state,) = run.save()
    run_on = run.slots(3)
    row = dict.fromkeys(next(iter(state["stats"].values())), 0)
    for name, number in (("ü \ud800", 0.1 + 0.2), ("large", 1e300), ("int", 2**60)):
        state["stats"][name] = {**row, "target": number}
    state = signed(state)
    for _ in range(3):
        text = json.dumps(state, indent=3, ensure_ascii=True, sort_keys=True)
        torch.save(json.loads(text), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert_same(Ranks(make, 1, states=[state]).slots(3), run_on)


@pytest.mark.parametrize("world_size", [1, 2])
def test_corrupt_state_is_refused_or_resumes_exactly(texts, states, world_size) -> None:
    """No damage gives another exception than StateError, or other batches than the right ones."""
    make = train(texts, "skipping")
    loader = loader_of(make, world_size=world_size)
    loader.restore_state_global(states)
    expected = list(islice(iter(loader), 4))
    before = loader.save_state_rank()
    num_refused = 0
    for name, broken in broken_states(states[0]):
        try:
            loader.restore_state_global([resigned(broken), states[1]])
        except StateError:
            num_refused += 1
            assert loader.save_state_rank() == before, name
            continue
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        # A stream without a snapshot is computed again from its start.
        harmless = (
            "/streams/0 missing",
            "/streams/2 missing",
            "/checksum",
            "/pipeline",
            "/config missing",
        )
        if name.startswith("/streams/") and "/name='garbage'" in name:
            with pytest.raises(StateError, match="stands in source 'garbage'"):
                list(islice(iter(loader), 4))
        else:
            assert name.startswith(harmless), name
            assert_same(list(islice(iter(loader), 4)), expected)
        before = loader.save_state_rank()
    loader.restore_state_global(states)
    assert_same(list(islice(iter(loader), 4)), expected)
    assert num_refused > 60


def test_stream_state_of_another_stage_is_refused_when_restored(texts, states) -> None:
    changed = copy.deepcopy(states)
    changed[0]["streams"]["0"]["inner"][0]["stage"] = "no such stage"
    changed[0] = signed(changed[0])
    message = refused(train(texts, "skipping"), changed, world_size=1)
    assert "'no such stage'" in message


def test_refused_state_after_worker_processes_have_started_changes_nothing(texts, states) -> None:
    make = train(texts, "skipping")
    expected = list(islice(iter(loader_of(make)), 8))
    loader = loader_of(make, num_workers=1)
    iterator = iter(loader)
    assert_same(list(islice(iterator, 2)), expected[:2])
    with pytest.raises(StateError):
        loader.restore_state_global([{**states[0], "version": 9}])
    assert_same(list(islice(iterator, 6)), expected[2:])


@pytest.mark.parametrize("text", ["garbage", "e\u0301", "eJw=", "", 7])
def test_table_that_cannot_be_decompressed_is_refused(texts, states, text) -> None:
    changed = [signed(states[0] | {"streams": text}), states[1]]
    assert "'streams'" in refused(train(texts, "skipping"), changed)


def test_small_table_of_a_huge_value_is_refused(texts, states, monkeypatch) -> None:
    table = resume.compressed([0] * 10_000)
    monkeypatch.setattr(resume, "_MAX_BYTES", 20_000)
    changed = [signed(states[0] | {"streams": table}), states[1]]
    assert "of more than 20,000 bytes" in refused(train(texts, "skipping"), changed)
