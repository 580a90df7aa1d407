"""Lists of samples that a collector chooses from a buffer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from energon_lite.batching.collector import Collector, OneByOne, Samples
from energon_lite.batching.one_by_one import SelectedPacks
from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.errors import FatalSampleError, StateError
from energon_lite.core.keys import REPEATED, first_leaf, name_of_key, whole
from energon_lite.core.sample_columns import samples_of
from energon_lite.core.stage import Stage
from energon_lite.core.state import RestoreKey, Snapshot
from energon_lite.core.stream_context import (
    Again,
    SkipRecord,
    current_context,
    replaying,
)
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import SKIPPED, describe_input
from energon_lite.stages.key_places import KeyPlaces
from energon_lite.stages.sample_buffer import SampleBuffer

# What a collector gets of a sample, the whole of it or a part: restore key, group, and lengths of
# each resource. What is of one group may share a list.
Unit = tuple[RestoreKey, Any, Sequence[int]]
# Turns the item that a cursor returned last into units; none if it is skipped.
UnitsOf = Callable[[RestoreKey, Any], Iterable[Unit]]

T = TypeVar("T")

_tell_once = cache(logging.getLogger(__name__).warning)
_SMALL_EPOCH = (
    "An epoch of a stream has about %d samples, too few for %d full packs. Use fewer streams "
    "(num_streams) or a smaller batch_size; or join epochs by Packing(buffer_size=)."
)
# Streams with more samples in an epoch are not asked where it ends: no usual buffer is as large.
_MANY_SAMPLES = 1 << 14
# Above this number of groups a snapshot forgets groups that are not needed.
_MANY_GROUPS = 64


class Found(NamedTuple):
    """Units in the order in which they were read.

    Attributes:
        keys: their restore keys.
        groups: their groups.
        lengths: R of each unit, one after the other.
        samples: the sample of each.
    """

    keys: list[RestoreKey]
    groups: list[Any]
    lengths: list[int]
    samples: list[Any]

    def add(self, units: Iterable[Unit], sample: Any) -> None:
        """Adds the units of a sample."""
        for key, group, lengths in units:
            self.keys.append(key)
            self.groups.append(group)
            self.lengths.extend(lengths)
            self.samples.append(sample)


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

    def num_samples(self, stream: Stream) -> int:
        """Counts the samples below, however many lists they make."""
        return self.dataset.num_samples(stream)

    def restore_member(self, restore_key: RestoreKey) -> Any:
        """Re-creates one sample of a list; the whole sample, if the key is that of a part."""
        return self.dataset.restore_sample(whole(restore_key))


def name_of(key: RestoreKey, sample: Any) -> str:
    """Names a sample, also one that was not re-created yet (`SKIPPED`)."""
    return (sample is not SKIPPED and describe_input(sample)[0]) or name_of_key(key)


def count_dropped(key: RestoreKey, sample: Any, why: str, stage: str = "pack") -> None:
    """Counts a sample that a stage skipped on purpose."""
    name, source = name_of(key, sample), str(first_leaf(key)[0])
    current_context().count_skip(SkipRecord(key, name, source, stage, why, True, 1))


class CollectDataset(ListDataset[T]):
    """Lists of samples that a `Collector` chooses from a buffer.

    State: restore keys of the buffered samples; for each of them its number, group and lengths and
        what the collector saves of it; counts; where epochs end, the one that is read. After a
        resume a sample is re-created when it leaves.
    Length: the most lists that there can be: each sample counts as one where nothing else is known.
    Keys: `(kind, slot, key, key, ...)`; that of a part of a sample is
        `("piece", start, stop, key)`, that of a repeated sample `("repeated", number, key)`.

    Args:
        dataset: the samples; they must be replayable, since buffered ones are saved as keys.

    Attributes:
        what: what buffers samples, for the error if they cannot be re-created; "" if none does.
        samples_per_list: samples of a full list; 0 where this depends on the samples.
        most_groups: groups of the samples at most, each of which may end with a list that is not
            full; None if any number.
        drops_lists: whether lists that are not full are dropped.
        num_lengths: R, the resources of a sample.
        keeps_lengths: whether the cursor knows the lengths of the list that it returned last.
        groups_from_start: groups with the numbers 0, 1, ...; others follow as they come.
        joins_epochs: whether the buffer may have samples of several epochs of a stream. If not, and
            an epoch of endless data is over before a list has left, what is buffered makes lists.
        lists_per_batch: of a batch above, of which these lists are a multiple.

    Raises:
        ValueError: Samples below cannot be re-created.
    """

    what: str = ""
    samples_per_list: int = 0
    most_groups: int | None = 1
    drops_lists: bool = False
    num_lengths: int = 1
    keeps_lengths: bool = False
    groups_from_start: Sequence[Any] = ()
    joins_epochs: bool = True
    lists_per_batch: int = 1

    def __init__(
        self, dataset: SavableDataset[Any], worker_config: WorkerConfig | None = None
    ) -> None:
        super().__init__(dataset.nested(), worker_config)
        self.buffers_samples = bool(self.what)
        if self.what and not dataset.can_restore_sample():
            raise ValueError(
                f"{self.what}: samples are buffered, and saved as restore keys; but a hook below "
                "is not marked as repeatable. Put @stateless on encode_sample / preencode_sample / "
                "postencode_sample (with restore_seeds=True, or sample_rng(), if it is random; for "
                "an IterMapDataset stateless_iter_fn=True)."
            )

    def collector(self, stream: Stream, cursor: CollectCursor) -> Collector:
        """Returns what chooses the lists of a stream."""
        raise NotImplementedError

    def units(self, inner: Cursor[Any]) -> UnitsOf:
        """Returns what turns the items of a cursor below into units; by default each is one."""
        return lambda key, _: ((key, None, (1,)),)

    def read(self, inner: Cursor[Any], units_of: UnitsOf, num: int, found: Found) -> bool:
        """Reads `num` items of a cursor, and adds their units to those found.

        Returns:
            Whether the data have ended.
        """
        with suppress(StopIteration):
            while num > 0:
                samples, keys = inner.take(num)
                num -= len(keys)
                for key, sample in zip(keys, samples_of(samples), strict=True):
                    found.add(units_of(key, sample), sample)
        return num > 0

    def group_of(self, key: RestoreKey, sample: Any) -> Any:
        """Returns the group of a sample; asked for after a resume where JSON could not keep it."""
        raise NotImplementedError

    def made(self, keys: list[RestoreKey], samples: Any) -> tuple[RestoreKey, Any]:
        """Returns the restore key of an item and the item, from those of its samples."""
        return (self.kind, current_context().batch_index, *keys), samples

    def cursor(self, stream: Stream) -> Cursor[Any]:
        """Returns a fresh cursor."""
        return CollectCursor(self, stream)

    def num_items(self, stream: Stream) -> int:
        """Counts the lists of a stream's pass at most; of endless data, about those of an epoch."""
        num_samples, size = self.dataset.num_items(stream), max(1, self.samples_per_list)
        if self.endless:
            return stream.part(num_samples / size)
        if self.drops_lists:
            return num_samples // size
        if self.most_groups is None:
            return num_samples
        # Each group may end with a list that is not full.
        return min(num_samples, (num_samples + self.most_groups * (size - 1)) // size)


class CollectCursor(Cursor[Any]):
    """A position among lists; it buffers the samples of those to come."""

    def __init__(self, spec: CollectDataset[Any], stream: Stream) -> None:
        self._spec = spec
        self._stream = stream
        self._inner: Cursor[Any] = spec.dataset.cursor(stream)
        self._units = spec.units(self._inner)
        self.collector = spec.collector(stream, self)
        self._buffer = SampleBuffer(spec.num_lengths, KeyPlaces(spec.dataset, stream))
        self._groups = {group: number for number, group in enumerate(spec.groups_from_start)}
        self._kept: frozenset[int] = frozenset()
        self._num_read = self._num_repeated = 0
        self._has_ended = False
        # What is left of an epoch that is over, and waits for the next; None within an epoch.
        self._rest: SelectedPacks | None = None
        # Samples in an epoch that is looked at; number of its first, epoch of each source's first.
        size = 0 if spec.joins_epochs or not spec.endless else spec.dataset.num_items(stream)
        self._in_epoch = size if 2 * spec.lists_per_batch <= size <= _MANY_SAMPLES else 0
        self._epoch_start, self._epochs = 0, dict[str, Any]()
        self._again = Again(spec.restore_member)
        # The lengths of the samples of the list that `next` returned last, if they are kept.
        self.lengths: list[Sequence[int]] = []

    def __next__(self) -> Any:
        """Returns the next list."""
        collector = self.collector
        cycle = current_context().batch_index // self._stream.num_streams
        while (numbers := self._next_list(cycle)) is None:
            if self._has_ended:
                self.drop(collector.leftover(), "left over at the end of the data")
                raise StopIteration
            if isinstance(collector, OneByOne) and collector.num_wanted == 1 and not self._in_epoch:
                self._read_up_to_list(collector)
            else:
                self._read(collector.num_wanted)
        if self._spec.keeps_lengths:
            self.lengths = self._buffer.rows_of(numbers).lengths.tolist()
        if collector.kept or self._kept:
            keys, samples = self._taken_or_kept(numbers)
        else:
            keys, samples = self._buffer.taken(numbers)
        self.key, item = self._spec.made(keys, self._re_created(keys, samples))
        return item

    def _next_list(self, cycle: int) -> Sequence[int] | None:
        """Returns the samples of the next list; None to read more, or at the end of the data."""
        if self._rest is not None:
            if (numbers := self._rest.next(cycle, True)) is not None:
                return numbers
            # Nothing is left of an epoch: the next one begins.
            waiting = self._rest.leftover()
            self._rest, self._epoch_start, self._epochs = None, waiting[0], {}
            self.collector.add(self._buffer.rows_of(waiting))
        return self.collector.next(cycle, self._has_ended)

    def _end_epoch(self, waiting: Sequence[int]) -> None:
        """Makes lists of all that is buffered, but for samples of the next epoch."""
        lists = [[*numbers] for numbers in iter(lambda: self.collector.next(0, True), None)]
        if len(lists) < self._spec.lists_per_batch:
            _tell_once(_SMALL_EPOCH, self._in_epoch, self._spec.lists_per_batch)
        # A batch above has lists of one epoch, some of which are smaller for that.
        while len(lists) % self._spec.lists_per_batch and len(most := max(lists, key=len)) > 1:
            lists.remove(most)
            lists += [most[::2], most[1::2]]
        self._rest = SelectedPacks(0, lambda *_: ([], []), drops_last=True, packs=lists)
        self._rest.add(self._buffer.rows_of(waiting))

    def _place_of_epoch(self, keys: Sequence[RestoreKey]) -> int | None:
        """Returns where the next epoch begins among samples; None for none."""
        least = max(2 * self._spec.lists_per_batch, self._in_epoch // 2)
        for place, key in enumerate(keys):
            source, epoch = first_leaf(key)[:2]
            num = self._num_read + place - self._epoch_start
            if self._epochs.setdefault(source, epoch) == epoch or num < least:
                continue
            if len(self._buffer.keys) + place == num:
                return place
            # A list has left: the buffer is smaller than an epoch.
            self._epoch_start, self._epochs = self._num_read + place, {source: epoch}
        return None

    def _re_created(self, keys: list[RestoreKey], samples: list[Any]) -> list[Any]:
        """Returns samples, re-created where the buffer has only their restore keys."""
        again, pairs = self._again, zip(keys, samples, strict=True)
        return [again(key) if sample is SKIPPED else sample for key, sample in pairs]

    def _read_up_to_list(self, collector: OneByOne) -> None:
        """Reads samples singly until a list may be complete, or the data end."""
        inner, units, groups, buffer = self._inner, self._units, self._groups, self._buffer
        has_list = False
        while not has_list:
            try:
                sample = next(inner)
            except StopIteration:
                self._has_ended = True
                return
            for key, group, lengths in units(inner.key, sample):
                number, of_group = self._num_read, groups.get(group)
                self._num_read += 1
                if of_group is None:
                    of_group = self._new_group(group)
                buffer.keys[number], buffer.samples[number] = key, sample
                buffer.new.append((number, of_group, lengths, key))
                has_list |= collector.add_one(number, of_group, lengths)

    def _read(self, num: int) -> None:
        """Reads `num` samples, fewer at the end of the data, and adds them to the collector."""
        found = Found([], [], [], [])
        if self._in_epoch:
            num = min(num, max(1, self._epoch_start + self._in_epoch - self._num_read))
        try:
            self._has_ended = self._spec.read(self._inner, self._units, num, found)
        finally:
            if found.keys:
                place = self._place_of_epoch(found.keys) if self._in_epoch else None
                self.add(found, place)

    def _new_group(self, group: Any) -> int:
        """Numbers a group; beyond the last one, since groups in between may be forgotten."""
        number = self._groups[group] = 1 + next(reversed(self._groups.values()), -1)
        return number

    def _forget_groups(self) -> None:
        """Forgets groups of which nothing is buffered: of pictures by shape there are many."""
        used = set(self._buffer.rows_of([*self._buffer.keys]).groups.tolist())
        used.update(self.collector.groups, range(len(self._spec.groups_from_start)))
        for group in [group for group, number in self._groups.items() if number not in used]:
            del self._groups[group]

    def add(self, found: Found, place: int | None = None) -> None:
        """Buffers samples, and adds them to the collector; from `place` on they wait.

        Args:
            found: the samples.
            place: of the first one of the next epoch; None if there is none.
        """
        first, self._num_read = self._num_read, self._num_read + len(found.keys)
        groups: Any = [*map(self._groups.get, found.groups)]
        if None in groups:
            known = self._groups
            groups = [known[g] if g in known else self._new_group(g) for g in found.groups]
        numbers, width = range(first, self._num_read), self._spec.num_lengths
        own_lengths = zip(*[iter(found.lengths)] * width, strict=True)
        units = [*zip(numbers, groups, own_lengths, found.keys, strict=True)]
        self._buffer.add(units, found.samples)
        if isinstance(self.collector, OneByOne):
            for number, group, own, _ in units[:place]:
                self.collector.add_one(number, group, own)
        else:
            lengths = np.array(found.lengths, np.int64).reshape(-1, width)
            rows = Samples(np.array(numbers, np.int64), np.array(groups, np.int64), lengths)
            try:
                refused = self.collector.add(Samples(*(column[:place] for column in rows)))
            except ValueError as error:
                name = name_of(found.keys[-1], found.samples[-1])
                raise FatalSampleError.from_sample_key(name, str(error)) from None
            if refused:
                self.drop(refused, "more of its group than the share of the group takes")
        if place is not None:
            self._end_epoch(numbers[place:])

    def _taken_or_kept(self, numbers: Sequence[int]) -> tuple[list[RestoreKey], list[Any]]:
        """Takes samples of a list out of the buffer, but for those that may be repeated."""
        buffer, kept = self._buffer, frozenset(self.collector.kept)
        keys = [buffer.keys[number if number >= 0 else ~number] for number in numbers]
        samples = [SKIPPED if number < 0 else buffer.samples[number] for number in numbers]
        for i, number in enumerate(numbers):
            if number < 0:
                keys[i] = (REPEATED, self._num_repeated, keys[i])
                self._num_repeated += 1
            elif number in kept:
                buffer.samples[number] = SKIPPED
        buffer.taken([n for n in (*numbers, *self._kept) if n >= 0 and n not in kept])
        self._kept = kept
        return keys, samples

    def buffered(self, numbers: Sequence[int]) -> tuple[list[RestoreKey], list[Any]]:
        """Returns keys and samples of the buffer, re-created where necessary."""
        keys = [self._buffer.keys[number] for number in numbers]
        samples = [self._buffer.samples[number] for number in numbers]
        return keys, self._re_created(keys, samples)

    def replace(self, number: int, sample: Any) -> None:
        """Puts another sample in the place of one in the buffer."""
        self._buffer.samples[number] = sample

    def forget(self, numbers: Iterable[int]) -> None:
        """Takes samples out of the buffer that were counted elsewhere."""
        self._buffer.taken(numbers)

    def drop(self, numbers: Iterable[int], why: str) -> None:
        """Takes samples out of the buffer and counts them as skipped on purpose."""
        for key, sample in zip(*self._buffer.taken(numbers), strict=True):
            count_dropped(key, sample, why, self._spec.name)

    def snapshot(self) -> Snapshot:
        """Returns the position."""
        if len(self._groups) > _MANY_GROUPS:
            self._forget_groups()
        # A group that JSON cannot keep is asked for again.
        groups = tuple(
            (number, group) if _is_plain(group) else (number,)
            for group, number in self._groups.items()
        )
        known = {"read": self._num_read, "repeated": self._num_repeated, "groups": groups}
        known["ended"] = int(self._has_ended)
        state = self.collector.state()
        if self._in_epoch or self._rest:
            known["epoch"] = (self._epoch_start, int(bool(self._rest)), *self._epochs.items())
        if self._rest:
            state = state._replace(unsorted=self._rest.state().unsorted)
        fields: Any = self._buffer.fields(known, state)
        return Snapshot(self._spec.name, fields, (self._inner.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the position of a snapshot."""
        spec = self._spec
        snapshot.expect(spec.name, 1)
        num_read, num_repeated = snapshot.count("read"), snapshot.count("repeated")
        has_ended = bool(snapshot.count("ended"))
        keys, groups, rows, counts = map(snapshot.field, ("keys", "groups", "rows", "counts"))
        collector = spec.collector(self._stream, self)
        width, places = spec.num_lengths + 2, KeyPlaces(spec.dataset, self._stream)
        buffer = SampleBuffer(spec.num_lengths, places)
        start, is_over, *epochs = snapshot.fields.get("epoch", (num_read, 0))
        rest = SelectedPacks(0, lambda *_: ([], []), drops_last=True) if is_over else None
        try:
            width_C = width + (rest or collector).num_columns
            rows = np.array(rows, np.int64).reshape(len(keys), width_C)
            numbers, in_group = rows[:, 0], rows[:, 1]
            is_rising = (np.diff(numbers, prepend=-1, append=num_read) > 0).all()
            if not is_rising or not set(in_group.tolist()) <= {int(entry[0]) for entry in groups}:
                raise ValueError("samples or groups are not numbered as they must be")
            samples = Samples(numbers, in_group, rows[:, 2:width])
            if set(counts) != set(collector.state().counts):
                raise ValueError(f"its counts are {counts!r:.80}")
            num = 0 if rest else len(keys)  # the collector has nothing of the rest
            own = Samples(*(column[:num] for column in samples))
            collector.restore(dict(counts), own, rows[:num, width : width + collector.num_columns])
            if rest:
                rest.restore({}, samples, rows[:, width:])
            for key in keys:
                if not isinstance(key, tuple) or not key:
                    raise ValueError(f"{key!r:.80} is no restore key")
            keys, found = places.restored(keys)
            buffer.restore([*zip(*map(np.ndarray.tolist, samples), keys, strict=True)], found)
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise StateError(
                f"The checkpoint's stage {spec.name!r} is invalid: {error}. Use another one."
            ) from error
        self._inner.restore(snapshot.inner[0])
        self.collector, self._rest = collector, rest
        self._epoch_start, self._epochs = start, dict(epochs)
        self._buffer = buffer
        self._num_read, self._num_repeated, self._has_ended = num_read, num_repeated, has_ended
        self._kept = frozenset(collector.kept)
        self._again = Again(spec.restore_member, keys)
        first = dict(zip(in_group.tolist()[::-1], numbers.tolist()[::-1], strict=True))
        self._groups = {self._loaded(entry, first.get(entry[0])): int(entry[0]) for entry in groups}

    def _loaded(self, entry: tuple[Any, ...], number: int | None) -> Any:
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
