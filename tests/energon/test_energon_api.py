"""Energon's names for opening a path without building a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from energon_lite import (
    DatasetFormatError,
    DatasetLoader,
    ImageSample,
    MetadatasetV2,
    Sample,
    TextSample,
    WorkerConfig,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
    load_dataset,
    prepare_metadataset,
    traverse_metadataset,
)
from energon_lite.dataset_config import get_dataset_from_config, load_config
from energon_lite.epathlib import EPath
from energon_lite.flavors.webdataset.metadata import (
    EnergonDatasetType,
    check_dataset_info_present,
    get_dataset_info,
    get_dataset_type,
    get_info_shard_files,
)
from energon_lite.metadataset.loaded import DatasetBlendMode

from ..helpers import text_of, text_set

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
    assert far.path == EPath(root / "not" / "there")
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


def test_a_folder_is_opened_without_a_task_encoder(root) -> None:
    factory = get_dataset_from_config(
        root / "a", split_part="train", training=False, worker_config=CONFIG, subflavors={"x": 1}
    )
    assert factory.subflavors == {"x": 1}
    samples = list(factory.build())
    assert [sample.text for sample in samples] == [text_of(i) for i in range(len(factory))]
    same = load_config(
        root / "a/.nv-meta/dataset.yaml",
        default_type=type(factory),
        default_kwargs={"path": EPath(root / "a"), "split_part": "train", "training": False},
    )
    assert [sample.text for sample in same.build()] == [sample.text for sample in samples]
    found = load_config(root / "meta.yaml", default_type=MetadatasetV2)
    assert isinstance(found, MetadatasetV2)
    with pytest.raises(DatasetFormatError, match="is a metadataset; open it with load_dataset"):
        get_dataset_from_config(root / "meta.yaml", split_part="train", worker_config=CONFIG)


def test_what_lies_at_a_path_is_known(root) -> None:
    (root / "x.jsonl").write_text("{}\n")
    (root / "plain/.nv-meta").mkdir(parents=True)
    (root / "plain/.nv-meta/index.sqlite").touch()
    kinds = {
        "a": "WEBDATASET", "x.jsonl": "JSONL", "meta.yaml": "METADATASET", "plain": "FILESYSTEM",
        "nothing.yaml": "INVALID", "": "INVALID", "a/.nv-meta/.info.json": "INVALID",
    }  # fmt: skip
    for name, kind in kinds.items():
        assert get_dataset_type(EPath(root / name)) is EnergonDatasetType[kind], name
    info = get_dataset_info(EPath(root / "a"))
    assert list(info["shard_counts"]) == get_info_shard_files(root / "a")
    assert get_info_shard_files(root / "a")[0].endswith(".tar")
    assert check_dataset_info_present(EPath(root / "a"))
    assert not check_dataset_info_present(EPath(root / "plain"))


@pytest.mark.parametrize("get", [get_train_dataset, get_val_dataset, get_val_datasets])
def test_a_sample_type_is_checked(root, get) -> None:
    arguments = {"split_part": "train", "worker_config": CONFIG, "batch_size": 1}
    get(root / "a", sample_type=TextSample, **arguments)
    get(root / "a", sample_type=Sample, **arguments)
    with pytest.raises(TypeError, match=r"sample_type=ImageSample, .* are TextSample"):
        get(root / "a", sample_type=ImageSample, **arguments)


def test_arguments_of_the_dataset_class_count_where_the_file_has_none(tmp_path) -> None:
    root = tmp_path
    text_set(root / "a", 12)
    file = root / "a/.nv-meta/dataset.yaml"
    only = {"batch_size": None, "worker_config": CONFIG, "split_part": "train"}
    kept = get_val_dataset(root / "a", field_map={"text": "nothing"}, **only)
    assert next(iter(kept)).text == text_of(0)  # what the file sets wins
    file.write_text("sample_type: {__module__: energon_lite, __class__: TextSample}\n")
    mapped = get_val_dataset(root / "a", field_map={"text": "txt"}, **only)
    assert next(iter(mapped)).text == text_of(0)

    def sample_loader(raw):
        return {"text": f"{raw['__restore_key__'][-1]} {sorted(raw)}"}

    made = get_val_dataset(root / "a", sample_loader=sample_loader, part_filter=["txt"], **only)
    names = ["__key__", "__restore_key__", "__shard__", "__sources__", "txt"]
    assert next(iter(made)).text == f"0 {names}"
