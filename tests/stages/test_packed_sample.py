"""What is in a pack and in a batch of packs, token by token."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    FatalSampleError,
    PackedBatch,
    Packing,
    Sample,
    edataclass,
    generic_batch,
    pack_samples,
)
from energon_lite.core.samples import SourceInfo, field_of
from energon_lite.loss.means import token_weight
from energon_lite.stages.packed_sample import LOSS_MASKS, PackColumns, slice_sample

from ..conftest import examples


@edataclass
class Encoded(Sample):
    input_ids: Any
    labels: Any = None
    loss_mask: Any = None
    images: Any = None


def sample(key: str, ids: Any, **fields: Any) -> Encoded:
    source = SourceInfo("folder", 0, "a.tar", (f"{key}.txt",))
    return Encoded(
        __key__=key,
        __restore_key__=("a", 0, 0, 0),
        __sources__=(source,),
        input_ids=torch.tensor(ids),
        **fields,
    )


def three(**fields: Any) -> list[Encoded]:
    return [
        sample("a", [11, 12, 13], **fields),
        sample("b", [21], **fields),
        sample("c", [31, 32], **fields),
    ]


def ids(**fields: Any) -> dict[str, Any]:
    return {"__key__": "a", "input_ids": [5, 6, 7], **fields}


def lists(value: Any) -> dict[str, Any]:
    names = ("input_ids", "labels", "position_ids", "segment_ids", "cu_seqlens")
    return {name: getattr(value, name).tolist() for name in names}


def test_pack_of_three_samples() -> None:
    pack = pack_samples(three(), Packing(capacity=8))
    assert lists(pack) == {
        "input_ids": [11, 12, 13, 21, 31, 32],
        "labels": [-100, 12, 13, -100, -100, 32],
        "position_ids": [0, 1, 2, 0, 0, 1],
        "segment_ids": [1, 1, 1, 2, 3, 3],
        "cu_seqlens": [0, 3, 4, 6],
    }
    assert pack.loss_weights.tolist() == [0, 1, 1, 0, 0, 1]
    assert pack.cu_seqlens.dtype == pack.cu_seqlens_padded.dtype == torch.int32
    assert pack.cu_seqlens_padded.tolist() == [0, 3, 4, 6]
    assert pack.max_seqlen == 3
    assert pack.__keys__ == ["a", "b", "c"]
    assert pack.__key__ == "a,b,c"
    assert [own[0].file_names for own in pack.__sources__ or ()] == [
        ("a.txt",), ("b.txt",), ("c.txt",),
    ]  # fmt: skip
    assert pack.__subflavors__ == [None] * 3
    assert pack.images == []
    assert pack.image_segments.tolist() == []


def test_aligned_samples_start_at_multiples_and_know_both_boundaries() -> None:
    pack = pack_samples(three(), Packing(capacity=16, align=4, pad_id=9))
    assert lists(pack) == {
        "input_ids": [11, 12, 13, 9, 21, 9, 9, 9, 31, 32, 9, 9],
        "labels": [-100, 12, 13, -100, -100, -100, -100, -100, -100, 32, -100, -100],
        "position_ids": [0, 1, 2, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        "segment_ids": [1, 1, 1, 0, 2, 0, 0, 0, 3, 3, 0, 0],
        "cu_seqlens": [0, 3, 4, 6],
    }
    assert pack.cu_seqlens_padded.tolist() == [0, 4, 8, 12]
    assert pack.max_seqlen == 4


@pytest.mark.parametrize(
    "images",
    [
        {"images": [torch.ones(3, 2, 2), torch.ones(3, 4, 4)]},
        {"images": torch.ones(2, 3, 2, 2)},
        {"pixel_values": torch.ones(2, 3, 2, 2)},
    ],
)
def test_images_keep_their_order_and_know_their_segment(images) -> None:
    ids = torch.tensor([1, 2])
    one = {"input_ids": ids, "image": torch.zeros(3, 5, 5)}
    samples = [{"input_ids": ids}, {"input_ids": ids, **images}, one]
    pack = pack_samples(samples, Packing(8))
    assert [int(image.sum() > 0) for image in pack.images] == [1, 1, 0]
    assert pack.image_segments.tolist() == [2, 2, 3]
    batch = PackedBatch.from_packs([pack, pack])
    for made in (batch, PackColumns([samples, samples], Packing(8)).batch()):
        assert made.image_segments.tolist() == [[0, 2], [0, 2], [0, 3], [1, 2], [1, 2], [1, 3]]
    flat = PackedBatch.from_packs([pack, pack], Packing(8, layout="thd"))
    assert flat.image_segments.tolist() == [[0, 2], [0, 2], [0, 3], [0, 5], [0, 5], [0, 6]]
    assert len(flat.images) == 6


def test_batch_has_a_row_for_each_pack_padded_to_the_capacity() -> None:
    packing = Packing(capacity=8, pad_id=7)
    packs = [pack_samples(three(), packing), pack_samples([sample("d", [41, 42])], packing)]
    batch = PackedBatch.from_packs(packs, packing)
    assert lists(batch) == {
        "input_ids": [[11, 12, 13, 21, 31, 32, 7, 7], [41, 42, 7, 7, 7, 7, 7, 7]],
        "labels": [[-100, 12, 13, -100, -100, 32, -100, -100], [-100, 42] + [-100] * 6],
        "position_ids": [[0, 1, 2, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]],
        "segment_ids": [[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]],
        "cu_seqlens": [[0, 3, 4, 6], [0, 2, 2, 2]],
    }
    assert batch.loss_weights.tolist() == [[0, 1, 1, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.__key__ == ["a", "b", "c", "d"]
    assert batch.efficiency == 0.5
    assert batch.max_seqlen == 3
    assert batch.loss_weight.tolist() == [1.0] * 4  # one per sample, beside one per token
    short = PackedBatch.from_packs(packs, Packing(capacity=8, pad_to_capacity=False))
    assert short.input_ids.shape == (2, 6)
    assert generic_batch(packs).input_ids.shape == (2, 6)


def test_flat_batch_has_all_packs_in_one_row() -> None:
    packing = Packing(capacity=8, layout="thd")
    packs = [pack_samples(three(), packing), pack_samples([sample("d", [41, 42])], packing)]
    batch = PackedBatch.from_packs(packs, packing)
    assert lists(batch) == {
        "input_ids": [[11, 12, 13, 21, 31, 32, 41, 42]],
        "labels": [[-100, 12, 13, -100, -100, 32, -100, 42]],
        "position_ids": [[0, 1, 2, 0, 0, 1, 0, 1]],
        "segment_ids": [[1, 1, 1, 2, 3, 3, 4, 4]],
        "cu_seqlens": [[0, 3, 4, 6, 8]],
    }
    fixed = PackedBatch.from_packs(packs, Packing(8, layout="thd", pad_to_capacity=True))
    assert fixed.input_ids.shape == (1, 16)
    assert fixed.segment_ids[0, 8:].tolist() == [0] * 8


def test_flat_batch_of_aligned_packs_counts_both_boundaries_on() -> None:
    packing = Packing(capacity=16, layout="thd", align=4)
    packs = [pack_samples(three(), packing), pack_samples(three(), packing)]
    batch = PackedBatch.from_packs(packs, packing)
    assert batch.cu_seqlens.tolist() == [[0, 3, 4, 6, 9, 10, 12]]
    assert batch.cu_seqlens_padded.tolist() == [[0, 4, 8, 12, 16, 20, 24]]
    starts = batch.cu_seqlens_padded[0, :-1].long()
    assert batch.input_ids[0, starts].tolist() == [11, 21, 31] * 2
    assert batch.segment_ids[0, starts].tolist() == [1, 2, 3, 4, 5, 6]


def test_pack_above_its_capacity_names_the_longest_sample() -> None:
    with pytest.raises(FatalSampleError, match=r"'a'.*3 samples of 6 tokens.*pack of 5.*has 3"):
        pack_samples(three(), Packing(capacity=5))
    with pytest.raises(FatalSampleError, match="3 samples of 6 tokens"):
        pack_samples(three(), Packing(capacity=5, overlong="alone"))
    long = [sample("a", list(range(9)))]
    assert len(pack_samples(long, Packing(capacity=5, overlong="alone")).input_ids) == 9


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"__key__": "a", "tokens": [1]}, r"'a': dict has no input_ids"),
        ({"__key__": "a", "input_ids": []}, "'a': it has no input_ids"),
        ({"__key__": "a", "input_ids": [[1, 2]]}, r"'a': input_ids has shape \(1, 2\)"),
        ({"__key__": "a", "input_ids": torch.ones(1, 2)}, r"'a': input_ids has shape \(1, 2\)"),
        ({"__key__": "a", "input_ids": torch.tensor(1)}, r"'a': input_ids has shape \(\)"),
        ({"__key__": "a", "input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
        ({"__key__": "a", "input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids and 1 loss_mask"),
        *(
            (
                {"__key__": "a", "input_ids": make(ids)},
                f"'a': input_ids is {kind}; make it integers",
            )
            for ids, kind in (([1.5, 2.0], r"float\d+"), ([True, False], "bool"))
            for make in (list, np.array, torch.tensor)
        ),
        (ids(labels=[0.5, 1.0, 2.0]), "'a': labels is float64; make it integers"),
        (
            ids(labels=[5, -1, 7]),
            r"'a': label -1 at token 1 is neither a token nor ignore_index=-100",
        ),
        (ids(input_ids=[5, -200, 7]), "'a': label -200 at token 1 is neither a token"),
        (ids(attention_mask=[1, 1, 0]), "'a': attention_mask has zeros. .* padding=False"),
        (ids(attention_mask=torch.ones(3, 3)), r"'a': attention_mask has shape \(3, 3\)"),
        (ids(assistant_masks=[1]), "3 input_ids and 1 assistant_masks"),
        (ids(position_ids=[0.0, 1.0, 2.0]), r"position_ids has shape \(3,\) and type torch.float"),
        (ids(position_ids=torch.ones(3, 2)), r"position_ids has shape \(3, 2\)"),
        (ids(position_ids=torch.tensor(3)), r"position_ids has shape \(\)"),
        (ids(segment_ids=[1, 1, 1]), "it has a field 'segment_ids', which packs make: rename it"),
        (ids(to="cpu"), "it has a field 'to', which packs make"),
        (ids(images=[], image=torch.ones(3, 2, 2)), "it has images and image; keep those that"),
    ],
)
def test_sample_that_cannot_be_packed_is_named(value, text) -> None:
    with pytest.raises(FatalSampleError, match=text):
        pack_samples([value], Packing(capacity=8))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pack_samples([], Packing(8)), "there is no sample"),
        (lambda: PackedBatch.from_packs([]), "there is no pack"),
        *(
            (
                lambda loss=loss: pack_samples(three(), Packing(8, loss=lambda n: loss)),
                "the loss function returned .* for 2 tokens",
            )
            for loss in (-1.0, float("nan"))
        ),
    ],
)
def test_what_makes_no_pack_is_refused(call, text) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("name", LOSS_MASKS)
@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_answer_masks_of_any_name_multiply_the_loss_weights(name, make) -> None:
    samples = [ids(**{name: make([0, 1, 0])}), ids(), ids(**{name: make([1, 1, 1])})]
    pack = pack_samples(samples, Packing(12))
    assert pack.loss_weights.tolist() == [0, 1, 0, 0, 1, 1, 0, 1, 1]
    assert pack.labels.tolist() == [-100, 6, -100, -100, 6, 7, -100, 6, 7]
    other = "loss_mask" if name != "loss_mask" else "loss_weights"
    both = pack_samples([ids(**{other: [0, 1, 0.5], name: make([0, 0, 1])})], Packing(12))
    assert both.loss_weights.tolist() == [0, 0, 0.5]


def test_labels_below_0_may_be_where_nothing_counts() -> None:
    sample = ids(labels=[-1, -1, 7], loss_mask=[1, 0, 1])
    assert pack_samples([sample], Packing(12)).labels.tolist() == [-100, -100, 7]
    assert pack_samples([ids(labels=[5, -1, 7])], Packing(12, ignore_index=-1)).labels[1] == -1


class Fields(NamedTuple):
    """Samples of every further kind of field; the last one has none of them."""

    input_ids: Any
    token_type_ids: Any = None
    scores: Any = None
    embeddings: Any = None
    position_ids: Any = None
    image_grid_thw: Any = None
    text: Any = None
    boxes: Any = None
    attention_mask: Any = None


def further(num: int, rows: int) -> Fields:
    ids = torch.arange(num) + 10 * num
    positions = torch.arange(num) + 5
    return Fields(
        ids, [1] * num, np.full(num, 0.5, np.float32), torch.full((num, 2), num),
        positions if rows == 1 else torch.stack([positions] * rows), [[1, 2, num]] * 2,
        f"text {num}", torch.ones(num + 1, 4), torch.ones(num, dtype=torch.int64),
    )  # fmt: skip


AS: dict[str, Any] = {
    "dict": Fields._asdict,
    "UserDict": lambda fields: UserDict(fields._asdict()),
    "NamedTuple": lambda fields: fields,
    "attributes": lambda fields: SimpleNamespace(**fields._asdict()),
}


@pytest.mark.parametrize("kind", AS)
@pytest.mark.parametrize(("settings", "rows"), [({}, 1), ({"layout": "thd"}, 3), ({"align": 4}, 3)])
def test_every_field_of_a_sample_is_in_its_pack(kind, settings, rows) -> None:
    packing = Packing(16, **settings)
    packs = [[further(2, rows), further(3, rows)], [Fields(torch.tensor([7])), further(5, rows)]]
    samples = [[AS[kind](sample) for sample in pack] for pack in packs]
    made = [pack_samples(pack, packing) for pack in samples]
    for batch in (PackColumns(samples, packing).batch(), PackedBatch.from_packs(made, packing)):
        is_token = batch.segment_ids > 0
        assert batch.token_type_ids[is_token].tolist() == [1] * 5 + [0] + [1] * 5
        assert batch.scores[is_token].tolist() == [0.5] * 5 + [0] + [0.5] * 5
        assert batch.scores.dtype == torch.float32
        assert batch.embeddings.shape == (*batch.input_ids.shape, 2)
        assert batch.embeddings[is_token][:, 1].tolist() == [2, 2, 3, 3, 3, 0] + [5] * 5
        assert not batch.embeddings[~is_token].any()
        positions = batch.position_ids if rows == 1 else batch.position_ids[2]
        assert batch.position_ids.shape[:-2] == (() if rows == 1 else (3,))
        assert positions[is_token].tolist() == [5, 6, 5, 6, 7, 0, 5, 6, 7, 8, 9]
        assert batch.image_grid_thw.tolist() == [[1, 2, n] for n in (2, 2, 3, 3, 5, 5)]
        assert batch.text == ["text 2", "text 3", None, "text 5"]
        assert [None if b is None else len(b) for b in batch.boxes] == [3, 4, None, 6]
        assert not hasattr(batch, "attention_mask")
    for pack, own in zip(made, packs, strict=True):
        assert pack.text == [sample.text for sample in own]
        assert pack.token_type_ids.shape == pack.input_ids.shape


def test_rows_of_patches_are_split_into_images() -> None:
    grid = torch.tensor([[1, 2, 2], [1, 2, 4]])
    patches = torch.arange(12.0)[:, None]
    sample = ids(pixel_values=patches, image_grid_thw=grid)
    batch = PackColumns([[ids(), sample], [sample]], Packing(8)).batch()
    assert [len(image) for image in batch.images] == [4, 8, 4, 8]
    assert torch.equal(torch.cat(batch.images), torch.cat([patches, patches]))
    assert batch.image_segments.tolist() == [[0, 2], [0, 2], [1, 1], [1, 1]]


@pytest.mark.parametrize("kind", ["dict", "UserDict", "NamedTuple"])
def test_a_part_has_its_entries_of_all_fields(kind) -> None:
    sample = further(5, 1)._replace(image_grid_thw=None)
    part = slice_sample(AS[kind](sample), 2, 4)
    assert [len(field_of(part, name)) for name in Fields._fields[:4]] == [2] * 4
    assert field_of(part, "position_ids").tolist() == [0, 1]  # it is a sample of its own
    assert field_of(part, "text") == "text 5"
    assert len(field_of(part, "boxes")) == 6


def alone(sample: Any, packing: Packing) -> tuple[list[int], list[int], list[float]]:
    """Tokens, labels and loss weights of one sample, one token after the other."""
    names = ("input_ids", "labels", "loss_mask", "__loss_weight__")
    fields = {name: field_of(sample, name) for name in names}
    ids = [int(token) for token in fields["input_ids"]]
    labels = fields["labels"]
    if labels is None:
        labels = [*ids[1:], packing.ignore_index] if packing.labels_are_shifted else ids
    labels = [int(label) for label in labels]
    if not packing.labels_are_shifted:
        labels[0] = packing.ignore_index
    mask = fields["loss_mask"]
    weights = [float(label != packing.ignore_index) for label in labels]
    weights = [
        w * (1 if mask is None else float(m)) for w, m in zip(weights, mask or labels, strict=True)
    ]
    own = 1.0 if fields["__loss_weight__"] is None else float(fields["__loss_weight__"])
    per_token = own * token_weight(packing.loss, sum(w != 0 for w in weights))
    weights = [w * per_token for w in weights]
    counted = [
        label if w else packing.ignore_index for label, w in zip(labels, weights, strict=True)
    ]
    return ids, counted, weights


class Named(NamedTuple):
    input_ids: Any


@st.composite
def encoded(draw: Any) -> Any:
    num = draw(st.integers(1, 6))
    numbers = st.lists(st.integers(0, 300), min_size=num, max_size=num)
    make = draw(st.sampled_from([list, np.array, lambda v: np.array(v, np.int32), torch.tensor]))
    fields: dict[str, Any] = {"__key__": "a", "input_ids": make(draw(numbers))}
    if draw(st.booleans()):
        ignored = st.sampled_from([-5, 7, 8, 300])
        fields["labels"] = draw(st.lists(ignored, min_size=num, max_size=num))
    if draw(st.integers(0, 3)) == 0:
        fields["loss_mask"] = draw(st.lists(st.booleans(), min_size=num, max_size=num))
    if draw(st.integers(0, 3)) == 0:
        fields["__loss_weight__"] = draw(st.sampled_from([0.0, 0.5, 2.0]))
    if set(fields) == {"__key__", "input_ids"} and draw(st.integers(0, 3)) == 0:
        return Named(fields["input_ids"])
    return fields if draw(st.booleans()) else Encoded(__restore_key__=(), **fields)


@examples(100)
@given(
    samples=st.lists(encoded(), min_size=1, max_size=5),
    is_shifted=st.booleans(),
    align=st.sampled_from([1, 4]),
    loss=st.sampled_from(["token", "sample", "sqrt", lambda n: 10.0 * n]),
)
def test_a_pack_has_of_each_sample_what_it_has_alone(
    samples: list[Any], is_shifted: bool, align: int, loss: Any
) -> None:
    packing = Packing(
        capacity=64, align=align, loss=loss, labels_are_shifted=is_shifted, pad_id=7,
        ignore_index=-5,
    )  # fmt: skip
    rows: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    before = repr(samples)
    for own in samples:
        ids, labels, weights = alone(own, packing)
        missing = -len(ids) % align
        rows[0].extend([*ids, *[7] * missing])
        rows[1].extend([*labels, *[-5] * missing])
        rows[2].extend([*weights, *[0.0] * missing])
    pack = pack_samples(samples, packing)
    assert pack.input_ids.tolist() == rows[0]
    assert pack.labels.tolist() == rows[1]
    np.testing.assert_allclose(pack.loss_weights.numpy(), np.array(rows[2], np.float32))
    assert pack.input_ids.dtype == pack.labels.dtype == torch.int64
    assert pack.__keys__ == ["" if isinstance(own, Named) else "a" for own in samples]
    assert repr(samples) == before
