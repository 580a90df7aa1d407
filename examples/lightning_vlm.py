"""Lightning on the packs of vlm.py: its checkpoints have the loader's state, as of the last step.

    python examples/lightning_vlm.py      # needs lightning, transformers

Trains in epochs of 15 batches with a validation after each, saves in the middle of an epoch, and
resumes there by `ckpt_path` with other workers, checking that all weights end bit-equal. Validation
reads each sample once, and the weighted mean of its losses is that of one big batch.
"""

import argparse
from typing import Any

import lightning
import torch
from draw_data import prepare_captions_and_texts
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_models import make_llava, train_tokenizer
from vlm import BLEND, FOLDER, VisionEncoder, loss_of

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset


class Module(lightning.LightningModule):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.model = make_llava(tokenizer)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = loss_of(self.model, batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        # Lightning's mean over batches weights each by `batch_size`; here by the labels that count.
        num_labels = int(batch.loss_weights.sum())
        self.log("val_loss", loss_of(self.model, batch), batch_size=num_labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def fit(tokenizer: Any, epochs: int, num_workers: int, resume: str | None = None) -> Any:
    config = WorkerConfig.default_worker_config(num_workers, num_streams=4)
    settings = {"batch_size": 4, "worker_config": config, "task_encoder": VisionEncoder(tokenizer)}
    blend = FOLDER / "blend.yaml"
    train_loader = get_savable_loader(get_train_dataset(blend, virtual_epoch_length=15, **settings))
    val_loader = get_savable_loader(get_val_dataset(blend, **settings))
    saving = ModelCheckpoint(
        FOLDER, "{step}", every_n_train_steps=10, save_top_k=-1, enable_version_counter=False
    )
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=[saving], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module(tokenizer)
    trainer.fit(module, train_loader, val_loader, ckpt_path=resume)
    print(*(f"{name} {value:.4f}" for name, value in trainer.callback_metrics.items()))
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help="2 or more")
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(prepare_captions_and_texts(FOLDER, 400))
    (FOLDER / "blend.yaml").write_text(BLEND)

    whole = fit(tokenizer, epochs, num_workers=2)
    resumed = fit(tokenizer, epochs, num_workers=0, resume=f"{FOLDER}/step=20.ckpt")
    for name, weights in whole.state_dict().items():
        assert torch.equal(weights, resumed.state_dict()[name]), name
    print("resumed at step 20, in the second epoch, without workers: all weights are bit-equal")


if __name__ == "__main__":
    main()
