"""How long a sample is in a pack, and what becomes of one that is too long for any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from energon_lite.batching.rules import TOKENS, Packing
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.keys import leaves, name_of_key
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import SkipRecord, current_context
from energon_lite.core.user_function import SKIPPED, describe_input

# A restore key, and lengths of each resource.
Piece = tuple[RestoreKey, tuple[int, ...]]


class Measure:
    """Turns what `sample_length` told into lengths that a packer takes.

    Args:
        packing: names resources and their limits, and says what becomes of what is above them.
    """

    def __init__(self, packing: Packing) -> None:
        self._policy = packing.overlong
        self._resources = packing.resources
        self._limits = packing.limits
        # Of samples with one resource, those that need no second look; none if there are several.
        self.longest = packing.limits[0] if len(packing.resources) == 1 else 0

    def pieces(self, key: RestoreKey, sample: Any, length: Any) -> Iterator[Piece]:
        """Yields the parts of a sample that are to be packed; none if it is dropped.

        Raises:
            FatalSampleError: It has no length that can be packed.
        """
        lengths = self._lengths(key, sample, length)
        if not self.is_overlong(lengths):
            yield key, lengths
        elif self._policy == "drop":
            why = f"too long for a pack: {self._why(lengths)}"
            left_out(key, sample, why)
        else:
            self._check(key, sample, lengths)
            current_context().cost(next(leaves(key))[0]).overlong += 1
            longest = self._limits[0]
            if self._policy == "alone":
                yield key, lengths
                return
            stop = longest if self._policy == "truncate" else lengths[0]
            for start in range(0, stop, longest):
                step = min(longest, stop - start)
                yield ("piece", start, start + step, key), (step, *lengths[1:])

    def is_overlong(self, lengths: tuple[int, ...]) -> bool:
        """Whether a sample fits no pack."""
        return any(n > limit for n, limit in zip(lengths, self._limits, strict=True))

    def _lengths(self, key: RestoreKey, sample: Any, length: Any) -> tuple[int, ...]:
        given = length if isinstance(length, dict) else {TOKENS: length}
        try:
            found = tuple(int(given[name]) for name in self._resources)
        except KeyError as error:
            raise FatalSampleError.from_sample_key(
                name_of(key, sample),
                f"sample_length gave {length!r:.80} without {error}, which the packing's capacity "
                "has; return an entry for each resource",
            ) from None
        if found[0] < 1 or min(found) < 0:
            raise FatalSampleError.from_sample_key(
                name_of(key, sample),
                f"sample_length gave {length!r:.80}; a sample in a pack has at least 1 token and "
                "0 of the rest. Raise SkipSample in encode_sample for empty samples",
            )
        return found

    def _why(self, lengths: tuple[int, ...]) -> str:
        sizes = dict(zip(self._resources, lengths, strict=True))
        limits = dict(zip(self._resources, self._limits, strict=True))
        return f"its length is {sizes}, and a pack takes {limits}"

    def _check(self, key: RestoreKey, sample: Any, lengths: tuple[int, ...]) -> None:
        """Refuses what the policy cannot mend."""
        what = ""
        if self._policy == "error":
            what = (
                "Shorten it in encode_sample, raise the capacity, or set Packing(overlong="
                '"drop", "truncate" or "split" (tokens only), or "alone")'
            )
        elif self._policy in ("truncate", "split"):
            if self.is_overlong((0, *lengths[1:])):
                what = f"{self._policy} cuts tokens only"
            elif self._policy == "split" and any(lengths[1:]):
                what = "split cannot divide what is not tokens"
            what += what and '. Use overlong="drop" or "alone", or raise the capacity'
        if what:
            raise FatalSampleError.from_sample_key(
                name_of(key, sample), f"{self._why(lengths)}. {what}"
            )


def name_of(key: RestoreKey, sample: Any) -> str:
    """Names a sample, also one that was not made again yet (`SKIPPED`)."""
    return (sample is not SKIPPED and describe_input(sample)[0]) or name_of_key(key)


def left_out(key: RestoreKey, sample: Any, why: str, stage: str = "pack") -> None:
    """Counts a sample that a stage left out on purpose."""
    source = str(next(leaves(key))[0])
    record = SkipRecord(key, name_of(key, sample), source, stage, why, True, 1)
    current_context().count_skip(record)
