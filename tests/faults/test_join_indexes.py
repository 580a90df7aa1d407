"""Join indexes that are damaged, or of other data: an error or skipped rows, never a wrong pair."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import (
    JoinedWebdatasetFactory,
    Sample,
    TextSample,
    WorkerConfig,
    edataclass,
    get_loader,
)
from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError
from energon_lite.extras.joins.join_index import JoinIndexWriter
from energon_lite.sources.dataset_config import load_factory

from ..conftest import write_tar
from ..helpers import ignore, prepared

ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1, global_error_handler=ignore)
NUM_SAMPLES = 30


@edataclass
class Pair(Sample):
    """Two texts."""

    left: str
    right: str | None


def pair(left: TextSample, right: TextSample | None) -> Pair:
    """Joins two texts."""
    return Pair.derive_from(left, left=left.text, right=right and right.text)


def texts(folder: Path, keys: list[str], num_shards: int = 2) -> Path:
    """Prepares texts `folder name:key`."""
    for shard in range(num_shards):
        own = keys[shard::num_shards]
        members = [(f"{key}.txt", f"{folder.name}:{key}".encode()) for key in own]
        write_tar(folder / f"s{shard}.tar", members)
    return prepared(folder, "TextSample", {"text": "txt"})


KEYS = [f"k{i:02d}" for i in range(NUM_SAMPLES)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets `a` and `b` of the same keys in another order, and `c` of other keys."""
    root = tmp_path_factory.mktemp("joins")
    texts(root / "a", KEYS)
    texts(root / "b", random.Random(1).sample(KEYS, NUM_SAMPLES), 3)
    texts(root / "c", [f"other{i}" for i in range(NUM_SAMPLES)], 3)
    factory(root, root / "index").build()
    return root


def factory(root: Path, index: Path, names: str = "ab", nonmatch: str = "skip") -> Any:
    inner = [load_factory(root / name, training=False, worker_config=ONE) for name in names]
    made: JoinedWebdatasetFactory[Any] = JoinedWebdatasetFactory(
        inner, training=False, worker_config=ONE, join_index=index, joiner=pair,
        nonmatch=["error", nonmatch],
    )  # fmt: skip
    return made


def rows_of(made: Any) -> list[Pair]:
    loader = get_loader(made.build(), max_skip_rate=1)
    return list(loader)


def index_of(root: Path) -> bytes:
    (file,) = (root / "index").iterdir()
    return file.read_bytes()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 16 + 48 * NUM_SAMPLES - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, 16 + 48 * NUM_SAMPLES),
    st.sampled_from(["skip", "none"]),
)
def test_a_corrupt_index_pairs_no_other_samples(
    root: Path, tmp_path_factory: pytest.TempPathFactory, changes: Any, size: int, nonmatch: str
) -> None:
    whole = bytearray(index_of(root))
    for at, value in changes:
        whole[at] = value
    path = tmp_path_factory.mktemp("index") / "i.bin"
    path.write_bytes(whole if changes else whole[:size])
    try:
        rows = rows_of(factory(root, path, nonmatch=nonmatch))
    except (DatasetFormatError, EmptyDatasetError) as error:
        assert str(path) in str(error)  # noqa: PT017
        return
    for row in rows:
        key = row.__key__
        assert row.left == f"a:{key}"
        assert row.right == f"b:{key}" or (row.right is None and nonmatch == "none")
    changed = {(at - 16) // 48 for at, _ in changes}
    assert {row.__key__ for row in rows} >= {
        key for i, key in enumerate(keys_in_order()) if i not in changed and 16 + 48 * i < size
    } or not changes


def keys_in_order() -> list[str]:
    return [*KEYS[::2], *KEYS[1::2]]


def test_a_header_with_absurd_numbers_is_refused(root: Path, tmp_path: Path) -> None:
    path, words = tmp_path / "i.bin", r"i\.bin: .* are no whole join index; remove"
    headers = [index_of(root)[:40]]  # half a row
    headers += [b"JIDX0001" + struct.pack("<q", number) for number in (2**62, 10**6, 0, -2)]
    for header in (*headers, b"JIDX0002" + struct.pack("<q", 2), b"", b"JIDX"):
        for rest in (b"", index_of(root)[16:]):
            path.write_bytes(header + rest)
            with pytest.raises(DatasetFormatError, match=words):
                factory(root, path)
    path.write_bytes(b"JIDX0001" + struct.pack("<q", 3) + index_of(root)[16 : 16 + 72 * 10])
    with pytest.raises(DatasetFormatError, match="3 columns, where 2 datasets are joined"):
        factory(root, path)


def test_a_row_without_a_sample_that_must_be_there_is_skipped(root: Path, tmp_path: Path) -> None:
    rows = np.frombuffer(index_of(root)[16:], "<i8").reshape(-1, 2, 3).copy()
    rows[4, 1] = -1
    rows[9, 0] = -1
    with JoinIndexWriter(tmp_path / "i.bin") as writer:
        writer.extend(rows)
    for nonmatch, lost in (("skip", {4, 9}), ("none", {9})):
        found = [row.__key__ for row in rows_of(factory(root, tmp_path / "i.bin", "ab", nonmatch))]
        assert found == [key for i, key in enumerate(keys_in_order()) if i not in lost]


def test_odd_keys_are_joined(tmp_path: Path) -> None:
    """Dots, blanks, folders above, letters of other scripts, and keys that begin alike."""
    keys = ["../up", "a b", "ä/é", "k", "k-1", "-1", "日本", "x" * 90, "d/../k", "1", "01"]
    for name in "ab":
        texts(tmp_path / name, keys if name == "a" else keys[::-1], 1)
    found = {row.__key__: (row.left, row.right) for row in rows_of(factory(tmp_path, tmp_path))}
    assert found == {key: (f"a:{key}", f"b:{key}") for key in keys}
