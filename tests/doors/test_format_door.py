"""A format that the library does not know trains, resumes and is checked like its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.cli.commands import app
from energon_lite.extras.lengths.length_index import LengthFunction, measure_lengths
from energon_lite.sources.dataset_config import load_factory
from energon_lite.testing import check_dataset

from ..architecture.code_size import code_lines
from ..architecture.source_tree import REPO
from ..helpers import Ranks, metadataset, text_of, text_set
from .toy_format import RECORD_BYTES

NUM_SAMPLES = 23
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=5)


def records(path: Path, broken: tuple[int, ...] = ()) -> Path:
    texts = [b"\xff" if i in broken else text_of(i).encode() for i in range(NUM_SAMPLES)]
    path.write_bytes(b"".join(text.ljust(RECORD_BYTES, b"\0") for text in texts))
    return path


@stateless
def cook(sample: Any) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


class Cooking(DefaultTaskEncoder):
    cookers: ClassVar = [Cooker(cook)]


def making(path: Any, **options: Any) -> Any:
    def make(config: WorkerConfig) -> Any:
        settings = {"batch_size": 2, "task_encoder": Cooking(), **options}
        return get_train_dataset(path, worker_config=config, **settings)

    return make


def blended(folder: Path) -> Path:
    """Writes a metadataset of a folder of tars and, beside it, a file of records."""
    text_set(folder / "tars", 10)
    records(folder / "a.rec")
    blend = [{"path": "tars", "weight": 1}, {"path": "./a.rec", "weight": 3}]
    (folder / "meta.yaml").write_text(json.dumps(metadataset({"blend": blend})))
    return folder / "meta.yaml"


def test_the_format_is_one_file_of_at_most_60_lines() -> None:
    assert code_lines((REPO / "tests/doors/toy_format.py").read_text()) <= 60


def test_its_samples_obey_the_laws(tmp_path) -> None:
    path = records(tmp_path / "a.rec", broken=(4, 17))
    for options in ({"training": False}, {"subset": (3, 20)}):
        factory = load_factory(path, **{"worker_config": ONE, **options})
        check_dataset(factory.build(shuffle_buffer_size=5))


def test_it_trains_beside_tars_in_a_metadataset(tmp_path) -> None:
    loader = get_savable_loader(making(blended(tmp_path))(ONE))
    texts = [text for _, batch in zip(range(40), loader, strict=False) for text in batch.text]
    assert set(texts) == {text_of(i) for i in range(NUM_SAMPLES)}
    of_tars, of_records = sorted(row.samples for row in loader.stats().values())
    assert of_tars + of_records == 80
    assert abs(of_tars - 20) <= 5  # by the weights


@pytest.mark.parametrize(
    ("ranks", "workers"),
    [((2, 3), (0, 0)), pytest.param((1, 1), (2, 1), marks=pytest.mark.processes)],
)
def test_a_run_resumes_on_other_ranks_and_workers(tmp_path, ranks, workers) -> None:
    make = making(blended(tmp_path))
    whole = Ranks(make, 1, num_streams=6).steps(24)
    first = Ranks(make, ranks[0], workers[0], num_streams=6, start_method="fork")
    found = first.steps(12 // ranks[0])
    found |= Ranks(make, ranks[1], workers[1], states=first.save()).steps(12 // ranks[1])
    assert {k: v.text for k, v in found.items()} == {k: v.text for k, v in whole.items()}


def test_a_broken_record_is_skipped_and_named(tmp_path) -> None:
    path = records(tmp_path / "a.rec", broken=(4,))
    dataset = get_val_dataset(path, worker_config=ONE, batch_size=None, task_encoder=Cooking())
    loader = get_savable_loader(dataset, skip_log=tmp_path / "log", max_skip_rate=0.5)
    assert [sample.text for sample in loader] == [text_of(i) for i in range(NUM_SAMPLES) if i != 4]
    assert loader.num_skipped == {"a.rec/val": 1}
    (listed,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert listed["sample_key"] == "4"
    assert f"{path}, record 4" in listed["error"]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_commands_describe_and_check_it_or_say_what_to_do(tmp_path) -> None:
    path = records(tmp_path / "a.rec")
    found = run("info", path)
    assert f"a.rec: {path} (23 samples, 736 B)\n  record, crude samples, in every split" in (
        found.stdout
    )
    assert json.loads(run("info", path, "--json").stdout)["samples"] == NUM_SAMPLES
    assert run("info", blended(tmp_path)).stdout.count("23 samples in 1 shard") == 1
    assert "1 shard, 23 samples decoded (0 failed), 0 errors" in run("lint", path).stdout
    records(path, broken=(4, 5))
    failed = run("lint", path)
    assert failed.exit_code == 1
    assert "error: samples: DecodingError" in failed.stdout
    assert f"{path}, record 4" in failed.stdout
    refused = run("prepare", path)
    assert refused.exit_code == 2
    assert "is a record file, which has no index; use it as it is" in refused.output
    refused = run("mount", path, tmp_path)
    assert refused.exit_code == 1
    assert "Traceback" not in refused.output


def number_of_letters(sample: Any) -> int:
    return len(sample["txt"])


def test_its_lengths_lie_beside_the_file(tmp_path) -> None:
    path = records(tmp_path / "a.rec")
    (report,) = measure_lengths(path, LengthFunction(number_of_letters), num_workers=0)
    assert report.file == tmp_path / "a.rec.lengths/default/all.npy"
    assert report.totals == {"tokens": sum(len(text_of(i)) for i in range(NUM_SAMPLES))}


def test_what_is_for_folders_is_refused(tmp_path) -> None:
    path = records(tmp_path / "a.rec")
    text = "split_config='x.yaml' is for dataset folders, and .*a.rec is a record file"
    with pytest.raises(DatasetFormatError, match=text):
        making(path, split_config="x.yaml")(ONE)
    join = {"join": [{"path": str(path)}, {"path": str(path)}], "joiner": {"__module__": "a",
            "__class__": "B"}}  # fmt: skip
    with pytest.raises(DatasetFormatError, match=re.escape("a join is of prepared dataset")):
        making(metadataset(join))(ONE)
    with pytest.raises(NotImplementedError, match="prepare a folder of tar shards"):
        load_factory(path).as_file_store()
