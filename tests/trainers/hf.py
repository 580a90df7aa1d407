"""Arguments of the Trainer of transformers, one that is handed its loader, and a tiny model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")


def arguments_of(path: Any, **settings: Any) -> Any:
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    return transformers.TrainingArguments(output_dir=str(path), **{**quiet, **settings})


class LoaderTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A Trainer that has Accelerate prepare the loader that it is handed."""

    def __init__(self, loader: Any, *args: Any, **kwargs: Any) -> None:
        self.loader = loader
        super().__init__(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(self.loader)


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def tiny_llama(attention: str = "sdpa", vocab_size: int = 256, **settings: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, attn_implementation=attention, **settings,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)
