"""Packs of pictures for models of transformers: each sample has the outputs that it has alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import PackedCollator, Packing, pack_samples

transformers = pytest.importorskip("transformers", reason="make trainers has it")
IMAGE = 5
TEXT = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}  # fmt: skip
VISION = {
    "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny Qwen2-VL, which counts positions in three rows."""
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(
        text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, video_token_id=6,
        vision_start_token_id=3, vision_end_token_id=4,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def processor() -> Any:
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 1024},
    )  # fmt: skip


def sample_of(model: Any, processor: Any, sizes: list[tuple[int, int]], num_words: int) -> Any:
    """What a task encoder returns of a processor's tensors: no dimension of a batch."""
    rng = np.random.default_rng(len(sizes) + num_words)
    pictures = [rng.integers(0, 255, (*size, 3), np.uint8) for size in sizes]
    encoded = dict(processor(pictures, return_tensors="pt")) if pictures else {}
    tokens = []
    for grid in encoded.get("image_grid_thw", []):
        tokens += [3, *[IMAGE] * (int(grid.prod()) // 4), 4]
    ids = torch.tensor([*tokens, *rng.integers(10, 90, num_words)])
    kinds = (ids == IMAGE).int()
    if pictures:
        positions, _ = model.model.get_rope_index(
            ids[None], kinds[None], image_grid_thw=encoded["image_grid_thw"]
        )
    else:
        positions = torch.arange(len(ids)).expand(3, 1, -1)
    labels = ids.masked_fill(kinds > 0, -100)
    made = {"input_ids": ids, "labels": labels, "position_ids": positions[:, 0]}
    return {**made, "mm_token_type_ids": kinds, **encoded}


@pytest.mark.parametrize("settings", [{}, {"layout": "thd"}, {"align": 4}])
def test_samples_of_a_pack_have_the_logits_that_they_have_alone(model, processor, settings) -> None:
    rows = [[([(16, 24)], 5), ([], 7)], [([(8, 16), (24, 16)], 4), ([(16, 16)], 3)]]
    packs = [[sample_of(model, processor, *one) for one in row] for row in rows]
    packing = Packing(64, **settings)
    inputs = PackedCollator(packing)([pack_samples(pack, packing) for pack in packs])
    with torch.no_grad():
        packed = model(**inputs)
        alone = [
            model(**{name: value if "grid" in name or "pixel" in name else value[None]
                     for name, value in sample.items() if name not in ("position_ids", "labels")})
            for pack in packs for sample in pack
        ]  # fmt: skip
    logits = packed.logits[inputs["input_ids"] != 0]
    torch.testing.assert_close(logits, torch.cat([one.logits[0] for one in alone]))
    assert torch.isfinite(packed.loss)
