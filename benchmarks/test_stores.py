"""Pictures of 77 KB at random keys: by file stores, and by `pread` and `open` at known places."""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Entry, Figure, in_turn
from energon_lite import FileStore, SystemFileStore
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.extras.stores.file_stores import WebdatasetFileStore

NUM_PICTURES, NUM_SHARDS, SIZE = 2000, 8, 77_000


def test_look_ups(benchmark: Any, entries: list[Entry], folder: Path) -> None:
    rng = random.Random(0)
    root, plain = folder / "tars", folder / "plain"
    for path in (root, plain / "pics"):
        path.mkdir(parents=True)
    places: dict[str, tuple[int, int]] = {}
    for shard in range(NUM_SHARDS):
        path = root / f"shard-{shard}.tar"
        with tarfile.open(path, "w") as tar:
            for i in range(shard, NUM_PICTURES, NUM_SHARDS):
                key, data = f"pics/{i:06d}.jpg", rng.randbytes(SIZE)
                info = tarfile.TarInfo(key)
                info.size = SIZE
                tar.addfile(info, io.BytesIO(data))
                (plain / key).write_bytes(data)
        with tarfile.open(path) as tar:
            places.update((member.name, (shard, member.offset_data)) for member in tar)
    prepare_dataset(root, split_parts={"train": ".*"}, num_workers=0)
    keys = rng.sample(sorted(places), NUM_PICTURES)
    files = [os.open(root / f"shard-{shard}.tar", os.O_RDONLY) for shard in range(NUM_SHARDS)]

    def at_place(key: str) -> bytes:
        shard, offset = places[key]
        return os.pread(files[shard], SIZE, offset)

    def by_name(key: str) -> bytes:
        return (plain / key).read_bytes()

    def get(store: FileStore[bytes]) -> Callable[[str], bytes]:
        return lambda key: store[key][0]

    def read_all(read: Callable[[str], bytes]) -> None:
        for key in keys:
            read(key)

    ways = {
        "tars": get(WebdatasetFileStore(root)), "pread": at_place,
        "folder": get(SystemFileStore(plain)), "open": by_name,
    }  # fmt: skip
    for key in keys[::100]:
        assert len({read(key) for read in ways.values()}) == 1
    calls = {name: partial(read_all, read) for name, read in ways.items()}
    found = in_turn(benchmark, calls, rounds=7)
    for name, what, reference in (
        ("tars", "from tars, by `index.sqlite`", "pread"), ("folder", "from a folder", "open")
    ):  # fmt: skip
        ours, theirs = ([t / NUM_PICTURES for t in found[way]] for way in (name, reference))
        entries.append(Figure("File stores", f"a picture {what}", "µs", ours, reference, theirs))
    for descriptor in files:
        os.close(descriptor)
