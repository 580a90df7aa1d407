"""Documents made to crash, hang or fill the memory, in every place where one is read."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import WorkerConfig, get_train_dataset
from energon_lite.core.errors import (
    DatasetFormatError,
    FatalSampleError,
    FieldAccessError,
    describe,
)
from energon_lite.core.json_text import MAX_DEPTH
from energon_lite.extras.energon.energon_api import load_dataset
from energon_lite.formats.length_files import read_lengths
from energon_lite.formats.nvmeta import SplitFile, read_dataset_config, read_info
from energon_lite.metadataset import read
from energon_lite.metadataset.read import read_metadataset
from energon_lite.storage.braces import MAX_NAMES, expand
from energon_lite.storage.yaml import dump_yaml, parse_yaml

from ..conftest import examples
from ..helpers import metadataset
from .hostile_sets import BRACES, HOSTILE_JSON, HOSTILE_YAML, chain, put_text

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


def test_a_hostile_document_is_refused_with_its_file_and_line() -> None:
    places = (
        ("x.yaml", HOSTILE_YAML, r"^x\.yaml:[0-9]+: "),
        ("x.json", HOSTILE_JSON, r"^x\.json: "),
    )
    for name, documents, words in places:
        for text in documents.values():
            with pytest.raises(DatasetFormatError, match=words):
                parse_yaml(text, name)


def test_the_deepest_document_is_read_and_one_level_more_is_not() -> None:
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    for name in ("x.yaml", "x.json"):
        parse_yaml(deepest, name)
        with pytest.raises(DatasetFormatError, match="more than 100 levels of nesting"):
            parse_yaml(f"[{deepest}]", name)
    # Brackets inside of strings are none.
    assert parse_yaml(json.dumps({"a": '[\\"[{' * 300}), "x.json")["a"] == '[\\"[{' * 300


def test_ten_thousand_honest_aliases_are_read() -> None:
    base = "base: &base {" + ", ".join(f"tag{i}: value {i}" for i in range(100)) + "}"
    uses = "\n".join(f"- <<: *base\n  path: set-{i}" for i in range(10_000))
    value = parse_yaml(f"{base}\nall:\n{uses}", "x.yaml")
    assert len(value["all"]) == 10_000
    assert value["all"][9_999]["tag59"] == "value 59"


# ---------------------------------------------------------------------------------------- braces


@pytest.mark.parametrize("pattern", BRACES, ids=range(len(BRACES)))
def test_a_pattern_of_too_many_names_is_refused_before_it_is_expanded(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"expands to|digits|brace"):
        expand(pattern)


def test_a_pattern_of_a_million_names_is_expanded() -> None:
    names = expand("s-{000000..999999}.tar")
    assert len(names) == 1_000_000 <= MAX_NAMES
    assert names[-1] == "s-999999.tar"


# ---------------------------------------------------------------------------------------- places

PLACES: dict[str, Callable[[Path], Any]] = {
    ".nv-meta/.info.json": read_info,
    ".nv-meta/.info.yaml": read_info,
    ".nv-meta/split.yaml": lambda root: SplitFile(root, read_info(root)).part("train"),
    ".nv-meta/split.json": lambda root: SplitFile(root, read_info(root)).part("train"),
    ".nv-meta/dataset.yaml": read_dataset_config,
    ".nv-meta/energon_lite/lengths/x/train.json": lambda root: read_lengths(
        root, "train", "x", 75, "data"
    ),
    "meta.yaml": lambda root: load_dataset(root / "meta.yaml"),
}


@pytest.fixture
def texts(small_data: Path, tmp_path: Path) -> Path:
    """A copy of a small prepared dataset."""
    return shutil.copytree(small_data / "text", tmp_path / "text")


def put(root: Path, place: str, text: str | bytes) -> Path:
    if place.endswith("lengths/x/train.json"):
        put_text((root / place).with_suffix(".npy"), "")
    return put_text(root / place, text)


@pytest.mark.parametrize("place", PLACES)
def test_hostile_documents_are_refused_with_their_file_wherever_they_lie(
    place: str, texts: Path
) -> None:
    documents = HOSTILE_JSON if place.endswith(".json") else HOSTILE_YAML
    for name, text in documents.items():
        if name == "key twice":  # as in Energon, the last one counts
            continue
        path = put(texts, place, text)
        with pytest.raises(DatasetFormatError) as caught:
            PLACES[place](texts)
        assert path.with_suffix("").name in str(caught.value), name


@pytest.mark.parametrize(
    "split",
    [
        "split_parts: {train: ['shard-{000000000..999999999}.tar']}",
        "split_parts: {train: [" + ", ".join(["'{0..1200000}'"] * 50) + "]}",
        "split_parts: {train: [a.tar]}\nexclude: ['" + "{a,b}" * 40 + "']",
    ],
)
def test_a_split_file_of_too_many_names_is_refused_with_its_entry(split: str, texts: Path) -> None:
    path = put(texts, ".nv-meta/split.yaml", split)
    with pytest.raises(DatasetFormatError, match=r"expands to .* names") as caught:
        SplitFile(texts, read_info(texts)).part("train")
    assert str(path) in str(caught.value)
    assert "[" in str(caught.value)


def test_a_split_file_of_too_many_parts_is_refused(texts: Path) -> None:
    parts = ", ".join(f"p{i}: []" for i in range(1_001))
    put(texts, ".nv-meta/split.yaml", f"split_parts: {{{parts}}}")
    with pytest.raises(DatasetFormatError, match="1,001 split parts, where 1,000 are the most"):
        SplitFile(texts, read_info(texts))


def test_many_thousand_excluded_samples_are_read_in_no_time(texts: Path) -> None:
    entries = "\n".join(f"- shard-0000.tar/{i:06d}" for i in range(30_000))
    shards = ", ".join(read_info(texts).shard_counts)
    put(texts, ".nv-meta/split.yaml", f"split_parts: {{train: [{shards}]}}\nexclude:\n{entries}")
    part = SplitFile(texts, read_info(texts)).part("train")
    assert len(part.excluded["shard-0000.tar"]) == 30_000


def test_files_that_name_one_another_ten_times_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read._LARGEST_TREE >= 100_000
    monkeypatch.setattr(read, "_LARGEST_TREE", 5_000)
    first = chain(tmp_path, 12, lambda to: {"concat": [{"path": to}] * 10})
    with pytest.raises(DatasetFormatError, match=r"yaml:.*more than 5,000"):
        read_metadataset(first, "train")


def test_tags_that_many_datasets_inherit_are_counted(tmp_path: Path) -> None:
    tags = ", ".join(f"tag{i}: [1]" for i in range(2_000))
    paths = ", ".join(f"{{path: a{i}}}" for i in range(2_000))
    (tmp_path / "m.yaml").write_text(
        f"__class__: MetadatasetV2\nsplits: {{train: {{subflavors: {{{tags}}}, blend: [{paths}]}}}}"
    )
    with pytest.raises(DatasetFormatError, match="subflavors"):
        read_metadataset(tmp_path / "m.yaml", "train")


# ------------------------------------------------------------------------------------ properties

WEIRD = st.sampled_from(
    [None, True, -1, 0, 1, 1.5, 1e308, 5e-324, 10**30, -(10**30), 10**4000, "", "x", "1_0", "\0",
     "a\0b", "~", "..", "/", "{a,b}", "{0..9}", "inf", "100%", "1e400", [], {}, [None], {"a": 1},
     {"": {}}, [[]], "x" * 10_000, "file://", "msc://a/b", "${HOME}", "é", "\U0001f600",
     float("inf")]
)  # fmt: skip


def edited(value: Any, draw: Callable[[Any], Any]) -> Any:
    """A copy of a document of which one place is another value."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: edited(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], edited(value[index], draw), *value[index + 1 :]]
    return draw(WEIRD)


