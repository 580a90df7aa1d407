"""No exception of another library reaches the user: any file of a dataset, corrupt in any way."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite.formats.length_files import read_facts, read_lengths, write_lengths
from energon_lite.formats.nvmeta import META

from ..helpers import text_set
from .hostile_sets import HEAD, LENGTHS
from .mutations import damage
from .test_hostile import index, info, judged, lint, prepare, train

FILES = (
    "data/shard-000.tar", "data/shard-000.tar.idx", f"data/{META}/.info.json",
    f"data/{META}/split.yaml", f"data/{META}/dataset.yaml", f"data/{META}/index.sqlite",
    f"data/{META}/index.uuid", f"data/{LENGTHS}/train.npy", f"data/{LENGTHS}/train.json",
    "meta.yaml",
)  # fmt: skip


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


@pytest.mark.parametrize("name", FILES)
def test_a_corrupt_file_yields_a_result_or_an_error_with_place_and_remedy(
    base: Path, tmp_path: Path, name: str
) -> None:
    rng = random.Random(name)
    raw = (base / name).read_bytes()
    for _ in range(rng.randint(1, 4)):
        raw = damage(raw, rng)[0] or raw
    folder = shutil.copytree(base, tmp_path / "case")
    (folder / name).write_bytes(raw)
    actions: Any = (train, info, lint, stored, index, prepare)
    problems = {}
    for action in actions:
        path = folder / "meta.yaml" if name == "meta.yaml" and action != stored else folder / "data"
        try:
            action(path)
        except Exception as error:
            problems[action.__name__] = judged(error, folder)
    assert not {action: text for action, text in problems.items() if text}
