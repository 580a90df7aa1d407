r"""Weighted mean losses whose gradient does not depend on how a step's batch is cut up.

With loss `l_i` and weight `w_i` of each sample or token, an optimizer step minimises

    L = sum_i w_i * l_i / D        D = sum_i w_i        over the whole step:
                                   all micro-batches of all ranks.

Each micro-batch must therefore divide its weighted *sum* by the same number. Dividing each by its
own total and averaging the means is another loss wherever the totals differ. Two ways to get there:

* `step_denominator`, when weights and masks of all micro-batches of the step are there before the
  first forward pass. The gradients are right at every moment. Prefer it where you can, and with
  float16, gradient clipping in hooks or optimizers that step during backward.
* `DeferredMean`, when they are not: micro-batches come one by one, or the forward pass makes the
  mask. The gradients are those of the sum until `finish` divides them.

DDP and FSDP *average* gradients over R ranks, so what arrives is 1/R of the sum. Hence
`reduction="mean"`, the default, divides by D/R; `reduction="sum"`, for trainers that add gradients
up, divides by D.

Weights and masks are constants here: no gradient flows into them. Those on the CPU must be finite
and at least 0; on other devices that is not checked, as it would wait for the device.

Axes: n samples, T tokens of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

Reduction = Literal["mean", "sum"]
# The weight of the loss of one token, by how many of them its sample has.
LossMode = Literal["token", "sample", "sqrt"] | Callable[[int], float]

# Others may lack float64, or be slow in it.
_DEVICES_WITH_FLOAT64 = ("cpu", "cuda")


def weighted_sum(losses: Tensor, weights: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Sums `weights * mask * losses`, in float32 or, for float64 losses, float64.

    A loss of weight 0 adds exactly 0 and gets a gradient of exactly 0, also if it is NaN or
    infinite. (What computed such a loss may itself turn a gradient of 0 into NaN, as `log` at 0.)

    Args:
        losses: shape (n,) or (n, T, ...); as from a loss function with `reduction="none"`.
        weights: shape (n,), one per sample, or the shape of `losses`; such as
            `batch.loss_weight`. Taken to the device of `losses`.
        mask: bool or number, as many axes as `losses` and each of its size or 1, or no axes.
            Multiplies the weights: False or 0 for padding and ignored labels.

    Returns:
        Shape (); float64 for float64 losses, else float32.

    Raises:
        ValueError: The shapes do not fit (names both), or a weight or mask on the CPU is negative,
            infinite or NaN (names the first one).

    Example:
        >>> losses = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> weighted_sum(losses, torch.tensor([1.0, 0.5]), mask=mask)
        tensor(4.5000)
    """
    if not losses.ndim:
        raise ValueError(
            "losses of shape () have no sample axis. Give one loss per sample or token, as a loss "
            'function with reduction="none" returns them.'
        )
    dtype = torch.promote_types(losses.dtype, torch.float32)
    factors = _factors(weights, mask, tuple(losses.shape), dtype, losses.device)
    # where, not only the product: NaN * 0 is NaN.
    return (torch.where(factors != 0, losses.to(dtype), 0.0) * factors).sum()


def weight_total(weights: Tensor, shape: Sequence[int], *, mask: Tensor | None = None) -> Tensor:
    """Sums `weights * mask` over losses of `shape`: the denominator that fits `weighted_sum`.

    Needs no losses, so it can be had before the forward pass, from the labels.

    Args:
        weights: shape (n,), one per sample, or `shape`.
        shape: of the losses to come, (n,) or (n, T, ...); usually `labels.shape`. A weight (n,)
            counts once per loss of its sample.
        mask: bool or number, as in `weighted_sum`.

    Returns:
        Shape (), on the device of `weights`; float64 where the device has it, else float32.

    Raises:
        ValueError: As `weighted_sum`.

    Example:
        >>> labels = torch.tensor([[5, 7], [2, -100]])
        >>> weight_total(torch.tensor([1.0, 0.5]), labels.shape, mask=labels != -100)
        tensor(2.5000, dtype=torch.float64)
    """
    device = weights.device
    return _factors(weights, mask, tuple(shape), _sum_dtype(device), device).sum()


