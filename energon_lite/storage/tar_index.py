"""The index of a tar (`.tar.idx`): where each sample begins."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.files import read_file, write_atomically

META = ".nv-meta"
_BLOCK = 512


def index_path(shard: Path) -> Path:
    """Returns the path of a shard's index: `x.tar` has `x.tar.idx`."""
    return shard.with_suffix(".tar.idx")


def check_index_size(shard: Path, count: int) -> None:
    """Checks, without reading it, that a shard has an index of `count` samples.

    Raises:
        FileNotFoundError: There is no index.
        DatasetFormatError: The index is one of another number of samples.
    """
    try:
        size = index_path(shard).stat().st_size
    except OSError:
        size = -1
    if size != 8 * (count + 1):
        read_index(shard, count)  # says what is wrong


def read_index(shard: Path, count: int) -> Int64Array:
    """Reads where the samples of a shard begin.

    Args:
        shard: path of the tar.
        count: number of samples that it must have.

    Returns:
        Shape (count + 1,): sample i is at bytes [i] to [i + 1]. The first value is 0 whatever the
        file says: a folder entry before the first sample belongs to it.

    Raises:
        FileNotFoundError: There is no index.
        DatasetFormatError: The index does not fit `count`, or its values do not increase, or are
            no multiples of 512.
    """
    path = index_path(shard)
    try:
        raw = read_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; {reindex(shard)}") from None
    if len(raw) != 8 * (count + 1):
        entries = f"{len(raw) // 8 - 1} samples" if len(raw) % 8 == 0 else "a broken number"
        raise DatasetFormatError(
            f"{path}: {len(raw)} bytes are the index of {entries}, where {META}/.info.json says "
            f"{count} samples; {reindex(shard)}"
        )
    offsets = np.frombuffer(raw, dtype="<i8").astype(np.int64)
    offsets[0] = 0
    wrong = offsets[1:] <= offsets[:-1]
    if wrong.any():
        at = int(wrong.argmax())
        raise DatasetFormatError(
            f"{path}: sample {at} would end at byte {offsets[at + 1]}, before its first byte "
            f"{offsets[at]}; {reindex(shard)}"
        )
    if np.bitwise_or.reduce(offsets) % _BLOCK:
        at = int((offsets % _BLOCK > 0).argmax())
        raise DatasetFormatError(
            f"{path}: sample {at - 1} would end at byte {offsets[at]}, which is no multiple of "
            f"{_BLOCK}; {reindex(shard)}"
        )
    return offsets


def reindex(shard: Path) -> str:
    """Returns what to do about a shard whose index is wrong."""
    root = next((folder for folder in shard.parents if (folder / META).is_dir()), "PATH")
    return f"run `energon-lite prepare {root} --tar-index-only`"


def write_index(shard: Path, offsets: Sequence[int] | Int64Array) -> None:
    """Writes the index of a shard at once.

    Args:
        shard: path of the tar; its permissions, plus read and write for the owner, are taken.
        offsets: first byte of each sample, then the byte after the last member.
    """
    mode = stat.S_IMODE(shard.stat().st_mode) | stat.S_IRUSR | stat.S_IWUSR
    write_atomically(index_path(shard), np.asarray(offsets, dtype="<u8").tobytes(), mode)
