"""Plans of packs, from a length index, are what the run then has."""

from __future__ import annotations

from typing import Any

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
from energon_lite.extras.inspect.forecast import plan
from energon_lite.extras.lengths.length_index import measure_lengths

from ..helpers import metadataset, number_of, text_set

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
