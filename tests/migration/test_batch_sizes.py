"""A run that resumes with another batch size: each stream continues with its next sample."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    DefaultTaskEncoder,
    StateError,
    WorkerConfig,
    get_savable_loader,
)
from energon_lite.core.keys import leaves
from energon_lite.extras.trainers.loader_callback import LoaderCallback

from ..helpers import Ranks, blend_maker, pairwise, text_sets, through_json, train
from .test_migration import Packed, Skipping

NUM_STREAMS = 4
BLEND = "blend: [{weight: 2, path: a}, {weight: 1, path: b}]"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_sets(tmp_path_factory.mktemp("sizes"), a=50, b=23)


def packed(root: Path, **settings: Any) -> Any:
    return blend_maker(root, BLEND, Packed, **settings)


def blended(root: Path, **settings: Any) -> Any:
    return blend_maker(root, BLEND, DefaultTaskEncoder, **settings)


def plain(root: Path, **settings: Any) -> Any:
    return train(root / "a", **settings)


def skipping(root: Path, **settings: Any) -> Any:
    return blend_maker(root, BLEND, Skipping, **settings)


def expanding(root: Path, **settings: Any) -> Any:
    return train(root / "a", "expanding", **settings)


def items_of(slots: dict[int, Any]) -> list[list[str]]:
    """The texts of each stream, in their order."""
    found: list[list[str]] = [[] for _ in range(NUM_STREAMS)]
    for slot in sorted(slots):
        found[slot % NUM_STREAMS] += slots[slot].text
    return found


def resumed(make: Any, states: Any, world_size: int, num_workers: int = 0) -> Ranks:
    run = Ranks(make, world_size, num_workers)
    for loader in run.loaders:
        loader.restore_state_global(through_json(states), migrate=True)
    run.iterators = [iter(loader) for loader in run.loaders]
    return run


CASES = pairwise(
    [plain, skipping, expanding, blended, packed],
    [((1, 1), 3), ((1, 4), 7), ((4, 2), 2)],
    [(4, 2), (2, 5)],
)


@pytest.mark.parametrize(("make", "run", "sizes"), CASES)
def test_streams_continue_with_their_next_item(sets, make, run, sizes) -> None:
    worlds, steps = run
    singles = Ranks(make(sets, batch_size=1), 1, num_streams=NUM_STREAMS)
    first = Ranks(make(sets, batch_size=sizes[0]), worlds[0], num_streams=NUM_STREAMS)
    slots = first.steps(steps)
    edited = resumed(make(sets, batch_size=sizes[1]), first.save(), worlds[1])
    later = edited.steps(4)
    assert {len(batch.text) for batch in later.values()} == {sizes[1]}
    assert not slots.keys() & later.keys()
    last = resumed(make(sets, batch_size=sizes[0]), edited.save(), 1).steps(3)
    found = items_of({**slots, **later, **last})
    expected = items_of(singles.steps(NUM_STREAMS * max(map(len, found))))
    assert all(map(len, found))
    for own, all_of_stream in zip(found, expected, strict=True):
        assert own == all_of_stream[: len(own)]


@pytest.mark.parametrize("sizes", [(4, 2), (2, 5)])
@pytest.mark.parametrize("worlds", [(1, 2), (2, 1)])
def test_finite_pass_has_each_sample_once(sets: Path, sizes, worlds) -> None:
    settings = {"repeat": False}
    run = Ranks(plain(sets, batch_size=sizes[0], **settings), worlds[0], num_streams=NUM_STREAMS)
    first = run.steps(3)
    edited = resumed(plain(sets, batch_size=sizes[1], **settings), run.save(), worlds[1])
    rest = edited.rest()
    keys = [key for batch in [*first.values(), *rest.values()] for key in batch.__key__]
    assert sorted(keys) == [f"{i:05d}" for i in range(50)]
    second = [key for loader in edited.loaders for batch in loader for key in batch.__key__]
    assert sorted(second) == sorted(keys)


def test_blend_and_batch_size_are_edited_at_once(sets: Path) -> None:
    run = Ranks(blended(sets, batch_size=4), 1, num_streams=NUM_STREAMS)
    first = run.steps(8)
    edit = blend_maker(sets, BLEND.replace("2", "1"), DefaultTaskEncoder, batch_size=3)
    loader = get_savable_loader(edit(WorkerConfig(rank=0, world_size=1, num_workers=0)))
    edits = loader.restore_state_global(through_json(run.save()), migrate=True)
    assert edits == ["batch_size=4 is now 3", "source a/train: weight 2.0 is now 1.0"]
    later = islice(loader, 3)
    drawn = [leaf[:3] for b in [*first.values(), *later] for leaf in leaves(b.__restore_key__)]
    assert len(set(drawn)) == len(drawn) == 8 * 4 + 3 * 3


def test_batches_that_must_be_computed_again_are_refused(sets: Path) -> None:
    """Three ranks share four streams, and are ahead of one another in these."""
    run = Ranks(plain(sets, batch_size=4), 3, num_streams=NUM_STREAMS)
    run.steps(3)
    words = "Resume on 1, 2 or 4 ranks from states of one step"
    with pytest.raises(StateError, match=words) as caught:
        resumed(plain(sets, batch_size=2), run.save(), 3)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("way", ["argument", "loader", "callback"])
def test_each_way_to_restore_offers_migrate(sets: Path, way: str, tmp_path: Path) -> None:
    make = plain(sets, batch_size=4)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    loader = get_savable_loader(make(config))
    next(iter(loader))
    state = through_json(loader.state_dict())
    other = plain(sets, batch_size=2)(config)
    resumed = get_savable_loader(other, migrate=way == "loader")
    if way == "callback":
        folder = tmp_path / "checkpoint-1"
        folder.mkdir()
        step = type("State", (), {"global_step": 1, "log_history": []})()
        saving = type(
            "Args", (), {"output_dir": tmp_path, "should_save": True, "resume_from_checkpoint": ""}
        )
        LoaderCallback().on_save(saving, step, None, train_dataloader=loader)
        with pytest.raises(StateError, match="batch_size=4 is now 2"):
            LoaderCallback().on_train_begin(saving, step, None, train_dataloader=resumed)
        LoaderCallback(migrate=True).on_train_begin(saving, step, None, train_dataloader=resumed)
    else:
        resumed.load_state_dict(state, migrate=way == "argument")
    assert len(next(iter(resumed)).text) == 2
