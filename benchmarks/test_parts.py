"""Indexing, decoding pictures, and the order alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import baselines
from benchmarks.conftest import TextData
from benchmarks.data import jpegs, link_tars, prepare_texts
from benchmarks.measure import Entry, Figure, in_turn
from energon_lite import SampleDecoder
from energon_lite.core.topology import Stream
from energon_lite.order.source_order import SourceOrder

BLOCK = 1024


@pytest.mark.parametrize("num_workers", [1, 2])
def test_indexing(
    benchmark: Any, entries: list[Entry], many_texts: TextData, folder: Path, num_workers: int
) -> None:
    root = folder / f"indexed_{num_workers}"
    tars = link_tars(many_texts.root, root)

    def prepare() -> None:
        prepare_texts(root, num_workers)

    def read() -> None:
        for made in (*root.glob("*.tar.idx"), root / ".nv-meta"):
            shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)
        baselines.read_files(tars)

    found = in_turn(benchmark, {"ours": prepare, "reading": read}, rounds=3)
    processes = "1 process" if num_workers == 1 else f"{num_workers} processes"
    ours, reading = ([t / len(many_texts.texts) for t in found[k]] for k in found)
    entries.append(
        Figure(
            "Preparing", f"200,000 texts, {processes}", "/s", ours, "reading the tars once", reading
        )
    )


def test_jpeg_decoding(benchmark: Any, entries: list[Entry]) -> None:
    kind, pictures = jpegs(40)
    decoder = SampleDecoder(image_decode="torchrgb8")

    def decode() -> list[torch.Tensor]:
        return [decoder.decode("jpg", raw) for raw in pictures]

    for ours, theirs in zip(decode(), baselines.pillow_tensors(pictures), strict=True):
        assert torch.equal(ours, theirs)
    found = in_turn(
        benchmark,
        {
            "ours": decode,
            "tensors": lambda: baselines.pillow_tensors(pictures),
            "arrays": lambda: baselines.pillow_arrays(pictures),
        },
        rounds=7,
    )
    ours, tensors, arrays = ([t / len(pictures) for t in found[k]] for k in found)
    name = f"JPEG to torchrgb8, {kind}"
    group = "Decoding"
    entries.append(Figure(group, name, "ms", ours, "Pillow to (3, H, W) tensors", tensors))
    entries.append(Figure(group, name, "ms", ours, "Pillow to (H, W, 3) arrays", arrays))


@pytest.mark.parametrize(("edges", "wanted"), [((512, 512), 224), ((4000, 3000), 448)])
def test_jpeg_decoding_to_a_size(
    benchmark: Any, entries: list[Entry], edges: tuple[int, int], wanted: int
) -> None:
    kind, pictures = jpegs(4)
    resized = [baselines.resized_jpeg(raw, edges) for raw in pictures]
    whole = SampleDecoder(image_decode="torchrgb8")
    small = SampleDecoder(image_decode="torchrgb8", image_size=wanted)
    found = in_turn(
        benchmark,
        {
            "ours": lambda: [small.decode("jpg", raw) for raw in resized],
            "whole": lambda: [whole.decode("jpg", raw) for raw in resized],
            "Pillow": lambda: baselines.pillow_tensors(resized, wanted),
        },
        rounds=5,
    )
    ours, all_pixels, pillow = ([t / len(pictures) for t in found[k]] for k in found)
    name = f"JPEG of {edges[0]:,} x {edges[1]:,} to image_size={wanted}, {kind}"
    entries.append(Figure("Decoding", name, "ms", ours, "the whole picture", all_pixels))
    entries.append(Figure("Decoding", name, "ms", ours, "Pillow, bicubic resize", pillow))


@pytest.mark.parametrize("window", [0, 1000, 100_000])
@pytest.mark.parametrize("num_samples", [1_000, 1_000_000, 1_000_000_000])
def test_order(benchmark: Any, entries: list[Entry], num_samples: int, window: int) -> None:
    order = SourceOrder(
        source="set/train",
        num_samples=num_samples,
        seed=0,
        endless=True,
        max_slice=100,
        interleave=16,
        window=window,
    ).stream(Stream(0, 1))
    num_drawn = 200 * BLOCK
    position = 0

    def draw() -> None:
        nonlocal position
        for _ in range(num_drawn // BLOCK):
            epochs, indices = order.block(position, BLOCK)
            assert len(epochs) == len(indices) == BLOCK
            position += BLOCK

    found = in_turn(
        benchmark,
        {"ours": draw, "numpy": lambda: baselines.numpy_permutations(num_drawn, BLOCK)},
        rounds=5,
    )
    ours, drawn = ([t / num_drawn for t in found[k]] for k in found)
    entries.append(
        Figure(
            "Order alone, per sample", f"{num_samples:,} samples, window {window:,}", "µs", ours,
            "numpy permutes blocks of 1,024", drawn,
        )
    )  # fmt: skip
