"""Datasets over several others, of which one concatenates them; and repetitions of a dataset."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor
from typing import Any, ClassVar, TypeVar

from typing_extensions import Self

from energon_lite.core.dataset import Cursor, SavableDataset, Traits
from energon_lite.core.errors import EmptyDatasetError, StateError
from energon_lite.core.keys import leaves
from energon_lite.core.sample_columns import Columns, samples_of
from energon_lite.core.seeds import key_of
from energon_lite.core.stage import Stage, StageCursor
from energon_lite.core.state import COUNT, JSON, Names, RestoreKey, Snapshot
from energon_lite.core.topology import Stream, WorkerConfig

T = TypeVar("T")

_MANY_ROUNDS = 1 << 52


def unique_sources(datasets: Sequence[SavableDataset[Any]]) -> list[SavableDataset[Any]]:
    """Numbers the sources that occur more than once, so that each has its own order.

    Example:
        Datasets over the sources (a), (b, a), (a) become datasets over (a), (b, a#2), (a#3).
    """
    seen: Counter[str] = Counter()
    taken = {facts.name for dataset in datasets for facts in dataset.sources()}
    unique = []
    for dataset in datasets:
        names = {}
        for facts in dataset.sources():
            seen[facts.name] += 1
            if seen[facts.name] == 1:
                continue
            new = f"{facts.name}#{seen[facts.name]}"
            while new in taken:
                seen[facts.name] += 1
                new = f"{facts.name}#{seen[facts.name]}"
            taken.add(new)
            names[facts.name] = new
        unique.append(dataset.renamed(names) if names else dataset)
    return unique


class CombinedDataset(SavableDataset[T]):
    """A dataset over several others.

    Attributes:
        name: of the stage in configurations and states.
    """

    name: str = ""
    labels: Names

    def __init__(
        self, datasets: Sequence[SavableDataset[Any]], worker_config: WorkerConfig | None = None
    ) -> None:
        for dataset in datasets:
            if not isinstance(dataset, SavableDataset):
                raise TypeError(
                    f"{type(self).__name__}: {dataset!r} is a {type(dataset).__name__}, not a "
                    "SavableDataset"
                )
        if not datasets:
            raise ValueError(f"{type(self).__name__} needs at least one dataset")
        configs = [dataset.worker_config for dataset in datasets]
        self.worker_config = worker_config or next((c for c in configs if c is not None), None)
        seeds = {config.seed_offset for config in configs if config is not None}
        if len(seeds) > 1:
            raise ValueError(
                f"{type(self).__name__}: the datasets have different seed_offset "
                f"({', '.join(map(str, sorted(seeds)))}); make all with one WorkerConfig"
            )
        self._set_datasets(unique_sources([dataset.nested() for dataset in datasets]))

    def _set_datasets(self, datasets: Sequence[SavableDataset[Any]]) -> None:
        self.datasets = tuple(datasets)
        # Named by their sources, or by their number where they have none.
        names = ["+".join(facts.name for facts in dataset.sources()) for dataset in datasets]
        self.labels = Names(name or f"#{number}" for number, name in enumerate(names))
        self._routes = {
            facts.name: i for i, dataset in enumerate(self.datasets) for facts in dataset.sources()
        }

    @property
    def children(self) -> tuple[SavableDataset[Any], ...]:
        """The datasets that are combined."""
        return self.datasets

    def with_children(self, children: Sequence[SavableDataset[Any]]) -> Self:
        """Returns this dataset over others."""
        other = copy.copy(self)
        other._set_datasets(children)
        return other

    def own_traits(self, below: Traits) -> Traits:
        """Returns what holds of all; streams draw from the datasets at different places."""
        return dataclasses.replace(below, lockstep=False, pass_length=None, ordering=True)

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Re-creates the item in the dataset whose source the key names."""
        for leaf in leaves(restore_key):
            number = self._routes.get(leaf[0]) if leaf else None
            if number is not None:
                item: T = self.datasets[number].restore_sample(restore_key)
                return item
        for dataset, label in zip(self.datasets, self.labels, strict=True):
            if not label.startswith("#"):
                continue
            try:  # one that does not say what its sources are
                return dataset.restore_sample(restore_key)  # type: ignore[no-any-return]
            except ValueError:
                continue
        raise ValueError(
            f"{restore_key!r} is of none of the sources {', '.join(list(self._routes)[:8])}"
        )


class ConcatDataset(CombinedDataset[T]):
    """Concatenates datasets, each to its end; the usual choice for validation.

    State: which dataset is being read, and the places in all of them.
    Length: the sum of those below.
    Keys: as below.

    Args:
        datasets: what follows each other; only the last may be endless.
        worker_config: by default that of the datasets.

    Raises:
        ValueError: A dataset that is not the last one never ends.
    """

    name = "concat"

    def __init__(
        self, *datasets: SavableDataset[T], worker_config: WorkerConfig | None = None
    ) -> None:
        super().__init__(datasets, worker_config)
        for dataset, label in zip(self.datasets[:-1], self.labels, strict=False):
            if dataset.endless:
                raise ValueError(
                    f"ConcatDataset: {label} never ends, so what comes after it would never be "
                    "read. Make it with repeat=False, or blend the datasets."
                )

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return _ConcatCursor(self, *(dataset.cursor(stream) for dataset in self.datasets))

    def num_items(self, stream: Stream) -> int:
        """Sums the items of the datasets."""
        return sum(dataset.num_items(stream) for dataset in self.datasets)

    def expected(self, num_items: float) -> dict[str, float]:
        """Returns the items to the datasets in their order."""
        found: dict[str, float] = {}
        for dataset in self.datasets:
            here = num_items if dataset.endless else min(num_items, total_items(dataset))
            found.update(dataset.expected(here))
            num_items -= here
        return found

    def config(self) -> dict[str, JSON]:
        """Returns the datasets in their order."""
        return {"stage": self.name, "of": [dataset.config() for dataset in self.datasets]}


class _ConcatCursor(StageCursor[T]):
    saved: ClassVar = {"at": COUNT}
    at: int
    key: RestoreKey = ()

    __next__ = Cursor.__next__

    def take(self, n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
        while self.at < len(self.cursors):
            try:
                found, keys = self.cursors[self.at].take(n)
            except StopIteration:
                self.at += 1
                continue
            self.key = keys[-1] if keys else self.key
            return found, keys
        raise StopIteration

    def set_fields(self, snapshot: Snapshot) -> None:
        super().set_fields(snapshot)
        if self.at > len(self.cursors):
            raise StateError(
                f"The checkpoint reads dataset {self.at} of a concat of {len(self.cursors)}."
            )


class RepeatDataset(Stage[T]):
    """Repeats a finite dataset, each time as another pass.

    Where `repeats` is not whole, the last round has that share of the items; over all
    streams exactly `floor(share * items)`, as far as nothing is skipped.

    State: rounds that are done, items of this round, and the place in it.
    Length: that below times `repeats`.
    Keys: as below; the epoch in them continues from round to round.

    Args:
        dataset: what is repeated; its passes must end.
        repeats: how many times; any number above 0. None for ever.
        restart: a pass always has all rounds; False is accepted where they never end.
        worker_config: by default that of the dataset.

    Raises:
        ValueError: The dataset never ends, or `repeats` is not above 0.
    """

    name = "repeat"

    def __init__(
        self,
        dataset: SavableDataset[T],
        *,
        repeats: float | Fraction | None = None,
        restart: bool = True,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        if repeats is not None and not restart:
            raise ValueError(
                "RepeatDataset: restart=False would leave later passes empty, and "
                "each has all rounds here; leave it out"
            )
        super().__init__(dataset.nested(), worker_config)
        if self.dataset.endless:
            raise ValueError("RepeatDataset: the dataset never ends; repeat=False makes it finite")
        if repeats is not None and not 0 < repeats < float("inf"):
            raise ValueError(f"repeats={repeats} must be above 0, or None for ever")
        # Through its text: 0.1 means one tenth, not the nearest binary number.
        self.repeats = None if repeats is None else Fraction(str(repeats))

    def own_traits(self, below: Traits) -> Traits:
        """Adds whether it repeats for ever."""
        return dataclasses.replace(
            below, endless=self.repeats is None, each_once=False, ordering=True
        )

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return RepeatCursor(self, stream)

    @property
    def num_rounds(self) -> int | None:
        """Rounds of a pass, the last of which may be cut short; None for ever."""
        return None if self.repeats is None else ceil(self.repeats)

    def round_stream(self, stream: Stream, number: int) -> Stream:
        """Returns the stream of a round: no two rounds of any passes are the same pass below."""
        # The first pass, which is all that an endless one has, numbers its rounds 0, 1, 2.
        rounds = 1 << 32 if self.num_rounds is None else self.num_rounds
        first = stream.pass_index * rounds
        if first >= _MANY_ROUNDS:
            # Endless rounds in one another: rounds follow each other from a random number. It is
            # small, as epochs times samples must stay below 2**63; that two runs of rounds overlap
            # is unlikely, and would only repeat an order.
            first = (2 << 32) + key_of("rounds", stream.pass_index) % (2 << 32)
        return replace(stream, pass_index=first + number)

    def round_length(self, stream: Stream, number: int) -> int | None:
        """Returns after how many items a round ends; None for where its data do.

        Example:
            Of 2.5 rounds of 5 items in 2 streams, which hold 3 and 2, the last has floor(2.5) = 2:
            floor(2 * 3 / 5) = 1 in stream 0, floor(2 * 5 / 5) - 1 = 1 in stream 1.
        """
        if self.repeats is None or number < floor(self.repeats):
            return None
        counts = [
            self.dataset.num_items(replace(stream, index=i)) for i in range(stream.num_streams)
        ]
        total = sum(counts)
        target = floor(self.repeats % 1 * total)
        before = sum(counts[: stream.index])
        after = before + counts[stream.index]
        return target * after // total - target * before // total if total else 0

    def num_items(self, stream: Stream) -> int:
        """Counts the items of all rounds; of one, where they never end."""
        if self.num_rounds is None:
            return self.dataset.num_items(self.round_stream(stream, 0))
        total = 0
        for number in range(self.num_rounds):
            below = self.round_stream(stream, number)
            length = self.round_length(below, number)
            total += self.dataset.num_items(below) if length is None else length
        return total

    def expected(self, num_items: float) -> dict[str, float]:
        """Returns whole rounds, and a part of one."""
        length = total_items(self.dataset)
        if length == 0:
            return {}
        rounds, rest = divmod(num_items, length)
        whole, part = self.dataset.expected(length), self.dataset.expected(rest)
        return {name: rounds * count + part.get(name, 0.0) for name, count in whole.items()}

    def own_settings(self) -> dict[str, JSON]:
        """Returns how often it repeats."""
        return {"repeats": None if self.repeats is None else str(self.repeats)}


class RepeatCursor(StageCursor[T]):
    """A place in the rounds of a `RepeatDataset`.

    Attributes:
        round: rounds that are done.
        done: items of this round that were returned.
    """

    saved: ClassVar = {"round": COUNT, "done": COUNT}
    round: int
    done: int

    def __init__(self, spec: RepeatDataset[T], stream: Stream) -> None:
        self._stream = stream
        self._num_empty = 0  # rounds without an item, up to this one
        super().__init__(spec)
        self._go_to(0)

    def _go_to(self, number: int) -> None:
        self.round, self.done = number, 0
        below = self.spec.round_stream(self._stream, number)
        self._length = self.spec.round_length(below, number)
        self.inner = self.spec.dataset.cursor(below)
        self.cursors = (self.inner,)

    def next_in_round(self) -> T:
        """Returns the next item of this round; raises StopIteration at its end and stays there."""
        while not (items := samples_of(self._in_round(1)[0])):
            pass
        item: T = items[0]
        return item

    def _in_round(self, n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
        n = n if self._length is None else min(n, self._length - self.done)
        if n <= 0:
            raise StopIteration
        found, keys = self.inner.take(n)
        self.done += len(keys)
        return found, keys

    __next__ = Cursor.__next__

    def take(self, n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
        """Returns some of the next `n` items, of one round."""
        rounds = self.spec.num_rounds
        while rounds is None or self.round < rounds:
            with suppress(StopIteration):
                return self._in_round(n)
            # A stream may have no part in many rounds: that of 3 samples is empty for most of 64.
            self._num_empty = 0 if self.done else self._num_empty + 1
            if rounds is None and self._num_empty > 8 + 4 * self._stream.num_streams:
                names = ", ".join(facts.name for facts in self.spec.sources()) or "the dataset"
                raise EmptyDatasetError(
                    f"RepeatDataset: {names} had no item in {self._num_empty} rounds of stream "
                    f"{self._stream.index}; check what filters or skips its samples"
                )
            self.begin_round()
        raise StopIteration

    def begin_round(self) -> None:
        """Begins the next round."""
        self._go_to(self.round + 1)

    def set_fields(self, snapshot: Snapshot) -> None:
        """Goes to a round."""
        super().set_fields(snapshot)
        number, done, rounds = self.round, self.done, self.spec.num_rounds
        if rounds is not None and number > rounds:
            raise StateError(f"The checkpoint stands in round {number} of {rounds}.")
        self._go_to(number)
        self.done = done


def total_items(dataset: SavableDataset[Any]) -> int:
    """Counts the items of a pass over all streams."""
    return dataset.num_items(Stream(0, 1))
