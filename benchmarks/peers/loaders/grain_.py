"""Grain: ArrayRecord files, shuffled over all records.

Groups of one record, as its guide says for random access, and uncompressed like the files of the
others: zstd, the default, makes a read of 500 B ten times as slow.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.packs import PackedSamples, tokens_of
from benchmarks.peers.pillow_pictures import decoded
from benchmarks.peers.rows import PACK_TOKENS, Row

TITLE = "Grain"
PACKAGES = ["grain==0.2.18", "array-record==0.8.6"]


def prepare(sources: list[Any], folder: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    for number, samples in enumerate(sources):
        writer = ArrayRecordWriter(str(folder / f"source{number:04d}"), "group_size:1,uncompressed")
        for sample in samples:
            writer.write(sample)
        writer.close()


def open_loader(folder: Path, row: Row) -> Iterable[Any]:
    import grain

    def source(number: int) -> Any:
        records = grain.sources.ArrayRecordDataSource(str(folder / f"source{number:04d}"))
        return grain.MapDataset.source(records).shuffle(seed=number)

    if row.num_sources == 1:
        dataset = source(0).repeat()
    else:
        parts = [source(i).repeat() for i in range(row.num_sources)]
        dataset = grain.MapDataset.mix(parts, weights=[1 / row.num_sources] * row.num_sources)
    if row.kind == "text":
        dataset = dataset.map(bytes.decode)
    elif row.is_decoded:
        dataset = dataset.map(partial(decoded_array, size=row.image_size))
    elif row.kind == "tokens":
        samples = dataset.map(packable).to_iter_dataset()
        packs = grain.experimental.FirstFitPackIterDataset(
            samples, length_struct={"input_ids": PACK_TOKENS}, num_packing_bins=64
        )
        return packs.batch(row.batch_size)
    # Its own batches stack arrays; texts and bytes stay lists.
    settings: dict[str, Any] = {} if row.is_decoded else {"batch_fn": list}
    batches = dataset.batch(row.batch_size, **settings).to_iter_dataset()
    if row.workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=row.workers))
    return batches


def packable(payload: bytes) -> dict[str, Any]:
    return {"input_ids": tokens_of(payload).numpy()}


def decoded_array(payload: bytes, size: int | None) -> Any:
    return decoded(payload, size).numpy()


def samples_of(batch: Any, row: Row) -> Any:
    if row.kind == "tokens":
        import numpy as np

        segments = batch["input_ids_segment_ids"]
        rows = [
            (tokens, [0, *(np.flatnonzero(np.diff(own, append=0)) + 1)])
            for tokens, own in zip(batch["input_ids"], segments, strict=True)
        ]
        return PackedSamples(int(segments.max(axis=1).sum()), rows)
    return batch


def lacks(row: Row) -> str:
    return ""
