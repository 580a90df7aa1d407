"""What decides which buffered samples form the next list.

Axes: N samples, R resources, C columns of a collector's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.state import MAX_COUNT


class Samples(NamedTuple):
    """What a collector knows of samples.

    Attributes:
        numbers: shape (N,), rising.
        groups: shape (N,); numbers of their groups, which mean nothing but themselves.
        lengths: shape (N, R); of each resource, tokens first.
    """

    numbers: Int64Array
    groups: Int64Array
    lengths: Int64Array


class CollectorState(NamedTuple):
    """What a collector saves.

    Attributes:
        counts: integers, texts and tuples of these, by name. Nothing in them names a sample.
        numbers: shape (N,); the buffered samples, each once, in any order. Those in `kept` are
            among them.
        columns: shape (N, C); for each of them what the collector must know besides its group and
            its lengths, such as the batch it belongs to.
    """

    counts: dict[str, Any]
    numbers: Int64Array
    columns: Int64Array


class Collector(ABC):
    """Decides which buffered samples form the next list.

    A collector knows numbers, groups and lengths; it has no samples. Its caller adds samples until
    `next` returns a list, and forgets the samples of that list.

    Attributes:
        num_columns: C, the columns of its state.
        groups: those that the collector knows also when none of their samples is buffered.
        kept: samples that were in a list and may come in a later one again. The caller keeps their
            restore keys; in a list such a repetition of sample n is written as `~n`.
    """

    num_columns: int = 0
    kept: Collection[int] = ()
    groups: Collection[int] = ()

    @property
    @abstractmethod
    def num_wanted(self) -> int:
        """Samples that may be added before the next list can be complete; 0 if one is."""

    @property
    def is_between_windows(self) -> bool:
        """Whether only samples that were carried over are buffered, in the order of their numbers.

        Adding them to a fresh collector with the same counts leads to the same lists.
        """
        return False

    @abstractmethod
    def add(self, samples: Samples) -> Sequence[int]:
        """Adds samples; their numbers rise over all calls.

        Args:
            samples: at most `num_wanted`, but for parts of the last one.

        Returns:
            Those of the samples that it does not take, to be counted as dropped: more of a group
            than its share takes.

        Raises:
            ValueError: Samples cannot be batched in this way; the message has the remedy.
        """

    @abstractmethod
    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns the samples of the next list, and forgets them.

        Args:
            cycle: number of the batch in its stream.
            has_ended: whether no more samples come.

        Returns:
            Numbers of samples; None to add more, or, when the data have ended, at the end.
        """

    @abstractmethod
    def leftover(self) -> Sequence[int]:
        """Returns the samples that are in no list when `next` has returned None at the end."""

    @abstractmethod
    def state(self) -> CollectorState:
        """Returns what `restore` needs, as copies."""

    @abstractmethod
    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes a fresh collector from a state.

        Args:
            counts: as they were saved.
            samples: those that are buffered. Samples of sources that were removed since are
                missing: lists that have become empty are dropped.
            columns_NC: shape (N, C); as they were saved.

        Raises:
            ValueError, TypeError, KeyError: The state is invalid.
        """


class OneByOne(Collector):
    """A collector to which samples are added one by one, until a list is complete."""

    @property
    def num_wanted(self) -> int:
        """One sample, since any may complete a list."""
        return 1

    @abstractmethod
    def add_one(self, number: int, group: int, lengths: Sequence[int]) -> bool:
        """Adds a sample.

        Returns:
            Whether a list may be complete.
        """

    def add(self, samples: Samples) -> Sequence[int]:
        """Adds samples."""
        for number, group, lengths in zip(*map(np.ndarray.tolist, samples), strict=True):
            self.add_one(number, group, lengths)
        return ()


def saved_count(counts: Mapping[str, Any], name: str) -> int:
    """Returns a count of a collector's state.

    Raises:
        ValueError: There is none, or it is no count.
    """
    value = counts.get(name)
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name}={value!r:.80} is no count")
    return value
