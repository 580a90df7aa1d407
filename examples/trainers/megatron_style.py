"""As Megatron-LM does it: a data-parallel group beside tensor parallelism, a file for each rank.

    torchrun --nproc-per-node 4 examples/trainers/megatron_style.py   # starts, saves after 5 steps
    torchrun --nproc-per-node 4 examples/trainers/megatron_style.py   # resumes

Processes 0 and 1 are tensor-parallel peers, and so are 2 and 3: peers are one data-parallel rank,
and read the same batches without a word between them.
"""

from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from demo import draw_data, make_train_loader
from torch.distributed.device_mesh import init_device_mesh

FOLDER = Path("demo_data/trainers")


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        draw_data(FOLDER)
    dist.barrier()

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    data_parallel = mesh["dp"].get_group()  # Megatron: parallel_state.get_data_parallel_group()
    loader = make_train_loader(FOLDER / "texts", group=data_parallel)
    dp_rank = dist.get_rank(data_parallel)
    path = FOLDER / f"train_dataloader_dprank{dp_rank:03d}.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)["dataloader_state_dict"]
        loader.restore_state_rank(state)
    dist.barrier()  # all ranks have read before one writes
    seen = [batch["keys"] for batch in islice(loader, 5)]
    if mesh["tp"].get_local_rank() == 0:
        torch.save({"dataloader_state_dict": loader.save_state_rank()}, path)
    print(f"process {dist.get_rank()} is data-parallel rank {dp_rank}: {seen[0]} ... {seen[-1]}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
