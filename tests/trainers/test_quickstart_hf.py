"""The quickstart's section on Hugging Face models, run as it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ..architecture.doc_blocks import find_blocks
from ..conftest import REPO
from ..helpers import caption_set

pytest.importorskip("transformers")


def test_model_of_the_quickstart_learns_and_keeps_the_texts_of_a_pack_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caption_set(tmp_path / "pets", 40)
    monkeypatch.chdir(tmp_path)
    page = (REPO / "docs" / "quickstart.md").read_text(encoding="utf-8")
    section = page[page.index("## 8.") :]
    names: dict[str, Any] = {"__name__": __name__}
    exec("from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset", names)
    torch.manual_seed(0)
    run = [block for block in find_blocks(section) if "GPU" not in block.skip]
    assert len(run) == 3
    for block in run:
        exec(block.code, names)
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
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            labels=batch.labels,
            use_cache=False,
        ).loss
        untrained = type(model)(model.config)(input_ids=batch.input_ids, labels=batch.labels).loss
    is_text = batch.segment_ids > 0
    torch.testing.assert_close(ids.logits[is_text], masked.logits[is_text])
    torch.testing.assert_close(ids.logits[1:2, start:stop], alone.logits)
    losses = torch.nn.functional.cross_entropy(
        ids.logits[:, :-1].mT, batch.labels[:, 1:], reduction="none"
    )
    torch.testing.assert_close(names["weighted_mean"](losses, batch.loss_weights[:, 1:]), mean)
    assert mean < untrained
