"""Tar headers: what is in a tar, from its bytes alone.

One parser serves indexing (`iter_tar`) and reading (`sample_members`, whose quick form for many
samples is `tar_blocks.block_members`). It knows ustar, GNU (long names) and PAX (`path`, `size`)
headers; only regular files count.

Source: POSIX.1-2017, pax, section "ustar Interchange Format"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.files import open_regular

BLOCK = 512
# name, size, checksum, typeflag, magic; then the first byte of the prefix field
_HEADER = Struct("<100s24x12s12x8sc100s6s82xc")
_REGULAR = (b"0", b"\0", b"7")
GNU_MAGIC = b"ustar "
_POSIX_MAGIC = b"ustar\0"
_WINDOW = 1 << 20
_MISFIT = (
    "the tar is damaged, or its index does not fit it. Restore the tar, or run "
    "`energon-lite prepare FOLDER --tar-index-only`"
)


class Header(NamedTuple):
    """One tar header with what its extension headers say.

    `start` is where the member's first (extension) header begins, `data` where its content
    begins, `size` its length, and `end` where the next header begins. `[Unit: byte]`
    """

    name: str
    is_file: bool
    start: int
    data: int
    size: int
    end: int


class TarError(DatasetFormatError):
    """The bytes are not a readable tar."""


def _number(field: bytes, pos: int) -> int:
    if field[0] & 0x80:  # base-256, for sizes of 8 GiB and more
        return int.from_bytes(field[1:], "big") + ((field[0] & 0x7F) << (8 * (len(field) - 1)))
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise TarError(f"no tar header at byte {pos} (size field is {field!r})") from None


def _check_sum(raw: bytes, pos: int) -> None:
    stored = raw[148:156]
    # The low half of Adler-32 is 1 + the sum of all bytes modulo 65521: 20 times as fast as sum().
    # The checksum field itself counts as eight spaces.
    expected = _number(stored, pos) + sum(stored) - 8 * 32
    if (expected + 1) % 65521 != zlib.adler32(raw) & 0xFFFF:
        raise TarError(f"no tar header at byte {pos} (header checksum does not match)")


def _pax_records(content: bytes, pos: int) -> dict[str, str]:
    """Reads records of the form `<length> <key>=<value>` with a line feed."""
    records: dict[str, str] = {}
    at = 0
    while at < len(content) and content[at] != 0:
        space = content.find(b" ", at)
        digits = content[at:space]
        if space < 0 or not digits.isdigit() or int(digits) <= space - at:
            raise TarError(f"broken PAX header at byte {pos}")
        key, _, value = content[space + 1 : at + int(digits) - 1].partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at += int(digits)
    return records


def read_header(buffer: bytes | memoryview, pos: int, check: bool = False) -> Header | None:
    """Reads the member whose first header is at `pos` of `buffer`.

    Args:
        buffer: tar bytes; must hold all of the member's headers.
        pos: a multiple of 512 bytes from the start of the tar.
        check: whether to verify each header's checksum (always done without a ustar magic).

    Returns:
        The header, or None for a block of zeros (end of the archive).

    Raises:
        TarError: The bytes at `pos` are not a tar header, or the buffer ends inside it.
    """
    start = pos
    long_name: str | None = None
    long_size: int | None = None
    while True:
        if pos + BLOCK > len(buffer):
            raise TarError(f"truncated: the header at byte {pos} is cut off")
        name, size_field, _, kind, _, magic, prefix = _HEADER.unpack_from(buffer, pos)
        if kind == b"\0" and name[0] == 0 and not any(buffer[pos : pos + BLOCK]):
            return None
        if check or magic not in (_POSIX_MAGIC, GNU_MAGIC):
            _check_sum(bytes(buffer[pos : pos + BLOCK]), pos)
        size = _number(size_field, pos)
        data = pos + BLOCK
        if kind in (b"L", b"x"):
            if data + size > len(buffer):
                raise TarError(f"truncated: the extended header at byte {pos} is cut off")
            content = bytes(buffer[data : data + size])
            if kind == b"L":
                long_name = content.rstrip(b"\0").decode("utf-8", "surrogateescape")
            else:
                records = _pax_records(content, pos)
                long_name = records.get("path", long_name)
                if any(key.startswith("GNU.sparse.") for key in records):
                    raise TarError(f"sparse member at byte {pos}: store the file in full")
                if "size" in records:
                    long_size = int(records["size"])
            pos = data + (size + BLOCK - 1) // BLOCK * BLOCK
            continue
        if kind in (b"g", b"K"):  # global PAX header, GNU long link: nothing that we use
            pos = data + (size + BLOCK - 1) // BLOCK * BLOCK
            continue
        if kind == b"S":
            raise TarError(f"sparse member at byte {pos}: store the file in full")
        if long_name is None:
            raw_name = name[: name.find(b"\0")] if b"\0" in name else name
            if prefix != b"\0" and magic == _POSIX_MAGIC:
                lead = bytes(buffer[pos + 345 : pos + BLOCK - 12]).split(b"\0", 1)[0]
                raw_name = lead + b"/" + raw_name
            long_name = raw_name.decode("utf-8", "surrogateescape")
        if long_size is not None:
            size = long_size
        is_file = kind in _REGULAR and not long_name.endswith("/")
        # Directories, links and devices have no content, whatever their size field says.
        stored = size if kind not in (b"1", b"2", b"3", b"4", b"5", b"6") else 0
        end = data + (stored + BLOCK - 1) // BLOCK * BLOCK
        return Header(long_name, is_file, start, data, size, end)


def split_name(name: str) -> tuple[str, str] | None:
    """Splits a member's path into sample key and part name.

    Returns:
        (key, part), or None for a member that belongs to no sample: below a `__folder__`, or
        without a dot after the first character of its last component.

    Example:
        >>> split_name("a/b.c/0001.seg.png")
        ('a/b.c/0001', 'seg.png')
    """
    if "/" not in name:
        key, _, part = name.partition(".")
        return (key, part) if key and len(key) < len(name) else None
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot <= base:
        return None
    if name.startswith("__") and name.split("/", 1)[0].endswith("__"):
        return None
    return name[:dot], name[dot + 1 :]


class Member(NamedTuple):
    """A regular file in a tar: its bytes are `buffer[first:last]` of the buffer it was found in."""

    name: str
    first: int
    last: int


def sample_members(buffer: bytes | memoryview, start: int, stop: int) -> list[Member]:
    """Finds the regular files in `buffer[start:stop]`, which must be whole members.

    Raises:
        TarError: The range does not begin with a header or end with a member (a wrong index, or a
            truncated tar).
    """
    found = []
    pos = start
    while pos < stop:
        try:
            header = read_header(buffer, pos)
        except TarError as error:
            message = str(error).replace(f"at byte {pos}", f"at byte {pos - start} of the sample")
            raise TarError(f"{message}; {_MISFIT}") from None
        if header is None:
            raise TarError(
                f"zeros at byte {pos - start} of the sample, where a header should be; {_MISFIT}"
            )
        if header.is_file:
            found.append(Member(header.name, header.data, header.data + header.size))
        pos = header.end
    if pos != stop:
        raise TarError(
            f"ends at byte {pos - start} of the sample, not at {stop - start}; the index does not "
            "fit the tar"
        )
    return found


def parse_sample(buffer: bytes | memoryview, start: int, stop: int) -> tuple[str, list[Member]]:
    """Gives key and parts (members named by part) of the one sample in `buffer[start:stop]`.

    Raises:
        TarError: The range is not exactly one sample.
    """
    key: str | None = None
    parts = []
    for name, first, last in sample_members(buffer, start, stop):
        found = split_name(name)
        if found is None:
            continue
        if key not in (None, found[0]):
            raise TarError(f"holds parts of two samples, {key!r} and {found[0]!r}")
        key = found[0]
        parts.append(Member(found[1], first, last))
    if key is None:
        raise TarError("holds no part of a sample")
    return key, parts


class _Window:
    """Reads a file of any size through one buffer that moves forward."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size
        self.base = 0
        self.buffer = b""

    def at(self, pos: int, need: int) -> int:
        """Makes `need` bytes from `pos` available; gives their place in `buffer`."""
        if pos < self.base or pos + need > self.base + len(self.buffer):
            self.file.seek(pos)
            self.base = pos
            self.buffer = self.file.read(max(_WINDOW, need))
        return pos - self.base


