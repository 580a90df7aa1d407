"""A dry run: its clock changes no batch, and it names what takes long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    FatalSampleError,
    Packing,
    SampleDecoder,
    SkipSample,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    dry_run,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.extras.cli.commands import app
from energon_lite.extras.report.hook_clock import HookClock
from energon_lite.loader.loader import SavableDataLoader
from energon_lite.task_encoder.base import AugmentTaskEncoder

from ..conftest import write_tar
from ..helpers import ENCODERS, assert_same, caption_set, number_of, prepared

NUM_TEXTS = 60


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return caption_set(tmp_path_factory.mktemp("pictures"), 20)


class Packs(DefaultTaskEncoder):
    packing = Packing(capacity=64, buffer_size=10)

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        if sample.__key__ == "00007":
            raise SkipSample
        return {
            "__key__": sample.__key__, "__restore_key__": sample.__restore_key__,
            "input_ids": torch.tensor(list(sample.text.encode())),
        }  # fmt: skip

    def sample_length(self, sample: Any) -> int:
        return len(sample["input_ids"])


class Slow(DefaultTaskEncoder):
    """One hook takes a hundred times as long as all others."""

    @stateless
    def encode_batch(self, batch: Any) -> dict[str, Any]:
        sleep(0.02)
        return {"__key__": batch.__key__}


class Broken(DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        return 1 / 0


class Augmented(AugmentTaskEncoder):
    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return self._task_encoder.encode_sample(sample)


def cook(sample: Any) -> Iterator[TextSample]:
    for _ in range(2):
        yield TextSample(**basic_sample_keys(sample), text=sample["txt"])


class Cooking(DefaultTaskEncoder):
    cookers = (Cooker(cook),)


CASES: dict[str, Any] = {
    **ENCODERS,
    "packs": Packs,
    "augmented": lambda: Augmented(Packs()),
    "cooking": Cooking,
    "bytes": type("Bytes", (DefaultTaskEncoder,), {"decoder": None}),
}


def crude_set(root: Path) -> Path:
    write_tar(root / "s.tar", [(f"{i:05d}.txt", b"text %d xx" % i) for i in range(20)])
    return prepared(root, "CrudeWebdataset")


@pytest.mark.parametrize("name", CASES)
def test_clock_changes_no_batch(name: str, texts: Path, tmp_path: Path) -> None:
    folder = crude_set(tmp_path / "crude") if name == "cooking" else texts
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)

    def batches(encoder: Any) -> list[Any]:
        make = partial(get_train_dataset, folder, batch_size=3, worker_config=config)
        return list(islice(SavableDataLoader(make(task_encoder=encoder), max_skip_rate=1), 12))

    clock, encoder = HookClock(), CASES[name]()
    before = vars(encoder).copy()
    found = batches(clock.on(encoder))
    assert vars(encoder) == before
    assert_same(found, batches(CASES[name]()))
    has_hooks = any(key.startswith("hook ") for key in clock.seconds)
    assert has_hooks == (name not in ("plain", "bytes"))


@pytest.mark.processes
def test_dry_run_names_the_hook_that_takes_longest(texts: Path) -> None:
    report = dry_run(texts, Slow(), batch_size=4, num_workers=1, seconds=0.4)
    assert report.headline.startswith("Hook encode_batch takes longest")
    parts = {"read", "decode", "hook encode_batch", "pack and batch", "transport"}
    assert set(report.times) == parts
    assert (report.num_workers, report.unit, len(report.ranks)) == (1, "samples", 1)
    assert report.counts["samples"] == 4 * (report.step - 1)


class FailingOften(DefaultTaskEncoder):
    @stateless(failure_tolerance=0)
    def encode_sample(self, sample: TextSample) -> TextSample:
        if number_of(sample) % 3:
            raise ValueError("no")
        return sample


def test_dry_run_names_skipped_samples_first(texts: Path) -> None:
    report = dry_run(texts, FailingOften(), batch_size=2, num_workers=0, seconds=0.2)
    assert report.headline.startswith("Skipped ")
    assert "takes longest" in report.headline


def test_dry_run_with_steps_says_how_many_workers_would_do(texts: Path) -> None:
    report = dry_run(texts, Slow(), batch_size=4, num_workers=0, seconds=0.3, step_sec=0.01)
    assert report.headline.startswith("Waits for hook encode_batch")
    assert "workers would do in place of 0" in report.headline
    assert "transport" not in report.times


def test_dry_run_of_packs_has_their_fill_and_the_names_of_skipped_samples(texts: Path) -> None:
    report = dry_run(texts, Packs(), batch_size=2, num_workers=0, seconds=0.3)
    assert 0.7 < (report.fill or 0) <= 1
    assert {skip.sample_key for skip in report.skips} == {"00007"}
    assert {"hook encode_sample", "hook sample_length"} <= set(report.times)
    assert report.counts["tokens"] > 0


def test_decoding_is_told_from_reading(pictures: Path) -> None:
    report = dry_run(pictures, batch_size=2, num_workers=0, seconds=0.2)
    assert report.times["decode"] > 0
    kept = type("Kept", (DefaultTaskEncoder,), {"decoder": SampleDecoder(image_decode="bytes")})
    report = dry_run(pictures, kept(), batch_size=2, num_workers=0, seconds=0.2)
    assert report.fill is None


@pytest.mark.parametrize(("name", "value"), [("seconds", 0), ("step_sec", -1), ("batch_size", 0)])
def test_numbers_out_of_range_are_refused(name: str, value: int, texts: Path) -> None:
    with pytest.raises(ValueError, match=name):
        dry_run(texts, **{name: value})


def test_hook_that_raises_on_each_sample_ends_the_dry_run(texts: Path) -> None:
    with pytest.raises(FatalSampleError, match="failed 100 times in a row"):
        dry_run(texts, Broken(), num_workers=0, seconds=0.2)


def test_commands_print_and_write(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page, stats = tmp_path / "page.html", tmp_path / "stats.jsonl"
    run = partial(CliRunner().invoke, app)
    bench = ["bench", str(texts), "--seconds", "1", "--num-workers", "0"]
    found = run([*bench, "--output", str(page)])
    assert found.exit_code == 0, found.output
    assert "Where the time of the workers goes" in found.stdout
    assert 4_000_000 < page.stat().st_size < 6_000_000
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    loader = get_savable_loader(get_train_dataset(texts, batch_size=2, worker_config=config))
    for step, _ in enumerate(islice(loader, 3), start=1):
        loader.stats().write_to(stats, step)
    found = run(["report", str(stats), "--json"])
    assert json.loads(found.stdout)["step"] == 3
    assert run(["bench", str(texts), "--with", "none:Such"]).exit_code == 2
    broken = ["--with", f"{__name__}:Broken", "--num-workers", "0"]
    found = run(["bench", str(texts), *broken])
    assert (found.exit_code, "failed 100 times in a row" in found.stderr) == (1, True)
