"""Accelerate and the Hugging Face Trainer: the loader itself is run, and resumed by their means."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from energon_lite import LoaderCallback, Packing, WorkerConfig, stateless

from ..helpers import text_set
from .data import DictEncoder, Model, in_slot_order, keys_in, train_loader, val_loader
from .hf import LoaderTrainer, arguments_of
from .ranks import run_ranks

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.processes


def accelerated(
    folder: Path, state: Path, *, epochs: int = 4, save_at: int = 0, resume: str = "",
    accumulate: int = 1, num_streams: int = 0, **settings: Any,
) -> tuple[list[list[str]], list[int], list[bool]]:  # fmt: skip
    """Trains as Accelerate's examples do; returns keys, steps of the optimizer, ends seen."""
    warnings.simplefilter("ignore")
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate,
        dataloader_config=accelerate.DataLoaderConfiguration(use_stateful_dataloader=True),
    )  # fmt: skip
    config = _config(accelerator, 0)
    config.num_streams = num_streams or config.num_streams
    loader = train_loader(folder, config, **{"repeat": False, **settings})
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared, wrapped, optimizer = accelerator.prepare(loader, model, optimizer)
    assert prepared is loader
    first_epoch = skip = 0
    if resume == "state":
        accelerator.load_state(state)
    elif resume:
        first_epoch, skip = divmod(int(resume), len(loader))
    updates, ends, step = [], [], int(resume) if resume.isdigit() else 0
    for epoch in range(first_epoch, epochs):
        batches = loader
        if resume.isdigit():
            loader.set_epoch(epoch)
        if skip and epoch == first_epoch:
            batches = accelerator.skip_first_batches(loader, skip)
        for batch in batches:
            step += 1
            assert batch["x"].device.type == accelerator.device.type
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch)["loss"])
                if accelerator.sync_gradients:
                    updates.append(step)
                optimizer.step()
                optimizer.zero_grad()
            ends.append(accelerator.gradient_state.end_of_dataloader)
            if step == save_at:
                accelerator.save_state(state)
        assert not accelerator.gradient_state.in_dataloader
        if resume == "state" and epoch == 2:
            break
    accelerator.end_training()
    return model.seen, updates, ends


def _config(accelerator: Any, num_workers: int) -> Any:
    ranks = accelerator.num_processes
    return WorkerConfig(
        rank=accelerator.process_index, world_size=ranks, num_workers=num_workers,
        num_streams=3 * ranks,
    )  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
def test_accelerate_saves_and_loads_the_state_in_mid_epoch(world_size: int, tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 30 * world_size)
    state = tmp_path / "state"
    found = run_ranks(world_size, accelerated, folder, state, save_at=20)
    whole = [seen for seen, _, _ in found]
    assert [len(seen) for seen in whole] == [60] * world_size
    for epoch in range(4):
        steps = in_slot_order(whole)[15 * world_size * epoch :][: 15 * world_size]
        assert sorted(keys_in(steps)) == [f"{n:05d}" for n in range(30 * world_size)]
    assert found[0][2] == ([False] * 14 + [True]) * 4
    found = run_ranks(world_size, accelerated, folder, state, resume="state")
    assert [seen for seen, _, _ in found] == [seen[20:60] for seen in whole]


def test_state_of_two_processes_is_loaded_by_one(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 60)
    state = tmp_path / "state"
    run = {"repeat": True, "num_streams": 6}
    found = run_ranks(2, accelerated, folder, state, save_at=8, virtual_epoch_length=10, **run)
    whole = in_slot_order([seen for seen, _, _ in found])
    run["virtual_epoch_length"] = 20
    rest, _, _ = run_ranks(1, accelerated, folder, state, resume="state", **run)[0]
    assert rest[:40] == whole[16:56]


def test_gradients_are_accumulated_to_the_end_of_each_epoch(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 30)
    _, updates, _ = run_ranks(1, accelerated, folder, tmp_path, epochs=2, accumulate=4)[0]
    assert updates == [4, 8, 12, 15, 19, 23, 27, 30]


@pytest.mark.parametrize("settings", [{}, {"repeat": True, "virtual_epoch_length": 15}])
def test_first_batches_are_skipped_where_no_state_was_saved(settings, tmp_path):
    folder = text_set(tmp_path / "texts", 30)
    whole, _, _ = run_ranks(1, accelerated, folder, tmp_path, **settings)[0]
    for step in (7, 15, 20):
        rest, _, _ = run_ranks(1, accelerated, folder, tmp_path, resume=str(step), **settings)[0]
        assert rest == whole[step:]


