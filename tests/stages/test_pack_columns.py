"""Batches of packs that are written at once equal those made of single packs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    DefaultTaskEncoder,
    FatalSampleError,
    PackedBatch,
    PackedSample,
    Packing,
    SkipSample,
    TaskEncoder,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    pack_samples,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.stacking import layout_of
from energon_lite.core.topology import Stream
from energon_lite.sources.reading import ReadCursor
from energon_lite.stages.map import MapCursor
from energon_lite.stages.packed_sample import PackColumns
from energon_lite.stages.packing_stage import _MemberCursor
from energon_lite.stages.planned import PlanCursor
from energon_lite.task_encoder.base import AugmentTaskEncoder

from ..conftest import examples
from ..helpers import (
    assert_same,
    broken_sets,
    ignore,
    metadataset,
    number_of,
    take_singly,
    through_json,
)
from .test_packed_sample import encoded


def fields_of(item: Any) -> Any:
    """All fields, also the hidden one; of tensors type and values."""
    values = {name: getattr(item, name) for name in layout_of(type(item))[1]}
    return type(item).__name__, {
        name: (str(value.dtype), value.shape, value.tolist())
        if isinstance(value, torch.Tensor)
        else repr(value)
        for name, value in values.items()
    }


@st.composite
def packs(draw: Any) -> Any:
    """Lists of samples, some of which cannot be packed."""
    found = draw(st.lists(st.lists(encoded(), min_size=1, max_size=4), min_size=1, max_size=4))
    if draw(st.integers(0, 4)) == 0:
        own = draw(st.sampled_from(found))
        own[-1] = draw(
            st.sampled_from(
                [
                    {"__key__": "no ids"}, {"input_ids": []}, {"input_ids": torch.ones(2, 2)},
                    {"input_ids": np.zeros(0, np.int64)}, {"input_ids": [1, 2], "labels": [1]},
                    {"input_ids": torch.ones(40)}, {"input_ids": [1], "loss_mask": [1, 1]},
                    {"input_ids": [[1], [1, 2]]},
                ]
            )
        )  # fmt: skip
    if draw(st.booleans()):
        for sample in (sample for own in found for sample in own if isinstance(sample, dict)):
            sample["images"] = [torch.full((3, 2, 2), n) for n in range(draw(st.integers(0, 2)))]
            sample["__sources__"] = (sample["__key__"],) if "__key__" in sample else None
    return found


@examples(100)
@given(
    packs=packs(),
    settings=st.fixed_dictionaries(
        {},
        optional={
            "labels_are_shifted": st.booleans(),
            "align": st.sampled_from([1, 4]),
            "loss": st.sampled_from(["sample", "sqrt", lambda n: 1 / (n - 3)]),
            "layout": st.sampled_from(["padded", "thd"]),
            "pad_to_capacity": st.booleans(),
            "pad_id": st.just(7),
            "ignore_index": st.just(-5),
            "overlong": st.just("alone"),
        },
    ),
)
def test_batch_written_at_once_is_that_of_its_packs(packs: list[Any], settings: Any) -> None:
    packing = Packing(capacity=36, **settings)
    made, errors = [], []
    for own in packs:
        try:
            made.append(pack_samples(own, packing))
        except Exception as error:
            errors.append(type(error))
    if errors:
        # Where several packs cannot be made, any of them may be found first.
        with pytest.raises(tuple(errors)):
            PackColumns(packs, packing)
        return
    expected = PackedBatch.from_packs(made, packing)
    columns = PackColumns(packs, packing)
    found = columns.batch()
    found.__restore_key__ = expected.__restore_key__
    assert fields_of(found) == fields_of(expected)
    assert all(value.is_contiguous() for value in vars(found).values() if torch.is_tensor(value))
    assert [fields_of(p) for p in columns.samples()] == [
        fields_of(pack_samples(own, packing)) for own in packs
    ]


class Encoder(DefaultTaskEncoder):
    """Texts are tokens; a hook may fail, skip, or draw."""

    fails, draws, packing = 0, False, Packing(capacity=64)

    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        if self.fails and number_of(sample) % self.fails == 1:
            raise SkipSample if number_of(sample) % 4 else ValueError("broken")
        return sample

    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)

    @stateless
    def postencode_sample(self, sample: TextSample) -> dict[str, Any]:
        if self.fails and number_of(sample) % self.fails == 2:
            raise SkipSample if number_of(sample) % 4 else ValueError("late")
        ids = np.frombuffer(sample.text.encode(), np.uint8)
        return {"__key__": sample.__key__, "input_ids": ids}

    def slice_sample(self, sample: Any, start: int, stop: int) -> Any:
        cut = {n: sample[n][start:stop] for n in ("input_ids", "loss_mask") if n in sample}
        return {**sample, **cut}


class Drawing(Encoder):
    """Hooks that are not marked, and draw from the global generators."""

    def encode_sample(self, sample: TextSample) -> Any:
        sample.__subflavors__ = {"drawn": random.random()}
        return super().encode_sample(sample)

    def postencode_sample(self, sample: TextSample) -> dict[str, Any]:
        made = super().postencode_sample(sample)
        key = f"{sample.__key__} {sample.__subflavors__}"
        return {**made, "__key__": key, "loss_mask": torch.rand(len(sample.text))}


class OwnPacks(Encoder):
    """Another packer, which fails for some packs; the batches are the library's."""

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> PackedSample:
        if self.fails and len(samples) == self.fails:
            raise ValueError("packs of this size fail")
        return super().pack_selected_samples(samples[::-1])


