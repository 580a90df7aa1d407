"""Packs as the arguments of a Hugging Face model, by one word in `Packing`."""

from __future__ import annotations

import json
import math
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    PackedBatch,
    PackedCollator,
    Packing,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    pack_samples,
    stateless,
)
from energon_lite.core.errors import FatalSampleError
from energon_lite.extras.lengths.length_index import measure_lengths
from energon_lite.loader.ends import mark_valid
from energon_lite.loss import WeightedLabels
from energon_lite.stages.model_inputs import ModelInputs, model_inputs

from ..helpers import assert_same, text_set

ARGUMENTS = {
    "input_ids", "labels", "position_ids", "use_cache", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k",
}  # fmt: skip


class Text(DefaultTaskEncoder):
    def __init__(self, adds: bool | None = None, part: float = 1.0, **settings: Any) -> None:
        super().__init__()
        self.packing = Packing(**{"capacity": 48, "output": "huggingface", **settings})
        self.add_loss_weights = adds
        self.part = part

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        ids = torch.tensor(list(sample.text.encode()))
        mask = (torch.arange(len(ids)) > 3) * self.part
        return {"__key__": sample.__key__, "input_ids": ids, "loss_mask": mask}

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = text_set(tmp_path_factory.mktemp("inputs") / "texts", 60)
    measure_lengths(path, Text(), name="bytes", num_workers=0)
    return path


def loader_of(path: Path, encoder: Any, num_workers: int = 0, **settings: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, num_streams=2)
    settings = {"batch_size": 3, "worker_config": config, **settings}
    return get_savable_loader(get_train_dataset(path, task_encoder=encoder, **settings))


STREAMED, PLANNED, THD, ALIGNED = {}, {"lengths": "bytes"}, {"layout": "thd"}, {"align": 8}


@pytest.mark.parametrize(
    ("settings", "adds", "num_workers"),
    [
        *((settings, adds, 0) for settings in (STREAMED, PLANNED, THD) for adds in (None, True)),
        (ALIGNED, True, 0),
        ({"pad_to_capacity": False}, None, 0),
        pytest.param(THD, True, 2, marks=pytest.mark.processes),
    ],
)
def test_packs_become_what_the_collator_makes_also_after_a_resume(
    texts: Path, settings: dict[str, Any], adds: bool | None, num_workers: int
) -> None:
    packs = [*islice(loader_of(texts, Text(output="packed_batch", **settings)), 6)]
    with loader_of(texts, Text(adds, **settings), num_workers) as loader:
        found = [*islice(loader, 4)]
        state = json.loads(json.dumps(loader.save_state_rank()))
    with loader_of(texts, Text(adds, **settings)) as resumed:
        resumed.restore_state_rank(state)
        found += islice(resumed, 2)
    assert len(packs) == len(found) == 6
    for inputs, batch in zip(found, packs, strict=True):
        assert set(inputs) == ARGUMENTS
        labels = inputs["labels"]
        if adds:
            assert isinstance(labels, WeightedLabels)
            assert torch.equal(labels["loss_weights"], batch.loss_weights)
            labels = labels["labels"]
        assert torch.equal(labels, batch.labels)
        assert_same(inputs | {"labels": 0}, model_inputs(batch) | {"labels": 0})
        assert (labels != -100).sum() == (batch.loss_weights > 0).sum() > 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"layout": "thd"}, {"align": 8}, {"layout": "thd", "pad_to_capacity": True}],
    ids=["rows", "thd", "aligned", "padded thd"],
)
def test_boundaries_cover_all_rows_and_hold_one_sample_each(settings: dict[str, Any]) -> None:
    packing = Packing(capacity=24, **settings)
    lengths = [[5, 9], [24], [3, 1, 7]]
    packs = [
        pack_samples([{"input_ids": torch.ones(n, dtype=torch.int64)} for n in row], packing)
        for row in lengths
    ]
    batch = PackedBatch.from_packs(packs, packing)
    inputs = model_inputs(batch)
    bounds = inputs["cu_seq_lens_q"].tolist()
    segments = (batch.segment_ids + 100 * torch.arange(len(batch.segment_ids))[:, None]).flatten()
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert (bounds[0], bounds[-1]) == (0, batch.input_ids.numel())
    assert inputs["max_length_q"] == max(stop - start for start, stop in pairwise(bounds))
    seen = [set((segments[a:b] % 100).tolist()) - {0} for a, b in pairwise(bounds)]
    assert all(len(found) <= 1 for found in seen)
    assert sum(map(len, seen)) == sum(map(len, lengths))


def test_map_style_labels_carry_weights_too() -> None:
    packing = Packing(capacity=8, loss="sample")
    packs = [pack_samples([{"input_ids": torch.tensor([1, 2, 3])}], packing)]
    inputs = PackedCollator(packing, add_loss_weights=True)(packs)
    assert inputs["labels"].ne(-100).sum() == 1
    assert torch.is_tensor(PackedCollator(packing, add_loss_weights=False)(packs)["labels"])


