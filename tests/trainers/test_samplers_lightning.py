"""The batch samplers in Lightning, in two processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")  # batch_samplers imports it
pytest.importorskip("transformers")

from .batch_samplers import NUM, SAMPLERS, indices_of, loader_of
from .lightning_fit import lightning, quiet_trainer
from .ranks import run_ranks

EPOCHS = 2


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.name = name
        self.epochs: list[list[list[int]]] = [[] for _ in range(EPOCHS)]

    def train_dataloader(self) -> Any:
        return loader_of(SAMPLERS[self.name]())

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.epochs[self.current_epoch].append(indices_of(batch))
        return (self.weight * batch.float().mean()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(name: str, *, in_hook: bool, **settings: Any) -> Any:
    """Returns the indices of each batch of each epoch on this rank."""
    # Before there is a process group; `fit` makes it.
    loader = None if in_hook else loader_of(SAMPLERS[name]())
    module = Module(name)
    trainer = quiet_trainer(
        max_epochs=EPOCHS, devices=2, strategy="ddp", enable_checkpointing=False, **settings
    )
    try:
        trainer.fit(module, loader)
    except TypeError as error:
        return str(error)
    return module.epochs


@pytest.mark.parametrize("in_hook", [False, True])
@pytest.mark.parametrize("name", ["multipack", "modality", "tokens"])
def test_lightning_yields_every_sample_once_an_epoch(name: str, in_hook: bool) -> None:
    ranks = run_ranks(2, fit, name, in_hook=in_hook, use_distributed_sampler=False)
    for epoch in range(EPOCHS):
        assert len(ranks[0][epoch]) == len(ranks[1][epoch]) > 5
        counts = Counter(i for rank in ranks for batch in rank[epoch] for i in batch)
        assert counts == dict.fromkeys(range(NUM), 1)
    assert ranks[0][0] != ranks[0][1], "Lightning sets the epoch"


@pytest.mark.parametrize("name", ["multipack", "modality", "tokens"])
def test_sampler_that_lightning_would_put_in_is_refused(name: str) -> None:
    for message in run_ranks(2, fit, name, in_hook=True):
        assert "Trainer(use_distributed_sampler=False)" in message
