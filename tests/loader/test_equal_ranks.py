"""Ranks with different settings: an error that names the setting, before the first batch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from energon_lite import (
    SavableDataLoader,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_lite.loader import rank_store

from ..helpers import metadataset, text_set, text_sets, through_json
from ..rank_processes import in_ranks
from .workers import wait_until


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    text_set(root / "other" / "a", 25)
    return text_sets(root, a=24, b=24)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store of two ranks, which are loaders of this process."""
    found = dist.HashStore()
    monkeypatch.setattr(rank_store, "group_store", lambda _: (found, 2))
    monkeypatch.setattr(rank_store, "QUIET_SEC", 0.2)
    return found


def loader_of(path: Any, rank: int, **settings: Any) -> SavableDataLoader[Any]:
    names = ("num_workers", "num_streams", "seed_offset", "world_size")
    own = {name: settings.pop(name) for name in names if name in settings}
    config = WorkerConfig(**{"rank": rank, "world_size": 2, "num_workers": 0, **own})
    make = get_val_dataset if settings.pop("is_validation", False) else get_train_dataset
    settings = {"batch_size": 2, **settings}
    return get_savable_loader(make(path, worker_config=config, **settings))


def blend(sets: Path, **weights: int) -> Any:
    entries = [{"path": str(sets / name), "weight": own} for name, own in weights.items()]
    return metadataset({"blend": entries})


DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"num_workers": 2}, "rank 0 has num_streams=2 where rank 1 has 4"),
    ({"num_streams": 4}, {"num_streams": 6}, "rank 0 has num_streams=4 where rank 1 has 6"),
    ({"seed_offset": 42}, {"seed_offset": 43}, "rank 0 has seed_offset=42 where rank 1 has 43"),
    ({}, {"batch_size": 3}, "rank 0 has batch_size=2 where rank 1 has 3"),
    ({}, {"shuffle_buffer_size": 9}, "rank 0 has shuffle_buffer_size=0 where rank 1 has 9"),
    ({"repeat": False}, {}, "repeat"),
    ({}, {"virtual_epoch_length": 5}, "virtual_epoch_length=None where rank 1 has 5"),
    ({"path": ["a"]}, {"path": ["b"]}, "sources[0]='a/train' where rank 1 has 'b/train'"),
    ({"path": ["a"]}, {"path": ["other/a"]}, "rank 0 has samples=24 where rank 1 has 25"),
    (
        {"blend": {"a": 1, "b": 1}}, {"blend": {"a": 1, "b": 2}},
        "weight=1.0 where rank 1 has 2.0",
    ),
    ({"blend": {"a": 1, "b": 1}}, {"blend": {"a": 1}}, "sources=["),
    ({"epoch": 0}, {"epoch": 1}, "rank 0 has set_epoch=0 where rank 1 has 1"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "words"), DIFFERENT)
def test_different_setting_is_named(sets: Path, store: Any, first, second, words) -> None:
    def begin(rank: int, settings: dict[str, Any]) -> Any:
        settings = dict(settings)
        epoch, path = settings.pop("epoch", None), sets / "/".join(settings.pop("path", ["a"]))
        weights = settings.pop("blend", None)
        loader = loader_of(blend(sets, **weights) if weights else path, rank, **settings)
        if epoch is not None:
            loader.set_epoch(epoch)
        return next(iter(loader))

    begin(0, first)
    with pytest.raises(RuntimeError, match="Give all ranks of a run the same settings") as caught:
        begin(1, second)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 600
    begin(1, first)  # with the right ones it begins


def test_state_that_one_rank_restored_is_named(sets: Path, store: Any) -> None:
    loader = loader_of(sets / "a", 0)
    next(iter(loader))
    state = through_json(loader.save_state_rank())
    restored = [loader_of(sets / "a", 0), loader_of(sets / "a", 1)]
    restored[0].restore_state_rank(state)
    next(iter(restored[0]))
    begin = loader_of(sets / "a", 1)
    next(iter(begin))  # as rank 0 did at first
    with pytest.raises(RuntimeError, match="is_restored=True where rank 1 has False"):
        next(iter(restored[1]))


EQUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"num_workers": 1, "num_streams": 4}, {"num_workers": 2, "num_streams": 4}),
    ({"is_validation": True, "split_part": "train"}, {"batch_size": 3}),  # two kinds
    ({"world_size": 1}, {"seed_offset": 1}),  # a loader of rank 0 alone
]


@pytest.mark.parametrize(("first", "second"), EQUAL)
def test_right_settings_begin(sets: Path, store: Any, first, second) -> None:
    for rank, settings in enumerate((first, second)):
        loader = loader_of(sets / "a", rank, **settings)
        next(iter(loader))
        loader.shutdown()


def test_rank_that_looks_at_another_loader_first_is_no_error(sets: Path, store: Any) -> None:
    """Rank 0 looks at a batch alone, and begins the loader of all after rank 1."""
    next(iter(loader_of(sets / "a", 0, batch_size=1)))
    num_keys = store.num_keys()

    def begin_late() -> None:
        wait_until(lambda: store.num_keys() > num_keys)  # rank 1 has begun
        next(iter(loader_of(sets / "a", 0)))

    late = threading.Thread(target=begin_late)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_store, "QUIET_SEC", 20)  # rank 1 waits as long for rank 0
        late.start()
        next(iter(loader_of(sets / "a", 1)))
        late.join()
    for batch_size in (3, 4):  # loaders that come later are compared again
        for rank in (1, 0):
            next(iter(loader_of(sets / "a", rank, batch_size=batch_size)))
    next(iter(loader_of(sets / "a", 0, batch_size=5)))
    with pytest.raises(RuntimeError, match="rank 0 has batch_size=5 where rank 1 has 6"):
        next(iter(loader_of(sets / "a", 1, batch_size=6)))


def test_processes_of_other_roles_are_not_compared(sets: Path, monkeypatch) -> None:
    """Of four processes of one store two pairs read their own data."""
    found = dist.HashStore()
    monkeypatch.setattr(rank_store, "group_store", lambda _: (found, 4))
    for batch_size in (2, 3):
        next(iter(loader_of(sets / "a", 0, batch_size=batch_size)))
        next(iter(loader_of(sets / "a", 1, batch_size=batch_size)))


def waits(rank: int, path: Path, repeat: bool) -> str:
    """What rank 0 gets, which has begun, and waits for a vote or a state of rank 1."""
    rank_store.QUIET_SEC = 0.1
    loader = loader_of(path, rank, seed_offset=rank, repeat=repeat)
    if rank == 1:
        store = dist.distributed_c10d._get_default_store()
        store.wait(["rank 0 has begun"])
    try:
        if repeat and rank == 0:
            next(iter(loader))
        dist.distributed_c10d._get_default_store().set("rank 0 has begun", "")
        next(iter(loader))
        loader.state_dict()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("repeat", [False, True])
def test_waiting_ranks_get_the_error(sets: Path, tmp_path: Path, repeat: bool) -> None:
    found = in_ranks(waits, 2, tmp_path, sets / "a", repeat)
    assert all("different settings: rank" in text and "seed_offset" in text for text in found)
