"""Datasets and encoders for the tests of the page; at module level, as `--with` names them."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from types import SimpleNamespace

import torch

from energon_lite import DefaultTaskEncoder, Packing, stateless

from ..conftest import jpeg, write_tar
from ..helpers import caption_set, prepared, text_set

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
LATIN = SimpleNamespace(decode=lambda ids: bytes(ids).decode("latin-1"))


class PackedBytes(DefaultTaskEncoder):
    """Each byte of the text is a token."""

    packing = Packing(capacity=64)
    tokenizer = LATIN

    @stateless
    def encode_sample(self, sample):
        tokens = torch.tensor(list(sample.text.encode()))
        return {"__key__": sample.__key__, "input_ids": tokens}

    def sample_length(self, sample):
        return len(sample["input_ids"])


class Failing(DefaultTaskEncoder):
    """Its hook raises for every sample, with markup in the text."""

    @stateless
    def encode_sample(self, sample):
        raise RuntimeError(f"cannot encode {EVIL}")


def blend(folder: Path) -> Path:
    """Writes texts (60) and captioned pictures (20), and a metadataset of two splits."""
    text_set(folder / "a", 60)
    caption_set(folder / "b", 20)
    (folder / "blend.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
        "  train:\n    blend:\n"
        "    - {weight: 3, path: ./a, name: texts, loss_weight: 0.5, subflavors: {kind: text}}\n"
        "    - {weight: 1, path: ./b, name: pictures}\n"
        "  only_b:\n    path: ./b\n    split_part: train\n"
    )
    return folder / "blend.yaml"


def tone() -> bytes:
    """A tenth of a second of silence, as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 8000, 0, "NONE", ""))
        writer.writeframes(bytes(1600))
    return file.getvalue()


def odd_set(folder: Path) -> Path:
    """A crude dataset of everything that is odd: markup, a broken picture, huge JSON, no text."""
    members = [
        ("000.json", json.dumps({"a": EVIL, EVIL: [1, {"b": None}]}).encode()),
        ("000.txt", EVIL.encode()),
        ("000.jpg", jpeg(1)),
        ("001.jpg", b"\xff\xd8\xff broken"),
        ("001.txt", b""),
        ("002.json", json.dumps([{"role": EVIL, "content": [{"type": EVIL}]}]).encode()),
        ("003.json", json.dumps({"n": list(range(50_000))}).encode()),
        ("004.wav", tone()),
        ("005.txt", b"\xff\xfe no utf-8"),
        ("006.bin", b"\x00\x01"),
        (f"{EVIL.replace('/', '')}.txt", b"markup in a key"),
    ]  # fmt: skip
    write_tar(folder / "a.tar", members)
    return prepared(folder, "CrudeWebdataset")
