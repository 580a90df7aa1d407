"""Reports of idle ranks and plans of packs, from a length index, are what the run then has."""

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
from energon_lite.core.keys import leaves
from energon_lite.extras.cli import app
from energon_lite.extras.inspect import forecast as module
from energon_lite.extras.inspect.forecast import DEFAULT_COST, balance_report, plan
from energon_lite.extras.lengths.length_index import measure_lengths
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


# ------------------------------------------------------------------- plans of packs, and their runs


COST = CostModel(token=1, token_squared=0.1)
SHARED: dict[str, Any] = {"balance": "global_window", "balance_window": 8, "cost": COST}
SPLITTING: dict[str, Any] = {"capacity": 40, "overlong": "split"}
NUM_OF_SET = 150


def length_of(number: int) -> int:
    return 1 + number * 7919 % 61


class PackedTexts(DefaultTaskEncoder):
    def sample_length(self, sample: TextSample) -> int:
        return length_of(number_of(sample))

    def slice_sample(self, sample: TextSample, start: int, stop: int) -> TextSample:
        return TextSample.derive_from(
            sample, text=sample.text, __subflavors__={"part": (start, stop)}
        )

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> list[tuple[str, int, int]]:
        """Source, first token, and the one after the last, of each."""
        return [
            (
                next(leaves(sample.__restore_key__))[0],
                *sample.__subflavors__.get("part", (0, length_of(number_of(sample)))),
            )
            for sample in samples
        ]

    @stateless
    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plan")
    for name in ("a", "b"):
        measure_lengths(text_set(folder / name, NUM_OF_SET), PackedTexts(), name="x", num_workers=0)
    entries = [{"path": str(folder / name), "weight": w} for name, w in (("a", 1), ("b", 3))]
    return metadataset({"blend": entries})


@pytest.mark.parametrize("more", [{}, SHARED, {"capacity": 50, "overlong": "drop"}, SPLITTING])
def test_plan_is_what_the_run_has(blend: dict[str, Any], more: dict[str, Any]) -> None:
    packing = Packing(**{"capacity": 64, "lengths": "x", "plan_window": 50, **more})
    asked: dict[str, Any] = {"batch_size": 2, "shuffle_buffer_size": 20}
    predicted = plan(blend, steps=25, world_size=2, num_streams=4, packing=packing, **asked)
    encoder = PackedTexts()
    encoder.packing = packing
    given: dict[str, int] = {}
    tokens = num_packs = 0
    for rank in range(2):
        config = WorkerConfig(rank=rank, world_size=2, num_workers=0, num_streams=4)
        dataset = get_train_dataset(blend, task_encoder=encoder, worker_config=config, **asked)
        batches = iter(get_savable_loader(dataset))
        for batch in (next(batches) for _ in range(25)):
            num_packs += len(batch)
            for name, start, stop in (sample for pack in batch for sample in pack):
                given[name] = given.get(name, 0) + (start == 0)
                tokens += stop - start
    assert {source.name: source.samples for source in predicted.sources} == given
    assert sum(source.tokens or 0 for source in predicted.sources) == tokens
    assert predicted.unit == "samples"
    assert [s.actual_share for s in predicted.sources] == [
        pytest.approx(given[s.name] / sum(given.values())) for s in predicted.sources
    ]
    facts = predicted.packing
    assert facts is not None
    assert (facts.packs, facts.fill) == (num_packs, tokens / (num_packs * packing.tokens))
    assert (facts.dropped > 0) == (more.get("overlong") == "drop")


def test_pass_of_packs_is_counted(blend: dict[str, Any]) -> None:
    folder = blend["splits"]["train"]["blend"][0]["path"]
    packing = Packing(64, lengths="x")
    predicted = plan(folder, steps=500, batch_size=2, num_streams=4, repeat=False, packing=packing)
    encoder = PackedTexts()
    encoder.packing = packing
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=4)
    dataset = get_train_dataset(
        folder, batch_size=None, repeat=False, task_encoder=encoder, worker_config=config
    )
    assert predicted.packing is not None
    num_packs = sum(1 for _ in get_savable_loader(dataset))
    assert predicted.packing.packs_per_pass == predicted.packing.packs == num_packs


def test_command_line_and_limits(blend: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = blend["splits"]["train"]["blend"][0]["path"]
    command = ["plan", folder, "--steps", "9", "--capacity", "64", "--lengths", "x"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "packs of 64 tokens by index 'x': " in result.output
    assert "9 steps of 1 rank x 1 pack" in result.output
    missing = CliRunner().invoke(app, [*command[:-1], "none"])
    assert missing.exit_code != 0
    assert "there is no length index 'none'" in missing.output
    monkeypatch.setattr(module, "MAX_DRAWS", 10)
    found = plan(folder, steps=9, packing=Packing(64, lengths="x"))
    assert (found.drawn_steps, found.packing.packs) == (4, 9)
    assert found.samples == pytest.approx(plan(folder, steps=9).samples * 2, rel=0.5)
    with pytest.raises(ValueError, match="needs a length index"):
        plan(folder, steps=9, packing=Packing(64))
