"""The JSONL file of a run: plain JSON, whatever happened to the run that wrote it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from energon_lite import DatasetFormatError, LoaderCallback, WorkerConfig, get_savable_loader
from energon_lite.extras.report.stats_file import read_stats
from energon_lite.loader.count_table import COUNTED

from ..helpers import text_set, through_json, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("texts"), 30)


def loader_of(folder: Path, rank: int = 0, world_size: int = 1, **settings: Any) -> Any:
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0, num_streams=2)
    return get_savable_loader(train(folder, "skipping")(config), max_skip_rate=1, **settings)


def run(loader: Any, file: Any, steps: range) -> None:
    for step, _ in zip(steps, loader, strict=False):
        loader.stats().write_to(file, step)


def counts(file: Path) -> list[tuple[int, dict[str, float]]]:
    """Steps and counts of a file, without times."""
    return [
        (record.step, {key: n for key, n in row.items() if "sec" not in key})
        for record in read_stats([file])[0]
        for row in record.sources.values()
    ]


def test_line_is_plain_json_of_all_counts(folder: Path, tmp_path: Path) -> None:
    loader, file = loader_of(folder), tmp_path / "new" / "stats.jsonl"
    run(loader, file, range(1, 4))
    lines = file.read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 3]
    ((name, row),) = rows[-1]["sources"].items()
    found = loader.stats()[name]
    assert {key: row[key] for key in COUNTED} == pytest.approx(
        {key: getattr(found, key) for key in COUNTED}, abs=1e-5
    )
    assert (row["size"], rows[-1]["world_size"], rows[-1]["num_workers"]) == (30, 1, 0)


def test_run_that_was_killed_in_mid_line_loses_only_this_line(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "stats.jsonl"
    run(loader_of(folder), file, range(1, 5))
    whole = counts(file)
    ends = [i + 1 for i, byte in enumerate(file.read_bytes()) if byte == ord("\n")]
    raw = file.read_bytes()
    for cut in (ends[2] + 1, ends[2] + 40, ends[3] - 1):
        file.write_bytes(raw[:cut])
        loader = loader_of(folder)
        list(islice(loader, 4))
        loader.stats().write_to(file, 5)
        records, _, warnings = read_stats([file])
        # The end of a line that is whole but for its line feed is kept.
        kept = [1, 2, 3, 4] if cut == ends[3] - 1 else [1, 2, 3]
        assert [record.step for record in records] == [*kept, 5]
        assert len(warnings) == (cut != ends[3] - 1)
        assert counts(file)[: len(kept)] == whole[: len(kept)]


@pytest.mark.parametrize("saved_at", [0, 2, 5])
def test_file_of_a_resumed_run_reads_as_that_of_a_run_without_a_break(saved_at, folder, tmp_path):
    whole, file = tmp_path / "whole.jsonl", tmp_path / "stats.jsonl"
    run(loader_of(folder), whole, range(1, 10))
    loader = loader_of(folder)
    run(loader, file, range(1, saved_at + 1))
    state = through_json(loader.save_state_rank())
    run(loader, file, range(saved_at + 1, 8))  # and is killed after step 7
    resumed = loader_of(folder)
    resumed.restore_state_rank(state)
    run(resumed, file, range(saved_at + 1, 10))
    assert len(file.read_text().splitlines()) > 9
    assert counts(file) == counts(whole)


@pytest.mark.parametrize("in_one_file", [True, False])
def test_ranks_are_summed_and_steps_of_some_ranks_left_out(in_one_file, folder, tmp_path):
    files = [tmp_path / f"stats-{0 if in_one_file else rank}.jsonl" for rank in range(2)]
    loaders = [loader_of(folder, rank, 2) for rank in range(2)]
    for rank, loader in enumerate(loaders):
        run(loader, files[rank], range(1, 6 - rank))
    records, _, warnings = read_stats(sorted(set(files)))
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert warnings[0].startswith("4 of 5 steps have the counts of 100% of the ranks, the others")
    each = [rank["samples"] for rank in records[-1].ranks]
    assert each == [12, 12]
    (row,) = records[-1].sources.values()
    assert (row["samples"], row["size"]) == (24, 30)
    # The target is of the run, and no sum of the ranks.
    assert row["target"] == pytest.approx(row["draws"], rel=0.2)


def test_run_that_resumes_on_fewer_ranks_is_read_as_one(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "stats.jsonl"
    loaders = [loader_of(folder, rank, 2) for rank in range(2)]
    for loader in loaders:
        run(loader, file, range(1, 4))
    states = [loader.save_state_rank() for loader in loaders]
    for loader in loaders:
        run(loader, file, range(4, 7))  # lost
    resumed = loader_of(folder)
    resumed.restore_state_global(through_json(states))
    run(resumed, file, range(4, 6))
    records = read_stats([file])[0]
    assert [(record.step, len(record.ranks)) for record in records][:5] == [
        (1, 2), (2, 2), (3, 2), (4, 1), (5, 1),
    ]  # fmt: skip


GARBAGE = [
    b"", b"\n", b"\xff\xfe\x00", b"<script>", b"[]", b"1", b"null", b'{"step": "x"}',
    b'{"step": 1, "time": null, "began": 0, "sources": {}}',
    b'{"step": 1, "time": 0, "began": 0, "sources": []}',
    b'{"step": 1, "time": 0, "began": 0, "sources": {"a": {"samples": "many"}}}',
    b'{"step": 1, "time": 0, "began": 0, "sources": {"a": 3}}',
    b'{"sample_key": "a"}', b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("line", GARBAGE, ids=range(len(GARBAGE)))
def test_lines_that_are_no_counts_are_left_out(line: bytes, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "stats.jsonl"
    file.write_bytes(line)
    with pytest.raises(DatasetFormatError, match=r"stats\.jsonl.*write_to"):
        read_stats([file])
    loader = loader_of(folder)
    next(iter(loader))
    loader.stats().write_to(file, 1)
    records, _, warnings = read_stats([file])
    assert [record.step for record in records] == [1]
    assert len(warnings) == bool(line.strip())


def test_skip_log_has_names_and_each_sample_once(folder: Path, tmp_path: Path) -> None:
    file, log = tmp_path / "stats.jsonl", tmp_path / "skips.jsonl"
    loader = loader_of(folder, skip_log=log)
    run(loader, file, range(1, 8))
    log.write_text(log.read_text() * 2)  # a run that resumes skips them again
    _, skips, _ = read_stats([file, log])
    assert len(skips) == sum(loader.num_skipped.values()) > 0
    assert {skip.stage for skip in skips} == {"encode_sample"}
    assert all(skip.sample_key for skip in skips)


def test_callback_writes_the_file_in_both_trainers(folder: Path, tmp_path: Path) -> None:
    """Once a step of the optimizer in Lightning, where several batches may make one."""
    file, loader = tmp_path / "stats.jsonl", loader_of(folder)
    callback, logged = LoaderCallback(file), []
    next(iter(loader))
    state = SimpleNamespace(global_step=3, log_history=[{}])
    logs = {"loss": 1.0}
    callback.on_log(None, state, None, logs=logs, train_dataloader=loader)
    assert state.log_history[-1].keys() == logs.keys() - {"loss"} != set()
    logger = SimpleNamespace(log_metrics=lambda figures, step: logged.append((step, figures)))
    trainer = SimpleNamespace(
        train_dataloader=loader, loggers=[logger], log_every_n_steps=2, global_step=0
    )
    callback.on_train_start(trainer)
    for trainer.global_step in (0, 0, 4, 4, 5, 6):
        callback.on_train_batch_end(trainer)
    assert [step for step, _ in logged] == [4, 6]
    assert [record.step for record in read_stats([file])[0]] == [3, 4, 6]
    for event in ("on_evaluate", "on_sanity_check_end", "setup"):
        assert getattr(callback, event)(1, key=2) is None
    assert not hasattr(callback, "other")
