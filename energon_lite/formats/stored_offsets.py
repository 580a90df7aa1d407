"""The places of all samples of a dataset in one file: `.nv-meta/offsets.bin`.

It has the content of all `.tar.idx`, which remain for other programs. In object storage it takes a
request where those take one for each shard. Nothing is read from it unless it is of the same
preparation as `index.uuid`, which each preparation replaces, and all tars have the sizes that they
had then; the first key of a tar is compared when it is opened.

The file consists of 64-bit integers, little-endian: a hash of the layout, `index.uuid` and
`.info.json`; for M shards, in the order of `.info.json`, M sizes in bytes, M hashes of first keys,
M digests of all samples, and then for each shard what its `.tar.idx` has. Files of earlier versions
have no digests.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import Ignored
from energon_lite.formats.nvmeta import INDEX_UUID, META, checked_offsets
from energon_lite.storage import files
from energon_lite.storage.byte_file import ByteFile

logger = logging.getLogger(__name__)

# In `.nv-meta`.
STORED_OFFSETS = "offsets.bin"
# Layouts, and the columns of their table of shards; the first is written.
_LAYOUTS = ("offsets 2", 3), ("offsets 1", 2)


def _hash(*values: object) -> int:
    digest = blake2b(json.dumps(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _integers(file: ByteFile, first: int, count: int) -> Int64Array:
    """Reads `count` integers, from the one at `first` on."""
    found: Int64Array = np.frombuffer(file.read(8 * first, 8 * (first + count)), "<i8")
    return found


class StoredOffsets(NamedTuple):
    """The file of a dataset, for the M shards of a split part.

    Attributes:
        path: the file.
        identity: of the file; another one is not read.
        starts: shape (M,); the place of the first integer of each shard.
        first_keys: shape (M,); hashes.
        contents: shape (M,); digests of the samples. None in a file of an earlier version.
    """

    path: PurePath
    identity: object
    starts: Int64Array
    first_keys: Int64Array
    contents: Int64Array | None

    def read(self, shard: int, count: int) -> Int64Array | None:
        """Reads where the `count` samples of a shard begin, as `nvmeta.read_index`.

        Returns:
            None if another file took the place of the one that was compared.

        Raises:
            DatasetFormatError: The values cannot be right.
            OSError: They cannot be read.
        """

        def read() -> Int64Array | None:
            file = files.open_at_once(self.path)
            is_same = file.identity == self.identity
            return _integers(file, int(self.starts[shard]), count + 1) if is_same else None

        found = files.retried(read, self.path)
        return None if found is None else checked_offsets(found, self.path, self.path)

    def digest(self) -> str:
        """Returns a digest of the samples of all shards; empty if it is not known."""
        if self.contents is None:
            return ""
        return blake2b(self.contents.astype("<i8").tobytes(), digest_size=3).hexdigest()

    def has_first_key(self, shard: int, key: str) -> bool:
        """Returns whether the first sample of a shard had a key."""
        return bool(_hash(key) == self.first_keys[shard])


def stored_offsets(
    root: PurePath, counts: Mapping[str, int], shards: Any = None, sizes: Any = None
) -> StoredOffsets | None:
    """Returns the file of a dataset, if it is there and of the tars as they are.

    Args:
        root: folder of the dataset.
        counts: samples of all shards, as `.info.json` has them.
        shards: those of the split part, by their positions in `counts`, (M,); by default all.
        sizes: bytes of these, (M,); by default they are not compared.
    """
    num = len(counts)
    path, own = root / f"{META}/{STORED_OFFSETS}", np.arange(num) if shards is None else [*shards]
    with Ignored(OSError, ValueError):
        uuid = files.read_file(root / f"{META}/{INDEX_UUID}", 1000).decode()
        file = files.open_bytes(path)
        head = _integers(file, 0, 1 + 3 * num)  # no file is shorter
        layouts = (n for layout, n in _LAYOUTS if head[0] == _hash(layout, uuid, counts))
        start = 1 + next(layouts, 0) * num
        ends = start + np.cumsum(np.fromiter(counts.values(), np.int64, num) + 1)
        columns = head[1:start].reshape(-1, num)[:, own]
        is_whole = start > 1 and file.size_bytes == 8 * ends[-1]
        if is_whole and (sizes is None or columns[0].tolist() == sizes):
            starts = np.append(start, ends)
            contents = columns[2] if len(columns) == 3 else None
            return StoredOffsets(path, file.identity, starts[own], columns[1], contents)
        logger.info(
            "%s is of other tars, and is not used; `energon-lite prepare %s --tar-index-only` "
            "writes it", path, root,
        )  # fmt: skip
    return None


def write_offsets(
    root: PurePath, counts: Mapping[str, int], uuid: str, rows: Iterable[tuple[int, str, int, Any]]
) -> None:
    """Writes the file of a dataset; removes an old one before.

    Args:
        root: folder of the dataset.
        counts: samples of all shards, as `.info.json` has them.
        uuid: the content of `index.uuid`.
        rows: for each shard its size in bytes, its first key, a digest of its samples, and the
            values of its `.tar.idx`, (count + 1,).
    """
    num, path = len(counts), root / META / STORED_OFFSETS
    files.remove(path)
    head = np.empty(1 + 3 * num, dtype="<i8")
    head[0] = _hash(_LAYOUTS[0][0], uuid, counts)
    with files.new_file(path) as file:
        file.write(head.tobytes())
        for shard, (size, first_key, content, offsets) in enumerate(rows):
            head[1 + shard :: num] = size, _hash(first_key), content
            file.write(np.asarray(offsets, dtype="<i8").tobytes())
        file.seek(0)
        file.write(head.tobytes())
