"""The least that the work costs by hand: no shuffling, no types, no state, no errors.

0 workers   a loop over mapped tars in file order; libjpeg-turbo for pictures, not stacked
workers     torch's DataLoader whose workers send one ready batch again and again
"""

from __future__ import annotations

import itertools
import mmap
import random
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.hook import encoded
from benchmarks.peers.rows import Row

TITLE = "by hand"
PACKAGES = ["simplejpeg==1.9.0"]
DATA_OF = "ours"
IS_TRANSPORT_ALONE = True


def open_loader(folder: Path, row: Row) -> Iterable[Any]:
    batches = loop(folder, row)
    return transported(*next(batches), row.workers) if row.workers else batches


def loop(folder: Path, row: Row) -> Iterator[tuple[list[Any], list[str]]]:
    if row.image_size is not None:
        read = partial(resized_picture, size=row.image_size)
    else:
        kinds = {"text": text, "blends": text, "bytes": bytes, "pictures": picture, "hooks": hooked}
        read = kinds[row.group]
    sources = [places(folder / f"source{i:04d}") for i in range(row.num_sources)]
    while True:
        if row.num_sources == 1:
            chosen = itertools.repeat(sources[0], row.batch_size)
        else:
            chosen = random.choices(sources, k=row.batch_size)
        keys, batch = [], []
        for source in chosen:
            data, begin = next(source)
            key = data[begin : data.find(b"\0", begin)].decode()
            size = int(data[begin + 124 : begin + 135], 8)
            keys.append(key)
            batch.append(read(data[begin + 512 : begin + 512 + size]))
        yield batch, keys


def places(folder: Path) -> Iterator[tuple[mmap.mmap, int]]:
    """Yields where each member begins in the mapped tars, again and again."""
    import numpy as np

    found = []
    for tar in sorted(folder.glob("*.tar")):
        offsets = np.fromfile(tar.with_suffix(".tar.idx"), dtype="<i8").tolist()
        with tar.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found += [(data, offset) for offset in offsets[:-1]]
    return itertools.cycle(found)


def text(payload: bytes) -> str:
    return payload.decode()


def hooked(payload: bytes) -> Any:
    return encoded(text(payload))


def picture(payload: bytes) -> Any:
    import simplejpeg

    return simplejpeg.decode_jpeg(payload)


def resized_picture(payload: bytes, size: int) -> Any:
    """Decodes at the smallest of libjpeg's scales that suffices, then resizes."""
    import numpy as np
    import simplejpeg
    from PIL import Image

    pixels = simplejpeg.decode_jpeg(payload, min_height=size, min_width=size)
    height, width = pixels.shape[:2]
    scale = size / min(height, width)
    target = (round(width * scale), round(height * scale))
    return np.asarray(Image.fromarray(pixels).resize(target, Image.Resampling.BICUBIC))


def transported(batch: list[Any], keys: list[str], num_workers: int) -> Iterable[Any]:
    """The batch, pictures as one tensor, through torch's queues from each worker."""
    import numpy as np
    import torch

    class Same(torch.utils.data.IterableDataset[Any]):
        """Yields one batch without end."""

        def __iter__(self) -> Iterator[Any]:
            while True:
                yield (torch.from_numpy(pictures).clone() if is_pictures else batch), keys

    is_pictures = isinstance(batch[0], np.ndarray) and batch[0].ndim == 3
    pictures = np.stack(batch) if is_pictures else None
    collate = None if is_pictures else tuple  # not a tensor of each array
    return torch.utils.data.DataLoader(
        Same(), batch_size=None, collate_fn=collate, num_workers=num_workers
    )


def samples_of(batch: Any, row: Row) -> Any:
    return batch[0]


def lacks(row: Row) -> str:
    return "packing is no loop of a few lines" if row.group == "packed" else ""
