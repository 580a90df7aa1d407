"""The draws of a run, made beforehand: by running its cursors, or by adding up its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import SavableDataset, context_of
from energon_lite.core.stream_context import StreamContext
from energon_lite.core.topology import Stream

EXACT, EXPECTED, SHARES = "exact", "expected", "shares"
NUM_STRETCHES = 8
# Draws that become an array at a time.
_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Run:
    """How a run goes through its data.

    Attributes:
        steps: in each of which every rank takes a batch.
        batch_size: samples of a batch.
        world_size: ranks.
        num_streams: streams.

    Raises:
        ValueError: `steps` or `batch_size` is below 1.
    """

    steps: int
    batch_size: int
    world_size: int
    num_streams: int

    def __post_init__(self) -> None:
        """Refuses a run of nothing."""
        for name, value in (("steps", self.steps), ("batch_size", self.batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")

    @property
    def step_samples(self) -> int:
        """Samples of a step."""
        return self.world_size * self.batch_size

    def num_draws(self, dataset: SavableDataset[Any]) -> int:
        """Counts the samples of the run; those of a pass, where that ends before."""
        asked = self.steps * self.step_samples
        if dataset.endless:
            return asked
        streams = (Stream(index, self.num_streams) for index in range(self.num_streams))
        return min(asked, sum(dataset.num_items(stream) for stream in streams))


@dataclasses.dataclass(frozen=True)
class Foreseen:
    """What comes; K stretches of the run, N sources.

    Attributes:
        kind: how it was found: `EXACT`, `EXPECTED` or `SHARES`.
        steps: steps that there are.
        asked: shape (K, N); samples that the weights ask for. Of a blend by tokens, only the shares
            mean something.
        samples: shape (K, N); those that come.
        tokens: shape (K, N), if they are known.
        more_batches: batches that some ranks have after the last step of all.
        items: what batches are made of: samples, or packs; those that come.
        by_tokens: whether shares are of tokens.
    """

    kind: str
    steps: int
    asked: Float64Array
    samples: Float64Array | None = None
    tokens: Float64Array | None = None
    more_batches: int = 0
    items: int = 0
    by_tokens: bool = False

    @property
    def given(self) -> Float64Array | None:
        """What shares are of; shape (K, N)."""
        return self.tokens if self.by_tokens else self.samples


def stretch_edges(steps: int) -> list[int]:
    """Cuts a run into stretches of equal length: the first step of each, and the end.

    Example:
        >>> stretch_edges(20)
        [0, 3, 5, 8, 10, 13, 15, 18, 20]
    """
    number = min(steps, NUM_STRETCHES)
    # Rounded up, since step * number // steps is the stretch of a step.
    return [-(-k * steps // number) for k in range(number + 1)] if number else [0]


def asked_shares(dataset: SavableDataset[Any], run: Run) -> Foreseen:
    """Returns what the weights ask for, of data whose samples cannot be foreseen."""
    edges = stretch_edges(run.steps)
    return Foreseen(SHARES, run.steps, _asked(dataset, [e * run.step_samples for e in edges]))


def expected_draws(dataset: SavableDataset[Any], run: Run) -> Foreseen:
    """Adds up the weights, however long the run."""
    steps = run.num_draws(dataset) // run.step_samples
    asked = _asked(dataset, [edge * run.step_samples for edge in stretch_edges(steps)])
    return Foreseen(EXPECTED, steps, asked, asked)


def exact_draws(
    dataset: SavableDataset[Any], run: Run, lengths: Mapping[str, Int64Array]
) -> Foreseen:
    """Draws every sample of the run, and counts.

    Args:
        dataset: whose items are restore keys of sources.
        run: how it is run.
        lengths: tokens of the samples by source; they are counted if all sources have them.
    """
    names = [facts.name for facts in dataset.sources()]
    known = [lengths[name] for name in names if name in lengths]
    by_source = known if len(known) == len(names) else None
    streams = [
        StreamDraws(dataset, Stream(index, run.num_streams), names, by_source)
        for index in range(run.num_streams)
    ]
    has_tokens = by_source is not None
    return count_draws(dataset, streams, run, has_tokens=has_tokens, by_tokens=has_tokens)


def count_draws(
    dataset: SavableDataset[Any],
    streams: Sequence[Draws],
    run: Run,
    *,
    has_tokens: bool,
    by_tokens: bool,
) -> Foreseen:
    """Draws what the run needs, and counts.

    Args:
        dataset: what the weights are asked of.
        streams: all of the run.
        run: how it is run.
        has_tokens: whether the streams know the tokens of their draws.
        by_tokens: whether shares are of tokens.
    """
    names = [facts.name for facts in dataset.sources()]
    slots = _draw(streams, run)
    steps = min(run.steps, slots.num_steps)
    samples = np.zeros((len(stretch_edges(steps)) - 1, len(names)))
    tokens = np.zeros_like(samples) if has_tokens else None
    num_items = 0
    for stream in streams if steps else ():
        steps_of_items = slots.steps_of(stream)
        num_items += int(((steps_of_items >= 0) & (steps_of_items < steps)).sum())
        step = steps_of_items[stream.items]
        is_given = (step >= 0) & (step < steps)
        cells = step[is_given] * len(samples) // steps * len(names) + stream.sources[is_given]
        counts = stream.counts[is_given]
        samples += np.bincount(cells, counts, minlength=samples.size).reshape(samples.shape)
        if tokens is not None:
            found = np.bincount(cells, stream.tokens[is_given], minlength=samples.size)
            tokens += found.reshape(samples.shape)
    asked = _asked(dataset, [0, *np.cumsum(samples.sum(axis=1)).astype(int).tolist()])
    more = slots.num_batches - steps * run.world_size if steps < run.steps else 0
    return Foreseen(EXACT, steps, asked, samples, tokens, more, num_items, by_tokens)


def _asked(dataset: SavableDataset[Any], ends: Sequence[int]) -> Float64Array:
    """Returns what the weights ask for between two numbers of samples; (len(ends) - 1, N)."""
    names = [facts.name for facts in dataset.sources()]
    asked = [dataset.expected(end) for end in ends]
    rows = np.array([[found.get(name, 0.0) for name in names] for found in asked])
    more: Float64Array = np.maximum(np.diff(rows, axis=0), 0.0)
    return more


class Draws(Protocol):
    """What a stream draws: samples, each an item by itself or with others.

    Attributes:
        index: of the stream.
        num_items: items that there are.
        has_ended: whether there are no more.
    """

    index: int
    num_items: int
    has_ended: bool

    @property
    def sources(self) -> Int64Array:
        """The number of each draw's source, (N,)."""

    @property
    def tokens(self) -> Int64Array:
        """The tokens of each draw, (N,)."""

    @property
    def items(self) -> Int64Array:
        """In which item each draw is, (N,)."""

    @property
    def counts(self) -> Int64Array:
        """How many samples each draw is, (N,); of the parts of one, only the first counts."""

    def draw_up_to(self, num_items: int) -> None:
        """Draws until there are so many, or the stream ends."""


