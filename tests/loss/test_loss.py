"""The loss of a step is that of one big batch, however it is cut into micro-batches and ranks.

The reference is a few lines of plain torch. Ranks are threads in the property, and processes under
DistributedDataParallel in one test.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

from energon_lite.loss import (
    DeferredMean,
    step_denominator,
    weight_total,
    weighted_mean,
    weighted_sum,
)
from energon_lite.loss import means as loss_module

from ..conftest import examples

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
        self._barrier = threading.Barrier(num_ranks)
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
        self._barrier.wait(timeout=30)
        assert len({(t.shape, t.dtype) for t in self._slots}) == 1
        tensor.copy_(torch.stack(self._slots).sum(0))
        self.num_calls += self._local.rank == 0
        self._barrier.wait(timeout=30)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def rank_thread(rank: int) -> Any:
            self._local.rank = rank
            return work(rank)

        with (
            mock.patch.object(loss_module, "dist", self),
            ThreadPoolExecutor(self.num_ranks) as pool,
        ):
            return list(pool.map(rank_thread, range(self.num_ranks)))


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
@examples(100)
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


def test_mean_of_means_would_differ_on_such_data() -> None:
    wanted_loss, wanted = big_batch(UNEVEN)
    ranks = ThreadRanks(2)

    def step(rank: int) -> tuple[float, Tensor]:
        parameters = make_parameters()
        batches = [UNEVEN[rows] for rows in UNEVEN_DEAL[rank]]
        parts = [weighted_mean(b.losses(parameters), b.weights, mask=b.mask) for b in batches]
        loss = torch.stack(parts).mean()
        loss.backward()
        join_gradients(ranks, parameters, "mean")
        return loss.item(), flat(p.grad for p in parameters)

    results = ranks.run(step)
    assert (results[0][1] - wanted).norm() > 0.05 * wanted.norm()
    assert abs(sum(loss for loss, _ in results) / 2 - wanted_loss) > 0.05 * wanted_loss


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

RANK = """
import copy, json, os, sys
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from energon_lite.loss import DeferredMean, step_denominator, weight_total, weighted_mean

torch.set_num_threads(1)
meeting, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 11)
).double()
tokens = torch.randint(11, (12, 7))
labels = torch.randint(11, (12, 7)).masked_fill(torch.rand(12, 7) < 0.4, -100)
labels[4:6] = -100
weights = torch.tensor([1.0, 0.2, 0.2, 0.0] * 3)
deal = [[range(0, 4), range(4, 6)], [range(6, 7), range(7, 9), range(9, 12)]][rank]

def losses_of(model, rows):
    logits = model(tokens[list(rows)])
    wanted = labels[list(rows)]
    return torch.nn.functional.cross_entropy(logits.mT, wanted, reduction="none")

