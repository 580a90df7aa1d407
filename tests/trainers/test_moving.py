"""Every way to the model moves all tensors of all types; the device `meta` stands in for a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from energon_lite import (
    Batch,
    DefaultTaskEncoder,
    Packing,
    TextSample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

META = torch.device("meta")
NUM_TEXTS = 24


@edataclass
class Rows(Batch):
    ids: torch.Tensor
    parts: list[Any]


class Pair(NamedTuple):
    ids: torch.Tensor
    rows: Rows


@dataclasses.dataclass
class Plain:
    ids: torch.Tensor
    rows: Rows


class Encoder(DefaultTaskEncoder):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.packing = Packing(capacity=64) if "pack" in kind else None  # type: ignore[assignment]

    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        ids = torch.tensor(list(sample.text.encode())[:8])
        if self.kind == "sample":
            sample.more = {"ids": ids}  # type: ignore[attr-defined]
            return sample
        return {
            "__key__": sample.__key__,
            "__restore_key__": sample.__restore_key__,
            "input_ids": ids,
        }

    def sample_length(self, sample: Any) -> int:
        return 8 if self.kind == "sample" else len(sample["input_ids"])

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        if "pack" in self.kind:
            return {"packs": batch, "list": [batch]} if self.kind == "dict of packs" else batch
        rows = Rows(
            __key__=batch["__key__"], __restore_key__=(), ids=batch["input_ids"],
            parts=[{"a": (batch["input_ids"], [batch["input_ids"]])}],
        )  # fmt: skip
        made = {"rows": rows, "dict": {"x": rows.ids, "rows": [rows]}, "pair": Pair(rows.ids, rows)}
        return Plain(rows.ids, rows) if self.kind == "plain" else made[self.kind]


KINDS = {
    "sample": None, "pack": None, "packs": 2, "dict of packs": 2, "rows": 3, "dict": 3, "pair": 3,
    "plain": 3,
}  # fmt: skip


def loader_of(path: Path, kind: str) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
    return get_savable_loader(
        get_train_dataset(
            path, batch_size=KINDS[kind], task_encoder=Encoder(kind), worker_config=config
        )
    )


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """Accelerate, whose state does not outlive the test."""
    module = pytest.importorskip("accelerate")
    names = ("PartialState", "AcceleratorState", "GradientState")
    states = [getattr(module.state, name)._shared_state for name in names]
    before = [dict(state) for state in states]
    yield module
    for state, was in zip(states, before, strict=True):
        state.clear()
        state.update(was)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields all tensors in a value, written without the library."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors(entry)
    elif dataclasses.is_dataclass(value):
        yield from tensors([getattr(value, f.name) for f in dataclasses.fields(value)])
        yield from tensors(getattr(value, "__dict__", {}))


def assert_on_meta(batch: Any) -> None:
    found = list(tensors(batch))
    assert found
    assert {tensor.device for tensor in found} == {META}


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate(texts: Path, kind: str, accelerate: Any, monkeypatch: pytest.MonkeyPatch):
    accelerator = accelerate.Accelerator(cpu=True)
    accelerate.state.PartialState._shared_state["device"] = META
    for batch in islice(accelerator.prepare(loader_of(texts, kind)), 2):
        assert_on_meta(batch)
    if kind not in ("pair", "plain"):
        assert_on_meta(accelerate.utils.send_to_device(next(iter(loader_of(texts, kind))), META))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])  # fields only
def test_lightning(texts: Path, kind: str) -> None:
    lightning = pytest.importorskip("lightning")
    module = lightning.LightningModule()
    for batch in islice(loader_of(texts, kind), 2):
        assert_on_meta(module.transfer_batch_to_device(batch, META, 0))


@pytest.mark.parametrize("kind", ["dict", "dict of packs"])  # a Trainer calls model(**batch)
def test_trainer_of_transformers(texts, tmp_path, kind, accelerate, monkeypatch) -> None:
    pytest.importorskip("transformers")
    from .hf import LoaderTrainer, arguments_of

    class SeenError(Exception):
        pass

    class Moved(LoaderTrainer):
        def training_step(self, model: Any, inputs: Any, *_: Any) -> torch.Tensor:
            assert_on_meta(self._prepare_inputs(inputs))
            raise SeenError  # no model computes there

    arguments = arguments_of(tmp_path, max_steps=2, save_strategy="no")
    trainer = Moved(loader_of(texts, kind), torch.nn.Linear(1, 1), arguments)
    accelerate.state.PartialState._shared_state["device"] = META
    monkeypatch.setattr(type(arguments), "device", META)
    with pytest.raises(SeenError):
        trainer.train()
