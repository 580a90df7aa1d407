"""The order of one source: position in a stream -> (epoch, sample index)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from energon_lite.core.seeds import key_of
from energon_lite.core.topology import Stream
from energon_lite.order.dealing import BlockDealing, Dealing, ShuffledDealing
from energon_lite.order.permutation import Int64Array
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
        pass_samples: samples of a finite pass, if other than all of them once. Passes go on where
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
        """Gives the order of one stream."""
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
            self._blocks = BlockDealing(per_pass, stream, order.block, order.endless)
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
        self._start, stop = (0, None) if order.endless else self._dealing.pass_range(
            stream.pass_index
        )
        self.length = None if stop is None else stop - self._start

    def block(self, position: int, count: int) -> tuple[Int64Array, Int64Array]:
        """Gives epochs and sample indices, both (N,), of up to `count` positions.

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
            positions = self._shuffle(segment, np.arange(at, stop, dtype=np.int64))
            parts.append(self._samples(segment.number, segment.start, positions))
            at = stop
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _samples(
        self, number: int, start: int, positions: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Gives epochs and sample indices of positions in the segment `number`."""
        order = self._order
        if self._epochs is None:
            places = self._blocks.places(positions)
            places += self._pass_index * (order.pass_samples or order.num_samples)
            epochs, indices = np.divmod(places, order.num_samples)
            return epochs, indices + order.first
        places = positions - start + self._runs.first_place(number)
        if order.pass_samples is None:
            epochs, indices = self._epochs.samples(number, places)
            return epochs, indices + order.first
        # The pass may reach over several epochs of the data, and begin and end inside of one.
        numbers, places = np.divmod(places + number * self._pass_places, self._epochs.num_places)
        epochs, indices = np.empty_like(places), np.empty_like(places)
        for epoch in np.unique(numbers).tolist():
            chosen = numbers == epoch
            epochs[chosen], indices[chosen] = self._epochs.samples(epoch, places[chosen])
        return epochs, indices + order.first