def gradients(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

def batches():
    for k, rows in enumerate(deal):
        rows = list(rows)
        last = k == len(deal) - 1
        with nullcontext() if last else ddp.no_sync():
            yield losses_of(ddp, rows), weights[rows], labels[rows] != -100

whole = copy.deepcopy(model)
factors = weights.double()[:, None] * (labels != -100)
whole_loss = (factors * losses_of(whole, range(12))).sum() / factors.sum()
whole_loss.backward()

result = {}
for way in ("known", "deferred", "mean of means"):
    ddp = DistributedDataParallel(copy.deepcopy(model))
    if way == "known":
        totals = []
        for rows in map(list, deal):
            totals.append(weight_total(weights[rows], (len(rows), 7), mask=labels[rows] != -100))
        denominator = step_denominator(totals)
        parts = []
        for losses, w, mask in batches():
            parts.append(weighted_mean(losses, w, mask=mask, denominator=denominator))
            parts[-1].backward()
        loss = sum(parts).detach()
        dist.all_reduce(loss)
        loss /= world
    elif way == "deferred":
        step = DeferredMean()
        for losses, w, mask in batches():
            step.add(losses, w, mask).backward()
        loss = step.finish(ddp.parameters())
    else:
        loss = 0.0
        for losses, w, mask in batches():
            (weighted_mean(losses, w, mask=mask) / len(deal)).backward()
    error = (gradients(ddp) - gradients(whole)).norm() / gradients(whole).norm()
    result[way] = [error.item(), float(loss) - whole_loss.item()]
print(json.dumps(result), flush=True)
dist.barrier()
dist.destroy_process_group()
# All is done, and said. The threads that gloo leaves after DDP now and then abort a process that
# takes the interpreter down ("terminate called without an active exception"), with torch alone too.
os._exit(0)
"""


@pytest.mark.processes
@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()),
    reason="this build of torch has no torch.distributed with gloo",
)
def test_accumulation_under_ddp_has_the_gradient_of_one_process(tmp_path: Path) -> None:
    world = 2
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "meeting"), str(rank), str(world)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world
    for output in outputs:
        result = json.loads(output.splitlines()[-1])
        for way in ("known", "deferred"):
            gradient_error, loss_error = result[way]
            assert gradient_error < 1e-10
            assert abs(loss_error) < 1e-10
        assert result["mean of means"][0] > 0.05


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


def test_loss_that_counts_shows_its_nan() -> None:
    assert weighted_mean(torch.tensor([1.0, float("nan")]), torch.ones(2)).isnan()


@pytest.mark.parametrize("denominator", [None, 0, torch.tensor(0.0)])
def test_denominator_of_zero_makes_zero_and_no_gradient(denominator: Any) -> None:
    losses = torch.tensor([1.0, float("nan")], requires_grad=True)
    mean = weighted_mean(losses, torch.zeros(2), denominator=denominator)
    mean.backward()
    assert mean.item() == 0
    assert losses.grad is not None
    assert losses.grad.tolist() == [0, 0]


def test_deferred_mean_over_weights_of_zero_is_zero_and_has_no_gradient() -> None:
    weight = torch.ones(2, requires_grad=True)
    step = DeferredMean()
    step.add(weight * 3, torch.zeros(2)).backward()
    assert step.finish([weight]).item() == 0
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 0]
    assert step.finish([]).item() == 0  # nothing added


def test_empty_micro_batch_adds_nothing() -> None:
    losses = torch.empty(0, 3, requires_grad=True)
    mean = weighted_mean(losses, torch.empty(0), mask=torch.empty(0, 1))
    mean.backward()
    assert mean.item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_of_low_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    # A running sum in bfloat16 would stop at 256, one in float16 at 2048.
    losses = torch.ones(3001, dtype=dtype, requires_grad=True)
    weights = torch.ones(3001)
    total = weighted_sum(losses, weights)
    assert (total.dtype, total.item()) == (torch.float32, 3001)
    mean = weighted_mean(losses, weights.to(dtype))
    mean.backward()
    assert (mean.dtype, mean.item()) == (torch.float32, 1)
    assert losses.grad is not None
    assert losses.grad.dtype == dtype
    torch.testing.assert_close(losses.grad[0], torch.tensor(1 / 3001, dtype=dtype))


def test_float64_losses_stay_float64() -> None:
    losses = torch.full((3,), 0.1, dtype=torch.float64)
    assert weighted_mean(losses, torch.ones(3)).item() == pytest.approx(0.1, rel=1e-15)


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


def test_weights_and_masks_get_no_gradient() -> None:
    losses = torch.ones(2, requires_grad=True)
    weights = torch.ones(2, requires_grad=True)
    weighted_mean(losses, weights, mask=torch.ones(2, requires_grad=True)).backward()
    assert weights.grad is None


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


@pytest.mark.parametrize(("reduction", "wanted"), [("mean", 2.5), ("sum", 7.5)])
def test_averaging_trainers_divide_by_the_total_over_the_ranks(
    reduction: Any, wanted: float
) -> None:
    totals: list[list[float]] = [[1.5, 2.0], [], [4.0]]
    ranks = ThreadRanks(3)
    found = ranks.run(lambda rank: step_denominator(totals[rank], reduction=reduction).item())
    assert found == [wanted] * 3


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


def errors() -> Iterator[tuple[str, Callable[[], object], str]]:
    two = torch.ones(2)
    tokens = torch.ones(2, 3)
    yield (
        "flat losses",
        lambda: weighted_sum(torch.ones(6), two),
        "weights of shape (2,) do not fit losses of shape (6,)",
    )
    yield (
        "transposed weights",
        lambda: weight_total(torch.ones(3, 2), (2, 3)),
        "weights of shape (3, 2) do not fit losses of shape (2, 3)",
    )
    yield (
        "mean loss",
        lambda: weighted_mean(torch.tensor(1.0), two),
        "losses of shape () have no sample axis. Give one loss per sample or token, as a loss "
        'function with reduction="none"',
    )
    yield (
        "mask of another batch",
        lambda: weighted_sum(tokens, two, mask=torch.ones(2, 4)),
        "mask of shape (2, 4) does not fit losses of shape (2, 3)",
    )
    yield (
        "mask with an axis too few",
        lambda: weighted_sum(torch.ones(3, 3), torch.ones(3), mask=torch.ones(3)),
        "mask of shape (3,) does not fit losses of shape (3, 3). Give it as many axes, each of the "
        "losses' size or 1: mask[:, None] has one entry per sample",
    )
    yield (
        "negative weight",
        lambda: weighted_sum(two, torch.tensor([1.0, -0.5])),
        "weights[1] is -0.5; it must be finite and at least 0.",
    )
    yield (
        "weight per token",
        lambda: weight_total(torch.tensor([[1.0, 1.0], [1.0, float("inf")]]), (2, 2)),
        "weights[1, 1] is inf",
    )
    yield (
        "mask of NaN",
        lambda: weighted_mean(two, two, mask=torch.tensor(float("nan"))),
        "mask is nan; it must be finite and at least 0.",
    )
    yield (
        "denominators",
        lambda: weighted_mean(two, two, denominator=two),
        "denominator has shape (2,); it must be one number.",
    )
    yield (
        "negative denominator",
        lambda: weighted_mean(two, two, denominator=-1.0),
        "denominator is -1.0; it must be finite and at least 0.",
    )
    yield (
        "total of NaN",
        lambda: step_denominator([1.0, torch.tensor(float("nan"))]),
        "totals[1] is nan; it must be finite and at least 0.",
    )
    yield (
        "unknown reduction",
        lambda: step_denominator([1.0], reduction="avg"),  # type: ignore[arg-type]
        "reduction='avg' must be 'mean', where gradients are averaged",
    )
    yield (
        "unknown reduction at the end",
        lambda: DeferredMean().finish([], reduction="avg"),  # type: ignore[arg-type]
        "reduction='avg' must be 'mean'",
    )


@pytest.mark.parametrize(("call", "text"), [e[1:] for e in errors()], ids=[e[0] for e in errors()])
def test_errors_name_what_does_not_fit(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        call()
    assert text in str(caught.value)


def test_rank_outside_of_the_group_is_refused() -> None:
    ranks = ThreadRanks(1)
    with (
        mock.patch.object(ranks, "get_world_size", return_value=-1),
        pytest.raises(ValueError, match="This rank is not in `group`"),
    ):
        ranks.run(lambda rank: step_denominator([1.0]))


def test_values_on_other_devices_are_not_looked_at() -> None:
    # A tensor on "meta" has no values: reading one would raise.
    weights = torch.ones(2, device="meta")
    assert weight_total(weights, (2, 3)).device.type == "meta"
