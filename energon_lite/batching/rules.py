"""The user's settings of lists: packs, batches by length, batches by modality.

Axes: N samples, R resources (tokens first), U parts of samples.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np

from energon_lite.core.arguments import at_least, hinting
from energon_lite.core.arrays import BoolArray, Int64Array
from energon_lite.core.errors import FatalSampleError

# What a pack holds most of, and what a plain number means.
TOKENS = "tokens"
# In place of the first token of a part: the part is a whole sample.
WHOLE = -1


class Default(int):
    """A number that the user did not choose."""


Algorithm = Literal[
    "streaming", "best", "first_fit_decreasing", "best_fit_decreasing", "first_fit", "sequential"
]
Overlong = Literal["error", "drop", "truncate", "split", "alone"]
LossMode = Literal["token", "sample", "sqrt"] | Callable[[int], float]
GroupBy = Literal["source", "modality"] | Callable[[Any], Any] | None

# As a limit: more samples than any window has.
_ANY_NUMBER = 1 << 62
# Samples that may be buffered of a group, as a multiple of those that reading ahead brings.
_PILE = 2
# When n samples of a group of share p have come, chance makes others sqrt(n / p) too many or too
# few: room for that up to n = 256 squared.
_CHANCE = 256


class OverlongError(ValueError):
    """A sample is too long for a list, and the rules do not allow that.

    Attributes:
        sample: its index.
    """

    def __init__(self, sample: int, text: str) -> None:
        super().__init__(text)
        self.sample = sample


class Parts(NamedTuple):
    """Samples, and parts of samples that are too long, which are put into lists.

    Attributes:
        samples: shape (U,); index of the sample of each part, ascending.
        starts: shape (U,); first token of a part, or `WHOLE`.
        stops: shape (U,); the token after its last one, or `WHOLE`.
        lengths: shape (U, R); of the parts.
        is_overlong: shape (N,); the samples that are too long for a list.
    """

    samples: Int64Array
    starts: Int64Array
    stops: Int64Array
    lengths: Int64Array
    is_overlong: BoolArray


class LengthRules:
    """The limits of a list, and what becomes of samples that are too long.

    The fields of a subclass are checked by their annotations, see `check_fields`.

    Attributes:
        resources: what is limited, tokens first.
        overlong: what becomes of samples that are too long for any list.
        group_by: what must be equal in a list.
        lengths: name of the length index by which lists are planned.
        shortest: tokens that a sample must have.
    """

    resources: tuple[str, ...] = (TOKENS,)
    overlong: Overlong = "alone"
    group_by: Any = None
    lengths: str | None = None
    shortest: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lengths is not None and callable(self.group_by):
            raise ValueError(
                "group_by is a function of a sample, and lists that are planned by a length index "
                'are chosen before samples are read; use "source" or "modality", or no '
                "`lengths`"
            )

    @property
    def limits(self) -> tuple[int, ...]:
        """The largest length of each resource up to which a sample is sure to fit a list."""
        return (sys.maxsize,)

    @property
    def longest(self) -> int:
        """Tokens up to which a sample is sure to fit, if tokens are all that is limited."""
        return self.limits[0]

    def too_long(self, lengths_NR: Int64Array) -> BoolArray:
        """Returns which samples fit no list; shape (N,)."""
        return np.asarray((lengths_NR > np.array(self.limits)).any(axis=1))

    def excess(self, lengths_R: Sequence[int]) -> str:
        """Describes how a sample of these lengths is too long."""
        sizes, limits = (
            dict(zip(self.resources, values, strict=True)) for values in (lengths_R, self.limits)
        )
        return f"its length is {sizes}, and a pack takes {limits}"

    def parts(self, lengths_NR: Int64Array) -> Parts:
        """Applies the policy for samples that are too long for a list.

        Dropped samples have no part, truncated ones have one, split ones several. Samples that are
        to be alone are whole, and longer than a list.

        Raises:
            OverlongError: The policy is "error", or cannot be applied to a sample.
        """
        is_long, num = self.too_long(lengths_NR), len(lengths_NR)
        starts, counts = np.full(num, WHOLE), np.ones(num, np.int64)
        parts = Parts(np.arange(num), starts, starts, lengths_NR, is_long)
        if self.overlong == "alone" or not is_long.any():
            return parts
        longest = self.limits[0]
        if self.overlong == "drop":
            counts[is_long] = 0
        else:
            self._check_cut(lengths_NR, is_long)
        if self.overlong == "split":
            counts[is_long] = -(-lengths_NR[is_long, 0] // longest)
        samples_U = np.repeat(parts.samples, counts)
        numbers_U = np.arange(len(samples_U)) - np.repeat(np.cumsum(counts) - counts, counts)
        lengths_UR, is_cut = lengths_NR[samples_U], is_long[samples_U]
        starts_U = np.where(is_cut, numbers_U * longest, WHOLE)
        ends_U = np.minimum(starts_U + longest, lengths_UR[:, 0])
        stops_U = np.where(is_cut, ends_U, WHOLE)
        lengths_UR[is_cut, 0] = (stops_U - starts_U)[is_cut]
        return Parts(samples_U, starts_U, stops_U, lengths_UR, is_long)

    def _check_cut(self, lengths_NR: Int64Array, is_long: BoolArray) -> None:
        """Refuses samples that must not be cut, or cannot be."""
        no_tokens = lengths_NR.copy()
        no_tokens[:, 0] = 0
        what = f"{self.overlong} cuts tokens only"
        is_bad, remedy = self.too_long(no_tokens), 'Use overlong="drop" or "alone"'
        if self.overlong == "error":
            what, is_bad = "", is_long
            allowed = get_args(get_type_hints(type(self))["overlong"])
            choices = " or ".join(f'"{choice}"' for choice in allowed if choice != "error")
            setting = f"{type(self).__name__}(overlong={choices})"
            remedy = f"Shorten it in encode_sample, or set {setting}"
        elif self.overlong == "split" and not is_bad.any():
            what = "split cannot divide what is not tokens"
            is_bad = is_long & (lengths_NR[:, 1:] > 0).any(axis=1)
        if is_bad.any():
            sample = int(is_bad.argmax())
            excess = self.excess(lengths_NR[sample].tolist())
            what = f"{excess}. {what}{what and '. '}{remedy}, or raise the limit"
            raise OverlongError(sample, what)

    def kept_tokens(self, length: int | Mapping[str, int]) -> int:
        """Returns how many tokens of a sample come into lists.

        Args:
            length: the result of `sample_length`.
        """
        lengths = length if isinstance(length, Mapping) else {TOKENS: length}
        row = [int(lengths.get(name, 0)) for name in self.resources]
        if self.overlong == "truncate":
            return min(row[0], self.limits[0])
        is_dropped = self.overlong == "drop" and bool(self.too_long(np.array([row]))[0])
        return 0 if is_dropped else row[0]


def check_fields(settings: Any) -> None:
    """Checks the fields of a dataclass against their annotations.

    A `Literal` is one of its values, or what else the annotation names: None, a function. An
    integer, also of numpy, is at least 1, or at least `metadata["least"]`; so are those of a dict.

    Raises:
        TypeError: A value is no integer.
        ValueError: A value is out of range, or not among the choices; names it.
    """
    hints = get_type_hints(type(settings))
    for each in fields(settings):
        name, value, hint = each.name, getattr(settings, each.name), hints[each.name]
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        choices = [c for kind in kinds if get_origin(kind) is Literal for c in get_args(kind)]
        if value is None and type(None) in kinds:
            continue
        if choices:
            is_function = callable(value) and any(get_origin(k) is Callable for k in kinds)
            is_mapping = isinstance(value, Mapping) and any(get_origin(k) is Mapping for k in kinds)
            if not (is_function or is_mapping or value in choices):
                raise ValueError(f"{name}={value!r:.80} is not one of {', '.join(choices)}")
        elif int in kinds:
            least = each.metadata.get("least", 1)
            if isinstance(value, Mapping):
                checked: Any = {key: at_least(name, value[key], least) for key in value}
            else:
                checked = at_least(name, value, least)
            object.__setattr__(settings, name, checked)


@hinting
@dataclass(frozen=True)
class Packing(LengthRules):
    """Settings of how a task encoder's samples are packed.

    Args:
        capacity: tokens a pack can hold; or a dict of what it can hold of each resource that
            `sample_length` returns, with an entry "tokens".
        algorithm: "streaming" opens each pack with the oldest buffered sample and searches for the
            samples that fill it. The others pack a whole buffer at once.
        buffer_size: samples buffered at least; the buffer grows to four packs' worth of samples.
            The default one has an epoch of its stream at most: where it would have more, each epoch
            of endless data is packed alone. With a size of your own, epochs are joined.
        max_samples: samples in one pack at most.
        group_by: what must be equal in a pack: "source", "modality" (whether a sample has `images`,
            `image` or `pixel_values` when it is chosen), or a function of the sample that returns a
            text, number, bool, None or a tuple of these. Each group has its own buffer.
        overlong: what becomes of a sample that is longer than a pack. "error" stops; "drop" drops
            it, counted as skipped; "truncate" cuts its end off; "split" makes several samples of
            it; "alone" puts it into a separate pack, above the capacity. `loader.stats()` counts
            overlong samples.
        align: every sample's tokens are padded to a multiple of this inside the pack, for context
            parallelism or FP8; a number, or one for each resource.
        balance: "quantile_sync" lets ranks process packs of similar cost at the same step, without
            communication: the packs of each stream are sorted by cost, window by window, and come
            in an order of places that is the same in all streams. "global_window", with `lengths`:
            every stream plans for all of them (without groups, for up to 64), and packs of similar
            cost, and of one group, are assigned to the streams of a step. None: no balance.
        balance_window: packs of a stream in a window; with "quantile_sync" they are buffered.
        lengths: name of a stored length index (`energon-lite lengths`). Packs are then planned
            before anything is read: no sample is buffered, and a checkpoint stays small.
        plan_window: with `lengths`, samples of each stream that are packed together; samples that
            fill no pack well wait for the next window. By default as many as 64 packs take (with a
            shared plan, `balance_window`), and at least 4,096, or as many as the data have.
        cost: with `balance`, an `energon_lite.balance.CostModel`; tiles are the second resource.
        drop_last: whether the last pack of a pass, of each stream and group, is dropped, since it
            has what was left over.
        end_of_data: what becomes of the samples buffered at the end of a pass: "pack", or "drop".
        loss: what counts the same in the loss: "token" each token, "sample" each sample, "sqrt"
            between the two (a sample of n tokens counts as the root of n); or a function that
            returns the weight of each token of a sample with n of them.
        layout: how packs become a batch: "padded", a row for each, or "thd", one row of all.
        output: what a batch of packs is: "packed_batch", a `PackedBatch`; or "huggingface", a dict
            of the arguments of a Hugging Face model, as `PackedCollator` makes them.
        pad_to_capacity: whether all batches have the same size: packs times capacity. By default
            for "padded".
        labels_are_shifted: whether `labels[t]` is what position t predicts. Else it is the token at
            t, and the model shifts; the first label of each sample is then ignored, so that no
            sample predicts the next one.
        pad_id: token id of padding.
        ignore_index: label of tokens that have no loss.

    Raises:
        ValueError: A value is out of range; names it.
        TypeError: A capacity is not an integer.
    """

    capacity: int | Mapping[str, int]
    algorithm: Algorithm = "streaming"
    buffer_size: int = Default(256)
    max_samples: int | None = None
    group_by: GroupBy = None
    overlong: Overlong = "error"
    align: int | Mapping[str, int] = 1
    balance: Literal["quantile_sync", "global_window"] | None = None
    balance_window: int = 64
    lengths: str | None = None
    plan_window: int | None = None
    cost: Any = None
    drop_last: bool = False
    end_of_data: Literal["pack", "drop"] = "pack"
    loss: LossMode = "token"
    layout: Literal["padded", "thd"] = "padded"
    output: Literal["packed_batch", "huggingface"] = "packed_batch"
    pad_to_capacity: bool | None = None
    labels_are_shifted: bool = False
    pad_id: int = field(default=0, metadata={"least": -sys.maxsize})
    ignore_index: int = field(default=-100, metadata={"least": -sys.maxsize})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balance is not None and self.cost is None:
            raise ValueError(
                f'balance="{self.balance}" orders packs by their cost; say what it is: '
                "cost=CostModel(token=1, token_squared=...) of energon_lite.balance"
            )
        if self.output == "huggingface" and self.labels_are_shifted:
            raise ValueError(
                'labels_are_shifted=True contradicts output="huggingface": the models shift labels'
            )
        for name in ("balance", "plan_window"):
            value = getattr(self, name)
            if self.lengths is None and value not in (None, "quantile_sync"):
                raise ValueError(
                    f"{name}={value!r} needs a length index; measure with `energon-lite lengths` "
                    'and name it: lengths="..."'
                )
        if isinstance(self.capacity, Mapping) and TOKENS not in self.capacity:
            raise ValueError(f'capacity={dict(self.capacity)} lacks an entry "{TOKENS}"')
        unknown = [name for name in _by_resource(self.align) if name not in self.resources]
        if unknown:
            raise ValueError(f"align names {', '.join(unknown)}, which capacity does not have")
        if 0 in self.limits:
            raise ValueError(
                f"align={self.align} is above capacity={self.capacity}: nothing would fit"
            )

    @property
    def resources(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of what a pack holds, tokens first."""
        return (TOKENS, *(name for name in _by_resource(self.capacity) if name != TOKENS))

    @property
    def capacities(self) -> tuple[int, ...]:
        """Returns what a pack can hold of each resource."""
        return tuple(_by_resource(self.capacity)[name] for name in self.resources)

    @property
    def alignments(self) -> tuple[int, ...]:
        """Returns the numbers to a multiple of which each resource is rounded up."""
        return tuple(_by_resource(self.align).get(name, 1) for name in self.resources)

    @cached_property
    def tokens(self) -> int:
        """Tokens a pack can hold."""
        return self.capacities[0]

    @cached_property
    def token_alignment(self) -> int:
        """Returns the number to a multiple of which the tokens of a sample are rounded up."""
        return self.alignments[0]

    @property
    def limits(self) -> tuple[int, ...]:
        """The largest sample that fits a pack when it is aligned, of each resource."""
        pairs = zip(self.capacities, self.alignments, strict=True)
        return tuple(capacity // align * align for capacity, align in pairs)

    @property
    def pads_to_capacity(self) -> bool:
        """Whether batches have the same size each time."""
        is_padded = self.layout == "padded"
        return is_padded if self.pad_to_capacity is None else self.pad_to_capacity


def _by_resource(value: int | Mapping[str, int]) -> dict[str, int]:
    return dict(value) if isinstance(value, Mapping) else {TOKENS: value}


@hinting
@dataclass(frozen=True)
class Buckets(LengthRules):
    """Settings of batches that a task encoder's samples share by their `sample_length`.

    Each stream reads a window of samples, sorts it by length, and cuts it into batches. Set
    `max_tokens` or `batch_size_fn`; with neither, batches have the pipeline's `batch_size`, which
    otherwise is an additional limit.

    Args:
        max_tokens: tokens of a padded batch at most: its samples times its longest.
        batch_size_fn: returns the number of samples of a batch whose longest has the length that it
            is called with, rounded up to `align`; below 1 if there can be no such sample. It is
            called in worker processes, and must return the same in all.
        window: samples that a stream reads for each window, and buffers. More samples lead to less
            padding: 64 batches in a window leave about 3 %. The default one has an epoch of its
            stream at most, whose last batches may be smaller.
        group_by: what must be equal in a batch: "source", "modality" (whether a sample has
            `images`, `image` or `pixel_values`), or a function of the sample that returns a text,
            number, bool, None or a tuple of these. Samples that make no full batch of their group
            wait for the next window.
        align: the longest sample of a batch is padded to a multiple of this.
        overlong: what becomes of a sample that is too long for any batch: "error" stops; "drop"
            drops it, counted as skipped; "alone" puts it into a separate batch, which is too
            large. `loader.stats()` counts overlong samples.
        longest_first: whether a stream begins with the largest batch of its first window, to find
            out early if memory is enough.

    Raises:
        TypeError: Both limits are set, or a value is of another type.
        ValueError: A value is out of range; names it.
    """

    max_tokens: int | None = None
    batch_size_fn: Callable[[int], int] | None = None
    window: int = Default(2_000)
    group_by: GroupBy = None
    align: int = 1
    overlong: Literal["error", "drop", "alone"] = "error"
    longest_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens is not None and self.batch_size_fn is not None:
            raise TypeError("max_tokens and batch_size_fn both say how large a batch is; give one.")
        if self.batch_size_fn is not None and not callable(self.batch_size_fn):
            raise TypeError(f"batch_size_fn={self.batch_size_fn!r} is no function of a length")
        if self.max_tokens is not None and self.align > self.max_tokens:
            raise ValueError(
                f"align={self.align} is above max_tokens={self.max_tokens}: nothing would fit"
            )

    @property
    def has_budget(self) -> bool:
        """Whether these settings say how large a batch is, without a `batch_size`."""
        return self.max_tokens is not None or self.batch_size_fn is not None

    def list_sizes(self, lengths_N: Int64Array, batch_size: int | None = None) -> Int64Array:
        """Returns how many samples a batch can have whose longest has each length.

        Args:
            lengths_N: shape (N,); tokens of each sample, at least 1.
            batch_size: samples of a batch at most.

        Returns:
            Shape (N,); 0 or less where the sample is too long for any batch.

        Raises:
            TypeError: `batch_size_fn` returns something else than an integer; or nothing limits
                the size of a batch.
        """
        if self.max_tokens is not None:
            sizes_N = self.max_tokens // aligned(lengths_N, self.align)
        elif self.batch_size_fn is not None:
            sizes_N = _sizes_by_function(aligned(lengths_N, self.align), self.batch_size_fn)
        elif batch_size is not None:
            return np.full(len(lengths_N), batch_size, np.int64)
        else:
            raise TypeError("nothing limits the size of a batch: no max_tokens, no batch_size")
        return sizes_N if batch_size is None else np.minimum(sizes_N, batch_size)

    def too_long(self, lengths_NR: Int64Array) -> BoolArray:
        """Returns which samples fit no batch; shape (N,)."""
        if self.batch_size_fn is None:
            return super().too_long(lengths_NR)
        is_long: BoolArray = self.list_sizes(np.maximum(lengths_NR[:, 0], 1)) < 1
        return is_long

    @property
    def limits(self) -> tuple[int, ...]:
        """Tokens up to which a sample is sure to fit; 0 where a function decides."""
        if self.batch_size_fn is not None:
            return (0,)
        if self.max_tokens is None:
            return (sys.maxsize,)
        return (self.max_tokens // self.align * self.align,)

    def excess(self, lengths_R: Sequence[int]) -> str:
        """Describes how a sample of this length is too long."""
        padded = f", padded to a multiple of {self.align}" if self.align > 1 else ""
        limit = f"max_tokens={self.max_tokens}" if self.max_tokens else "what batch_size_fn allows"
        return f"its length of {lengths_R[0]}{padded} is above {limit}"


def aligned(lengths: Int64Array, align: int | Int64Array) -> Int64Array:
    """Rounds lengths up to a multiple of `align`; lengths (N, R) to those of each resource."""
    return -(-lengths // align) * align


def _sizes_by_function(lengths_N: Int64Array, batch_size_fn: Callable[[int], int]) -> Int64Array:
    """Asks a function how many samples a batch can have, once for each length there is.

    Raises:
        TypeError: It returns something else than an integer.
    """
    distinct, places_N = np.unique(lengths_N, return_inverse=True)
    limits = np.empty(len(distinct), np.int64)
    for place, length in enumerate(distinct.tolist()):
        size = batch_size_fn(length)
        try:
            # Below 0 is not even one, too; what is above 2**62 is any number.
            limits[place] = min(max(operator.index(size), 0), _ANY_NUMBER)
        except TypeError:
            raise TypeError(
                f"batch_size_fn({length}) returned {size!r}; it must return an integer: the number "
                "of samples in a batch whose longest has this length."
            ) from None
    return limits[places_N]


@hinting
@dataclass(frozen=True)
class ModalitySplit(LengthRules):
    """Settings of batches of one group, which is the same on all ranks at the same step.

    The group of a step depends on the shares and the seed only. So the shares must be those of the
    data: by default they are the weights of a blend.

    Args:
        group_by: what must be equal in a batch: "modality" (`"images"` if the encoded sample has
            `images`, `image` or `pixel_values`, else `"text"`), "source", a dict of source names
            and the group of each, or a function of the sample that returns a text, number, bool,
            None or a tuple of these.
        shares: the part of the batches that each group has; they need not sum to 1. None takes
            the weights of the blend, where the group follows from the source.
        window: batches of the commonest group that each stream sorts together by length; windows of
            the other groups are smaller by their shares. All are buffered: `window * batch_size`
            samples over the commonest group's share. Larger windows leave less padding.
        end: what becomes of the rest at the end of finite data. "keep" makes smaller batches, and
            batches of other groups than the schedule's where a group has no sample left; "pad" does
            too, but fills batches up with repeated samples of the group. "drop" ends a stream with
            the first step whose group has no full batch, so that ranks never differ; the rest is
            counted as skipped.
        lengths: name of a stored length index (`energon-lite lengths`). Batches are then planned
            before anything is read, by every stream for all of them: samples of all streams are
            sorted together, and assigned to the streams of a step. No shares are needed, no sample
            is buffered or dropped as surplus. `window` is then of steps of each group. "modality"
            is whether the index has more than tokens of a sample; a function of it is not possible.
        longest_first: whether the first window of each group is returned from long to short, to
            find out early if memory is enough.
        max_surplus: what part of a group's samples may be dropped, counted as skipped, since its
            share takes fewer than come: as samples fail, or by chance, shares are never quite those
            of the data. Dropping begins once far more than a window is buffered; more than this
            part stops the stream. It may change between a checkpoint and its resume.

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
    end: Literal["keep", "drop", "pad"] = "keep"
    longest_first: bool = False
    lengths: str | None = None
    max_surplus: float = 0.05
    shortest: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.max_surplus <= 1:
            raise ValueError(f"max_surplus={self.max_surplus!r} must lie in 0..1")
        if isinstance(self.group_by, Mapping) and not self.group_by:
            raise ValueError("group_by={} names no source; give the group of each source")
        if self.shares is not None and self.lengths is not None:
            raise ValueError(
                f"shares={dict(self.shares)!r:.200} with lengths={self.lengths!r}: planned batches "
                "have the shares of the data; leave `shares` out"
            )
        if self.shares is not None:
            check_shares(self.shares)
        elif self.lengths is None and not self.follows_from_source:
            raise ValueError(
                "shares=None takes the shares from the weights of a blend, but group_by="
                f"{self._group_name!r} does not follow from the source. Set the part of each "
                'group in the data, as shares={"images": 0.94, "text": 0.06}'
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

    def surplus_limits(self, shares: Sequence[float], batch_size: int) -> list[int]:
        """Returns how many samples of each group may be buffered before they are a surplus.

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
        """Returns what decides the content, as JSON, but for the shares."""
        group_by: Any = self._group_name
        if isinstance(self.group_by, Mapping):
            group_by = [[name, plain(group)] for name, group in sorted(self.group_by.items())]
        own = {name: getattr(self, name) for name in ("window", "end", "longest_first")}
        return {"group_by": group_by, **own}


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
        if isinstance(share, bool) or not isinstance(share, (int, float, np.number)):
            raise TypeError(
                f"shares[{group!r}]={share!r:.80} must be a number: what changes in the run cannot "
                "be the same on all ranks"
            )
        if not 0 <= share < math.inf:
            raise ValueError(f"shares[{group!r}]={share} must be finite and at least 0")
    if not any(shares.values()):
        raise ValueError(f"shares={dict(shares)!r:.200} has no group with a share above 0")


def number_groups(keys: Iterable[Hashable]) -> Int64Array:
    """Numbers keys from 0 in the order in which they first come; shape (N,).

    Raises:
        TypeError: A key is not hashable.
    """
    # Elements of a tensor are tensors, which hash by identity.
    keys = keys.tolist() if hasattr(keys, "tolist") else keys
    numbers: dict[Hashable, int] = {}
    return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64)


def is_group(value: Any) -> bool:
    """Returns whether a value can name a group: a text, number, bool, None or a tuple of these."""
    parts = value if isinstance(value, tuple) else (value,)
    return all(part is None or isinstance(part, (str, int, bool)) for part in parts)


def group_from(value: Any, sample: Any, where: str) -> Hashable:
    """Returns the group that a function returned for a sample; numpy's scalars become Python's.

    Raises:
        FatalSampleError: Values of its type do not group samples: a list is not hashable, and a
            tensor or NaN does not equal another one of the same value.
    """
    if isinstance(value, tuple):
        return tuple(group_from(part, sample, where) for part in value)
    group = value.item() if isinstance(value, np.generic) else value
    is_finite = not isinstance(group, float) or math.isfinite(group)
    if group is not None and not (isinstance(group, (str, bytes, int, float, Enum)) and is_finite):
        raise FatalSampleError.from_sample(
            sample,
            f"{where} returned {value!r:.60} ({type(value).__name__}) as a group; return a text, "
            "number, bool, None or a tuple of these: x.item() of a tensor, tuple(x) of a list",
        )
    return group


def plain(group: Any) -> Any:
    """Returns a group as plain JSON."""
    return list(group) if isinstance(group, tuple) else group