def weighted_mean(
    losses: Tensor,
    weights: Tensor,
    *,
    mask: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Returns `weighted_sum / denominator`; what to call `backward()` on.

    Args:
        losses: shape (n,) or (n, T, ...).
        weights: shape (n,) or the shape of `losses`.
        mask: bool or number, as in `weighted_sum`.
        denominator: of the whole step, from `step_denominator`. By default the weights' own total,
            which is right only if this batch is the whole step, on all ranks.

    Returns:
        Shape (); float64 for float64 losses, else float32. A denominator of 0 returns 0, with a
        gradient of 0.

    Raises:
        ValueError: As `weighted_sum`, or `denominator` is not one number, or is negative, infinite
            or NaN (tensors are checked on the CPU only).

    Example:
        >>> weighted_mean(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 0.5]))
        tensor(2.)
        >>> weighted_mean(torch.tensor([1.0, 4.0]), torch.zeros(2))
        tensor(0.)
    """
    total = weighted_sum(losses, weights, mask=mask)
    if denominator is None:
        denominator = weight_total(weights, losses.shape, mask=mask)
    divisor = _number(denominator, "denominator").to(total.device, total.dtype)
    return _divide(total, divisor)


def step_denominator(
    totals: Sequence[Tensor | float],
    *,
    group: dist.ProcessGroup | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Returns the number by which to divide the weighted sum of each micro-batch of a step.

    That is D/R with `reduction="mean"` and D with "sum": D is the sum of all `totals` of all ranks,
    R the number of ranks. Every rank of `group` must call it, once per optimizer step. Ranks may
    have different numbers of micro-batches, also none. (DDP and FSDP still want a backward pass on
    each rank in each step; one with weights of 0 adds nothing.)

    Args:
        totals: one number per micro-batch of this rank, from `weight_total`.
        group: the ranks that join their gradients; all by default. Without `torch.distributed`,
            or with one rank, nothing is sent.
        reduction: how the trainer joins gradients over these ranks: "mean", as DDP and FSDP do,
            or "sum".

    Returns:
        Shape (), where the first tensor of `totals` is, on the CPU if there is none; float64 where
        the device has it. The same value on all ranks.

    Raises:
        ValueError: `reduction` is neither of the two; this rank is not in `group`; a total is not
            one number, or is negative, infinite or NaN (tensors are checked on the CPU only).

    Example:
        >>> step_denominator([2.5, torch.tensor(4.0)])  # one rank
        tensor(6.5000, dtype=torch.float64)
    """
    _check_reduction(reduction)
    numbers = [_number(total, f"totals[{i}]") for i, total in enumerate(totals)]
    devices = [total.device for total in totals if isinstance(total, Tensor)]
    device = devices[0] if devices else torch.device("cpu")
    dtype = _sum_dtype(device)
    nothing = torch.zeros((), dtype=dtype, device=device)
    own = sum((number.to(device, dtype) for number in numbers), nothing)
    total, num_ranks = _over_ranks(own, group)
    return total / num_ranks if reduction == "mean" else total


