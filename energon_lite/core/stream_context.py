"""The context of the stream that is being computed: its batch, its sample, what was skipped.

The loader (or direct iteration) drives each stream through a `StreamRun`; while that computes an
item, its `StreamContext` is the current one of the thread. User code reads it through
`current_batch_index`, `current_sample_index` and `sample_rng`.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator, Philox

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.global_generators import StreamGenerators
from energon_lite.core.keys import LISTS, Siblings, contents, is_again, is_piece, leaves
from energon_lite.core.seeds import key_of
from energon_lite.core.state import RestoreKey
from energon_lite.core.topology import Stream, WorkerConfig, current

logger = logging.getLogger(__name__)

# A stream that fails this much above its rate is stopped: single bursts of bad samples pass.
SKIP_ALLOWANCE = 100
DEFAULT_MAX_SKIP_RATE = 0.01
# Samples that may be skipped on purpose in a row before a warning is logged.
_QUIET_SKIPS = 10_000


class SkipRecord(NamedTuple):
    """A sample or batch that was skipped, as it is counted and listed."""

    restore_key: RestoreKey
    sample_key: str
    source: str
    stage: str
    error: str
    on_purpose: bool
    num_samples: int


_LAST = itemgetter(-1)
# A source, and the fields of its `Cost`.
CostRow = tuple[Any, ...]


@dataclass(slots=True)
class Cost:
    """The contribution of one source since the last item, and its cost.

    Attributes:
        draws: samples drawn, also those that were skipped afterwards.
        read_sec: seconds of reading and decoding.
        encode_sec: seconds in the hooks.
        tokens: length of the samples in the item.
        overlong: samples that were too long for a pack, and were cut or packed alone.
        samples: samples in the item; of those that it has a part of, those with the first part.
        parts: parts of samples and repetitions in the item, each as one, and whole samples.
        released: draws that no buffer holds any more: they are in the item, skipped or dropped.
    """

    draws: int = 0
    read_sec: float = 0.0
    encode_sec: float = 0.0
    tokens: int = 0
    overlong: int = 0
    samples: int = 0
    parts: int = 0
    released: int = 0


_VALUES = attrgetter(*Cost.__slots__)


class StreamContext:
    """One stream's current place, and what it skipped since the last item.

    Failures fill a bucket that drains with the samples drawn: `max_skip_rate` per sample. When it
    holds more than 100 failures, the stream stops. So the limit is one on the rate, it needs no
    work for samples that are well, and it falls on the same sample on any topology.
    """

    worker_config: WorkerConfig | None = None  # of the dataset that is read
    cache_pool: Any = None  # of the loader that drives the stream

    def __init__(self, stream: Stream, max_skip_rate: float = DEFAULT_MAX_SKIP_RATE) -> None:
        self.stream = stream
        self.max_skip_rate = max_skip_rate
        self.batch_index = stream.index
        self.sample_index = stream.index
        self.restore_key: RestoreKey = ()
        self.seed = 0
        self.hook = ""
        self.rng: Generator | None = None
        # Where hooks may draw from the global generators.
        self.generators: StreamGenerators | None = None
        self.siblings: Siblings | None = None
        self.records: list[SkipRecord] = []
        # The costs of each source since the last item.
        self.costs: defaultdict[str, Cost] = defaultdict(Cost)
        # Tokens measured since the context was made, by source; and those of samples that are in
        # no item yet, by their keys in lists. Without a measure: the lengths of a blend, by source.
        self.tokens: Counter[str] = Counter()
        self.lengths: dict[RestoreKey, int] = {}
        self.stored_lengths: dict[str, Int64Array] = {}
        # Whether the current items were returned before the run was resumed.
        self.is_passing = False
        self.fill = 0.0
        self.last_draw = 0
        self.num_quiet = 0  # samples skipped on purpose since the last item

    @property
    def is_new(self) -> bool:
        """Whether the pass has had no item of this stream, and not more than usual may fail."""
        return self.batch_index == self.stream.index and self.max_skip_rate <= DEFAULT_MAX_SKIP_RATE

    @property
    def num_draws(self) -> int:
        """The number of samples drawn by the stream; `sample_index` of the next one contains it."""
        return (self.sample_index - self.stream.index) // self.stream.num_streams

    @num_draws.setter
    def num_draws(self, number: int) -> None:
        self.sample_index = number * self.stream.num_streams + self.stream.index

    def current_sample_index(self) -> int:
        """Returns the number of the current sample, or of the first one of a batch."""
        first: Any = next(leaves(self.restore_key), ())
        if not first:
            raise RuntimeError("No sample is being processed by a hook.")
        return int(first[-1])

    def enter(self, hook: str, seed: int, key: RestoreKey) -> None:
        """Records that a user function starts on the sample `key`."""
        self.hook = hook
        self.seed = seed
        self.restore_key = key
        self.rng = None

    def stop(self) -> None:
        """Lets the next hook of the stream end its thread; may be called from any thread."""
        self.enter = _end_thread  # type: ignore[assignment, method-assign]

    def count_skip(self, record: SkipRecord, is_dropped: bool = True) -> None:
        """Counts a skipped sample or batch, which leaves the buffers if it is dropped.

        Raises:
            FatalSampleError: More samples failed than the allowed rate.
        """
        self.records.append(record)
        if is_dropped:
            self.release(record.restore_key)
        if record.on_purpose:
            before = self.num_quiet
            self.num_quiet += record.num_samples
            if before < _QUIET_SKIPS <= self.num_quiet:
                logger.warning(
                    "Stream %d skipped %d samples in a row on purpose (last: %s in %s) without "
                    "an item between; check what raises SkipSample.",
                    self.stream.index,
                    self.num_quiet,
                    record.sample_key,
                    record.stage,
                )
            return
        draws = [leaf[-1] for leaf in leaves(record.restore_key) if leaf]
        draw = max((d for d in draws if isinstance(d, int)), default=0) // self.stream.num_streams
        drained = self.max_skip_rate * max(0, draw - self.last_draw)
        self.fill = max(0.0, self.fill - drained) + record.num_samples
        self.last_draw = max(draw, self.last_draw)
        if self.fill > SKIP_ALLOWANCE and self.max_skip_rate < 1:
            raise FatalSampleError(
                f"stream {self.stream.index} lost samples at more than "
                f"max_skip_rate={self.max_skip_rate:g} (the last after {draw + 1} draws: "
                f"{record.sample_key!r} of {record.source}, stage {record.stage}: {record.error}). "
                "Repair the data or the code, or give the loader a higher max_skip_rate."
            )

    def spend(self, key: RestoreKey, seconds: float) -> None:
        """Counts time in a hook for the source of the sample `key`, or those of the batch."""
        if type(key[-1]) is int:
            self.costs[key[0]].encode_sec += seconds
            return
        costs = self.costs.values()
        total = sum([cost.draws for cost in costs])
        for cost in costs if total else ():
            cost.encode_sec += seconds * cost.draws / total

    def release(self, key: RestoreKey, num: int = 1, *, is_returned: bool = False) -> None:
        """Counts samples that leave the buffers of the stream.

        Args:
            key: of an item with all of them.
            num: -1 to take back that they did.
            is_returned: whether the item is the stream's next; else it is skipped or dropped.
        """
        own = key[2:] if key and key[0] in LISTS and type(key[-1]) is tuple else ()
        names = [entry[0] for entry in own]
        if set(names) == {"pack"}:
            for entry in own:
                self.release(entry, num, is_returned=is_returned)
            return
        if {*map(type, map(_LAST, own))} != {int} or self.stored_lengths:
            self._release_each(key, num, is_returned)
            return
        # Samples of sources, which are most, take a fifth of the time together.
        costs, lengths = self.costs, self.lengths
        for name, number in Counter(names).items():
            costs[name].released += num * number
            costs[name].samples += number * is_returned
            costs[name].parts += number * is_returned
        for entry in own if lengths else ():
            costs[entry[0]].tokens += lengths.pop(entry, 0) * is_returned

    def _release_each(self, key: RestoreKey, num: int, is_returned: bool) -> None:
        """Counts samples one by one: those of sources, parts, repetitions, items of functions."""
        lengths, stored = self.lengths, self.stored_lengths
        gone: list[RestoreKey] = []
        for own_key, leaf, is_first in contents(key):
            cost = self.costs[leaf[0]]
            cost.released += num * is_first
            entry = own_key[-1] if is_again(own_key) else own_key
            is_part = is_piece(entry)
            gone.append(entry[-1] if is_part else entry)
            if not is_returned:
                continue
            cost.samples += is_first
            cost.parts += 1
            if is_part:
                cost.tokens += entry[2] - entry[1]
            elif entry in lengths:
                cost.tokens += lengths[entry]
            elif leaf[0] in stored:
                cost.tokens += int(stored[leaf[0]][leaf[2]])
        for entry in gone if lengths else ():
            lengths.pop(entry, None)

    def take_costs(self) -> list[CostRow]:
        """Returns what the samples took since the last call, by source, and forgets it."""
        costs, self.costs = self.costs, defaultdict(Cost)
        return [(source, *_VALUES(own)) for source, own in costs.items()]

    @contextmanager
    def passing(self, batch_index: int) -> Iterator[None]:
        """Marks items of a `with` block as returned before, in the slot `batch_index`."""
        before = self.is_passing, self.batch_index
        self.is_passing, self.batch_index = True, batch_index
        try:
            yield
        finally:
            self.is_passing, self.batch_index = before

    def take_records(self) -> list[SkipRecord]:
        """Returns what was skipped since the last call, and forgets it."""
        records, self.records = self.records, []
        return records


def _end_thread(*_: object) -> None:
    raise SystemExit


@contextmanager
def context_of(context: StreamContext) -> Iterator[StreamContext]:
    """Makes `context` the thread's current one for a `with` block."""
    before, current.context = current.context, context
    try:
        yield context
    finally:
        current.context = before


