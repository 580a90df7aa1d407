"""Plain torchrun and DistributedDataParallel, on 2, then 3, then 1 processes.

torchrun --nproc-per-node 2 examples/trainers/ddp.py   # starts, saves after 5 steps
torchrun --nproc-per-node 3 examples/trainers/ddp.py   # resumes after 10 batches
torchrun --nproc-per-node 1 examples/trainers/ddp.py   # resumes after 25
"""

from pathlib import Path

import torch
import torch.distributed as dist
from demo import Model, draw_data, make_train_loader
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path("demo_data/trainers")
CHECKPOINT = FOLDER / "ddp.pt"
STEPS = 5


def train() -> None:
    rank = dist.get_rank()
    loader = make_train_loader(FOLDER / "texts")
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # one state, for any number of ranks
    seen = []
    for step, batch in enumerate(loader, start=1):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(batch["keys"])
        if step == STEPS:
            break
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loader": loader.state_dict(),  # all ranks call it
    }
    if rank == 0:
        torch.save(state, CHECKPOINT)
    print(f"rank {rank} of {dist.get_world_size()} trained on {seen[0]} ... {seen[-1]}")


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        draw_data(FOLDER)
    dist.barrier()
    train()
    dist.barrier()
    dist.destroy_process_group()  # after DDP is gone, which holds the group


if __name__ == "__main__":
    main()
