"""FSDP2 on a mesh, with torchtitan's own checkpoint manager; peers of a rank read the same."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..helpers import text_set
from .data import Model, in_slot_order, train_loader, worker_config
from .ranks import run_ranks

pytestmark = pytest.mark.processes
checkpoint = pytest.importorskip("torchtitan.components.checkpoint")


class TrainState:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Optimizers(list[torch.optim.Optimizer]):
    """What torchtitan's container of optimizers does, as far as its checkpoints ask."""

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self[0].param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self[0].param_groups[0]["lr"] = state["lr"]


def train(folder: Path, root: Path, data_parallel: int, save_at: int, steps: int, mode: str):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    shape = (data_parallel, dist.get_world_size() // data_parallel)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    config = worker_config(group=mesh["dp"].get_group())
    assert config.world_size == data_parallel
    loader = train_loader(folder, config)
    model = Model()
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = TrainState()
    manager = checkpoint.CheckpointManager(
        checkpoint.CheckpointManager.Config(
            enable=True, interval=save_at, async_mode=mode, keep_latest_k=0
        ),
        dataloader=loader,
        model_parts=[model],
        optimizers=Optimizers([optimizer]),
        lr_schedulers=Optimizers([optimizer]),
        states={"train_state": state},
        sd_adapter=None,
        base_folder=str(root),
    )
    manager.load()
    for batch in islice(loader, steps):
        state.step += 1
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.maybe_wait_for_staging()
        manager.save(state.step)
    manager.maybe_wait_for_saving()
    manager.close()
    dist.barrier()
    dist.destroy_process_group()
    return config.rank, model.seen


def one_of_each(found: list[tuple[int, list[list[str]]]]) -> list[list[list[str]]]:
    """What each data-parallel rank saw; its peers must have seen the same."""
    by_rank: dict[int, list[list[str]]] = {}
    for rank, seen in found:
        assert by_rank.setdefault(rank, seen) == seen
    return [by_rank[rank] for rank in sorted(by_rank)]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_mesh_of_2_times_2_is_resumed_as_4_times_1_by_torchtitan(mode: str, tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 40)
    found = run_ranks(4, train, folder, tmp_path, 2, 4, 6, mode)
    first = in_slot_order(one_of_each(found))
    assert len(first) == 12
    found = run_ranks(4, train, folder, tmp_path, 4, 100, 3, mode)
    second = in_slot_order(one_of_each(found))
    assert second[:4] == first[8:]
    assert len(second) == 12
