"""A file for each data-parallel rank, as Megatron-LM has them; a rank that ends once it saved."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from energon_lite import WorkerConfig

from ..helpers import text_set
from .data import NUM_STREAMS, in_slot_order, keys_of, train_loader
from .ranks import run_ranks

pytestmark = pytest.mark.processes


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
    dist.barrier()  # else another rank may be connecting still
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
