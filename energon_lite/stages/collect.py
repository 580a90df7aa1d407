"""Lists of samples that a collector chooses from a buffer."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from energon_lite.batching.collector import Collector, CollectorState, Samples
from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.errors import FatalSampleError, StateError
from energon_lite.core.keys import GIVEN_AGAIN, whole
from energon_lite.core.stage import Stage
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import Again, current_context, replaying
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED
from energon_lite.stages.buffer_keys import KEY_COLUMNS, KeyRows, KeyTable, compact
from energon_lite.stages.overlong import left_out, name_of


class Unit(NamedTuple):
    """What a collector gets of a sample: the whole of it, or a part.

    Attributes:
        key: restore key of the sample or of the part.
        group: what must be equal in a list.
        lengths: of each resource.
    """

    key: RestoreKey
    group: Any
    lengths: Sequence[int]


T = TypeVar("T")

# Turns the item that a cursor returned last into units; none if it is skipped.
UnitsOf = Callable[[RestoreKey, Any], Iterable[Unit]]

_NO_LENGTHS = (1,)


class ListDataset(Stage[T]):
    """Lists of samples; a `MapDataset` above makes one item of each.

    Attributes:
        kind: what the samples are made into, the first entry of a list's restore key.
    """

    kind: str = "batch"

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Re-creates the samples of a list."""
        if len(restore_key) < 3 or restore_key[0] != self.kind:
            raise ValueError(f"{restore_key!r} is not the restore key of a {self.kind}")
        with replaying() as context:
            context.batch_index = restore_key[1]
            samples: Any = list(map(Again(self.restore_member, restore_key[2:]), restore_key[2:]))
            made: T = samples
            return made

    def restore_member(self, key: RestoreKey) -> Any:
        """Re-creates one sample of a list; the whole sample, if the key is that of a part."""
        return self.dataset.restore_sample(whole(key))


def check_replayable(dataset: SavableDataset[Any], what: str) -> None:
    """Refuses a buffer over samples that cannot be re-created.

    Args:
        dataset: the samples.
        what: what buffers them.

    Raises:
        ValueError: A function below is not marked as repeatable.
    """
    if not dataset.can_restore_sample():
        raise ValueError(
            f"{what}: samples are buffered, and saved as restore keys; but a hook below is not "
            "marked as repeatable. Put @stateless on encode_sample / preencode_sample / "
            "postencode_sample (with restore_seeds=True, or sample_rng(), if it is random; for an "
            "IterMapDataset stateless_iter_fn=True)."
        )


