"""Task encoders as training frameworks write them: several types, own dataclasses, a knapsack."""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import (
    Batch,
    CaptioningSample,
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    Sample,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    batch_pad_stack,
    get_train_dataset,
    stateless,
)

from ..helpers import Ranks, assert_same, caption_set, text_set


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of captions, of texts and of crude samples, and a blend of the three."""
    root = tmp_path_factory.mktemp("frameworks")
    caption_set(root / "captions", 16)
    text_set(root / "texts", 16)
    text_set(root / "crude", 16)
    (root / "crude" / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors: {kind: chat}\n"
    )
    (root / "blend.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        "    - {weight: 2, path: captions, subflavors: {kind: caption}}\n"
        "    - {weight: 1, path: texts}\n    - {weight: 1, path: crude}\n"
    )
    return root


@dataclass
class TaskSample(Sample):
    """Declares the service fields again, as an ordinary dataclass."""

    __key__: str
    __restore_key__: tuple[Any, ...]
    __subflavors__: dict[str, Any]
    imgs: list[torch.Tensor]
    tokens: torch.Tensor
    labels: torch.Tensor | None = None


@dataclass
class PackedTaskSample(Sample):
    __key__: str
    __restore_key__: tuple[Any, ...]
    __subflavors__: dict[str, Any]
    imgs: list[torch.Tensor]
    tokens: torch.Tensor
    cu_lengths: list[int]


@dataclass
class TaskBatch(Batch):
    __key__: list[str]
    __restore_key__: tuple[Any, ...]
    __subflavors__: list[dict[str, Any]]
    imgs: torch.Tensor
    tokens: np.ndarray[Any, Any]
    cu_lengths: list[list[int]]


def greedy_knapsack(sizes: list[int], samples: list[Any], capacity: int) -> list[list[Any]]:
    """Takes the largest item that still fits, again and again."""
    pairs = sorted(zip(sizes, samples, strict=True), key=lambda pair: pair[0])
    packs = []
    while pairs:
        pack, room = [], capacity
        while (place := bisect.bisect([size for size, _ in pairs], room)) > 0:
            size, sample = pairs.pop(place - 1)
            pack.append(sample)
            room -= size
        packs.append(pack)
    return packs


class Multimodal(DefaultTaskEncoder[Any, Any, Any, Any]):
    """One encoder of several sample types; batches become dicts of arrays."""

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        if isinstance(sample, CaptioningSample):
            yield self.encode_captioning(sample)
        elif isinstance(sample, TextSample):
            yield self.encode_any(sample, sample.text, [])
        else:
            raise NotImplementedError(f"no encoding of {type(sample).__name__}")

    def encode_captioning(self, sample: CaptioningSample) -> TaskSample:
        image = sample.image + 0.1 * torch.rand(())
        return self.encode_any(sample, sample.caption, [image])

    def encode_any(self, sample: Any, text: str, imgs: list[torch.Tensor]) -> TaskSample:
        tokens = torch.tensor(list(text.encode()))
        return TaskSample(
            __key__=sample.__key__,
            __restore_key__=sample.__restore_key__,
            __subflavors__=sample.__subflavors__,
            imgs=imgs,
            tokens=tokens,
            labels=tokens.roll(-1),
        )

    cookers = (
        Cooker(
            lambda crude: TextSample(**basic_sample_keys(crude), text=crude["txt"]),
            has_subflavors={"kind": "chat"},
        ),
    )

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return greedy_knapsack([len(sample.tokens) for sample in samples], samples, 40)

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> PackedTaskSample:
        return PackedTaskSample(
            __key__=",".join(sample.__key__ for sample in samples),
            __restore_key__=(),
            __subflavors__=samples[0].__subflavors__,
            imgs=[image for sample in samples for image in sample.imgs],
            tokens=torch.cat([sample.tokens for sample in samples]),
            cu_lengths=np.cumsum([len(sample.tokens) for sample in samples]).tolist(),
        )

    def batch(self, samples: list[Any]) -> TaskBatch:
        tokens = np.zeros((len(samples), max(len(s.tokens) for s in samples)), dtype=np.int64)
        for row, sample in zip(tokens, samples, strict=True):
            row[: len(sample.tokens)] = sample.tokens
        images = [image for sample in samples for image in sample.imgs]
        return TaskBatch(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=tuple(sample.__restore_key__ for sample in samples),
            __subflavors__=[sample.__subflavors__ for sample in samples],
            imgs=torch.stack(images) if images else torch.zeros(1, 1),
            tokens=tokens,
            cu_lengths=[getattr(sample, "cu_lengths", []) for sample in samples],
        )

    def encode_batch(self, batch: TaskBatch) -> dict[str, Any]:
        raw = dataclasses.asdict(batch)
        del raw["__subflavors__"]
        return raw


@dataclass
class ImageText(Sample):
    image: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


@dataclass
class ImageTextBatch(Batch):
    prompt_tokens: torch.Tensor | None = None
    images: torch.Tensor | None = None


class WithTypes(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Names its types, fills samples after they were made, and batches to a plain dict."""

    def __init__(self) -> None:
        super().__init__(
            encoded_sample_type=ImageText, raw_batch_type=ImageTextBatch, batch_type=dict
        )

    @stateless
    def encode_sample(self, sample: CaptioningSample) -> ImageText:
        encoded = ImageText(
            __key__=sample.__key__,
            __restore_key__=sample.__restore_key__,
            __subflavors__=sample.__subflavors__,
            __sources__=None,
        )
        encoded.image = sample.image
        encoded.tokens = torch.tensor(list(sample.caption.encode()))
        return encoded

    def batch(self, samples: list[Any]) -> ImageTextBatch:
        batch = ImageTextBatch(
            __key__=[sample.__key__ for sample in samples], __restore_key__=(), __sources__=None,
            __subflavors__=[],
        )  # fmt: skip
        batch.images = torch.stack([sample.image for sample in samples])
        batch.prompt_tokens = batch_pad_stack([sample.tokens for sample in samples])
        return batch

    def encode_batch(self, batch: ImageTextBatch) -> dict[str, Any]:
        assert batch.prompt_tokens is not None
        micro_batch, length = batch.prompt_tokens.shape
        positions = torch.arange(length).expand(micro_batch, -1)
        return {**batch.__dict__, "keys": batch.__key__, "position_ids": positions}


