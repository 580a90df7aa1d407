"""What a state is, and which states are refused; nothing is half applied."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
import torch

from energon_lite.core.key_columns import from_planes, planes_of
from energon_lite.loader.count_table import CountTable
from energon_lite.loader.resume import decompressed

from ..helpers import (
    Ranks,
    assert_same,
    prepared,
    signed,
    text_set,
    through_json,
    train,
    write_tar,
)
from .workers import loader_from

# ------------------------------------------------------------------------------- what a state is


def test_state_is_plain_json_with_format_and_version(states) -> None:
    for rank, state in enumerate(states):
        assert (state["format"], state["version"]) == ("energon_lite.loader", 7)
        assert (state["rank"], state["world_size"], state["num_streams"]) == (rank, 2, 4)
        assert sorted(state["streams"]) == [str(s) for s in (rank, rank + 2)]
        assert json.loads(json.dumps(state)) == state


def test_size_of_a_state_does_not_grow_with_steps_or_payload(tmp_path) -> None:
    sizes = []
    for length in (10, 5000):
        folder = tmp_path / f"texts-{length}"
        members = [(f"{i:05d}.txt", b"x" * length) for i in range(30)]
        write_tar(folder / "shard-0.tar", members)
        loader = loader_from(train(prepared(folder, "TextSample", {"text": "txt"})), num_streams=3)
        for steps in (10, 90):
            assert len(list(islice(iter(loader), steps))) == steps
            sizes.append(len(json.dumps(loader.save_state_rank())))
    assert max(sizes) - min(sizes) < 60


def test_state_of_a_loader_is_a_copy(texts) -> None:
    loader = loader_from(train(texts))
    iterator = iter(loader)
    next(iterator)
    state = loader.save_state_rank()
    saved = through_json(state)
    next(iterator)
    assert through_json(state) == saved
    state["emitted"].append(1)
    assert loader.save_state_rank()["emitted"] == []


def test_state_dict_is_one_leaf_and_load_state_dict_takes_every_form(texts) -> None:
    make = train(texts)
    loader = loader_from(make)
    expected = list(islice(iter(loader_from(make)), 8))
    assert len(list(islice(iter(loader), 3))) == 3
    [leaf] = loader.state_dict().values()
    assert isinstance(leaf, str)
    for state in (
        loader.state_dict(),
        [loader.state_dict()],
        loader.save_state_rank(),
        loader.save_state_global(),
    ):
        resumed = loader_from(make)
        resumed.load_state_dict(through_json(state))
        assert_same(list(islice(iter(resumed), 5)), expected[3:])


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_restore_in_the_middle_of_iteration_takes_effect_at_the_next_iter(
    texts, num_workers
) -> None:
    make = train(texts)
    expected = list(islice(iter(loader_from(make, num_streams=2)), 10))
    loader = loader_from(make, num_workers=num_workers, num_streams=2)
    loader.restore_state_rank(None)  # restores nothing
    iterator = iter(loader)
    next(iterator)
    state = through_json(loader.save_state_rank())
    next(iterator)
    next(iterator)
    loader.restore_state_rank(state)
    assert_same(list(islice(iter(loader), 4)), expected[1:5])


# ------------------------------------------------------------------------------- what is restored


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])
def test_saving_asks_no_worker_and_reads_nothing(texts, monkeypatch, num_workers) -> None:
    loader = loader_from(train(texts), num_workers=num_workers)
    iterator = iter(loader)
    next(iterator)
    monkeypatch.setattr(loader._run, "_deliveries", None)  # whoever asked for more would fail
    monkeypatch.setattr(type(loader.dataset), "cursor", None)
    assert through_json(loader.save_state_rank())["count"] == 1


def test_own_state_alone_is_accepted_though_ranks_stand_at_different_steps(texts) -> None:
    make = train(texts, "skipping")
    run = Ranks(make, 2, num_streams=4)
    for rank, steps in ((0, 5), (1, 2)):
        for _ in range(steps):
            run.next(rank)
    states = run.save()
    for rank in range(2):
        loader = loader_from(make, rank=rank, world_size=2)
        loader.restore_state_rank(states[rank])
        assert_same(list(islice(iter(loader), 10)), list(islice(run.iterators[rank], 10)))


def test_moved_dataset_resumes(tmp_path) -> None:
    folder = text_set(tmp_path / "here" / "texts", 20)
    loader = loader_from(train(folder))
    expected = list(islice(iter(loader_from(train(folder))), 5))
    next(iter(loader))
    state = [through_json(loader.save_state_rank())]
    (tmp_path / "there").mkdir()
    folder = folder.rename(tmp_path / "there" / "texts")
    resumed = loader_from(train(folder))
    resumed.restore_state_global(state)
    assert [b.text for b in islice(iter(resumed), 4)] == [b.text for b in expected[1:]]


def test_state_is_the_same_after_json_and_torch_save(texts, tmp_path) -> None:
    make = train(texts, "skipping")
    run = Ranks(make, 1, num_streams=3)
    run.steps(7)
    (state,) = run.save()
    run_on = run.slots(3)
    state["stats"]["others"] = ["ü \ud800"]
    state["stats"]["columns"] = [
        planes_of(np.append(from_planes(planes, 1), 10**14)) for planes in state["stats"]["columns"]
    ]
    state = signed(state)
    for _ in range(3):
        text = json.dumps(state, indent=3, ensure_ascii=True, sort_keys=True)
        torch.save(json.loads(text), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert_same(Ranks(make, 1, states=[state]).slots(3), run_on)


@pytest.mark.parametrize("world_size", [16, 8, 4])
def test_a_rank_reads_the_streams_and_counts_of_its_own_part_of_the_states(
    texts, world_size, monkeypatch
) -> None:
    """Sixteen streams on eight ranks: of sixteen, each needs the state of one."""
    make = train(texts, batch_size=1)
    run = Ranks(make, 8, num_streams=16)
    run.steps(2)
    states = [loader.save_state_rank() for loader in run.loaders]
    read: list[str] = []
    monkeypatch.setattr(
        "energon_lite.loader.resume.decompressed",
        lambda text, name: read.append(name) or decompressed(text, name),
    )
    from_json = CountTable.from_json
    monkeypatch.setattr(
        "energon_lite.loader.resume.CountTable.from_json",
        lambda value, weights: read.append("stats") or from_json(value, weights),
    )
    loader = Ranks(make, world_size, num_streams=16).loaders[1]
    loader.restore_state_global(through_json(states))
    own = max(1, 8 // world_size)
    assert read.count("streams") == own
    assert read.count("stats") <= own + 1  # and for the targets, which are those of the run
    assert read.count("config") == 0  # it is that of the pipeline
    resumed = Ranks(make, world_size, states=states)
    expected = Ranks(make, 1, num_streams=16).slots(48)
    assert_same(resumed.slots(32), {slot: expected[slot] for slot in range(16, 48)})
