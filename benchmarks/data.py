"""Data sets for the benchmarks: tars written as bytes, the same on every machine."""

from __future__ import annotations

import functools
import io
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.measure import REPO
from energon_lite.extras.prepare import prepare_dataset

OMNIBAL = REPO.parent / "shared" / "data" / "omnibal_lengths"
needs_omnibal = pytest.mark.skipif(
    not OMNIBAL.is_dir(), reason="the folder shared/data is not here"
)

_WORDS = (
    "the a of and to in is that it was for on as with be by at this from or which one had not "
    "but what all were when we there can an your said if do will each about how up out them then "
    "she many some so these would other into has more her two like him see time could no make "
    "than first been its who now people my made over did down only way find use may water long"
)


def tar_member(name: str, payload: bytes) -> bytes:
    """One ustar member, padded to whole blocks."""
    header = bytearray(512)
    raw = name.encode()
    header[: len(raw)] = raw
    header[100:136] = b"0000644\x000000000\x000000000\x00%011o\x00" % len(payload)
    header[136:156] = b"00000000000\x00        "
    header[156:265] = b"0" + bytes(100) + b"ustar\x0000"
    header[148:156] = b"%06o\x00 " % sum(header)
    return bytes(header) + payload + bytes(-len(payload) % 512)


def write_texts(
    root: Path, *, num_samples: int, num_shards: int, mean_bytes: int = 500
) -> dict[str, str]:
    """Writes text samples, a fifth shorter to a fifth longer than the mean, and prepares them.

    Returns:
        The text of each sample by its key.
    """
    rng = random.Random(num_samples)
    corpus = " ".join(rng.choices(_WORDS.split(), k=20_000))
    spread = mean_bytes // 5
    root.mkdir(parents=True)
    texts: dict[str, str] = {}
    for shard in range(num_shards):
        chunks = []
        first, stop = (num_samples * s // num_shards for s in (shard, shard + 1))
        for i in range(first, stop):
            start = rng.randrange(len(corpus) - mean_bytes - spread)
            text = corpus[start : start + mean_bytes + rng.randint(-spread, spread)]
            texts[f"{i:08d}"] = text
            chunks.append(tar_member(f"{i:08d}.txt", text.encode()))
        (root / f"shard-{shard:04d}.tar").write_bytes(b"".join(chunks) + bytes(1024))
    prepare_texts(root)
    return texts


def prepare_texts(root: Path, num_workers: int | None = None) -> None:
    """Prepares a folder of texts: all of it is the training split."""
    prepare_dataset(
        root,
        split_parts={"train": ".*"},
        sample_type="TextSample",
        field_map={"text": "txt"},
        num_workers=num_workers,
    )


def link_tars(source: Path, target: Path) -> list[Path]:
    """Makes a folder with the same tars and nothing else."""
    target.mkdir(parents=True)
    tars = []
    for tar in sorted(source.glob("*.tar")):
        tars.append(target / tar.name)
        os.link(tar, tars[-1])
    return tars


def jpegs(count: int) -> tuple[str, Sequence[bytes]]:
    """Photographs if the project's shared data lies beside the repository, else drawn pictures.

    Returns:
        What they are, and the pictures.
    """
    shared = Path(__file__).resolve().parents[2] / "shared" / "data" / "coco_captions"
    photographs = sorted((shared / "permissive").glob("*.jpg"))[:count]
    if photographs:
        return "photographs", [path.read_bytes() for path in photographs]
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(count):
        coarse = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((640, 480)).save(buffer, "JPEG", quality=90)
        drawn.append(buffer.getvalue())
    return "drawn pictures", drawn


@functools.cache
def omnibal_rows() -> Any:
    """Tokens and tiles of OmniBal's samples with images, as they are stored; shape (N, 2)."""
    return np.array(
        [
            (sample["token_num"], sample["vit_num"])
            for path in sorted(OMNIBAL.glob("*_token_lengths.json"))
            for sample in json.loads(path.read_bytes())
        ]
    )


@functools.cache
def image_lengths() -> Any:
    """The same in random order."""
    return np.random.Generator(np.random.Philox(5)).permutation(omnibal_rows())
