"""One state of all ranks: gathered through the store, kept by checkpoints, loaded by any rank."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, IterableDataset

from energon_lite import (
    SavableDataLoader,
    StateError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_lite.core.topology import RankSlots

from ..helpers import Ranks, keys_of, train
from ..rank_processes import in_ranks

NUM_TEXTS = 60


def loader_of(path: Path, group: Any = None, **settings: Any) -> SavableDataLoader[Any]:
    """The loader of this rank of the process group, with as many streams as is the default."""
    config = WorkerConfig.default_worker_config(0, group)
    return get_savable_loader(train(path, "skipping")(config), max_skip_rate=1, **settings)


def steps(loader: SavableDataLoader[Any], number: int) -> list[list[str]]:
    return [keys_of(batch) for batch in islice(iter(loader), number)]


def in_slot_order(ranks: list[list[list[str]]], base: int = 0) -> list[list[str]]:
    slots = {
        RankSlots(base, rank, len(ranks), 4).slot(turn): keys
        for rank, own in enumerate(ranks)
        for turn, keys in enumerate(own)
    }
    return [slots[slot] for slot in sorted(slots)]


# ------------------------------------------------------------------ torch.distributed.checkpoint


def save_by_dcp(rank: int, path: Path, folder: Path) -> list[list[str]]:
    loader = loader_of(path)
    assert isinstance(loader, Stateful)
    found = steps(loader, 3)
    # Taken before the two steps that follow, though written meanwhile.
    future = dcp.async_save({"loader": loader}, checkpoint_id=folder / "async")
    found += steps(loader, 2)
    future.result()
    dcp.save({"loader": loader}, checkpoint_id=folder / "saved")
    return found


def resume_by_dcp(rank: int, path: Path, source: Path, target: Path) -> list[list[str]]:
    loader = loader_of(path)
    dcp.load({"loader": loader}, checkpoint_id=source)
    found = steps(loader, 2)
    dcp.save({"loader": loader}, checkpoint_id=target)
    return found + steps(loader, 2)


@pytest.mark.processes
def test_dcp_saves_on_four_ranks_and_resumes_on_two_and_then_on_three(texts, tmp_path) -> None:
    expected = [
        keys_of(b) for b in Ranks(train(texts, "skipping"), 1, num_streams=4).slots(40).values()
    ]
    given = in_ranks(save_by_dcp, 4, tmp_path / "4", texts, tmp_path)
    assert in_slot_order(given) == expected[:20]
    second = tmp_path / "second"
    given = in_ranks(resume_by_dcp, 2, tmp_path / "2", texts, tmp_path / "saved", second)
    assert in_slot_order(given) == expected[20:28]
    given = in_ranks(resume_by_dcp, 3, tmp_path / "3", texts, second, tmp_path / "third")
    assert in_slot_order(given, 24) == expected[24:36]
    given = in_ranks(resume_by_dcp, 1, tmp_path / "1", texts, tmp_path / "async", tmp_path / "4th")
    assert in_slot_order(given) == expected[12:16]


# ----------------------------------------------------------------------------------- peers


def in_a_mesh(rank: int, path: Path) -> Any:
    """Tensor-parallel ranks 0 and 1, 2 and 3; data-parallel ranks 0 and 2, 1 and 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    loader = loader_of(path, groups[rank % 2])
    found = steps(loader, 3)
    state = loader.state_dict()
    expected = steps(loader, 3)
    resumed = loader_of(path, groups[rank % 2])
    resumed.load_state_dict(state)
    assert steps(resumed, 3) == expected
    states = loader.save_state_global(global_dst_rank=2 + rank % 2)
    assert (states is not None) == (rank >= 2)
    resumed.restore_state_global(states, src_rank=1)
    assert steps(resumed, 3) == steps(loader, 3)
    with pytest.raises(ValueError, match=r"rank 9 is not in the data-parallel group"):
        loader.save_state_global(global_dst_rank=9)
    return found + expected, state


@pytest.mark.processes
def test_peers_of_one_data_parallel_rank_get_equal_batches_and_states(texts, tmp_path) -> None:
    expected = [
        keys_of(b) for b in Ranks(train(texts, "skipping"), 1, num_streams=2).slots(12).values()
    ]
    found = in_ranks(in_a_mesh, 4, tmp_path, texts)
    assert found[0][0] == found[1][0]
    assert found[2][0] == found[3][0]
    assert in_slot_order([found[0][0], found[2][0]]) == expected
    states = [state for _, state in found]
    assert states[0] == states[2]
    assert states[1] == states[3]  # which differs from that of the peers in seconds only


# ------------------------------------------------------------------------------- unknown groups


def with_a_wrong_group(rank: int, path: Path) -> None:
    config = WorkerConfig(rank=0, world_size=2, num_workers=0)
    loader = get_savable_loader(train(path)(config))
    with pytest.raises(StateError, match=r"data_parallel_group=.*save_state_rank"):
        loader.state_dict()
    assert loader.save_state_rank()["count"] == 0
    alone = get_savable_loader(train(path)(WorkerConfig(rank=0, world_size=1, num_workers=0)))
    if rank == 0:
        assert alone.state_dict()  # a run of one rank asks nobody
    loader = loader_of(path)
    for wrong, error in (("x", "str is no list"), (object(), "not JSON serializable")):
        with pytest.raises(StateError, match=error):
            loader.restore_state_global(wrong if rank == 2 else None, src_rank=2)
    with pytest.raises(ValueError, match="src_rank=3"):
        loader.restore_state_global(None, src_rank=3)


