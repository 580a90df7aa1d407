"""The quick reader of many samples finds what the exact reader of one finds."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.formats.tar import TarError, block_members, sample_headers

from ..conftest import examples

PARTS = ["txt", "jpg", "seg.png", "json"]
TIMES = [0, 1700000000, 1700000000.25, 1.5]

member = st.fixed_dictionaries(
    {
        "part": st.sampled_from(PARTS),
        "size": st.sampled_from([0, 1, 511, 512, 513, 1500]),
        "time": st.sampled_from(TIMES),
        "folder": st.sampled_from(["", "a/", "b" * 90 + "/", "ü/"]),
        "pad": st.sampled_from([0, 0, 0, 20, 100]),
        "comment": st.sampled_from([0, 0, 0, 3, 700]),
    }
)
samples = st.lists(st.lists(member, min_size=1, max_size=3), min_size=1, max_size=8)
formats = st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def tar_of(described: list[list[dict[str, Any]]], tar_format: int) -> tuple[bytes, list[int]]:
    """Writes samples with the standard library; returns the bytes and where each sample begins."""
    file = io.BytesIO()
    offsets = []
    with tarfile.open(fileobj=file, mode="w", format=tar_format) as tar:
        for number, parts in enumerate(described):
            offsets.append(tar.offset)
            for part in parts:
                info = tarfile.TarInfo(
                    f"{part['folder']}k{number}{'y' * part['pad']}.{part['part']}"
                )
                info.size, info.mtime = part["size"], part["time"]
                if part["comment"] and tar_format == tarfile.PAX_FORMAT:
                    info.pax_headers = {"comment": "c" * part["comment"]}
                tar.addfile(info, io.BytesIO(bytes(range(256)) * 6))
        offsets.append(tar.offset)
    return file.getvalue(), offsets


def both(data: bytes, starts: list[int], stops: list[int]) -> tuple[list[Any], list[Any]]:
    buffer = np.frombuffer(data, dtype=np.uint8).copy()
    bases = np.arange(len(starts)) * 512
    quick = block_members(buffer, np.array(starts), np.array(stops), bases)
    exact: list[Any] = []
    for i, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        try:
            headers = sample_headers(data, start, stop, 512 * i)
            spans = [(h.name, h.data - 512 * i, h.data - 512 * i + h.size) for h in headers]
            exact.append(spans)
        except TarError as error:
            exact.append(str(error))
    return [str(q) if isinstance(q, Exception) else [tuple(f) for f in q] for q in quick], exact


@given(samples, formats)
def test_members_are_those_of_the_exact_reader(described: Any, tar_format: int) -> None:
    data, offsets = tar_of(described, tar_format)
    quick, exact = both(data, offsets[:-1], offsets[1:])
    assert quick == exact
    assert [len(found) for found in quick] == [len(parts) for parts in described]


@examples(120)
@given(samples, formats, st.data())
def test_wrong_ranges_and_corrupt_bytes_raise_the_errors_of_the_exact_reader(
    described: Any, tar_format: int, draw: Any
) -> None:
    data, offsets = tar_of(described, tar_format)
    corrupt = bytearray(data)
    for _ in range(draw.draw(st.integers(0, 4))):
        corrupt[draw.draw(st.integers(0, offsets[-1] - 1))] = draw.draw(st.integers(0, 255))
    shift = draw.draw(st.sampled_from([0, 0, 512, 100]))
    starts = [min(offset + shift, offsets[-1]) for offset in offsets[:-1]]
    quick, exact = both(bytes(corrupt), starts, offsets[1:])
    assert quick == exact


def test_bytes_behind_the_end_of_a_name_do_not_disturb_its_neighbours() -> None:
    plain = {"size": 5, "time": 0, "folder": "", "pad": 0, "comment": 0, "part": "txt"}
    data, offsets = tar_of([[plain], [plain], [plain]], tarfile.GNU_FORMAT)
    corrupt = bytearray(data)
    corrupt[offsets[1] + 50 : offsets[1] + 53] = b"odd"
    checksum = sum(corrupt[offsets[1] : offsets[1] + 512]) - sum(
        corrupt[offsets[1] + 148 : offsets[1] + 156]
    ) + 8 * 32  # fmt: skip
    corrupt[offsets[1] + 148 : offsets[1] + 156] = b"%06o\0 " % checksum
    quick, exact = both(bytes(corrupt), offsets[:-1], offsets[1:])
    assert quick == exact
    assert [found[0][0] for found in quick] == ["k0.txt", "k1.txt", "k2.txt"]
