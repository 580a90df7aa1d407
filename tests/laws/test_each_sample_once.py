"""Each sample once, of every kind of source: index types wrap at powers of two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    ShuffleBufferDataset,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_train_dataset,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream

from ..conftest import write_tar
from ..helpers import prepared, text_of, text_set

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)
NEAR_POWERS = [2**power + off for power in (1, 4, 7, 8, 9) for off in (-1, 0, 1)]
LARGE = [2**power + off for power in (10, 15, 16) for off in (-1, 0, 1)]


@stateless
def cook(sample: Any) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"])


class Texts(DefaultTaskEncoder):
    cookers = [Cooker(cook)]  # noqa: RUF012


def sets_of(root: Path, num: int) -> Path:
    """Writes sets of `num` samples: tars of one shard, of 3 and of 20, crude ones, and JSONL."""
    for num_shards in (1, 3, 20):
        text_set(root / f"tars{num_shards}", num, num_shards)
    rows = [json.dumps({"text": text_of(i)}) for i in range(num)]
    write_tar(root / "crude/0.tar", [(f"{i:05d}.json", row.encode()) for i, row in enumerate(rows)])
    prepared(root / "crude", "CrudeWebdataset")
    (root / "lines.jsonl").write_text("\n".join(rows))
    return root


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sets_of(tmp_path_factory.mktemp("sets"), 520)


def part(name: str, first: int, stop: int) -> dict[str, Any]:
    return {"path": name, "subset": {"range": [first, stop]}}


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "one tar": lambda n: part("tars1", 0, n),
    "the middle of several tars": lambda n: part("tars3", 3, n + 3),
    "tars with stored offsets": lambda n: part("tars20", 0, n),
    "crude": lambda n: part("crude", 0, n),
    "lines": lambda n: part("lines.jsonl", 0, n),
    "join": lambda n: {
        "join": [{"path": "tars1"}, {"path": "tars3"}],
        "joiner": {"__module__": __name__, "__function__": "first_of"},
        "subset": {"range": [0, n]},
    },
    "concat": lambda n: {"concat": [part("tars1", 0, n // 2), part("tars3", n // 2, n)]},
    "blend": lambda n: {
        "blend_epochized": [
            {**part("tars1", 0, n // 2), "repetitions": 1},
            {**part("tars20", n // 2, n), "repetitions": 1},
        ]
    },
}


def first_of(first: TextSample, second: TextSample) -> TextSample:
    assert first.__key__ == second.__key__
    return first


def check_once(root: Path, entry: dict[str, Any], num: int, num_streams: int) -> None:
    file = root / f"mix{num}-{num_streams}.yaml"
    file.write_text(json.dumps({"__class__": "MetadatasetV2", "splits": {"train": entry}}))
    dataset: Any = get_train_dataset(
        file, batch_size=None, repeat=False, worker_config=CONFIG, task_encoder=Texts(), trust=True
    )
    for whole in (dataset, ShuffleBufferDataset(dataset, 40)):
        runs = [StreamRun(whole, Stream(index, num_streams)) for index in range(num_streams)]
        found = sorted(sample.text for run in runs for sample in run)
        assert len(found) == len(set(found)) == num


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_streams", [1, 8])
def test_each_sample_comes_once_near_powers_of_two(sets: Path, kind: str, num_streams: int) -> None:
    for num in NEAR_POWERS:
        if kind not in ("concat", "blend") or num > 1:
            check_once(sets, KINDS[kind](num), num, num_streams)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_streams", [1, 8])
def test_each_sample_comes_once_of_any_number(sets: Path, kind: str, num_streams: int) -> None:
    for num in range(2, 301):
        check_once(sets, KINDS[kind](num), num, num_streams)


@pytest.mark.soak
def test_each_sample_comes_once_of_many(tmp_path: Path) -> None:
    root = sets_of(tmp_path, max(LARGE) + 3)
    for num in LARGE:
        for kind in KINDS:
            for num_streams in (1, 8):
                check_once(root, KINDS[kind](num), num, num_streams)
