"""Energon's names for opening a path without building a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from energon_lite import (
    DatasetFormatError,
    DatasetLoader,
    MetadatasetV2,
    WorkerConfig,
    load_dataset,
    prepare_metadataset,
    traverse_metadataset,
)
from energon_lite.metadataset.loaded import DatasetBlendMode

from ..helpers import text_set

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)
TEXT = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
    - {path: a, weight: 3, subflavors: {kind: web}}
    - blend: [{path: b}, {path: a, weight: 3}]
  epochs:
    split_part: train
    blend_epochized: [{path: a, repetitions: 1.5}, {path: b}]
  far: {path: not/there}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    text_set(folder / "a", 12)
    text_set(folder / "b", 5)
    (folder / "meta.yaml").write_text(TEXT)
    return folder


def test_metadataset_returns_its_leaves_with_absolute_weights(root) -> None:
    loaded = load_dataset(root / "meta.yaml")
    assert isinstance(loaded, MetadatasetV2)
    found = loaded.get_datasets(training=True, split_part="train", worker_config=CONFIG)
    assert found.blend_mode is DatasetBlendMode.DATASET_WEIGHT
    assert [entry.weight for entry in found.datasets] == [0.75, 0.0625, 0.1875]
    assert [len(entry.dataset) for entry in found.datasets] == [12, 5, 12]
    assert found.datasets[0].dataset.subflavors == {"kind": "web"}


def test_epochized_metadataset_returns_its_leaves_with_repetitions(root) -> None:
    found = load_dataset(root / "meta.yaml").get_datasets(training=True, split_part="epochs")
    assert found.blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS
    assert [entry.repetitions for entry in found.datasets] == [1.5, 1.0]


def test_folder_is_one_dataset(root) -> None:
    loaded = load_dataset(root / "a", subflavors={"x": 1})
    assert isinstance(loaded, DatasetLoader)
    found = loaded.get_datasets(training=False, split_part="train")
    assert found.blend_mode is DatasetBlendMode.NONE
    assert found.datasets[0].dataset.subflavors == {"x": 1}


def test_traversing_opens_nothing(root) -> None:
    (far,) = traverse_metadataset(root / "meta.yaml", split_part="far")
    assert far.path == root / "not" / "there"
    assert (far.split_part, far.aux, far.subflavors) == ("far", {}, {})
    parts = traverse_metadataset(root / "meta.yaml", split_part="epochs")
    assert [(part.path.name, part.split_part) for part in parts] == [("a", "train"), ("b", "train")]


def test_wrong_use_is_refused(root) -> None:
    with pytest.raises(DatasetFormatError, match="is no metadataset"):
        traverse_metadataset(root / "a", split_part="train")
    with pytest.raises(ValueError, match="applies to the folder of one dataset"):
        load_dataset(root / "meta.yaml", dataset_config="x.yaml")
    prepare_metadataset(root / "meta.yaml")
    (root / "bad.yaml").write_text(TEXT.replace("weight: 3,", "wieght: 3,"))
    with pytest.raises(DatasetFormatError, match="Did you mean 'weight'"):
        prepare_metadataset(root / "bad.yaml")
