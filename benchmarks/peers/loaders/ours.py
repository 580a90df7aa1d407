"""energon_lite, at the settings of Energon's quickstart: window 100, sequences of 100 samples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers.hook import encoded
from benchmarks.peers.loaders.tars import write_tars
from benchmarks.peers.packs import PackedSamples
from benchmarks.peers.rows import PACK_TOKENS, Row

TITLE = "energon_lite"
PACKAGES = ["-e", ".[jpeg]"]
SHOWN = ["energon_lite", "simplejpeg"]
SAMPLE_TYPES = {
    "txt": ("TextSample", "text"),
    "jpg": ("ImageSample", "image"),
    "bin": ("TextSample", "text"),
}


def prepare(sources: list[Any], folder: Path) -> None:
    from energon_lite.extras.lengths.length_index import measure_lengths
    from energon_lite.extras.prepare import prepare_dataset

    for number, samples in enumerate(sources):
        # Workers of webdataset need a shard each.
        at_least = 4 if len(sources) == 1 else 1
        write_tars(samples, folder / f"source{number:04d}", at_least)
        sample_type, field = SAMPLE_TYPES[samples.suffix]
        prepare_dataset(
            folder / f"source{number:04d}",
            split_parts={"train": ".*"},
            sample_type=sample_type,
            field_map={field: samples.suffix},
            num_workers=0,
        )
        if samples.kind == "tokens":
            encoder = packing_encoder()
            measure_lengths(folder / f"source{number:04d}", encoder, name="tokens", num_workers=0)
    entries = "".join(f"    - {{path: source{i:04d}}}\n" for i in range(len(sources)))
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
    (folder / "blend.yaml").write_text(head + entries, encoding="utf-8")


def packing_encoder() -> Any:
    import numpy as np

    from energon_lite import DefaultTaskEncoder, Packing, stateless

    class Packs(DefaultTaskEncoder):
        """Packs planned by the stored lengths; tokens are read when their pack is made."""

        packing = Packing(PACK_TOKENS, lengths="tokens")

        def sample_length(self, sample: Any) -> int:
            return len(sample.text) // 2

        @stateless
        def postencode_sample(self, sample: Any) -> Any:
            # The packer makes tensors, of whole packs.
            tokens = np.frombuffer(sample.text, dtype=np.uint16)
            return {"__key__": sample.__key__, "input_ids": tokens}

    return Packs()


def open_loader(folder: Path, row: Row, **settings: Any) -> Iterable[Any]:
    from energon_lite import (
        DefaultTaskEncoder,
        SampleDecoder,
        TextSample,
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
            decoder = SampleDecoder(image_decode="torchrgb8", image_size=row.image_size)

    class Hooked(Encoder):
        """Makes tokens of texts."""

        @stateless
        def encode_sample(self, sample: Any) -> Any:
            return TextSample.derive_from(sample, text=encoded(sample.text))

    path = folder / ("source0000" if row.num_sources == 1 else "blend.yaml")
    encoder = Hooked if row.group == "hooks" else Encoder
    dataset: Any = get_train_dataset(
        path,
        batch_size=row.batch_size,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        task_encoder=packing_encoder() if row.kind == "tokens" else encoder(),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=row.workers, **settings),
    )
    return get_savable_loader(dataset)


def samples_of(batch: Any, row: Row) -> Any:
    if row.kind == "tokens":
        return PackedSamples(
            len(batch.__key__), zip(batch.input_ids, batch.cu_seqlens.tolist(), strict=True)
        )
    return batch.text if row.kind == "text" else batch.image


def lacks(row: Row) -> str:
    return ""
