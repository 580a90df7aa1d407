"""Reads data of a server with one loader, in the loader's own environment.

    python -m benchmarks.remote.peer_loaders read LOADER SERVER NAME WORKERS SECONDS
    python -m benchmarks.remote.peer_loaders convert FOLDER

reads an epoch, or for some seconds, and prints what came as JSON; or converts tars for litData.
Each loader is used as its documentation shows: shards in random order, the same shuffle window
where it has one, batches of 16 samples as bytes. Energon and webdataset read the same tars.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.exits import exit_after

BATCH, WINDOW, NUM_STREAMS = 16, 1000, 16
NUM_SHARDS = 16
KEY = {"access_key": "benchmark", "secret_key": "benchmark"}
IMPORTED = {
    "ours": "energon_lite",
    "megatron_energon": "megatron.energon",
    "litdata_": "litdata",
    "webdataset_": "webdataset",
}


def ours(server: str, name: str, num_workers: int) -> Iterator[list[bytes]]:
    """Reads with energon_lite, as it reads `s3://` everywhere."""
    return _batches("energon_lite", f"s3://bucket/{name}", num_workers, num_streams=NUM_STREAMS)


def megatron_energon(server: str, name: str, num_workers: int) -> Iterator[list[bytes]]:
    """Reads with Megatron-Energon through multi-storage-client, with the cache it recommends."""
    folder = Path(tempfile.mkdtemp())
    options = {"base_path": "bucket", "endpoint_url": server, "region_name": "us-east-1"}
    profile = {
        "storage_provider": {"type": "s3", "options": options},
        "credentials_provider": {"type": "S3Credentials", "options": KEY},
    }
    cache = {"size": "500G", "location": str(folder), "eviction_policy": {"policy": "fifo"}}
    file = folder / "msc.json"
    file.write_text(json.dumps({"profiles": {"served": profile}, "cache": cache}))
    os.environ["MSC_CONFIG"] = str(file)
    return _batches("megatron.energon", f"msc://served/{name}", num_workers)


def _batches(package: str, path: str, num_workers: int, **config: Any) -> Iterator[list[bytes]]:
    """Reads with the functions that both packages have."""
    energon = importlib.import_module(package)

    class Bytes(energon.DefaultTaskEncoder):  # type: ignore[name-defined,misc]
        """Leaves the files of samples as they are."""

        decoder = None

    config = {"rank": 0, "world_size": 1, "num_workers": num_workers, **config}
    dataset = energon.get_train_dataset(
        path, batch_size=BATCH, shuffle_buffer_size=WINDOW, max_samples_per_sequence=None,
        repeat=False, task_encoder=Bytes(), worker_config=energon.WorkerConfig(**config),
    )  # fmt: skip
    return (batch.text for batch in energon.get_savable_loader(dataset))


def webdataset_(server: str, name: str, num_workers: int) -> Iterable[list[tuple[bytes]]]:
    """Reads with webdataset, which streams whole shards from the web server."""
    import webdataset as wds

    shards = f"{server}/bucket/{name}/shard-{{0000..{NUM_SHARDS - 1:04d}}}.tar"
    dataset = wds.WebDataset(shards, shardshuffle=100).shuffle(WINDOW).to_tuple("txt")
    batched = dataset.batched(BATCH, collation_fn=list)
    loader: Any = wds.WebLoader(batched, batch_size=None, num_workers=num_workers)
    return ([sample for (sample,) in batch] for batch in loader)


def litdata_(server: str, name: str, num_workers: int) -> Iterable[list[bytes]]:
    """Reads with litData, which downloads the chunks that it converted the tars to."""
    from litdata import StreamingDataLoader, StreamingDataset

    options = {
        "endpoint_url": server,
        "aws_access_key_id": KEY["access_key"],
        "aws_secret_access_key": KEY["secret_key"],
        "region_name": "us-east-1",
    }
    dataset = StreamingDataset(
        f"s3://bucket/{name}/litdata", shuffle=True, transform=bytes, storage_options=options,
        cache_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    loader: Any = StreamingDataLoader(
        dataset, batch_size=BATCH, collate_fn=list, num_workers=num_workers
    )
    return loader  # type: ignore[no-any-return]


def convert(folder: Path) -> None:
    """Writes the samples of tars as chunks of 64 MB, as litData's guide has them."""
    from litdata import optimize

    optimize(
        fn=samples_in, inputs=sorted(map(str, folder.glob("*.tar"))), chunk_bytes="64MB",
        output_dir=str(folder / "litdata"), num_workers=1, start_method="fork", verbose=False,
    )  # fmt: skip


def samples_in(shard: str) -> Iterator[bytes]:
    """Yields the samples of a tar."""
    with tarfile.open(shard) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            yield file.read()


def read(loader: str, server: str, name: str, num_workers: int, seconds: float) -> dict[str, float]:
    """Reads an epoch, or as much as comes within some seconds; imports do not count."""
    importlib.import_module(IMPORTED[loader])
    since = time.perf_counter()
    first = num_samples = num_bytes = 0.0
    for batch in globals()[loader](server, name, num_workers):
        first = first or time.perf_counter() - since
        num_samples += len(batch)
        num_bytes += sum(map(len, batch))
        if time.perf_counter() > since + seconds:
            break
    wall = time.perf_counter() - since
    return {"first_sec": first, "wall_sec": wall, "samples": num_samples, "bytes": num_bytes}


def main() -> None:
    """Does what the command line says."""
    import torch

    torch.set_num_threads(1)
    what, *words = sys.argv[1:]
    found = dict[str, float]()
    if what == "convert":
        convert(Path(words[0]))
    else:
        loader, server, name, num_workers, seconds = words
        found = read(loader, server, name, int(num_workers), float(seconds))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    exit_after(main)
