"""The model of transformers on the page of packs, run as it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ..architecture.doc_blocks import find_blocks
from ..conftest import REPO

pytest.importorskip("transformers")


def test_model_of_the_page_learns_and_keeps_the_samples_of_a_pack_apart(data_folder: Path) -> None:
    blocks = find_blocks((REPO / "docs" / "packing.md").read_text(encoding="utf-8"))
    python = [block.code for block in blocks if block.language == "python"]
    (training,) = [code for code in python if "LlamaConfig" in code]
    (mask,) = [code for code in python if "is_causal=True" in code]
    names: dict[str, Any] = {"__name__": __name__}
    for code in (python[0], training):
        exec(code, names)
    exec(mask.partition("\n\n")[0], names)
    model, batch = names["model"].eval(), names["batch"]
    with torch.no_grad():
        ids = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        masked = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=names["mask"][:, None],
        )
        start, stop = batch.cu_seqlens[1, 1:3].tolist()
        alone = model(input_ids=batch.input_ids[1:2, start:stop])
        mean = model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, labels=batch.labels,
            use_cache=False,
        ).loss  # fmt: skip
        untrained = type(model)(model.config)(input_ids=batch.input_ids, labels=batch.labels).loss
    is_text = batch.segment_ids > 0
    torch.testing.assert_close(ids.logits[is_text], masked.logits[is_text])
    torch.testing.assert_close(ids.logits[1:2, start:stop], alone.logits)
    losses = torch.nn.functional.cross_entropy(
        ids.logits[:, :-1].mT, batch.labels[:, 1:], reduction="none"
    )
    torch.testing.assert_close(names["weighted_mean"](losses, batch.loss_weights[:, 1:]), mean)
    assert mean < untrained
