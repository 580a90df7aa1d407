"""Lengths of encoded samples: measured, checked by rules, and lists of samples by length."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from energon_lite.batching.rules import (
    TOKENS,
    WHOLE,
    Buckets,
    LengthRules,
    OverlongError,
    Packing,
    group_from,
)
from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.keys import first_leaf
from energon_lite.core.sample_columns import Columns, samples_of
from energon_lite.core.samples import images_of
from energon_lite.core.stage import PerItemStage, StageCursor
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.core.stream_context import current_context, replaying
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import SKIPPED, FunctionRun, UserFunction, unskipped
from energon_lite.stages.collect import CollectDataset, Found, Unit, UnitsOf, count_dropped, name_of
from energon_lite.stages.map import WrappedFunction, takes_turns

T = TypeVar("T")


class MeasureDataset(PerItemStage[T]):
    """Counts the tokens of each sample; the samples stay as they are.

    State: none.
    Length: as below.
    Keys: as below.

    Args:
        dataset: the encoded samples.
        length_fn: returns a sample's tokens, or a dict of lengths with an entry "tokens".
        rules: by which samples that are too long for a list are dropped or cut; tokens that come
            into no list are not counted.
        worker_config: has the seed of lists above; by default that of the dataset.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        length_fn: UserFunction,
        rules: Packing | Buckets | None = None,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        super().__init__(dataset, worker_config)
        self.function = length_fn
        self.rules = rules

    def cursor(self, stream: Stream) -> MeasureCursor[T]:
        """Returns a fresh cursor."""
        below = dataclasses.replace(stream, is_measured=True)
        return MeasureCursor(self, self.dataset.cursor(below))

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Re-creates a sample, and measures it again."""
        sample = super().restore_sample(restore_key)
        with replaying() as context:
            length = self.function.call(restore_key, sample)
            context.lengths[restore_key] = self.counted(length)
        return sample

    def counted(self, length: Any) -> int:
        """Returns the tokens of a sample that come into a list.

        Raises:
            FatalSampleError: The length is not a number of tokens.
        """
        tokens: Any = length.get(TOKENS) if isinstance(length, dict) else length
        if isinstance(tokens, bool) or not hasattr(tokens, "__index__") or int(tokens) < 0:
            raise FatalSampleError(
                f"{self.function.where} returned {length!r:.80}; return the sample's tokens "
                'as an integer of at least 0, or a dict of resources with an entry "tokens"'
            )
        return int(tokens) if self.rules is None else int(self.rules.kept_tokens(length))


class MeasureCursor(StageCursor[T]):
    """A place among measured samples.

    Attributes:
        lengths: what `length_fn` returned for the samples that `take` returned last.
        length: the same for the sample that `next` returned last, or that is looked at.
    """

    key: RestoreKey = ()
    length: Any
    lengths: list[Any]

    def __init__(self, spec: MeasureDataset[T], inner: Cursor[T]) -> None:
        super().__init__(spec, inner)
        # All tokens of samples up to here count.
        self._longest = sys.maxsize if spec.rules is None else spec.rules.longest
        self._run = FunctionRun(spec.function)
        self._takes_turns = takes_turns(spec.function, spec.dataset)

    __next__ = Cursor.__next__

    def take(self, n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
        """Returns some of the next `n` samples, measured, and their restore keys."""
        found, keys = self.inner.take(1 if self._takes_turns else n)
        samples: list[T] = samples_of(found)
        lengths, samples, keys = unskipped(self._run.call_each(keys, samples), samples, keys)
        if keys:
            self.key, self.length = keys[-1], lengths[-1]
            is_plain = {*map(type, lengths)} == {int} and max(lengths) <= self._longest
            are_counts = is_plain and min(lengths) >= 0
            counts = lengths if are_counts else [*map(self.spec.counted, lengths)]
            context = current_context()
            context.lengths.update(zip(keys, counts, strict=True))
            totals = context.tokens
            for key, tokens in zip(keys, counts, strict=True):
                totals[key[0] if type(key[-1]) is int else first_leaf(key)[0]] += tokens
        self.lengths = lengths
        return samples, keys


def pieces_of(
    rules: LengthRules, stage: str, key: RestoreKey, sample: Any, length: Any
) -> list[tuple[RestoreKey, tuple[int, ...]]]:
    """Returns the parts of a sample that are to be put into lists, with their lengths.

    Args:
        rules: name resources and their limits, and say what becomes of samples above them.
        stage: counts the sample if it is dropped.
        key: of the sample.
        sample: the sample.
        length: the result of `sample_length`.

    Raises:
        FatalSampleError: The sample has no length, or a length that the rules do not allow.
    """
    lengths = _lengths_of(rules, key, sample, length)
    if all(map(operator.le, lengths, rules.limits)):
        return [(key, lengths)]
    try:
        parts = rules.parts(np.array([lengths]))
    except OverlongError as error:
        raise FatalSampleError.from_sample_key(name_of(key, sample), str(error)) from None
    if parts.is_overlong[0] and not len(parts.samples):
        count_dropped(key, sample, f"too long: {rules.excess(lengths)}", stage)
    elif parts.is_overlong[0]:
        current_context().costs[first_leaf(key)[0]].overlong += 1
    columns = (parts.starts.tolist(), parts.stops.tolist(), parts.lengths.tolist())
    return [
        (key if start == WHOLE else ("piece", start, stop, key), tuple(own))
        for start, stop, own in zip(*columns, strict=True)
    ]


def _lengths_of(rules: LengthRules, key: RestoreKey, sample: Any, length: Any) -> tuple[int, ...]:
    by_name = length if isinstance(length, dict) else {TOKENS: length}
    what = ""
    try:
        found = tuple(operator.index(by_name[name]) for name in rules.resources)
        if found[0] < rules.shortest or min(found) < 0:
            what = f"a sample in a list has at least {rules.shortest} tokens, and 0 of other "
            what += "resources. Raise SkipSample in encode_sample for empty samples"
    except KeyError as error:
        what = f"it lacks {error}; return an entry for each resource of the limits"
    except TypeError:
        what = "return the sample's tokens as an integer, or a dict of integers"
    if what:
        raise FatalSampleError.from_sample_key(
            name_of(key, sample), f"sample_length returned {length!r:.80}; {what}"
        )
    return found


class MeasuredLists(CollectDataset[list[Any]]):
    """Lists of samples of one group, chosen by length.

    State, Length, Keys: those of `CollectDataset`.

    Args:
        dataset: the samples, measured; they must be replayable, as buffered ones are saved as keys.
        rules: for the lengths of samples, and what must be equal in a list.
    """

    def __init__(self, dataset: MeasureDataset[Any], rules: LengthRules) -> None:
        super().__init__(dataset)
        self.rules = rules
        self.num_lengths = len(rules.resources)
        self.group_by = "source" if isinstance(rules.group_by, Mapping) else rules.group_by
        known = {None: 1, "source": len(self.sources()), "modality": 2}
        self.most_groups = None if callable(self.group_by) else known[self.group_by]
        if callable(self.group_by):
            self.group_by = UserFunction(
                _InTuple(self.group_by), name="group_by", seed=self.run_seed,
                config=self.worker_config,
            )  # fmt: skip

    def own_settings(self) -> dict[str, JSON]:
        """Returns what must be equal in a list."""
        is_function = isinstance(self.group_by, UserFunction)
        return {"group_by": "function" if is_function else self.group_by}

    def group_number(self, key: RestoreKey, sample: Any, group: Any) -> Any:
        """Returns what stands for a group; by default the group itself."""
        return group

    def units(self, inner: Any) -> UnitsOf:
        """Returns what turns measured samples into whole ones or parts."""
        rules, stage, group_of = self.rules, self.kind, self._grouping()
        # Samples with one resource and up to so long need no second look.
        longest = rules.limits[0] if len(rules.resources) == 1 else 0
        has_one_group = rules.group_by is None

        def units(key: RestoreKey, sample: Any) -> Iterable[Unit]:
            length = inner.length
            is_plain = type(length) is int and 0 < length <= longest
            if has_one_group and is_plain:
                return ((key, None, (length,)),)
            pieces: Any = [(key, (length,))]
            if not is_plain:
                pieces = pieces_of(rules, stage, key, sample, length)
            group = group_of(key, sample) if pieces else SKIPPED
            if group is SKIPPED:
                return ()
            group = self.group_number(key, sample, group)
            return [(part, group, lengths) for part, lengths in pieces]

        return units

    def read(self, inner: Any, units_of: UnitsOf, num: int, found: Found) -> bool:
        """Reads samples; several at once, unless grouping and hooks below draw in turn."""
        rules, group_by = self.rules, self.group_by
        is_in_turn = isinstance(group_by, UserFunction) and takes_turns(group_by, self.dataset)
        has_one_group = rules.group_by is None and len(rules.resources) == 1
        with suppress(StopIteration):
            while num > 0:
                samples, keys = inner.take(1 if is_in_turn else num)
                lengths = inner.lengths
                num -= len(keys)
                is_plain = has_one_group and {*map(type, lengths)} == {int}
                if is_plain and min(lengths) > 0 and max(lengths) <= rules.limits[0]:
                    columns = (keys, [None] * len(keys), lengths, samples)
                    for column, own in zip(found, columns, strict=True):
                        column += own
                else:
                    for key, sample, inner.length in zip(keys, samples, lengths, strict=True):
                        found.add(units_of(key, sample), sample)
        return num > 0

    def _grouping(self) -> Callable[[RestoreKey, Any], Any]:
        """Returns a function of key and sample that returns the group, `SKIPPED` if it failed."""
        if not isinstance(self.group_by, UserFunction):
            return _GROUPINGS[self.group_by]
        call = FunctionRun(self.group_by).call

        def group_of(key: RestoreKey, sample: Any) -> Any:
            found = call(key, sample)
            return found if found is SKIPPED else found[0]

        return group_of


_GROUPINGS: dict[Any, Callable[[RestoreKey, Any], Any]] = {
    None: lambda *_: None,
    "source": lambda key, _: first_leaf(key)[0],
    "modality": lambda _, sample: "images" if images_of(sample) else "text",
}


class _InTuple(WrappedFunction):
    """A `group_by` of the user; the group is checked, and in a tuple since it may be None."""

    def __call__(self, sample: Any) -> tuple[Any]:
        return (group_from(self.function(sample), sample, "group_by"),)
