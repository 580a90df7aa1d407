"""The order of a pipeline as references: by arrays and one by one, and what has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    MapDataset,
    RepeatDataset,
    SavableDataset,
    ShuffleBufferDataset,
    WorkerConfig,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream
from energon_lite.order.schedules import Schedule
from energon_lite.sources.dataset_config import load_factory
from energon_lite.stages.plan_order import OrderReader, order_of

from ..conftest import examples
from ..helpers import text_set

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=5)
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("order") / "texts", 23)


@stateless
def same(sample: Any) -> Any:
    return sample


def source(root: Path, name: str, *, repeat: bool = True) -> SavableDataset[Any]:
    factory = load_factory(root, training=True, worker_config=CONFIG, name=name)
    return factory.build(repeat=repeat, shuffle_buffer_size=5)


FADING = Schedule("linear", ((0, 1.0), (50, 0.0)))
TREES: dict[str, Any] = {
    "a source": lambda root: source(root, "a"),
    "a blend": lambda root: BlendDataset(*((source(root, n), i + 1) for i, n in enumerate(NAMES))),
    "a blend of one": lambda root: BlendDataset((source(root, "a"), 1)),
    "at random": lambda root: BlendDataset(
        (source(root, "a"), 1), (source(root, "b"), 2), blend_mode="random"
    ),
    "nested, mapped": lambda root: MapDataset(
        BlendDataset(
            (BlendDataset((MapDataset(source(root, "a"), same), 2), (source(root, "b"), 1)), 1),
            (source(root, "c"), FADING),
        ),
        same,
    ),
    "a concat in a blend": lambda root: BlendDataset(
        (RepeatDataset(ConcatDataset(*(source(root, n, repeat=False) for n in "ab"))), 1),
        (source(root, "c"), 2),
    ),
    "finite": lambda root: BlendDataset(*((source(root, n, repeat=False), 1) for n in NAMES)),
}


def reader(dataset: SavableDataset[Any], stream: Stream) -> OrderReader:
    return OrderReader(order_of(dataset), list(NAMES), stream)


def rows(refs: Any) -> list[Any]:
    return list(zip(*(column.tolist() for column in refs), strict=True))


@pytest.mark.parametrize("tree", list(TREES))
@examples(8)
@given(steps=st.lists(st.integers(0, 40), max_size=5), index=st.integers(0, 2))
def test_references_are_what_the_run_reads(
    root: Path, tree: str, steps: list[int], index: int
) -> None:
    dataset, stream = TREES[tree](root), Stream(index, 3)
    own = reader(dataset, stream)
    found: list[Any] = []
    for step in steps:
        snapshot, num_draws = own.snapshot(), own.num_draws
        found += rows(own.take(step))
        own = reader(dataset, stream)
        own.restore(snapshot, num_draws)
        assert own.snapshot() == snapshot
        own.take(step)
    run = StreamRun(dataset, stream)
    keys = [run.key for _ in found if next(run) is not None]
    assert [(NAMES[number], *rest) for number, *rest in found] == keys


def test_what_has_no_order_beforehand_is_named(root: Path) -> None:
    for dataset, match in (
        (ShuffleBufferDataset(source(root, "a"), 5), "ShuffleBufferDataset"),
        (BatchDataset(source(root, "a"), 2, same), "BatchLists"),
    ):
        with pytest.raises(ValueError, match=match):
            order_of(dataset)
