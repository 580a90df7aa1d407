"""Batching helpers: what is put together stays complete, aligned and in order."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.core.samples import (
    Batch,
    CaptioningSample,
    CrudeSample,
    SourceInfo,
    TextSample,
    edataclass,
)
from energon_lite.task_encoder import (
    batch_list,
    batch_pad_stack,
    batch_stack,
    concat_pad,
    generic_batch,
    generic_concat,
    homogeneous_concat_mix,
)

from ..conftest import examples

SOURCE = SourceInfo("set", 0, "a.tar", ("k.txt",))
SERVICE: dict[str, Any] = {
    "__key__": "k",
    "__restore_key__": ("Webdataset", 0),
    "__sources__": (SOURCE,),
}


@st.composite
def shapes_of_one_rank(draw: st.DrawFn, min_dims: int = 1) -> list[tuple[int, ...]]:
    num_dims = draw(st.integers(min_dims, 3))
    shape = st.tuples(*[st.integers(0, 4)] * num_dims)
    return draw(st.lists(shape, min_size=1, max_size=5))


def filled(shape: tuple[int, ...], number: int) -> torch.Tensor:
    """Makes a tensor without a zero, other than that of any other number."""
    size = int(np.prod(shape))
    return torch.arange(1, size + 1).reshape(shape) + 1000 * number


@examples(15)
@given(shapes_of_one_rank(min_dims=0))
def test_pad_stack_keeps_every_tensor_and_is_zero_elsewhere(shapes: list[tuple[int, ...]]) -> None:
    tensors = [filled(shape, i) for i, shape in enumerate(shapes)]
    stacked = batch_pad_stack(tensors)
    expected = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    assert stacked.shape == (len(shapes), *expected)
    assert stacked.dtype == torch.int64
    for row, tensor in zip(stacked, tensors, strict=True):
        assert torch.equal(row[tuple(map(slice, tensor.shape))], tensor)
        assert int((row != 0).sum()) == tensor.numel()


@examples(15)
@given(shapes_of_one_rank())
def test_concat_pad_keeps_every_row_in_order(shapes: list[tuple[int, ...]]) -> None:
    tensors = [filled(shape, i) for i, shape in enumerate(shapes)]
    joined = concat_pad(tensors)
    assert joined.shape[0] == sum(shape[0] for shape in shapes)
    rows = torch.split(joined, [shape[0] for shape in shapes])
    for part, tensor in zip(rows, tensors, strict=True):
        assert torch.equal(part[tuple(map(slice, tensor.shape))], tensor)
        assert int((part != 0).sum()) == tensor.numel()


ONE, TWO = torch.ones(2), torch.ones(2, 2)
TEXT = TextSample(**SERVICE, text="")
PICTURE = CaptioningSample(**SERVICE, image=torch.ones(1), caption="")
OTHER = CaptioningSample(**SERVICE, image=torch.ones(1, 1), caption="")
# The helper, what it gets, the error and its words.
REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    *((helper, values, error, words) for helper in (batch_stack, batch_pad_stack, concat_pad)
      for values, error, words in (
          ([], ValueError, "empty"),
          ([ONE, None], TypeError, "element 1 is a NoneType"),
          ([ONE, TWO], ValueError, r"element 1 has shape \(2, 2\).*\(2,\)"),
      )),
    (batch_stack, [ONE, torch.ones(3)], ValueError,
     r"element 1 has shape \(3,\).*element 0 has \(2,\)"),
    (concat_pad, [torch.tensor(1)], ValueError, "without a dimension"),
    (generic_batch, [PICTURE, OTHER], ValueError, r"field 'image': .*\(1, 1\)"),
    (generic_batch, [{"meta": {"a": 1}}, {"meta": {"b": 1}}], ValueError,
     r"field 'meta': .*missing: \['a'\], extra: \['b'\]"),
    (generic_batch, [PICTURE, TEXT], TypeError,
     "element 1 is a TextSample where element 0 is a Capt"),
    (generic_batch, [{"a": 1}, 2], TypeError, "element 1 is a int where element 0 is a dict"),
    (generic_batch, [], ValueError, "empty"),
    (generic_batch, [{"labels": torch.ones(n, dtype=torch.uint8)} for n in (1, 2)], ValueError,
     r"field 'labels': torch.uint8 cannot hold the padding -100; make it int64"),
    (homogeneous_concat_mix, [generic_batch([TEXT]), {"a": 1}], TypeError, "TextSample, dict"),
]  # fmt: skip


@pytest.mark.parametrize(("helper", "values", "error", "words"), REFUSED)
def test_values_that_cannot_be_put_together_are_named(helper, values, error, words) -> None:
    with pytest.raises(error, match=words):
        helper(values)


def test_tensors_of_one_shape_are_stacked_and_types_are_promoted() -> None:
    assert batch_stack([torch.ones(2), torch.zeros(2)]).tolist() == [[1, 1], [0, 0]]
    stacked = batch_pad_stack([torch.tensor([1]), torch.tensor([0.5, 0.25])])
    assert stacked.tolist() == [[1, 0], [0.5, 0.25]]


def test_generic_batch_of_samples_returns_their_class_with_batched_fields() -> None:
    samples = [
        CaptioningSample(**SERVICE, image=torch.ones(3, size, 1), caption=str(size))
        for size in (1, 3)
    ]
    batch: Any = generic_batch(samples)
    kind: type[Any] = type(batch)
    assert kind is CaptioningSample
    assert batch.image.shape == (2, 3, 3, 1)
    assert batch.caption == ["1", "3"]
    assert batch.__key__ == ["k", "k"]
    assert batch.__restore_key__ == [("Webdataset", 0)] * 2
    assert batch.__sources__ == [(SOURCE,), (SOURCE,)]
    assert batch.__loss_weight__ == [1.0, 1.0]


def test_service_fields_stay_aligned_lists_whatever_they_hold() -> None:
    tags: list[Any] = [{}, {"a": 1}, None]
    samples = [TextSample(**SERVICE, __subflavors__=tag, text="t") for tag in tags]
    assert generic_batch(samples).__subflavors__ == tags
    crude = [CrudeSample(__subflavors__=tag, txt="t") for tag in tags]
    assert generic_batch(crude) == {"__subflavors__": tags, "txt": ["t"] * 3}


def test_generic_batch_goes_into_dicts_dataclasses_and_named_tuples() -> None:
    class Pair(NamedTuple):
        a: torch.Tensor
        b: str

    @dataclasses.dataclass
    class Plain:
        pair: Pair
        mapping: dict[str, Any]
        derived: int = dataclasses.field(init=False, default=3)

    values = [Plain(Pair(torch.ones(n), "b"), {"x": torch.ones(1), "y": n}) for n in (1, 2)]
    batch: Any = generic_batch(values)
    kinds: list[type[Any]] = [type(batch), type(batch.pair)]
    assert kinds == [Plain, Pair]
    assert batch.pair.a.tolist() == [[1, 0], [1, 1]]
    assert batch.pair.b == ["b", "b"]
    assert batch.mapping["x"].shape == (2, 1)
    assert batch.mapping["y"] == [1, 2]


@edataclass
class Labelled(Batch):
    input_ids: torch.Tensor
    labels: torch.Tensor
    token_label_ids: torch.Tensor
    label_mask: torch.Tensor


class Ids(NamedTuple):
    input_ids: torch.Tensor
    labels: torch.Tensor
    token_label_ids: torch.Tensor
    label_mask: torch.Tensor


def nested(**fields: Any) -> Any:
    return {"inner": Ids(**fields)}


@pytest.mark.parametrize("make", [dict, UserDict, Ids, nested])
@pytest.mark.parametrize("is_mix", [False, True])
def test_labels_are_padded_with_what_losses_ignore(make: Any, is_mix: bool) -> None:
    def row(num: int) -> dict[str, torch.Tensor]:
        kinds = (torch.int64, torch.int32, torch.float32, torch.bool)
        shape = (1, num) if is_mix else (num, 2)
        return dict(zip(Ids._fields, (torch.ones(shape, dtype=k) for k in kinds), strict=True))

    rows = [row(2), row(3)]
    batch: Any = (homogeneous_concat_mix if is_mix else generic_batch)([make(**r) for r in rows])
    batch = batch["inner"] if make is nested else batch
    batches = [batch if isinstance(batch, dict) else batch._asdict()]
    if not is_mix:
        own = Labelled.from_samples(rows)
        batches.append({name: getattr(own, name) for name in Ids._fields})
    for found in batches:
        for name, padding in zip(Ids._fields, (0, -100, -100, 0), strict=True):
            assert found[name].dtype == rows[0][name].dtype
            assert found[name][0].flatten().tolist() == [1] * (2 if is_mix else 4) + [padding] * (
                1 if is_mix else 2
            )
            assert found[name][1].flatten().tolist() == [1] * (3 if is_mix else 6)


@pytest.mark.parametrize("values", [[1, 2], ["a", "b"], [None, None], [(1,), (2, 3)], [[1], []]])
def test_generic_batch_leaves_other_values_a_list(values: list[Any]) -> None:
    assert generic_batch(values) == values
    assert batch_list(values) is values
    arrays = [np.zeros(2), np.zeros(2)]
    assert generic_batch(arrays) is arrays


def test_a_class_with_from_samples_makes_its_own_batch() -> None:
    @edataclass
    class Own(Batch):
        text: list[str]

    samples = [TextSample(**SERVICE, text=text) for text in "ab"]
    own = Own.from_samples(samples)
    assert generic_batch([own, own]).text == [["a", "b"], ["a", "b"]]


def test_generic_concat_concatenates_tensors_and_nests_lists() -> None:
    batches = [
        generic_batch([CaptioningSample(**SERVICE, image=torch.ones(3, size, 1), caption="c")] * 2)
        for size in (1, 2)
    ]
    mixed = homogeneous_concat_mix(batches)
    assert mixed.image.shape == (4, 3, 2, 1)
    assert mixed.image.sum() == 2 * 3 + 2 * 6
    assert mixed.caption == [["c", "c"], ["c", "c"]]
    assert mixed.__key__ == [["k", "k"], ["k", "k"]]
    assert generic_concat([{"t": torch.ones(1)}, {"t": torch.ones(2)}])["t"].shape == (3,)