def _shifted(header: Header, by: int) -> Header:
    name, is_file, start, data, size, end = header
    return Header(name, is_file, start + by, data + by, size, end + by)


def iter_tar(path: Path) -> Iterator[Header]:
    """Gives the header of every member of a tar file, in order, with all checksums verified.

    Raises:
        TarError: The file is truncated, is no tar, or holds data after its end mark; the text
            names the file, and the last member that was whole.
    """
    size = path.stat().st_size
    last = "no member"
    pos = 0
    try:
        with open(open_regular(path), "rb", buffering=0) as file:  # noqa: PTH123  a descriptor
            window = _Window(file, size)
            while pos < size:
                header = _next_header(window, pos)
                if header is None:
                    _check_tail(window, pos)
                    return
                if header.end > size and header.data + header.size > size:
                    raise TarError(f"truncated: member {header.name!r} is cut off")
                last = f"member {header.name!r}"
                yield header
                pos = header.end
    except TarError as error:
        raise TarError(f"{path}: {error} (after {last}); write the tar again") from None
    if size == 0:
        raise TarError(f"{path}: the file is empty; write the tar again")


def _next_header(window: _Window, pos: int) -> Header | None:
    need = BLOCK
    while True:
        need = min(need, window.size - pos)
        place = window.at(pos, need)
        try:
            header = read_header(window.buffer, place, check=True)
        except TarError as error:
            # An extension header may be longer than the window: read on while the file has more.
            if "is cut off" in str(error) and need < window.size - pos and need < 1 << 26:
                need = max(2 * len(window.buffer), _WINDOW)
                continue
            message = str(error).replace(f"at byte {place}", f"at byte {pos}")
            raise TarError(message) from None
        return None if header is None else _shifted(header, window.base)


def _check_tail(window: _Window, pos: int) -> None:
    """Refuses data after the end mark: it would be lost without a word."""
    window.file.seek(pos)
    at = pos
    while chunk := window.file.read(_WINDOW):
        if chunk.count(0) != len(chunk):
            where = at + len(chunk) - len(chunk.lstrip(b"\0"))
            raise TarError(f"data at byte {where}, after the end-of-archive mark at byte {pos}")
        at += len(chunk)


def read_into(descriptor: int, target: memoryview, offset: int) -> int:
    """Reads at `offset` of an open file until `target` is full, or the file ends.

    A single `preadv` may give less than asked for (a signal, a network file system); this goes on.

    Returns:
        The number of bytes read.
    """
    total = os.preadv(descriptor, [target], offset)
    while total < len(target):
        got = os.preadv(descriptor, [target[total:]], offset + total)
        if got == 0:
            break
        total += got
    return total
