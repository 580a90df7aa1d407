"""Labels of packs, as a model of transformers counts them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    PackedCollator,
    PackedRows,
    Packing,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from ..helpers import text_set
from .hf import tiny_llama

VOCABULARY = 256
PLACEHOLDER = 300  # of an image: beyond what the model can predict


class Chat(DefaultTaskEncoder):
    """The first half of each text is a prompt, with a placeholder, and is not learned."""

    def __init__(self, packing: Packing, has_labels: bool) -> None:
        super().__init__()
        self.packing = packing
        self.has_labels = has_labels

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        ids = torch.tensor(list(f"{sample.text}{sample.text}".encode()))
        ids[0] = ids[2] = PLACEHOLDER
        mask = (torch.arange(len(ids)) >= len(ids) // 2).float()
        made = {"__key__": sample.__key__, "input_ids": ids, "loss_mask": mask}
        return {**made, "labels": ids.clone()} if self.has_labels else made

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])


@pytest.mark.parametrize("has_labels", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"layout": "thd"}, {"align": 4}, {"overlong": "split", "capacity": 16}],
    ids=["rows", "thd", "aligned", "split"],
)
def test_loss_of_llama_counts_the_tokens_that_have_a_weight(
    tmp_path: Path, settings: dict[str, Any], has_labels: bool
) -> None:
    packing = Packing(**{"capacity": 64, **settings})
    encoder = Chat(packing, has_labels)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
    dataset = get_train_dataset(
        text_set(tmp_path / "chat", 40), batch_size=3, task_encoder=encoder, worker_config=config
    )
    model = tiny_llama().eval()
    with get_savable_loader(dataset) as loader:
        batches = list(islice(loader, 4))
    for batch in batches:
        ids = batch.input_ids.clamp(max=VOCABULARY - 1)
        inputs = {"input_ids": ids, "position_ids": batch.position_ids, "use_cache": False}
        with torch.no_grad():
            outputs = model(**inputs, labels=batch.labels)
        is_counted = batch.loss_weights[:, 1:] > 0
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].mT, ids[:, 1:], reduction="none"
        )
        assert 0 < is_counted.sum() < 0.6 * batch.cu_seqlens[:, -1].sum()
        torch.testing.assert_close(outputs.loss, losses[is_counted].mean())


def test_streamed_packs_have_the_labels_of_map_style_ones(tmp_path: Path) -> None:
    packing = Packing(capacity=64)
    encoder = Chat(packing, has_labels=False)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1)
    settings: dict[str, Any] = {"worker_config": config, "repeat": False}
    settings["max_samples_per_sequence"] = None
    path = text_set(tmp_path / "chat", 40)
    by_key = {
        sample.__key__: encoder.encode_sample(sample)
        for sample in get_savable_loader(get_train_dataset(path, batch_size=None, **settings))
    }
    keys = list(by_key)
    rows = PackedRows(list(by_key.values()), packing)
    number = 0
    for batch in get_savable_loader(
        get_train_dataset(path, batch_size=2, task_encoder=encoder, **settings)
    ):
        packs, taken = [], iter(batch.__key__)
        for row in batch.segment_ids:
            packs.append(rows[[keys.index(key) for key in islice(taken, int(row.max()))]])
        assert torch.equal(PackedCollator(packing)(packs)["labels"], batch.labels)
        number += len(batch.__key__)
    assert number == 40