class OwnBatches(Encoder):
    @stateless
    def batch(self, samples: list[PackedSample]) -> PackedBatch:
        assert type(samples) is list
        return super().batch(samples)


class Augmented(AugmentTaskEncoder[Any, Any, Any, Any]):
    @stateless
    def encode_batch(self, batch: PackedBatch) -> PackedBatch:
        batch.max_seqlen += 1
        return batch


ENCODERS: list[Any] = [
    Encoder, Encoder, Drawing, OwnPacks, OwnBatches, lambda: Augmented(Encoder()),
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources that were measured before some of the samples broke."""
    return broken_sets(tmp_path_factory.mktemp("pack_columns"), Encoder())


@examples(10)
@given(
    encoder=st.sampled_from(ENCODERS),
    fails=st.sampled_from([0, 0, 3, 4, 7]),
    batch_size=st.integers(1, 4),
    num_sources=st.integers(1, 2),
    repeat=st.booleans(),
    choices=st.fixed_dictionaries(
        {"capacity": st.sampled_from([16, 40, 64])},
        optional={
            "lengths": st.just("index"),
            "max_samples": st.integers(1, 4),
            "overlong": st.sampled_from(["split", "alone", "drop", "truncate"]),
            "layout": st.just("thd"),
            "loss": st.just("sample"),
            "align": st.just(4),
        },
    ),
)
def test_batches_of_packs_equal_those_made_one_by_one(
    root: Path, encoder: Any, fails: int, batch_size: int, num_sources: int, repeat: bool,
    choices: Any,
) -> None:  # fmt: skip
    """With their states, what was counted, and samples that fail when they are read or encoded."""
    if encoder is Drawing:
        choices = {**choices, "lengths": "index"}  # others must be repeatable
    own = encoder()
    changed = own._task_encoder if isinstance(own, Augmented) else own
    changed.fails = fails
    own.packing = changed.packing = Packing(**{"overlong": "alone", **choices})
    entries = [{"path": str(root / "a"), "loss_weight": 2}, {"path": str(root / "b")}]
    split = {"blend" if repeat else "concat": entries[:num_sources]}
    dataset = get_train_dataset(
        metadataset(split), task_encoder=own, batch_size=batch_size, shuffle_buffer_size=20,
        repeat=repeat, worker_config=WorkerConfig(
            rank=0, world_size=1, num_workers=0, num_streams=2, global_error_handler=ignore,
        ),
    )  # fmt: skip

    def run_of(stream: Stream) -> list[Any]:
        run, found = StreamRun(dataset, stream, max_skip_rate=1), []
        for _ in range(12):
            try:
                batch = next(run)
            except (StopIteration, FatalSampleError) as error:  # too many failures in a row
                return [*found, type(error)]
            costs = sorted(run.context.take_costs())
            state = through_json(run.snapshot().to_json())
            for name in ("failures", "last_failure"):  # depend on the order of failures in a batch
                state.get("fields", state).pop(name, None)
            records = sorted(map(str, run.context.take_records()))
            counts = [(name, draws, *rest) for name, draws, _, _, *rest in costs]
            found.append((fields_of(batch), run.key, state, counts, records))
        return found

    found = [run_of(Stream(index, 2)) for index in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskEncoder, "_takes_columns", property(lambda self: False))
        take_singly(patch, PlanCursor, ReadCursor, MapCursor, _MemberCursor)
        assert_same([run_of(Stream(index, 2)) for index in range(2)], found)


@pytest.mark.parametrize("lengths", [None, "index"])
def test_packs_are_written_into_their_batch_at_once(root, lengths, monkeypatch) -> None:
    batch, made = PackColumns.batch, []
    monkeypatch.setattr(PackColumns, "batch", lambda self: made.append(1) or batch(self))
    encoder = Encoder()
    encoder.packing = Packing(capacity=64, lengths=lengths)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)
    loader = get_savable_loader(
        get_train_dataset(root / "b", task_encoder=encoder, batch_size=2, worker_config=config)
    )
    for _, found in zip(range(20), loader, strict=False):
        key = found.__restore_key__
        assert fields_of(loader.restore_sample(key)) == fields_of(found)
    assert len(made) == 20
