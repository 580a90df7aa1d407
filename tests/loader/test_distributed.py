"""States gathered and handed out by torch.distributed, between real rank processes."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset

from ..helpers import keys_of, text_set
from ..rank_processes import in_ranks


def run_rank(rank: int, folder: Path, states: Path, phase: str) -> list[list[str]]:
    """Saves after five steps, or restores; the keys of the four batches that follow."""
    config = WorkerConfig.default_worker_config(0)
    config.num_streams = 4
    dataset = get_train_dataset(folder, batch_size=3, shuffle_buffer_size=10, worker_config=config)
    loader = get_savable_loader(dataset)
    if phase == "save":
        assert len(list(islice(loader, 5))) == 5
        state = loader.save_state_global(global_dst_rank=1)
        assert (state is None) == (rank != 1)
        if state is not None:
            states.write_text(json.dumps(state))
    else:
        state = json.loads(states.read_text()) if rank == 1 else None
        loader.restore_state_global(state, src_rank=1)
    return [keys_of(batch) for batch in islice(loader, 4)]


@pytest.mark.processes
def test_global_states_are_gathered_on_one_rank_and_distributed_to_more(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 40)

    def run_ranks(world_size: int, phase: str) -> list[list[str]]:
        place = tmp_path / f"{phase}-{world_size}"
        ranks = in_ranks(run_rank, world_size, place, folder, tmp_path / "states.json", phase)
        return [keys for step in zip(*ranks, strict=True) for keys in step]

    whole = run_ranks(2, "save")
    assert len(whole) == 8
    assert run_ranks(2, "restore") == whole
    assert run_ranks(4, "restore")[:8] == whole
