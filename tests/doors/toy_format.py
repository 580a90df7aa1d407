"""A format in one file: texts in records of 32 bytes, in `.rec` files; padded with zero bytes."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.seeds import key_of
from energon_lite.formats.format import Format, Opened
from energon_lite.formats.known import register_format
from energon_lite.formats.shards import MAX_BLOCK_BYTES, Block, BlockReader
from energon_lite.storage import files

RECORD_BYTES = 32


class RecordReader(BlockReader):
    """Reads records by their numbers; the file of record 7 is `7.txt`."""

    def __init__(self, path: PurePath) -> None:
        self.root: Any = path
        self.size_bytes = files.size_of(path)
        self.num_samples, rest = divmod(self.size_bytes, RECORD_BYTES)
        if rest or not self.num_samples:
            raise DatasetFormatError(f"{path}: {self.size_bytes} bytes are no records; write more")

    def read(self, indices: Int64Array, max_bytes: int = MAX_BLOCK_BYTES) -> Block:
        file, data = files.open_bytes(self.root), bytearray()
        numbers = indices[: max(1, max_bytes // RECORD_BYTES)].tolist()
        members: list[Any] = []
        for number in numbers:
            start = number * RECORD_BYTES
            try:
                text = file.read(start, start + RECORD_BYTES).rstrip(b"\0")
            except OSError as error:
                members.append(error)
                continue
            members.append([(f"{number}.txt", len(data), len(data) + len(text))])
            data += text
        return Block(memoryview(data), members, [self.root.name] * len(numbers), numbers)


class RecordFormat(Format):
    """Files of records; they need no index."""

    name = "record"
    suffix = ".rec"

    def open(self, path: PurePath, **_: Any) -> Opened:
        reader = RecordReader(path)
        data = key_of("records", reader.size_bytes) & (2**64 - 1)
        return Opened(reader, f"{data:016x}", reader.size_bytes, slice_length=4)

    def place_of(self, number: int) -> str:
        return f"record {number}"


register_format(RecordFormat())
