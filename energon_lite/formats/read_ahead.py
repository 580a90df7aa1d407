"""Reading ahead: while a block is decoded, the kernel reads the samples after it into its cache.

Which samples follow is known, so exactly their bytes are asked for, sorted by place, by
`posix_fadvise`, which does not wait. Where files are in the page cache, nothing is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from energon_lite.core.arrays import Int64Array
from energon_lite.formats.shards import Block, BlockReader

# What is asked for ahead of a stream, over all of its sources; and of how many samples of one,
# whose order is computed twice.
AHEAD_BYTES, MOST_SAMPLES, _FEWEST_SAMPLES = 16 << 20, 16 << 10, 32


class BlockOrder(Protocol):
    """What a source cursor reads, by position."""

    def block(self, position: int, count: int) -> tuple[Int64Array, Int64Array]:
        """Returns epochs and sample indices, both (N,), of up to `count` positions."""


class ReadAhead:
    """Reads the blocks of a stream; what follows them is asked for where storage is slow.

    Args:
        reader: reads the samples.
        make_order: returns the order in which they come; for use here only, since an order keeps
            what its last call needed.
        share: the part of the stream's draws that takes them.
        mean_bytes: of a sample.
    """

    def __init__(
        self,
        reader: BlockReader,
        make_order: Callable[[], BlockOrder],
        share: float,
        mean_bytes: float,
    ) -> None:
        self._reader = reader
        self._make_order = make_order
        most = min(MOST_SAMPLES, int(share * AHEAD_BYTES / max(1.0, mean_bytes)))
        self._num_samples = max(_FEWEST_SAMPLES, most)
        self._stop = 0

    def blocks(self, position: int, indices: Int64Array, max_bytes: int) -> Iterator[Block]:
        """Reads the samples at `indices`, of which the first stands at `position`."""
        for block in self._reader.blocks(indices, max_bytes):
            position += len(block.members)
            if self._reader.is_slow:
                self._advise(position)
            yield block
            del block

    def _advise(self, position: int) -> None:
        """Asks for the samples after a position, if half of those asked for before were read."""
        start, stop = max(self._stop, position), position + self._num_samples
        if 2 * (stop - start) < self._num_samples:
            return
        if not self._stop:
            self._order = self._make_order()
        _, indices = self._order.block(start, stop - start)
        if len(indices):
            self._reader.advise(indices)
        self._stop = stop
