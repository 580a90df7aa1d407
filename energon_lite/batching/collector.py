"""What decides which buffered samples form the next list.

Axes: N samples, R resources, C columns of a collector's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


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
        kept: samples that were in a list and may come in a later one again. The caller keeps their
            restore keys; in a list such a repetition of sample n is written as `~n`.
    """

    num_columns: int = 0
    kept: Collection[int] = ()

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
    def add(self, numbers_N: Int64Array, groups_N: Int64Array, lengths_NR: Int64Array) -> None:
        """Adds at most `num_wanted` samples.

        Args:
            numbers_N: shape (N,); rising, over all calls.
            groups_N: shape (N,); numbers of their groups, which mean nothing but themselves.
            lengths_NR: shape (N, R); of each resource, tokens first.
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
    def restore(
        self,
        counts: Mapping[str, Any],
        numbers_N: Int64Array,
        groups_N: Int64Array,
        lengths_NR: Int64Array,
        columns_NC: Int64Array,
    ) -> None:
        """Resumes a fresh collector from a state.

        Args:
            counts: as they were saved.
            numbers_N: shape (N,); the buffered samples, rising. Samples of sources that were
                removed since are missing: lists that have become empty are dropped.
            groups_N: shape (N,).
            lengths_NR: shape (N, R).
            columns_NC: shape (N, C).

        Raises:
            ValueError, TypeError, KeyError: The state is invalid.
        """
