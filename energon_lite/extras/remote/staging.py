"""The bytes that a run needs on this machine at a time, by arithmetic.

Samples of 32 KiB and more are fetched one by one, each when it is needed. Smaller ones come in
pieces of up to 1 MiB, which do not go beyond a slice, and are needed from the first draw of one of
their samples to the last. A stream draws from some slices side by side, and a shuffle window holds
samples back, twice. So it needs a piece of each of these slices, and two windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from energon_lite.storage.byte_file import ExpectedReads, current_cache

PIECE_BYTES = 1 << 20
# Ranges that a client waits for come before those that will be needed.
NOW, LATER = 0, 1
# A request for less costs more time than its bytes.
SMALL_BYTES = 32 << 10
# The most that a stream asks for ahead, and reads at a time besides. All of it is at most a part of
# a cache, as it is not kept for the next epoch. Then only a part of that is asked for: batches of
# other streams come between asking and reading.
_ASKED_BYTES, _AHEAD_BYTES, _CACHE_PART, _ASKED_PART = 16 << 20, 24 << 20, 24, 4
# Samples of a stream that there is place for in any case.
_FEWEST = 4
# Small sources are kept whole, however short their slices are.
_WHOLE_BYTES = 64 << 20


class Staged(NamedTuple):
    """The way in which samples of a dataset are fetched.

    Attributes:
        live_bytes: needed at a time; 0 for samples that are fetched one by one.
        slice_length: samples within which neighbours come together; 0 for none.
        is_slow: whether small samples are fetched one by one.
    """

    live_bytes: int
    slice_length: int
    is_slow: bool = False


def staged(own: ExpectedReads) -> Staged:
    """Returns how the samples of a dataset are fetched."""
    mean = own.num_bytes / own.num_samples
    if mean >= SMALL_BYTES:
        return Staged(0, 0)
    piece = min(PIECE_BYTES, own.slice_length * mean)
    if piece < SMALL_BYTES and own.num_bytes > _WHOLE_BYTES:
        return Staged(0, 0, is_slow=True)
    if piece < SMALL_BYTES:
        return Staged(own.num_bytes, own.num_samples)
    live = own.num_streams * (2 * own.window * mean + own.interleave * piece)
    return Staged(min(own.num_bytes, int(live)), own.slice_length)


def ahead_bytes(reads: Sequence[ExpectedReads]) -> tuple[int, int]:
    """Returns how many bytes are fetched ahead at a time.

    Args:
        reads: all datasets of a process.

    Returns:
        The most that each stream may ask for; and what all streams of the process need at a time.
    """
    cache_bytes = (current_cache() or {"max_bytes": 1 << 62})["max_bytes"]
    streams = max(own.num_streams for own in reads)
    least = max(_FEWEST * own.num_bytes // own.num_samples for own in reads)
    part = max(least, cache_bytes // _CACHE_PART // (streams * reads[0].num_ranks))
    total = min(streams * min(_AHEAD_BYTES, part), sum(own.num_bytes for own in reads))
    return min(_ASKED_BYTES, part // _ASKED_PART), total


def check_place(
    scheme: str,
    reads: Sequence[ExpectedReads],
    plans: Sequence[Staged],
    others: int,
    max_bytes: int,
) -> None:
    """Raises the error of a run that does not fit.

    Args:
        scheme: of their addresses.
        reads: its datasets.
        plans: how each of them is fetched.
        others: bytes that are needed besides.
        max_bytes: that there are.

    Raises:
        ValueError: With the arithmetic.
    """
    live = sum(plan.live_bytes for plan in plans)
    own, plan = max(zip(reads, plans, strict=True), key=lambda pair: pair[1].live_bytes)
    mean = own.num_bytes / own.num_samples
    piece = min(PIECE_BYTES, own.slice_length * mean)
    room = max_bytes - others - (live - plan.live_bytes)
    window = int((room / own.num_streams - own.interleave * piece) / (2 * mean))
    smaller = f", or shuffle_buffer_size of at most {window:,}" if window > 0 else ""
    raise ValueError(
        f"{scheme}://{own.name}: shuffle_buffer_size={own.window:,} x {own.num_streams} streams, "
        f"with samples of {mean:,.0f} bytes and {own.interleave} slices side by side, needs "
        f"{plan.live_bytes / 2**20:,.0f} MiB on this machine at a time; with all else it is "
        f"{(live + others) / 2**20:,.0f} MiB, and there are {max_bytes / 2**20:,.0f}. Give "
        f"WorkerConfig(cache={{'path': ..., 'max_bytes': {live + others}}}) or more{smaller}"
    )
