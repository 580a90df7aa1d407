"""Batches of one group, such as a modality, which all streams have at the same step."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle as repeated
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from energon_lite.batching.balance_orders import quantile_sync
from energon_lite.batching.collector import Collector, CollectorState, Samples
from energon_lite.batching.rules import ModalitySplit
from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import key_of
from energon_lite.core.topology import Stream
from energon_lite.order.blending import BlendOrder
from energon_lite.order.schedules import Weights

# Batches of the first window, few, so that the first batch does not wait long; each further window
# has twice as many. After `_NUM_SHORT` windows all have their full size.
_FIRST_WINDOW, _NUM_SHORT = 8, 62
# In place of the number of a batch: the sample waits for a window, or was returned and may be
# repeated.
_WAITING, _RETURNED = -1, -2


class GroupSchedule:
    """Chooses the group of each cycle of a run: the same for all streams, so for all ranks.

    Every interval from the start is within 5 of each group's share.

    Args:
        shares: of the groups, not all 0.
        seed: of the run.
        pass_index: number of the pass over finite data.

    Example:
        >>> schedule = GroupSchedule([3, 1], seed=0)
        >>> sum(schedule.group(cycle) for cycle in range(400))
        101
    """

    def __init__(self, shares: Sequence[float], seed: int, pass_index: int = 0) -> None:
        # One stream stands for all: its order is that of the run.
        self._order = BlendOrder(
            Weights([float(share) for share in shares]),
            "exact",
            key_of("group_schedule", seed),
            Stream(0, 1, pass_index),
        )

    def group(self, cycle: int) -> int:
        """Returns the number of the group that a cycle has."""
        return int(self._order.block(cycle, 1)[0])


class Groups(NamedTuple):
    """The groups of a run.

    Attributes:
        names: of the groups, by their numbers.
        shares: of the batches, one for each group.
    """

    names: Sequence[Any]
    shares: Sequence[float]


class ModalityCollector(Collector):
    """Returns batches of the group that a cycle has, of similar lengths in all streams.

    Samples of each group are sorted by length, window by window, and cut into batches, which come
    in an order of places that is the same in all streams. The next window is read at the same pace
    as the current one is returned. At the end of the data other groups stand in for one that has no
    sample left.

    Columns: the number of the sample's batch among those to come, `_WAITING` or `_RETURNED`; and
    its place there.

    Args:
        split: windows, and what becomes of the rest at the end of the data.
        groups: their names and shares; a sample's group is a place in them.
        batch_size: samples of a batch.
        seed: of the run.
        stream: the stream.
        is_endless: whether the data have no end, where a batch would have to be filled up.
    """

    num_columns = 2

    def __init__(
        self,
        split: ModalitySplit,
        groups: Groups,
        batch_size: int,
        seed: int,
        stream: Stream,
        is_endless: bool = False,
    ) -> None:
        self._split = split
        self._names, self._shares = groups
        self._batch_size = batch_size
        self._stream = stream.index
        self._fills_up = split.end == "pad" and not is_endless
        self._schedule = GroupSchedule(self._shares, seed, stream.pass_index)
        key = key_of("modality_batch", seed, stream.num_streams, stream.pass_index)
        rooms = split.surplus_limits(self._shares, batch_size)
        self._groups = [
            _GroupWindows(batch_size, split.longest_first, window, room, key_of(key, number))
            for number, (window, room) in enumerate(
                zip(split.windows(self._shares), rooms, strict=True)
            )
        ]
        self._num_missing = 1

    @property
    def kept(self) -> set[int]:  # type: ignore[override]
        """Samples of the last batch of each group, where others may have to be filled up."""
        return {number for group in self._groups for number in group.returned}

    @property
    def num_wanted(self) -> int:
        """Samples that the group of the current cycle lacks."""
        return self._num_missing

    def add(self, samples: Samples) -> Sequence[int]:
        """Puts samples into the windows of their groups.

        Returns:
            Samples of groups of which more come than their shares take.

        Raises:
            ValueError: Too large a part of a group's samples is such a surplus.
        """
        surplus: list[int] = []
        columns = (samples.numbers, samples.groups, samples.lengths[:, 0])
        for number, index, length in zip(*(column.tolist() for column in columns), strict=True):
            group = self._groups[index]
            if not group.add(number, length):
                surplus.append(number)
                if group.num_surplus > self._split.max_surplus * group.num_seen:
                    raise ValueError(self._too_many(index))
        return surplus

    def _too_many(self, number: int) -> str:
        group, counts = self._groups[number], [each.num_seen for each in self._groups]
        seen, shares = (
            {name: round(part / sum(all_), 4) for name, part in zip(self._names, all_, strict=True)}
            for all_ in (counts, self._shares)
        )
        return (
            f"stream {self._stream} buffers {group.num_buffered:,} samples of group "
            f"{self._names[number]!r} that its share does not take: shares={shares!r:.200}, but of "
            f"the {sum(counts):,} samples up to here {seen!r:.200}. Give the shares that the data "
            f"have; or resume from the last checkpoint with a max_surplus above "
            f"{self._split.max_surplus}, the part of a group's samples that may be dropped"
        )

    def next(self, cycle: int, has_ended: bool) -> Sequence[int] | None:
        """Returns a batch of the cycle's group; at the end of the data maybe of another."""
        due = self._groups[self._schedule.group(cycle)]
        self._num_missing = max(1, due.num_missing)
        if due.num_missing > 0 and not has_ended:
            return None
        drops = self._split.end == "drop"
        candidates = [due] if due.num_buffered or (drops and due.num_seen) else []
        if has_ended:
            candidates += [group for group in self._groups if group.num_buffered]
        for group in candidates:
            if batch := group.take():
                return self._returned(group, batch)
            if not drops:
                return self._returned(group, self._filled_up(group))
            if group is due:
                break
        return None

    def _returned(self, group: _GroupWindows, batch: list[int]) -> list[int]:
        if self._fills_up:
            group.returned = list(dict.fromkeys(n if n >= 0 else ~n for n in batch))
        return batch

    def _filled_up(self, group: _GroupWindows) -> list[int]:
        """Takes the rest of a group; adds samples of its last batch, or of the rest itself."""
        rest = group.take_waiting()
        num_missing = (self._batch_size - len(rest)) * self._fills_up
        return rest + [~n for n in islice(repeated(group.returned or list(rest)), num_missing)]

    def leftover(self) -> Sequence[int]:
        """Returns the samples that are in no batch at the end of the data."""
        rest: list[int] = []
        for group in self._groups:
            rest += group.batches.ravel().tolist()
            group.batches = group.batches[:0]
            rest += group.take_waiting()
        return rest

    def state(self) -> CollectorState:
        """Returns the samples with their batches, and counts of each group."""
        rows = [group.rows() for group in self._groups]
        counts = tuple((g.num_windows, g.num_seen, g.num_surplus) for g in self._groups)
        return CollectorState({"groups": counts}, partial(np.concatenate, rows))

    def restore(self, counts: Mapping[str, Any], samples: Samples, columns_NC: Int64Array) -> None:
        """Resumes from a state.

        Raises:
            ValueError: It has other groups, counts that cannot be, or more batches than a window.
        """
        for number, (group, own) in enumerate(zip(self._groups, counts["groups"], strict=True)):
            is_own = samples.groups == number
            rows = np.column_stack([samples.numbers, columns_NC, samples.lengths[:, 0]])[is_own]
            group.restore(own, rows)


