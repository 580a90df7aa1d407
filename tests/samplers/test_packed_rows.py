from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from energon_lite import MultipackBatchSampler, PackedCollator, PackedRows, Packing, pack_samples
from energon_lite.core.errors import FatalSampleError

PACKING = Packing(capacity=40)
ROWS = [{"input_ids": list(range(100 * n, 100 * n + 1 + 7 * n % 30))} for n in range(50)]
LENGTHS = [len(row["input_ids"]) for row in ROWS]


class ReadAtOnce:
    """As `datasets.Dataset`: a batch is read at once, by a flat list of integers."""

    def __init__(self) -> None:
        self.reads: list[list[int]] = []

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: Any) -> Any:
        return ROWS[int(index)]

    def __getitems__(self, indices: Any) -> list[Any]:
        self.reads.append(indices)
        return [ROWS[int(index)] for index in indices]


def read_by_index() -> Any:
    return ROWS


DATASETS = {
    "list": read_by_index,
    "read at once": ReadAtOnce,
    "subset": lambda: Subset(ReadAtOnce(), range(50)),  # type: ignore[arg-type]
    "subset of a list": lambda: Subset(ROWS, range(50)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [*((kind, 0) for kind in DATASETS), pytest.param("subset", 2, marks=pytest.mark.processes)],
)
def test_loader_has_the_packs_of_each_batch(kind: str, num_workers: int) -> None:
    sampler = MultipackBatchSampler(LENGTHS, 40, 3)
    rows = PackedRows(DATASETS[kind](), PACKING)
    loader: Any = DataLoader(rows, batch_sampler=sampler, num_workers=num_workers, collate_fn=list)  # type: ignore[arg-type]
    batches = list(loader)
    assert len(batches) == len(sampler) > 3
    for packs, indices in zip(batches, sampler, strict=True):
        expected = [pack_samples([ROWS[i] for i in pack], PACKING) for pack in indices]
        assert [pack.__keys__ for pack in packs] == [list(map(str, pack)) for pack in indices]
        for pack, other in zip(packs, expected, strict=True):
            assert torch.equal(pack.input_ids, other.input_ids)
            assert torch.equal(pack.labels, other.labels)
            assert torch.equal(pack.segment_ids, other.segment_ids)


def test_samples_of_a_batch_are_read_at_once() -> None:
    dataset = ReadAtOnce()
    rows = PackedRows(dataset, PACKING)
    rows.__getitems__([[3, 1], [2]])
    assert dataset.reads == [[3, 1, 2]]


def test_one_index_is_a_pack_of_one_sample() -> None:
    rows = PackedRows(ROWS, PACKING)
    assert len(rows) == 50
    for item in (4, np.int64(4), [4], torch.tensor([4])):
        assert rows[item].__keys__ == ["4"]  # type: ignore[index]


def test_encode_makes_what_is_packed() -> None:
    rows = PackedRows(["ab", "cde"], PACKING, lambda text: {"input_ids": list(text.encode())})
    assert bytes(rows[[1, 0]].input_ids.tolist()) == b"cdeab"


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(TypeError, match="generator cannot be read by index"):
        PackedRows((row for row in ROWS), PACKING)
    with pytest.raises(FatalSampleError, match="no input_ids"):
        PackedRows([{"text": "a"}], PACKING)[0]
    with pytest.raises(TypeError):
        PackedRows(ROWS, PACKING)[[0.5]]  # type: ignore[list-item]


# Model inputs.


def batch_of(collator: PackedCollator, packing: Packing = PACKING) -> dict[str, Any]:
    return collator(PackedRows(ROWS, packing).__getitems__([[1, 2], [3]]))


def test_mask_lets_a_token_see_its_own_sample_up_to_itself() -> None:
    inputs = batch_of(PackedCollator(PACKING, attention="mask", keep=("segment_ids", "cu_seqlens")))
    segments = inputs["segment_ids"]
    is_seen = inputs["attention_mask"] == 0
    assert is_seen.shape == (2, 1, 40, 40)
    for row in range(2):
        for query in range(40):
            expected = [k <= query and segments[row, k] == segments[row, query] for k in range(40)]
            assert is_seen[row, 0, query].tolist() == expected
    assert inputs["cu_seqlens"].shape == (2, 3)


def test_collator_and_rows_can_be_sent_to_a_worker() -> None:
    collator, rows = pickle.loads(
        pickle.dumps((PackedCollator(PACKING), PackedRows(ROWS, PACKING)))
    )
    assert collator([rows[[1, 2]]])["input_ids"].shape == (1, 40)


def test_what_a_model_would_not_know_is_refused_or_kept() -> None:
    by_sample = Packing(capacity=40, loss="sample")
    with pytest.raises(ValueError, match="loss weights besides 0 and 1"):
        batch_of(PackedCollator(by_sample), by_sample)
    kept = batch_of(PackedCollator(by_sample, keep=("loss_weights",)), by_sample)
    assert kept["loss_weights"].sum() == pytest.approx(3)
    with pytest.raises(ValueError, match="shift labels again"):
        PackedCollator(Packing(capacity=40, labels_are_shifted=True))
    with pytest.raises(ValueError, match="attention='flash'"):
        PackedCollator(PACKING, attention="flash")  # type: ignore[arg-type]
