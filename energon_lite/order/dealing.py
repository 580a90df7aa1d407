"""Which places of a source each stream takes: every sample once per epoch, over all streams.

Shuffled: in each epoch a stream takes a run of consecutive places. The runs' lengths differ by at
most one and follow each other without gap. Where S does not divide N they move from epoch to epoch,
so that a source with fewer samples than streams serves each stream equally often; which samples lie
at those places changes in every epoch.

Unshuffled: the endless line of epochs is dealt in blocks of one batch, stream by stream, so that
slots read in order give the file order.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.topology import Stream


class Segment(NamedTuple):
    """Positions of a stream within which a window may shuffle.

    `stop` is None for a segment without end.
    """

    number: int
    start: int
    stop: int | None


class Dealing(Protocol):
    """One stream's share of a source."""

    def segment(self, position: int) -> Segment:
        """Returns the segment that a position of the stream lies in."""

    def pass_range(self, pass_index: int) -> tuple[int, int]:
        """Returns first position and the position after the last of one finite pass."""


class ShuffledDealing:
    """Runs of consecutive places, a new one in every epoch.

    Args:
        num_places: N, places of an epoch.
        stream: the stream s of S.
        shift: a hash of the source, so that small sources do not all start at stream 0.
    """

    def __init__(self, num_places: int, stream: Stream, shift: int) -> None:
        self.num_places = num_places
        self.num_streams = stream.num_streams
        self.turn = (stream.index + shift) % stream.num_streams

    def first(self, epoch: int) -> int:
        """Counts the positions of this stream before an epoch."""
        return (epoch * self.num_places + self.turn) // self.num_streams

    def first_place(self, epoch: int) -> int:
        """Returns the place in its epoch where this stream's run begins."""
        return self._before((epoch + 1) * self.num_places) - self._before(epoch * self.num_places)

    def _before(self, total: int) -> int:
        """Sums (total + t) // S over the streams t before this one, in closed form.

        Example:
            S = 4, turn 3, total 6: 6//4 + 7//4 + 8//4 = 4 = 3 * 1 + 1, since only t = 2 carries.
        """
        quotient, rest = divmod(total, self.num_streams)
        return self.turn * quotient + max(0, self.turn + rest - self.num_streams)

    def segment(self, position: int) -> Segment:
        """Returns the run, numbered by its epoch, that a position lies in."""
        last = (position + 1) * self.num_streams - self.turn
        epoch = -(-last // self.num_places) - 1
        return Segment(epoch, self.first(epoch), self.first(epoch + 1))

    def pass_range(self, pass_index: int) -> tuple[int, int]:
        """Returns the positions of one epoch."""
        return self.first(pass_index), self.first(pass_index + 1)


class BlockDealing:
    """Blocks of one batch, stream by stream, in file order.

    Args:
        num_samples: n, samples of the source.
        stream: the stream s of S.
        block: samples of a block.
        endless: whether epochs follow each other without a cut.
    """

    def __init__(self, num_samples: int, stream: Stream, block: int, endless: bool) -> None:
        self.num_samples = num_samples
        self.stream = stream
        self.block = block
        self.endless = endless

    def places(self, positions: Int64Array) -> Int64Array:
        """Returns the places in the endless line of epochs, shape (N,), of positions."""
        blocks, offsets = np.divmod(positions, self.block)
        return (blocks * self.stream.num_streams + self.stream.index) * self.block + offsets

    def segment(self, position: int) -> Segment:
        """Returns the whole stream of a pass: file order has no epochs to keep apart."""
        del position
        return Segment(self.stream.pass_index, 0, None if self.endless else self.pass_range(0)[1])

    def pass_range(self, pass_index: int) -> tuple[int, int]:
        """Returns the positions of one pass; all passes are equal."""
        del pass_index
        num_blocks = -(-self.num_samples // self.block)
        own, rest = divmod(num_blocks, self.stream.num_streams)
        own += self.stream.index < rest
        is_last = (num_blocks - 1) % self.stream.num_streams == self.stream.index
        missing = num_blocks * self.block - self.num_samples
        return 0, own * self.block - (missing if is_last and own else 0)
