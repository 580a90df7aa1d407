"""torch.distributed.checkpoint with FSDP2: the loader is saved and resharded like the model.

torchrun --nproc-per-node 4 examples/trainers/dcp.py   # starts, saves after 5 steps
torchrun --nproc-per-node 2 examples/trainers/dcp.py   # resumes
"""

from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from demo import Model, draw_data, make_train_loader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

FOLDER = Path("demo_data/trainers")
CHECKPOINT = FOLDER / "dcp"


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        draw_data(FOLDER)
    dist.barrier()

    loader = make_train_loader(FOLDER / "texts")
    model = Model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    if CHECKPOINT.exists():
        state = {"model": get_model_state_dict(model), "loader": loader}
        dcp.load(state, checkpoint_id=CHECKPOINT)
        set_model_state_dict(model, state["model"])
    seen = []
    for batch in islice(loader, 5):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(batch["keys"])
    # What is trained from here on, while the checkpoint is written, is not in it.
    state = {"model": get_model_state_dict(model), "loader": loader}
    dcp.async_save(state, checkpoint_id=CHECKPOINT).result()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {seen[0]} ... {seen[-1]}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
