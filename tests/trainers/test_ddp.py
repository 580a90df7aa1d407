"""Plain torch.distributed: states of all ranks on one, and each rank's own."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..helpers import text_set
from .data import Model, in_slot_order, train_loader, worker_config
from .ranks import run_ranks

pytestmark = pytest.mark.processes


def train(folder: Path, path: Path, save_at: int, steps: int, per_rank: bool = False):
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
    unbroken = run_ranks(1, train, folder, tmp_path / "none", 0, 36)[0]
    path = tmp_path / "state.pt"
    found = in_slot_order(run_ranks(2, train, folder, path, 6, 9))
    assert found == unbroken[:18]
    found = in_slot_order(run_ranks(3, train, folder, path, 4, 8))
    assert found == unbroken[12:36]
    assert run_ranks(1, train, folder, path, 0, 12)[0] == unbroken[24:36]


def test_each_rank_resumes_from_its_own_file(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 40)
    path = tmp_path / "state.pt"
    whole = run_ranks(2, train, folder, path, 5, 12, True)
    assert run_ranks(2, train, folder, path, 0, 7, True) == [keys[5:] for keys in whole]
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
