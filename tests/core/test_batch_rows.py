"""Stacking what was made in the memory of its batch: the same values, without a copy."""

from __future__ import annotations

import gc
import pickle
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    CaptioningSample,
    DefaultTaskEncoder,
    SampleDecoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_lite.core import batch_rows
from energon_lite.core.batch_rows import BatchRows, stack
from energon_lite.core.stacking import batch_pad_stack, batch_stack, generic_batch

SHAPE = (3, 4, 4)


def made(rows: BatchRows, value: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    array = rows.empty(shape, np.uint8)
    array[...] = value
    return torch.from_numpy(array)


def learned(num_rows: int = 4) -> BatchRows:
    """A maker whose tensors were stacked in batches of a size."""
    rows = BatchRows()
    batch_stack([made(rows, 0) for _ in range(num_rows)])
    return rows


def is_shared(batch: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return batch.data_ptr() == tensors[0].data_ptr()


def test_the_second_batch_of_pictures_is_the_memory_that_they_were_made_in() -> None:
    rows = BatchRows()
    for number, is_known in enumerate((False, True, True)):
        pictures = [made(rows, 10 * number + i) for i in range(4)]
        batch = batch_stack(pictures)
        assert is_shared(batch, pictures) == is_known
        assert batch.is_contiguous()
        assert batch[:, 0, 0, 0].tolist() == [10 * number + i for i in range(4)]


@pytest.mark.parametrize("join", [batch_stack, batch_pad_stack, generic_batch])
def test_all_ways_to_stack_know_rows(join: Any) -> None:
    rows = learned()
    pictures = [made(rows, i) for i in range(4)]
    assert is_shared(join(pictures), pictures)


def test_pictures_that_are_not_stacked_have_memory_of_their_own() -> None:
    rows = BatchRows()
    for _ in range(3):
        pictures = [made(rows, i) for i in range(4)]
        batch_stack([picture.clone() for picture in pictures])
        assert all(p.untyped_storage().nbytes() == 48 for p in pictures)
        assert rows._block is None
    del pictures
    gc.collect()
    # Nor does one that is kept, of a batch that was never stacked, have more than a block of it.
    rows = learned()
    kept = [made(rows, i) for i in range(20)]
    assert rows._block is None
    assert [int(picture[0, 0, 0]) for picture in kept] == list(range(20))


def test_a_row_is_pickled_without_the_others() -> None:
    rows = learned(100)
    assert len(pickle.dumps(made(rows, 1))) < 1000


def test_one_skipped_picture_costs_a_copy_and_is_forgotten() -> None:
    rows = learned()
    pictures = [made(rows, i) for i in range(5)]
    batch = batch_stack([*pictures[:2], *pictures[3:]])
    assert batch[:, 0, 0, 0].tolist() == [0, 1, 3, 4]
    assert not is_shared(batch, pictures)
    for is_known in (False, True):
        pictures = [made(rows, i) for i in range(4)]
        assert is_shared(batch_stack(pictures), pictures) == is_known


def test_a_second_stack_of_the_same_pictures_is_a_copy() -> None:
    rows = learned()
    pictures = [made(rows, i) for i in range(4)]
    first, second = batch_stack(pictures), batch_stack(pictures)
    first.zero_()
    assert second[:, 0, 0, 0].tolist() == [0, 1, 2, 3]


def test_a_smaller_batch_is_the_part_of_the_block_that_it_fills() -> None:
    rows = learned()
    pictures = [made(rows, i) for i in range(3)]
    batch = batch_stack(pictures)
    assert is_shared(batch, pictures)
    assert batch.shape == (3, *SHAPE)


def test_gradients_are_kept() -> None:
    rows = learned()
    pictures = [torch.from_numpy(rows.empty(SHAPE, np.float32)) for _ in range(4)]
    for picture in pictures:
        picture.fill_(1).requires_grad_()
    batch_stack(pictures).sum().backward()  # type: ignore[no-untyped-call]
    assert pictures[0].grad is not None


def test_tensors_without_memory_are_stacked_as_ever() -> None:
    rows = learned()
    made(rows, 0)
    sparse = torch.eye(2).to_sparse()
    assert torch.equal(batch_stack([sparse, sparse]).to_dense(), torch.stack([torch.eye(2)] * 2))


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


def test_a_fork_of_a_worker_process_makes_nothing_in_the_block_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = learned()
    first = made(rows, 1)
    monkeypatch.setattr(batch_rows, "new_block", lambda shape, dtype: np.empty(shape, dtype))
    after = [made(rows, 2) for _ in range(3)]
    assert not any(0 <= tensor.data_ptr() - first.data_ptr() < 4 * 48 for tensor in after)
    # What was made before the fork may be changed by the parent.
    monkeypatch.undo()
    rows = learned(2)
    pictures = [made(rows, 1), made(rows, 2)]
    monkeypatch.setattr(batch_rows, "new_block", lambda shape, dtype: np.empty(shape, dtype))
    batch = batch_stack(pictures)
    assert not is_shared(batch, pictures)
    assert batch[:, 0, 0, 0].tolist() == [1, 2]


@pytest.mark.parametrize("what", ["sample", "picture", "view", "storage", "nothing"])
def test_what_a_hook_keeps_is_not_changed_with_the_batch(what: str) -> None:
    rows = learned()
    samples = [{"image": rows.tensor(SHAPE, np.uint8).fill_(i)} for i in range(4)]
    image = samples[3]["image"]
    kept = {
        "sample": samples[3], "picture": image, "view": image[:1], "storage": image.numpy(),
        "nothing": None,
    }[what]  # fmt: skip
    del image
    batch_rows.note_samples(samples)
    batch = generic_batch(samples)["image"]
    assert is_shared(batch, [samples[0]["image"]]) == (kept is None)
    batch.zero_()
    if kept is not None:
        assert int(np.max(kept["image"].numpy() if what == "sample" else np.asarray(kept))) == 3


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
def test_hook_that_keeps_pictures_does_not_see_what_the_loop_writes_into_batches(
    whole: bool, small_data: Path
) -> None:
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


def test_threads_do_not_share_rows() -> None:
    rows = learned()
    found: list[bool] = []

    def run() -> None:
        pictures = [made(rows, i) for i in range(4)]
        found.append(is_shared(batch_stack(pictures), pictures))
        pictures = [made(rows, i) for i in range(4)]
        found.append(is_shared(batch_stack(pictures), pictures))

    first = made(rows, 7)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    pictures = [first, *(made(rows, i) for i in range(3))]
    found.append(is_shared(batch_stack(pictures), pictures))
    assert found == [False, True, True]


# Makes, forgets and stacks at random: the number of tensors, which are left out, their order.
STEPS = st.lists(
    st.tuples(
        st.integers(1, 5), st.integers(0, 1), st.sampled_from(["", "hole", "turned", "changed"])
    ),
    max_size=12,
)


@given(steps=STEPS)
def test_stacking_has_the_values_of_torch_whatever_was_made(steps: list[Any]) -> None:
    rows, kept = BatchRows(), []
    value = 0
    for number, shape, what in steps:
        pictures = []
        for _ in range(number):
            value = (value + 1) % 251
            picture = made(rows, value, (SHAPE, (2, 4, 4))[shape])
            picture[0, 0, 1] = 255
            pictures.append(picture)
        if what == "hole":
            pictures = pictures[::2]
        if what == "turned":
            pictures = [picture.transpose(1, 2) for picture in pictures]
        if what == "changed":
            pictures = [picture[:2] for picture in pictures]
        expected = torch.stack([picture.clone() for picture in pictures])
        batch = stack(pictures)
        assert torch.equal(batch, expected)
        kept.append((batch, expected))
    assert all(torch.equal(batch, expected) for batch, expected in kept)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (3, 0, 2), (5, 7)])
def test_tensors_of_any_type_are_stacked_into_memory_of_a_worker_process(
    shape, monkeypatch
) -> None:
    made: list[int] = []

    def new_block(shape: tuple[int, ...], dtype: Any) -> Any:
        made.append(1)
        return np.empty(shape, dtype)

    monkeypatch.setattr(batch_rows, "new_block", new_block)
    monkeypatch.setattr(batch_rows, "LARGE_BYTES", 1)
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
