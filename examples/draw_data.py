"""Writes the demo's data as tar shards: captioned shapes and photographs, and short texts."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import webdataset as wds
from PIL import Image, ImageDraw

COLOURS = {"red": "#d33", "green": "#3a3", "blue": "#36c", "yellow": "#fc0", "violet": "#93c"}
SHAPES = ("circle", "square", "triangle")
GROUNDS = {"white": "#fff", "grey": "#bbb", "black": "#111"}
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def write_shards(folder: Path, samples: Iterable[dict[str, Any]], samples_per_shard: int) -> None:
    """Writes `shard-0000.tar`, … in WebDataset format: one member per part, named key.part."""
    folder.mkdir(parents=True, exist_ok=True)
    pattern = str(folder / "shard-%04d.tar")
    with wds.ShardWriter(pattern, maxcount=samples_per_shard, verbose=0) as writer:
        for sample in samples:
            writer.write(sample)


def caption_samples(num_drawn: int, photographs: Path | None) -> list[dict[str, Any]]:
    """Drawn pictures and photographs, mixed; each with a `jpg` and a `txt` part."""
    samples = list(_drawn_samples(num_drawn))
    if photographs is not None:
        samples += _photograph_samples(photographs)
    random.Random(1).shuffle(samples)
    return samples


def text_samples(num_samples: int) -> Iterator[dict[str, Any]]:
    """Sums in words, several to a text; each with a `txt` part."""
    rng = random.Random(2)
    for i in range(num_samples):
        sums = []
        for _ in range(rng.randint(1, 4)):
            a, b = rng.randint(0, 5), rng.randint(0, 5)
            sums.append(f"{NUMBERS[a]} and {NUMBERS[b]} make {NUMBERS[a + b]}.")
        yield {"__key__": f"text{i:06d}", "txt": " ".join(sums)}


def _drawn_samples(num_samples: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    for i in range(num_samples):
        shape, colour, ground = (rng.choice(list(c)) for c in (SHAPES, COLOURS, GROUNDS))
        size = rng.choice((16, 24, 32))
        left, top = rng.randint(2, 62 - size), rng.randint(2, 62 - size)
        box = (left, top, left + size, top + size)
        image = Image.new("RGB", (64, 64), GROUNDS[ground])
        draw = ImageDraw.Draw(image)
        if shape == "circle":
            draw.ellipse(box, fill=COLOURS[colour])
        elif shape == "square":
            draw.rectangle(box, fill=COLOURS[colour])
        else:
            corners = [(left + size // 2, top), (left, top + size), (left + size, top + size)]
            draw.polygon(corners, fill=COLOURS[colour])
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=90)
        caption = f"a {colour} {shape} on {ground}"
        yield {"__key__": f"drawn{i:06d}", "jpg": buffer.getvalue(), "txt": caption}


def _photograph_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """Photographs of a folder with `captions.json` in COCO's format and the pictures it lists."""
    coco = json.loads((folder / "captions.json").read_text(encoding="utf-8"))
    captions: dict[int, str] = {}
    for annotation in coco["annotations"]:
        captions.setdefault(annotation["image_id"], annotation["caption"].strip())
    for image in coco["images"]:
        # Pictures outside `permissive` may not be changed, and training resizes them.
        path = folder / image["file_name"]
        if image["file_name"].startswith("permissive/") and path.is_file():
            key = f"photo{image['id']:012d}"
            yield {"__key__": key, "jpg": path.read_bytes(), "txt": captions[image["id"]]}