BLEND = {
    "blend": [
        {"path": ".", "weight": {"schedule": "linear", "points": {"0": 1.0, "10": 2}},
         "subset": {"range": ["0%", "50%"]}, "shuffle_over_epochs_multiplier": 2},
        {"path": ".", "weight": 2, "subflavors": {"a": 1}, "loss_weight": 0.5, "name": "n",
         "split_part": "train", "split_config": "split.yaml", "subset": {"range": [0, 5]}},
        {"concat": [{"path": ".", "dataset_config": "dataset.yaml"}]},
    ],
    "blend_mode": "exact", "unit": "samples", "until": "all_once",
}  # fmt: skip
EPOCHIZED = {
    "blend_epochized": [
        {"path": ".", "repetitions": 2, "subset": {"range": ["10%", "50%"]}},
        {"path": ".", "repetitions": 0.25, "shuffle_over_epochs_multiplier": 3},
    ]
}
DOCUMENTS: dict[str, Any] = {
    ".nv-meta/.info.json": {"energon_version": "7", "shard_counts": {"shard-0000.tar": 25}},
    ".nv-meta/split.yaml": {"split_parts": {"train": ["shard-0000.tar"]}, "exclude": ["a/b"]},
    ".nv-meta/dataset.yaml": {
        "sample_type": {"__module__": "megatron.energon", "__class__": "TextSample"},
        "field_map": {"text": "txt"}, "subflavors": {"a": {"b": 1}}, "shuffle_over_epochs": 2,
        "parallel_shard_iters": 4, "max_samples_per_sequence": 10, "split_config": "split.yaml",
        "split_part": "train",
    },
    "meta.yaml": {**metadataset(BLEND), "expand_paths": True},
    "meta-epochized.yaml": metadataset(EPOCHIZED),
}  # fmt: skip


@examples(60)
@given(st.sampled_from(list(DOCUMENTS)), st.data())
def test_a_document_with_one_odd_value_yields_samples_or_our_error(
    small_data: Path, tmp_path_factory: pytest.TempPathFactory, place: str, data: st.DataObject
) -> None:
    root = shutil.copytree(small_data / "text", tmp_path_factory.mktemp("odd") / "text")
    value = edited(DOCUMENTS[place], data.draw)
    put(root, place, json.dumps(value) if place.endswith(".json") else dump_yaml(value))
    path = root / place if place.startswith("meta") else root
    try:
        dataset = get_train_dataset(
            path, worker_config=CONFIG, batch_size=2, shuffle_buffer_size=None, repeat=False
        )
        json.dumps(dataset.config())
        list(itertools.islice(dataset, 3))
    except (FieldAccessError, FatalSampleError) as error:
        assert "shard-0000.tar" in describe(error)  # noqa: PT017
    except (ValueError, OSError) as error:
        named = str(error) + "".join(getattr(error, "__notes__", ()))
        assert str(root) in named, repr(error)  # noqa: PT017
