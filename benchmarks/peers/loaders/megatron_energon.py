"""Megatron-Energon at the settings of its quickstart: window 100, sequences of 100 samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers.pillow_pictures import resized
from benchmarks.peers.rows import Row

TITLE = "Megatron-Energon"
PACKAGES = ["megatron-energon==7.4.1"]
DATA_OF = "ours"


def open_loader(folder: Path, row: Row) -> Iterable[Any]:
    from megatron.energon import (
        DefaultTaskEncoder,
        ImageSample,
        SampleDecoder,
        WorkerConfig,
        get_savable_loader,
        get_train_dataset,
        stateless,
    )

    class Encoder(DefaultTaskEncoder):
        """Stacks pictures; leaves bytes as they are."""

        decoder: Any = SampleDecoder(image_decode="torchrgb8")
        if row.group == "bytes":
            decoder = None
        if row.image_size is not None:
            decoder = SampleDecoder(image_decode="pilrgb")

        @stateless
        def encode_sample(self, sample: Any) -> Any:
            if row.image_size is None:
                return sample
            picture = resized(sample.image, row.image_size)
            return ImageSample.derive_from(sample, image=picture)

    path = folder / ("source0000" if row.num_sources == 1 else "blend.yaml")
    dataset: Any = get_train_dataset(
        path,
        batch_size=row.batch_size,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        task_encoder=Encoder(),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=row.workers),
    )
    return get_savable_loader(dataset)


def samples_of(batch: Any, row: Row) -> Any:
    return batch.text if row.kind == "text" else batch.image
