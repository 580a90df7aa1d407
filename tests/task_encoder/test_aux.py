"""`aux` in metadatasets: cookers that read files of other datasets and folders by key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    Cooker,
    CrudeSample,
    DatasetFormatError,
    DecodeFileStore,
    DefaultTaskEncoder,
    ImageSample,
    PrimaryFileStore,
    StateError,
    SystemFileStore,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_savable_loader,
    get_train_dataset,
    load_dataset,
    stateless,
    traverse_metadataset,
)
from energon_lite.extras.energon.energon_api import AuxDatasetReference, AuxFilesystemReference
from energon_lite.extras.lengths.length_index import measure_lengths
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.extras.stores.file_stores import WebdatasetFileStore

from ..conftest import jpeg, write_tar
from ..helpers import assert_same, metadataset, text_set

NUM_SAMPLES = 12
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Texts that name a picture in another dataset and a note in a folder."""
    members, pictures = [], []
    (tmp_path / "notes").mkdir()
    for i in range(NUM_SAMPLES):
        names = {"image": f"pics/{i}.jpg", "note": f"{i}.txt"}
        members += [
            (f"{i:04d}.json", json.dumps(names).encode()),
            (f"{i:04d}.cap.txt", f"caption {i}".encode()),
        ]
        pictures.append((names["image"], jpeg(i * 20)))
        (tmp_path / "notes" / names["note"]).write_text(f"note {i}")
    for name, content in (("texts", members), ("images", pictures[::-1])):
        write_tar(tmp_path / name / "shard.tar", content)
        prepare_dataset(tmp_path / name, split_parts={"train": ".*"}, num_workers=0)
    config = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (tmp_path / "texts/.nv-meta/dataset.yaml").write_text(config)
    return tmp_path


def write(root: Path, **aux: Any) -> Path:
    """Writes a metadataset of the texts."""
    node = {"path": "texts", "aux": aux}
    (root / "meta.yaml").write_text(json.dumps(metadataset(node)))
    return root / "meta.yaml"


AUX = {"images": "./images", "notes": "filesystem://notes"}


@stateless
@cooker(need_primary=True)
def cook(sample: CrudeSample, images: Any, notes: Any, primary: Any) -> ImageSample:
    image = images.get(sample["json"]["image"], sample)
    note = notes.get(sample["json"]["note"], sample)
    assert primary.get(".cap.txt", sample) == sample["cap.txt"]
    return ImageSample(
        **basic_sample_keys(sample), image=image[:, :2, :2], **({} if note else {"bad": 1})
    )


class Pictures(DefaultTaskEncoder[Any, Any, Any, Any]):
    cookers = (Cooker(cook),)


def train(path: Path, encoder: Any = None, **settings: Any) -> Any:
    settings = {"worker_config": CONFIG, "batch_size": 1, **settings}
    return get_train_dataset(path, task_encoder=encoder or Pictures(), **settings)


def encoder_of(function: Any) -> Any:
    class Own(DefaultTaskEncoder[Any, Any, Any, Any]):
        cookers = (Cooker(stateless(function)),)

    return Own()


def samples(dataset: Any, number: int = NUM_SAMPLES) -> list[Any]:
    iterator = iter(get_savable_loader(dataset))
    return [next(iterator) for _ in range(number)]


def test_cookers_get_decoded_files_and_append_their_sources(root: Path) -> None:
    found = {batch.__key__[0]: batch for batch in samples(train(write(root, **AUX)))}
    assert len(found) == NUM_SAMPLES
    for i in range(NUM_SAMPLES):
        batch = found[f"{i:04d}"]
        assert batch.image.shape == (1, 3, 2, 2)
        assert torch.all((batch.image * 255 - i * 20).abs() < 3)
        names = [(Path(s.dataset_path).name, s.index) for s in batch.__sources__[0]]
        assert names == [
            ("texts", i), ("images", f"pics/{i}.jpg"), ("notes", f"{i}.txt"),
            ("texts", f"{i:04d}.cap.txt"),
        ]  # fmt: skip


def pair(sample: CrudeSample, images: Any, notes: Any) -> Any:
    image = images.get(sample["json"]["image"], sample)
    notes.get(sample["json"]["note"], sample)
    return image


def keys_first(sample: CrudeSample, images: Any, notes: Any) -> ImageSample:
    # The service fields are copied before the files are read.
    return ImageSample(**basic_sample_keys(sample), image=pair(sample, images, notes))


def several(sample: CrudeSample, images: Any, notes: Any) -> Iterator[ImageSample]:
    yield keys_first(sample, images, notes)


def without(sample: CrudeSample, images: Any, notes: Any) -> ImageSample:
    fields = {**basic_sample_keys(sample), "__sources__": None}
    return ImageSample(**fields, image=pair(sample, images, notes))


