"""Compares tars, and where their samples begin, with `index.sqlite`.

A comparison costs about as much as reading a text, so not all samples are compared, and which are
depends on nothing but the data:

- the first key of each shard, when it is opened first: another tar of the same layout is noticed;
- where samples of several parts begin: a wrong `.tar.idx` could assign a part to another sample;
- keys in extension headers, which no checksum covers.

`energon-lite lint` compares all keys. A dataset without a usable index is read uncompared.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.files import retried, warn_once
from energon_lite.storage.nvmeta import META, index_path, reindex
from energon_lite.storage.sqlite import INDEX_SQLITE, IndexDatabase
from energon_lite.storage.tar import first_keys, key_of_members

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")


# Shards of which the first keys are looked up together: opening the index costs as much as 30.
_SHARDS_AT_ONCE = 256
# Shards whose keys are kept, as checksums: 80 KB for 10,000 samples.
_MOST_SHARDS = 128
_UNKNOWN = -1


class KeyCheck:
    """The keys in the index of a dataset, which is open only while it is queried.

    Args:
        root: folder of the dataset.
        shards: shard names relative to `root`; in all methods a shard is a position in these.
        tar_file_ids: number of each shard in the index.
    """

    def __init__(self, root: Path, shards: Sequence[str], tar_file_ids: Sequence[int]) -> None:
        self._root = root
        self._shards = shards
        self._ids = tar_file_ids
        self._first: dict[int, str] = {}
        self._sums = lru_cache(_MOST_SHARDS)(self._load_sums)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments only."""
        return KeyCheck, (self._root, self._shards, self._ids)

    def check_shard(self, shard: int, descriptor: int, offsets: Int64Array) -> None:
        """Compares a shard that is open.

        Raises:
            DatasetFormatError: Its first key, or where its samples begin, is not that of the index.
        """
        stored = self._first_key(shard)
        if not stored:
            return
        keys = first_keys(descriptor, int(offsets[-1]))
        if keys[:1] not in ([], [stored]):
            raise self._error(shard, 0, keys[0], stored)
        if keys == [stored, stored]:
            total, id_ = int(offsets[1:-1].sum()), self._ids[shard]
            found = self._ask(IndexDatabase.offset_sum, id_, len(offsets) - 2)
            if found.get(id_, total) != total:
                path = self._root / self._shards[shard]
                raise DatasetFormatError(
                    f"{index_path(path)}: samples begin at other bytes than in {INDEX_SQLITE}; "
                    f"{reindex(path)}"
                )

    def _first_key(self, shard: int) -> str:
        """Returns the key of the first sample of a shard; empty if the index does not have it."""
        if shard not in self._first:
            start = shard // _SHARDS_AT_ONCE * _SHARDS_AT_ONCE
            ids = self._ids[start : start + _SHARDS_AT_ONCE]
            found = self._ask(IndexDatabase.keys_at, [(id_, 0) for id_ in ids])
            self._first.update((start + i, found.get((id_, 0), "")) for i, id_ in enumerate(ids))
        return self._first[shard]

    def compare(
        self, members: list[Any], shards: Int64Array, places: Int64Array, rows: Sequence[int]
    ) -> None:
        """Puts an error in the place of each sample whose key is another one in the index.

        Args:
            members: for each sample of a block its members, or an error.
            shards: shape (N,), the shard of each.
            places: shape (N,), the number of each in its shard.
            rows: which of them are compared.
        """
        for row in rows:
            shard, place = int(shards[row]), int(places[row])
            sums = self._sums(shard)
            key = key_of_members(members[row])
            if key and place < len(sums) and sums[place] not in (_UNKNOWN, _key_sum(key)):
                stored = self._ask(IndexDatabase.keys_of, self._ids[shard])
                if stored.get(place, key) != key:
                    members[row] = self._error(shard, place, key, stored[place])

    def _load_sums(self, shard: int) -> Int64Array:
        """Looks up all keys of a shard, which costs less per sample than a query for some."""
        keys = self._ask(IndexDatabase.keys_of, self._ids[shard])
        sums = np.full(len(keys), _UNKNOWN, dtype=np.int64)
        for place, key in keys.items():
            if 0 <= place < len(sums):
                sums[place] = _key_sum(key)
        return sums

    def _error(self, shard: int, place: int, key: str, stored: str) -> DatasetFormatError:
        """Returns the error of a sample that has another key in the index."""
        return DatasetFormatError(
            f"{self._root / self._shards[shard]}: sample {place} has the key {key!r}, where "
            f"{INDEX_SQLITE} has {stored!r}: the shard is corrupt, or was replaced after "
            f"preparing. Restore it, or run `energon-lite prepare {self._root} --tar-index-only`"
        )

    def _ask(self, question: Callable[..., dict[K, T]], *values: Any) -> dict[K, T]:
        def ask() -> dict[K, T]:
            with IndexDatabase(self._root) as index:
                return question(index, *values)

        try:
            return retried(ask, self._root / META / INDEX_SQLITE)
        except FileNotFoundError:
            return {}
        except (DatasetFormatError, OSError) as error:
            warn_once(f"{error}. Until then keys of samples are not compared with it")
            return {}


def _key_sum(key: str) -> int:
    return zlib.crc32(key.encode("utf-8", "surrogateescape"))
