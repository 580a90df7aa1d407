"""Samples and batches have Energon's four fields; the loss weight travels with them unseen."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass

import pytest
import torch

from energon_lite import Batch, Sample, TextSample, edataclass, generic_batch
from energon_lite.core.stacking import constructor_names
from energon_lite.task_encoder.base import as_type

FOUR = ["__key__", "__restore_key__", "__subflavors__", "__sources__"]


@edataclass
class Slotted(TextSample):
    number: int = 0


@edataclass
class Deeper(Slotted):
    more: str = ""


@dataclass
class Plain(TextSample):
    number: int = 0

    def __post_init__(self):
        self.text = self.text.strip() if isinstance(self.text, str) else self.text


class Undecorated(Slotted):
    pass


@edataclass
class TextBatch(Batch):
    text: list[str]


@dataclass
class PlainBatch(Batch):
    text: list[str] = dataclasses.field(default_factory=list)


SAMPLES = [TextSample, Slotted, Deeper, Plain, Undecorated]
BATCHES = [TextBatch, PlainBatch]


def sample_of(kind, **more):
    return kind(__key__="k", __restore_key__=("s", 0), text="t", **more)


def test_fields_and_asdict_see_the_fields_of_energon():
    assert [field.name for field in dataclasses.fields(Sample)] == FOUR
    assert [field.name for field in dataclasses.fields(Batch)] == FOUR
    for kind in SAMPLES:
        sample = sample_of(kind, __loss_weight__=0.5)
        assert [field.name for field in dataclasses.fields(kind)][:5] == [*FOUR, "text"]
        assert list(dataclasses.asdict(sample))[:5] == [*FOUR, "text"]
        assert "loss_weight" not in repr(sample)
        assert "__loss_weight__" in constructor_names(kind)
        for text in (dataclasses.fields(kind), dataclasses.asdict(sample)):
            assert "loss_weight" not in str(text)


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_weight_of_a_sample_is_kept(kind):
    sample = sample_of(kind, __loss_weight__=0.5)
    same = [
        copy.copy(sample),
        copy.deepcopy(sample),
        pickle.loads(pickle.dumps(sample)),
        dataclasses.replace(sample, text="other"),
        kind.derive_from(sample, text="other"),
        kind.extend(sample),
    ]
    assert [one.__loss_weight__ for one in same] == [0.5] * 6
    assert sample.loss_weight == torch.tensor(0.5)
    sample.__loss_weight__ = 0.25
    assert float(sample.loss_weight) == 0.25
    assert sample_of(kind).__loss_weight__ == 1.0
    assert sample_of(kind) == sample_of(kind)
    batch = generic_batch([sample, sample_of(kind)])
    assert type(batch) is kind
    assert batch.loss_weight.tolist() == [0.25, 1.0]


@pytest.mark.parametrize("kind", BATCHES)
def test_the_weights_of_a_batch_are_kept(kind):
    batch = kind.from_samples([sample_of(Slotted, __loss_weight__=w) for w in (0.5, 2.0)])
    others = [
        copy.copy(batch),
        pickle.loads(pickle.dumps(batch)),
        dataclasses.replace(batch, text=["x", "y"]),
        kind.derive_from(batch, text=["x", "y"]),
        kind.extend(batch),
    ]
    assert [other.loss_weight.tolist() for other in others] == [[0.5, 2.0]] * 5
    assert [field.name for field in dataclasses.fields(kind)] == [*FOUR, "text"]


def test_dicts_have_the_weight_only_where_it_is_not_1():
    plain, heavy = sample_of(Slotted), sample_of(Slotted, __loss_weight__=0.5)
    assert "__loss_weight__" not in as_type(plain, dict)
    dicts = [as_type(sample, dict) for sample in (plain, heavy)]
    batch = generic_batch(dicts)
    assert batch["__loss_weight__"] == [1.0, 0.5]
    assert as_type(generic_batch([plain, plain]), dict).keys() == {*FOUR, "text", "number"}
    assert as_type(generic_batch([plain, heavy]), dict)["__loss_weight__"] == [1.0, 0.5]


def test_a_sample_takes_further_attributes_and_keeps_its_post_init():
    sample = sample_of(Deeper)
    sample.seen = [1]
    assert pickle.loads(pickle.dumps(sample)).seen == copy.copy(sample).seen == [1]
    plain = Plain(__key__="k", __restore_key__=(), text=" t ", __loss_weight__=0.5)
    assert (plain.text, plain.__loss_weight__) == ("t", 0.5)
