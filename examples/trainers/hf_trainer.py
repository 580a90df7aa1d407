"""Hugging Face Trainer: the loader is handed over by get_train_dataloader.

python examples/trainers/hf_trainer.py
"""

from pathlib import Path
from typing import Any

from demo import Model, draw_data, make_train_loader, report
from transformers import Trainer, TrainingArguments

from energon_lite import LoaderCallback, SavableDataLoader

FOLDER = Path("demo_data/trainers")


class LoaderTrainer(Trainer):
    """A Trainer that is given a loader of batches."""

    def __init__(self, *args: Any, train_loader: SavableDataLoader[Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.train_loader = train_loader

    def get_train_dataloader(self) -> SavableDataLoader[Any]:
        return self.accelerator.prepare(self.train_loader)  # so that it moves its batches


class RecordingModel(Model):
    """Records what it was trained on, to compare."""

    def forward(self, tokens: Any, keys: list[str], **kwargs: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), keys]
        return super().forward(tokens, **kwargs)


def train(checkpoint: Path | None = None) -> list[list[str]]:
    model = RecordingModel()
    args = TrainingArguments(
        str(FOLDER / "hf"), num_train_epochs=2, save_steps=20, use_cpu=True, report_to=[]
    )
    loader = make_train_loader(FOLDER / "texts", repeat=False)
    trainer = LoaderTrainer(model, args, train_loader=loader, callbacks=[LoaderCallback()])
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return model.seen


def main() -> None:
    draw_data(FOLDER)
    whole = train()
    report("Trainer", train(FOLDER / "hf" / "checkpoint-20"), whole[20:])


if __name__ == "__main__":
    main()
