"""Rows, samples, labels and padding of batches are those of the batch, whatever its kind."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from energon_lite import (
    PackedBatch,
    Packing,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    pack_samples,
)
from energon_lite.extras.view.segments import batch_view

from ..helpers import text_set
from ..preview.sets import PackedBytes

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)


def first_batch(root, **packing):
    encoder = PackedBytes()
    encoder.packing = Packing(capacity=50, **packing)
    dataset = get_train_dataset(root, batch_size=2, task_encoder=encoder, worker_config=CONFIG)
    return next(iter(get_savable_loader(dataset)))


def rebuilt(view, name):
    """The column of a field, from the tokens of the segments; 0 where there is padding."""
    rows = []
    for row in view.rows:
        column = np.zeros(row.length)
        for part in row.segments:
            for place, token in enumerate(part.tokens, part.start):
                column[place] = getattr(token, name)
        rows.append(column)
    return np.array(rows)


@pytest.mark.parametrize("settings", [{}, {"align": 8}, {"layout": "thd"}, {"loss": "sample"}])
def test_packs_are_shown_as_they_are(tmp_path, settings):
    batch = first_batch(text_set(tmp_path, 60), **settings)
    view = batch_view(batch, encoder=PackedBytes())
    assert len(view.rows) == len(batch.input_ids)
    assert view.num_samples == len(batch.__key__) > 4
    assert view.fill == pytest.approx(batch.efficiency)
    assert np.array_equal(rebuilt(view, "id"), batch.input_ids * (batch.segment_ids > 0))
    assert np.array_equal(rebuilt(view, "weight"), batch.loss_weights)
    real = batch.segment_ids > 0
    assert np.array_equal(rebuilt(view, "label")[real], batch.labels[real])
    assert np.array_equal(rebuilt(view, "position")[real], batch.position_ids[real])
    samples = [part for row in view.rows for part in row.segments if not part.is_padding]
    assert [part.key for part in samples] == batch.__key__
    assert {part.source for part in samples} == {f"{tmp_path.name}/train"}
    for row, bounds in zip(view.rows, batch.cu_seqlens_padded.tolist(), strict=True):
        starts = [part.start for part in row.segments if not part.is_padding]
        assert starts == list(dict.fromkeys(bounds))[:-1]
        edges = [(part.start, part.stop) for part in row.segments]
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges)][:-1]
        assert edges[-1][1] == row.length
    assert all("".join(t.text for t in part.tokens).startswith("text ") for part in samples)


def test_inputs_of_hugging_face_models_show_their_samples_and_padding(tmp_path):
    root = text_set(tmp_path, 60)
    batch, packs = (
        first_batch(root, output="huggingface", max_samples=3),
        first_batch(root, max_samples=3),
    )
    assert isinstance(batch, dict)
    key = packs.__restore_key__
    view, expected = batch_view(batch, key), batch_view(packs)
    assert [[(p.start, p.stop) for p in row.segments] for row in view.rows] == [
        [(p.start, p.stop) for p in row.segments] for row in expected.rows
    ]
    assert view.fill == expected.fill < 1
    assert view.rows[0].segments[0].key.startswith(f"{tmp_path.name}/train[")


def test_padded_batches_and_lists_are_rows():
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    padded = {"__key__": ["a", "b"], "input_ids": ids, "attention_mask": (ids > 0).long()}
    view = batch_view(padded)
    assert [[(p.key, p.start, p.stop) for p in row.segments] for row in view.rows] == [
        [("a", 0, 3)], [("b", 0, 2), ("", 2, 3)],
    ]  # fmt: skip
    assert view.fill == pytest.approx(5 / 6)
    assert view.rows[0].segments[0].tokens[0].label is None
    ragged = batch_view({"input_ids": [[1, 2], [3]], "labels": [[1, -100], [3]]})
    assert [row.length for row in ragged.rows] == [2, 1]
    assert [t.weight for t in ragged.rows[0].segments[0].tokens] == [1, 0]
    left = batch_view({"tokens": ids, "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])})
    assert left.rows[0].segments[0].is_padding


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"text": ["a"]},
        5,
        None,
        {"input_ids": []},
        "text",
        {"input_ids": torch.zeros(2, 3, 4)},
        {"input_ids": [None]},
    ],
)
def test_what_has_no_tokens_has_no_rows(batch):
    assert batch_view(batch).rows == ()


def test_pictures_stand_where_their_tokens_are():
    image, id_ = torch.zeros(3, 2, 2), 99
    samples = [
        {"__key__": "a", "input_ids": torch.tensor([1, id_, id_, 2]), "images": [image]},
        {"__key__": "b", "input_ids": torch.tensor([3, 4])},
        {"__key__": "c", "input_ids": torch.tensor([id_, 5, id_]), "images": [image, image]},
    ]
    batch = PackedBatch.from_packs([pack_samples(samples, Packing(capacity=16))])
    view = batch_view(batch, encoder=SimpleNamespace(image_token_id=id_))
    assert len(view.pictures) == 3
    parts = view.rows[0].segments
    assert [part.pictures for part in parts] == [(0,), (), (1, 2)]
    assert [part.picture_starts for part in parts] == [(1,), (), (6, 8)]
    assert [part.picture_starts for part in batch_view(batch).rows[0].segments] == [()] * 3
