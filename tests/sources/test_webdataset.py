"""Prepared folders as sources: what they read, what they refuse, what they count."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from energon_lite import (
    CaptioningSample,
    CaptioningWebdataset,
    Cooker,
    CrudeWebdataset,
    DatasetFormatError,
    DefaultDecoderWebdatasetFactory,
    DefaultTaskEncoder,
    EmptyDatasetError,
    Sample,
    StandardWebdatasetFactory,
    TextSample,
    WorkerConfig,
    edataclass,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.core.samples import field_of
from energon_lite.core.stacking import SERVICE_FIELDS, layout_of
from energon_lite.sources.dataset_config import load_factory

from ..conftest import write_tar
from ..helpers import caption_set, crude_set, metadataset, prepared, text_set

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


def samples_of(path: Path, *, trust: bool = False, **settings: Any) -> list[Any]:
    """All samples of split `train`, in file order."""
    factory = load_factory(path, split_part="train", training=False, trust=trust, **settings)
    return list(factory.build())


def write_config(root: Path, text: str) -> None:
    (root / ".nv-meta" / "dataset.yaml").write_text(text)


class Changing(DefaultTaskEncoder):
    """Changes the values of subflavors."""

    cookers: ClassVar = [Cooker(stateless(lambda sample: sample))]

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        tags = field_of(sample, "__subflavors__")
        tags["tags"].append(0)
        tags["of"]["deep"][0]["a"] = 0
        return sample


def pair(left: TextSample, right: TextSample) -> TextSample:
    return left


first_of_two = {"__module__": __name__, "__function__": "pair"}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return text_set(tmp_path / "texts", 12)


# ------------------------------------------------------------------------------- what is read


def test_samples_carry_key_restore_key_source_and_weight(texts) -> None:
    sample = samples_of(texts)[5]
    assert isinstance(sample, TextSample)
    assert (sample.__key__, sample.text) == ("00005", "text 5 ")
    assert sample.__restore_key__ == ("texts/train", 0, 5, 5)
    assert sample.__loss_weight__ == 1.0
    assert sample.__subflavors__ == {}
    (source,) = sample.__sources__
    assert source == (str(texts), 5, "shard-001.tar", ("00005.txt",))


@pytest.mark.parametrize("kind", ["text", "crude", "two parts", "jsonl", "join"])
def test_samples_do_not_share_values_of_their_subflavors(tmp_path, kind) -> None:
    given = {"tags": ["base"], "of": {"deep": [{}]}, "number": 1}
    path: Any = tmp_path / "texts"
    if kind == "jsonl":
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "a"}\n' * 4)
    else:
        (crude_set if kind == "crude" else text_set)(path, 4)
    if kind == "two parts":
        (path := tmp_path / "captions").mkdir()
        caption_set(path, 4)
    if kind == "join":
        path = metadataset({"join": [{"path": str(path)}] * 2, "joiner": first_of_two})
    train = get_train_dataset(
        path, batch_size=None, subflavors=given, worker_config=CONFIG, task_encoder=Changing()
    )
    given["tags"].append("later")
    for sample, _ in zip(train, range(9), strict=False):
        tags = field_of(sample, "__subflavors__")
        assert tags == {"tags": ["base", 0], "of": {"deep": [{"a": 0}]}, "number": 1}
    assert given == {"tags": ["base", "later"], "of": {"deep": [{}]}, "number": 1}


def test_crude_samples_are_dicts_of_all_parts(tmp_path) -> None:
    folder = tmp_path / "crude"
    write_tar(folder / "a.tar", [("x.txt", b"text"), ("x.json", b'{"a": 1}'), ("y.txt", b"more")])
    prepared(folder, "CrudeWebdataset")
    first, second = samples_of(folder)
    assert first["txt"] == "text"
    assert first["json"] == {"a": 1}
    assert set(first) - set(second) == {"json"}
    assert (first["__key__"], first["__shard__"]) == ("x", "a.tar")
    assert first["__sources__"][0].file_names == ("x.txt", "x.json")
    write_config(
        folder, "__module__: megatron.energon\n__class__: CrudeWebdataset\npart_filter: [txt]\n"
    )
    assert "json" not in samples_of(folder)[0]


SERVICE_PARTS = (*sorted(SERVICE_FIELDS), "__url__", "txt")


@pytest.mark.parametrize(
    ("sample_type", "parts"),
    [
        ("CrudeWebdataset", ("__key__",)),
        ("CrudeWebdataset", SERVICE_PARTS),
        ("TextSample", SERVICE_PARTS),
    ],
)
def test_parts_do_not_replace_service_fields(tmp_path, sample_type, parts) -> None:
    is_crude = sample_type == "CrudeWebdataset"
    write_tar(tmp_path / "a.tar", [(f"{i}.{part}", b"x") for i in range(3) for part in parts])
    prepared(tmp_path, sample_type, None if is_crude else {"text": parts[-1]})
    found = samples_of(tmp_path, subflavors={"a": 1})
    assert [field_of(sample, "__key__") for sample in found] == ["0", "1", "2"]
    for sample in found:
        fields = sample if is_crude else {n: getattr(sample, n) for n in layout_of(TextSample)[1]}
        assert [name for name, value in fields.items() if value == "x"] == [
            name for name in ("txt" if is_crude else "text",) if "txt" in parts
        ]
        assert fields["__subflavors__"] == {"a": 1}
        assert fields["__sources__"][0].shard_name == "a.tar"
        assert fields.get("__loss_weight__", 1.0) == 1.0


def test_excluded_samples_and_shards_are_neither_counted_nor_dealt(texts) -> None:
    split = texts / ".nv-meta" / "split.yaml"
    excluded = ["shard-001.tar/00005", "shard-000.tar/00000", "shard-002.tar/00011"]
    text = split.read_text()
    split.write_text(text.replace("exclude: []", f"exclude: {json.dumps(excluded)}"))
    kept = [f"{i:05d}" for i in range(12) if i not in (0, 5, 11)]
    factory = load_factory(texts, split_part="train", training=False)
    assert len(factory) == 9
    assert [s.__key__ for s in samples_of(texts)] == kept
    settings = {"split_part": "train", "batch_size": 1}
    datasets = [
        get_val_dataset(
            texts,
            worker_config=WorkerConfig(rank=rank, world_size=3, num_workers=0),
            **settings,
        )
        for rank in range(3)
    ]
    assert [len(dataset) for dataset in datasets] == [3, 3, 3]
    (texts / ".nv-meta" / "index.sqlite").unlink()
    assert [s.__key__ for s in samples_of(texts)] == kept  # found by reading the tars
    split.write_text(text.replace("exclude: []", 'exclude: ["shard-001.tar"]'))
    assert [s.__key__ for s in samples_of(texts)] == [
        f"{i:05d}" for i in (0, 1, 2, 3, 8, 9, 10, 11)
    ]


def test_excluded_sample_that_is_not_there_is_named_in_the_log(texts, caplog) -> None:
    split = texts / ".nv-meta" / "split.yaml"
    split.write_text(split.read_text().replace("exclude: []", 'exclude: ["shard-001.tar/nobody"]'))
    assert len(samples_of(texts)) == 12
    assert "excludes sample 'shard-001.tar/nobody', which is not there" in caplog.text


def test_split_without_any_sample_left_is_empty(tmp_path) -> None:
    folder = text_set(tmp_path / "two", 2, 1)
    split = folder / ".nv-meta" / "split.yaml"
    excluded = ["shard-000.tar/00000", "shard-000.tar/00001"]
    split.write_text(split.read_text().replace("exclude: []", f"exclude: {json.dumps(excluded)}"))
    with pytest.raises(EmptyDatasetError, match="every sample of split part 'train' is excluded"):
        samples_of(folder)


def test_name_is_folder_and_split_part_or_the_argument(texts, monkeypatch) -> None:
    assert load_factory(texts, split_part="train").build().name == "texts/train"
    assert load_factory(texts, split_part="train", name="mine").build().name == "mine"
    monkeypatch.chdir(texts)
    assert load_factory(".", split_part="train").build().name == "texts/train"


# --------------------------------------------------------------------------------- dataset.yaml


def test_field_map_of_dataset_yaml_and_settings_that_win_over_the_caller(texts) -> None:
    write_config(
        texts,
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
        "field_map: {text: 'json[a][0],txt'}\nmax_samples_per_sequence: 2\n",
    )
    source = load_factory(texts, split_part="train", max_samples_per_sequence=7).build()
    assert source.config()["max_samples_per_sequence"] == 2
    assert samples_of(texts)[0].text == "text 0 "


def test_code_that_lies_in_the_dataset_runs_only_if_it_is_trusted(texts) -> None:
    (texts / ".nv-meta" / "sample_loader.py").write_text(
        "def sample_loader(parts):\n    return {'text': parts['txt'].upper()}\n"
        "def part_filter(part):\n    return part == 'txt'\n"
    )
    write_config(
        texts,
        "sample_type: {__module__: energon_lite, __class__: TextSample}\n"
        "sample_loader: sample_loader.py:sample_loader\npart_filter: sample_loader.py\n",
    )
    with pytest.raises(DatasetFormatError, match="is code that lies in the dataset"):
        samples_of(texts)
    assert samples_of(texts, trust=True)[3].text == "TEXT 3 XXX"
    source = load_factory(texts, split_part="train", trust=True).build()
    assert len(list(pickle.loads(pickle.dumps(source)))) == 12


def test_loader_file_or_function_that_is_missing_is_named(texts) -> None:
    config = (
        "sample_type: {__module__: energon_lite, __class__: TextSample}\n"
        "sample_loader: loader.py:make\npart_filter: [txt]\n"
    )
    write_config(texts, config)
    with pytest.raises(
        FileNotFoundError, match=r"loader\.py: named by dataset\.yaml but not there"
    ):
        samples_of(texts, trust=True)
    (texts / ".nv-meta" / "loader.py").write_text("x = 1\n")
    with pytest.raises(DatasetFormatError, match="has no function 'make'"):
        samples_of(texts, trust=True)


@edataclass
class MySample(Sample):
    text: str


class MyDataset(DefaultDecoderWebdatasetFactory[MySample]):
    __sample_type__ = MySample


def test_classes_of_the_user_are_found_where_they_are_imported(texts) -> None:
    write_config(texts, f"__module__: {__name__}\n__class__: MyDataset\nfield_map: {{text: txt}}\n")
    assert type(samples_of(texts)[0]) is MySample
    write_config(
        texts,
        f"sample_type: {{__module__: {__name__}, __class__: MySample}}\nfield_map: {{text: txt}}\n",
    )
    assert type(samples_of(texts)[0]) is MySample


def test_modules_are_imported_only_for_trusted_datasets(texts, tmp_path, monkeypatch) -> None:
    (tmp_path / "somebodys_module.py").write_text("raise SystemExit('was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    write_config(
        texts,
        "sample_type: {__module__: somebodys_module, __class__: X}\nfield_map: {text: txt}\n",
    )
    with pytest.raises(DatasetFormatError, match="Import somebodys_module yourself first"):
        samples_of(texts)
    assert "somebodys_module" not in sys.modules
    with pytest.raises(SystemExit, match="was imported"):
        samples_of(texts, trust=True)


def test_folder_that_is_not_prepared_is_an_error_with_a_remedy(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="check the path"):
        samples_of(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="run `energon-lite prepare"):
        samples_of(tmp_path)
    with pytest.raises(DatasetFormatError, match="is a metadataset; give the path of one of"):
        samples_of(tmp_path / "metadataset.yaml")


def test_unknown_split_part_is_named(texts) -> None:
    with pytest.raises(DatasetFormatError, match="there is no split part 'vla'"):
        load_factory(texts, split_part="vla")


# ----------------------------------------------------------------------------- factories in Python


def test_factories_of_python_code(texts) -> None:
    made = StandardWebdatasetFactory(
        texts, sample_type=TextSample, field_map={"text": "txt"}, training=False
    )
    assert next(iter(made.build())).text == "text 0 "
    by_function = StandardWebdatasetFactory(
        texts,
        sample_type=TextSample,
        sample_loader=shout,
        part_filter=["txt"],
        training=False,
    )
    sample = next(iter(by_function.build()))
    assert (sample.text, sample.__key__) == ("TEXT 0 ", "00000!")
    crude = CrudeWebdataset(texts, training=False)
    assert next(iter(crude.build()))["txt"] == "text 0 "


def shout(parts: dict[str, Any]) -> dict[str, Any]:
    return {"text": parts["txt"].upper(), "__key__": parts["__key__"] + "!"}


def test_old_classes_work_and_warn(tmp_path) -> None:
    folder = caption_set(tmp_path / "captions", 4)
    with pytest.warns(FutureWarning, match="CaptioningWebdataset is deprecated"):
        made = CaptioningWebdataset(
            folder, field_map={"image": "jpg", "caption": "txt"}, training=False
        )
    assert isinstance(next(iter(made.build())), CaptioningSample)


def test_class_without_a_sample_type_is_an_error_that_names_it(texts) -> None:
    with pytest.raises(TypeError, match="must set __sample_type__"):
        DefaultDecoderWebdatasetFactory(texts, field_map={"text": "txt"})
