"""The order of one source: position in a stream -> (epoch, sample index).

`EpochOrder` permutes an epoch in slices, `ShuffledDealing` and `BlockDealing` share it among the
streams, `WindowShuffle` is the shuffle buffer of a stream. All of it is arithmetic on integers, so
any position can be computed alone, and an epoch of any size takes no memory.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import key_of, random_words
from energon_lite.core.topology import NO_GROUPS, NodeGroups, Stream
from energon_lite.order.permutation import TABLE_LIMIT, Permutation

WITH_REPLACEMENT = -1
# Slices that are sorted for one look-up, which takes some milliseconds.
_SORTED = 1 << 16


class Segment(NamedTuple):
    """Positions of a stream within which a window may shuffle.

    `stop` is None for a segment without end.
    """

    number: int
    start: int
    stop: int | None

    @property
    def length(self) -> int | None:
        """The number of its positions."""
        return None if self.stop is None else self.stop - self.start


def _before(total: int, turn: int, num: int) -> int:
    """Sums (total + t) // num over t = 0..turn-1, in closed form.

    Example:
        num 4, turn 3, total 6: 6//4 + 7//4 + 8//4 = 4 = 3 * 1 + 1, since only t = 2 carries.
    """
    quotient, rest = divmod(total, num)
    return turn * quotient + max(0, turn + rest - num)


@dataclass(frozen=True, eq=False)
class ShuffledDealing:
    """Runs of consecutive places of a shuffled epoch, a new one in every epoch.

    Every sample is in one run per epoch. The runs' lengths differ by at most one and follow each
    other without a gap. Where S does not divide N they move from epoch to epoch, so that a source
    with fewer samples than streams serves each stream equally often; which samples lie at those
    places changes in every epoch.

    Where there are groups, an epoch is dealt to these, and the places of a group to its streams.
    The lengths of the runs are the same: `((x + g) // G + t) // (S / G)` is `(x + t * G + g) // S`.

    Args:
        num_places: N, places of an epoch.
        stream: the stream s of S.
        shift: a hash of the source, so that small sources do not all start at stream 0.
        nodes: the groups; with one, the places of a group are those of the epoch.
    """

    num_places: int
    stream: Stream
    shift: int
    nodes: NodeGroups = NO_GROUPS

    @cached_property
    def turn(self) -> int:
        """The stream's place among the runs of an epoch."""
        return (self.nodes.place_of(self.stream) + self.shift) % self.stream.num_streams

    @property
    def group(self) -> int:
        """The place of the stream's group among those of an epoch."""
        return self.turn % self.nodes.num_groups

    def begin(self, epoch: int) -> int:
        """Counts the places of the stream's group before an epoch."""
        return (epoch * self.num_places + self.group) // self.nodes.num_groups

    def first(self, epoch: int) -> int:
        """Counts the positions of this stream before an epoch."""
        return (epoch * self.num_places + self.turn) // self.stream.num_streams

    def places(self, number: int, positions: Int64Array) -> Int64Array:
        """Returns the places in an epoch, of the group, of positions, shape (N,), of its run."""
        num_groups = self.nodes.num_groups
        own = self.turn // num_groups, self.stream.num_streams // num_groups
        ends = _before(self.begin(number + 1), *own), _before(self.begin(number), *own)
        return positions + (ends[0] - ends[1])

    def segment(self, position: int) -> Segment:
        """Returns the run, numbered by its epoch, that a position lies in."""
        last = (position + 1) * self.stream.num_streams - self.turn
        epoch = -(-last // self.num_places) - 1
        return Segment(epoch, self.first(epoch), self.first(epoch + 1))

    @property
    def pass_range(self) -> tuple[int, int]:
        """The first position of the stream's pass, an epoch, and the position after the last."""
        return self.first(self.stream.pass_index), self.first(self.stream.pass_index + 1)


@dataclass(frozen=True, eq=False)
class BlockDealing:
    """Blocks of one batch, stream by stream, in file order.

    The endless line of epochs is dealt so that slots read in order give the file order.

    Args:
        num_samples: n, samples of the source.
        stream: the stream s of S.
        block: samples of a block.
        endless: whether epochs follow each other without a cut.
    """

    num_samples: int
    stream: Stream
    block: int
    endless: bool

    def places(self, number: int, positions: Int64Array) -> Int64Array:
        """Returns the places in the endless line of epochs of positions, shape (N,), of a pass."""
        del number
        blocks, offsets = np.divmod(positions, self.block)
        return (blocks * self.stream.num_streams + self.stream.index) * self.block + offsets

    def segment(self, position: int) -> Segment:
        """Returns the whole stream of a pass: file order has no epochs to keep apart."""
        del position
        return Segment(self.stream.pass_index, 0, None if self.endless else self.pass_range[1])

    @property
    def pass_range(self) -> tuple[int, int]:
        """The first position of a pass, and the position after the last; equal in all passes."""
        num_blocks = -(-self.num_samples // self.block)
        own, rest = divmod(num_blocks, self.stream.num_streams)
        own += self.stream.index < rest
        is_last = (num_blocks - 1) % self.stream.num_streams == self.stream.index
        missing = num_blocks * self.block - self.num_samples
        return 0, own * self.block - (missing if is_last and own else 0)


@dataclass(eq=False)
class EpochOrder:
    """The shuffled order of a source's epochs: place -> sample index.

    An epoch is a line of places 0..N-1. It is cut into slices of `slice_length` consecutive samples
    (the last one may be shorter); the slices lie in a random order, and groups of `interleave`
    slices that follow each other are dealt sample by sample.

    Args:
        num_samples: samples of the source.
        slice_length: samples that stay together, in file order.
        interleave: slices that are read side by side.
        multiplier: 1 permutes each epoch; m > 1 permutes m copies as one epoch; -1 draws slices
            with replacement.
        key: of seed and source.

    Attributes:
        num_places: places of one epoch.
        reach: places of which the order is found in some milliseconds, at least an epoch.
    """

    num_samples: int
    slice_length: int
    interleave: int
    multiplier: int
    key: int
    # Of the last epochs, as streams are not all in the same one: the slot of the short slice, and
    # the order of the others.
    _layouts: dict[int, tuple[int, Permutation]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Counts places and slices."""
        is_drawn = self.multiplier == WITH_REPLACEMENT
        self.num_places = self.num_samples * (1 if is_drawn else self.multiplier)
        self._num_slices = -(-self.num_places // self.slice_length)
        is_sorted = self._num_slices <= TABLE_LIMIT and not is_drawn
        self.reach = self.num_places * max(1, _SORTED // (self._num_slices if is_sorted else 1))

    def samples(self, epoch: int, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns what lies at `places`, shape (N,), of an epoch.

        Returns:
            Epoch labels and sample indices, both (N,): together they are unique in a run. A label
            is the epoch; the copy, for a multiplier above 1; the slice drawn, with replacement.
        """
        if self.multiplier == WITH_REPLACEMENT:
            slots, offsets = self._slots(places, self._num_slices - 1)
            # Each slot has one word; the words of neighbouring places lie close together.
            skip = int(slots.min()) // 4 * 4
            words = random_words(self.key, epoch, size=int(slots.max()) + 1 - skip, skip=skip)
            starts = (words % np.uint64(self.num_samples)).astype(np.int64)
            labels = epoch * self._num_slices + slots
            return labels, (starts[slots - skip] + offsets) % self.num_samples
        if self.slice_length == 1:
            # Slices of one sample: nothing is cut short, and interleaving them changes nothing.
            copies, indices = np.divmod(self._slices(epoch)[1](places), self.num_samples)
            return epoch * self.multiplier + copies, indices
        short, permutation = self._slices(epoch)
        slots, offsets = self._slots(places, short)
        # The short slice is the last one of the data; the others are permuted around its place.
        full = np.minimum(slots - (slots > short), permutation.n - 1)
        slices = np.where(slots == short, self._num_slices - 1, permutation(full))
        copies, indices = np.divmod(slices * self.slice_length + offsets, self.num_samples)
        return epoch * self.multiplier + copies, indices

    def _slices(self, epoch: int) -> tuple[int, Permutation]:
        """Returns the slot of the short slice, and the order of the others (of all of length 1)."""
        known = self._layouts
        if epoch not in known:
            short, others = -1, self._num_slices
            if self.slice_length > 1:
                short = int(random_words(self.key, epoch, 1, size=1)[0]) % self._num_slices
                others = max(1, self._num_slices - 1)
            own = short, Permutation(others, self.key, epoch)
            # A new one: other threads may use that of before.
            num_kept = max(1, min(8, 2 * TABLE_LIMIT // self._num_slices) - 1)
            known = self._layouts = {**dict([*known.items()][-num_kept:]), epoch: own}
        return known[epoch]

    def _slots(self, places: Int64Array, short: int) -> tuple[Int64Array, Int64Array]:
        """Returns slot (position among the slices) and offset in the slice for each place.

        Example:
            Slices of 3 read 2 side by side, short slot 1 of length 2: places 0..4 are
            (slot, offset) = (0, 0) (1, 0) (0, 1) (1, 1) (0, 2).
        """
        length, width, num_slots = self.slice_length, self.interleave, self._num_slices
        missing = num_slots * length - self.num_places
        group_size = length * width
        # Every group before the short one is whole, so division finds it; after it the places are
        # moved back by what the short slice lacks.
        short_group = short // width
        slots_there = min(width, num_slots - short_group * width)
        short_start = short_group * group_size
        short_stop = short_start + slots_there * length - missing
        after = places >= short_stop
        groups = (places + after * missing) // group_size
        within = places - groups * group_size + after * missing
        widths = np.minimum(width, num_slots - groups * width)
        offsets, lanes = np.divmod(within, widths)
        in_short = groups == short_group
        lead = (length - missing) * slots_there
        late = in_short & (within >= lead)
        if slots_there > 1 and late.any():
            # Past the end of the short slice its group is one slot narrower.
            late_offsets, late_lanes = np.divmod(within[late] - lead, slots_there - 1)
            offsets[late] = length - missing + late_offsets
            lanes[late] = late_lanes + (late_lanes >= short - short_group * width)
        return groups * width + lanes, offsets


@dataclass(eq=False)
class GroupOrder:
    """The shuffled order of the epochs of a group: place -> sample index; as `EpochOrder`.

    Chunks of the data are put into one random order, for all epochs, of which each group has an
    interval. Where G does not divide the number of samples, its ends move by one sample from epoch
    to epoch, so that all groups have equally many in the long run, also of a source with fewer
    samples than groups. Each epoch permutes the slices of an interval again.

    Args:
        num_samples: N, samples of the source.
        slice_length: as in `EpochOrder`.
        interleave: as in `EpochOrder`.
        multiplier: copies of the interval that are permuted as one epoch.
        key: of seed and source.
        chunk_length: samples that are in one group, but at its ends: a multiple of `slice_length`.
        group: the place of the group, g of G.
        num_groups: G.

    Attributes:
        num_places: places of one epoch of all groups together.
        reach: as in `EpochOrder`, of all groups together.
    """

    num_samples: int
    slice_length: int
    interleave: int
    multiplier: int
    key: int
    chunk_length: int
    group: int
    num_groups: int

    def __post_init__(self) -> None:
        """Permutes the chunks; a shorter one stays the last."""
        self.num_places = self.num_samples * self.multiplier
        self._num_full = self.num_samples // self.chunk_length
        self._chunks = Permutation(max(1, self._num_full), self.key, self.num_groups, 3)
        # The groups lie on the line so that those with one sample more are spread evenly: then no
        # end moves by more than one. Group g is the j-th for g = j * N mod G, where these differ.
        common = gcd(self.num_samples, self.num_groups)
        period = self.num_groups // common
        turn, block = divmod(self.group, common)
        self._line_place = (
            block * period + turn * pow(self.num_samples // common, -1, period) % period
        )
        self._orders: dict[int, EpochOrder] = {}
        self.reach = self.num_groups * self._order(-(-self.num_places // self.num_groups)).reach

    def _order(self, size: int) -> EpochOrder:
        """Returns the order of an epoch by its number of places of the group; two numbers occur."""
        key = key_of("group", self.key, self.group)
        about = size, self.slice_length, self.interleave, 1, key
        return self._orders.get(size) or self._orders.setdefault(size, EpochOrder(*about))

    def samples(self, epoch: int, places: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns what lies at `places`, shape (N,), of the group's part of an epoch."""
        n, turn, num = self.num_samples, self.group, self.num_groups
        # Places of all copies before the epoch; from here on they are counted modulo G.
        begin = epoch * self.num_places % num
        first = (begin + turn) // num
        size = (begin + self.num_places + turn) // num - first
        places = self._order(size).samples(epoch, places)[1] + first
        # The copy that each lies in; where the group begins in it, and how many places it has.
        copies = ((places + 1) * num - begin - turn - 1) // n
        before = begin + copies * n
        starts = (before + self._line_place * n) // num - before // num
        begins, ends = (before + turn) // num, (before + n + turn) // num
        # The interval is turned, so that its slices begin where those of the data begin.
        turned = places - begins - starts % -self.slice_length
        chunks, offsets = np.divmod(starts + turned % (ends - begins), self.chunk_length)
        full = self._chunks(np.minimum(chunks, self._chunks.n - 1))
        chunks = np.where(chunks < self._num_full, full, chunks)
        return epoch * self.multiplier + copies, chunks * self.chunk_length + offsets


# All streams of a source, or of a group, have the same one.
_epochs: WeakValueDictionary[tuple[int, ...], EpochOrder | GroupOrder] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class WindowShuffle:
    """The shuffle buffer as arithmetic: a bijection of a stream's positions, segment by segment.

    Positions are permuted in windows, twice, half a window apart. After the first round a sample
    has moved inside its window; after the second, neighbours across the windows' borders have mixed
    too. Each sample moves by less than one and a half windows. A window of any size costs nothing
    but its own permutation.

    Args:
        window: samples of a window; 0 and 1 leave the order as it is.
        key: of seed, source and stream.
    """

    window: int
    key: int
    # The tables of the windows that the last call needed, for rounds 1 and 2; and the permutations
    # of windows that are too large for them, by segment and window.
    _tables: dict[int, tuple[tuple[Any, ...], Int64Array]] = field(default_factory=dict, init=False)
    _large: dict[int, dict[tuple[int, int], Permutation]] = field(default_factory=dict, init=False)

    def __call__(self, segment: Segment, positions: Int64Array) -> Int64Array:
        """Returns where the samples at `positions`, ascending, come from; all from its start on."""
        if self.window <= 1 or segment.length == 1:
            return positions
        # Round 2 first: it maps a position to the place of round 1 that comes out there.
        moved = self._round(2, segment, positions, self.window // 2)
        return self._round(1, segment, moved, 0)

    def _round(self, number: int, segment: Segment, local: Int64Array, shift: int) -> Int64Array:
        """Permutes within windows that begin at multiples of the window, less `shift`."""
        windows = (local + shift) // self.window
        first, last = int(windows.min()), int(windows.max())
        edges = np.clip(np.arange(first, last + 2) * self.window - shift, 0, segment.length)
        lows = edges[windows - first]
        if self.window <= TABLE_LIMIT:
            table = self._table(number, segment, first, edges)
            moved: Int64Array = lows + table[windows - first, local - lows]
            return moved
        # A piece of such a window, at the border of a segment, may be small, and have a table.
        known, result = self._large.get(number, {}), np.empty_like(local)
        used = self._large[number] = {}
        for window, size in enumerate(np.diff(edges).tolist(), first):
            name = segment.number, window
            own = known.get(name) or Permutation(size, self.key, *name, number)
            used[name], chosen = own, windows == window
            result[chosen] = lows[chosen] + own(local[chosen] - lows[chosen])
        return result

    def _table(self, number: int, segment: Segment, first: int, edges: Int64Array) -> Int64Array:
        """Returns a permutation of each window's size in a row; shape (windows, window)."""
        name = (segment.number, first, *edges[[0, -1]].tolist())
        found = self._tables.get(number)
        if found is None or found[0] != name:
            # Each window has its own words, so that it can be computed alone.
            longest = min(self.window, segment.length or self.window)
            width = -(-longest // 4) * 4
            rows = len(edges) - 1
            words = random_words(
                self.key, segment.number, number, size=rows * width, skip=first * width
            ).reshape(rows, width)[:, :longest]
            # What lies behind the end of a shorter window sorts behind it.
            words[np.arange(longest) >= np.diff(edges)[:, None]] = np.iinfo(np.uint64).max
            table = np.argsort(words, axis=1, kind="stable")
            # Places within a window, below TABLE_LIMIT; they are only added to int64.
            found = (name, table.astype(np.int32))
            self._tables[number] = found
        return found[1]


@dataclass(frozen=True)
class SourceOrder:
    """Settings of the order of a source; see `docs/reference/order.md` for what each does.

    Args:
        source: the source's id.
        num_samples: samples of the source.
        seed: the run's seed.
        endless: whether epoch follows epoch, or a pass ends after one.
        multiplier: `shuffle_over_epochs_multiplier`; None keeps the file order.
        max_slice: `max_samples_per_sequence`, or the mean size of a shard.
        interleave: `parallel_shard_iters`, slices that are read side by side.
        window: `shuffle_buffer_size` of each stream; 0 for none.
        block: samples dealt to a stream at a time in file order, one batch.
        first: index of the first sample, where the source is a range of a longer one.
        pass_samples: samples of a finite pass, if not all of them once. Each pass continues where
            the last one ended: 7 of 5 samples are all five and two more, then the other three and
            four of the next epoch.
        nodes: groups of streams whose samples stay the same in all epochs. File order has none.
    """

    source: str
    num_samples: int
    seed: int
    endless: bool
    multiplier: int | None = 1
    max_slice: int = 1
    interleave: int = 1
    window: int = 0
    block: int = 1
    first: int = 0
    pass_samples: int | None = None
    nodes: NodeGroups = NO_GROUPS

    def __post_init__(self) -> None:
        """Refuses groups where samples are drawn from all of the data."""
        if self.multiplier == WITH_REPLACEMENT and self.nodes.num_groups > 1:
            raise ValueError(
                f"node_groups={self.nodes.num_groups} cannot keep the samples of a machine where "
                "shuffle_over_epochs_multiplier=-1 draws slices from all of them; set one of the "
                "two to 1"
            )

    def stream(self, stream: Stream) -> StreamOrder:
        """Returns the order of one stream."""
        return StreamOrder(self, stream)

    def slice_length(self, num_streams: int) -> int:
        """Returns how many samples stay together; in file order, all of an epoch."""
        if self.multiplier is None:
            return self.num_samples
        # A stream's share should hold as many slices as are read side by side.
        share = self.num_samples // (num_streams * self.interleave)
        return max(1, min(self.max_slice, share))


@lru_cache(1 << 14)
def _keys_of(seed: int, source: str) -> tuple[int, int]:
    """Returns the keys of slices and of dealing, which all streams have in common."""
    return key_of("slices", seed, source), key_of("deal", source)


class StreamOrder:
    """The order of one stream of a source; positions count from 0 at the start of a pass.

    Attributes:
        length: positions of the pass; None if it is endless.
        reach: positions beyond which a look-up may find the order of samples that are never used.
    """

    def __init__(self, order: SourceOrder, stream: Stream) -> None:
        self._order = order
        self._epochs: EpochOrder | GroupOrder | None = None
        self.reach = sys.maxsize
        self._dealing: ShuffledDealing | BlockDealing
        self._per_pass = order.pass_samples or order.num_samples
        window = order.window
        if order.multiplier is None:
            num_blocks = -(-self._per_pass // order.block)
            dealt = stream if order.endless else _rotated(stream, num_blocks)
            self._dealing = BlockDealing(self._per_pass, dealt, order.block, order.endless)
        else:
            slice_length = order.slice_length(stream.num_streams)
            key, shift = _keys_of(order.seed, order.source)
            about: tuple[int, ...] = (
                order.num_samples, slice_length, order.interleave, order.multiplier, key
            )  # fmt: skip
            self._per_pass = order.pass_samples or order.num_samples * abs(order.multiplier)
            # One stream is asked for to count what all have.
            nodes = order.nodes if stream.num_streams > 1 else NO_GROUPS
            self._dealing = dealing = ShuffledDealing(self._per_pass, stream, shift, nodes)
            make: Callable[..., EpochOrder | GroupOrder] = EpochOrder
            if nodes.num_groups > 1:
                num_groups, make = nodes.num_groups, GroupOrder
                share = min(order.max_slice, order.num_samples // (num_groups * order.interleave))
                chunk = max(1, share // slice_length) * slice_length
                about = *about, chunk, dealing.group, num_groups
            self._epochs = _epochs.get(about) or _epochs.setdefault(about, make(*about))
            self.reach = max(1, self._epochs.reach // stream.num_streams)
            if slice_length == 1:
                window = 0  # the epoch is a permutation of single samples already
        key = 0
        if window > 1:
            key = key_of("window", order.seed, order.source, stream.num_streams, stream.index)
        self._shuffle = WindowShuffle(window, key)
        self._start, stop = (0, None) if order.endless else self._dealing.pass_range
        self.length = None if stop is None else stop - self._start

    def block(self, position: int, count: int) -> tuple[Int64Array, Int64Array]:
        """Returns epochs and sample indices, both (N,), of up to `count` positions.

        Fewer come back only where the pass ends.
        """
        if self.length is not None:
            count = min(count, self.length - position)
        if count <= 0:
            none = np.empty(0, dtype=np.int64)
            return none, none
        parts = []
        at, end = position + self._start, position + self._start + count
        while at < end:
            segment = self._dealing.segment(at)
            stop = end if segment.stop is None else min(end, segment.stop)
            # Counted from the segment's start: in late passes that may be beyond 64 bits.
            here = np.arange(at - segment.start, stop - segment.start, dtype=np.int64)
            parts.append(self._samples(segment.number, self._shuffle(segment, here)))
            at = stop
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _samples(self, number: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns epochs and sample indices of positions in the segment `number`."""
        order = self._order
        places = self._dealing.places(number, positions)
        if self._epochs is not None and order.pass_samples is None:
            epochs, indices = self._epochs.samples(number, places)
            return epochs, indices + order.first
        # The pass may reach over several epochs of the data, and begin and end inside of one.
        if isinstance(self._dealing, BlockDealing) or self._epochs is None:
            first, rest = divmod(number * self._per_pass, order.num_samples)
            numbers, places = np.divmod(places + rest, order.num_samples)
            return numbers + first, places + order.first
        # The epochs of the group (of all, where there are none), as one stream.
        stream = Stream(self._dealing.group, self._dealing.nodes.num_groups)
        line = ShuffledDealing(self._epochs.num_places, stream, 0)
        start = self._dealing.begin(number)
        epochs, indices = np.empty_like(places), np.empty_like(places)
        at, last = int(places.min()), int(places.max())
        while at <= last:
            segment = line.segment(start + at)
            first, at = segment.start - start, (segment.stop or 0) - start
            chosen = (first <= places) & (places < at)
            own = places[chosen] - first
            epochs[chosen], indices[chosen] = self._epochs.samples(segment.number, own)
        return epochs, indices + order.first


def _rotated(stream: Stream, num_blocks: int) -> Stream:
    """Returns the stream in whose place one takes blocks, where there are fewer than streams.

    So all streams get some in turn, and slots read in order still give the file order.

    Example:
        Of 3 blocks for 8 streams, passes 0, 1, 2, 3 begin with streams 0, 3, 5, 0.
    """
    if num_blocks >= stream.num_streams:
        return stream
    turn = stream.pass_index % -(-stream.num_streams // num_blocks)
    begin = min(turn * num_blocks, stream.num_streams - num_blocks)
    return dataclasses.replace(stream, index=(stream.index - begin) % stream.num_streams)
