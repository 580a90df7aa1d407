"""Batches of one group, such as a modality: the settings, and which group comes when."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from energon_lite.core.seeds import key_of
from energon_lite.core.topology import Stream
from energon_lite.order.blending import BlendOrder
from energon_lite.order.schedules import Weights

EndOfGroup = Literal["keep", "drop", "pad"]

_ENDS = ("keep", "drop", "pad")
# Cycles that are worked out together.
_BLOCK = 256
# Samples that may be held of a group, by those that reading ahead for all groups makes of it.
_PILE = 2
# When n samples of a group of share p have come, chance makes others sqrt(n / p) too many or too
# few: room for that up to n = 256 squared.
_CHANCE = 256


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


class GroupSchedule:
    """Which group each cycle of a run has: the same for all streams, so for all ranks.

    Every stretch from the start is within 5 of each group's share.

    Args:
        shares: of the groups, not all 0.
        seed: of the run.
        pass_index: number of the pass over finite data.

    Example:
        >>> schedule = GroupSchedule([3, 1], seed=0)
        >>> sum(schedule.group(cycle) for cycle in range(400))
        101
    """

    def __init__(self, shares: Sequence[float], seed: int, pass_index: int = 0) -> None:
        # All streams are one here: that is the point of it.
        self._order = BlendOrder(
            Weights([float(share) for share in shares]),
            "exact",
            key_of("group_schedule", seed),
            Stream(0, 1, pass_index),
        )
        self._first = 0
        self._groups: list[int] = []

    def group(self, cycle: int) -> int:
        """Returns the number of the group that a cycle has."""
        if not self._first <= cycle < self._first + len(self._groups):
            self._first = cycle // _BLOCK * _BLOCK
            self._groups = self._order.block(self._first, _BLOCK).tolist()
        return self._groups[cycle - self._first]
