"""Stacking into memory of a worker process, and large batches: the values of torch."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import (
    CaptioningSample,
    DefaultTaskEncoder,
    SampleDecoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_lite.core import batch_memory
from energon_lite.core.batch_memory import stack
from energon_lite.core.stacking import batch_stack


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.complex64])
def test_large_batches_have_the_values_of_torch(dtype: torch.dtype) -> None:
    tensors = [torch.randn(3, 512, 512).to(dtype).transpose(1, 2) for _ in range(6)]
    batch = batch_stack(tensors)
    assert batch.dtype == dtype
    assert batch.is_contiguous()
    assert torch.equal(batch, torch.stack(tensors))


def test_large_batches_keep_promotion_gradients_and_subclasses() -> None:
    whole, parts = torch.ones(1 << 20, dtype=torch.int32), torch.ones(1 << 20)
    assert batch_stack([whole, parts]).dtype == torch.float32
    weight = torch.nn.Parameter(torch.ones(1 << 20))
    for tensors in ([weight, parts], [parts, weight], [parts, weight * 1]):
        assert batch_stack(tensors).requires_grad


class Recalling(DefaultTaskEncoder[Any, Any, Any, Any]):
    """The caption is the brightness of the picture of five samples before."""

    decoder = SampleDecoder(image_decode="torchrgb8")

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.kept = whole, list[Any]()

    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        self.kept.append(sample if self.whole else sample.image[:, :2])
        if len(self.kept) > 5:
            last = self.kept.pop(0)
            sample.caption = str(int((last.image if self.whole else last)[0, 0, 0]))
        return sample


@pytest.mark.parametrize("whole", [True, False])
def test_hook_that_keeps_pictures_does_not_see_what_the_loop_writes_into_batches(whole, small_data):
    def captions(value: int | None) -> list[list[str]]:
        dataset = get_train_dataset(
            small_data / "captions", batch_size=4, task_encoder=Recalling(whole),
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        )  # fmt: skip
        found = []
        for batch in islice(get_savable_loader(dataset), 6):
            found.append(batch.caption)
            if value is not None:
                batch.image.fill_(value)
        return found

    assert captions(7) == captions(None)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (3, 0, 2), (5, 7)])
def test_tensors_of_any_type_are_stacked_into_memory_of_a_worker_process(shape, monkeypatch):
    made: list[int] = []

    def new_block(shape: tuple[int, ...], dtype: Any) -> Any:
        made.append(1)
        return np.empty(shape, dtype)

    monkeypatch.setattr(batch_memory, "new_block", new_block)
    monkeypatch.setattr(batch_memory, "LARGE_BYTES", 1)
    for dtype in (torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.complex64):
        tensors = [torch.rand(shape).mul(9).to(dtype) for _ in range(4)]
        for rows in (tensors, [tensor.T for tensor in tensors] if len(shape) == 2 else tensors):
            assert torch.equal(stack(rows), torch.stack(rows))
            assert stack(rows).dtype == dtype
    assert bool(made) == (0 not in shape)
    odd = [torch.ones(3, requires_grad=True)] * 2
    assert stack(odd).requires_grad
    assert stack([torch.ones(3), torch.ones(3, dtype=torch.int64)]).dtype == torch.float32
    assert stack([torch.eye(3).to_sparse()] * 2).is_sparse
