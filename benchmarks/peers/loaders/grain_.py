"""Grain: ArrayRecord files, shuffled over all records.

Groups of one record, as its guide says for random access; uncompressed, as the files of the others;
and files of 2,000 records, since a read takes longer the more records its file has (10 µs with
2,000, 30 with 20,000, 560 with 200,000).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.hook import encoded
from benchmarks.peers.packs import PackedSamples, tokens_of
from benchmarks.peers.pillow_pictures import decoded
from benchmarks.peers.rows import PACK_TOKENS, Row

TITLE = "Grain"
PACKAGES = ["grain==0.2.18", "array-record==0.8.6"]


def prepare(sources: list[Any], folder: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    for number, samples in enumerate(sources):
        (folder / f"source{number:04d}").mkdir()
        for first in range(0, len(samples), 2000):
            path = folder / f"source{number:04d}" / f"{first:08d}.arrayrecord"
            writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
            for i in range(first, min(first + 2000, len(samples))):
                writer.write(samples[i])
            writer.close()


def open_loader(folder: Path, row: Row) -> Iterable[Any]:
    import grain

    def source(number: int) -> Any:
        paths = sorted(map(str, (folder / f"source{number:04d}").glob("*.arrayrecord")))
        records = grain.sources.ArrayRecordDataSource(paths)
        return grain.MapDataset.source(records).shuffle(seed=number)

    if row.num_sources == 1:
        dataset = source(0).repeat()
    else:
        parts = [source(i).repeat() for i in range(row.num_sources)]
        dataset = grain.MapDataset.mix(parts, weights=[1 / row.num_sources] * row.num_sources)
    if row.kind == "text":
        dataset = dataset.map(bytes.decode)
        if row.group == "hooks":
            dataset = dataset.map(encoded)
    elif row.is_decoded:
        dataset = dataset.map(partial(decoded_array, size=row.image_size))
    elif row.kind == "tokens":
        samples = dataset.map(packable).to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=64)
        )
        packs = grain.experimental.FirstFitPackIterDataset(
            samples, length_struct={"input_ids": PACK_TOKENS}, num_packing_bins=64
        )
        return packs.batch(row.batch_size)
    # Its own batches stack arrays; texts and bytes stay lists.
    settings: dict[str, Any] = {} if row.is_decoded else {"batch_fn": list}
    # One thread, as for all loaders, and four batches ahead: the 500 elements that are its default
    # would be half a minute's work with pictures, none of which is measured.
    read_options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    batches = dataset.batch(row.batch_size, **settings).to_iter_dataset(read_options)
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
