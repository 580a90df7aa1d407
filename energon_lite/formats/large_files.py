"""Reads large files of samples one by one: each byte is copied once, into the memory that stays.

This takes more requests than long ranges, which cost little where all is in the page cache.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array, UInt8Array, keep_freed_memory
from energon_lite.formats.tar import BLOCK, OneFileEach, plain_members
from energon_lite.storage.byte_file import ByteFile

# Smaller files are read as quickly in long ranges.
LARGE_BYTES = 32 << 10


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
    tars: Sequence[ByteFile], starts: Int64Array, stops: Int64Array
) -> tuple[FileContents, Any] | None:
    """Reads the headers of all samples first, then their files.

    Args:
        tars: the open tar of each sample.
        starts: shape (N,), where each begins in its tar.
        stops: shape (N,), where each ends.

    Returns:
        The contents, and the members of each sample with the numbers of their files as places.
        None if files are small, or have headers that are not plain.

    Raises:
        OSError: Something cannot be read, or is not in the page cache.
    """
    heads_of = functools.partial(_blocks_at_hand, tars)
    # A program that listed the members has left headers in the page cache, without contents.
    some = np.arange(0, len(starts), 8)
    heads_of(some, stops[some] - BLOCK)
    members, is_whole = plain_members(starts, stops, heads_of)
    owns = zip(tars, members, strict=True)
    files = [(tar, first, last) for tar, own in owns for _, first, last in own]
    num = len(files)
    if not is_whole.all() or sum(last - first for _, first, last in files) < LARGE_BYTES * num:
        return None
    keep_freed_memory()
    contents = [tar.read(first, last) for tar, first, last in files]
    if isinstance(members, OneFileEach):
        own_numbers = [*range(num)], [*range(1, num + 1)]
        return FileContents(contents), OneFileEach(members.names, *own_numbers)
    numbers = iter(range(num))
    numbered = [[(name, i := next(numbers), i + 1) for name, _, _ in own] for own in members]
    return FileContents(contents), numbered


def _blocks_at_hand(
    tars: Sequence[ByteFile], rows: Int64Array, places: Int64Array
) -> tuple[UInt8Array, Int64Array]:
    """Reads a block of 512 bytes at a place in the tar of each row, and the block after it.

    Returns:
        The blocks, shape (2 K, 512), and the first of each row.

    Raises:
        OSError: Reading would have to wait for storage, or goes beyond the end.
    """
    blocks = np.empty((2 * len(rows), BLOCK), dtype=np.uint8)
    firsts = np.arange(0, len(blocks), 2)
    memory = blocks.reshape(-1).data
    wanted = zip(rows.tolist(), places.tolist(), (firsts * BLOCK).tolist(), strict=True)
    for row, place, at in wanted:
        if not tars[row].read_at_hand(memory[at : at + 2 * BLOCK], place):
            raise OSError(errno.EAGAIN, "not at hand, or behind the end")
    return blocks, firsts
