"""The samples that all loaders store and read, made once with fixed seeds.

text    200,000 texts of 400 to 600 bytes
jpeg    8,000 pictures of 512 x 512, 74 KB each: 100 drawn ones, each of 80 with a comment of
        its own
photo   48 pictures of 4,000 x 3,000, 2.5 MB each: 6 drawn ones, in the same way
"""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import overload

import numpy as np

COUNTS = {"text": 200_000, "tokens": 100_000, "jpeg": 8_000, "photo": 48}
CHECKED = {
    "text": 2_000,
    "tokens": 2_000,
    "jpeg": 200,
    "photo": 12,
}  # the first few, which loaders are checked with
DRAWN = {"jpeg": 100, "photo": 6}
SUFFIXES = {"text": "txt", "tokens": "bin", "jpeg": "jpg", "photo": "jpg"}


class Samples(Sequence[bytes]):
    """A part of the stored samples of one kind, as bytes; `key` and `suffix` name them in tars."""

    def __init__(self, root: Path, kind: str, first: int = 0, stop: int | None = None) -> None:
        self.root, self.kind, self.first = root, kind, first
        self.suffix = SUFFIXES[kind]
        self.num_drawn = DRAWN.get(kind, 0)
        self.offsets = np.load(root / f"{kind}.npy")
        self.data = np.memmap(root / f"{kind}.bin", mode="r")
        self.stop = len(self.offsets) - 1 if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.first

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin, end = self.offsets[self.first + index : self.first + index + 2]
        return self.data[begin:end].tobytes()

    def key(self, index: int) -> str:
        """Returns the name of a sample, unique in its kind."""
        return f"{self.first + index:08d}"

    def divided(self, num_sources: int) -> list[Samples]:
        """Returns consecutive parts, as even as can be."""
        bounds = [self.first + len(self) * i // num_sources for i in range(num_sources + 1)]
        return [Samples(self.root, self.kind, *bounds[i : i + 2]) for i in range(num_sources)]


def load_samples(data: Path, kind: str, stop: int | None = None) -> Samples:
    """Opens the samples of a kind, after writing them if they are not there."""
    root = data / "samples"
    done = root / f"{kind}.npy"
    if not done.exists():
        root.mkdir(parents=True, exist_ok=True)
        make = {"text": texts, "tokens": tokens}.get(kind, partial(pictures, kind))
        payloads = make()
        (root / f"{kind}.bin").write_bytes(b"".join(payloads))
        np.save(done, np.cumsum([0, *map(len, payloads)]))
    return Samples(root, kind, 0, stop)


def texts() -> list[bytes]:
    """Cuts pieces out of random words."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfw"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(5000)]
    corpus = " ".join(rng.choices(words, k=200_000)).encode()
    starts = (rng.randrange(len(corpus) - 600) for _ in range(COUNTS["text"]))
    return [b"%08d " % i + corpus[s : s + rng.randint(391, 591)] for i, s in enumerate(starts)]


def tokens() -> list[bytes]:
    """Draws tokens; the first two of a sequence are its number."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(125), 0.7, COUNTS["tokens"]), 16, 2048).astype(int)
    corpus = rng.integers(0, 32_000, 1_000_000, dtype=np.uint16)
    starts = rng.integers(0, len(corpus) - 2048, len(lengths))
    return [
        np.array([i & 0x7FFF, i >> 15], np.uint16).tobytes() + corpus[s : s + n - 2].tobytes()
        for i, (s, n) in enumerate(zip(starts, lengths, strict=True))
    ]


def pictures(kind: str) -> list[bytes]:
    """Draws pictures with coarse and fine structure, which compress as photographs do."""
    width, height = (512, 512) if kind == "jpeg" else (4000, 3000)
    number = DRAWN[kind]
    rng = np.random.default_rng(0)
    drawn = [_draw(rng, width, height) for _ in range(number)]
    return [_with_comment(drawn[i % number], b"%08d" % i) for i in range(COUNTS[kind])]


def _draw(rng: np.random.Generator, width: int, height: int) -> bytes:
    from PIL import Image

    pixels = np.full((height, width, 3), 128, dtype=np.float32)
    for cells, contrast in ((4, 60), (16, 35), (64, 18)):
        coarse = rng.normal(0, contrast, (3, cells, cells)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(coarse[channel]).resize((width, height), Image.BICUBIC)
            pixels[:, :, channel] += np.asarray(layer)
    pixels += rng.normal(0, 4, (height, width, 1)).astype(np.float32)
    buffer = io.BytesIO()
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    picture.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _with_comment(jpeg: bytes, comment: bytes) -> bytes:
    """Adds a comment segment behind the first marker, so that no two pictures are the same."""
    return jpeg[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + jpeg[2:]


def checksum(sample: bytes | str) -> int:
    """Returns a number that names the content of a text or of bytes."""
    return zlib.crc32(sample.encode() if isinstance(sample, str) else sample)
