"""Blends of sources with a cooker over each: read together, cooked in lists."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    SkipSample,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream

from ..helpers import text_set, through_json

CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A blend of two crude sets, cooked differently, and of a typed one."""
    root = tmp_path_factory.mktemp("cooked")
    for name, num in (("a", 40), ("b", 7), ("c", 25)):
        folder = text_set(root / name, num)
        if name != "c":
            (folder / ".nv-meta" / "dataset.yaml").write_text(CRUDE)
    (root / "blend.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        "    - {weight: 3, path: a, subflavors: {of: a}}\n"
        "    - {weight: 1, path: b, subflavors: {of: b}, loss_weight: 0.5}\n"
        "    - {weight: 2, path: c}\n"
    )
    return root


@stateless
@cooker
def cook_a(sample: Any) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text="a: " + sample["txt"])


@stateless
@cooker
def cook_b(sample: Any) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text="b: " + sample["txt"])


@cooker
def draws(sample: Any) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=str(torch.randint(10**6, ()).item()))


@stateless
@cooker
def skips_some(sample: Any) -> TextSample:
    if int(sample["__key__"]) % 3 == 1:
        raise SkipSample
    return cook_a(sample)


@stateless
@cooker
def twice(sample: Any) -> Any:
    yield cook_a(sample)
    yield cook_b(sample)


class Encoder(DefaultTaskEncoder):
    def __init__(self, of_a: Any = cook_a) -> None:
        super().__init__()
        self.cookers = [Cooker(of_a, {"of": "a"}), Cooker(cook_b)]


def dataset(root: Path, encoder: Any, **settings: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
    return get_train_dataset(
        root / "blend.yaml",
        worker_config=config,
        task_encoder=encoder,
        **{"batch_size": 4, "shuffle_buffer_size": 10, **settings},
    )


def run_of(made: Any, num: int = 40) -> list[Any]:
    run = StreamRun(made, Stream(0, 2), max_skip_rate=1)
    return [(batch.text, run.key) for batch in islice(run, num)]


def test_a_sample_that_its_cooker_skips_uses_its_draw_up(root: Path) -> None:
    drawn = [key for _, own in run_of(dataset(root, Encoder()), 60) for key in own[2:]]
    found = [key for _, own in run_of(dataset(root, Encoder(skips_some))) for key in own[2:]]
    left = [key for key in drawn if not (key[0].startswith("a") and key[2] % 3 == 1)]
    assert found == left[: len(found)]
    assert len(found) == 160


@pytest.mark.parametrize("of_a", [cook_a, draws, skips_some, twice], ids=lambda own: own.__name__)
def test_a_run_resumes_exactly(root: Path, of_a: Any) -> None:
    whole = get_savable_loader(dataset(root, Encoder(of_a)))
    batches = iter(whole)
    for _ in range(7):
        next(batches)
    state = through_json(whole.save_state_rank())
    expected = [(batch.text, batch.__restore_key__) for batch in islice(batches, 20)]
    resumed = get_savable_loader(dataset(root, Encoder(of_a)))
    resumed.restore_state_rank(state)
    assert [(b.text, b.__restore_key__) for b in islice(resumed, 20)] == expected


def test_a_cooker_that_makes_several_samples_is_run_as_samples_are_drawn(root: Path) -> None:
    found = [text for texts, _ in run_of(dataset(root, Encoder(twice))) for text in texts]
    assert sum(text.startswith("a: ") for text in found) > 20
    assert sum(text.startswith("b: ") for text in found) > 20
