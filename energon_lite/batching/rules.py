"""How samples share lists, as the user asks for it: packs, batches by length, by modality."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from energon_lite.batching.length_windows import aligned, limits_of_budget, limits_of_function
from energon_lite.core.arrays import Int64Array

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


EndOfGroup = Literal["keep", "drop", "pad"]

_ENDS = ("keep", "drop", "pad")
# Samples that may be held of a group, by those that reading ahead for all groups makes of it.
_PILE = 2
# When n samples of a group of share p have come, chance makes others sqrt(n / p) too many or too
# few: room for that up to n = 256 squared.
_CHANCE = 256
_BUCKETS_DO = ("error", "drop", "alone")
_GROUPS = ("source", "modality")


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


@dataclass(frozen=True)
class Buckets:
    """How a task encoder's samples share batches, by their `sample_length`.

    Each stream reads a window of samples, sorts it by length, and cuts it into batches. Give
    `max_tokens` or `batch_size_fn`; with neither, batches have the pipeline's `batch_size`, which
    is a limit besides where it is given.

    Args:
        max_tokens: tokens of a padded batch at most: its samples times its longest.
        batch_size_fn: gives the number of samples of a batch whose longest has the length that it
            is called with, rounded up to `align`; below 1 if there can be no such sample. It is
            called in worker processes, and must give the same in all.
        window: samples that a stream reads for each window, and holds. More give less padding:
            64 batches in a window leave about 3 %.
        group_by: what must be equal in a batch: "source", "modality" (whether a sample has
            `images`, `image` or `pixel_values`), or a function of the sample that gives a text,
            number, bool, None or tuple of these. Samples that make no full batch of their group
            wait for the next window.
        align: the longest sample of a batch is padded to a multiple of this.
        overlong: what becomes of a sample that is too long for any batch: "error" stops; "drop"
            leaves it out, counted as skipped; "alone" gives it a batch of its own, which is too
            large. `loader.stats()` counts them.
        longest_first: whether a stream begins with the largest batch of its first window, to find
            out early if memory is enough.

    Raises:
        TypeError: Both limits are given, or a value is of another type.
        ValueError: A value is out of range; names it.
    """

    max_tokens: int | None = None
    batch_size_fn: Callable[[int], int] | None = None
    window: int = 2_000
    group_by: Literal["source", "modality"] | Callable[[Any], Any] | None = None
    align: int = 1
    overlong: Literal["error", "drop", "alone"] = "error"
    longest_first: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.batch_size_fn is not None:
            raise TypeError("max_tokens and batch_size_fn both say how large a batch is; give one.")
        if self.batch_size_fn is not None and not callable(self.batch_size_fn):
            raise TypeError(f"batch_size_fn={self.batch_size_fn!r} is no function of a length")
        for name in ("max_tokens", "window", "align"):
            value = getattr(self, name)
            if value is None and name == "max_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} must be an integer")
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.overlong not in _BUCKETS_DO:
            raise ValueError(f"overlong={self.overlong!r} is not one of {', '.join(_BUCKETS_DO)}")
        group_by = self.group_by
        if not (group_by is None or callable(group_by) or group_by in _GROUPS):
            raise ValueError(
                f"group_by={group_by!r} is not one of {', '.join(_GROUPS)}, nor a function"
            )
        if self.max_tokens is not None and self.align > self.max_tokens:
            raise ValueError(
                f"align={self.align} is above max_tokens={self.max_tokens}: nothing would fit"
            )

    @property
    def has_budget(self) -> bool:
        """Whether these settings say how large a batch is, without a `batch_size`."""
        return self.max_tokens is not None or self.batch_size_fn is not None

    def limits(self, lengths_N: Int64Array, batch_size: int | None = None) -> Int64Array:
        """Returns how many samples a batch can have whose longest has each length.

        Args:
            lengths_N: shape (N,); tokens of each sample, at least 1.
            batch_size: samples of a batch at most.

        Returns:
            Shape (N,); 0 or less where the sample is too long for any batch.

        Raises:
            TypeError: `batch_size_fn` gives something else than an integer; or nothing says how
                large a batch is.
        """
        if self.max_tokens is not None:
            limits_N = limits_of_budget(aligned(lengths_N, self.align), self.max_tokens)
        elif self.batch_size_fn is not None:
            limits_N = limits_of_function(aligned(lengths_N, self.align), self.batch_size_fn)
        elif batch_size is not None:
            return np.full(len(lengths_N), batch_size, np.int64)
        else:
            raise TypeError("nothing says how large a batch is: no max_tokens, no batch_size")
        return limits_N if batch_size is None else np.minimum(limits_N, batch_size)

    def is_overlong(self, length: int) -> bool:
        """Whether a sample is too long for any batch."""
        if self.batch_size_fn is not None:
            return int(self.limits(np.array([length]))[0]) < 1
        return self.max_tokens is not None and -(-length // self.align) * self.align > (
            self.max_tokens
        )

    @property
    def longest(self) -> int:
        """Tokens up to which a sample is sure to fit; 0 where a function says so."""
        if self.batch_size_fn is not None:
            return 0
        if self.max_tokens is None:
            return sys.maxsize
        return self.max_tokens // self.align * self.align

    def kept_tokens(self, length: int | Mapping[str, int]) -> int:
        """Returns how many tokens of a sample come into batches.

        Args:
            length: what `sample_length` told.
        """
        tokens = int(length["tokens"] if isinstance(length, Mapping) else length)
        return 0 if self.overlong == "drop" and self.is_overlong(tokens) else tokens


@dataclass(frozen=True)
class ModalitySplit:
    """How samples become batches of one group, the same group on all ranks at the same step.

    Which group a step has depends on the shares and the seed only. So the shares must be those of
    the data: of a blend's weights they are taken as they are; else they are to be given.

    Args:
        group_by: what must be equal in a batch: "modality" (`"images"` if the encoded sample has
            `images`, `image` or `pixel_values`, else `"text"`), "source", a dict of source names
            and the group of each, or a function of the sample that gives a text, number, bool,
            None or tuple of these.
        shares: the part of the batches that each group has; they need not sum to 1. None takes
            the weights of the blend, where the group follows from the source.
        window: batches of the commonest group that each stream sorts together by length; of the
            others as many as its share has of that. They are held: `window * batch_size` samples
            over the commonest group's share, of all groups together. More leave less padding.
        end: what becomes of the rest at the end of finite data. "keep" gives smaller batches, and
            other groups than the schedule's where that one has no sample left; "pad" does too, but
            fills batches up with samples of the group that were given before. "drop" ends a stream
            with the first step whose group has no full batch, so that ranks never differ; the
            rest is counted as skipped.
        lengths: name of a stored length index (`energon-lite lengths`). Batches are then planned
            before anything is read, by every stream for all of them: samples of all streams are
            sorted together, and dealt to the streams of a step. No shares are needed, no sample is
            held or left out as surplus. `window` is then of steps of each group. "modality" is
            whether the index has more than tokens of a sample; a function of it is not possible.
        longest_first: whether the first window of each group is given from long to short, to find
            out early if memory is enough.
        max_surplus: what part of a group's samples may be left out, counted as skipped, since its
            share takes fewer than come: as samples fail, or by chance, shares are never quite those
            of the data. It begins once far more than a window is held; more than this part stops
            the stream. It may change between a checkpoint and its resume.

    Raises:
        ValueError: A value is out of range, or shares are missing; names it.
        TypeError: `group_by`, `shares` or `window` is of another type.

    Example:
        >>> split = ModalitySplit("modality", shares={"images": 15, "text": 1})
        >>> split.windows([15, 1])
        [64, 4]
    """

    group_by: Literal["modality", "source"] | Mapping[str, Any] | Callable[[Any], Any] = "modality"
    shares: Mapping[Any, float] | None = None
    window: int = 64
    end: EndOfGroup = "keep"
    longest_first: bool = False
    lengths: str | None = None
    max_surplus: float = 0.05

    def __post_init__(self) -> None:
        if self.end not in _ENDS:
            raise ValueError(f"end={self.end!r} is not one of {', '.join(_ENDS)}")
        if not 0 <= self.max_surplus <= 1:
            raise ValueError(f"max_surplus={self.max_surplus!r} must lie in 0..1")
        if isinstance(self.window, bool) or not isinstance(self.window, int):
            raise TypeError(f"window={self.window!r} must be an integer")
        if self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1")
        if not (
            self.group_by in ("modality", "source")
            if isinstance(self.group_by, str)
            else callable(self.group_by) or isinstance(self.group_by, Mapping)
        ):
            raise ValueError(
                f"group_by={self.group_by!r:.80} is not one of modality, source, a dict of source "
                "names and groups, or a function of the sample"
            )
        if isinstance(self.group_by, Mapping) and not self.group_by:
            raise ValueError("group_by={} names no source; give the group of each source")
        if self.lengths is not None:
            self._check_planned()
        elif self.shares is None:
            if not self.follows_from_source:
                raise ValueError(
                    "shares=None takes the shares from the weights of a blend, but group_by="
                    f"{self._group_name!r} does not follow from the source. Give the part of each "
                    'group in the data, as shares={"images": 0.94, "text": 0.06}'
                )
        else:
            check_shares(self.shares)

    def _check_planned(self) -> None:
        """Checks what does not go with a length index."""
        if self.shares is not None:
            raise ValueError(
                f"shares={dict(self.shares)!r:.200} with lengths={self.lengths!r}: planned batches "
                "have the shares of the data; leave `shares` out"
            )
        if callable(self.group_by):
            raise ValueError(
                "group_by is a function of a sample, and batches that are planned by a length "
                'index are chosen before samples are read; use "modality", "source" or a dict, or '
                "leave out `lengths`"
            )

    @property
    def follows_from_source(self) -> bool:
        """Whether the group of a sample is known from its source."""
        return self.group_by == "source" or isinstance(self.group_by, Mapping)

    @property
    def _group_name(self) -> str:
        return self.group_by if isinstance(self.group_by, str) else "function"

    def windows(self, shares: Sequence[float]) -> list[int]:
        """Returns the batches of a window of each group; at least 1.

        So the samples read ahead for one group are those that are needed for all others.
        """
        return [max(1, round(self.window * share / max(shares))) for share in shares]

    def limits(self, shares: Sequence[float], batch_size: int) -> list[int]:
        """Returns the samples of each group that may wait before they are too many.

        To fill a group's window, its share of samples of all others is read, too.
        """
        rarest = min(share for share in shares if share > 0)
        ahead = max(
            window / share
            for window, share in zip(self.windows(shares), shares, strict=True)
            if share > 0
        )
        chance = math.ceil(_CHANCE * math.sqrt(sum(shares) / rarest))
        return [_PILE * batch_size * (1 + math.ceil(ahead * share)) + chance for share in shares]

    def config(self) -> dict[str, Any]:
        """Returns what decides the content, as plain JSON, but for the shares."""
        group_by: Any = self._group_name
        if isinstance(self.group_by, Mapping):
            group_by = [[name, plain(group)] for name, group in sorted(self.group_by.items())]
        return {
            "group_by": group_by,
            "window": self.window,
            "end": self.end,
            "longest_first": self.longest_first,
        }


def check_shares(shares: Mapping[Any, float]) -> None:
    """Refuses what are no shares of groups.

    Raises:
        TypeError: It is no dict, or a share is no number, or a group none.
        ValueError: A share is negative or not finite, or none is above 0.
    """
    if not isinstance(shares, Mapping):
        raise TypeError(f"shares={shares!r:.80} must be a dict of groups and their shares")
    for group, share in shares.items():
        if not is_group(group):
            raise TypeError(
                f"shares has a group {group!r:.80}; it must be a text, number, bool, None or a "
                "tuple of these"
            )
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(
                f"shares[{group!r}]={share!r:.80} must be a number: what changes in the run cannot "
                "be the same on all ranks"
            )
        if not 0 <= share < math.inf:
            raise ValueError(f"shares[{group!r}]={share} must be finite and at least 0")
    if not any(shares.values()):
        raise ValueError(f"shares={dict(shares)!r:.200} has no group with a share above 0")


def is_group(value: Any) -> bool:
    """Returns whether a value can name a group: a text, number, bool, None or a tuple of these."""
    parts = value if isinstance(value, tuple) else (value,)
    return all(part is None or isinstance(part, (str, int, bool)) for part in parts)


def plain(group: Any) -> Any:
    """Returns a group as plain JSON."""
    return list(group) if isinstance(group, tuple) else group