class Decoding(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Decodes by a function of its own, and cooks by a method that is chosen when it is made."""

    @staticmethod
    def decoder(parts: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {k: v.decode() if isinstance(v, bytes) else v for k, v in parts.items()}

    def __init__(self) -> None:
        super().__init__()
        self.cookers = [Cooker(self.cook)]  # type: ignore[misc]

    def cook(self, crude: CrudeSample) -> TextSample:
        return TextSample(**basic_sample_keys(crude), text=crude["txt"])


@pytest.mark.parametrize(
    ("encoder", "path", "settings"),
    [
        (Multimodal, "captions", {}),
        (Multimodal, "blend.yaml", {}),
        (Multimodal, "blend.yaml", {"packing_buffer_size": 8}),
        (WithTypes, "captions", {}),
        (Decoding, "crude", {}),
    ],
)
def test_encoder_of_a_framework_runs_and_resumes_exactly(root, encoder, path, settings) -> None:
    def make(config: WorkerConfig) -> Any:
        return get_train_dataset(
            root / path, worker_config=config, batch_size=3, shuffle_buffer_size=10,
            max_samples_per_sequence=100, task_encoder=encoder(), **settings,
        )  # fmt: skip

    expected = Ranks(make, 1, num_streams=2).slots(10)
    run = Ranks(make, 1, num_streams=2)
    found = run.slots(5)
    found.update(Ranks(make, 1, num_streams=2, states=run.save()).slots(5))
    assert_same(found, expected)
    if encoder is Multimodal:
        assert all({"__key__", "imgs", "tokens", "cu_lengths"} <= b.keys() for b in found.values())
        if settings:
            lengths = [c[-1] for batch in found.values() for c in batch["cu_lengths"]]
            assert max(lengths) <= 40
            assert sum(lengths) > 20 * len(lengths)
