"""States gathered and handed out by torch.distributed, between real rank processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers import text_set

RANK = """
import json, sys
import torch.distributed as dist
from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset

folder, meeting, states, rank, world = sys.argv[1:4] + [int(x) for x in sys.argv[4:6]]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
config = WorkerConfig.default_worker_config(0)
config.num_streams = 4
dataset = get_train_dataset(folder, batch_size=3, shuffle_buffer_size=10, worker_config=config)
loader = get_savable_loader(dataset)
if sys.argv[6] == "save":
    for _ in zip(range(5), loader):
        pass
    state = loader.save_state_global(global_dst_rank=1)
    assert (state is None) == (rank != 1)
    if state is not None:
        json.dump(state, open(states, "w"))
else:
    state = json.load(open(states)) if rank == 1 else None
    loader.restore_state_global(state, src_rank=1)
print(json.dumps([batch.__key__ for _, batch in zip(range(4), loader)]))
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(folder: Path, tmp_path: Path, world: int, phase: str) -> list[list[str]]:
    """Runs a process per rank; gives the keys of the slots that follow, in slot order."""
    name = f"{phase}-{world}"
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", RANK, str(folder), str(tmp_path / name)),
                *(str(tmp_path / "states.json"), str(rank), str(world), phase),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    return [keys for step in zip(*ranks, strict=True) for keys in step]


@pytest.mark.processes
def test_global_states_are_gathered_on_one_rank_and_given_out_to_more(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 40)
    whole = run_ranks(folder, tmp_path, 2, "save")
    assert len(whole) == 8
    assert run_ranks(folder, tmp_path, 2, "restore") == whole
    assert run_ranks(folder, tmp_path, 4, "restore")[:8] == whole
