"""The examples of Energon's page on blending, as they stand there, with the import changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    BlendDataset,
    CaptioningSample,
    ConcatDataset,
    DefaultTaskEncoder,
    EpochizeDataset,
    MapDataset,
    MixBatchDataset,
    WorkerConfig,
    concat_pad,
    get_loader,
    get_train_dataset,
    get_val_dataset,
    homogeneous_concat_mix,
    prepare_dataset,
)

from .conftest import jpeg, write_tar
from .helpers import caption_set

ONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


@dataclass
class ImageBatch:
    __key__: list[str]
    image: torch.Tensor


@dataclass
class CaptioningBatch:
    __key__: list[str]
    image: torch.Tensor
    caption: list[str]


class ImageTask(DefaultTaskEncoder):
    def __init__(self) -> None:
        super().__init__(batch_type=ImageBatch)


class CaptioningTask(DefaultTaskEncoder):
    def __init__(self) -> None:
        super().__init__(batch_type=CaptioningBatch)


def image_set(folder: Path, num_samples: int) -> Path:
    members = [(f"{i:05d}.jpg", jpeg(i)) for i in range(num_samples)]
    write_tar(folder / "shard-000.tar", members)
    prepare_dataset(
        folder, split_parts={"train": ".*"}, sample_type="ImageSample",
        field_map={"image": "jpg"}, num_workers=0,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("page")
    return {
        "image": image_set(root / "image_dataset", 24),
        "captioning1": caption_set(root / "captioning_dataset_1", 24),
        "captioning2": caption_set(root / "captioning_dataset_2", 20),
    }


def training(path: Path, encoder: Any, batch_size: int = 8) -> Any:
    return get_train_dataset(
        path,
        batch_size=batch_size,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        task_encoder=encoder,
    )


def test_blend_yields_whole_batches_of_each_dataset_by_weight(sets) -> None:
    train_loader = get_loader(
        BlendDataset(
            (training(sets["image"], ImageTask()), 0.6),
            (training(sets["captioning1"], CaptioningTask()), 0.4),
        )
    )
    kinds = Counter(type(batch) for batch in islice(train_loader, 100))
    assert set(kinds) == {ImageBatch, CaptioningBatch}
    assert abs(kinds[ImageBatch] - 60) <= 5  # four streams: 2 * 4 + 5 at the very most


def test_concat_yields_each_validation_sample_once(sets) -> None:
    val_loader = get_loader(
        ConcatDataset(
            get_val_dataset(
                sets["image"], split_part="train", batch_size=8, task_encoder=ImageTask()
            ),
            get_val_dataset(
                sets["captioning2"], split_part="train", batch_size=8,
                task_encoder=CaptioningTask(),
            ),
        )
    )  # fmt: skip
    for _ in range(2):
        batches = list(val_loader)
        keys = Counter((type(batch), key) for batch in batches for key in batch.__key__)
        assert len(keys) == 44
        assert set(keys.values()) == {1}


def test_homogeneous_mix_has_both_datasets_in_each_batch(sets) -> None:
    mix_dataset: Any = MixBatchDataset(
        # It is important to set the inner batch_size to 1, to ensure proper mixing
        (training(sets["captioning1"], CaptioningTask(), batch_size=1), 6),
        (training(sets["captioning2"], CaptioningTask(), batch_size=1), 4),
        batch_size=32,
        batch_mix_fn=homogeneous_concat_mix,
    )
    mix_dataset = EpochizeDataset(mix_dataset, 10)
    mix_dataset = MapDataset(mix_dataset, map_fn=lambda batch: batch)
    train_loader = get_loader(mix_dataset, worker_config=ONE)
    for _ in range(2):
        batches = list(train_loader)
        assert len(batches) == 10
        for batch in batches:
            assert type(batch) is CaptioningBatch
            assert batch.image.shape[0] == 32
    shares = train_loader.stats()
    assert [round(s.actual_share, 1) for s in shares.values()] == [0.6, 0.4]


@dataclass
class ImageWithOptionalCaptionBatch:
    images: torch.Tensor
    captions: list[Any]


def my_mix_fn(batch: list[Any]) -> ImageWithOptionalCaptionBatch:
    # Here, concat the images, and return a list of captions which may contain None.
    return ImageWithOptionalCaptionBatch(
        images=concat_pad([entry.image for entry in batch]),
        captions=[entry.caption if isinstance(entry, CaptioningBatch) else None for entry in batch],
    )


def test_heterogeneous_mix_by_an_own_function(sets) -> None:
    mix_dataset = MixBatchDataset(
        (training(sets["image"], ImageTask(), batch_size=1), 6),
        (training(sets["captioning1"], CaptioningTask(), batch_size=1), 4),
        batch_size=32,
        batch_mix_fn=my_mix_fn,
    )
    num_captions = 0
    for batch in islice(get_loader(mix_dataset, worker_config=ONE), 10):
        assert type(batch) is ImageWithOptionalCaptionBatch
        assert len(batch.captions) == batch.images.shape[0] == 32
        num_captions += sum(caption is not None for caption in batch.captions)
    assert abs(num_captions - 128) <= 5


# Type for intermediate batch, after batching operation
@dataclass
class CaptioningRawBatch:
    __key__: list[str]
    image: torch.Tensor
    caption: list[str]


# Typing for the resulting batch data
@dataclass
class WeightedCaptioningBatch:
    __keys__: list[str]
    images: torch.Tensor
    text: torch.Tensor
    # scalar, as samples between sources are not intermixed in a single gpu batch
    weight: float


# All the typing is optional
class WeightedCaptioningTaskEncoder(
    DefaultTaskEncoder[
        CaptioningSample,
        CaptioningSample,
        CaptioningRawBatch,
        WeightedCaptioningBatch,
    ]
):
    """A simple task encoder for captioning."""

    def __init__(
        self,
        tokenizer: Callable[[list[str]], torch.Tensor],
        max_length: int = 128,
        sample_weight: float = 1,
    ) -> None:
        super().__init__(batch_type=CaptioningRawBatch)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.sample_weight = sample_weight

    def encode_batch(self, batch_data: CaptioningRawBatch) -> WeightedCaptioningBatch:
        return WeightedCaptioningBatch(
            __keys__=batch_data.__key__,
            images=batch_data.image,
            text=self.tokenizer(batch_data.caption),
            weight=self.sample_weight,
        )


def tokenize(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption), len(caption.split())] for caption in captions])


def test_sample_weights_of_two_sources(sets) -> None:
    train_loader = get_loader(
        BlendDataset(
            (
                training(
                    sets["captioning1"], WeightedCaptioningTaskEncoder(tokenize, sample_weight=0.2)
                ),
                0.5,
            ),
            (
                training(
                    sets["captioning2"], WeightedCaptioningTaskEncoder(tokenize, sample_weight=0.8)
                ),
                0.5,
            ),
        )
    )
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    weights: Counter[float] = Counter()
    for sample in islice(train_loader, 40):
        # sample is WeightedCaptioningBatch
        loss = model(sample.text.float()).pow(2).mean() * sample.weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights[sample.weight] += 1
        assert sample.loss_weight.tolist() == [1.0] * 8  # the metadataset's, beside the user's own
    assert set(weights) == {0.2, 0.8}
    assert abs(weights[0.2] - 20) <= 5
