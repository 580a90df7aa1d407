"""webdataset, as its README shows: shuffled shards, a buffer of 1,000, batches in the pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.hook import encoded
from benchmarks.peers.pillow_pictures import resized
from benchmarks.peers.rows import Row

TITLE = "webdataset"
PACKAGES = ["webdataset==1.0.2"]
DATA_OF = "ours"


def open_loader(folder: Path, row: Row) -> Iterable[Any]:
    import webdataset as wds

    def source(number: int) -> Any:
        tars = sorted(map(str, (folder / f"source{number:04d}").glob("*.tar")))
        return wds.WebDataset(tars, shardshuffle=100)

    if row.num_sources == 1:
        stages = [source(0)]
    else:
        stages = [wds.RandomMix([source(i).repeat() for i in range(row.num_sources)])]
    stages.append(wds.shuffle(1000))
    if row.kind == "text":
        stages += [wds.decode(), wds.to_tuple("txt")]
        if row.group == "hooks":
            stages.append(wds.map_tuple(encoded))
    elif row.group == "bytes":
        stages += [wds.to_tuple("jpg")]
    elif row.image_size is None:
        stages += [wds.decode("torchrgb8"), wds.to_tuple("jpg")]
    else:
        resize = partial(resized, size=row.image_size)
        stages += [wds.decode("pilrgb"), wds.to_tuple("jpg"), wds.map_tuple(resize)]
    # Without a collation function, batches of texts and of bytes become arrays.
    settings: dict[str, Any] = {} if row.is_decoded else {"collation_fn": list}
    batched = wds.DataPipeline(*stages, wds.batched(row.batch_size, **settings))
    # By default it makes a tensor of each array, which takes longer to send.
    collate = list if row.group == "hooks" else None
    return wds.WebLoader(batched, batch_size=None, collate_fn=collate, num_workers=row.workers)


def samples_of(batch: Any, row: Row) -> Any:
    return batch[0] if row.is_decoded else [sample for (sample,) in batch]


def lacks(row: Row) -> str:
    return "it does not pack" if row.group == "packed" else ""
