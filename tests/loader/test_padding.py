"""The mask of a batch, and batches of which no row is valid, for every form of a batch."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from energon_lite import Batch, PackedBatch, Sample, TextSample, edataclass
from energon_lite.loader.ends import as_padding, mark_valid


@edataclass
class OwnValid(Batch):
    """A batch that has a field of that name."""

    valid: torch.Tensor


@dataclasses.dataclass
class Plain:
    """A class of the user's."""

    ids: torch.Tensor
    loss_weight: torch.Tensor


@dataclasses.dataclass(frozen=True)
class PlainFrozen:
    """The same, frozen."""

    ids: torch.Tensor


IDS = torch.arange(6).reshape(3, 2)
SERVICE: dict[str, Any] = {"__key__": ["a", "b"], "__restore_key__": ("batch", 0, ("s", 0, 1, 1))}


def whole(item: Any) -> str:
    """All fields, of which the `repr` of a batch shows the shapes only."""
    return repr(dataclasses.asdict(item) if dataclasses.is_dataclass(item) else item)


def packed() -> PackedBatch:
    fields = {field.name: IDS for field in dataclasses.fields(PackedBatch)}
    fields.update(SERVICE, __loss_weight__=None, loss_weights=torch.ones(3, 2), max_seqlen=2)
    return PackedBatch(**fields)


@pytest.mark.parametrize(
    ("item", "shape"),
    [
        ({"ids": IDS, "label": torch.tensor(1)}, (3,)),
        ({"ids": IDS, "__key__": ["a", "b"]}, (3,)),
        ({"ids": IDS, "images": torch.zeros(7, 1), "__key__": ["a", "b"]}, ()),
        ({"text": ["x", "y"], "__key__": ["a", "b"]}, (2,)),
        ({"text": ["x", "y"]}, ()),
        ({}, ()),
        (UserDict(ids=IDS), (3,)),
        (SimpleNamespace(ids=IDS), (3,)),
        (Plain(IDS, torch.ones(3)), (3,)),
        (PlainFrozen(IDS), (3,)),
        (Batch(**SERVICE), (2,)),
        (packed(), (2,)),
        (TextSample(__key__="a", __restore_key__=("s", 0, 1, 1), text="x"), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_batch_carries_a_mask_and_padding_is_a_copy_without_valid_rows(item, shape) -> None:
    assert mark_valid(item)
    before = copy.copy(item)
    padding = as_padding(item)
    assert type(padding) is type(item)
    for one, is_valid in ((item, True), (padding, False)):
        valid = one["valid"] if hasattr(one, "keys") else one.valid
        assert valid.dtype == torch.bool
        assert valid.shape == shape
        assert bool(valid.all()) is bool(valid.any()) is is_valid
    assert whole(item) == whole(before)
    ids = padding.get("ids") if hasattr(padding, "keys") else getattr(padding, "ids", None)
    assert ids is None or ids is IDS


def test_padding_has_no_loss_weight_where_a_batch_has_one() -> None:
    batch = Batch(**SERVICE, __loss_weight__=[2.0, 3.0])
    assert as_padding(batch).loss_weight.tolist() == [0, 0]
    assert as_padding(Batch(**SERVICE)).loss_weight.tolist() == [0, 0]
    assert as_padding(Sample(__key__="a", __restore_key__=("s",))).loss_weight == 0
    assert not as_padding(packed()).loss_weights.any()
    plain = Plain(IDS, torch.ones(3))
    assert mark_valid(plain)
    assert not as_padding(plain).loss_weight.any()
    weighted = {"ids": IDS, "loss_weight": torch.ones(3), "loss_weights": [1.0, 2.0]}
    assert mark_valid(weighted)
    padding = as_padding(weighted)
    assert not padding["loss_weight"].any()
    assert padding["loss_weights"] == [0.0, 0.0]
    assert batch.loss_weight.tolist() == [2, 3]


@pytest.mark.parametrize(
    "item",
    [
        (IDS,),
        namedtuple("Pair", "a b")(IDS, IDS),
        IDS,
        [IDS],
        "text",
        None,
        {"valid": torch.ones(3)},
        SimpleNamespace(valid=1),
        OwnValid(**SERVICE, valid=torch.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_batch_without_a_place_for_a_mask_is_left_alone(item) -> None:
    before = whole(item)
    assert not mark_valid(item)
    assert whole(item) == before
