"""The mean loss of each source, compared with one that is computed token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    Sample,
    TextSample,
    edataclass,
    loss_by_source,
    stateless,
)
from energon_lite.core.keys import leaves

from ..helpers import Ranks, blend_maker, number_of, text_sets
from ..rank_processes import in_ranks

BLEND = "blend: [{path: a, weight: 2, loss_weight: 0.5}, {path: b}]"


@edataclass
class Tokens(Sample):
    input_ids: torch.Tensor
    labels: torch.Tensor


class Encoder(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> Tokens:
        tokens = torch.arange(1, 3 + number_of(sample) % 7)
        labels = tokens.masked_fill(tokens == 2, -100)
        return Tokens.derive_from(sample, input_ids=tokens, labels=labels)

    def sample_length(self, sample: Tokens) -> int:
        return len(sample.input_ids)


def packed(**settings: Any) -> type[Encoder]:
    return type("Packed", (Encoder,), {"packing": Packing(**{"capacity": 20, **settings})})


ENCODERS = {
    "batches": Encoder,
    "packs": packed(),
    "thd": packed(layout="thd"),
    "aligned": packed(align=4, pad_to_capacity=False),
    "by sample": packed(loss="sample"),
    "shifted": packed(labels_are_shifted=True),
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_sets(tmp_path_factory.mktemp("losses"), a=17, b=11)


def losses_of(batch: Any) -> torch.Tensor:
    """One loss for each label, NaN where it does not count."""
    weights = getattr(batch, "loss_weights", batch.labels != -100)
    generator = torch.Generator().manual_seed(len(batch.__key__))
    return torch.where(weights != 0, torch.rand(batch.labels.shape, generator=generator), torch.nan)


def expected(batch: Any, losses: torch.Tensor) -> dict[str, tuple[float, float]]:
    names = [leaf[0] for leaf in leaves(batch.__restore_key__)]
    found: dict[str, tuple[float, float]] = {}
    first = 0
    for row in range(len(batch.labels)):
        segments = getattr(batch, "segment_ids", torch.ones_like(batch.labels))[row]
        for place, segment in enumerate(segments.tolist()):
            weight = 0.0
            if hasattr(batch, "loss_weights"):
                weight = batch.loss_weights[row, place].item()
            elif batch.labels[row, place] != -100:
                weight = batch.loss_weight[row].item()
            if weight:
                name = names[first + segment - 1]
                total, weights = found.get(name, (0.0, 0.0))
                loss = losses[row, place].item()
                found[name] = total + weight * loss, weights + weight
        first += int(segments.max())
    assert first == len(names)
    return found


@pytest.mark.parametrize("kind", ENCODERS)
def test_means_are_those_of_each_token(sets: Path, kind: str) -> None:
    dataset = blend_maker(sets, BLEND, ENCODERS[kind], batch_size=3)
    run = Ranks(dataset, 1, num_streams=2)
    for batch in run.steps(6).values():
        losses = losses_of(batch)
        truth = expected(batch, losses)
        means = {name: pytest.approx(total / weight) for name, (total, weight) in truth.items()}
        as_dict = {name: getattr(batch, name) for name in ("__restore_key__", "labels")}
        for name in ("segment_ids", "loss_weights", "loss_weight"):
            as_dict |= {name: getattr(batch, name)} if hasattr(batch, name) else {}
        for own in (batch, as_dict):
            assert (found := loss_by_source(losses, own)) == means
            assert found.weights == {name: pytest.approx(own[1]) for name, own in truth.items()}
            assert loss_by_source(losses.flatten(), own) == means
        if hasattr(batch, "segment_ids") and kind != "shifted":  # first labels do not count
            assert loss_by_source(losses[:, 1:], batch) == means
        doubled = 2 * getattr(batch, "loss_weights", batch.labels != -100)
        assert loss_by_source(losses, batch, weights=doubled).keys() == means.keys()


def test_losses_by_sample_have_the_weights_of_their_samples(sets: Path) -> None:
    (batch,) = Ranks(blend_maker(sets, BLEND, Encoder, batch_size=5), 1).steps(1).values()
    losses = torch.arange(5.0)
    found = loss_by_source(losses, batch)
    for name, mean in found.items():
        own = torch.tensor([leaf[0] == name for leaf in leaves(batch.__restore_key__)])
        assert mean == pytest.approx(losses[own].mean().item())
        assert found.weights[name] == pytest.approx(own.sum() * {"a": 0.5, "b": 1}[name[0]])
    assert loss_by_source(losses, batch, weights=torch.zeros(5)) == {}


def test_nan_stays_in_its_source(sets: Path) -> None:
    (batch,) = Ranks(blend_maker(sets, BLEND, packed(), batch_size=4), 1).steps(1).values()
    losses = torch.ones(batch.labels.shape)
    losses[0, 2:5] = torch.nan
    found = loss_by_source(losses, batch)
    assert sorted(map(str, found.values())) == ["1.0", "nan"]


def test_recorded_losses_are_in_stats_by_source(sets: Path) -> None:
    run = Ranks(blend_maker(sets, BLEND, packed(), batch_size=2), 2, num_streams=2)
    truth: dict[str, tuple[float, float]] = {}
    for rank, loader in enumerate(run.loaders):
        for batch in (run.next(rank)[1] for _ in range(3)):
            losses = losses_of(batch)
            loader.record_loss(loss_by_source(losses, batch))
            for name, own in expected(batch, losses).items():
                total, weight = truth.get(name, (0.0, 0.0))
                truth[name] = total + own[0], weight + own[1]
    stats = run.loaders[0].stats().merged([run.loaders[1].stats()])
    for name, (total, weight) in truth.items():
        assert stats[name].loss == pytest.approx(total / weight)
        assert stats.scalars()[f"data/{name}/loss"] == stats[name].loss
        assert stats[name].loss_count == pytest.approx(weight)


def rank_losses(rank: int, root: Path) -> Any:
    """Each rank has one source of its own, and one that both have."""
    names = ["own" + str(rank), "both"]
    batch = {"__restore_key__": ("batch", 0, *((name, 0, 0, 0) for name in names))}
    found = loss_by_source(torch.tensor([1.0 + rank, 4.0 * rank]), batch, reduce=True)
    alone = loss_by_source(torch.tensor([1.0 + rank, 4.0 * rank]), batch)
    return {"all": found, "weights": found.weights, "alone": alone}


@pytest.mark.processes
def test_ranks_with_other_sources_add_up_their_losses(tmp_path: Path) -> None:
    for rank, found in enumerate(in_ranks(rank_losses, 2, tmp_path, tmp_path)):
        assert found["all"] == {"own0": 1.0, "own1": 2.0, "both": 2.0}
        assert found["weights"] == {"own0": 1.0, "own1": 1.0, "both": 2.0}
        assert found["alone"] == {f"own{rank}": 1.0 + rank, "both": 4.0 * rank}


@pytest.mark.parametrize(
    ("losses", "batch", "words"),
    [
        (torch.ones(3), {"input_ids": torch.ones(3)}, "without __restore_key__ does not name"),
        (torch.ones(7), {"__restore_key__": ("batch", 0, *[("a", 0, i, i) for i in range(3)])},
         r"losses of shape \(7,\) are neither of the 3 samples"),
        (torch.ones(()), {"__restore_key__": ("batch", 0, *[("a", 0, i, i) for i in range(3)])},
         'reduction="none"'),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(losses: torch.Tensor, batch: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loss_by_source(losses, batch)


def test_losses_of_packs_have_the_tokens_of_their_rows(sets: Path) -> None:
    (batch,) = Ranks(blend_maker(sets, BLEND, packed(), batch_size=4), 1).steps(1).values()
    with pytest.raises(ValueError, match="nor of the tokens in 4 rows"):
        loss_by_source(torch.ones(4, 18), batch)