@pytest.mark.processes
def test_a_state_of_all_ranks_of_an_unknown_group_is_refused(texts, tmp_path) -> None:
    in_ranks(with_a_wrong_group, 3, tmp_path, texts)


# -------------------------------------------------------------------------------- what it is


def test_state_without_a_process_group_is_that_of_the_rank(texts) -> None:
    run = Ranks(train(texts), 2, num_streams=4)
    run.steps(3)
    states = [loader.state_dict() for loader in run.loaders]
    expected = [keys_of(batch) for batch in run.slots(6).values()]
    again = Ranks(train(texts), 2)
    for loader, state in zip(again.loaders, states, strict=True):
        loader.load_state_dict(state)
    assert [keys_of(batch) for batch in again.slots(6).values()] == expected
    alone = Ranks(train(texts), 1)
    alone.loaders[0].load_state_dict(states)
    assert [keys_of(batch) for batch in alone.slots(6).values()] == expected


def test_state_dict_is_no_state_of_a_rank(texts) -> None:
    (loader,) = Ranks(train(texts), 1).loaders
    with pytest.raises(StateError, match="pass it to load_state_dict"):
        loader.restore_state_rank(loader.state_dict())


def test_loader_is_a_torch_data_loader(texts) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=2)
    dataset = train(texts)(config)
    loader = get_savable_loader(dataset, prefetch_factor=3)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.dataset, IterableDataset)
    assert loader.dataset.config() == dataset.config()
    assert (len(loader.dataset), len(dataset)) == (60, 20)
    assert (loader.batch_size, loader.batch_sampler, loader.num_workers) == (None, None, 2)
    assert (loader.prefetch_factor, loader.persistent_workers, loader.timeout) == (3, True, 0)
    assert (loader.drop_last, loader.pin_memory) == (False, torch.cuda.is_available())
    # Nobody but a trainer that makes another loader of all this would call it.
    with pytest.raises(RuntimeError, match="read all data"):
        next(iter(DataLoader(dataset, batch_size=None, collate_fn=loader.collate_fn)))
    for name in ("sampler", "worker_init_fn", "multiprocessing_context", "generator"):
        assert hasattr(loader, name)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, start_method="spawn")
    loader = get_savable_loader(train(texts)(config))
    assert (loader.num_workers, loader.prefetch_factor) == (0, None)


def test_torchs_own_loader_reads_a_dataset_once_or_refuses(texts, monkeypatch) -> None:
    dataset = train(texts, repeat=False)(WorkerConfig(rank=0, world_size=1, num_workers=0))
    found = [keys_of(batch) for batch in DataLoader(dataset, batch_size=None)]
    assert len({key for keys in found for key in keys}) == 60
    with pytest.raises(RuntimeError, match="in each of its 2 worker processes"):
        next(refusing := iter(DataLoader(dataset, batch_size=None, num_workers=2)))
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # 5 s for each
    refusing._shutdown_workers()
    for loader in (DataLoader(dataset), DataLoader(dataset, batch_size=4, collate_fn=list)):
        with pytest.raises(RuntimeError, match=r"batches of the batches.*def get_train_dataloader"):
            next(iter(loader))
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    samples = get_train_dataset(texts, batch_size=None, worker_config=config)
    assert len(next(iter(DataLoader(samples, batch_size=4, collate_fn=list)))) == 4
    with pytest.raises(TypeError, match=r"use energon_lite.get_loader\(dataset\)"):
        next(iter(DataLoader(samples)))


def test_names_of_other_versions_of_energon(texts) -> None:
    make = train(texts)
    first, second = Ranks(make, 1).loaders[0], Ranks(make, 1).loaders[0]
    expected = steps(first, 2)
    with pytest.warns(FutureWarning, match="save_state_global"):
        states = first.save_state(0)
    expected = steps(first, 3)
    with pytest.warns(FutureWarning, match="restore_state_global"):
        second.restore_state(states)
    assert steps(second, 3) == expected
    assert states is not None
    with second.with_restored_state_rank(states[0]) as loader:
        assert steps(loader, 3) == expected
    assert steps(second.with_restored_state_global(states), 3) == expected
    second.restore_state_global(state=states)
    second.shutdown()
    assert steps(second, 3) == expected


# ------------------------------------------------------------------- before init_process_group


def test_loaders_made_under_torchrun_before_the_process_group_read_different_data(
    texts, monkeypatch
) -> None:
    found = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        found.append([key for keys in steps(loader_of(texts), 5) for key in keys])
    assert found[0]
    assert not set(found[0]) & set(found[1])


def made_too_early(rank: int, path: Path, folder: Path) -> None:
    dist.barrier()  # else the other rank may be connecting still
    dist.destroy_process_group()
    loader = loader_of(path)
    assert (loader.worker_config.rank, loader.worker_config.world_size) == (0, 1)
    explicit = get_savable_loader(train(path)(WorkerConfig(rank=0, world_size=1, num_workers=0)))
    meeting = f"file://{folder / 'second'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    with pytest.raises(RuntimeError, match=f"now has rank {rank} of 2"):
        iter(loader)
    assert steps(explicit, 1)  # the word of the user


@pytest.mark.processes
def test_loader_that_took_itself_for_the_only_rank_refuses_to_run_in_a_group(
    texts, tmp_path
) -> None:
    in_ranks(made_too_early, 2, tmp_path / "run", texts, tmp_path)
