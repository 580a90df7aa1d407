"""The blocks in which a stream reads a source, and what is asked for before it is read.

Which samples follow is known. So while a block is decoded, the kernel reads those after it into its
cache: exactly their bytes are asked for, sorted by place, by `posix_fadvise`, which does not wait.
Where files are in the page cache, nothing is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from energon_lite.core.arrays import Int64Array
from energon_lite.formats.shards import MAX_BLOCK_BYTES, Block, BlockReader
from energon_lite.sources.order_ahead import OrderAhead

# Samples that are read together: few at first, so that the first comes at once and a short pass
# costs little, then twice as many each time. The sources of a blend share what may be held ahead by
# their shares of the draws; a block of few samples costs much for each of them.
_FEWEST, _LARGEST_BLOCK = 32, 1024
_HELD_BY_ALL, _BYTES_OF_ALL = 16 * _LARGEST_BLOCK, 4 * MAX_BLOCK_BYTES
_SMALLEST_READ_BYTES = 64 << 10
# What is asked for ahead of a stream, over all of its sources; and of how many samples of one.
AHEAD_BYTES, MOST_AHEAD = 16 << 20, 16 << 10


def source_blocks(
    reader: BlockReader, order: OrderAhead, position: int, share: float, mean_bytes: float
) -> Iterator[tuple[Block, Int64Array, Int64Array]]:
    """Yields the blocks of a stream from a position on, with epochs and indices of their samples.

    Args:
        reader: reads the samples.
        order: the order in which they come.
        position: of the first one.
        share: the part of the stream's draws that takes them.
        mean_bytes: of a sample.
    """
    largest = min(_LARGEST_BLOCK, max(_FEWEST, int(share * _HELD_BY_ALL)))
    max_bytes = min(MAX_BLOCK_BYTES, max(_SMALLEST_READ_BYTES, int(share * _BYTES_OF_ALL)))
    most = min(MOST_AHEAD, int(share * AHEAD_BYTES / max(1.0, mean_bytes)))
    num_ahead, asked, size = max(_FEWEST, most), position, _FEWEST
    while True:
        epochs, indices = order.at(position, size)
        if not len(indices):
            return
        blocks, read = reader.blocks(indices, max_bytes), 0
        while read < len(indices):
            block = next(blocks)
            own = slice(read, read + len(block.members))
            read = own.stop
            here = position + read
            # If half of the samples asked for before were read.
            if reader.is_slow and 2 * (asked - here) <= num_ahead:
                following = order.at(here, num_ahead)[1][max(0, asked - here) :]
                if len(following):
                    reader.advise(following)
                asked = here + num_ahead
            if read == len(indices):
                blocks = iter(())  # keeps no bytes
            yield block, epochs[own], indices[own]
            del block
        position += read
        size = min(2 * size, largest)
