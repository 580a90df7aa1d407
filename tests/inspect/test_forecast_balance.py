"""The report of idle ranks, predicted from a length index, is what the run then has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.balance import CostModel
from energon_lite.extras.cli import app
from energon_lite.extras.inspect.forecast import DEFAULT_COST, balance_report
from energon_lite.formats.length_files import write_lengths
from energon_lite.sources.dataset_config import load_factory

from ..helpers import metadataset, number_of, text_set

NUM_SAMPLES = 3000


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = text_set(tmp_path_factory.mktemp("balance") / "texts", NUM_SAMPLES)
    drawn = np.random.default_rng(1).lognormal(np.log(1500), 1.3, NUM_SAMPLES)
    store(folder, "documents", np.clip(drawn, 1, 32_768))
    return folder


def store(folder: Path, name: str, lengths: Any) -> None:
    data = load_factory(folder, split_part="train").data
    write_lengths(folder, "train", name, np.asarray(lengths).astype(np.int64), data)


def test_report_has_what_packs_and_their_order_are_worth(root) -> None:
    report = balance_report(root, lengths="documents", capacity=32_768, ranks=8, steps=128)
    padded, packs, synced, planned = report.rows
    assert packs.full == pytest.approx(synced.full, abs=1e-4)
    assert packs.full == pytest.approx(planned.full, abs=1e-4)
    assert packs.full > 0.99 > 0.5 > padded.full
    assert padded.imbalance > 0.2
    assert packs.imbalance > 0.15
    assert synced.imbalance < packs.imbalance / 2
    assert planned.imbalance < synced.imbalance / 2
    assert report.samples > 128 * 8
    assert (report.overlong, report.skipped) == (0, 0)


class Encoder(DefaultTaskEncoder):
    def __init__(self, lengths: Any, packing: Packing) -> None:
        super().__init__()
        self.lengths = lengths
        self.packing = packing

    def sample_length(self, sample: TextSample) -> int:
        return int(self.lengths[number_of(sample)])

    def slice_sample(self, sample: TextSample, start: int, stop: int) -> TextSample:
        return sample

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> list[int]:
        """The tokens of each sample, as many as fit a pack."""
        return [min(self.sample_length(sample), self.packing.longest) for sample in samples]

    @stateless
    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


@pytest.mark.parametrize(
    ("number", "balance"), [(1, None), (2, "quantile_sync"), (3, "global_window")]
)
@pytest.mark.parametrize("more", [{}, {"align": 64, "max_samples": 5}, {"overlong": "drop"}])
def test_report_is_what_the_run_has(root, number, balance, more) -> None:
    ranks, steps, capacity = 3, 40, 8192
    lengths = np.random.default_rng(2).lognormal(np.log(1500), 1.0, NUM_SAMPLES).astype(np.int64)
    store(root, "run", lengths)
    report = balance_report(
        root, lengths="run", capacity=capacity, ranks=ranks, steps=steps, window=16,
        seed_offset=5, **more,
    )  # fmt: skip
    settings = {"overlong": "truncate", **more}
    packing = Packing(
        capacity, lengths="run", balance=balance, balance_window=16, cost=DEFAULT_COST, **settings
    )
    sizes = np.zeros((steps, ranks))
    tokens = 0
    for rank in range(ranks):
        config = WorkerConfig(
            rank=rank, world_size=ranks, num_workers=0, num_streams=ranks, seed_offset=5
        )
        dataset = get_train_dataset(
            root, batch_size=1, shuffle_buffer_size=1000, worker_config=config,
            task_encoder=Encoder(lengths, packing),
        )  # fmt: skip
        batches = iter(get_savable_loader(dataset))
        for step in range(steps):
            (pack,) = next(batches)
            sizes[step, rank] = DEFAULT_COST.combine(sum(pack), sum(n * n for n in pack))
            tokens += sum(pack)
    row = report.rows[number]
    assert row.costs == pytest.approx(sizes)
    assert row.full == pytest.approx(tokens / (steps * ranks * capacity))


def test_report_is_the_same_every_time_and_another_with_another_seed(root) -> None:
    settings: dict[str, Any] = {"lengths": "documents", "capacity": 32_768, "ranks": 2, "steps": 20}
    assert balance_report(root, **settings) == balance_report(root, **settings)
    assert balance_report(root, **settings) != balance_report(root, **settings, seed_offset=1)


def test_long_and_skipped_samples_are_reported(root) -> None:
    store(root, "odd", [0, 50, 3000] * 1000)
    report = balance_report(root, lengths="odd", capacity=1000, ranks=2, steps=50)
    assert report.overlong > 50
    assert report.skipped > 50
    store(root, "nothing", [0] * NUM_SAMPLES)
    with pytest.raises(ValueError, match=r"index 'nothing': all samples have length 0"):
        balance_report(root, lengths="nothing", capacity=1000, ranks=2, steps=5)


def test_long_and_skipped_samples_are_those_of_the_steps(root) -> None:
    store(root, "every third", [0, 1000, 3000] * 1000)
    report = balance_report(root, lengths="every third", capacity=1000, ranks=2, steps=5)
    # A pack holds one sample, and a third of what is drawn has none.
    assert report.samples == 10
    assert 0 < report.overlong < 10
    assert report.skipped < 100


def test_odd_sizes_are_reported_without_idle_time(tmp_path) -> None:
    one = text_set(tmp_path / "one", 1)
    store(one, "default", [5])
    for ranks, capacity in ((1, 1), (4, 8), (64, 5), (1, 1000)):
        report = balance_report(one, lengths="default", capacity=capacity, ranks=ranks, steps=2,
                                window=1, plan_window=30)  # fmt: skip
        assert report.samples >= 2 * ranks
        assert report.overlong == (report.samples if capacity == 1 else 0)
        assert [row.imbalance for row in report.rows] == pytest.approx([0] * 4)
        assert [row.idle for row in report.rows] == pytest.approx([0] * 4)
        assert all(row.idle >= 0 for row in report.rows)
    assert report.rows[-1].name == "packs, shared plan of 1 step"


def test_cost_of_nothing_is_refused(root) -> None:
    with pytest.raises(ValueError, match="both 0; give one above 0"):
        balance_report(root, lengths="documents", capacity=9, ranks=2, cost=CostModel(token=0))


def test_blend_of_one_folder_twice_has_its_lengths_twice(root) -> None:
    blend = metadataset({"blend": [{"path": str(root)}, {"path": str(root), "weight": 2}]})
    report = balance_report(blend, lengths="documents", capacity=32_768, ranks=2, steps=20)
    assert report.rows[1].full > 0.99


def test_command_prints_a_table_and_names_the_command_that_writes_a_missing_index(root) -> None:
    options = ["--capacity", "32768", "--ranks", "4", "--steps", "64"]
    done = CliRunner().invoke(app, ["balance", str(root), "--lengths", "documents", *options])
    assert done.exit_code == 0, done.output
    assert "packs, quantile sync of 64" in done.output
    assert "█" in done.output
    done = CliRunner().invoke(app, ["balance", str(root), "--lengths", "none", *options])
    assert (done.exit_code, "leave" in done.output) == (1, False)
    assert "energon-lite lengths" in done.output
