"""`PackedRows` with `datasets`, the models of transformers, and TRL's SFTTrainer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from energon_lite import MultipackBatchSampler, PackedCollator, PackedRows, Packing

from .hf import LoaderTrainer, arguments_of, losses_of, tiny_llama, transformers

datasets = pytest.importorskip("datasets")
VOCABULARY = 50
PACKING = Packing(capacity=32)


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(1, VOCABULARY, (3 + 7 * n % 20,), generator=generator).tolist()
        for n in range(40)
    ]


def dataset() -> Any:
    return datasets.Dataset.from_dict({"input_ids": documents()})


def model(attention: str = "sdpa") -> Any:
    return tiny_llama(attention, VOCABULARY, num_key_value_heads=2).train()


def loader_of(rows: Any, packing: Packing = PACKING, **settings: Any) -> Any:
    sampler = MultipackBatchSampler([len(row) for row in documents()], packing.capacity, 4)
    return DataLoader(
        PackedRows(rows, packing),
        batch_sampler=sampler,
        collate_fn=PackedCollator(packing, **settings),
    )


@pytest.mark.parametrize("kind", ["dataset", "torch", "subset"])
def test_a_dataset_that_reads_batches_at_once_is_read_in_packs(kind: str) -> None:
    rows = dataset()
    rows = {"dataset": rows, "torch": rows.with_format("torch"), "subset": Subset(rows, range(40))}[
        kind
    ]
    found = [
        tuple(row[start:stop].tolist())
        for batch in loader_of(rows, keep=("cu_seqlens",))
        for row, ends in zip(batch["input_ids"], batch["cu_seqlens"].tolist(), strict=True)
        for start, stop in pairwise(ends)
        if stop > start
    ]
    assert sorted(found) == sorted(map(tuple, documents()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("layout", "settings"),
    [("padded", {}), ("thd", {}), ("padded", {"attention": "mask"})],
    ids=["rows", "thd", "mask"],
)
def test_loss_of_packs_is_that_of_their_samples_apart(attention, layout, settings):
    found = model(attention)
    packing = Packing(capacity=32, layout=layout)
    with torch.no_grad():
        packed = [
            (found(**inputs).loss.item(), int((inputs["labels"] != -100).sum()))
            for inputs in loader_of(dataset(), packing, **settings)
        ]
        apart = [
            (found(input_ids=torch.tensor([row]), labels=torch.tensor([row])).loss.item(),
             len(row) - 1)
            for row in documents()
        ]  # fmt: skip
    assert sum(number for _, number in packed) == sum(number for _, number in apart)
    sums = [sum(loss * number for loss, number in rows) for rows in (packed, apart)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


TRAINING: dict[str, Any] = {
    "num_train_epochs": 2, "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2,
}  # fmt: skip


def assert_learns(trainer: Any) -> None:
    trainer.train()
    losses = losses_of(trainer)
    assert len(losses) == trainer.state.global_step == 2 * len(loader_of(dataset()))
    assert losses[-1] < losses[0]


def test_trainer_of_transformers_learns_from_packs(tmp_path: Path) -> None:
    args = arguments_of(tmp_path, **TRAINING)
    loader = loader_of(dataset())
    assert_learns(LoaderTrainer(loader, model=model(), args=args, train_dataset=dataset()))


def test_sft_trainer_of_trl_learns_from_packs(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{n}": n for n in range(VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")),
        pad_token="w0", eos_token="w1",
    )  # fmt: skip

    class Packed(trl.SFTTrainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader_of(self.train_dataset))

    args = trl.SFTConfig(
        str(tmp_path), **TRAINING, use_cpu=True, report_to=[], disable_tqdm=True, bf16=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    assert_learns(
        Packed(model=model(), args=args, train_dataset=dataset(), processing_class=tokenizer)
    )