class _GroupWindows:
    """The windows of one group in one stream.

    Args:
        batch_size: samples of a batch.
        longest_first: whether the first window is returned from long to short.
        window: batches of a window, when all have been read ahead.
        room: samples that may wait; more are a surplus.
        key: the same in all streams.

    Attributes:
        num_windows: windows begun.
        num_seen: samples added.
        num_surplus: of them, those that were not taken.
        batches: shape (B, batch_size); the rest of the last window.
        returned: samples of the last batch that was returned, if they may have to be repeated.
    """

    def __init__(
        self, batch_size: int, longest_first: bool, window: int, room: int, key: int
    ) -> None:
        self._batch_size = batch_size
        self._longest_first = longest_first
        self._window = window
        self._room = room
        self._key = key
        self.num_windows = self.num_seen = self.num_surplus = 0
        self.batches: Int64Array = np.empty((0, batch_size), np.int64)
        self.returned: list[int] = []
        self._waiting, self._lengths = array("q"), array("q")

    @property
    def num_buffered(self) -> int:
        """Samples that were not returned yet."""
        return len(self._waiting) + self.batches.size

    def _size(self, number: int) -> int:
        """Returns the batches of a window, by its number."""
        if self._longest_first or number > _NUM_SHORT:
            return self._window
        return min(self._window, _FIRST_WINDOW << number)

    @property
    def num_missing(self) -> int:
        """Returns how many more samples are to wait before the next batch is returned.

        Example:
            A window of 4 batches of 10 follows one of 2. When the second of the 2 is returned, 20
            wait; the others are read when the window of 4 begins.
        """
        num_due = size = self._size(self.num_windows)
        if len(self.batches):
            last = self._size(self.num_windows - 1)
            num_due = -(-(last - len(self.batches)) * size // last)
        return num_due * self._batch_size - len(self._waiting)

    def add(self, number: int, length: int) -> bool:
        """Adds a sample; returns whether there is room for it."""
        self.num_seen += 1
        if len(self._waiting) >= self._room:
            self.num_surplus += 1
            return False
        self._waiting.append(number)
        self._lengths.append(length)
        return True

    def take(self) -> list[int]:
        """Takes the next batch of the window, or of the next one; nothing if no batch is full."""
        if not len(self.batches):
            self._begin_window()
        batch: list[int] = self.batches[0].tolist() if len(self.batches) else []
        self.batches = self.batches[1:]
        return batch

    def _begin_window(self) -> None:
        """Sorts the next window by length, as far as it makes whole batches, and cuts it."""
        size, step = self._size(self.num_windows), self._batch_size
        num_batches = min(size, len(self._waiting) // step)
        if not num_batches:
            return
        # The first that came; samples that fill no batch wait for the next window.
        num = num_batches * step
        places = quantile_sync(np.arange(num_batches), size, self._key, self.num_windows)
        if self._longest_first and not self.num_windows:
            places = np.arange(num_batches)[::-1]
        order = np.argsort(self._lengths[:num], kind="stable").reshape(num_batches, step)[places]
        self.batches = np.array(self._waiting[:num])[order]
        del self._waiting[:num], self._lengths[:num]
        self.num_windows += 1

    def take_waiting(self) -> list[int]:
        """Takes the samples that are in no window."""
        rest = self._waiting.tolist()
        self._waiting, self._lengths = array("q"), array("q")
        return rest

    def rows(self) -> Int64Array:
        """Returns number, batch and place of each sample; shape (N, 3)."""
        parts = (self.batches.ravel(), self.returned, self._waiting)
        numbers = np.concatenate([np.array(part, np.int64) for part in parts])
        batches, places = np.divmod(np.arange(len(numbers)), self._batch_size)
        num = self.batches.size
        batches[num : num + len(self.returned)] = _RETURNED
        batches[num + len(self.returned) :] = _WAITING
        return np.column_stack([numbers, batches, places])

    def restore(self, counts: Any, rows_N4: Int64Array) -> None:
        """Resumes from a state: counts, and of each sample number, batch, place and length.

        Raises:
            ValueError: The counts cannot be, or there are more batches than a window has.
        """
        num_windows, num_seen, num_surplus = map(int, counts)
        if not 0 <= num_surplus <= num_seen or num_windows < 0:
            raise ValueError(f"{counts!r:.80} are no counts of windows, samples and surplus")
        self.num_windows, self.num_seen, self.num_surplus = num_windows, num_seen, num_surplus
        rows_N4 = rows_N4[np.lexsort(rows_N4[:, [0, 2, 1]].T)]
        numbers, batches, _, lengths = rows_N4.T
        self.returned = numbers[batches == _RETURNED].tolist()
        found, batch_of, sizes = np.unique(batches, return_inverse=True, return_counts=True)
        most = self._size(num_windows - 1) if num_windows else 0
        if (found >= 0).sum() > most or (sizes[found >= 0] > self._batch_size).any():
            raise ValueError(f"window {num_windows} has too many or too large batches")
        # Batches may lack samples of a source that was taken out of the run; the others wait.
        is_full = (batches >= 0) & (sizes == self._batch_size)[batch_of]
        self.batches = numbers[is_full].reshape(-1, self._batch_size)
        is_waiting = ~is_full & (batches != _RETURNED)
        order = np.argsort(numbers[is_waiting])
        self._waiting = array("q", numbers[is_waiting][order].tolist())
        self._lengths = array("q", lengths[is_waiting][order].tolist())
