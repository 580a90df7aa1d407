"""Pretraining on three sources whose weights change, with DDP; resumes on other ranks.

    python examples/pretrain_blend.py                           # needs nothing else
    torchrun --nproc-per-node 2 examples/pretrain_blend.py      # `train` alone, with these data

It starts a run of 2 ranks and then, from the checkpoint in its middle, one of 3. It checks that the
3 train on the packs that the 2 trained on, in the same order, and prints losses and shares.
"""

import argparse
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from draw_data import prepare_texts, random_texts
from start_ranks import start_ranks
from torch.nn.parallel import DistributedDataParallel

from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.loss import step_denominator, weight_total, weighted_causal_lm_loss

FOLDER = Path("demo_data/pretrain")
WORDS = {"web": "click here for more", "books": "once upon a time", "code": "def return ( ) : if"}
BLEND = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - weight: {schedule: linear, points: {0: 8, 600: 2}}   # by samples drawn in the whole run
        path: ./web
      - {weight: 2, path: ./books}
      - {weight: {schedule: step, points: {0: 0, 300: 4}}, path: ./code}
"""


class Bytes(DefaultTaskEncoder):
    packing = Packing(capacity=256, overlong="split", buffer_size=64)

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        return {"__key__": sample.__key__, "input_ids": torch.tensor([*sample.text.encode(), 0])}

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])


def train(steps: int, resume: bool = False) -> None:
    """What each rank runs; writes the keys of each of its batches, from the checkpoint on."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dataset = get_train_dataset(
        FOLDER / "blend.yaml",
        batch_size=2,  # packs of each rank
        task_encoder=Bytes(),
        # Streams: a multiple of every number of ranks that the run may have.
        worker_config=WorkerConfig.default_worker_config(num_workers=0, num_streams=6),
    )
    loader = get_savable_loader(dataset)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if resume:
        for name, state in torch.load(FOLDER / "half.pt").items():
            parts[name].load_state_dict(state)  # the loader: one state, for any number of ranks
    keys, losses = [], []
    for step, batch in enumerate(islice(loader, steps), start=1):
        weights = batch.loss_weights
        denominator = step_denominator([weight_total(weights, weights.shape)])  # of all ranks
        logits = model(batch.input_ids)
        loss = weighted_causal_lm_loss(logits, batch.labels, denominator, weights=weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keys.append(batch.__key__)
        losses.append(loss.item())
        if step == steps // 2 and not resume:
            states = {name: part.state_dict() for name, part in parts.items()}  # on all ranks
            if dist.get_rank() == 0:
                torch.save(states, FOLDER / "half.pt")
    stats = loader.stats().reduced()  # on all ranks
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: loss {losses[0]:.2f} ... {losses[-1]:.2f}")
        print(stats)
    keys = keys if resume else keys[steps // 2 :]
    (FOLDER / f"keys-{dist.get_rank()}.json").write_text(json.dumps(keys))
    dist.destroy_process_group()


def launch(num_ranks: int, *arguments: Any) -> list[list[str]]:
    """Starts the ranks; returns the keys of all batches, in the order of the run."""
    start_ranks(train, num_ranks, *arguments)
    ranks = [json.loads((FOLDER / f"keys-{r}.json").read_text()) for r in range(num_ranks)]
    return [batch for step in zip(*ranks, strict=True) for batch in step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="a multiple of 6")
    steps = parser.parse_args().steps
    if "RANK" in os.environ:  # torchrun started this process
        train(steps)
        return
    for name, words in WORDS.items():
        prepare_texts(FOLDER / name, random_texts(words, 400))
    (FOLDER / "blend.yaml").write_text(BLEND)
    # 3 ranks have as many batches in a third of the steps as 2 ranks in half of them.
    expected, found = launch(2, steps), launch(3, steps // 3, True)
    assert found == expected
    print(f"3 ranks trained on the {len(found)} batches that 2 ranks had after the checkpoint")


if __name__ == "__main__":
    main()
