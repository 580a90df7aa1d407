"""Lightning and Accelerate: figures of the loader in their logs and in a file; resumed runs."""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import LoaderCallback, WorkerConfig, run_report

from ..helpers import text_set
from .data import Model, train_loader
from .ranks import run_ranks

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from accelerate.tracking import GeneralTracker  # noqa: E402
from lightning.pytorch.loggers.logger import Logger  # noqa: E402

from .lightning_fit import Module, every_steps, quiet_trainer  # noqa: E402

pytestmark = pytest.mark.processes

SHARE = "data/texts/train/actual_share"
SAMPLES = "data/texts/train/samples"


def make_loader(folder: Path, num_workers: int) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, num_streams=3)
    return train_loader(folder, config, repeat=False)


class Log(Logger):  # type: ignore[misc]
    name, version = "log", "0"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if SHARE in metrics:
            self.rows.append((step or 0, metrics))


def fitted(
    folder: Path, root: Path, num_workers: int, ckpt: str | None = None, loader: Any = None
) -> tuple[list[list[str]], list[tuple[int, dict[str, float]]]]:
    module, log = Module(), Log()
    trainer = quiet_trainer(
        max_epochs=2, default_root_dir=root, logger=log, log_every_n_steps=5,
        callbacks=[LoaderCallback(root / "stats.jsonl"), every_steps(root, 8)],
    )  # fmt: skip
    loader = loader or make_loader(folder, num_workers)
    trainer.fit(module, loader, ckpt_path=ckpt and str(root / ckpt), weights_only=False)
    return module.model.seen, log.rows


def test_lightning_logs_and_resumes_in_mid_epoch_with_other_workers(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 30)
    whole, rows = run_ranks(1, fitted, folder, tmp_path, 2)[0]
    assert len(whole) == 30
    assert [step for step, _ in rows] == [5, 10, 15, 20, 25, 30]
    assert rows[-1][1][SHARE] == 1.0
    assert {name.rpartition("/")[2] for _, row in rows for name in row} == {
        "actual_share", "skipped", "wait_sec",
    }  # fmt: skip
    rest, rows = run_ranks(1, fitted, folder, tmp_path, 0, "step=8.ckpt")[0]
    assert rest == whole[8:]
    assert [step for step, _ in rows] == [10, 15, 20, 25, 30]
    report = run_report(tmp_path / "stats.jsonl")
    assert (report.step, report.num_workers) == (30, 0)
    assert report.sources["texts/train"]["samples"] == 60
    assert [part.stop for part in report.intervals] == [5, 10, 15, 20, 25, 30]


def test_callback_refuses_the_loader_of_another(tmp_path: Path) -> None:
    other = torch.utils.data.DataLoader([{"x": torch.zeros(1), "keys": ["a"]}], batch_size=None)
    with pytest.raises(AssertionError, match="logs the loader of get_savable_loader"):
        run_ranks(1, fitted, tmp_path, tmp_path, 0, None, other)


class Tracker(GeneralTracker):  # type: ignore[misc]
    name, requires_logging_directory, tracker = "memory", False, None

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, float], step: int, **_: Any) -> None:
        self.rows[step] = values


def accelerated(folder: Path, root: Path, num_workers: int, is_prepared: bool, start: int = 0):
    warnings.simplefilter("ignore")
    tracker = Tracker()
    accelerator = accelerate.Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("run")
    model, loader = Model(), make_loader(folder, num_workers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if is_prepared:
        loader = accelerator.prepare(loader)
    else:
        accelerator.register_for_checkpointing(loader)
    if start:
        accelerator.load_state(root / "state")
    for step, batch in enumerate(islice(loader, 15), start + 1):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        loader.stats().write_to(accelerator, step)
        loader.stats().write_to(root / "stats.jsonl", step)
        if step == 6 and not start:
            accelerator.save_state(root / "state")
    accelerator.end_training()
    return model.seen, tracker.rows


@pytest.mark.parametrize("is_prepared", [True, False])
def test_accelerate_logs_and_resumes_in_mid_epoch_with_other_workers(is_prepared, tmp_path):
    folder = text_set(tmp_path / "texts", 30)
    whole, rows = run_ranks(1, accelerated, folder, tmp_path, 2, is_prepared)[0]
    assert (len(whole), list(rows)) == (15, list(range(1, 16)))
    assert [row[SAMPLES] for row in rows.values()] == [2.0 * step for step in range(1, 16)]
    rest, rows = run_ranks(1, accelerated, folder, tmp_path, 0, is_prepared, 6)[0]
    assert rest[:9] == whole[6:]
    assert rows[15][SAMPLES] == 30.0
    assert run_report(tmp_path / "stats.jsonl").sources["texts/train"]["samples"] == 30
