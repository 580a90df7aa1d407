"""Hooks that draw from global generators: streams differ, and a resumed run draws what it would."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    Packing,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_train_dataset,
    stateless,
)
from energon_lite.core import global_generators
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.global_generators import GlobalStates, call_seeded, seed_generators

from ..helpers import Ranks, assert_same, number_of, text_set


def noise() -> list[float]:
    drawn = [torch.rand(()).item(), torch.randn(()).item()]
    drawn += [np.random.rand(), np.random.randn(), float(np.random.randint(1 << 30))]
    return [*drawn, random.random(), random.gauss(0, 1)]


class Unmarked(DefaultTaskEncoder):
    """As in most code: nothing is marked, and everything draws."""

    def encode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"{noise()}")

    def batch(self, samples: list[TextSample]) -> dict[str, Any]:
        return {"texts": [sample.text for sample in samples], "noise": noise()}

    def encode_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "more": noise()}


class Seldom(Unmarked):
    """Draws for few samples, from one generator or another."""

    def encode_sample(self, sample: TextSample) -> TextSample:
        number = number_of(sample)
        draw = {3: random.random, 5: np.random.rand, 7: torch.rand(1).item}.get(number % 11, str)
        return TextSample.derive_from(sample, text=f"{number} {draw()}")

    def encode_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


class Expanding(Unmarked):
    """A generator hook that keeps what it drew."""

    def encode_sample(self, sample: TextSample) -> Iterator[TextSample]:  # type: ignore[override]
        first = random.random()
        for _ in range(number_of(sample) % 4):
            yield TextSample.derive_from(sample, text=f"{first} {torch.rand(()).item()}")


class PackedUnmarked(DefaultTaskEncoder):
    """Buffers need marked hooks; what is above them may draw."""

    packing = Packing(capacity=40, buffer_size=7)

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"{noise()}")

    def sample_length(self, sample: TextSample) -> int:
        return 3 + number_of(sample) % 17

    def pack_selected_samples(self, samples: list[TextSample]) -> dict[str, Any]:  # type: ignore[override]
        return {"texts": [sample.text for sample in samples], "noise": noise()}

    def batch(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {"packs": samples, "noise": noise()}


def cook(parts: dict[str, Any]) -> TextSample:
    """A cooker without a mark, of which samples wait in a buffer."""
    number = int(parts["__key__"])
    drawn = f"{noise()}" if number % 3 else ""
    return TextSample(**basic_sample_keys(parts), text=f"{number} {drawn}")


class Cooking(PackedUnmarked):
    cookers = (Cooker(cook),)

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return sample


ENCODERS = (Unmarked, Seldom, Expanding, PackedUnmarked, Cooking)


class Making:
    """A maker of pipelines, for any place in the run."""

    def __init__(self, path: Path, encoder: type[DefaultTaskEncoder], **settings: Any) -> None:
        self.path = path
        self.encoder = encoder
        self.settings = {"batch_size": 3, "shuffle_buffer_size": 8, **settings}

    def __call__(self, config: WorkerConfig) -> SavableDataset[Any]:
        more = {"max_samples_per_sequence": 5, **self.settings}
        if self.encoder.cookers:
            more["dataset_config"] = "crude.yaml"
        return get_train_dataset(
            self.path, worker_config=config, task_encoder=self.encoder(), **more
        )


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = text_set(tmp_path_factory.mktemp("random") / "texts", 50)
    crude = "{__module__: megatron.energon, __class__: CrudeWebdataset}"
    (root / ".nv-meta" / "crude.yaml").write_text(crude)
    return root


def numbers_in(slots: dict[int, Any]) -> list[float]:
    """All that was drawn."""
    return [number for item in slots.values() for number in [*item["noise"], *item.get("more", ())]]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_no_two_batches_of_any_rank_and_stream_draw_the_same(texts: Path, encoder: Any) -> None:
    slots = Ranks(Making(texts, encoder), 2, num_streams=4).slots(24)
    numbers = numbers_in(slots)
    assert len(numbers) >= 24 * 7
    assert len(set(numbers)) == len(numbers)
    # Nor does one batch draw the same from two generators.
    uniform = [n for item in slots.values() for n in (item["noise"][0], item["noise"][2])]
    assert len({round(number, 6) for number in uniform}) == len(uniform)


LOADER = """
import random

def sample_loader(parts):
    return {"__key__": parts["__key__"], "text": f"{parts['txt']} {random.random()}"}

def part_filter(part):
    return True
"""
LOADER_CONFIG = """
sample_type: {__module__: megatron.energon, __class__: TextSample}
sample_loader: own_loader.py:sample_loader
part_filter: own_loader.py:part_filter
"""


def test_sample_loader_draws_the_same_after_a_resume(texts: Path) -> None:
    (texts / ".nv-meta" / "own_loader.py").write_text(LOADER)
    (texts / ".nv-meta" / "loader.yaml").write_text(LOADER_CONFIG)
    make = Making(texts, DefaultTaskEncoder, dataset_config="loader.yaml", trust=True)
    run = Ranks(make, 1, num_streams=2)
    start = run.steps(3)
    resumed = Ranks(make, 2, states=run.save()).steps(5)
    whole = Ranks(make, 1, num_streams=2).slots(13)
    assert_same(dict(sorted({**start, **resumed}.items())), whole)
    drawn = [text.split()[-1] for item in whole.values() for text in item.text]
    assert len(set(drawn)) == len(drawn) == 39


@pytest.mark.parametrize("encoder", ENCODERS)
def test_generators_of_the_users_own_process_stay_as_they_are(texts: Path, encoder: Any) -> None:
    seed_generators(5)
    expected = [noise() for _ in range(12)]
    seed_generators(5)
    run = Ranks(Making(texts, encoder), 1, num_streams=2)
    found = []
    for _ in range(12):  # each draws an odd number of normal numbers, which come in pairs
        found.append(noise())
        run.steps(1)
    run.loaders[0].restore_state_global(run.save())
    assert found == expected


def test_numpys_other_generators_stay_as_they_are(texts: Path) -> None:
    before = GlobalStates()
    try:
        generator: Any = np.random.PCG64(3)
        vars(np.random)["set_bit_generator"](generator)
        expected = [np.random.randn() for _ in range(5)]
        vars(np.random)["set_bit_generator"](np.random.PCG64(3))
        run = Ranks(Making(texts, Unmarked), 1)
        found = []
        for _ in range(5):
            found.append(np.random.randn())
            run.steps(1)
        assert found == expected
    finally:
        before.put()


def test_python_whose_generator_cannot_be_copied_draws_the_same(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Ranks(Making(texts, Unmarked), 1).slots(5)
    monkeypatch.setattr(global_generators, "_PYTHON_ADDRESS", 0)
    monkeypatch.setattr(global_generators, "_PYTHON_PLACE", None)
    random.seed(1)
    first = random.random()
    random.seed(1)
    found = Ranks(Making(texts, Unmarked), 1).slots(5)
    assert_same(found, expected)
    assert random.random() == first


def test_seeding_makes_other_numbers_for_each_generator() -> None:
    """All three are Mersenne twisters: of one seed, they would give the same words."""

    def words() -> list[int]:
        of_torch = [int(torch.randint(1 << 32, ())) for _ in range(50)]
        of_random = [random.getrandbits(32) for _ in range(50)]
        return [*of_torch, *np.random.randint(1 << 32, size=50).tolist(), *of_random]

    assert len(set(call_seeded(12345, words))) == 150
