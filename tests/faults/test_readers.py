"""No exception of another library leaves ours: any file of a dataset, damaged in any way."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.storage.length_files import read_facts, read_lengths, write_lengths
from energon_lite.storage.nvmeta import META

from ..conftest import examples
from ..helpers import text_set
from .hostile_sets import HEAD, LENGTHS
from .test_hostile import index, info, judged, lint, prepare, train

FILES = (
    "data/shard-000.tar", "data/shard-000.tar.idx", f"data/{META}/.info.json",
    f"data/{META}/split.yaml", f"data/{META}/dataset.yaml", f"data/{META}/index.sqlite",
    f"data/{META}/index.uuid", f"data/{LENGTHS}/train.npy", f"data/{LENGTHS}/train.json",
    "meta.yaml",
)  # fmt: skip
# What parsers stumble over, rather than bytes at random.
TOKENS = (
    b"[" * 3000, b"{" * 3000, b"&a [*a]", b"*x", b"!!python/name:os.system ", b"9" * 5000,
    b"-", b"1e999", b"null", b"\0", b"\xff", b"\xed\xa0\x80", b"{0..9999999999}", b": ", b"\n- ",
    b"'", b'"', b"\t", b"../../", b"%s", b"---\n", b"?", b"\\", b"\xef\xbb\xbf", b"<<: *a",
)  # fmt: skip


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[str, float, bytes, int]]:
    """What is done to a file, step by step: (what, place in it from 0 to 1, bytes, number)."""
    one = st.tuples(
        st.sampled_from(["change", "insert", "cut", "double", "bit"]),
        st.floats(0, 1, width=16),
        st.sampled_from(TOKENS) | st.binary(min_size=1, max_size=12),
        st.integers(0, 7),
    )
    return draw(st.lists(one, min_size=1, max_size=4))


def damaged(raw: bytes, steps: list[tuple[str, float, bytes, int]]) -> bytes:
    for what, place, new, number in steps:
        at = int(place * len(raw))
        if what == "change":
            raw = raw[:at] + new + raw[at + len(new) :]
        elif what == "insert":
            raw = raw[:at] + new + raw[at:]
        elif what == "cut":
            raw = raw[:at]
        elif what == "double":
            raw = raw[:at] + raw[at // 2 :]
        elif at < len(raw):
            raw = raw[:at] + bytes([raw[at] ^ 1 << number]) + raw[at + 1 :]
    return raw


def stored(path: Path) -> None:
    """Reads the length index."""
    for found in (read_facts(path, "train", "default"),):
        assert found is None or isinstance(found["resources"], list)
    read_lengths(path, "train", "default", 12, "none")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers") / "base"
    root = text_set(folder / "data", 12, num_shards=2)
    write_lengths(root, "train", "default", np.arange(12), "none", "none")
    text = HEAD + "  train: {blend: [{path: data, weight: 1, subflavors: {a: b}}]}\n"
    (folder / "meta.yaml").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@examples(10)
@given(name=st.sampled_from(FILES), steps=damages())
def test_a_damaged_file_gives_a_result_or_an_error_of_ours(
    base: Path,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    steps: list[tuple[str, float, bytes, int]],
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "case"
    shutil.copytree(base, folder)
    (folder / name).write_bytes(damaged((folder / name).read_bytes(), steps))
    actions: Any = (train, info, lint, stored, index, prepare)
    problems = {}
    for action in actions:
        path = folder / "meta.yaml" if name == "meta.yaml" and action != stored else folder / "data"
        try:
            action(path)
        except Exception as error:
            problems[action.__name__] = judged(error, folder)
    shutil.rmtree(folder)
    assert not {action: text for action, text in problems.items() if text}
