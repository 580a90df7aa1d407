"""The tar parser against Python's `tarfile`."""

from __future__ import annotations

import io
import itertools
import tarfile
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from energon_lite.core.errors import DatasetFormatError
from energon_lite.formats.tar import TarError, block_members, iter_tar, sample_headers, split_name

from ..conftest import examples

TYPES = {"d": tarfile.DIRTYPE, "l": tarfile.SYMTYPE, "f": tarfile.REGTYPE}
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}

component = st.text(st.sampled_from("ab0.é_ -"), min_size=1, max_size=70).filter(
    lambda text: text not in (".", "..")
)
member_name = st.lists(component, min_size=1, max_size=6).map("/".join)
member = st.tuples(member_name, st.sampled_from("ffffdl"), st.integers(0, 1600))


def build(path, members, tar_format) -> bool:
    """Writes members (name, kind, size); False where the format cannot hold them."""
    try:
        with tarfile.open(path, "w", format=tar_format) as tar:
            for name, kind, size in members:
                info = tarfile.TarInfo(name)
                info.type = TYPES[kind]
                info.linkname = name * 3 if kind == "l" else ""
                info.size = size if kind == "f" else 0
                tar.addfile(info, io.BytesIO(bytes(range(251)) * (size // 251 + 1)))
    except ValueError:  # ustar: a name, or a link's target, does not fit
        return False
    return True


@pytest.mark.parametrize("tar_format", FORMATS)
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members=st.lists(member, min_size=1, max_size=12))
@example(members=[("/".join(["folder" * 8] * 3) + "/0001.seg.png", "f", 3), ("b.txt", "f", 1)])
def test_members_are_those_that_tarfile_finds(tmp_path, tar_format, members):
    path = tmp_path / "a.tar"
    if not build(path, members, FORMATS[tar_format]):
        return
    with tarfile.open(path) as tar:
        expected = [(i.name, i.isreg(), i.offset, i.offset_data, i.size) for i in tar]
    found = list(iter_tar(path))
    names = [header.name if header.is_file else header.name.rstrip("/") for header in found]
    assert [(name, *header[1:5]) for name, header in zip(names, found, strict=True)] == expected
    assert all(a.end == b.start for a, b in itertools.pairwise(found))


def test_members_larger_than_the_read_window_are_passed_over(tmp_path):
    members = [("a.bin", "f", 3 << 20), ("b.bin", "f", 700), ("x" * 300 + ".c", "f", (1 << 20) - 9)]
    members += [(f"{i:04d}.txt", "f", i) for i in range(3000)]
    assert build(tmp_path / "a.tar", members, tarfile.GNU_FORMAT)
    assert [(h.name, h.size) for h in iter_tar(tmp_path / "a.tar")] == [
        (name, size) for name, _, size in members
    ]


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 9 * 512), seed=st.integers(0, 3))
def test_a_truncated_tar_is_refused_or_a_prefix(tmp_path, cut, seed):
    path = tmp_path / "a.tar"
    members = [(f"{i}.txt", "f", 600 * (i + seed) % 1100) for i in range(4)]
    build(path, members, tarfile.GNU_FORMAT)
    whole = [(h.name, h.end) for h in iter_tar(path)]
    path.write_bytes(path.read_bytes()[:cut])
    try:
        found = [(h.name, h.end) for h in iter_tar(path)]
    except TarError:
        assert cut < whole[-1][1] or cut == 0
        return
    assert found == whole[: len(found)]
    # Nothing was lost but what is missing from the file, and padding.
    assert not found or found[-1][1] - cut < 512
    assert len(found) == len(whole) or whole[len(found)][1] > cut


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 511), value=st.integers(0, 255))
def test_a_header_with_a_changed_byte_is_refused(tmp_path, at, value):
    path = tmp_path / "a.tar"
    build(path, [("a.txt", "f", 10), ("b.txt", "f", 10)], tarfile.USTAR_FORMAT)
    data = bytearray(path.read_bytes())
    if data[1024 + at] == value:
        return
    data[1024 + at] = value
    path.write_bytes(data)
    if 148 <= at < 156:  # the checksum field itself: a space and a zero byte may be exchanged
        return
    with pytest.raises(TarError, match=r"after member 'a\.txt'"):
        list(iter_tar(path))


def test_a_sparse_member_is_refused(tmp_path):
    info = tarfile.TarInfo("a.txt")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.name": "a.txt"}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(TarError, match="sparse member at byte 0"):
        list(iter_tar(tmp_path / "a.tar"))


def test_data_after_the_end_mark_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    build(path, [("a.txt", "f", 10)], tarfile.USTAR_FORMAT)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(DatasetFormatError, match="after the end-of-archive mark"):
        list(iter_tar(path))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b.c/0001.seg.png", ("a/b.c/0001", "seg.png")),
        ("./0001.jpg", ("./0001", "jpg")),
        ("0001.", ("0001", "")),
        ("noext", None),
        (".hidden", None),
        ("a/.hidden.txt", None),
        ("a.b/noext", None),
        ("__meta__/x.txt", None),
        ("__index__/a/x.txt", None),
        ("__x__.txt", ("__x__", "txt")),
        ("__a/x.txt", ("__a/x", "txt")),
        ("a/__meta__/x.txt", ("a/__meta__/x", "txt")),
    ],
)
def test_a_name_splits_at_the_first_dot_of_its_last_component(name, expected):
    assert split_name(name) == expected


def test_a_sample_is_read_from_its_bytes(tmp_path):
    path = tmp_path / "a.tar"
    members = [("d/", "d", 0), ("d/1.b", "f", 7), ("d/1.a.c", "f", 600), ("d/noext", "f", 5)]
    build(path, [*members, ("d/2.b", "f", 9)], tarfile.PAX_FORMAT)
    headers = list(iter_tar(path))
    data = path.read_bytes()
    assert sample_headers(data, 0, headers[4].start) == headers[1:4]
    with pytest.raises(TarError, match="not at"):
        sample_headers(data, 0, headers[2].start + 512)


# -------------------------------------------- the quick reader of many samples, and the exact one


PARTS = ["txt", "jpg", "seg.png", "json"]
TIMES = [0, 1700000000, 1700000000.25, 1.5]

part_of_sample = st.fixed_dictionaries(
    {
        "part": st.sampled_from(PARTS),
        "size": st.sampled_from([0, 1, 511, 512, 513, 1500]),
        "time": st.sampled_from(TIMES),
        "folder": st.sampled_from(["", "a/", "b" * 90 + "/", "ü/"]),
        "pad": st.sampled_from([0, 0, 0, 20, 100]),
        "comment": st.sampled_from([0, 0, 0, 3, 700]),
    }
)
samples = st.lists(st.lists(part_of_sample, min_size=1, max_size=3), min_size=1, max_size=8)
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


@given(samples)
def test_pax_headers_as_solaris_marks_them_give_the_same_members(described: Any) -> None:
    data, offsets = tar_of(described, tarfile.PAX_FORMAT)
    marked = bytearray(data)
    for at in range(0, len(data), 512):
        if data[at + 257 : at + 262] == b"ustar" and data[at + 156 : at + 157] == b"x":
            marked[at + 156] = ord("X")
            marked[at + 148 : at + 156] = b" " * 8
            marked[at + 148 : at + 156] = b"%06o\0 " % sum(marked[at : at + 512])
    found = both(bytes(marked), offsets[:-1], offsets[1:])
    assert found == both(data, offsets[:-1], offsets[1:])


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
