"""How long a sample is in a pack, and what becomes of one that is too long for any."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from energon_lite.batching.rules import TOKENS, WHOLE, LengthRules, OverlongError
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.keys import leaves, name_of_key
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import SkipRecord, current_context
from energon_lite.core.user_function import SKIPPED, describe_input

# A restore key, and lengths of each resource.
Piece = tuple[RestoreKey, tuple[int, ...]]


class Measure:
    """Turns results of `sample_length` into lengths under rules.

    Args:
        rules: name resources and their limits, and say what becomes of samples above them.
        stage: which counts the samples that it drops.
    """

    def __init__(self, rules: LengthRules, stage: str = "pack") -> None:
        self._rules = rules
        self._stage = stage
        # Of samples with one resource, those that need no second look; none if there are several.
        self.longest = rules.limits[0] if len(rules.resources) == 1 else 0

    def pieces(self, key: RestoreKey, sample: Any, length: Any) -> Iterator[Piece]:
        """Yields the parts of a sample that are to be put into lists; none if it is dropped.

        Raises:
            FatalSampleError: It has no length, or one that the rules do not allow.
        """
        rules, lengths = self._rules, self._lengths(key, sample, length)
        if all(map(operator.le, lengths, rules.limits)):
            yield key, lengths
            return
        try:
            parts = rules.parts(np.array([lengths]))
        except OverlongError as error:
            raise FatalSampleError.from_sample_key(name_of(key, sample), str(error)) from None
        if parts.is_overlong[0] and not len(parts.samples):
            left_out(key, sample, f"too long: {rules.excess(lengths)}", self._stage)
        elif parts.is_overlong[0]:
            current_context().cost(next(leaves(key))[0]).overlong += 1
        columns = (parts.starts.tolist(), parts.stops.tolist(), parts.lengths.tolist())
        for start, stop, own in zip(*columns, strict=True):
            yield key if start == WHOLE else ("piece", start, stop, key), tuple(own)

    def _lengths(self, key: RestoreKey, sample: Any, length: Any) -> tuple[int, ...]:
        by_name = length if isinstance(length, dict) else {TOKENS: length}
        what = ""
        try:
            found = tuple(operator.index(by_name[name]) for name in self._rules.resources)
            if found[0] < self._rules.shortest or min(found) < 0:
                what = f"a sample in a list has at least {self._rules.shortest} tokens, and 0 of "
                what += "other resources. Raise SkipSample in encode_sample for empty samples"
        except KeyError as error:
            what = f"it lacks {error}; return an entry for each resource of the limits"
        except TypeError:
            what = "return the sample's tokens as an integer, or a dict of integers"
        if what:
            raise FatalSampleError.from_sample_key(
                name_of(key, sample), f"sample_length returned {length!r:.80}; {what}"
            )
        return found


def name_of(key: RestoreKey, sample: Any) -> str:
    """Names a sample, also one that was not re-created yet (`SKIPPED`)."""
    return (sample is not SKIPPED and describe_input(sample)[0]) or name_of_key(key)


def left_out(key: RestoreKey, sample: Any, why: str, stage: str = "pack") -> None:
    """Counts a sample that a stage skipped on purpose."""
    source = str(next(leaves(key))[0])
    record = SkipRecord(key, name_of(key, sample), source, stage, why, True, 1)
    current_context().count_skip(record)
