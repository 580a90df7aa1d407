"""Whether a loader returns the samples that were written: by content, or by fields of pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.peers.pillow_pictures import decoded
from benchmarks.peers.rows import Row
from benchmarks.peers.samples import Samples, checksum

PASSES = 20  # shuffling from a buffer returns some samples often before others come once
TOLERANCE = 2  # levels of 0..255 in the mean of a field: decoders and filters differ


def compare(
    samples: Samples, batches: Iterable[Any], samples_of: Callable[[Any, Row], Any], row: Row
) -> dict[str, int]:
    """Reads until each sample was seen, at most `PASSES` times their number.

    Returns:
        How many samples there were, and the sum of their bytes, each sample counted once.

    Raises:
        AssertionError: A sample is none of those written, or one of those written is missing.
    """
    if row.is_decoded:
        return _compare_pictures(samples, batches, samples_of, row)
    expected = {checksum(sample): len(sample) for sample in samples}
    seen: set[int] = set()
    num_read = 0
    for batch in batches:
        for sample in samples_of(batch, row):
            number = checksum(sample)
            assert number in expected, f"a sample that was not written: {sample[:60]!r}"
            seen.add(number)
            num_read += 1
        if len(seen) == len(expected) or num_read >= PASSES * len(expected):
            break
    if row.num_sources == 1:
        assert len(seen) == len(expected), f"{len(seen)} of {len(expected)} samples were returned"
    return {"samples": len(seen), "bytes": sum(expected[number] for number in seen)}


def _compare_pictures(
    samples: Samples, batches: Iterable[Any], samples_of: Callable[[Any, Row], Any], row: Row
) -> dict[str, int]:
    # All pictures are one of the first few with another comment, so each is one of those.
    drawn = np.stack(
        [_outline(decoded(sample, row.image_size)) for sample in samples[: samples.num_drawn]]
    )
    seen = np.zeros(len(drawn), dtype=int)
    for batch in batches:
        for picture in samples_of(batch, row):
            distances = np.abs(drawn - _outline(picture)).max(axis=1)
            nearest = int(distances.argmin())
            assert distances[nearest] < TOLERANCE, f"no such picture: off by {distances[nearest]}"
            seen[nearest] += 1
        if seen.sum() >= PASSES * len(samples) or seen.min() > 0:
            break
    assert seen.min() > 0, f"{(seen == 0).sum()} of {len(seen)} pictures were never returned"
    return {"samples": len(drawn), "bytes": sum(map(len, samples[: samples.num_drawn]))}


def _outline(picture: Any) -> Any:
    """Mean values of 4 x 4 fields in three colors, for pictures (3, H, W) or (H, W, 3)."""
    pixels = np.asarray(picture, dtype=np.float32)
    if pixels.shape[-1] == 3:
        pixels = np.moveaxis(pixels, -1, 0)
    rows = [np.array_split(part, 4, axis=2) for part in np.array_split(pixels, 4, axis=1)]
    return np.concatenate([field.mean(axis=(1, 2)) for parts in rows for field in parts])
