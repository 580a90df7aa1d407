"""Megatron-Energon at the settings of its quickstart: window 100, sequences of 100 samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers.hook import encoded
from benchmarks.peers.packs import PackedSamples, tokens_of
from benchmarks.peers.pillow_pictures import resized
from benchmarks.peers.rows import PACK_TOKENS, Row

TITLE = "Megatron-Energon"
PACKAGES = ["megatron-energon==7.4.1"]
DATA_OF = "ours"


def packing_encoder() -> Any:
    """Packs longest first, as its users write it, from a buffer of 256 samples."""
    import torch
    from megatron.energon import DefaultTaskEncoder, Sample, edataclass, stateless

    @edataclass
    class Pack(Sample):
        """Tokens of a pack, padded, and where its samples begin and end."""

        input_ids: torch.Tensor
        cu_seqlens: list[int]

    class Packs(DefaultTaskEncoder):
        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            packs: list[list[Any]] = []
            rooms: list[int] = []
            for sample in sorted(samples, key=lambda sample: -len(sample.text)):
                length = len(sample.text) // 2
                for number, room in enumerate(rooms):
                    if room >= length:
                        packs[number].append(sample)
                        rooms[number] -= length
                        break
                else:
                    packs.append([sample])
                    rooms.append(PACK_TOKENS - length)
            return packs

        @stateless
        def pack_selected_samples(self, samples: list[Any]) -> Pack:
            parts = [tokens_of(sample.text) for sample in samples]
            bounds = [0, *itertools.accumulate(map(len, parts))]
            padding = torch.zeros(PACK_TOKENS - bounds[-1], dtype=torch.long)
            return Pack(
                __key__=",".join(sample.__key__ for sample in samples),
                __restore_key__=(),
                input_ids=torch.cat([*parts, padding]),
                cu_seqlens=bounds,
            )

    return Packs()


def open_loader(folder: Path, row: Row) -> Iterable[Any]:
    from megatron.energon import (
        DefaultTaskEncoder,
        ImageSample,
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
            decoder = SampleDecoder(image_decode="pilrgb")

        @stateless
        def encode_sample(self, sample: Any) -> Any:
            if row.group == "hooks":
                return TextSample.derive_from(sample, text=encoded(sample.text))
            if row.image_size is None:
                return sample
            picture = resized(sample.image, row.image_size)
            return ImageSample.derive_from(sample, image=picture)

    path = folder / ("source0000" if row.num_sources == 1 else "blend.yaml")
    is_packed = row.kind == "tokens"
    dataset: Any = get_train_dataset(
        path,
        packing_buffer_size=256 if is_packed else None,
        batch_size=row.batch_size,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        task_encoder=packing_encoder() if is_packed else Encoder(),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=row.workers),
    )
    return get_savable_loader(dataset)


def samples_of(batch: Any, row: Row) -> Any:
    if row.kind == "tokens":
        rows = list(zip(batch.input_ids, batch.cu_seqlens, strict=True))
        return PackedSamples(sum(len(bounds) - 1 for _, bounds in rows), rows)
    return batch.text if row.kind == "text" else batch.image


def lacks(row: Row) -> str:
    return ""