class DeferredMean:
    """The weighted mean over a step whose micro-batches are not known ahead.

    Call `backward()` on what `add` returns, for each micro-batch; then `finish`, before gradients
    are clipped, logged or used. Zero the gradients before the first `add` of a step, as `finish`
    divides all that is in them. In between they are those of a sum: the optimizer must not step
    during backward, and a float16 loss scale needs room for them; use `step_denominator` there.

    State: two numbers, the weighted sum of the losses so far and the total of their weights.

    Example:
        >>> weight = torch.zeros(1, requires_grad=True)
        >>> step = DeferredMean()
        >>> for x in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])):
        ...     step.add(weight * x, torch.ones(len(x))).backward()
        >>> step.finish([weight])
        tensor(0., dtype=torch.float64)
        >>> weight.grad  # (1 + 2 + 3 + 10) / 4, not the mean of means (2 + 10) / 2
        tensor([4.])
    """

    def __init__(self) -> None:
        self._loss_sum: Tensor | float = 0.0
        self._weight_total: Tensor | float = 0.0

    def add(self, losses: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
        """Counts a micro-batch; returns its weighted sum, to call `backward()` on.

        Args:
            losses: shape (n,) or (n, T, ...).
            weights: shape (n,) or the shape of `losses`.
            mask: bool or number, as in `weighted_sum`.

        Returns:
            Shape (); not yet divided, so no mean to log.

        Raises:
            ValueError: As `weighted_sum`.
        """
        loss_sum = weighted_sum(losses, weights, mask=mask)
        total = weight_total(weights, losses.shape, mask=mask)
        dtype = _sum_dtype(losses.device)
        self._loss_sum = loss_sum.detach().to(dtype) + self._loss_sum
        self._weight_total = total.to(losses.device, dtype) + self._weight_total
        return loss_sum

    def finish(
        self,
        parameters: Iterable[Tensor] | Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Divides the gradients, in place, by the step's denominator, and starts the next step.

        Every rank of `group` must call it once per optimizer step, after the ranks have joined
        their gradients (DDP and FSDP do so in the last `backward()`), also a rank that added
        nothing. If all weights of the step are 0, the gradients become 0.

        Args:
            parameters: those whose gradients to divide, as `model.parameters()`; the ones without
                a gradient are passed over, and one that is listed twice is divided once.
            group: the ranks that join their gradients; all by default.
            reduction: how they are joined, as in `step_denominator`.

        Returns:
            The weighted mean loss of the step over all ranks, shape (), detached, the same on all
            ranks; 0 if all weights are 0. On the device of the losses.

        Raises:
            ValueError: `reduction` is neither "mean" nor "sum", or this rank is not in `group`.
        """
        _check_reduction(reduction)
        numbers = [torch.as_tensor(n) for n in (self._loss_sum, self._weight_total)]
        dtype = _sum_dtype(numbers[0].device)
        sums, num_ranks = _over_ranks(torch.stack([n.to(dtype) for n in numbers]), group)
        loss_sum, total = sums.unbind()
        one = torch.ones_like(total)
        factor = _divide(one * num_ranks if reduction == "mean" else one, total)
        _scale_gradients([parameters] if isinstance(parameters, Tensor) else parameters, factor)
        self._loss_sum = self._weight_total = 0.0
        return _divide(loss_sum, total)


def token_weight(mode: LossMode, num_targets: int) -> float:
    """Returns what the loss of each token counts in a sample with `num_targets` of them.

    Times the sample's own loss weight, this is the weight of a token, packed or not; the total of
    all weights is the denominator.

    Args:
        mode: "token", each token counts 1; "sample", each sample counts 1; "sqrt", a sample counts
            as the root of its tokens (InternVL's square averaging); or a function of `num_targets`.
        num_targets: tokens of the sample whose loss counts.

    Returns:
        The weight; 0 without targets.

    Raises:
        ValueError: A weight is below 0, infinite or NaN; or there is no such mode.

    Example:
        >>> [token_weight(mode, 4) for mode in ("token", "sample", "sqrt")]
        [1.0, 0.25, 0.5]
    """
    if num_targets == 0:
        return 0.0
    if callable(mode):
        weight = float(mode(num_targets))
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"the loss function returned {weight} for {num_targets} tokens; it must be finite "
                "and at least 0."
            )
        return weight
    if mode not in ("token", "sample", "sqrt"):
        raise ValueError(f"mode={mode!r} must be 'token', 'sample', 'sqrt' or a function.")
    exponent = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}[mode]
    return float(num_targets**exponent)


def _factors(
    weights: Tensor,
    mask: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """`weights * mask` of each loss, in `shape`."""
    found = tuple(weights.shape)
    if found != shape and (not shape or found != shape[:1]):
        raise ValueError(
            f"weights of shape {found} do not fit losses of shape {shape}. Give one per sample, "
            f"shape {shape[:1]}, or one per loss; losses need their sample axis first."
        )
    _check_values(weights, "weights")
    factors = weights.detach().to(device, dtype)
    factors = factors.reshape(found + (1,) * (len(shape) - len(found))).expand(shape)
    if mask is None:
        return factors
    sizes = tuple(mask.shape)
    # As many axes as the losses, unlike in torch: (n,) would else mean tokens wherever n == T.
    fits = len(sizes) == len(shape) and all(
        size in (1, full) for size, full in zip(sizes, shape, strict=True)
    )
    if sizes and not fits:
        raise ValueError(
            f"mask of shape {sizes} does not fit losses of shape {shape}. Give it as many axes, "
            "each of the losses' size or 1: mask[:, None] has one entry per sample of (n, T), "
            "mask[None] one per token."
        )
    _check_values(mask, "mask")
    return factors * mask.detach().to(device, dtype)


def _check_values(values: Tensor, name: str) -> None:
    if values.device.type != "cpu" or values.dtype == torch.bool or torch.compiler.is_compiling():
        return
    wrong = ~(torch.isfinite(values) & (values >= 0))
    if wrong.any():
        index = wrong.nonzero()[0].tolist()
        where = f"{name}[{', '.join(map(str, index))}]" if index else name
        raise ValueError(
            f"{where} is {values[tuple(index)].item()}; it must be finite and at least 0."
        )


def _number(value: Tensor | float, name: str) -> Tensor:
    """A scalar tensor, off the graph; checked where that does not wait for a device."""
    if not isinstance(value, Tensor):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; it must be finite and at least 0.")
        return torch.tensor(float(value), dtype=torch.float64)
    if value.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be one number.")
    value = value.detach().reshape(())
    _check_values(value, name)
    return value


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"reduction={reduction!r} must be 'mean', where gradients are averaged over the ranks "
            "as DDP and FSDP do, or 'sum', where they are added up."
        )


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type in _DEVICES_WITH_FLOAT64 else torch.float32


def _divide(number: Tensor, divisor: Tensor) -> Tensor:
    """`number / divisor`, and 0 with a gradient of 0 where the divisor is 0."""
    is_zero = divisor == 0
    return torch.where(is_zero, 0.0, number / torch.where(is_zero, 1.0, divisor))


def _scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    done: set[int] = set()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or id(parameter) in done:
            continue
        done.add(id(parameter))
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        here = factor.to(gradient.device, dtype)
        if dtype == gradient.dtype:
            gradient.mul_(here)
        else:  # rounded once, as a gradient; a bfloat16 factor would be off by up to 0.4 %
            gradient.copy_(gradient.to(dtype).mul_(here))


def _over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """The sum of `values` over the ranks of `group`, and how many they are; may change `values`."""
    if not (dist.is_available() and dist.is_initialized()):
        return values, 1
    num_ranks = dist.get_world_size(group)
    if num_ranks < 1:
        raise ValueError("This rank is not in `group`; only its members may call this.")
    if num_ranks == 1:
        return values, 1
    device = _device_of_group(group)
    if values.device.type == device.type:
        device = values.device
    reduced = values.to(device, _sum_dtype(device))  # the same device type and dtype on all ranks
    dist.all_reduce(reduced, group=group)
    return reduced.to(values.device, values.dtype), num_ranks


def _device_of_group(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device on which ranks reduce, from the group alone: all must choose the same.

    The accelerator, if it has its own back end ("cpu:gloo,cuda:nccl" or "cuda:nccl") and is
    there, as this waits for nothing; else the CPU.
    """
    backends = dict(e.split(":", 1) for e in dist.get_backend_config(group).split(","))
    for device, backend in backends.items():
        if device != "cpu" and backend != backends.get("cpu"):
            module = getattr(torch, device, None)
            if module is not None and module.is_available():
                return torch.device(device)
    return torch.device("cpu")
