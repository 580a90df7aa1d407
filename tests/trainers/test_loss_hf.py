"""Packs for a Hugging Face model, and loss weights in its Trainer, against a loop by hand."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.loss import (
    WeightedLabels,
    step_denominator,
    weight_total,
    weighted_causal_lm_loss,
)

from ..architecture.doc_blocks import find_blocks
from ..conftest import REPO
from ..helpers import text_set
from .hf import LoaderTrainer, arguments_of, losses_of, tiny_llama, transformers
from .ranks import run_ranks

WEIGHTS = {"easy": 0.25, "hard": 3.0}
NUM_STEPS = 3


class Chat(DefaultTaskEncoder):
    """The first tokens of each text do not count, and the others count differently."""

    def __init__(self, adds: bool | None = True, by_token: bool = True, **settings: Any) -> None:
        super().__init__()
        self.packing = Packing(capacity=64, **{"output": "huggingface", **settings})
        self.add_loss_weights = adds
        self.by_token = by_token

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        ids = torch.tensor(list(f"{sample.text}, {sample.text}".encode()))
        mask = torch.arange(len(ids)) >= 5
        steps = (torch.arange(len(ids)) % 3 + 1) / 2 if self.by_token else 1
        return {"__key__": sample.__key__, "input_ids": ids, "loss_mask": mask * steps}

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for name in WEIGHTS:
        text_set(root / name, 80)  # an epoch has more batches than the steps take
    (root / "plain.yaml").write_text(BLEND.format(1, 1))
    (root / "blend.yaml").write_text(BLEND.format(*WEIGHTS.values()))
    return root


BLEND = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
    - {{path: easy, loss_weight: {}}}
    - {{path: hard, loss_weight: {}}}
"""


def loader_of(path: Path, encoder: Chat, num_workers: int = 0, rank: int = 0, world_size: int = 1):
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers, num_streams=2)
    return get_savable_loader(
        get_train_dataset(path, batch_size=2, task_encoder=encoder, worker_config=config)
    )


def by_hand(path: Path, accumulate: int, world_size: int = 1) -> list[torch.Tensor]:
    """Gradients of each step: sums of weighted token losses, and of weights, over all batches."""
    loaders = [
        iter(loader_of(path, Chat(output="packed_batch"), 0, rank, world_size))
        for rank in range(world_size)
    ]
    model = tiny_llama().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(NUM_STEPS):
        total = weights = torch.zeros((), dtype=torch.float64)
        for batch in [next(loader) for _ in range(accumulate) for loader in loaders]:
            for row in range(len(batch.input_ids)):
                ends = batch.cu_seqlens[row].tolist()
                for start, stop in pairwise(ends):
                    ids = batch.input_ids[row : row + 1, start:stop]
                    if not ids.numel():
                        continue
                    logits = model(input_ids=ids).logits[0, :-1]
                    found = functional.cross_entropy(logits, ids[0, 1:], reduction="none")
                    own = batch.loss_weights[row, start + 1 : stop]
                    total = total + (found * own).double().sum()
                    weights = weights + own.double().sum()
        loss = total / weights
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(losses).float(), *(p.detach().clone() for p in model.parameters())]


def trained(
    folder: Path, path: Path, accumulate: int, num_workers: int = 0, world_size: int = 1
) -> list[torch.Tensor]:
    """The losses of the Trainer's steps and the parameters afterwards."""
    arguments = arguments_of(
        folder, max_steps=NUM_STEPS, gradient_accumulation_steps=accumulate, learning_rate=0.1,
        optim="sgd", lr_scheduler_type="constant", max_grad_norm=0, logging_steps=1,
        save_strategy="no",
    )  # fmt: skip
    loader = loader_of(path, Chat(), num_workers, arguments.process_index, world_size)
    model = tiny_llama()
    trainer = LoaderTrainer(loader, model, arguments, compute_loss_func=weighted_causal_lm_loss)
    trainer.train()
    loader.shutdown()
    parameters = [p.detach().clone() for p in model.parameters()]
    return [torch.tensor(losses_of(trainer)), *parameters]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("accumulate", "num_workers"),
    [(1, 0), (4, 0), pytest.param(4, 2, marks=pytest.mark.processes)],
)
def test_trainer_weighs_tokens_as_a_loop_by_hand(blend, tmp_path, accumulate, num_workers):
    found = trained(tmp_path, blend / "blend.yaml", accumulate, num_workers)
    expected = by_hand(blend / "blend.yaml", accumulate)
    assert_equal(found, expected)
    unweighted = by_hand(blend / "plain.yaml", accumulate)
    assert (found[0] - unweighted[0]).abs().max() > 1e-3  # the weights matter


@pytest.mark.processes
@pytest.mark.parametrize("accumulate", [1, 4])
def test_trainer_on_two_ranks_weighs_tokens_as_a_loop_by_hand(blend, tmp_path, accumulate):
    ranks = run_ranks(2, trained_on_rank, tmp_path, blend / "blend.yaml", accumulate)
    expected = by_hand(blend / "blend.yaml", accumulate, world_size=2)
    for found in ranks:
        assert_equal([torch.tensor(value) for value in found], expected)


