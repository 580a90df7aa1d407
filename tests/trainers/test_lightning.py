"""Lightning and Fabric: the loader's state lies in their own checkpoints."""

from __future__ import annotations

import os
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import DefaultTaskEncoder, WorkerConfig

from ..helpers import text_set
from .data import Model, in_slot_order, keys_in, train_loader, val_loader
from .lightning_fit import Module, every_steps, lightning, quiet_trainer
from .ranks import run_ranks

pytestmark = pytest.mark.processes


def fit(
    folder: Path, root: Path, *, epochs: int = 4, save_every: int = 20, ckpt: str | None = None,
    num_workers: int = 0, num_streams: int = 0, validate: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None, **trainer_settings: Any,
) -> tuple[list[list[str]], list[list[str]], int]:  # fmt: skip
    """Fits; returns the keys of each step, of each batch of validation, and the steps made."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = WorkerConfig(
        rank=rank, world_size=world_size, num_workers=num_workers,
        num_streams=num_streams or 3 * world_size,
    )  # fmt: skip
    module = Module()
    trainer = quiet_trainer(
        max_epochs=epochs, devices=world_size, strategy="ddp" if world_size > 1 else "auto",
        default_root_dir=root, callbacks=[every_steps(root, save_every)], **trainer_settings,
    )  # fmt: skip
    loader = train_loader(folder, config, **(settings or {"repeat": False}))
    val = None if validate is None else val_loader(folder, config, **validate)
    trainer.fit(module, loader, val, ckpt_path=ckpt and str(root / ckpt), weights_only=False)
    return module.model.seen, module.model.validated, trainer.global_step


@pytest.mark.parametrize("num_workers", [0, 2])
def test_four_passes_are_sixty_steps_and_resume_in_mid_epoch(num_workers: int, tmp_path: Path):
    folder = text_set(tmp_path / "texts", 30)
    run = {"num_workers": num_workers}
    whole, _, steps = run_ranks(1, fit, folder, tmp_path, **run)[0]
    assert (len(whole), steps) == (60, 60)
    for epoch in range(4):
        keys = keys_in(whole[15 * epoch : 15 * epoch + 15])
        assert sorted(keys) == [f"{n:05d}" for n in range(30)]
    rest, _, steps = run_ranks(1, fit, folder, tmp_path, ckpt="step=20.ckpt")[0]
    assert rest == whole[20:]
    assert steps == 60


def test_two_processes_resume_as_one(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 60)
    found = run_ranks(2, fit, folder, tmp_path)
    assert [steps for _, _, steps in found] == [60, 60]
    whole = [seen for seen, _, _ in found]
    for epoch in range(4):
        keys = keys_in(batch for seen in whole for batch in seen[15 * epoch : 15 * epoch + 15])
        assert sorted(keys) == [f"{n:05d}" for n in range(60)]
    found = run_ranks(2, fit, folder, tmp_path, ckpt="step=20.ckpt")
    assert [seen for seen, _, _ in found] == [seen[20:] for seen in whole]


def test_validation_inside_an_epoch_changes_nothing_in_training(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 30)
    whole, nothing, _ = run_ranks(1, fit, folder, tmp_path / "a", epochs=2)[0]
    assert nothing == []
    validation = {"validate": {}, "limit_val_batches": 3, "val_check_interval": 5}
    seen, validated, _ = run_ranks(
        1, fit, folder, tmp_path / "b", epochs=2, save_every=5, num_workers=2, **validation
    )[0]
    assert seen == whole
    assert validated == validated[:3] * 6
    # From a checkpoint at a validation, in mid-epoch, and from one at the end of an epoch.
    for step in (10, 15, 20):
        rest, again, steps = run_ranks(
            1, fit, folder, tmp_path / "b", epochs=2, ckpt=f"step={step}.ckpt", **validation
        )[0]
        assert rest == whole[step:]
        assert steps == 30
        assert again == validated[:3] * (6 - step // 5)


def test_endless_data_in_virtual_epochs_resume(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 30)
    settings = {"virtual_epoch_length": 7}
    whole, _, steps = run_ranks(1, fit, folder, tmp_path, settings=settings, save_every=10)[0]
    assert len(whole) == steps == 28
    rest, _, _ = run_ranks(1, fit, folder, tmp_path, settings=settings, ckpt="step=10.ckpt")[0]
    assert rest == whole[10:]


def test_epochs_with_a_limit_are_the_beginnings_of_passes(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 30)
    passes, _, _ = run_ranks(1, fit, folder, tmp_path / "a")[0]
    limit = {"limit_train_batches": 10, "save_every": 5}
    whole, _, steps = run_ranks(1, fit, folder, tmp_path / "b", **limit)[0]
    assert steps == 40
    assert whole == [keys for epoch in range(4) for keys in passes[15 * epoch : 15 * epoch + 10]]
    for step in (5, 10, 25):
        rest, _, _ = run_ranks(1, fit, folder, tmp_path / "b", ckpt=f"step={step}.ckpt", **limit)[0]
        assert rest == whole[step:]


def test_run_of_two_processes_is_resumed_by_one(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 60)
    run = {"settings": {"virtual_epoch_length": 12}, "epochs": 2, "save_every": 5, "num_streams": 6}
    whole = in_slot_order([seen for seen, _, _ in run_ranks(2, fit, folder, tmp_path, **run)])
    run["settings"] = {"virtual_epoch_length": 24}
    rest, _, _ = run_ranks(1, fit, folder, tmp_path, ckpt="step=5.ckpt", **run)[0]
    assert len(rest) > 24
    assert rest[:38] == whole[10:48]


def fabric_run(folder: Path, path: Path, world_size: int, save_at: int) -> list[list[str]]:
    warnings.simplefilter("ignore")
    fabric = lightning.Fabric(
        accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto"
    )
    fabric.launch()
    loader = train_loader(folder)
    model = Model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    batches = fabric.setup_dataloaders(loader)
    assert len(batches) == len(loader)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if path.exists():
        fabric.load(path, state, weights_only=False)
    seen = []
    for step, batch in enumerate(islice(batches, 12), start=1):
        seen.append(batch["keys"])
        fabric.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if step == save_at:
            fabric.save(path, state)
    return seen


def test_fabric_saves_on_two_processes_and_resumes_on_two_and_one(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 40)
    path = tmp_path / "state.ckpt"
    whole = run_ranks(2, fabric_run, folder, path, 2, 7)
    again = run_ranks(2, fabric_run, folder, path, 2, 0)
    assert [seen[:5] for seen in again] == [seen[7:] for seen in whole]
    assert run_ranks(1, fabric_run, folder, path, 1, 0)[0][:10] == in_slot_order(whole)[14:]


def dataclass_batches(folder: Path) -> list[Any]:
    """Fits on batches as dataclasses; returns them as the steps get them."""
    found: list[Any] = []

    class OnDataclasses(Module):
        def training_step(self, batch: Any, index: int) -> None:
            weights = batch.loss_weight.tolist()
            found.append((type(batch).__name__, batch.__key__, batch.text, weights))

    loader = train_loader(folder, task_encoder=DefaultTaskEncoder())
    quiet_trainer(max_steps=3, enable_checkpointing=False).fit(OnDataclasses(), loader)
    return found


def predicted(folder: Path) -> list[list[str]]:
    module, trainer = Module(), quiet_trainer(enable_checkpointing=False)
    assert trainer.validate(module, val_loader(folder), verbose=False) == [{}]
    with pytest.raises(Exception, match="SavableDataLoader"):  # it would make another loader
        trainer.predict(module, val_loader(folder))
    return trainer.predict(module, iter(val_loader(folder)))


def test_prediction_yields_each_sample_once_and_dataclasses_arrive_whole(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 30)
    found = run_ranks(1, predicted, folder)[0]
    assert sorted(keys_in(found)) == [f"{n:05d}" for n in range(30)]
    found = run_ranks(1, dataclass_batches, folder)[0]
    assert [name for name, *_ in found] == ["TextSample"] * 3, found
    assert all(len(keys) == len(texts) == len(weights) == 2 for _, keys, texts, weights in found)
