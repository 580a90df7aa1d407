from __future__ import annotations

import gc
import itertools
import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    BatchDataset,
    EpochizeDataset,
    GcDataset,
    IterMapDataset,
    LogSampleDataset,
    MapDataset,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream
from energon_lite.extras.energon.observers import default_get_keys

from ..helpers import in_file_order, number_of

NUM_TEXTS = 10


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append(1))
    return calls


def logging_config(path: Path | None, **settings: Any) -> WorkerConfig:
    place = {"rank": 0, "world_size": 1, "num_workers": 0, "worker_log_level": 1, **settings}
    return WorkerConfig(**place, worker_debug_path=path and str(path))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@stateless
def keys(samples: list[Any]) -> dict[str, Any]:
    return {"__key__": [sample.__key__ for sample in samples]}


@stateless
def twice(sample: Any) -> Iterator[Any]:
    yield sample
    yield sample


def test_garbage_is_collected_every_few_items(texts, collections) -> None:
    dataset = GcDataset(in_file_order(texts), every_n_iter=3)
    assert [number_of(sample) for sample in dataset] == list(range(10))
    assert len(collections) == 3
    list(GcDataset(in_file_order(texts), every_n_iter=0))
    assert len(collections) == 3
    with pytest.raises(ValueError, match="every_n_iter=-1 is negative"):
        GcDataset(in_file_order(texts), every_n_iter=-1)


def test_stages_that_change_nothing_leave_no_trace(texts) -> None:
    below = EpochizeDataset(in_file_order(texts), 3)
    for dataset in (GcDataset(below), LogSampleDataset(below, "train")):
        assert dataset.config() == below.config()
        assert (dataset.pass_length, len(dataset)) == (3, 3)
        assert dataset.restore_sample(("texts/train", 0, 2, 2)).__key__ == "00002"
        run, plain = StreamRun(dataset, Stream(0, 1)), StreamRun(below, Stream(0, 1))
        assert next(run) == next(plain)
        assert run.snapshot() == plain.snapshot()


def test_each_item_is_a_line(texts, tmp_path) -> None:
    path = tmp_path / "logs" / "log-{worker_id}.jsonl"
    config = logging_config(path, rank=1, world_size=2, num_workers=3)
    batches = BatchDataset(in_file_order(texts, name="a"), 4, keys)
    dataset = LogSampleDataset(batches, "train", worker_config=config)
    assert list(StreamRun(dataset, Stream(1, 2)))
    found = lines(tmp_path / "logs" / "log-4.jsonl")
    assert found[1] == {
        "t": "yield_batch", "r": 1, "w": 3, "m": "train", "idx": 3, "stream": 1,
        "keys": ["00009"],
    }  # fmt: skip
    assert len(found) == 2
    assert len(list(pickle.loads(pickle.dumps(dataset)))) == 3  # while the file is open


def test_lines_need_a_level_and_go_to_the_logger_without_a_path(texts, tmp_path, caplog) -> None:
    path = str(tmp_path / "x")
    silent = WorkerConfig(rank=0, world_size=1, num_workers=0, worker_debug_path=path)
    with caplog.at_level(logging.INFO):
        list(LogSampleDataset(in_file_order(texts), "train"))
        list(LogSampleDataset(in_file_order(texts), "train", worker_config=silent))
        assert caplog.records == []
        list(LogSampleDataset(in_file_order(texts), "val", worker_config=logging_config(None)))
    assert list(tmp_path.iterdir()) == []
    assert caplog.records[3].name == "energon_lite.core.topology"
    assert json.loads(caplog.records[3].message)["keys"] == ["00003"]


def test_what_is_recreated_on_a_resume_is_not_written_again(texts, tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    logged = LogSampleDataset(in_file_order(texts), "train", worker_config=logging_config(path))
    for dataset in (MapDataset(logged, twice), IterMapDataset(logged, iter)):
        path.unlink(missing_ok=True)
        run = StreamRun(dataset, Stream(0, 1))
        for _ in range(5):
            next(run)
        before = len(lines(path))
        assert before > 2
        resumed = StreamRun(dataset, Stream(0, 1))
        resumed.restore(run.snapshot())
        assert len(lines(path)) == before
        assert list(resumed)
        assert [line["keys"] for line in lines(path)] == [[f"{i:05d}"] for i in range(10)]


@pytest.mark.processes
def test_worker_processes_have_files_of_their_own(texts, tmp_path) -> None:
    config = logging_config(tmp_path / "{worker_id}-{pid}.jsonl", num_workers=2)
    batches = GcDataset(BatchDataset(in_file_order(texts), 2, keys, worker_config=config))
    dataset = LogSampleDataset(batches, "train", worker_config=config)
    assert len(list(get_savable_loader(dataset))) == 6
    files = sorted(tmp_path.iterdir())
    assert [file.name.split("-")[0] for file in files] == ["1", "2"]
    assert sorted(line["idx"] for file in files for line in lines(file)) == list(range(6))


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"__key__": "a"}, ["a"]),
        ({"__key__": ["a", ["b", 3]]}, ["a", "b", "3"]),
        ([{"__key__": "a"}, {"__key__": ["b"]}], ["a", "b"]),
        ({"x": 1}, None),
        (["text"], None),
    ],
)
def test_keys_are_found_in_samples_batches_and_lists(item, expected) -> None:
    assert default_get_keys(item) == expected


@pytest.mark.parametrize(("level", "modes"), [(0, set()), (1, {"train"}), (2, {"train", "val"})])
def test_levels_of_the_log_are_those_of_training_and_validation(texts, tmp_path, level, modes):
    path = tmp_path / "log.jsonl"
    config = logging_config(path, worker_log_level=level)
    settings = {"worker_config": config, "batch_size": 2, "split_part": "train"}
    training = get_train_dataset(texts, shuffle_buffer_size=None, **settings)
    batches = list(itertools.islice(get_savable_loader(training), 2))
    list(get_savable_loader(get_val_dataset(texts, limit=1, **settings)))
    found = lines(path) if path.exists() else []
    assert {line["m"] for line in found} == modes
    train = [line["keys"] for line in found if line["m"] == "train"]
    assert train == [batch.__key__ for batch in batches][: 2 * (level > 0)]
