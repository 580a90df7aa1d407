"""Finds out why two tars have samples of the same key, which decides what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.prepare.index_writer import Members, shard_members
from energon_lite.extras.prepare.indexing import ShardResult
from energon_lite.extras.prepare.odd_parts import dotted_keys, numbered_parts
from energon_lite.formats.field_access import listing
from energon_lite.storage import files

# What is compared of two tars that may be copies: samples, and bytes of each of their parts.
_COMPARED, _COMPARED_BYTES = 32, 1 << 20
_LISTED = 3


class SharedKeysError(DatasetFormatError):
    """Different samples of valid tars have the same key, which new keys would solve."""


def shared_keys_error(first: ShardResult, second: ShardResult) -> DatasetFormatError:
    """Returns the error of two tars with samples of the same key, with its cause and remedy.

    Returns:
        A `SharedKeysError` if their samples are other ones; else an error that new keys would not
        solve: copies, columns, a sample in two tars, or keys with dots.
    """
    there, here = shard_members(first.rows), shard_members(second.rows)
    keys = [key for key in here if key in there]
    key = keys[0]
    text = f"{second.shard.path}: sample key {key!r} is also in {first.shard.path}"
    parts = sorted({*there[key], *here[key]})
    counts = Counter(part for found in (*there.values(), *here.values()) for part in found)
    suspects = [part for part in parts if part in numbered_parts(counts)]
    if suspects:
        both = f"{second.shard.path} and {first.shard.path}"
        return DatasetFormatError(f"{both}: {dotted_keys(key, suspects, _LISTED)}")
    if not _are_equal(first, second, there, here, keys):
        return SharedKeysError(
            f"{text}; a key must be unique in the dataset. Let --fix-duplicates "
            "(fix_duplicates=True) write the tars again with their names before the keys, or "
            "exclude one (--exclude)"
        )
    if there[key].keys() == here[key].keys():
        return DatasetFormatError(
            f"{text}, with the same content ({len(keys):,} of {len(here):,} samples): one is a "
            "copy. Remove it, or exclude it (--exclude)"
        )
    text += f", with the parts {listing(here[key])} and {listing(there[key])}"
    if len(keys) == 1 and len(here) + len(there) > 2:
        return DatasetFormatError(
            f"{text}: a sample that is divided between two tars. Write them again, with all parts "
            "of a sample in one tar"
        )
    return DatasetFormatError(
        f"{text}: these may be columns of the same samples. Prepare the tars of each column in a "
        "separate folder, and `join:` the folders in a metadataset"
    )


def _are_equal(
    first: ShardResult, second: ShardResult, there: Members, here: Members, keys: Sequence[str]
) -> bool:
    """Whether samples of the same key have the same content in all parts that both have."""
    old, new = files.open_bytes(first.shard.path), files.open_bytes(second.shard.path)
    for key in keys[:: -(-len(keys) // _COMPARED)]:
        for part in here[key].keys() & there[key].keys():
            (start, size), (other_start, other_size) = here[key][part], there[key][part]
            num_bytes = min(size, _COMPARED_BYTES)
            if size != other_size or new.read(start, start + num_bytes) != old.read(
                other_start, other_start + num_bytes
            ):
                return False
    return True
