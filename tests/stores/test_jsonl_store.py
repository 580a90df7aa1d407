"""The lines of a JSONL file by key, and media of other folders for them."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.samples import SourceInfo
from energon_lite.extras.stores.file_stores import JsonlFileStore
from energon_lite.sources.dataset_config import load_factory

from ..helpers import is_true_in_fork, metadataset

CONTENT = b'\n{"id": 0, "q": "What is 1+2?"}\n\n{"id": 1, "q": "two"}\n  {"id": 2, "q": "three"}\n'
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(CONTENT)
    return tmp_path / "a.jsonl"


def test_a_line_is_read_by_its_number_as_in_energon(path) -> None:
    store = JsonlFileStore(path)
    source = SourceInfo(str(path), 1, "a.jsonl", ("1.json",))
    assert store["1.json"] == (b'{"id": 1, "q": "two"}\n', source)
    assert (store.get_path(), len(store)) == (str(path), 3)
    assert store.get("1.json") == b'{"id": 1, "q": "two"}\n'
    for key in ("3.json", "01.json", "9" * 5000 + ".json"):
        with pytest.raises(KeyError, match="it has 3 samples"):
            store[key]
    for key in ("1", "x.json", "-1.json", "1.txt", ".json", "../1.json", "².json"):
        with pytest.raises(ValueError, match="can be no key; write the number of a line"):
            store[key]


def test_form_feeds_between_lines_are_blank(tmp_path) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_bytes(b'{"id": 0}\n\x0c\n\x0b{"id": 1}\n\x0b \n')
    store = JsonlFileStore(path)
    assert [json.loads(store[f"{i}.json"][0]) for i in range(len(store))] == [{"id": 0}, {"id": 1}]


def test_a_filter_hides_lines(path) -> None:
    store = JsonlFileStore(path, lambda key: key != "1")
    assert json.loads(store["2.json"][0])["id"] == 2
    with pytest.raises(KeyError):
        store["1.json"]


def test_threads_forked_and_other_processes_read_the_same(path) -> None:
    store = JsonlFileStore(path)
    expected = [store[f"{i}.json"][0] for i in range(3)]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda i: store[f"{i % 3}.json"][0], range(300))
        assert list(found) == expected * 100
    again = pickle.loads(pickle.dumps(store))
    assert [again[f"{i}.json"][0] for i in range(3)] == expected
    assert is_true_in_fork(lambda: [store[f"{i}.json"][0] for i in range(3)] == expected)


def test_a_file_that_was_replaced_is_refused_by_the_next_process(path) -> None:
    store = JsonlFileStore(path)
    path.write_bytes(CONTENT[:40])
    with pytest.raises(DatasetFormatError, match="has 40 bytes, and had 81 when it was opened"):
        store["0.json"]


@stateless
@cooker(need_primary=True)
def cook_with_files(sample: Any, primary: Any, media: Any) -> TextSample:
    text = primary.get(".json", sample)["q"] + media.get(f"{sample['json']['id']}.txt", sample)
    return TextSample(**basic_sample_keys(sample), text=text)


class WithFiles(DefaultTaskEncoder):
    cookers: ClassVar = [Cooker(cook_with_files)]


def test_cookers_of_lines_read_themselves_and_other_folders(path, tmp_path) -> None:
    (tmp_path / "media").mkdir()
    for i in range(3):
        (tmp_path / f"media/{i}.txt").write_text(f"-{i}")
    node = {"path": str(path), "aux": {"media": f"filesystem://{tmp_path}/media"}}
    dataset = get_train_dataset(
        metadataset(node), worker_config=ONE, batch_size=None, task_encoder=WithFiles(),
        repeat=False,
    )  # fmt: skip
    samples = sorted(get_savable_loader(dataset), key=lambda sample: sample.__key__)
    assert [sample.text for sample in samples] == ["What is 1+2?-0", "two-1", "three-2"]
    assert [source.file_names for source in samples[1].__sources__] == [
        ("1.json",), ("1.json",), ("1.txt",),
    ]  # fmt: skip


def test_a_file_is_no_auxiliary_dataset_but_has_a_store(path, tmp_path) -> None:
    assert load_factory(path).as_file_store()["0.json"][0].strip().startswith(b'{"id": 0')
    node = {"path": str(path), "aux": {"media": str(path)}}
    with pytest.raises(
        DatasetFormatError, match="is a file; 'aux' names a prepared dataset folder"
    ):
        get_train_dataset(metadataset(node), worker_config=ONE, batch_size=1)
