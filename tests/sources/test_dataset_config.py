"""Mistakes in dataset.yaml are told with file, key and way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    BaseWebdatasetFactory,
    CrudeWebdataset,
    DatasetFormatError,
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
    load_dataset,
    prepare_dataset,
)
from energon_lite.extras.inspect.info import dataset_info
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.lengths.length_index import measure_lengths
from energon_lite.storage import files

from ..helpers import text_set

TYPE = "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
MAP = TYPE + "field_map: {text: txt}\n"

MISTAKES = {
    TYPE + "field_map: [a, b]\n": "field_map: expected a map",
    TYPE + "field_map: {text: 5}\n": r"field_map\.text: expected text",
    TYPE + "field_map: {tekst: txt}\n": "no field 'tekst'. Did you mean 'text'",
    TYPE + "field_mpa: {text: txt}\n": ":2: unknown key 'field_mpa'. Did you mean 'field_map'",
    MAP + "part_filter: [txt]\n": "part_filter goes with",
    TYPE + "field_map: {}\n": "text",
    "__module__: energon_lite\n__class__: TextSampl\n": "no class 'TextSampl'",
    "__module__: torch\n__class__: Tensor\n": "is no subclass of BaseWebdatasetFactory",
    "sample_type: {__module__: torch, __class__: Tensor}\n": "no subclass of Sample",
    "__module__: 3\n__class__: 4\n": "must be text",
    "__class__: CrudeWebdataset\nfield_map: {a: b}\n": "has no sample_loader or field_map",
    MAP + "parallel_shard_iters: 0\n": "parallel_shard_iters=0",
    TYPE: "needs exactly one of field_map and sample_loader, and has neither",
    MAP + "subflavors: [1]\n": r"subflavors: must be a map of tags, not \[1\]",
    MAP + "max_samples_per_sequence: abc\n": "max_samples_per_sequence='abc' must be an integer",
    MAP + "shuffle_over_epochs: 0\n": "shuffle_over_epochs_multiplier=0 must be at least 1",
    MAP.replace("TextSample", "TextSampel"): "no class 'TextSampel'. Did you mean 'TextSample'",
    "sample_type: TextSample\nfield_map: {text: txt}\n": "sample_type: 'TextSample' should be",
    "field_map: {text: txt}\n": "key 'sample_type' is missing",
    "a: b: c\n": ":1: no valid YAML",
    "": "the file is empty",
    "- a\n": "must be a mapping",
    "__class__: CrudeWebdatasett\n": "Did you mean 'CrudeWebdataset'",
    TYPE + "sample_loader: code.py\npart_filter: [txt]\n": "code that lies in the dataset",
    "sample_type: {__module__: tabnanny, __class__: X}\n": "tabnanny.X would have .*LITE_TRUST=1",
    "sample_type: {__module__: not.there, __class__: X}\n": "not.there cannot be .* Install",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistake_in_dataset_yaml_names_the_file_and_the_way_out(tmp_path: Path, text: str) -> None:
    folder = text_set(tmp_path / "texts", 5)
    (folder / ".nv-meta" / "dataset.yaml").write_text(text)
    with pytest.raises(DatasetFormatError, match=MISTAKES[text]) as caught:
        get_train_dataset(folder, batch_size=2)
    assert "dataset.yaml" in str(caught.value)


def test_mistake_of_the_caller_is_not_laid_on_the_file(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 5)
    with pytest.raises(ValueError, match="max_samples_per_sequence=0") as caught:
        get_train_dataset(folder, batch_size=2, max_samples_per_sequence=0)
    assert "dataset.yaml" not in str(caught.value)


CODE = "def load(parts):\n    return {'text': parts['txt'].upper()}\n"
LOADED = TYPE + "sample_loader: sample_loader.py:load\npart_filter: [txt]\n"


def with_code(tmp_path: Path) -> Path:
    folder = text_set(tmp_path / "texts", 5)
    (folder / ".nv-meta/sample_loader.py").write_text(CODE)
    (folder / ".nv-meta/dataset.yaml").write_text(LOADED)
    return folder


@pytest.mark.parametrize("value", ["1", " YES "])
def test_one_variable_trusts_all_datasets_of_a_machine_and_is_logged_once(
    tmp_path: Path,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = with_code(tmp_path)
    files.warn_once.cache_clear()
    monkeypatch.setenv("ENERGON_LITE_TRUST", value)
    for _ in range(2):
        sample = next(iter(get_train_dataset(folder, batch_size=None)))
        assert sample.text.isupper()
    assert caplog.text.count("ENERGON_LITE_TRUST is set") == 1
    with pytest.raises(DatasetFormatError, match="code that lies in the dataset"):
        get_train_dataset(folder, batch_size=None, trust=False)


@pytest.mark.parametrize("value", [None, "", "No"])
def test_no_dataset_is_trusted_by_default_or_by_a_no(
    tmp_path: Path, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_code(tmp_path)
    if value is None:
        monkeypatch.delenv("ENERGON_LITE_TRUST", raising=False)
    else:
        monkeypatch.setenv("ENERGON_LITE_TRUST", value)
    with pytest.raises(DatasetFormatError, match="trust=True, or set ENERGON_LITE_TRUST=1"):
        get_train_dataset(folder, batch_size=None)
    assert get_train_dataset(folder, batch_size=None, trust=True)


def test_neither_yes_nor_no_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENERGON_LITE_TRUST", "maybe")
    with pytest.raises(ValueError, match="ENERGON_LITE_TRUST='maybe': set it to 1"):
        get_train_dataset(with_code(tmp_path), batch_size=None)


def test_missing_module_of_a_class_that_we_have_is_ours_as_in_energon(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 5)
    text = MAP.replace("megatron.energon", "gone_module.types")
    (folder / ".nv-meta/dataset.yaml").write_text(text)
    assert type(next(iter(get_train_dataset(folder, batch_size=None)))) is TextSample


def test_module_that_fails_to_import_is_named_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = text_set(tmp_path / "texts", 5)
    (tmp_path / "own_types.py").write_text("import gone_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    (folder / ".nv-meta/dataset.yaml").write_text(
        "sample_type: {__module__: own_types, __class__: X}\nfield_map: {text: txt}\n"
    )
    message = "dataset.yaml, sample_type: module own_types cannot be imported .*'gone_module'"
    with pytest.raises(DatasetFormatError, match=message):
        get_train_dataset(folder, batch_size=None, trust=True)


@pytest.mark.parametrize("scheme", ["rclone", "hdfs"])
def test_remote_path_has_the_same_answer_everywhere(scheme: str) -> None:
    remote = f"{scheme}://bucket/data"
    calls = [
        lambda: get_train_dataset(remote, batch_size=2),
        lambda: get_val_dataset(f"{remote}/blend.yaml", batch_size=2),
        lambda: get_val_datasets(remote, batch_size=2),
        lambda: load_dataset(f"{remote}/blend.yaml"),
        lambda: CrudeWebdataset(Path(remote)),
        lambda: BaseWebdatasetFactory.prepare_dataset(remote, ["a.tar"]),
        lambda: prepare_dataset(remote, split_ratio="1,0,0"),
        lambda: measure_lengths(remote, DefaultTaskEncoder()),
        lambda: dataset_info(remote),
        lambda: lint_dataset(remote),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"is remote \({scheme}://\), and of no storage"):
            call()


def test_file_scheme_is_a_local_path(tmp_path: Path) -> None:
    folder = text_set(tmp_path / "texts", 5)
    assert next(iter(get_train_dataset(f"file://{folder}", batch_size=None)))


@pytest.mark.parametrize("wrong", [5, ["a", "b"]])
def test_something_else_than_a_path_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"is a (int|list); give the path .*'blend': \["):
        get_train_dataset(wrong, batch_size=None)


def test_paths_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text_set(tmp_path / "texts", 5)
    (tmp_path / "blend.yaml").write_text(
        "__class__: MetadatasetV2\n__module__: megatron.energon\n"
        "splits: {val: {path: texts, split_part: train}}\n"
    )
    prepare_dataset("~/texts", tar_index_only=True, num_workers=0)
    assert next(iter(get_train_dataset("~/texts", batch_size=None)))
    assert next(iter(get_train_dataset(Path("~/texts"), batch_size=None)))
    assert len(list(get_val_dataset("~/blend.yaml", batch_size=None))) == 5
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset("~/texts", batch_size=None, worker_config=config)
    get_savable_loader(dataset).stats().write_to("~/stats.jsonl", 1)
    assert (tmp_path / "stats.jsonl").is_file()


@pytest.mark.parametrize("written", ["$DATA/texts", "texts/$DATA/x", "${DATA}/texts.yaml"])
@pytest.mark.parametrize("read", [get_train_dataset, get_val_dataset, prepare_dataset])
def test_variables_in_paths_are_named(read: Any, written: str, monkeypatch) -> None:
    monkeypatch.setenv("DATA", "/secret")
    settings = {} if read is prepare_dataset else {"batch_size": None}
    with pytest.raises(FileNotFoundError, match=r"os\.path\.expandvars\(path\)") as caught:
        read(written, **settings)
    assert "/secret" not in str(caught.value)


def test_a_folder_may_have_a_dollar_in_its_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text_set(tmp_path / "cost$a" / "texts", 5)
    assert next(iter(get_train_dataset("cost$a/texts", batch_size=None)))
    with pytest.raises(FileNotFoundError, match="does not exist; check the path"):
        get_train_dataset("cost$a/others", batch_size=None)
