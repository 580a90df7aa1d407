"""Blocks of docs/trainers.md and docs/packing.md that need a trainer or a model, run as written."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from energon_lite import LoaderCallback, WorkerConfig, get_savable_loader, get_train_dataset

from ..architecture.doc_blocks import find_blocks
from ..conftest import REPO
from ..helpers import text_set
from .data import DictEncoder, Model, train_loader, val_loader, worker_config


def block(word: str) -> str:
    """The one block of the page that has the word and is skipped there."""
    page = (REPO / "docs" / "trainers.md").read_text(encoding="utf-8")
    (found,) = [own.code for own in find_blocks(page) if own.skip and word in own.code]
    return found


@pytest.fixture
def loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The loaders that the page names; the current folder is empty but for the data."""
    monkeypatch.chdir(tmp_path)
    text_set(tmp_path / "texts", 30)
    return {"train_loader": make_train_loader(), "val_loader": val_loader(Path("texts"))}


def make_train_loader() -> Any:
    return train_loader(Path("texts"), worker_config(num_streams=3), repeat=False)


@pytest.mark.processes
def test_lightning(loaders: dict[str, Any]) -> None:
    pytest.importorskip("lightning")
    from .lightning_fit import Module, lightning, quiet_trainer

    quiet = functools.partial(quiet_trainer, devices=1)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        ".", filename="last", every_n_train_steps=20, save_top_k=-1
    )
    quiet(max_steps=21, callbacks=[saving]).fit(Module(), loaders["train_loader"])
    loaders["train_loader"] = make_train_loader()
    module = Module()
    names = {"lightning": SimpleNamespace(Trainer=quiet), "module": module, **loaders}
    exec(block("lightning.Trainer"), names)
    num_steps = 4 * len(loaders["train_loader"])  # epochs of the page
    assert names["trainer"].global_step == num_steps
    assert len(module.model.seen) == num_steps - 20 > 0


def test_accelerate(loaders: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    code = block("accelerator.prepare(loader")
    names: dict[str, Any] = {}

    def start() -> Any:
        model, loader = Model(), train_loader(Path("texts"))
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return {
            "accelerator": accelerator, "model": model, "optimizer": optimizer, "loader": loader
        }  # fmt: skip

    names = start()
    exec(code.partition("\n")[0], names)
    batches = iter(names["loader"])
    next(batches)
    names["accelerator"].save_state("checkpoint")
    expected = next(batches)["keys"]
    names = start()
    exec(code, names)
    assert next(iter(names["loader"]))["keys"] == expected


@pytest.mark.processes
def test_trainer_of_transformers(loaders: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    args = functools.partial(
        transformers.TrainingArguments, "run", use_cpu=True, report_to=[], disable_tqdm=True,
        num_train_epochs=4, save_steps=20, logging_steps=100, remove_unused_columns=False,
    )  # fmt: skip
    names = {
        "Trainer": transformers.Trainer, "LoaderCallback": LoaderCallback, "model": Model(),
        "args": args(max_steps=20), "checkpoint": None, **loaders,
    }  # fmt: skip
    code = block("class LoaderTrainer")
    exec(code, names)
    names |= {"model": Model(), "args": args(), "checkpoint": "run/checkpoint-20"}
    names["train_loader"] = make_train_loader()
    exec(code, names)
    num_steps = 4 * len(loaders["train_loader"])
    assert names["trainer"].state.global_step == num_steps
    assert len(names["model"].seen) == num_steps - 20 > 0


def test_torchtitan_gets_a_loader(loaders: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "blend.yaml").write_text(
        "{__module__: megatron.energon, __class__: MetadatasetV2, splits: {train: {path: texts}}}"
    )
    names = {
        "WorkerConfig": WorkerConfig, "get_savable_loader": get_savable_loader,
        "get_train_dataset": get_train_dataset, "Encoder": DictEncoder,
        "mesh": {"dp": SimpleNamespace(get_group=lambda: None)},
    }  # fmt: skip
    exec(block("def build_dataloader"), names)
    loader = names["build_dataloader"](2, 1, tokenizer=None)
    assert loader.worker_config.world_size == 2
    assert loader.worker_config.num_streams == 64


def test_model_of_the_page_learns_and_keeps_the_samples_of_a_pack_apart(data_folder: Path) -> None:
    pytest.importorskip("transformers")
    blocks = find_blocks((REPO / "docs" / "packing.md").read_text(encoding="utf-8"))
    python = [block.code for block in blocks if block.language == "python"]
    (training,) = [code for code in python if "LlamaConfig" in code]
    (mask,) = [code for code in python if "is_causal=True" in code]
    names: dict[str, Any] = {"__name__": __name__}
    for code in (python[0], training):
        exec(code, names)
    exec(mask.partition("\n\n")[0], names)
    model, batch = names["model"].eval(), names["batch"]
    with torch.no_grad():
        ids = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        masked = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=names["mask"][:, None],
        )
        start, stop = batch.cu_seqlens[1, 1:3].tolist()
        alone = model(input_ids=batch.input_ids[1:2, start:stop])
        mean = model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, labels=batch.labels,
            use_cache=False,
        ).loss  # fmt: skip
        untrained = type(model)(model.config)(input_ids=batch.input_ids, labels=batch.labels).loss
    is_text = batch.segment_ids > 0
    torch.testing.assert_close(ids.logits[is_text], masked.logits[is_text])
    torch.testing.assert_close(ids.logits[1:2, start:stop], alone.logits)
    losses = torch.nn.functional.cross_entropy(
        ids.logits[:, :-1].mT, batch.labels[:, 1:], reduction="none"
    )
    torch.testing.assert_close(names["weighted_mean"](losses, batch.loss_weights[:, 1:]), mean)
    assert mean < untrained