class Trainer(LoaderTrainer):
    """What a user writes: the loaders are handed over."""

    def __init__(self, loader: Any, validation: Any, *args: Any, **kwargs: Any) -> None:
        self.validation = validation
        super().__init__(loader, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        return self.loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.validation


class Prepares(Trainer):
    """The same, as the Trainer itself does it: by Accelerate."""

    get_train_dataloader = LoaderTrainer.get_train_dataloader


class Counting(DictEncoder):
    """Counts the batches that this process makes."""

    num_made = 0

    @stateless
    def encode_batch(self, batch: Any) -> dict[str, Any]:
        Counting.num_made += 1
        return super().encode_batch(batch)


class Packs(DictEncoder):
    """Some 3 samples of a pack, 8 packs of a batch."""

    packing = Packing(capacity=40, buffer_size=8)

    def sample_length(self, sample: Any) -> int:
        return len(sample.text) + 7 * int(sample.__key__) % 11

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> list[str]:
        return [sample.__key__ for sample in samples]

    def batch(self, packs: list[list[str]]) -> list[list[str]]:
        return packs

    @stateless
    def encode_batch(self, packs: Any) -> dict[str, Any]:
        keys = [key for pack in packs for key in pack]
        return {"x": torch.tensor([float(key) for key in keys])[:, None] / 1000, "keys": keys}


def hf_train(
    folder: Path, root: Path, resume: int = 0, kind: type[Trainer] = Trainer,
    validate: bool = False, saves_loader: bool = False, num_workers: int = 0, num_streams: int = 0,
    loader: dict[str, Any] | None = None, log: dict[str, Any] | None = None, **settings: Any,
) -> tuple[list[list[str]], int, Any]:  # fmt: skip
    warnings.simplefilter("ignore")
    if validate:
        settings |= {"eval_strategy": "steps", "eval_steps": 10}
    defaults = {"num_train_epochs": 4, "logging_steps": 1000, "save_steps": 10}
    args = arguments_of(root, save_strategy="steps", **{**defaults, **settings})
    model = Model()
    place = SimpleNamespace(process_index=args.process_index, num_processes=args.world_size)
    config = _config(place, num_workers)
    config.num_streams = num_streams or config.num_streams
    batches = train_loader(folder, config, **{"repeat": False, "end": "drop", **(loader or {})})
    trainer = kind(
        batches, val_loader(folder, config) if validate else None, model, args,
        eval_dataset=[0] if validate else None,
        callbacks=[LoaderCallback()] if saves_loader else None,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(root / f"checkpoint-{resume}") if resume else None)
    state = trainer.state
    if log is not None:
        log |= {"history": state.log_history, "max_steps": state.max_steps, "len": len(batches)}
        log["made"] = Counting.num_made
    return model.seen, state.global_step, log or model.validated


@pytest.mark.parametrize("kind", [Trainer, Prepares])
def test_trainer_makes_sixty_steps_of_four_passes_and_resumes(kind: type[Trainer], tmp_path: Path):
    folder = text_set(tmp_path / "texts", 30)
    whole, steps, _ = run_ranks(1, hf_train, folder, tmp_path, kind=kind)[0]
    assert (len(whole), steps) == (60, 60)
    for epoch in range(4):
        keys = keys_in(whole[15 * epoch : 15 * epoch + 15])
        assert sorted(keys) == [f"{n:05d}" for n in range(30)]
    for step in (10, 30, 40):
        rest, steps, _ = run_ranks(1, hf_train, folder, tmp_path, step, kind=kind)[0]
        assert rest == whole[step:]
        assert steps == 60


@pytest.mark.parametrize("validate", [False, True])
def test_trainer_on_two_processes_resumes(validate: bool, tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 60)
    found = run_ranks(2, hf_train, folder, tmp_path, validate=validate)
    whole = [seen for seen, _, _ in found]
    assert [(len(seen), steps) for seen, steps, _ in found] == [(60, 60)] * 2
    steps = in_slot_order(whole)[:30]
    assert sorted(keys_in(steps)) == [f"{n:05d}" for n in range(60)]
    if validate:
        each = [validated for _, _, validated in found]
        assert all(len(seen) == 6 * 15 for seen in each)
        keys = keys_in(in_slot_order(each)[:30])
        assert sorted(keys) == [f"{n:05d}" for n in range(60)]
    found = run_ranks(2, hf_train, folder, tmp_path, 20, validate=validate)
    assert [seen for seen, _, _ in found] == [seen[20:] for seen in whole]


@pytest.mark.parametrize("kind", [Trainer, Prepares])
def test_callback_resumes_with_other_workers_and_computes_nothing_again(kind, tmp_path):
    folder = text_set(tmp_path / "texts", 30)
    run = {"saves_loader": True, "kind": kind, "loader": {"task_encoder": Counting()}, "log": {}}
    run["logging_steps"] = 3
    whole, _, _ = run_ranks(1, hf_train, folder, tmp_path, num_workers=2, **run)[0]
    for step in (10, 20, 30):
        rest, steps, log = run_ranks(1, hf_train, folder, tmp_path, step, **run)[0]
        assert rest == whole[step:]
        assert (steps, log["made"]) == (60, 60 - step)


def test_callback_of_two_processes_resumes_on_one(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 60)
    run = {"saves_loader": True, "num_streams": 6}
    found = run_ranks(2, hf_train, folder, tmp_path, **run)
    whole = in_slot_order([seen for seen, _, _ in found])
    rest, steps, _ = run_ranks(1, hf_train, folder, tmp_path, 20, **run)[0]
    assert (rest, steps) == (whole[40:], 20 + 80)


def test_callback_logs_shares_skips_and_waits(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 30)
    run = {"saves_loader": True, "logging_steps": 5, "max_steps": 10, "log": {}}
    history = run_ranks(1, hf_train, folder, tmp_path, **run)[0][2]["history"]
    steps = [entry for entry in history if "loss" in entry]
    assert len(steps) == 2
    for name, value in (("actual_share", 1.0), ("skipped", 0.0)):
        assert [entry[f"data/texts/train/{name}"] for entry in steps] == [value] * 2
    assert 0 < steps[0]["data/texts/train/wait_sec"] < steps[1]["data/texts/train/wait_sec"]


def test_callback_takes_no_state_of_another_run(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 30)
    run = {"saves_loader": True, "logging_steps": 5, "loader": {"task_encoder": Counting()}}
    whole, _, _ = run_ranks(1, hf_train, folder, tmp_path / "a", **run)[0]
    run_ranks(1, hf_train, folder, tmp_path / "b", **run, learning_rate=0.1)
    name = "checkpoint-20/loader_state.json"
    (tmp_path / "b" / name).replace(tmp_path / "a" / name)
    rest, _, log = run_ranks(1, hf_train, folder, tmp_path / "a", 20, log={}, **run)[0]
    assert rest == whole[20:]
    assert log["made"] == 45  # those before, in this epoch, again


PACKED = {"loader": {"task_encoder": Packs(), "batch_size": 8}, "num_train_epochs": 2}


def test_trainer_makes_two_passes_over_streamed_packs(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 1500)
    run = {**PACKED, "log": {}, "logging_steps": 1, "learning_rate": 1.0}
    whole, steps, log = run_ranks(1, hf_train, folder, tmp_path, **run)[0]
    assert steps == len(whole) < 1500 / 8
    seen = keys_in(whole)
    for keys in (seen[:1500], seen[1500:]):
        assert sorted(keys) == [f"{n:05d}" for n in range(1500)]
    # Each text counts as a pack.
    assert steps <= log["max_steps"] == 2 * -(-1500 // 8)


def test_trainer_that_counts_on_too_long_epochs_resumes_where_it_stood(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 300)
    run = {**PACKED, "saves_loader": True, "save_steps": 1, "num_train_epochs": 3, "log": {}}
    whole, steps, log = run_ranks(1, hf_train, folder, tmp_path, **run)[0]
    third = steps // 3
    assert third < log["max_steps"] // 3
    for step in (third - 1, third, third + 1, third + 2, 2 * third + 3):
        rest, _, _ = run_ranks(1, hf_train, folder, tmp_path, step, **run)[0]
        assert rest[: steps - step] == whole[step:]


def test_trainer_resumes_endless_data_by_steps_with_accumulation(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 30)
    settings = {
        "max_steps": 25, "gradient_accumulation_steps": 2,
        "loader": {"repeat": True, "end": None},
    }  # fmt: skip
    whole, steps, _ = run_ranks(1, hf_train, folder, tmp_path, **settings)[0]
    assert steps == 25
    rest, _, _ = run_ranks(1, hf_train, folder, tmp_path, 10, **settings)[0]
    assert rest == whole[-len(rest) :]
    assert 15 <= len(rest) < len(whole)
