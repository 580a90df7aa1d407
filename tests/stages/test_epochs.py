"""Limits and virtual epochs end the passes of a whole pipeline, and of nothing below one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    IterMapDataset,
    LimitDataset,
    MapDataset,
    RepeatDataset,
    SavableDataset,
    ShuffleBufferDataset,
    WorkerConfig,
)
from energon_lite.sources.dataset_config import load_factory

from ..helpers import text_set

ONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("epochs") / "texts", 11)


def source(root: Path, name: str = "a", *, repeat: bool = False) -> Any:
    return load_factory(root, training=True, worker_config=ONE, name=name).build(repeat=repeat)


OVER: list[Callable[[Any, Any], SavableDataset[Any]]] = [
    lambda limit, other: ConcatDataset(limit, other),
    lambda limit, other: BlendDataset((limit, 1), (other, 1)),
    lambda limit, other: BlendDataset((limit, 1), (other, 1), until="forever"),
    lambda limit, _: RepeatDataset(limit),
    lambda limit, _: BatchDataset(limit, 4, list),
    lambda limit, _: BatchDataset(MapDataset(limit, lambda item: item), 4, list),
    lambda limit, _: ShuffleBufferDataset(limit, 3),
    lambda limit, _: IterMapDataset(limit, iter),
]


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("kind", [EpochizeDataset, LimitDataset])
def test_end_of_a_pass_inside_another_dataset_is_refused_with_the_remedy(root, kind, over) -> None:
    with pytest.raises(ValueError, match=r"limit of 5 items .* around the outermost dataset"):
        over(kind(source(root), 5), source(root, "b"))


@pytest.mark.parametrize("length", [0, -1])
def test_length_below_one_is_refused(root, length) -> None:
    with pytest.raises(ValueError, match=f"length={length} must be at least 1"):
        LimitDataset(source(root), length)


def test_two_ends_of_a_pass_are_refused(root) -> None:
    with pytest.raises(ValueError, match="ended below already"):
        EpochizeDataset(LimitDataset(source(root), 3), 2)
