"""The loss of a step is that of one big batch, however it is cut into micro-batches and ranks.

The reference is a few lines of plain torch. Ranks are threads in the property, and processes under
DistributedDataParallel in one test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from energon_lite.loss import (
    DeferredMean,
    step_denominator,
    weight_total,
    weighted_mean,
    weighted_sum,
)
from energon_lite.loss import means as loss_module

from ..conftest import examples
from ..rank_processes import in_ranks

VOCABULARY = 5
WIDTH = 3
IGNORED = -100


# A small model of tokens: embedding, attention over the sample, a non-linearity, logits.


def make_parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(VOCABULARY, WIDTH), (WIDTH, WIDTH), (WIDTH, VOCABULARY), (VOCABULARY,)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def losses_of(parameters: list[Tensor], tokens: Tensor, labels: Tensor, per_token: bool) -> Tensor:
    """(n, T), or (n,) with the mean over all tokens of a sample."""
    embedding, query, out, bias = parameters
    x = embedding[tokens]
    x = x + torch.softmax(x @ query @ x.mT, dim=-1) @ x
    logits = torch.tanh(x) @ out + bias
    losses = F.cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
    return losses if per_token else losses.mean(1)


@dataclass
class Data:
    tokens: Tensor
    labels: Tensor
    weights: Tensor
    per_token: bool

    def __getitem__(self, rows: list[int]) -> Data:
        index = torch.tensor(rows, dtype=torch.int64)
        return Data(self.tokens[index], self.labels[index], self.weights[index], self.per_token)

    @property
    def mask(self) -> Tensor | None:
        return self.labels != IGNORED if self.per_token else None

    @property
    def shape(self) -> torch.Size:
        return self.labels.shape if self.per_token else self.weights.shape

    def losses(self, parameters: list[Tensor]) -> Tensor:
        return losses_of(parameters, self.tokens, self.labels, self.per_token)


def make_data(weights: list[float], ignored: list[list[bool]], per_token: bool) -> Data:
    generator = torch.Generator().manual_seed(len(weights))
    shape = (len(weights), len(ignored[0]))
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    return Data(
        torch.randint(VOCABULARY, shape, generator=generator),
        labels.masked_fill(torch.tensor(ignored), IGNORED),
        torch.tensor(weights),
        per_token,
    )


def big_batch(data: Data) -> tuple[float, Tensor]:
    """Loss and gradient of all samples at once, without the code under test."""
    parameters = make_parameters()
    factors = data.weights.double()
    if data.mask is not None:
        factors = factors[:, None] * data.mask
    if factors.sum() == 0:
        return 0.0, torch.zeros_like(flat(parameters))
    loss = (factors * data.losses(parameters)).sum() / factors.sum()
    loss.backward()
    return loss.item(), flat(p.grad for p in parameters)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def assert_same_gradient(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).norm() <= 1e-10 * wanted.norm()


# Ranks as threads: the part of torch.distributed that the module uses.


class ThreadRanks:
    """Stands for `torch.distributed`; a collective that not all ranks call breaks the barrier."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.num_calls = 0
        self._barrier = threading.Barrier(max(num_ranks, 1))
        self._slots: list[Tensor] = [torch.empty(0)] * num_ranks
        self._local = threading.local()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_world_size(self, group: object = None) -> int:
        return self.num_ranks

    def get_backend_config(self, group: object = None) -> str:
        return "cpu:gloo"

    def all_reduce(self, tensor: Tensor, group: object = None) -> None:
        self._slots[self._local.rank] = tensor.clone()
        self._barrier.wait(timeout=60)
        assert len({(t.shape, t.dtype) for t in self._slots}) == 1
        tensor.copy_(torch.stack(self._slots).sum(0))
        self.num_calls += self._local.rank == 0
        self._barrier.wait(timeout=60)

    def run(self, work: Callable[[int], Any], num_threads: int = 0) -> list[Any]:
        def rank_thread(rank: int) -> Any:
            self._local.rank = rank
            return work(rank)

        with (
            mock.patch.object(loss_module, "dist", self),
            ThreadPoolExecutor(num_threads or self.num_ranks) as pool,
        ):
            return list(pool.map(rank_thread, range(num_threads or self.num_ranks)))