def test_moved_inputs_keep_their_type_and_weights(texts: Path) -> None:
    (inputs,) = islice(loader_of(texts, Text(True)), 1)
    moved = inputs.to("meta")
    assert (type(moved), type(moved["labels"])) == (ModelInputs, WeightedLabels)
    assert moved["labels"]["loss_weights"].device.type == moved["cu_seq_lens_k"].device.type
    assert moved["input_ids"].device.type == "meta"
    assert not mark_valid(inputs)
    assert set(inputs) == ARGUMENTS


def sample_of(num: int, **fields: Any) -> dict[str, Any]:
    return {"__key__": "a", "input_ids": torch.arange(num) + 1, "text": "not an input", **fields}


def vision(num: int, grid: list[list[int]]) -> dict[str, Any]:
    """What a processor of a model with three positions for each token returns."""
    patches = sum(math.prod(row) for row in grid)
    return sample_of(
        num, pixel_values=torch.full((patches, 6), float(num)), image_grid_thw=torch.tensor(grid),
        mm_token_type_ids=[1] * num, position_ids=torch.arange(num).expand(3, -1) * num,
    )  # fmt: skip


def inputs_of(*packs: list[dict[str, Any]], **settings: Any) -> Any:
    packing = Packing(8)
    return PackedCollator(packing, **settings)([pack_samples(pack, packing) for pack in packs])


def test_inputs_of_a_processor_are_among_those_of_the_model() -> None:
    three = sample_of(3, position_ids=torch.arange(3).expand(3, -1))
    inputs = inputs_of([vision(2, [[1, 2, 2]]), three], [vision(4, [[1, 2, 2], [1, 4, 2]])])
    assert set(inputs) == ARGUMENTS | {"pixel_values", "image_grid_thw", "mm_token_type_ids"}
    assert inputs["pixel_values"][:, 0].tolist() == [2] * 4 + [4] * 12
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 2], [1, 4, 2]]
    assert inputs["mm_token_type_ids"].tolist() == [[1, 1] + [0] * 6, [1] * 4 + [0] * 4]
    text, *rows = inputs["position_ids"].tolist()
    assert text == [[0, 1, 0, 1, 2, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0]]
    assert rows == [[[0, 2, 0, 1, 2, 0, 0, 0], [0, 4, 8, 12, 0, 0, 0, 0]]] * 3


def test_images_of_one_shape_are_stacked_as_pixel_values() -> None:
    images = [torch.full((3, 2, 2), float(n)) for n in range(3)]
    packs = [[sample_of(2, pixel_values=images[:2]), sample_of(1)], [sample_of(2, image=images[2])]]
    assert torch.equal(inputs_of(*packs)["pixel_values"], torch.stack(images))
    assert len(inputs_of(*packs, keep=("images",))["images"]) == 3


GRID = {"image_grid_thw": torch.tensor([[1, 1, 1]]), "pixel_values": torch.ones(1, 6)}


@pytest.mark.parametrize(
    ("fields", "settings", "words"),
    [
        ({"boxes": torch.ones(3, 4)}, {}, "Field 'boxes' has no entry per token"),
        ({"image": torch.ones(3, 2, 2), "input_ids": [1]}, {}, r"but .*3, 2, 2.*, .*3, 4, 4"),
        ({"image": b"jpeg"}, {}, "one shape, but bytes"),
        (GRID, {}, r"Samples have image_grid_thw, and .*`position_ids` \(3, t\)"),
        ({"position_ids": [1, 2]}, {}, "position_ids other than 0, 1, 2"),
    ],
)
def test_what_a_model_would_not_get_or_misread_is_an_error(fields, settings, words) -> None:
    pictures = {"image": torch.ones(3, 4, 4)} if "input_ids" in fields else {}
    packs = [[sample_of(2, **pictures)], [sample_of(2, **fields)]]
    with pytest.raises(ValueError, match=words) as caught:
        inputs_of(*packs, **settings)
    assert len(str(caught.value)) < 300


def test_kept_fields_are_inputs_as_they_are() -> None:
    kept = inputs_of([sample_of(2, boxes=torch.ones(3, 4), **GRID)], keep=("boxes", "position_ids"))
    assert [len(boxes) for boxes in kept["boxes"]] == [3]
    masked = inputs_of([sample_of(2, position_ids=[1, 2])], attention="mask")
    assert masked["position_ids"][0, :3].tolist() == [1, 2, 0]


def weighted(root: Path, texts: Path) -> Path:
    path = root / "weighted.yaml"
    path.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
        f"    path: {texts}\n    loss_weight: 0.5\n"
    )
    return path


def test_weights_that_nothing_applies_are_refused(texts: Path, tmp_path: Path) -> None:
    path = weighted(tmp_path, texts)
    for place, encoder in ((path, Text()), (texts, Text(loss="sample"))):
        with pytest.raises(ValueError, match=r"add_loss_weights=True .*weighted_causal_lm_loss"):
            loader_of(place, encoder)
    with pytest.raises(FatalSampleError, match="Tokens have loss weights besides 0 and 1"):
        next(iter(loader_of(texts, Text(part=0.5))))
    for place, encoder in ((path, Text(False)), (texts, Text(False, part=0.5))):
        assert torch.is_tensor(next(iter(loader_of(place, encoder)))["labels"])
    with pytest.raises(ValueError, match="pass batch_size, the number of packs"):
        loader_of(texts, Text(), batch_size=None)