class CollectDataset(ListDataset[T]):
    """Lists of samples that a `Collector` chooses from a buffer.

    State: restore keys of the buffered samples; for each of them its number, group and lengths and
        what the collector saves of it; counts. After a resume a sample is re-created when it
        leaves.
    Length: that below over `samples_per_list`, rounded up.
    Keys: `(kind, slot, key, key, ...)`; that of a part of a sample is
        `("piece", start, stop, key)`, that of a repeated sample `("given again", number, key)`.

    Args:
        dataset: the samples; they must be replayable, since buffered ones are saved as keys.
        name: of the stage, in states and configurations.
        settings: everything that decides which samples share a list.
        what: what buffers samples, for the error if they cannot be re-created; "" if none does.

    Attributes:
        samples_per_list: samples of a list; 1 where this depends on their lengths.
        num_lengths: R, the resources of a sample.

    Raises:
        ValueError: Samples below cannot be re-created.
    """

    samples_per_list: int = 1
    num_lengths: int = 1

    def __init__(
        self, dataset: SavableDataset[Any], name: str, settings: Mapping[str, JSON], what: str
    ) -> None:
        super().__init__(dataset.nested())
        self.stage = name
        self.own_settings = dict(settings)
        self.holds_back = bool(what)
        if what:
            check_replayable(dataset, what)

    def collector(self, stream: Stream, cursor: CollectCursor) -> Collector:
        """Returns what chooses the lists of a stream."""
        raise NotImplementedError

    def units(self, inner: Cursor[Any]) -> UnitsOf:
        """Returns what turns the items of a cursor below into units; by default each is one."""
        return lambda key, _: (Unit(key, None, _NO_LENGTHS),)

    def group_of(self, key: RestoreKey, sample: Any) -> Any:
        """Returns the group of a sample; asked for after a resume where JSON could not keep it."""
        raise NotImplementedError

    def made(self, keys: list[RestoreKey], samples: list[Any]) -> tuple[RestoreKey, Any]:
        """Returns the restore key of an item and the item, from those of its samples."""
        return (self.kind, current_context().batch_index, *keys), samples

    def cursor(self, stream: Stream) -> Cursor[Any]:
        """Returns a fresh cursor."""
        return CollectCursor(self, stream)

    def num_items(self, stream: Stream) -> int:
        """Counts the lists as if all samples were of one group."""
        return -(-self.dataset.num_items(stream) // self.samples_per_list)

    def config(self) -> dict[str, JSON]:
        """Returns the settings."""
        return {"stage": self.stage, **self.own_settings, "of": self.dataset.config()}


class CollectCursor(Cursor[Any]):
    """A position among lists; it buffers the samples of those to come.

    Attributes:
        lengths: of the samples of the list that `next` returned last, of each resource.
    """

    def __init__(self, spec: CollectDataset[Any], stream: Stream) -> None:
        self._spec = spec
        self._stream = stream
        self._inner: Cursor[Any] = spec.dataset.cursor(stream)
        self._units = spec.units(self._inner)
        self._collector = spec.collector(stream, self)
        self._buffer = _Buffer(spec.num_lengths)
        self._groups: dict[Any, int] = {}
        self._kept: frozenset[int] = frozenset()
        self._num_read = self._num_repeated = 0
        self._has_ended = False
        self._again = Again(spec.restore_member)
        self.lengths: list[Sequence[int]] = []

    def __next__(self) -> Any:
        """Returns the next list."""
        collector = self._collector
        cycle = current_context().batch_index // self._stream.num_streams
        while (numbers := collector.next(cycle, self._has_ended)) is None:
            if self._has_ended:
                self.drop(collector.leftover(), "left over at the end of the data")
                raise StopIteration
            self._read(collector.num_wanted)
        self.lengths = [self._buffer.units[n if n >= 0 else ~n][1] for n in numbers]
        keys, samples = self._taken(numbers)
        self.key, item = self._spec.made(keys, self.re_created(keys, samples))
        return item

    def _read(self, num: int) -> None:
        """Reads so many samples, fewer at the end of the data, and adds them to the collector."""
        units: list[tuple[int, Sequence[int]]] = []
        try:
            for _ in range(num):
                sample = next(self._inner)
                for unit in self._units(self._inner.key, sample):
                    group = self._groups.setdefault(unit.group, len(self._groups))
                    self._buffer.add(self._num_read + len(units), unit, group, sample)
                    units.append((group, unit.lengths))
        except StopIteration:
            self._has_ended = True
        finally:
            if units:
                self._add(units)

    def _add(self, units: list[tuple[int, Sequence[int]]]) -> None:
        first, self._num_read = self._num_read, self._num_read + len(units)
        groups, lengths = zip(*units, strict=True)
        try:
            samples = Samples(
                np.arange(first, self._num_read),
                np.array(groups, np.int64),
                np.array(lengths, np.int64),
            )
            refused = self._collector.add(samples)
        except ValueError as error:
            key, sample = self._buffer.get(self._num_read - 1)
            raise FatalSampleError.from_sample_key(name_of(key, sample), str(error)) from None
        if refused:
            self.drop(refused, "more of its group than the share of the group takes")

    def _taken(self, numbers: Sequence[int]) -> tuple[list[RestoreKey], list[Any]]:
        """Takes samples of a list out of the buffer, but for those that may be repeated."""
        kept = frozenset(self._collector.kept)
        keys: list[RestoreKey] = []
        samples: list[Any] = []
        for number in numbers:
            if number >= 0:
                key, sample = (self._buffer.free if number in kept else self._buffer.take)(number)
            else:
                key, sample = (
                    (GIVEN_AGAIN, self._num_repeated, self._buffer.get(~number)[0]),
                    SKIPPED,
                )
                self._num_repeated += 1
            keys.append(key)
            samples.append(sample)
        for number in self._kept - kept:
            self._buffer.take(number)
        self._kept = kept
        return keys, samples

    def re_created(self, keys: Iterable[RestoreKey], samples: Iterable[Any]) -> list[Any]:
        """Returns samples, re-created where that was left for later."""
        again = self._again
        pairs = zip(keys, samples, strict=True)
        return [again(key) if sample is SKIPPED else sample for key, sample in pairs]

    def buffered(self, numbers: Sequence[int]) -> tuple[list[RestoreKey], list[Any]]:
        """Returns keys and samples of the buffer, re-created where necessary."""
        pairs = [self._buffer.get(number) for number in numbers]
        keys = [key for key, _ in pairs]
        samples = self.re_created(keys, (sample for _, sample in pairs))
        return keys, samples

    def replace(self, number: int, sample: Any) -> None:
        """Puts another sample in the place of one in the buffer."""
        self._buffer.samples[number] = sample

    def forget(self, numbers: Iterable[int]) -> None:
        """Takes samples out of the buffer that were counted elsewhere."""
        for number in numbers:
            self._buffer.take(number)

    def drop(self, numbers: Iterable[int], why: str) -> None:
        """Takes samples out of the buffer and counts them as skipped on purpose."""
        for number in numbers:
            key, sample = self._buffer.take(number)
            left_out(key, sample, why, self._spec.stage)

    def snapshot(self) -> Snapshot:
        """Returns the position."""
        counts = {
            "read": self._num_read, "repeated": self._num_repeated, "ended": int(self._has_ended),
        }  # fmt: skip
        # A group that JSON cannot keep is asked for again.
        groups = tuple(
            (number, group) if _is_plain(group) else (number,)
            for group, number in self._groups.items()
        )
        fields: Any = _Fields(counts, groups, *self._buffer.frozen(), self._collector.state())
        return Snapshot(self._spec.stage, fields, (self._inner.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the position of a snapshot."""
        spec = self._spec
        snapshot.expect(spec.stage, 1)
        num_read, num_repeated = snapshot.count("read"), snapshot.count("repeated")
        has_ended = bool(snapshot.count("ended"))
        keys, groups, rows, counts = map(snapshot.field, ("keys", "groups", "rows", "counts"))
        collector = spec.collector(self._stream, self)
        width, buffer = spec.num_lengths + 2, _Buffer(spec.num_lengths)
        try:
            rows = np.array(rows, np.int64).reshape(len(keys), width + collector.num_columns)
            numbers, in_group = rows[:, 0], rows[:, 1]
            is_rising = (np.diff(numbers, prepend=-1, append=num_read) > 0).all()
            if not is_rising or not set(in_group.tolist()) <= {int(entry[0]) for entry in groups}:
                raise ValueError("samples or groups are not numbered as they must be")
            samples = Samples(numbers, in_group, rows[:, 2:width])
            if set(counts) != set(collector.state().counts):
                raise ValueError(f"its counts are {counts!r:.80}")
            collector.restore(dict(counts), samples, rows[:, width:])
            for key, (number, group, *lengths) in zip(keys, rows[:, :width].tolist(), strict=True):
                if not isinstance(key, tuple) or not key:
                    raise ValueError(f"{key!r:.80} is no restore key")
                buffer.add(number, Unit(key, None, lengths), group, SKIPPED)
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise StateError(
                f"The checkpoint's stage {spec.stage!r} is invalid: {error}. Use another one."
            ) from error
        self._inner.restore(snapshot.inner[0])
        self._collector, self._buffer = collector, buffer
        self._num_read, self._num_repeated, self._has_ended = num_read, num_repeated, has_ended
        self._kept = frozenset(collector.kept)
        self._again = Again(spec.restore_member, keys)
        first = dict(zip(in_group.tolist()[::-1], numbers.tolist()[::-1], strict=True))
        self._groups = {self._asked(entry, first.get(entry[0])): int(entry[0]) for entry in groups}

    def _asked(self, entry: tuple[Any, ...], number: int | None) -> Any:
        """Returns the group of an entry of the state; if it has none, that of sample `number`."""
        if len(entry) > 1:
            return entry[1]
        if number is None:
            return object()  # a group of which nothing is buffered
        (key,), (sample,) = self.buffered([number])
        return self._spec.group_of(key, sample)


def _is_plain(group: Any) -> bool:
    if type(group) is tuple:
        return all(map(_is_plain, group))
    return group is None or type(group) in (str, int, bool, float)


class _Buffer:
    """Samples by number, and for each a row: its key, number, group and lengths.

    The rows are one array, so that a snapshot of thousands of samples is one copy.
    """

    def __init__(self, num_lengths: int) -> None:
        self._width = KEY_COLUMNS + 2 + num_lengths
        self._rows = array("q")
        self._numbers: list[int] = []  # of the rows
        self._places: dict[int, int] = {}  # of the numbers
        self._table = KeyTable()
        self.units: dict[int, tuple[RestoreKey, Sequence[int]]] = {}
        self.samples: dict[int, Any] = {}

    def add(self, number: int, unit: Unit, group: int, sample: Any) -> None:
        """Adds a sample or a part of one."""
        self._places[number] = len(self._numbers)
        self._numbers.append(number)
        self.units[number], self.samples[number] = (unit.key, unit.lengths), sample
        self._rows.extend((*self._table.row(unit.key), number, group, *unit.lengths))

    def get(self, number: int) -> tuple[RestoreKey, Any]:
        """Returns key and sample."""
        return self.units[number][0], self.samples[number]

    def free(self, number: int) -> tuple[RestoreKey, Any]:
        """Returns key and sample, and keeps the key only."""
        key, sample = self.get(number)
        self.samples[number] = SKIPPED
        return key, sample

    def take(self, number: int) -> tuple[RestoreKey, Any]:
        """Returns key and sample, and forgets both."""
        place, last = self._places.pop(number), self._numbers.pop()
        rows, start, width = self._rows, place * self._width, self._width
        self._table.forget(rows[start : start + 2])
        if last != number:  # the last row fills the gap
            rows[start : start + width] = rows[-width:]
            self._numbers[place], self._places[last] = last, place
        del rows[-width:]
        return self.units.pop(number)[0], self.samples.pop(number)

    def frozen(self) -> tuple[KeyRows, Any]:
        """Returns the rows, and what their keys mean, as copies."""
        rows = np.frombuffer(self._rows, np.int64).reshape(-1, self._width)
        return self._table.frozen(), compact(rows)


class _Fields(Mapping[str, Any]):
    """The fields of a snapshot, made of arrays when somebody looks at them."""

    def __init__(
        self,
        numbers: dict[str, int],
        groups: tuple[Any, ...],
        table: KeyRows,
        rows: Int64Array,
        state: CollectorState,
    ) -> None:
        self._parts = (numbers, groups, table, rows, state)

    def __getitem__(self, name: str) -> Any:
        numbers, groups, table, rows, state = self._parts
        if name in numbers:
            return numbers[name]
        if name == "groups":
            return groups
        if name == "counts":
            return state.counts
        rows = rows[np.argsort(rows[:, KEY_COLUMNS])]
        if name == "keys":
            return tuple(table.keys(rows[:, :KEY_COLUMNS]))
        if name == "rows":
            columns = state.columns[np.argsort(state.numbers)]
            own = np.concatenate([rows[:, KEY_COLUMNS:], columns], axis=1)
            return tuple(map(tuple, own.tolist()))
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from (*self._parts[0], "groups", "counts", "keys", "rows")

    def __len__(self) -> int:
        return len(self._parts[0]) + 4
