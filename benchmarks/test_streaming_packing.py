"""Packing from a small buffer: how full packs are and what it costs, beside flushing the buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.data import image_lengths, needs_omnibal
from benchmarks.measure import Count, Entry, Figure, in_turn
from energon_lite.batching.fit import first_fit_decreasing
from energon_lite.batching.stream import StreamingPacker, pack_stream
from energon_lite.extras.samplers.best import lower_bound

BUFFER = 256
GROUP = f"Packing a stream, {BUFFER} samples held; time per sample"
FLUSHED = "first-fit decreasing, buffer by buffer"


def lengths_of(name: str, capacity: int) -> Any:
    """200,000 lengths; those of texts are cut at the capacity."""
    if name == "images":
        tokens = np.tile(image_lengths()[:, 0], 3)[:200_000]
        return tokens[tokens <= capacity]
    if name == "questions":  # two or three in a pack, as with SQuAD
        drawn = np.random.Generator(np.random.Philox(1)).gamma(6, 28, 200_000)
        return np.clip(np.rint(drawn), 30, capacity).astype(np.int64)
    median, sigma = {"texts": (400, 1.0), "documents": (1500, 1.3), "articles": (180, 1.0)}[name]
    drawn = np.random.Generator(np.random.Philox(20250509)).lognormal(
        np.log(median), sigma, 200_000
    )
    return np.clip(np.rint(drawn), 1, capacity).astype(np.int64)


def flush(lengths: Any, capacity: Any, **limits: Any) -> int:
    """Packs of each bufferful on its own, as Megatron-Energon's packing buffer does."""
    return sum(
        len(first_fit_decreasing(lengths[start : start + BUFFER], capacity, **limits))
        for start in range(0, len(lengths), BUFFER)
    )


def drive(rows: list[Any], capacity: Any, **limits: Any) -> int:
    """Packs through Python calls, one for each sample and pack."""
    packer = StreamingPacker(capacity, buffer_size=BUFFER, **limits)
    num_packs = 0
    for row in rows:
        packer.add(row)
        if packer.is_full:
            packer.next_pack()
            num_packs += 1
    while packer.num_buffered:
        packer.next_pack()
        num_packs += 1
    return num_packs


def compare(
    benchmark: Any, entries: list[Entry], name: str, lengths: Any, capacity: Any, **limits: Any
) -> tuple[int, Any]:
    """Adds the times; returns the packs when flushed, and as a stream."""
    rows = [tuple(row) for row in lengths.tolist()] if lengths.ndim == 2 else lengths.tolist()
    is_text = name.startswith(("texts", "documents", "questions"))
    goal_sec = None if limits else 0.3e-6 if is_text else 1.5e-6
    packs: list[Any] = []
    flushed: list[int] = []
    driven: list[int] = []
    found = in_turn(
        benchmark,
        {
            "kernel": lambda: packs.append(
                pack_stream(lengths, capacity, buffer_size=BUFFER, **limits)
            ),
            "flushed": lambda: flushed.append(flush(lengths, capacity, **limits)),
            "python": lambda: driven.append(drive(rows, capacity, **limits)),
        },
        rounds=3,
    )
    assert driven[0] == len(packs[0])
    each = {key: [second / len(rows) for second in seconds] for key, seconds in found.items()}
    entries += [
        Figure(GROUP, name, "µs", each["kernel"], FLUSHED, each["flushed"], goal_sec=goal_sec),
        Figure(GROUP, f"{name}, a call for each sample", "µs", each["python"], goal_sec=5e-6),
    ]
    return flushed[0], packs[0]


@pytest.mark.parametrize(
    ("name", "capacity", "goal"),
    [
        pytest.param("images", 4096, 99.6, marks=needs_omnibal),
        pytest.param("images", 8192, 99.6, marks=needs_omnibal),
        pytest.param("images", 32_768, 99.6, marks=needs_omnibal),
        ("texts", 2048, 99.95),
        ("texts", 4096, 99.95),
        ("texts", 8192, 99.95),
        ("texts", 32_768, 99.95),
        ("documents", 8192, 99.95),
        ("documents", 32_768, 99.95),
        ("questions", 512, 99.95),
    ],
)
def test_one_resource(
    benchmark: Any, entries: list[Entry], name: str, capacity: int, goal: float
) -> None:
    lengths = lengths_of(name, capacity)
    title = f"{name}, {capacity:,}"
    flushed, packs = compare(benchmark, entries, title, lengths, capacity)
    means = packs.sizes(lengths) / np.diff(packs.offsets)
    in_turns = np.corrcoef(means[:-1], means[1:])[0, 1]
    filled, before = (100 * lengths.sum() / capacity / num for num in (len(packs), flushed))
    text = f"{filled:.3f} % full; flushed {before:.2f} %; correlation of neighbours {in_turns:+.2f}"
    entries.append(Count(GROUP, title, text, f"≥ {goal} %, ≤ 0.1"))
    assert filled >= goal
    assert abs(in_turns) <= 0.1


@pytest.mark.parametrize(
    ("name", "capacity", "limit"),
    [
        ("articles", 512, 3),
        ("articles", 512, 4),
        ("texts", 8192, 16),
        ("texts", 8192, 32),
        ("texts", 32_768, 64),
        ("texts", 32_768, 200),
    ],
)
def test_few_samples_allowed(
    benchmark: Any, entries: list[Entry], name: str, capacity: int, limit: int
) -> None:
    lengths = lengths_of(name, capacity)
    title = f"{name}, {capacity:,}, at most {limit} samples ({capacity / lengths.mean():.1f} fill)"
    flushed, packs = compare(benchmark, entries, title, lengths, capacity, max_samples=limit)
    bound = max(lengths.sum() / capacity, len(lengths) / limit)
    text = f"{100 * bound / len(packs):.3f} % of the bound; flushed {100 * bound / flushed:.2f} %"
    entries.append(Count(GROUP, title, text, "≥ 99.5 %"))
    assert bound / len(packs) >= 0.995


@needs_omnibal
@pytest.mark.parametrize(
    ("tokens", "tiles", "goal"), [(6016, 18, 1.001), (4096, 15, 1.006), (8192, 30, 1.001)]
)
def test_two_resources(
    benchmark: Any, entries: list[Entry], tokens: int, tiles: int, goal: float
) -> None:
    lengths, capacity = image_lengths(), (tokens, tiles)
    title = f"images, {tokens:,} tokens, {tiles} tiles"
    flushed, packs = compare(benchmark, entries, title, lengths, capacity)
    bound = lower_bound(lengths, capacity)
    text = f"{len(packs):,} packs, {len(packs) / bound:.4f} × the bound; flushed {flushed:,}"
    entries.append(Count(GROUP, title, text, f"≤ {goal} × the bound"))
    assert len(packs) <= goal * bound
