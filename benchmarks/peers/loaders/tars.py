"""Tars of one member per sample, of about 16 MB each: what ours, Energon and webdataset read."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

SHARD_BYTES = 16 << 20


def write_tars(samples: Any, folder: Path, at_least: int = 1) -> None:
    """Writes `shard-0000.tar`, `shard-0001.tar`, ..., at least this many."""
    folder.mkdir(parents=True)
    size = sum(len(sample) for sample in samples)
    num_shards = max(at_least, size // SHARD_BYTES)
    for shard in range(num_shards):
        first, stop = (len(samples) * s // num_shards for s in (shard, shard + 1))
        path = folder / f"shard-{shard:04d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(first, stop):
                member = tarfile.TarInfo(f"{samples.key(i)}.{samples.suffix}")
                member.size = len(samples[i])
                tar.addfile(member, io.BytesIO(samples[i]))
