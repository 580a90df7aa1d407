"""A map-style dataset in a DataLoader of torch, packed by `MultipackBatchSampler`.

    python examples/map_style.py          # needs nothing else

For data that are read by index: a list, a `Subset`, a `datasets.Dataset`. The sampler plans an
epoch of packs from all lengths; `PackedRows` makes a pack of the rows it names. Prints how full the
packs are and how the loss falls, stops in mid-epoch, and resumes with other workers on equal
batches. In a job of several processes pass `rank` and `world_size` to the sampler.
"""

import argparse
import json
from functools import partial
from typing import Any

import torch
from draw_data import text_samples
from torch.utils.data import DataLoader, Dataset

from energon_lite import MultipackBatchSampler, PackedBatch, PackedRows, Packing
from energon_lite.loss import weighted_causal_lm_loss


class Texts(Dataset[dict[str, Any]]):
    """Any map-style dataset; a row is a dict of `input_ids`, and `labels` or a `loss_mask`."""

    def __init__(self, num_texts: int) -> None:
        self.texts = [sample["txt"] for sample in text_samples(num_texts)]
        self.lengths = [len(text.encode()) for text in self.texts]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor(list(self.texts[index].encode()))}


def make_loader(data: Texts, num_workers: int) -> tuple[MultipackBatchSampler, DataLoader[Any]]:
    packing = Packing(capacity=256)
    sampler = MultipackBatchSampler(data.lengths, packing.capacity, batch_size=4, seed=1)
    loader = DataLoader(
        PackedRows(data, packing),
        batch_sampler=sampler,
        collate_fn=partial(PackedBatch.from_packs, packing=packing),
        num_workers=num_workers,
    )
    return sampler, loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=2000)
    data = Texts(parser.parse_args().texts)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    sampler, loader = make_loader(data, num_workers=2)
    stop, seen, losses, fill = len(sampler) // 2, [], [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, start=1):
            logits = model(batch.input_ids)
            loss = weighted_causal_lm_loss(logits, batch.labels, weights=batch.loss_weights)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            fill.append(batch.efficiency)
            if epoch == 1 and number == stop:  # the loader has asked for batches ahead of this one
                state = json.dumps(sampler.state_dict(batches_given=number))
            if epoch == 1 and number > stop:
                seen.append(batch.input_ids)
    print(f"2 epochs of {len(sampler)} batches, {sum(fill) / len(fill):.1%} full")
    print(f"loss {losses[0]:.2f} ... {losses[-1]:.2f}")

    sampler, loader = make_loader(data, num_workers=0)
    sampler.load_state_dict(json.loads(state))
    found = [batch.input_ids for batch in loader]
    assert all(torch.equal(a, b) for a, b in zip(found, seen, strict=True))
    print(f"resumed in epoch {sampler.epoch}: the other {len(found)} batches are equal")


if __name__ == "__main__":
    main()
