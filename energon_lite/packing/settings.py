"""How samples share packs, as the user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# What a pack holds most of, and what a plain number means.
TOKENS = "tokens"

Algorithm = Literal[
    "streaming", "best", "first_fit_decreasing", "best_fit_decreasing", "first_fit", "sequential"
]
Overlong = Literal["error", "drop", "truncate", "split", "alone"]
EndOfData = Literal["pack", "drop"]
LossMode = Literal["token", "sample", "sqrt"] | Callable[[int], float]

_CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm": (
        "streaming",
        "best",
        "first_fit_decreasing",
        "best_fit_decreasing",
        "first_fit",
        "sequential",
    ),
    "overlong": ("error", "drop", "truncate", "split", "alone"),
    "end_of_data": ("pack", "drop"),
    "layout": ("padded", "thd"),
    "loss": ("token", "sample", "sqrt"),
    "group_by": ("source", "modality"),
    "balance": ("quantile_sync", "global_window"),
}


@dataclass(frozen=True)
class Packing:
    """How a task encoder's samples are packed.

    Args:
        capacity: tokens a pack can hold; or a dict of what it can hold of each resource that
            `sample_length` tells, with an entry "tokens".
        algorithm: "streaming" opens each pack with the oldest sample held and searches for those
            that fill it. The others pack all that is held, then all that is held anew.
        buffer_size: samples held at least; it grows to four packs' worth of samples.
        max_samples: samples in one pack at most.
        group_by: what must be equal in a pack: "source", "modality" (whether a sample has `images`,
            `image` or `pixel_values` when it is chosen), or a function of the sample that gives a
            text, number, bool, None or tuple of these. Each group has a buffer of its own.
        overlong: what becomes of a sample longer than a pack. "error" stops; "drop" leaves it out,
            counted as skipped; "truncate" cuts its end off; "split" makes several samples of it;
            "alone" gives it a pack of its own, above the capacity. `loader.stats()` counts them.
        align: every sample's tokens are padded to a multiple of this inside the pack, for context
            parallelism or FP8; a number, or one for each resource.
        balance: "quantile_sync" gives ranks packs of like cost at the same step, without their
            talking: the packs of each stream are sorted by cost, window by window, and come in an
            order of places that is the same in all streams. "global_window", with `lengths`: every
            stream plans for all of them, and packs of like cost, and of one group, are dealt to the
            streams of a step. None for not.
        balance_window: packs of a stream in a window; with "quantile_sync" they are held.
        lengths: name of a stored length index (`energon-lite lengths`). Packs are then planned
            before anything is read: no sample is held, and a checkpoint stays small.
        plan_window: with `lengths`, samples of each stream that are packed together; what fills no
            pack well waits for the next window. By default as many as 64 packs take (with a shared
            plan, `balance_window`), and at least 4,096.
        cost: with `balance`, an `energon_lite.balance.CostModel`; tiles are the second resource.
        drop_last: whether the last pack of a pass, of each stream and group, is left out, since it
            has what was left over.
        end_of_data: what becomes of the samples held at the end of a pass: "pack", or "drop".
        loss: what counts the same in the loss: "token" each token, "sample" each sample, "sqrt"
            between the two (a sample of n tokens counts as the root of n); or a function that gives
            the weight of each token of a sample with n of them.
        layout: how packs become a batch: "padded", a row for each, or "thd", one row of all.
        pad_to_capacity: whether batches have the same size each time: packs times capacity. By
            default for "padded".
        labels_are_shifted: whether `labels[t]` is what position t predicts. Else it is the token at
            t, and the model shifts; the first label of each sample is then left out, so that no
            sample predicts the next one.
        pad_id: token id of padding.
        ignore_index: label of tokens that have no loss.

    Raises:
        ValueError: A value is out of range; names it.
        TypeError: A capacity is not an integer.
    """

    capacity: int | Mapping[str, int]
    algorithm: Algorithm = "streaming"
    buffer_size: int = 256
    max_samples: int | None = None
    group_by: Literal["source", "modality"] | Callable[[Any], Any] | None = None
    overlong: Overlong = "error"
    align: int | Mapping[str, int] = 1
    balance: Literal["quantile_sync", "global_window"] | None = None
    balance_window: int = 64
    lengths: str | None = None
    plan_window: int | None = None
    cost: Any = None
    drop_last: bool = False
    end_of_data: EndOfData = "pack"
    loss: LossMode = "token"
    layout: Literal["padded", "thd"] = "padded"
    pad_to_capacity: bool | None = None
    labels_are_shifted: bool = False
    pad_id: int = 0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            is_free = (name in ("group_by", "loss") and callable(value)) or (
                name in ("group_by", "balance") and value is None
            )
            if not is_free and value not in allowed:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
        if self.buffer_size < 1:
            raise ValueError(f"buffer_size={self.buffer_size} must be at least 1")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples={self.max_samples} must be at least 1, or None")
        if self.balance is not None and self.cost is None:
            raise ValueError(
                f'balance="{self.balance}" orders packs by their cost; say what it is: '
                "cost=CostModel(token=1, token_squared=...) of energon_lite.balance"
            )
        if self.balance_window < 1:
            raise ValueError(f"balance_window={self.balance_window} must be at least 1")
        self._check_plan()
        if isinstance(self.capacity, Mapping) and TOKENS not in self.capacity:
            raise ValueError(f'capacity={dict(self.capacity)} lacks an entry "{TOKENS}"')
        for name in ("capacity", "align"):
            value = getattr(self, name)
            for each in value.values() if isinstance(value, Mapping) else [value]:
                if isinstance(each, bool) or not isinstance(each, int):
                    raise TypeError(f"{name}={value!r} must be an integer, or a dict of integers")
                if each < 1:
                    raise ValueError(f"{name}={value!r} must be at least 1")
        unknown = [name for name in self._given("align") if name not in self.resources]
        if unknown:
            raise ValueError(f"align names {', '.join(unknown)}, which capacity does not have")
        if self.algorithm == "best_fit_decreasing" and len(self.resources) > 1:
            raise ValueError(
                'algorithm="best_fit_decreasing" packs one resource; use "first_fit_decreasing", '
                f'"best" or "streaming" for {", ".join(self.resources)}'
            )
        if 0 in self.limits:
            raise ValueError(
                f"align={self.align} is above capacity={self.capacity}: nothing would fit"
            )

    def _check_plan(self) -> None:
        """Checks what goes with a length index only."""
        if self.lengths is None:
            for name in ("balance", "plan_window"):
                value = getattr(self, name)
                if value not in (None, "quantile_sync"):
                    raise ValueError(
                        f"{name}={value!r} needs a length index; measure with `energon-lite "
                        'lengths` and name it: lengths="..."'
                    )
        elif callable(self.group_by):
            raise ValueError(
                "group_by is a function of a sample, and packs that are planned by a length index "
                'are chosen before samples are read; use "source" or "modality", or leave out '
                "`lengths`"
            )
        if self.plan_window is not None and self.plan_window < 1:
            raise ValueError(f"plan_window={self.plan_window} must be at least 1, or None")

    def _given(self, name: str) -> dict[str, int]:
        value = getattr(self, name)
        return dict(value) if isinstance(value, Mapping) else {TOKENS: value}

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of what a pack holds, tokens first."""
        return (TOKENS, *(name for name in self._given("capacity") if name != TOKENS))

    @property
    def capacities(self) -> tuple[int, ...]:
        """What a pack can hold of each resource."""
        capacity = self._given("capacity")
        return tuple(capacity[name] for name in self.resources)

    @property
    def alignments(self) -> tuple[int, ...]:
        """What each resource is rounded up to a multiple of."""
        align = self._given("align")
        return tuple(align.get(name, 1) for name in self.resources)

    @property
    def tokens(self) -> int:
        """Tokens a pack can hold."""
        return self.capacities[0]

    @property
    def token_alignment(self) -> int:
        """What the tokens of a sample are rounded up to a multiple of."""
        return self.alignments[0]

    @property
    def limits(self) -> tuple[int, ...]:
        """The largest sample that fits a pack when it is aligned, of each resource."""
        pairs = zip(self.capacities, self.alignments, strict=True)
        return tuple(capacity // align * align for capacity, align in pairs)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that fits a pack."""
        return self.limits[0]

    def kept_tokens(self, length: int | Mapping[str, int]) -> int:
        """Returns how many tokens of a sample come into packs.

        Args:
            length: what `sample_length` told.
        """
        lengths = length if isinstance(length, Mapping) else {TOKENS: length}
        tokens = int(lengths[TOKENS])
        if self.overlong == "truncate":
            return min(tokens, self.longest)
        if self.overlong == "drop":
            pairs = zip(self.resources, self.limits, strict=True)
            if any(lengths.get(name, 0) > limit for name, limit in pairs):
                return 0
        return tokens

    @property
    def pads_to_capacity(self) -> bool:
        """Whether batches have the same size each time."""
        is_padded = self.layout == "padded"
        return is_padded if self.pad_to_capacity is None else self.pad_to_capacity
