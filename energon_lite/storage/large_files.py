"""Reads large files of samples one by one: each byte is copied once, into the memory that stays.

This takes more requests than long ranges, which cost little where all is in the page cache.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array, UInt8Array
from energon_lite.storage.tar import BLOCK, OneFileEach, plain_members

# Smaller files are read as quickly in long ranges.
LARGE_BYTES = 32 << 10
# Reads what is in the page cache, and nothing else; 0 where the kernel takes no advice either.
CACHED_ONLY = getattr(os, "RWF_NOWAIT", 0) if hasattr(os, "posix_fadvise") else 0
_KEPT_BYTES = 8 << 20


class FileContents:
    """The contents of files that were read one by one; a place is the number of a file.

    Args:
        contents: of the files.
    """

    def __init__(self, contents: list[bytes]) -> None:
        self.contents = contents

    def __len__(self) -> int:
        """Counts the bytes."""
        return sum(map(len, self.contents))

    def __getitem__(self, place: slice) -> bytes:
        """Returns the content of the file with the number at which `place` begins."""
        content: bytes = self.contents[place.start]
        return content


def read_files(
    descriptors: Sequence[int], starts: Int64Array, stops: Int64Array
) -> tuple[FileContents, Any] | None:
    """Reads the headers of all samples first, then their files.

    Args:
        descriptors: the open tar of each sample.
        starts: shape (N,), where each begins in its tar.
        stops: shape (N,), where each ends.

    Returns:
        The contents, and the members of each sample with the numbers of their files as places.
        None if files are small, or have headers that are not plain, or the tar has ended.

    Raises:
        OSError: Something cannot be read, or is not in the page cache.
    """
    heads_of = functools.partial(_cached_blocks, descriptors)
    # A program that listed the members has left headers in the page cache, without contents.
    some = np.arange(0, len(starts), 8)
    heads_of(some, stops[some] - BLOCK)
    members, is_whole = plain_members(starts, stops, heads_of)
    owns = zip(descriptors, members, strict=True)
    files = [(owner, first, last - first) for owner, own in owns for _, first, last in own]
    sizes = [size for _, _, size in files]
    if not is_whole.all() or sum(sizes) < LARGE_BYTES * len(sizes):
        return None
    _keep_freed_memory()
    contents = [os.pread(owner, size, first) for owner, first, size in files]
    if [*map(len, contents)] != sizes:
        return None
    if isinstance(members, OneFileEach):
        num = len(sizes)
        return FileContents(contents), OneFileEach(
            members.names, [*range(num)], [*range(1, num + 1)]
        )
    numbers = iter(range(len(sizes)))
    numbered = [[(name, i := next(numbers), i + 1) for name, _, _ in own] for own in members]
    return FileContents(contents), numbered


def _cached_blocks(
    descriptors: Sequence[int], rows: Int64Array, places: Int64Array
) -> tuple[UInt8Array, Int64Array]:
    """Reads a block of 512 bytes at a place in the tar of each row, and the block after it.

    Returns:
        The blocks, shape (2 K, 512), zeros for those after the end; and the first of each row.

    Raises:
        OSError: One cannot be read, or is not in the page cache.
    """
    blocks = np.zeros((2 * len(rows), BLOCK), dtype=np.uint8)
    firsts = np.arange(0, len(blocks), 2)
    memory = blocks.reshape(-1).data
    wanted = zip(rows.tolist(), places.tolist(), (firsts * BLOCK).tolist(), strict=True)
    for row, place, at in wanted:
        target = memory[at : at + 2 * BLOCK]
        if os.preadv(descriptors[row], [target], place, CACHED_ONLY) < BLOCK:
            raise OSError(errno.EAGAIN, "not in the page cache, or behind the end")
    return blocks, firsts


@functools.cache
def _keep_freed_memory() -> None:
    """Has malloc keep memory that is freed, since each 4 KiB of new memory cost a page fault.

    glibc keeps twice as much as the largest piece that was freed before.
    """
    np.empty(_KEPT_BYTES, dtype=np.uint8)