def trained_on_rank(folder: Path, path: Path, accumulate: int) -> list[Any]:
    torch.set_num_threads(1)
    return [value.tolist() for value in trained(folder, path, accumulate, world_size=2)]


@pytest.mark.parametrize("output", ["packed_batch", "huggingface"])
def test_plain_loop_weighs_tokens_as_a_loop_by_hand(blend: Path, output: str) -> None:
    loader = iter(loader_of(blend / "blend.yaml", Chat(output=output)))
    model = tiny_llama().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(NUM_STEPS):
        batches = list(islice(loader, 4))
        if output == "huggingface":
            pairs = [(inputs.pop("labels"), inputs) for inputs in batches]
            totals = [labels[..., 1:].ne(-100).sum() for labels, _ in pairs]
            weights = [None] * 4
        else:
            pairs = [
                (b.labels, {"input_ids": b.input_ids, "position_ids": b.position_ids})
                for b in batches
            ]
            totals = [weight_total(b.loss_weights, b.labels.shape) for b in batches]
            weights = [b.loss_weights for b in batches]
        step = 0.0
        for (labels, inputs), own in zip(pairs, weights, strict=True):
            denominator = step_denominator(totals)
            outputs = model(**{**inputs, "use_cache": False})
            loss = weighted_causal_lm_loss(outputs, labels, denominator, weights=own)
            loss.backward()
            step += loss.item()
        losses.append(step)
        optimizer.step()
        optimizer.zero_grad()
    found = [torch.tensor(losses), *(p.detach() for p in model.parameters())]
    assert_equal(found, by_hand(blend / "blend.yaml", 4))


def test_loss_of_labels_without_weights_is_the_models_own(blend: Path) -> None:
    (batch,) = islice(loader_of(blend / "plain.yaml", Chat(None, by_token=False)), 1)
    model = tiny_llama()
    labels = batch["labels"]
    expected = model(**batch).loss
    batch.pop("labels")
    outputs = model(**batch)
    torch.testing.assert_close(weighted_causal_lm_loss(outputs, labels), expected)
    per_row = torch.tensor([0.5, 2.0])
    weighted = WeightedLabels(labels=labels, loss_weights=per_row)
    losses = functional.cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], reduction="none")
    numbers = (labels[:, 1:] != -100).sum(1)
    sums = [(losses.sum(1) * per_row).sum(), (numbers * per_row).sum()]
    torch.testing.assert_close(weighted_causal_lm_loss(outputs, weighted), sums[0] / sums[1])
    torch.testing.assert_close(weighted[..., 1:].ne(-100).sum(), sums[1])
    with pytest.raises(TypeError, match="compute_loss_func=weighted_causal_lm_loss"):
        model(**batch, labels=weighted)
    with pytest.raises(TypeError, match="labels=None"):
        weighted_causal_lm_loss(outputs, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fit logits"):
        weighted_causal_lm_loss(outputs, labels[:, :5])


@pytest.mark.processes
def test_script_of_the_page_trains(blend: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (REPO / "docs" / "trainers.md").read_text(encoding="utf-8")
    (script,) = [
        block.code for block in find_blocks(page) if "weighted_causal_lm_loss" in block.code
    ]
    monkeypatch.chdir(blend)
    names: dict[str, Any] = {"__name__": __name__}
    with torch.random.fork_rng():
        exec(script.replace('"run",', f'"{tmp_path}", use_cpu=True,'), names)
    history = losses_of(names["trainer"])
    names["train_loader"].shutdown()
    assert len(history) == 4
    assert history[-1] < history[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_boundaries_change_nothing_where_position_ids_are_enough(blend: Path, attention: str):
    model = tiny_llama(attention).eval()
    for inputs in islice(loader_of(blend / "plain.yaml", Chat(None, by_token=False)), 3):
        plain = {name: inputs[name] for name in ("input_ids", "position_ids", "use_cache")}
        with torch.no_grad():
            found, expected = model(**inputs), model(**plain)
        torch.testing.assert_close(found.logits, expected.logits)


def test_evaluation_has_the_weighted_mean(blend: Path, tmp_path: Path) -> None:
    batches = [*islice(loader_of(blend / "blend.yaml", Chat()), 3)]

    class Packed(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_eval_dataloader(self, _: Any = None) -> Any:
            return batches[:1]

    arguments = arguments_of(tmp_path, prediction_loss_only=True)
    model = tiny_llama()
    trainer = Packed(model, arguments, compute_loss_func=weighted_causal_lm_loss)
    found = trainer.evaluate(eval_dataset=[0])["eval_loss"]
    inputs = dict(batches[0])
    labels = inputs.pop("labels")
    with torch.no_grad():
        assert found == pytest.approx(weighted_causal_lm_loss(model(**inputs), labels).item())