def join_gradients(ranks: ThreadRanks, parameters: list[Tensor], reduction: Any) -> None:
    """What DDP does in backward, or a trainer that adds up."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        ranks.all_reduce(parameter.grad)
        if reduction == "mean":
            parameter.grad /= ranks.num_ranks


def step_known_ahead(
    ranks: ThreadRanks, micro_batches: list[Data], reduction: Any
) -> tuple[float, Tensor]:
    parameters = make_parameters()
    totals = [weight_total(b.weights, b.shape, mask=b.mask) for b in micro_batches]
    denominator = step_denominator(totals, reduction=reduction)
    loss = torch.zeros((), dtype=torch.float64)
    for b in micro_batches:
        part = weighted_mean(b.losses(parameters), b.weights, mask=b.mask, denominator=denominator)
        part.backward()
        loss += part.detach()
    ranks.all_reduce(loss)
    join_gradients(ranks, parameters, reduction)
    if reduction == "mean":
        loss /= ranks.num_ranks
    return loss.item(), flat(p.grad for p in parameters)


def step_deferred(
    ranks: ThreadRanks, micro_batches: list[Data], reduction: Any
) -> tuple[float, Tensor]:
    parameters = make_parameters()
    step = DeferredMean()
    for b in micro_batches:
        step.add(b.losses(parameters), b.weights, b.mask).backward()
    join_gradients(ranks, parameters, reduction)
    loss = step.finish(iter(parameters), reduction=reduction)
    return loss.item(), flat(p.grad for p in parameters)


STEPS = pytest.mark.parametrize("step", [step_known_ahead, step_deferred])


@st.composite
def dealt(draw: st.DrawFn) -> tuple[Data, list[list[list[int]]]]:
    """A batch, and its rows by rank and micro-batch; both kinds of parts may be empty."""
    n = draw(st.integers(1, 8))
    num_tokens = draw(st.integers(1, 4))
    mask_kind = draw(st.sampled_from(["some", "some", "rows", "all"]))
    bits = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)
    rows = {
        "some": bits,
        "rows": st.booleans().map(lambda b: [b] * num_tokens),
        "all": st.just([True] * num_tokens),
    }[mask_kind]
    ignored = draw(st.lists(rows, min_size=n, max_size=n))
    weight = st.sampled_from([0.0, 0.2, 1.0, 1.0, 3.7])
    weights = draw(st.lists(weight, min_size=n, max_size=n))
    counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any))
    places = [(rank, k) for rank, count in enumerate(counts) for k in range(count)]
    deal: list[list[list[int]]] = [[[] for _ in range(count)] for count in counts]
    for row in range(n):
        rank, k = draw(st.sampled_from(places))
        deal[rank][k].append(row)
    return make_data(weights, ignored, per_token=draw(st.booleans())), deal


UNEVEN = make_data(
    [1.0, 0.2, 0.2, 0.0, 1.0, 3.7],
    [[False, False, True], [True] * 3, [False] * 3, [False] * 3, [False, True, True], [False] * 3],
    per_token=True,
)
UNEVEN_DEAL = [[[0, 4], [1], [2]], [[3, 5]], []]  # a masked micro-batch, a rank without any


@STEPS
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@given(case=dealt())
@example(case=(UNEVEN, UNEVEN_DEAL))
@examples(10)
def test_step_has_loss_and_gradient_of_one_big_batch(
    step: Callable[..., tuple[float, Tensor]], reduction: Any, case: Any
) -> None:
    data, deal = case
    wanted_loss, wanted = big_batch(data)
    ranks = ThreadRanks(len(deal))
    results = ranks.run(lambda rank: step(ranks, [data[rows] for rows in deal[rank]], reduction))
    assert len(results) == len(deal)
    for found_loss, found in results:
        assert found_loss == pytest.approx(wanted_loss, rel=1e-10, abs=0)
        assert_same_gradient(found, wanted)


def test_ranks_send_once_per_step() -> None:
    ranks = ThreadRanks(3)
    ranks.run(lambda rank: step_denominator([1.0] * rank))
    assert ranks.num_calls == 1

    def deferred(rank: int) -> None:
        step = DeferredMean()
        for _ in range(rank):
            step.add(torch.ones(2), torch.ones(2))
        assert ranks.num_calls == 1
        step.finish([])

    ranks.run(deferred)
    assert ranks.num_calls == 2


# Real processes.


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(make_parameters())

    def forward(self, data: Data) -> Tensor:
        return data.losses(list(self.all))


def errors_under_ddp(rank: int) -> list[tuple[float, float]]:
    """How far gradient and loss of two ranks are from those of one big batch, in both ways."""
    wanted_loss, wanted = big_batch(UNEVEN)
    micro_batches = [UNEVEN[rows] for rows in UNEVEN_DEAL[rank]]
    found = []
    for is_known in (True, False):
        model, step, loss = (
            DistributedDataParallel(Model()),
            DeferredMean(),
            torch.zeros((), dtype=torch.float64),
        )
        totals = [weight_total(b.weights, b.shape, mask=b.mask) for b in micro_batches]
        denominator = step_denominator(totals) if is_known else None
        for number, b in enumerate(micro_batches, start=1):
            with nullcontext() if number == len(micro_batches) else model.no_sync():
                losses = model(b)
                if is_known:
                    part = weighted_mean(losses, b.weights, mask=b.mask, denominator=denominator)
                    loss = loss + part.detach()
                else:
                    part = step.add(losses, b.weights, b.mask)
                part.backward()
        if is_known:
            dist.all_reduce(loss)
            loss /= 2
        else:
            loss = step.finish(model.parameters())
        error = flat(p.grad for p in model.parameters()) - wanted
        found.append((float(error.norm() / wanted.norm()), float(loss) - wanted_loss))
    return found


@pytest.mark.processes
@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()),
    reason="this build of torch has no torch.distributed with gloo",
)
def test_accumulation_under_ddp_has_the_gradient_of_one_process(tmp_path: Path) -> None:
    for found in in_ranks(errors_under_ddp, 2, tmp_path / "ranks"):
        for errors in found:
            assert max(map(abs, errors)) < 1e-10


# Single functions.


def test_weight_of_a_sample_counts_for_each_of_its_losses() -> None:
    losses = torch.arange(12.0).reshape(2, 3, 2)
    weights = torch.tensor([1.0, 0.5])
    assert weighted_sum(losses, weights).item() == 15 + 0.5 * 51
    assert weight_total(weights, losses.shape).item() == 9
    full = weights[:, None, None].expand(2, 3, 2)
    assert weighted_sum(losses, full) == weighted_sum(losses, weights)
    assert weight_total(full, losses.shape) == weight_total(weights, losses.shape)
    assert weighted_mean(losses, full) == weighted_mean(losses, weights)


MASKS = {
    "tokens": torch.tensor([[True, False, True], [False, False, True]]),
    "numbers": torch.tensor([[0.5, 0.0, 2.0], [1.0, 0.0, 0.25]]),
    "samples": torch.tensor([[True], [False]]),
    "places": torch.tensor([[1, 0, 1]]),
    "scalar": torch.tensor(0.5),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_mask_multiplies_the_weights(mask: Tensor) -> None:
    losses = torch.arange(1.0, 7.0).reshape(2, 3)
    weights = torch.tensor([1.0, 0.5])
    factors = weights[:, None] * mask
    wanted = (factors * losses).sum()
    total = factors.expand(2, 3).sum()
    torch.testing.assert_close(weighted_sum(losses, weights, mask=mask), wanted)
    torch.testing.assert_close(weight_total(weights, (2, 3), mask=mask), total.double())
    torch.testing.assert_close(weighted_mean(losses, weights, mask=mask), wanted / total)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_loss_of_weight_zero_leaks_nothing(bad: float) -> None:
    losses = torch.tensor([[1.0, bad], [bad, bad], [2.0, bad]], requires_grad=True)
    weights = torch.tensor([1.0, 0.0, 3.0])
    mean = weighted_mean(losses, weights, mask=torch.tensor([[True, False]]))
    mean.backward()
    assert mean.item() == 7 / 4
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.25, 0], [0, 0], [0.75, 0]]
    assert weighted_mean(torch.tensor([1.0, float("nan")]), torch.ones(2)).isnan()  # it counts


@pytest.mark.parametrize("denominator", [None, 0, torch.tensor(0.0)])
@pytest.mark.parametrize("values", [[1.0, float("nan")], []])
def test_denominator_of_zero_makes_zero_and_no_gradient(denominator: Any, values: Any) -> None:
    losses = torch.tensor(values, requires_grad=True)
    mean = weighted_mean(losses, torch.zeros(len(values)), denominator=denominator)
    mean.backward()
    assert mean.item() == 0
    assert losses.grad is not None
    assert losses.grad.tolist() == [0] * len(values)


def test_deferred_mean_over_weights_of_zero_is_zero_and_has_no_gradient() -> None:
    weight = torch.ones(2, requires_grad=True)
    step = DeferredMean()
    step.add(weight * 3, torch.zeros(2)).backward()
    assert step.finish([weight]).item() == 0
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 0]
    assert step.finish([]).item() == 0  # nothing added


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_of_low_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    # A running sum in bfloat16 would stop at 256, one in float16 at 2048.
    losses = torch.ones(3001, dtype=dtype, requires_grad=True)
    weights = torch.ones(3001, requires_grad=True)
    total = weighted_sum(losses, weights)
    assert (total.dtype, total.item()) == (torch.float32, 3001)
    mean = weighted_mean(losses, weights.to(dtype))
    mean.backward()
    assert (mean.dtype, mean.item()) == (torch.float32, 1)
    assert losses.grad is not None
    assert losses.grad.dtype == dtype
    torch.testing.assert_close(losses.grad[0], torch.tensor(1 / 3001, dtype=dtype))
    assert weights.grad is None
    tenths = torch.full((3,), 0.1, dtype=torch.float64)  # stay float64
    assert weighted_mean(tenths, torch.ones(3)).item() == pytest.approx(0.1, rel=1e-15)


def test_totals_are_exact_beyond_float32() -> None:
    weights = torch.ones(1)
    half = weight_total(weights, (1, 2**24))
    odd = step_denominator([half, weights.sum()])
    assert (odd.dtype, odd.item()) == (torch.float64, 2**24 + 1)


def test_bfloat16_gradients_are_divided_with_one_rounding() -> None:
    weight = torch.zeros(61, dtype=torch.bfloat16, requires_grad=True)
    slopes = torch.arange(1, 62).bfloat16()
    wanted = (slopes.float() / 61).bfloat16()
    assert wanted.tolist() != (slopes * torch.tensor(1 / 61).bfloat16()).tolist()
    step = DeferredMean()
    step.add(weight * slopes, torch.ones(61)).backward()
    step.finish(weight)
    assert weight.grad is not None
    assert weight.grad.tolist() == wanted.tolist()


def test_deferred_mean_starts_from_scratch_after_each_step() -> None:
    weight = torch.zeros(1, requires_grad=True)
    unused = torch.zeros(1, requires_grad=True)
    step = DeferredMean()
    for slope in (2.0, 8.0):
        weight.grad = None
        for _ in range(2):
            step.add(weight * slope + slope, torch.tensor([2.0])).backward()
        # Twice in the list is divided once; no gradient is no gradient.
        assert step.finish([weight, unused, weight]).item() == slope
        assert weight.grad is not None
        assert weight.grad.item() == slope
    assert unused.grad is None


def test_step_denominator_takes_tensors_and_numbers_on_one_rank() -> None:
    assert step_denominator([1, 2.5, torch.tensor([0.5])]).item() == 4
    assert step_denominator([1.0], reduction="sum").item() == 1
    assert step_denominator([]).item() == 0


# Where the ranks reduce.


@pytest.mark.parametrize(
    ("config", "accelerator", "wanted"),
    [
        ("cpu:gloo", True, "cpu"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),
        ("cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("cpu:gloo,other:own", True, "cpu"),
    ],
)
def test_ranks_agree_on_the_device_from_the_group_alone(
    config: str, accelerator: bool, wanted: str
) -> None:
    with (
        mock.patch.object(loss_module.dist, "get_backend_config", return_value=config),
        mock.patch("torch.cuda.is_available", return_value=accelerator),
    ):
        assert loss_module._device_of_group(None).type == wanted


# Errors.

TWO, TOKENS, NAN = torch.ones(2), torch.ones(2, 3), float("nan")
ERRORS: list[tuple[Callable[[], object], str]] = [
    (lambda: weighted_sum(torch.ones(6), TWO),
     "weights of shape (2,) do not fit losses of shape (6,)"),
    (lambda: weight_total(torch.ones(3, 2), (2, 3)),
     "weights of shape (3, 2) do not fit losses of shape (2, 3)"),
    (lambda: weighted_mean(torch.tensor(1.0), TWO),
     "losses of shape () have no sample axis. Give one loss per sample or token, as a loss "
     'function with reduction="none"'),
    (lambda: weighted_sum(TOKENS, TWO, mask=torch.ones(2, 4)),
     "mask of shape (2, 4) does not fit losses of shape (2, 3)"),
    (lambda: weighted_sum(torch.ones(3, 3), torch.ones(3), mask=torch.ones(3)),
     "mask of shape (3,) does not fit losses of shape (3, 3). Give it as many axes, each of the "
     "losses' size or 1: mask[:, None] has one entry per sample"),
    (lambda: weighted_sum(TWO, torch.tensor([1.0, -0.5])),
     "weights[1] is -0.5; it must be finite and at least 0."),
    (lambda: weight_total(torch.tensor([[1.0, 1.0], [1.0, float("inf")]]), (2, 2)),
     "weights[1, 1] is inf"),
    (lambda: weighted_mean(TWO, TWO, mask=torch.tensor(NAN)),
     "mask is nan; it must be finite and at least 0."),
    (lambda: weighted_mean(TWO, TWO, denominator=TWO),
     "denominator has shape (2,); it must be one number."),
    (lambda: weighted_mean(TWO, TWO, denominator=-1.0),
     "denominator is -1.0; it must be finite and at least 0."),
    (lambda: step_denominator([1.0, torch.tensor(NAN)]),
     "totals[1] is nan; it must be finite and at least 0."),
    (lambda: step_denominator([1.0], reduction="avg"),  # type: ignore[arg-type]
     "reduction='avg' must be 'mean', where gradients are averaged"),
    (lambda: DeferredMean().finish([], reduction="avg"),  # type: ignore[arg-type]
     "reduction='avg' must be 'mean'"),
    (lambda: ThreadRanks(-1).run(lambda rank: step_denominator([1.0]), 1),
     "This rank is not in `group`"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), ERRORS)
def test_errors_name_what_does_not_fit(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        call()
    assert text in str(caught.value)


def test_values_on_other_devices_are_not_looked_at() -> None:
    # A tensor on "meta" has no values: reading one would raise.
    weights = torch.ones(2, device="meta")
    assert weight_total(weights, (2, 3)).device.type == "meta"
