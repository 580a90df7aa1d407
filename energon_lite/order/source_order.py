"""The order of one source: position in a stream -> (epoch, sample index)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.seeds import key_of
from energon_lite.core.topology import Stream
from energon_lite.order.dealing import BlockDealing, Dealing, Segment, ShuffledDealing
from energon_lite.order.slices import EpochOrder
from energon_lite.order.windows import WindowShuffle


@dataclass(frozen=True)
class SourceOrder:
    """How a source is ordered; see `docs/order.md` for what each setting does.

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

    def stream(self, stream: Stream) -> StreamOrder:
        """Returns the order of one stream."""
        return StreamOrder(self, stream)


class StreamOrder:
    """The order of one stream of a source; positions count from 0 at the start of a pass.

    Attributes:
        length: positions of the pass; None if it is endless.
    """

    def __init__(self, order: SourceOrder, stream: Stream) -> None:
        self._order = order
        self._epochs: EpochOrder | None = None
        self._dealing: Dealing
        window = order.window
        self._pass_index = stream.pass_index
        if order.multiplier is None:
            per_pass = order.pass_samples or order.num_samples
            dealt = stream if order.endless else _rotated(stream, -(-per_pass // order.block))
            self._blocks = BlockDealing(per_pass, dealt, order.block, order.endless)
            self._dealing = self._blocks
        else:
            # A stream's share should hold as many slices as are read side by side.
            share = order.num_samples // (stream.num_streams * order.interleave)
            slice_length = max(1, min(order.max_slice, share))
            self._epochs = EpochOrder(
                order.num_samples, slice_length, order.interleave, order.multiplier,
                key_of("slices", order.seed, order.source),
            )  # fmt: skip
            if slice_length == 1:
                window = 0  # the epoch is a permutation of single samples already
            self._pass_places = order.pass_samples or self._epochs.num_places
            self._runs = ShuffledDealing(self._pass_places, stream, key_of("deal", order.source))
            self._dealing = self._runs
        key = key_of("window", order.seed, order.source, stream.num_streams, stream.index)
        self._shuffle = WindowShuffle(window, key)
        self._start, stop = (
            (0, None) if order.endless else self._dealing.pass_range(stream.pass_index)
        )
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
            length = None if segment.stop is None else segment.stop - segment.start
            here = self._shuffle(Segment(segment.number, 0, length), here)
            parts.append(self._samples(segment.number, here))
            at = stop
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _samples(self, number: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns epochs and sample indices of positions in the segment `number`."""
        order = self._order
        if self._epochs is None:
            per_pass = order.pass_samples or order.num_samples
            first, rest = divmod(self._pass_index * per_pass, order.num_samples)
            epochs, indices = np.divmod(self._blocks.places(positions) + rest, order.num_samples)
            return epochs + first, indices + order.first
        places = positions + self._runs.first_place(number)
        if order.pass_samples is None:
            epochs, indices = self._epochs.samples(number, places)
            return epochs, indices + order.first
        # The pass may reach over several epochs of the data, and begin and end inside of one.
        first, rest = divmod(number * self._pass_places, self._epochs.num_places)
        numbers, places = np.divmod(places + rest, self._epochs.num_places)
        epochs, indices = np.empty_like(places), np.empty_like(places)
        for epoch in np.unique(numbers).tolist():
            chosen = numbers == epoch
            epochs[chosen], indices[chosen] = self._epochs.samples(first + epoch, places[chosen])
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
    return replace(stream, index=(stream.index - begin) % stream.num_streams)
