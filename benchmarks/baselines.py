"""What the package is measured against: the shortest loops that do the same work, nothing else."""

from __future__ import annotations

import io
import json
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from energon_lite import SourceInfo, TextSample

TextBatch = tuple[list[str], list[str]]


class MappedShard(NamedTuple):
    """A mapped tar, and where its samples begin."""

    name: str
    data: mmap.mmap
    offsets: list[int]


def open_shards(root: Path) -> list[MappedShard]:
    """Maps all tars of a folder, with the offsets of their samples."""
    shards = []
    for tar in sorted(root.glob("*.tar")):
        offsets = np.fromfile(tar.with_suffix(".tar.idx"), dtype="<i8").tolist()
        with tar.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        shards.append(MappedShard(tar.name, data, offsets))
    return shards


def text_batches(shards: Sequence[MappedShard], batch_size: int) -> Iterator[TextBatch]:
    """Yields keys and texts, batch by batch, in file order."""
    keys: list[str] = []
    texts: list[str] = []
    for _, data, offsets in shards:
        for i in range(len(offsets) - 1):
            start = offsets[i]
            name = data[start : data.find(b"\0", start)]
            size = int(data[start + 124 : start + 135], 8)
            keys.append(name[:-4].decode())
            texts.append(data[start + 512 : start + 512 + size].decode())
            if len(keys) == batch_size:
                yield keys, texts
                keys, texts = [], []


def shuffled_places(shards: Sequence[MappedShard]) -> list[tuple[mmap.mmap, int]]:
    """Lists where all samples lie, in a random order."""
    places = [(shard.data, start) for shard in shards for start in shard.offsets[:-1]]
    random.Random(0).shuffle(places)
    return places


def text_batches_at(
    places: Sequence[tuple[mmap.mmap, int]], batch_size: int
) -> Iterator[TextBatch]:
    """Yields keys and texts, batch by batch, in the order of a list of places."""
    keys: list[str] = []
    texts: list[str] = []
    for data, start in places:
        name = data[start : data.find(b"\0", start)]
        size = int(data[start + 124 : start + 135], 8)
        keys.append(name[:-4].decode())
        texts.append(data[start + 512 : start + 512 + size].decode())
        if len(keys) == batch_size:
            yield keys, texts
            keys, texts = [], []


def typed_batches(
    shards: Sequence[MappedShard], batch_size: int, root: str
) -> Iterator[TextSample]:
    """Yields what the loader yields, in file order: the loop above with samples made by hand."""
    samples: list[TextSample] = []
    number = 0
    for shard, data, offsets in shards:
        for i in range(len(offsets) - 1):
            start = offsets[i]
            name = data[start : data.find(b"\0", start)].decode()
            size = int(data[start + 124 : start + 135], 8)
            samples.append(
                TextSample(
                    __key__=name[:-4],
                    __restore_key__=("texts/train", 0, number, number),
                    __subflavors__={},
                    __sources__=(SourceInfo(root, number, shard, (name,)),),
                    text=data[start + 512 : start + 512 + size].decode(),
                )
            )
            number += 1
            if len(samples) == batch_size:
                yield TextSample(
                    __key__=[s.__key__ for s in samples],
                    __restore_key__=("batch", 0, *[s.__restore_key__ for s in samples]),
                    __subflavors__=[s.__subflavors__ for s in samples],
                    __sources__=[s.__sources__ for s in samples],
                    __loss_weight__=[s.__loss_weight__ for s in samples],
                    text=[s.text for s in samples],
                )
                samples = []


def read_metadata(root: Path) -> list[str]:
    """Reads the files that describe a data set, and asks for the size of each shard."""
    meta = root / ".nv-meta"
    shards = list(json.loads((meta / ".info.json").read_bytes())["shard_counts"])
    for name in ("split.yaml", "dataset.yaml"):
        (meta / name).read_bytes()
    for shard in shards:
        (root / shard).stat()
    return shards


def first_texts(root: Path, shards: Sequence[str]) -> list[str]:
    """Reads the first sample of each shard."""
    texts = []
    for shard in shards:
        offsets = np.fromfile(root / f"{shard}.idx", dtype="<i8")
        with (root / shard).open("rb") as file:
            raw = os.pread(file.fileno(), int(offsets[1]), 0)
        texts.append(raw[512 : 512 + int(raw[124:135], 8)].decode())
    return texts


def read_files(paths: Sequence[Path], chunk_bytes: int = 1 << 20) -> int:
    """Reads files from beginning to end; returns their size."""
    size = 0
    buffer = memoryview(bytearray(chunk_bytes))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                size += got
    return size


def pillow_arrays(pictures: Sequence[bytes]) -> list[np.ndarray]:
    """Decodes pictures with Pillow alone, to arrays (H, W, 3)."""
    return [np.array(Image.open(io.BytesIO(raw)).convert("RGB")) for raw in pictures]


def pillow_tensors(pictures: Sequence[bytes], shortest_edge: int = 0) -> list[torch.Tensor]:
    """Decodes pictures with Pillow, to contiguous tensors (3, H, W), and resizes them if asked."""
    tensors = []
    for raw in pictures:
        image = Image.open(io.BytesIO(raw)).convert("RGB")
        if shortest_edge:
            scale = shortest_edge / min(image.size)
            size = (round(image.width * scale), round(image.height * scale))
            image = image.resize(size, Image.Resampling.BICUBIC)
        tensors.append(torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous())
    return tensors


def resized_jpeg(raw: bytes, size: tuple[int, int]) -> bytes:
    """Encodes a picture again, in another size and with the noise of a camera."""
    image = Image.open(io.BytesIO(raw)).convert("RGB").resize(size, Image.Resampling.BICUBIC)
    noise = np.random.default_rng(0).normal(0, 3, (size[1], size[0], 1))
    noisy = (np.asarray(image) + noise).clip(0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noisy).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def numpy_permutations(num_samples: int, block: int) -> int:
    """Draws one random permutation per block: the least that shuffling in numpy can cost."""
    rng = np.random.default_rng(0)
    total = 0
    for _ in range(0, num_samples, block):
        total += len(rng.permutation(block))
    return total


def state_by_hand(num_streams: int, num_sources: int) -> dict[str, object]:
    """A state of the size of a loader's, as a literal."""
    return {
        "streams": {
            str(s): {
                "items": 12_345,
                "inner": [
                    {"name": f"set{n}/train", "position": 98_765} for n in range(num_sources)
                ],
            }
            for s in range(num_streams)
        }
    }
