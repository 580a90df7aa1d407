"""A dataset handed to a trainer in place of its loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import DefaultTaskEncoder, WorkerConfig, get_train_dataset, stateless

from .hf import arguments_of, transformers


class Numbers(DefaultTaskEncoder[Any, Any, Any, Any]):
    @stateless
    def encode_sample(self, sample: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(3), "labels": torch.arange(3)}

    def batch(self, samples: list[Any]) -> Any:
        return {name: torch.stack([s[name] for s in samples]) for name in samples[0]}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dataset_in_place_of_a_loader_is_refused_with_the_method_to_write(
    texts: Path, tmp_path: Path, num_workers: int
) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(texts, batch_size=4, worker_config=config, task_encoder=Numbers())
    arguments = arguments_of(tmp_path, max_steps=2, dataloader_num_workers=num_workers)
    trainer = transformers.Trainer(torch.nn.Linear(3, 3), arguments, train_dataset=dataset)
    with pytest.raises(RuntimeError, match=r"def get_train_dataloader\(self\)"):
        trainer.train()
