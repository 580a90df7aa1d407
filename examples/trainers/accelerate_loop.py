"""Accelerate: prepare(loader) keeps the loader; save_state and load_state have its state.

python examples/trainers/accelerate_loop.py    (or: accelerate launch ...)
"""

from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from demo import Model, draw_data, make_train_loader, report

FOLDER = Path("demo_data/trainers")


def train(is_resumed: bool) -> list[list[str]]:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )
    model = Model()
    loader, model, optimizer = accelerator.prepare(
        make_train_loader(FOLDER / "texts", virtual_epoch_length=15),
        model,
        torch.optim.AdamW(model.parameters(), 0.01),
    )
    if is_resumed:
        accelerator.load_state(FOLDER / "accelerate")
    seen = []
    for _ in range(1 if is_resumed else 2):
        for batch in loader:  # on the device
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            seen.append(batch["keys"])
            if len(seen) == 20 and not is_resumed:
                accelerator.save_state(FOLDER / "accelerate")
    return seen


def main() -> None:
    draw_data(FOLDER)
    whole = train(is_resumed=False)
    report("Accelerate", train(is_resumed=True), whole[20:])


if __name__ == "__main__":
    main()