def replaying() -> AbstractContextManager[StreamContext]:
    """Returns the current context for a `with` block; a scratch context where there is none."""
    return context_of(current.context or StreamContext(Stream(0, 1)))


class Again:
    """Re-creates items of a buffer one by one, each when it is needed.

    A generator hook runs once for all items that it made of one input.

    Args:
        restore: re-creates one item.
        keys: the restore keys of all items of the buffer that may be asked for.
    """

    def __init__(
        self, restore: Callable[[RestoreKey], Any], keys: Iterable[RestoreKey] = ()
    ) -> None:
        self._restore = restore
        self._siblings = Siblings(keys)

    def __call__(self, key: RestoreKey) -> Any:
        """Re-creates the item of a key; the stream is in the same slot afterwards."""
        with replaying() as context:
            before, slot = context.siblings, context.batch_index
            # An outer buffer may be re-creating its items already.
            context.siblings = before or self._siblings
            try:
                return self._restore(key)
            finally:
                context.siblings, context.batch_index = before, slot


def context_or(stream: Stream) -> StreamContext:
    """Returns the current context, or a new one of `stream` where nothing drives the cursor."""
    return current.context or StreamContext(stream)


def current_context() -> StreamContext:
    """Returns the context of the stream that this thread computes.

    Raises:
        RuntimeError: Nothing is being computed.
    """
    context: StreamContext | None = current.context
    if context is None:
        raise RuntimeError(
            "No sample is being processed: this is known only inside a hook that a loader (or a "
            "`for` over a dataset) calls."
        )
    return context


def current_batch_index() -> int:
    """Returns the slot number of the batch being made; the same on any ranks and workers."""
    return current_context().batch_index


def current_sample_index() -> int:
    """Returns the number of the current sample: the stream's draw times streams, plus the stream.

    For a batch hook it is that of the batch's first sample.
    """
    return current_context().current_sample_index()


def sample_rng() -> Generator:
    """Returns a numpy generator of the current sample and hook: the same at every replay.

    It costs about 10 microseconds on first use in a call; a function that uses it for all of its
    randomness needs no `restore_seeds`.
    """
    context = current_context()
    if context.rng is None:
        key = key_of("sample_rng", context.seed, context.restore_key, context.hook)
        words = np.array([key & (2**64 - 1), key >> 64], dtype=np.uint64)
        context.rng = Generator(Philox(key=words))
    return context.rng
