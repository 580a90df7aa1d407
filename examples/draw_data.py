"""Writes the examples' data: captioned shapes and photographs, short texts, and chats."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import webdataset as wds
from PIL import Image, ImageDraw

from energon_lite import prepare_dataset

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


def random_texts(words: str, num_samples: int) -> list[dict[str, Any]]:
    """Texts of 5 to 60 of the words, in any order."""
    rng = random.Random(words)
    return [
        {"__key__": f"{i:06d}", "txt": " ".join(rng.choices(words.split(), k=rng.randint(5, 60)))}
        for i in range(num_samples)
    ]


def prepare_texts(folder: Path, samples: list[dict[str, Any]]) -> None:
    """Writes eight shards of samples with a `txt` part and prepares them: the last one is val."""
    write_shards(folder, samples, math.ceil(len(samples) / 8))
    prepare_dataset(
        folder, split_ratio="7,1", sample_type="TextSample", field_map={"text": "txt"},
        force_overwrite=True,
    )  # fmt: skip


def prepare_captions_and_texts(folder: Path, num_samples: int) -> list[str]:
    """Draws and prepares `folder / "captions"` and `folder / "texts"`; returns all texts."""
    captions, texts = caption_samples(num_samples, None), list(text_samples(num_samples))
    prepare_texts(folder / "texts", texts)
    write_shards(folder / "captions", captions, math.ceil(num_samples / 8))
    prepare_dataset(
        folder / "captions", split_ratio="7,1", sample_type="CaptioningSample",
        field_map={"image": "jpg", "caption": "txt"}, force_overwrite=True,
    )  # fmt: skip
    return [sample["txt"] for sample in captions + texts]


def write_chats(path: Path, num_chats: int) -> None:
    """Writes a JSONL file of chats, one to a line; each has one to three questions and answers."""
    rng, lines = random.Random(3), []
    for _ in range(num_chats):
        messages = []
        for _ in range(rng.randint(1, 3)):
            a, b = rng.randint(0, 5), rng.randint(0, 5)
            question = f"What is {NUMBERS[a]} and {NUMBERS[b]}?"
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": f"It is {NUMBERS[a + b]}."})
        lines.append(json.dumps({"messages": messages}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")


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
