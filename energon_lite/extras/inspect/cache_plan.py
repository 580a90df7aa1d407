"""Predicts what a run fetches from an object store, on one of its machines, with a cache.

The policy of the cache is arithmetic, so no run is simulated: what is needed at a time is staged,
and the rest of the cache holds the sources that return soonest. A source of which k of B bytes are
held fetches all of them in its first epoch, and the other B - k in each later one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from energon_lite.extras.remote.staging import PIECE_BYTES, ahead_bytes, staged
from energon_lite.storage.byte_file import ExpectedReads

# Of the standard class of the largest store. [Unit: US dollar per request]
_GET_COST = 0.4e-6


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """The bytes and requests of one machine.

    Attributes:
        cache_bytes: of its cache.
        nodes: machines of the run; each has an equal part of the streams.
        live_bytes: needed at a time; the rest of the cache is for the next epochs.
        hit_rate: the part of the bytes of a long run that is in the cache, after the first epochs.
        fetched_bytes: in the run.
        requests: in the run, for data.
        bytes_per_step: in the run, on average.
        requests_per_step: likewise.
        epoch_cost: US dollars for the requests of all machines for an epoch of all sources, without
            what is in the cache; at $0.40 a million.
    """

    cache_bytes: int
    nodes: int
    live_bytes: int
    hit_rate: float
    fetched_bytes: int
    requests: int
    bytes_per_step: float
    requests_per_step: float
    epoch_cost: float


def cache_plan(
    reads: Sequence[ExpectedReads],
    drawn: Sequence[float],
    *,
    steps: int,
    cache_bytes: int,
    nodes: int = 1,
    node_groups: int = 1,
) -> CachePlan:
    """Returns what one of `nodes` machines fetches.

    Args:
        reads: what each of N sources is; `num_streams` are those of the machine.
        drawn: samples of each source that all machines draw in the run.
        steps: of the run.
        cache_bytes: of the machine's cache.
        nodes: machines.
        node_groups: of the run; a machine reads the same data in each epoch if there is one for
            each machine.

    Raises:
        ValueError: What is needed at a time does not fit.
    """
    plans = [*map(staged, reads)]
    parts = node_groups if node_groups == nodes else 1
    needed = sum(plan.live_bytes for plan in plans)
    live = needed + ahead_bytes(reads, cache_bytes)[1]
    if needed and live > cache_bytes:
        raise ValueError(
            f"cache_bytes={cache_bytes:,}: {live:,} are needed at a time; give as many, or a "
            "smaller shuffle_buffer_size"
        )
    room = max(0.0, cache_bytes - live)
    fetched = requests = hits = read = epoch_requests = 0.0
    after = [own.num_samples / max(own.share, 1e-12) for own in reads]
    for number in sorted(range(len(reads)), key=after.__getitem__):
        own, samples = reads[number], drawn[number] / nodes
        size, mean = own.num_bytes / parts, own.num_bytes / own.num_samples
        held = min(size, room)
        room -= held
        first = min(samples, own.num_samples / parts if parts > 1 else own.num_samples)
        # Of data that other machines read in another epoch, the first epoch here takes longer.
        missed = first + (samples - first) * (1 - held / size)
        slice_bytes = plans[number].slice_length * mean
        per_request = min(PIECE_BYTES, slice_bytes) if plans[number].slice_length else mean
        fetched += missed * mean
        requests += missed * mean / per_request
        epoch_requests += own.num_bytes * (1 - held / size) / per_request
        hits += own.share * mean * held / size
        read += own.share * mean
    return CachePlan(
        cache_bytes, nodes, live, hits / read if read else 0.0, round(fetched), round(requests),
        fetched / steps, requests / steps, epoch_requests * _GET_COST,
    )  # fmt: skip
