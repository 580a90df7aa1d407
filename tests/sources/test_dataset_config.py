"""Mistakes in dataset.yaml are told with file, key and way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from energon_lite import DatasetFormatError, get_train_dataset

from ..helpers import text_set

TYPE = "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
MAP = TYPE + "field_map: {text: txt}\n"

MISTAKES = {
    TYPE + "field_map: [a, b]\n": "field_map: expected a map",
    TYPE + "field_map: {text: 5}\n": r"field_map\.text: expected text",
    TYPE + "field_map: {tekst: txt}\n": "no field 'tekst'. Did you mean 'text'",
    TYPE + "field_mpa: {text: txt}\n": ":2: unknown key 'field_mpa'. Did you mean 'field_map'",
    TYPE: "needs exactly one of field_map and sample_loader, and has neither",
    MAP + "subflavors: [1]\n": r"subflavors: must be a map of tags, not \[1\]",
    MAP + "max_samples_per_sequence: abc\n": "max_samples_per_sequence='abc' must be an integer",
    MAP + "shuffle_over_epochs: 0\n": "shuffle_over_epochs_multiplier=0 must be at least 1",
    MAP.replace("TextSample", "TextSampel"): "no class 'TextSampel'. Did you mean 'TextSample'",
    "sample_type: TextSample\nfield_map: {text: txt}\n": "sample_type: 'TextSample' should be",
    "field_map: {text: txt}\n": "key 'sample_type' is missing",
    "a: b: c\n": ":1: no valid YAML",
    "": "the file is empty",
    "- a\n": "the file must be a mapping",
    "__class__: CrudeWebdatasett\n": "Did you mean 'CrudeWebdataset'",
    TYPE + "sample_loader: code.py\npart_filter: [txt]\n": "code that lies in the dataset",
    "sample_type: {__module__: not.imported, __class__: X}\n": "would have to be imported",
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