@pytest.mark.parametrize("function", [keys_first, several, without])
def test_sources_do_not_depend_on_the_order_in_which_a_cooker_reads_and_copies_them(
    root: Path, function: Any
) -> None:
    dataset = train(write(root, **AUX), encoder_of(function), batch_size=None)
    for sample in samples(dataset):
        for found in (sample, dataset.restore_sample(sample.__restore_key__)):
            names = [(Path(s.dataset_path).name, s.index) for s in found.__sources__ or ()]
            i = int(sample.__key__)
            expected = [("texts", i), ("images", f"pics/{i}.jpg"), ("notes", f"{i}.txt")]
            assert names == ([] if function is without else expected)


@pytest.mark.parametrize(
    ("images", "notes"),
    [
        ("images", "filesystem://notes"),
        ("./images", "filesystem://./notes"),
        ("{root}/images", "filesystem://{root}/notes"),
        ("file://{root}/images", {"fs_path": "notes"}),
        ({"path": "images"}, {"fs_path": "{root}/notes"}),
    ],
)
def test_all_forms_of_paths_lead_to_the_same_stores(root: Path, images: Any, notes: Any) -> None:
    aux = json.dumps({"images": images, "notes": notes}).replace("{root}", str(root))
    path = write(root, **json.loads(aux))
    found: dict[str, Any] = {}

    def look(sample: CrudeSample, **aux: Any) -> TextSample:
        found.update(aux)
        return TextSample(**basic_sample_keys(sample), text="")

    samples(train(path, encoder_of(look)), 1)
    kinds = {name: (type(store.inner), store.get_path()) for name, store in found.items()}
    assert kinds == {
        "images": (WebdatasetFileStore, str(root / "images")),
        "notes": (SystemFileStore, str(root / "notes")),
    }
    (leaf,) = traverse_metadataset(path, split_part="train")
    paths = {name: str(store) for name, store in leaf.aux.items()}
    assert paths == {name: str(root / name) for name in ("images", "notes")}


def test_cookers_without_a_decoder_get_bytes(root: Path) -> None:
    @cooker(need_primary=True)
    def raw(sample: CrudeSample, images: Any, primary: Any) -> TextSample:
        assert isinstance(images, WebdatasetFileStore)
        assert isinstance(primary, PrimaryFileStore)
        assert not isinstance(primary.inner, DecodeFileStore)
        name = json.loads(primary.get(".json"))["image"]
        return TextSample(**basic_sample_keys(sample), text=str(len(images.get(name))))

    encoder = encoder_of(raw)
    encoder.decoder = None
    batch = samples(train(write(root, images="images"), encoder), 1)[0]
    number = int(batch.__key__[0])
    assert batch.text == [str(len(jpeg(number * 20)))]


def test_missing_file_is_a_skipped_sample_that_names_key_and_store(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "notes/3.txt").unlink()
    loader = get_savable_loader(train(write(root, **AUX), repeat=False))
    keys = [batch.__key__[0] for batch in loader]
    assert sorted(keys) == [f"{i:04d}" for i in range(NUM_SAMPLES) if i != 3]
    assert loader.stats()["texts/train"].skipped == 1
    (record,) = caplog.records
    assert "notes'): no file '3.txt'; check the key; stage cook" in record.getMessage()


def test_changed_store_is_noticed_on_a_resume_and_a_moved_one_is_not(root: Path) -> None:
    loader = get_savable_loader(train(write(root, **AUX)))
    next(iter(loader))
    state = loader.save_state_rank()
    moved = root.rename(root.with_name("moved"))
    get_savable_loader(train(moved / "meta.yaml")).restore_state_rank(state)
    (moved / "other").mkdir()
    for changed in ({"notes": "filesystem://other"}, {"images": "texts"}):
        with pytest.raises(StateError, match="aux"):
            get_savable_loader(train(write(moved, **{**AUX, **changed}))).restore_state_rank(state)


def test_aux_of_typed_datasets_is_refused(root: Path) -> None:
    text_set(root / "typed", 3)
    path = root / "meta.yaml"
    path.write_text(json.dumps(metadataset({"path": "typed", "aux": {"x": "images"}})))
    with pytest.raises(DatasetFormatError) as caught:
        train(path)
    assert str(caught.value) == (
        f"{path}:1, splits.train.aux: 'aux' is for crude datasets, whose cookers get it, and the "
        "samples of typed are of another class (StandardWebdatasetFactory). Write `__class__: "
        "CrudeWebdataset` in its dataset.yaml, or remove 'aux'"
    )
    write(root, **AUX)
    outer = root / "outer.yaml"
    outer.write_text(json.dumps(metadataset({"path": "meta.yaml", "aux": {"x": "images"}})))
    with pytest.raises(DatasetFormatError, match=r"train\.aux: .*meta\.yaml is a metadataset; wri"):
        train(outer)


