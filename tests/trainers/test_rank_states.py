"""States of ranks in checkpoints: of torch.distributed, in plain files, as Megatron-LM has them."""

from __future__ import annotations

import json
import time
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from energon_lite import StateError, WorkerConfig

from ..helpers import text_set
from .data import NUM_STREAMS, Model, in_slot_order, keys_of, train_loader, worker_config
from .ranks import run_ranks

pytestmark = pytest.mark.processes


def train_dcp(folder, load, save, steps, after, use_async):
    """Loads, trains `steps`, saves, trains `after` more; returns the keys of all of them."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    loader = train_loader(folder, worker_config(num_workers=dist.get_world_size() % 2))
    assert isinstance(loader, Stateful)
    state = {"loader": loader, "weight": torch.zeros(3)}
    if load is not None:
        dcp.load(state, checkpoint_id=load)
    seen = [keys_of(batch) for batch in islice(loader, steps)]
    if save is not None:
        if use_async:
            group = dist.new_group(backend="gloo")
            saving = dcp.async_save(state, checkpoint_id=save, process_group=group)
            # What is trained while the checkpoint is written is not in it.
            seen += [keys_of(batch) for batch in islice(loader, after)]
            saving.result()
        else:
            dcp.save(state, checkpoint_id=save)
            seen += [keys_of(batch) for batch in islice(loader, after)]
    dist.barrier()
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("use_async", [False, True], ids=["save", "async_save"])
def test_checkpoint_of_4_ranks_is_resumed_on_2_and_on_3(use_async: bool, tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 50)
    unbroken = run_ranks(1, train_dcp, folder, None, None, 40, 0, False)[0]
    first, second = tmp_path / "first", tmp_path / "second"
    ranks = run_ranks(4, train_dcp, folder, None, first, 3, 2, use_async)
    assert in_slot_order(ranks) == unbroken[:20]
    ranks = run_ranks(2, train_dcp, folder, first, second, 6, 2, use_async)
    assert in_slot_order(ranks) == unbroken[12:28]
    ranks = run_ranks(3, train_dcp, folder, second, None, 5, 0, use_async)
    assert in_slot_order(ranks) == unbroken[24:39]


def save_on_one_rank(folder: Path) -> str:
    dist.init_process_group("gloo")
    loader = train_loader(folder, state_timeout_sec=0.5)
    list(islice(loader, 2))
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(StateError) as caught:
            loader.state_dict()
        message = str(caught.value)
    dist.barrier()
    # Nothing is lost: the next time all of them call it.
    assert loader.state_dict()
    dist.barrier()
    return message


def test_rank_that_saves_alone_ends_with_an_error_that_names_the_others(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 20)
    message = run_ranks(3, save_on_one_rank, folder)[0]
    assert "ranks [1, 2] did not call state_dict()" in message
    assert "save_state_rank()" in message


def train_ddp(folder: Path, path: Path, save_at: int, steps: int, per_rank: bool = False):
    """Resumes from `path` where there is one, trains, saves at a step; returns the keys seen."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = train_loader(folder, worker_config(num_workers=dist.get_world_size() % 2))
    own = path.with_suffix(f".{rank}") if per_rank else path
    if own.exists():
        saved = torch.load(own, weights_only=True)
        if per_rank:
            loader.restore_state_rank(saved["loader"])
        else:
            loader.restore_state_global(saved["loader"] if rank == 0 else None, src_rank=0)
    model = Model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for step, batch in enumerate(islice(loader, steps), start=1):
        wrapped(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == save_at:
            state: Any = loader.save_state_rank() if per_rank else loader.save_state_global()
            if per_rank or rank == 0:
                torch.save({"loader": state}, own)
    # No destroy_process_group: while DDP still holds the group, torch may wait for ever in it.
    dist.barrier()
    return model.seen


def test_run_goes_from_2_to_3_to_1_ranks_with_each_batch_once(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 40)
    unbroken = run_ranks(1, train_ddp, folder, tmp_path / "none", 0, 36)[0]
    path = tmp_path / "state.pt"
    found = in_slot_order(run_ranks(2, train_ddp, folder, path, 6, 9))
    assert found == unbroken[:18]
    found = in_slot_order(run_ranks(3, train_ddp, folder, path, 4, 8))
    assert found == unbroken[12:36]
    assert run_ranks(1, train_ddp, folder, path, 0, 12)[0] == unbroken[24:36]


def test_each_rank_resumes_from_its_own_file(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 40)
    path = tmp_path / "state.pt"
    whole = run_ranks(2, train_ddp, folder, path, 5, 12, True)
    assert run_ranks(2, train_ddp, folder, path, 0, 7, True) == [keys[5:] for keys in whole]
    state = torch.load(path.with_suffix(".0"), weights_only=True)["loader"]
    assert json.loads(json.dumps(state)) == state


def save_and_end(folder: Path) -> bool:
    dist.init_process_group("gloo")
    loader = train_loader(folder)
    list(islice(loader, 2))
    if dist.get_rank() == 1:  # this rank looks late whether the states are there
        pause = time.sleep
        time.sleep = lambda _: pause(0.5)  # type: ignore[assignment]
    return loader.save_state_global() is None


def test_rank_that_holds_the_store_may_end_as_soon_as_it_has_saved(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 20)
    assert run_ranks(2, save_and_end, folder) == [False, True]


def train_megatron(folder: Path, root: Path, is_resumed: bool) -> tuple[int, list[list[str]]]:
    """Trains with 2 data-parallel ranks of 2 tensor-parallel peers each."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # as in Megatron, peers are adjacent
    group = groups[rank % 2]
    config = WorkerConfig(
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        num_workers=rank % 2,  # peers may even differ in that
        data_parallel_group=group,
        num_streams=NUM_STREAMS,
    )
    loader = train_loader(folder, config)
    dist.destroy_process_group()  # from here on nobody can talk
    path = root / f"train_dataloader_dprank{config.rank:03d}.pt"
    if is_resumed:
        saved = torch.load(path, weights_only=True)
        loader.restore_state_rank(saved["dataloader_state_dict"])
    seen = [keys_of(batch) for batch in islice(loader, 7)]
    if rank % 2 == 0 and not is_resumed:
        torch.save({"dataloader_state_dict": loader.save_state_rank()}, path)
    return config.rank, seen + [keys_of(batch) for batch in islice(loader, 5)]


def test_peers_get_equal_batches_without_talking_and_each_rank_has_its_file(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 40)
    found = run_ranks(4, train_megatron, folder, tmp_path, False)
    assert [rank for rank, _ in found] == [0, 0, 1, 1]
    assert found[0] == found[1]
    assert found[2] == found[3]
    keys = [key for batch in in_slot_order([found[0][1], found[2][1]])[:18] for key in batch]
    assert len(set(keys)) > 30  # the two ranks share the data
    again = run_ranks(4, train_megatron, folder, tmp_path, True)
    assert [seen[:5] for _, seen in again] == [seen[7:] for _, seen in found]
