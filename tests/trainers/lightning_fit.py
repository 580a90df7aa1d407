"""A module of Lightning over the model that notes its batches, and a trainer that says nothing."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch

from .data import Model

lightning = pytest.importorskip("lightning")


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        return self.model(**batch)["loss"]

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        self.model(**batch)

    def predict_step(self, batch: dict[str, Any], index: int) -> list[str]:
        return batch["keys"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def quiet_trainer(**settings: Any) -> Any:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, **{"logger": False, **settings},
    )  # fmt: skip


def every_steps(root: Any, number: int) -> Any:
    """The callback that saves a checkpoint every `number` steps."""
    return lightning.pytorch.callbacks.ModelCheckpoint(
        root, "{step}", every_n_train_steps=number, save_top_k=-1
    )
