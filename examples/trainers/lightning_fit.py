"""Lightning: the state of the loader is in its checkpoints, as of the batches trained.

python examples/trainers/lightning_fit.py
"""

from pathlib import Path
from typing import Any

import lightning
import torch
from demo import Model, draw_data, make_train_loader, make_val_loader, report

FOLDER = Path("demo_data/trainers")


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.seen: list[list[str]] = []

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        self.seen.append(batch["keys"])
        return self.model(**batch)["loss"]

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        self.log("val_loss", self.model(**batch)["loss"], batch_size=len(batch["keys"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def fit(checkpoint: Path | None = None) -> Module:
    module = Module()
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        FOLDER,
        "lightning-{step}",
        every_n_train_steps=20,
        save_top_k=-1,
        enable_version_counter=False,
    )
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, callbacks=[saving], limit_val_batches=3
    )
    loader = make_train_loader(FOLDER / "texts", repeat=False)
    trainer.fit(module, loader, make_val_loader(FOLDER / "texts"), ckpt_path=checkpoint)
    return module


def main() -> None:
    draw_data(FOLDER)
    whole = fit().seen
    resumed = fit(FOLDER / "lightning-step=20.ckpt").seen
    report("Lightning", resumed, whole[20:])


if __name__ == "__main__":
    main()