def no_stores(sample: Any) -> Any:
    return sample


# Stores, the cooker, the error and its words, when the pipeline is built.
REFUSED: list[tuple[Any, Any, Any, str]] = [
    ({"x": "nothing"}, None, FileNotFoundError, r"aux\.x: nothing is no folder; check the path"),
    ({"x": "filesystem://nothing"}, None, FileNotFoundError, r"aux\.x: nothing is no folder"),
    ({"x": "notes"}, None, FileNotFoundError,
     r"aux\.x: .*/notes has no \.nv-meta/index\.sqlite.*filesystem://"),
    ({"x": "meta.yaml"}, None, DatasetFormatError,
     r"aux\.x: meta\.yaml is a file; 'aux' names a prepared dataset folder"),
    ({"x": "rclone://profile/images"}, None, DatasetFormatError,
     r"aux\.x: 'rclone://profile/images' is remote"),
    ({"x": "filesystem+rclone://p/images"}, None, DatasetFormatError,
     r"aux\.x: 'rclone://p/images' is remote"),
    ({"images": "images"}, cook, TypeError, r"cooker .* for .*images=\.\.\..*'notes'"),
    ({"images": "images"}, no_stores, TypeError, r"cooker .* for .*images=\.\.\..*'images'"),
    (AUX, "index.sqlite", FileNotFoundError, r"texts has no \.nv-meta/index\.sqlite"),
]  # fmt: skip


@pytest.mark.parametrize(("aux", "function", "error", "words"), REFUSED)
def test_stores_and_cookers_that_do_not_fit_are_refused_when_the_pipeline_is_built(
    root: Path, aux: Any, function: Any, error: Any, words: str
) -> None:
    if function == "index.sqlite":  # of the primary, which the cooker needs
        (root / "texts/.nv-meta/index.sqlite").unlink()
        function = None
    with pytest.raises(error, match=words):
        train(write(root, **aux), encoder_of(function) if function else None)


def test_own_builders_get_and_pass_on_the_stores(root: Path) -> None:
    seen = []

    class Own(Pictures):
        def build_cook_crude_sample(self, dataset: Any, *, aux: Any = None, **rest: Any) -> Any:
            seen.append(sorted(aux))
            return super().build_cook_crude_sample(dataset, aux=aux, **rest)

        def build_train_datasets(self, *, datasets: Any, **settings: Any) -> Any:
            seen.append([sorted(loaded.aux) for loaded in datasets])
            return super().build_train_datasets(datasets=datasets, **settings)

    path = write(root, **AUX)
    assert_same(samples(train(path, Own()), 3), samples(train(path), 3))
    assert seen == [[["images", "notes"]], ["images", "notes"]]


def test_leaves_share_the_stores_of_one_folder(root: Path) -> None:
    stores = set()

    def look(sample: CrudeSample, x: Any) -> TextSample:
        stores.add(id(x.inner))
        return TextSample(**basic_sample_keys(sample), text="")

    leaf = {"path": "texts", "aux": {"x": "images"}}
    blend = metadataset({"blend": [leaf, {**leaf, "name": "again"}]})
    (root / "blend.yaml").write_text(json.dumps(blend))
    found = samples(train(root / "blend.yaml", encoder_of(look)), 8)
    assert {batch.__restore_key__[2][0] for batch in found} == {"texts/train", "again"}
    assert len(stores) == 1


def test_lengths_are_measured_with_aux(root: Path) -> None:
    class Lengths(Pictures):
        def sample_length(self, sample: Any) -> int:
            return int(sample.image.numel())

    (report,) = measure_lengths(write(root, **AUX), Lengths(), num_workers=0)
    assert (report.samples, report.failed) == (NUM_SAMPLES, 0)
    assert report.totals == {"tokens": 12 * NUM_SAMPLES}


def test_energon_references_open_stores(root: Path) -> None:
    prepared = AuxDatasetReference(path="images")
    plain = AuxFilesystemReference(fs_path="notes")
    for reference in (prepared, plain):
        reference.post_initialize(root / "meta.yaml")
    assert isinstance(prepared.get_file_store(), WebdatasetFileStore)
    assert plain.get_file_store().get("0.txt") == b"note 0"
    with pytest.raises(FileNotFoundError, match=r"index\.sqlite"):
        AuxDatasetReference(path=root / "notes").get_file_store()


def test_loaded_datasets_carry_their_stores(root: Path) -> None:
    (loaded,) = (
        load_dataset(write(root, **AUX)).get_datasets(training=True, split_part="train").datasets
    )
    assert loaded.aux is not None
    assert sorted(loaded.aux) == ["images", "notes"]
    assert loaded.dataset.as_file_store().get_path() == str(root / "texts")
