"""What a report says of a file of figures."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from energon_lite import (
    DatasetFormatError,
    DefaultTaskEncoder,
    Packing,
    Sample,
    TextSample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    loss_by_source,
    run_report,
    stateless,
)
from energon_lite.extras.report.advice import alerts, headline, without_steps
from energon_lite.extras.report.report_tables import report_tables, report_text

from ..helpers import metadataset, number_of, text_set, text_sets

SCHEDULE = {"schedule": "linear", "points": {0: 3, 100: 1}}


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    text_set(root / "a", 40)
    text_set(root / "b", 20)
    parts = [{"path": "a", "weight": SCHEDULE}, {"path": "b", "weight": 1}]
    (root / "blend.yaml").write_text(yaml.safe_dump(metadataset({"blend": parts})))
    return root / "blend.yaml"


def loader_of(blend: Path, rank: int = 0, world_size: int = 1) -> Any:
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0, num_streams=2)
    return get_savable_loader(get_train_dataset(blend, batch_size=2, worker_config=config))


def test_shares_are_those_of_each_interval(blend: Path, tmp_path: Path) -> None:
    loader, file = loader_of(blend), tmp_path / "stats.jsonl"
    for step, _ in enumerate(islice(loader, 60), start=1):
        if step % 20 == 0:
            loader.stats().write_to(file, step)
    report = run_report(str(file))
    assert [(part.start, part.stop) for part in report.intervals] == [(1, 20), (21, 40), (41, 60)]
    asked = [part.asked[0] for part in report.intervals]
    assert asked == pytest.approx([0.72, 0.62, 0.51], abs=0.03)  # of 3, 2 and 1 to 1, smoothed
    for part in report.intervals:
        assert sum(part.asked) == pytest.approx(1, abs=1e-4)
        assert part.given == pytest.approx(part.asked, abs=0.06)
    found = loader.stats()
    assert [*report.sources] == [*found]
    for name, row in report.sources.items():
        assert (row["samples"], row["epochs"]) == (found[name].samples, found[name].epochs)
        assert row["given"] == pytest.approx(found[name].actual_share, abs=1e-5)
        assert row["asked"] == pytest.approx(found[name].target_share, abs=1e-5)
    # Nothing is known of the time before the first line.
    assert [part.sec is None for part in report.intervals] == [True, False, False]
    assert report.counts["samples"] == 80
    assert report.sec == pytest.approx(sum(part.sec or 0 for part in report.intervals))


def test_what_a_file_cannot_know_is_said(blend: Path, tmp_path: Path) -> None:
    loader, file = loader_of(blend), tmp_path / "stats.jsonl"
    for step, _ in enumerate(islice(loader, 3), start=1):
        loader.stats().write_to(file, step)
    report = run_report(file)
    assert [*report.times] == ["read and decode", "hooks"]
    text = "\n".join(report_text(report))
    assert text.startswith(report.headline)
    assert "padding" in text
    assert "not measured" in text
    assert "energon-lite bench measures reading, decoding, each hook" in text
    assert json.loads(json.dumps(report.to_json()))["headline"] == report.headline


def test_time_is_that_of_one_rank_whose_process_goes_on(tmp_path: Path) -> None:
    """Ranks begin at different times, and any of them may write a step last."""
    lines = []
    for step in range(1, 5):
        for rank in range(2):
            late = 0.5 if step % 2 == rank else 0.0
            row = {"step": step, "time": 10.0 * step + late, "began": rank, "rank": rank}
            lines.append({**row, "world_size": 2, "sources": {"a": {"samples": step, "draws": 1}}})
    lines[-2]["began"] = 7  # rank 0 began again before the last step
    file = tmp_path / "stats.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seconds = [part.sec for part in run_report(file).intervals]
    assert seconds == [None, pytest.approx(10, abs=1), pytest.approx(10, abs=1), None]


def test_long_file_has_few_intervals_that_cover_the_run(blend: Path, tmp_path: Path) -> None:
    loader, file = loader_of(blend), tmp_path / "stats.jsonl"
    for step, _ in enumerate(islice(loader, 130), start=1):
        loader.stats().write_to(file, step)
    parts = run_report(file).intervals
    assert 20 < len(parts) <= 25
    assert [part.start for part in parts] == [1, *(part.stop + 1 for part in parts[:-1])]
    assert parts[-1].stop == 130
    assert sum(part.counts["samples"] for part in parts) == 260


def test_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_report(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DatasetFormatError, match="no line has counts"):
        run_report(tmp_path / "empty.jsonl")


DECODE = {"read": 10.0, "decode": 60.0, "hook encode_sample": 20.0}
READ = {"read": 60.0, "decode": 1.0}
HEADLINES: list[tuple[dict[str, float], float, float | None, tuple[Any, ...], str]] = [
    # Times, waited, seconds, ranks and workers.
    (DECODE, 70, 100, (1, 2), r"Waits for decode 70% of .*\(67% of the .*; 4 workers"),
    (DECODE, 70, 100, (1, 2), r"4 workers would do in place of 2, or decode less"),
    (DECODE, 70, 100, (1, None), r"4 workers would do, or decode less"),
    (DECODE, 90, 100, (1, 0), r"11 workers would do in place of 0"),
    (DECODE, 100, 100, (1, 4), r"too short for any number of workers, or decode less"),
    # Of two ranks, each loop waits half of the time, and has half of the work.
    (DECODE, 100, 100, (2, 1), r"Waits for decode 50% .*; 2 workers would do in place of 1"),
    (DECODE, 20, 100, (1, 4), r"though 2 workers of 4 should do.*free cores\?"),
    (DECODE, 1, 100, (1, 8), r"Waits for data 1\.0% .*limit; 2 workers of 8 would do$"),
    (DECODE, 1, 100, (1, 2), r"Waits for data 1\.0% .*: the training step is the limit$"),
    (READ, 70, 100, (1, 1), r"Waits for read .*; 3 workers .*local disk"),
    ({"hook batch": 9.0, "read": 1.0}, 7, 10, (1, 1), r"Waits for hook batch.*cheaper"),
    ({"read and decode": 9.0, "hooks": 0.0}, 7, 10, (1, 1), r"energon-lite bench"),
    ({"pack and batch": 9.0}, 7, 10, (1, 1), r"smaller buffer"),
    ({"read": 0.0}, 0, 10, (1, 1), r"the training step is the limit$"),
    (DECODE, 7, None, (1, 1), r"^Waited 7\.0 s for batches; 67% .*: decode; .*not known$"),
]


@pytest.mark.parametrize(("times", "wait", "sec", "place", "words"), HEADLINES)
def test_headline_names_the_bottleneck_and_what_would_do(times, wait, sec, place, words):
    line = headline(times, wait, sec, *place)
    assert re.search(words, line), line
    assert "\n" not in line


def source(samples: int, asked: float, given: float, **more: Any) -> dict[str, Any]:
    row = {"samples": samples, "draws": samples, "skipped": 0, "read_ahead": 0, "tokens": 0}
    return {**row, "asked": asked, "given": given, **more}


MIB = float(2**20)
ALERTS: list[tuple[dict[str, Any], str, int, list[float], str]] = [
    # Sources, unit, streams, memory.
    ({"a": source(501, 0.5, 0.501), "b": source(499, 0.5, 0.499)}, "samples", 1, [], ""),
    ({"a": source(600, 0.5, 0.6), "b": source(400, 0.5, 0.4)}, "samples", 4, [],
     r"^The blend is off: a has 60\.0% of the samples, not 50\.0%$"),
    ({"a": source(600, 0.5, 0.6), "b": source(400, 0.5, 0.4)}, "samples", 40, [], ""),
    ({"a": source(600, 0.5, 0.6), "b": source(400, 0.5, 0.4)}, "samples", 0, [], ""),
    ({"a": source(600, 0.5, 0.6, read_ahead=50), "b": source(400, 0.5, 0.4, read_ahead=50)},
     "samples", 4, [], r"not 50\.0%; 100 samples are read ahead into buffers$"),
    ({"a": source(60, 0.38, 0.76, tokens=76_000), "b": source(400, 0.62, 0.24, tokens=24_000)},
     "tokens", 1, [], r"^The blend is off: a has 76\.0% of the tokens"),
    ({"a": source(60, 0.38, 0.76, tokens=76_000), "b": source(400, 0.62, 0.24, tokens=24_000)},
     "tokens", 40, [], ""),
    ({"a": source(418, 1.0, 1.0, draws=745, skipped=327)}, "samples", 1, [],
     r"^Skipped 327 of 745 samples \(44%\), 327 of them of a$"),
    ({"a": source(990, 1.0, 1.0, draws=1000, skipped=10)}, "samples", 1, [], ""),
    ({"a": source(9, 1.0, 1.0)}, "samples", 1, [MIB * n for n in (90, 900, 950, 960)], ""),
    ({"a": source(9, 1.0, 1.0)}, "samples", 1, [MIB * n for n in (512, 1024, 1536, 2048)],
     r"^The memory of the workers grows, in the second half from 1\.50 to 2\.00 GiB"),
    ({}, "samples", 1, [], ""),
]  # fmt: skip


@pytest.mark.parametrize(("sources", "unit", "num_streams", "memory", "words"), ALERTS)
def test_headline_names_what_is_wrong(sources, unit, num_streams, memory, words):
    found = ". ".join(alerts(sources, unit, num_streams, memory))
    assert re.search(words, found) if words else not found, found


def test_packs_are_reported_as_the_loop_got_them(tmp_path: Path) -> None:
    """The buffers hold more samples than all steps take."""
    loader, file = packed_loader(tmp_path), tmp_path / "stats.jsonl"
    given, parts = Counter[str](), []
    for step, batch in enumerate(islice(loader, 12), start=1):
        lengths = batch.cu_seqlens.diff(dim=1)
        given.update(dict.fromkeys(("a/train", "b/train"), 0))
        for name, tokens in zip(batch.source_names, lengths[lengths > 0].tolist(), strict=True):
            given[name] += tokens
        loader.record_loss(loss_by_source(torch.full(batch.labels.shape, float(step)), batch))
        if step % 4 == 0:
            loader.stats().write_to(file, step)
            parts.append(given)
            given = Counter()
    report = run_report(file)
    for part, tokens, loss in zip(report.intervals, parts, (2.5, 6.5, 10.5), strict=True):
        assert part.counts["tokens"] == sum(tokens.values())
        assert part.given == pytest.approx([tokens[n] / tokens.total() for n in report.sources])
        assert part.asked == pytest.approx([2 / 3, 1 / 3], abs=0.02)
        assert set(part.losses) == set(report.sources)
        assert [*part.losses.values()] == pytest.approx([loss, loss], abs=0.6)
    for name, row in report.sources.items():
        assert row["read_ahead"] > row["samples"]
        assert row["epochs"] == pytest.approx(row["samples"] / row["size"])
        assert row["loss"] == pytest.approx(loader.stats()[name].loss)
    (table,) = (own for own in report_tables(report) if own.title == "Over time")
    assert {"a/train loss", "b/train loss"} <= set(table.rows[0])


class Tokens(DefaultTaskEncoder):
    packing = Packing(capacity=40, buffer_size=128)

    @stateless
    def encode_sample(self, sample: TextSample) -> Encoded:
        return Encoded.derive_from(sample, input_ids=torch.ones(4 + number_of(sample) % 9).long())

    def sample_length(self, sample: Encoded) -> int:
        return len(sample.input_ids)


@edataclass
class Encoded(Sample):
    input_ids: torch.Tensor


def packed_loader(root: Path) -> Any:
    text_sets(root, a=300, b=300)
    parts = [{"path": "a", "weight": 2}, {"path": "b"}]
    split = metadataset({"unit": "tokens", "blend": parts})
    (root / "blend.yaml").write_text(yaml.safe_dump(split))
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
    return get_savable_loader(
        get_train_dataset(
            root / "blend.yaml", batch_size=2, worker_config=config, task_encoder=Tokens()
        )
    )


def test_headline_without_steps_names_the_shortest_step() -> None:
    line = without_steps({"read": 0.01, "decode": 0.03}, 2, 0.025)
    assert line.startswith("Decode takes longest (75% of")
    assert "With 2 workers, steps of 25 ms or more" in line
    # Two workers cannot make 40 ms of work in 1 ms: the batches lay in a buffer.
    assert "steps of 20 ms or more" in without_steps({"decode": 0.04}, 2, 0.001)


def test_text_of_a_terminal_has_no_control_characters_and_few_rows(tmp_path: Path) -> None:
    counts = {"samples": 1, "draws": 1}
    sources = {f"\x1b[31m{n}\n{'x' * 200}": counts for n in range(100)}
    row = {"step": 1, "time": 0, "began": 0, "sources": sources}
    (tmp_path / "stats.jsonl").write_text(json.dumps(row))
    text = "\n".join(report_text(run_report(tmp_path / "stats.jsonl")))
    assert "\x1b" not in text
    assert "and 76 more" in text
    assert max(map(len, text.splitlines())) < 400