class StreamDraws:
    """The draws of one stream, each an item.

    Args:
        dataset: whose items are restore keys of sources.
        stream: the stream.
        names: of the sources.
        lengths: tokens of each sample, by number of the source; None if nobody asks.

    Attributes:
        num_items: draws that were made.
        has_ended: whether there are no more.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        stream: Stream,
        names: list[str],
        lengths: list[Int64Array] | None,
    ) -> None:
        self.index = stream.index
        self.num_items = 0
        self.has_ended = False
        self._cursor = dataset.cursor(stream)
        self._context = StreamContext(stream)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._lengths = lengths
        self._sources = [np.empty(0, dtype=np.int64)]
        self._tokens = [np.empty(0, dtype=np.int64)]

    def draw_up_to(self, num_items: int) -> None:
        """Draws until there are so many, or the stream ends."""
        number_of = self._numbers.__getitem__
        while self.num_items < num_items and not self.has_ended:
            count = min(_CHUNK, num_items - self.num_items)
            with context_of(self._context):
                _, keys = self._cursor.take(count)
            num_keys = len(keys)
            names = map(itemgetter(0), keys)
            sources = np.fromiter(map(number_of, names), dtype=np.int64, count=num_keys)
            self._sources.append(sources)
            if self._lengths is not None:
                indices = np.fromiter(map(itemgetter(2), keys), dtype=np.int64, count=num_keys)
                self._tokens.append(_measured(self._lengths, sources, indices))
            self.num_items += num_keys
            self.has_ended = num_keys < count

    @property
    def sources(self) -> Int64Array:
        """The number of each draw's source, (N,)."""
        return np.concatenate(self._sources)

    @property
    def tokens(self) -> Int64Array:
        """The tokens of each draw, (N,)."""
        return np.concatenate(self._tokens)

    @property
    def items(self) -> Int64Array:
        """The number of each draw, (N,)."""
        return np.arange(self.num_items)

    @property
    def counts(self) -> Int64Array:
        """Each draw is a sample, (N,)."""
        return np.ones(self.num_items, dtype=np.int64)


def _measured(lengths: list[Int64Array], sources: Int64Array, indices: Int64Array) -> Int64Array:
    tokens = np.zeros(len(sources), dtype=np.int64)
    for number in np.unique(sources).tolist():
        is_own = sources == number
        tokens[is_own] = lengths[number][indices[is_own]]
    return tokens


class _Slots:
    """Which step each slot of a run falls on.

    Ranks pass over the slots of streams that have ended, each on its own.

    Args:
        num_batches: of each stream.
        run: how it is run.

    Attributes:
        num_batches: of all streams.
        num_steps: steps in which every rank has a batch.
    """

    def __init__(self, num_batches: list[int], run: Run) -> None:
        self._run = run
        num_slots = max(num_batches) * run.num_streams
        num_turns = -(-num_slots // run.world_size)
        slots = np.arange(num_turns * run.world_size)
        has_batch = slots // run.num_streams < np.array(num_batches)[slots % run.num_streams]
        by_rank = has_batch.reshape(num_turns, run.world_size)
        self._steps = np.where(by_rank, np.cumsum(by_rank, axis=0) - 1, -1).ravel()
        self.num_batches = sum(num_batches)
        self.num_steps = int(by_rank.sum(axis=0).min())

    def steps_of(self, stream: Draws) -> Int64Array:
        """Returns the step at which each item of a stream is given; -1 for none."""
        batches = np.arange(stream.num_items) // self._run.batch_size
        steps: Int64Array = self._steps[batches * self._run.num_streams + stream.index]
        return steps


def _draw(streams: Sequence[Draws], run: Run) -> _Slots:
    """Draws what the run needs; gives where that falls."""
    num_batches = -(-run.steps * run.world_size // run.num_streams)
    while True:
        for stream in streams:
            stream.draw_up_to(num_batches * run.batch_size)
        slots = _Slots([-(-stream.num_items // run.batch_size) for stream in streams], run)
        if slots.num_steps >= run.steps or all(stream.has_ended for stream in streams):
            return slots
        # Where streams have ended, ranks take further batches of the others.
        num_batches *= 2
