"""The gradient of packed runs on several ranks is that of the samples one by one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    TextSample,
    WorkerConfig,
    get_train_dataset,
    stateless,
)
from energon_lite.loss import step_denominator, token_weight, weight_total, weighted_mean

from ..helpers import Ranks, number_of, text_set

VOCABULARY, WIDTH, CAPACITY = 17, 8, 24
NUM_SAMPLES = 30


class Transformer(nn.Module):
    """Two layers of causal attention that stays in its segment; positions restart with it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CAPACITY, WIDTH)
        self.mixes = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.outs = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def losses(self, ids: Any, labels: Any, positions: Any, segments: Any) -> torch.Tensor:
        """The loss of predicting each label, (B, L); labels are shifted here, as in HF models."""
        x = self.tokens(ids) + self.positions(positions)
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = causal & (segments[:, :, None] == segments[:, None, :])
        for mix, out in zip(self.mixes, self.outs, strict=True):
            q, k, v = mix(x).chunk(3, dim=-1)
            x = x + out(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)).tanh()
        logits = self.head(x)[:, :-1]
        found = functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
        )
        return functional.pad(found.view(len(ids), -1), (1, 0))


class Encoder(DefaultTaskEncoder):
    """Sequences of 1..11 tokens; half of the tokens of some have no loss."""

    def __init__(self, **packing: Any) -> None:
        super().__init__()
        self.packing = Packing(CAPACITY, buffer_size=6, **packing)

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        ids = tokens_of(number_of(sample))
        return {"__key__": sample.__key__, "input_ids": ids, "labels": labels_of(ids)}

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])


def tokens_of(number: int) -> torch.Tensor:
    return (torch.arange(1 + number % 11) * 7 + number * 3) % VOCABULARY


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    labels = ids.clone()
    if int(ids.sum()) % 2:
        labels[: len(ids) // 2] = -100
    return labels


def gradient_of(model: Transformer) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def unpacked_gradient(
    numbers: list[tuple[str, int]], mode: Any, weights: dict[str, float]
) -> torch.Tensor:
    """Each sample by itself, weighted by hand."""
    model = Transformer()
    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for source, number in numbers:
        ids = tokens_of(number)
        labels = labels_of(ids)
        losses = model.losses(
            ids[None], labels[None], torch.arange(len(ids))[None], torch.ones(1, len(ids))
        )
        counts = labels[1:] != -100
        weight = weights[source] * token_weight(mode, int(counts.sum()))
        # As float32, which is what batches carry.
        weight = float(torch.tensor(weight, dtype=torch.float32))
        total = total + weight * losses[0, 1:][counts].sum()
        denominator += weight * int(counts.sum())
    (total / denominator).backward()
    return gradient_of(model)


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("loss")
    for name in ("a", "b"):
        text_set(folder / name, NUM_SAMPLES)
    members = [
        {"path": str(folder / "a"), "name": "a"},
        {"path": str(folder / "b"), "name": "b", "loss_weight": 0.3},
    ]
    split = {"train": {"blend": members}}
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": split}


def by_logarithm(num_targets: int) -> float:
    return 1 / math.log(1 + num_targets)


@pytest.mark.parametrize(
    ("world_size", "layout", "align", "mode"),
    [
        (1, "padded", 1, "token"),
        (2, "padded", 4, "sample"),
        (3, "thd", 1, "sqrt"),
        (3, "thd", 1, by_logarithm),
    ],
)
def test_packed_gradient_is_the_unpacked_one(blend, world_size, layout, align, mode) -> None:
    def make(config: WorkerConfig) -> Any:
        encoder = Encoder(loss=mode, layout=layout, align=align)
        return get_train_dataset(
            blend, worker_config=config, batch_size=2, shuffle_buffer_size=8, task_encoder=encoder
        )

    # A step of three micro-batches on each rank.
    batches = list(Ranks(make, world_size, num_streams=6).steps(3).values())
    numbers = [
        (key[0], int(name))
        for batch in batches
        for key, name in zip(members_of(batch.__restore_key__), batch.__key__, strict=True)
    ]
    assert {source for source, _ in numbers} == {"a", "b"}
    model = Transformer()
    totals = [weight_total(batch.loss_weights, batch.labels.shape) for batch in batches]
    denominator = step_denominator(totals)
    for batch in batches:
        losses = model.losses(batch.input_ids, batch.labels, batch.position_ids, batch.segment_ids)
        weighted_mean(losses, batch.loss_weights, denominator=denominator).backward()
    expected = unpacked_gradient(numbers, mode, {"a": 1.0, "b": 0.3})
    assert torch.allclose(gradient_of(model), expected, rtol=1e-10, atol=1e-14)


def members_of(key: Any) -> list[Any]:
    """The keys of the samples in the packs of a batch, in their order."""
    return [member for pack in key[2:] for member in pack[2:]]
