"""torch.distributed.checkpoint: the loader is a Stateful like any other, and resharded by DCP."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from energon_lite import StateError

from ..helpers import text_set
from .data import in_slot_order, keys_of, train_loader, worker_config
from .ranks import run_ranks

pytestmark = pytest.mark.processes


def train(folder, load, save, steps, after, use_async):
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
    unbroken = run_ranks(1, train, folder, None, None, 40, 0, False)[0]
    first, second = tmp_path / "first", tmp_path / "second"
    ranks = run_ranks(4, train, folder, None, first, 3, 2, use_async)
    assert in_slot_order(ranks) == unbroken[:20]
    ranks = run_ranks(2, train, folder, first, second, 6, 2, use_async)
    assert in_slot_order(ranks) == unbroken[12:28]
    ranks = run_ranks(3, train, folder, second, None, 5, 0, use_async)
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
