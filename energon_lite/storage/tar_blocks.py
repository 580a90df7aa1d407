"""The members of many samples at once: tar headers read by numpy.

The hot path of training. What is not plain is left to `tar.sample_members`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from energon_lite.storage.tar import BLOCK, GNU_MAGIC, TarError, sample_members

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

_OCTAL = 8 ** np.arange(10, -1, -1, dtype=np.int64)


def block_members(buffer: UInt8Array, starts: Int64Array, stops: Int64Array) -> list[Any]:
    """Does what `sample_members` does for many samples at once, by numpy.

    Nearly all headers are plain: a regular file, ustar or GNU, in one block, or after a PAX header
    that holds nothing but the file's time, as Python's tarfile writes it. Samples that have others
    are read one by one.

    Args:
        buffer: shape (B,), a multiple of 512 bytes.
        starts: shape (N,), where each sample begins.
        stops: shape (N,), where each ends.

    Returns:
        For each sample its members, or the error that says what is wrong with it.
    """
    blocks = buffer.reshape(-1, BLOCK)
    found: list[Any] = [[] for _ in range(len(starts))]
    is_whole = np.zeros(len(starts), dtype=bool)
    active = np.flatnonzero((starts % BLOCK == 0) & (stops > starts))
    pos = starts[active]
    while len(active):
        heads = blocks[pos // BLOCK]
        names, sizes, is_plain = _plain_headers(heads)
        is_time = heads[:, 156] == ord("x")
        if is_time.any():
            after = np.minimum(pos // BLOCK + 1, len(blocks) - 1)
            is_time &= (sizes < 100) & _holds_time_only(blocks[after], sizes)
        firsts = pos + BLOCK
        ends = firsts + (sizes + BLOCK - 1) // BLOCK * BLOCK
        is_file = (heads[:, 156] == ord("0")) & is_plain & (ends <= stops[active])
        is_time &= is_plain & (ends < stops[active])
        rows = np.flatnonzero(is_file)
        texts = _texts(names[rows].tolist())
        if len(texts) != len(rows):
            is_file[rows] = [b"\0" not in name for name in names[rows].tolist()]
            rows = np.flatnonzero(is_file)
            texts = _texts(names[rows].tolist())
        members = zip(texts, firsts[rows].tolist(), (firsts + sizes)[rows].tolist(), strict=True)
        is_last = is_file & (ends == stops[active])
        if is_last.sum() == len(starts) and not any(found):
            return [[member] for member in members]  # one file each, as in most texts
        for i, member in zip(active[rows].tolist(), members, strict=True):
            found[i].append(member)
        is_whole[active[is_last]] = True
        goes_on = (is_file | is_time) & ~is_last
        active, pos = active[goes_on], ends[goes_on]
    for i in np.flatnonzero(~is_whole).tolist():
        try:
            found[i] = sample_members(buffer.data, int(starts[i]), int(stops[i]))
        except TarError as error:
            found[i] = error
    return found


def _plain_headers(
    heads: UInt8Array,
) -> tuple[npt.NDArray[np.bytes_], Int64Array, npt.NDArray[np.bool_]]:
    """Reads headers, shape (K, 512): names, sizes, and whether there is nothing special in them."""
    digits = heads[:, 124:135] - np.uint8(ord("0"))  # below 8, or wrapped around
    magic = heads[:, 257:263].view("S6")[:, 0]
    names = np.ascontiguousarray(heads[:, :100]).view("S100")[:, 0]
    is_plain = (
        (heads[:, 345] == 0)
        & ((magic == b"ustar") | (magic == GNU_MAGIC))
        & (digits < 8).all(axis=1)
        & ((heads[:, 135] == 0) | (heads[:, 135] == ord(" ")))
    )
    return names, digits @ _OCTAL, is_plain


def _texts(names: list[bytes]) -> list[str]:
    """Decodes names, all at once; gives more texts than names if one has bytes behind its end."""
    return b"\0".join(names).decode("utf-8", "surrogateescape").split("\0") if names else []


def _holds_time_only(content: UInt8Array, sizes: Int64Array) -> npt.NDArray[np.bool_]:
    """Tells which PAX headers, shape (K, 512), are just like `28 mtime=1700000000.1234567`."""
    tens, ones = content[:, 0] - np.uint8(ord("0")), content[:, 1] - np.uint8(ord("0"))
    lengths = tens.astype(np.int64) * 10 + ones
    keys = np.ascontiguousarray(content[:, 2:9]).view("S7")[:, 0]
    is_time: npt.NDArray[np.bool_] = (
        (keys == b" mtime=") & (lengths == sizes) & (tens < 10) & (ones < 10)
    )
    return is_time
