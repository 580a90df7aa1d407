"""Batches of packs that are written at once equal those made of single packs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import PackedBatch, Packing, pack_samples
from energon_lite.core.stacking import layout_of
from energon_lite.stages.packed_sample import PackColumns

from ..conftest import examples
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
