"""The loss weights of a metadataset, on samples and batches of every type."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from energon_lite import (
    Batch,
    DefaultTaskEncoder,
    MixBatchDataset,
    Packing,
    SavableDataset,
    TextSample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    homogeneous_concat_mix,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.keys import leaves
from energon_lite.core.topology import Stream
from energon_lite.loss import WeightedLabels

from ..helpers import blend_maker, text_sets

ONE = WorkerConfig(rank=0, world_size=1, num_workers=0)
WEIGHTS = {"a/train": 0.1, "b/train": 1.5, "c/train": 6.0, "a/train#2": 0.75}
WEIGHTED = """
    loss_weight: 0.5
    blend:
    - {path: a, loss_weight: 0.2}
    - weight: 2
      loss_weight: 3
      blend: [{path: b}, {path: c, loss_weight: 4}, {path: a, loss_weight: 0.5}]
"""
PLAIN = "blend: [{path: a}, {path: b}]"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_sets(tmp_path_factory.mktemp("weighing"), a=12, b=7, c=5)


def dataset_of(
    root: Path, encoder: Any = DefaultTaskEncoder, split: str = WEIGHTED, **settings: Any
) -> SavableDataset[Any]:
    config = settings.pop("worker_config", ONE)
    return blend_maker(root, split, encoder, **{"batch_size": 4, **settings})(config)


def expected_of(key: Any) -> list[float]:
    return [WEIGHTS[leaf[0]] for leaf in leaves(key)]


def assert_weighs(found: Any, expected: list[float]) -> None:
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.float32
    assert found.shape == (len(expected),)
    assert found.tolist() == pytest.approx(expected)


@edataclass
class TextBatch(Batch):
    text: list[str]


@dataclasses.dataclass
class Own:
    texts: list[str]


@dataclasses.dataclass(frozen=True)
class Frozen:
    texts: list[str]


@dataclasses.dataclass
class Slots:
    __slots__ = ("texts",)
    texts: list[str]


@dataclasses.dataclass
class OwnWeight:
    texts: list[str]
    loss_weight: str


@dataclasses.dataclass
class OwnDefault:
    texts: list[str]
    loss_weight: str | None = None


@edataclass
class OwnInBatch(Batch):
    text: list[str]
    loss_weight: str | None = None


class Row(NamedTuple):
    texts: list[str]


def encoder_of(make: Any, adds: bool | None = True) -> type[DefaultTaskEncoder]:
    """An encoder whose `encode_batch` is `make`."""

    class Made(DefaultTaskEncoder):
        add_loss_weights = adds

        @stateless
        def encode_batch(self, batch: Any) -> Any:
            return make(batch)

    return Made


def pairs(root: Path, make: Any, number: int = 12, **settings: Any) -> list[tuple[Any, Any]]:
    """What `make` makes of the first batches, as it is given, and their restore keys."""
    plain = islice(dataset_of(root, **settings), number)
    found = islice(dataset_of(root, encoder_of(make), **settings), number)
    rows = [(item, batch.__restore_key__) for item, batch in zip(found, plain, strict=True)]
    assert len(rows) == number
    assert {name for _, key in rows for name in (leaf[0] for leaf in leaves(key))} <= set(WEIGHTS)
    return rows


class AsOwn(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        return Own([sample.text])


class AsDict(DefaultTaskEncoder):
    add_loss_weights = True

    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        return {"text": sample.text, "__restore_key__": ()}


class Derived(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        assert sample.__loss_weight__ == WEIGHTS[sample.__restore_key__[0]]
        return TextSample.derive_from(sample, text=sample.text.upper())


CARRIERS: dict[str, tuple[Any, Any]] = {
    "sample's own class": (lambda batch: batch, lambda item: item.loss_weight),
    "batch of from_samples": (
        lambda batch: TextBatch.derive_from(batch, text=batch.text),
        lambda item: item.loss_weight,
    ),
    "batch made without": (
        lambda batch: TextBatch(
            __key__=batch.__key__, __restore_key__=batch.__restore_key__, text=batch.text
        ),
        lambda item: item.loss_weight,
    ),
    "own dataclass": (lambda batch: Own(batch.text), lambda item: item.loss_weight),
    "dict": (lambda batch: {"texts": batch.text}, lambda item: item["loss_weight"]),
}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_batch_of_each_type_has_a_loss_weight_per_sample_also_re_created(
    sets, carrier, batch_size
) -> None:
    make, read = CARRIERS[carrier]
    dataset = dataset_of(sets, encoder_of(make), batch_size=batch_size)
    seen = set()
    for item, key in pairs(sets, make, 16, batch_size=batch_size):
        assert_weighs(read(item), expected_of(key))
        assert read(dataset.restore_sample(key)).tolist() == read(item).tolist()
        seen.update(read(item).tolist())
    assert len(seen) == 4


@pytest.mark.parametrize("make", [Frozen, Slots, Row, tuple, list, lambda texts: torch.ones(2)])
def test_what_can_carry_none_is_left_alone(sets, make) -> None:
    for item, _ in pairs(sets, lambda batch: make(batch.text)):
        assert not hasattr(item, "loss_weight")
        assert not isinstance(item, tuple) or len(item) in (1, 4)


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (lambda batch: OwnWeight(batch.text, "mine"), "mine"),
        (lambda batch: OwnDefault(batch.text, "mine"), "mine"),
        (lambda batch: OwnDefault(batch.text), None),
        (lambda batch: {"loss_weight": "mine"}, "mine"),
        (lambda batch: {"loss_weight": None}, None),
        (lambda batch: OwnInBatch.derive_from(batch, text=batch.text), None),
        (lambda batch: OwnInBatch.derive_from(batch, text=batch.text, loss_weight="mine"), "mine"),
    ],
)
def test_own_field_of_that_name_is_left_alone(sets, make, own) -> None:
    for item, _ in pairs(sets, make):
        assert (item["loss_weight"] if isinstance(item, dict) else item.loss_weight) == own


def test_without_loss_weights_objects_have_ones(sets) -> None:
    for item, _ in pairs(sets, lambda batch: Own(batch.text), split=PLAIN):
        assert_weighs(item.loss_weight, [1.0] * 4)
    for item, _ in pairs(sets, CARRIERS["batch made without"][0], split=PLAIN):
        assert item.__loss_weight__ is None
        assert_weighs(item.loss_weight, [1.0] * 4)


@pytest.mark.parametrize(
    ("hook", "split", "is_weighted", "num_workers"),
    [
        *((hook, WEIGHTED, True, 0) for hook in ("encode_batch", "batch", "encode_sample")),
        ("encode_batch", PLAIN, False, 0),
        pytest.param("batch", WEIGHTED, True, 2, marks=pytest.mark.processes),
    ],
)
def test_dicts_keep_their_keys_and_one_warning_says_how_to_get_weights(
    sets, hook, split, is_weighted, num_workers, caplog, capfd
) -> None:
    class Made(DefaultTaskEncoder):
        pass

    many = hook == "batch"
    read = lambda value: {"texts": [s.text for s in value] if many else value.text}  # noqa: E731
    setattr(Made, hook, stateless(lambda self, value: read(value)))
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers)
    messages = []
    for adds in (None, False, True):
        Made.add_loss_weights = adds
        caplog.clear()
        with get_savable_loader(dataset_of(sets, Made, split, worker_config=config)) as loader:
            for item in islice(loader, 3):
                assert set(item) == ({"texts", "loss_weight"} if adds else {"texts"})
        messages.append([r.message for r in caplog.records if "loss weights" in r.message])
    assert [len(found) for found in messages] == [int(is_weighted), 0, 0]
    assert not is_weighted or "add_loss_weights = True" in messages[0][0]
    assert "loss weights" not in capfd.readouterr().err  # of worker processes


@pytest.mark.parametrize(
    ("make", "is_warned"),
    [
        (lambda batch: batch, False),
        (lambda batch: Own(batch.text), False),
        (lambda batch: {"loss_weights": batch.loss_weight}, False),
        (lambda batch: {"labels": WeightedLabels(loss_weights=batch.loss_weight)}, False),
        (lambda batch: tuple(batch.text), True),
        (lambda batch: Frozen(batch.text), True),
    ],
)
def test_what_carries_its_weights_is_not_warned_of(sets, make, is_warned, caplog) -> None:
    next(iter(get_savable_loader(dataset_of(sets, encoder_of(make, adds=None)))))
    assert ("do not carry" in caplog.text) == is_warned


@pytest.mark.parametrize("encoder", [Derived, AsOwn, AsDict])
def test_single_samples_have_a_scalar(sets, encoder) -> None:
    rows = islice(dataset_of(sets, batch_size=None), 30)
    found = islice(dataset_of(sets, encoder, batch_size=None), 30)
    for item, sample in zip(found, rows, strict=True):
        weight = item["loss_weight"] if isinstance(item, dict) else item.loss_weight
        assert (weight.shape, weight.dtype) == ((), torch.float32)
        assert weight.item() == pytest.approx(WEIGHTS[sample.__restore_key__[0]])
    split = "blend: [{path: a, name: batch, loss_weight: 0.5}]"  # a source may be called so
    if encoder is not Derived:
        (item,) = islice(dataset_of(sets, encoder, split, batch_size=None), 1)
        weight = item["loss_weight"] if isinstance(item, dict) else item.loss_weight
        assert (weight.shape, weight.item()) == ((), 0.5)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("weights", [(0.1, 1.5, 0.75), (1.0, 1.0, 1.0)])
def test_mixed_batches_have_an_entry_per_sample(sets, carrier, weights) -> None:
    make, read = CARRIERS[carrier]
    ones = [
        get_train_dataset(
            sets / name, worker_config=ONE, batch_size=1, task_encoder=encoder_of(make)(),
            loss_weight=weight,
        )
        for name, weight in zip("aba", weights, strict=True)
    ]  # fmt: skip
    mixed = MixBatchDataset(
        *((dataset, 1) for dataset in ones), batch_size=4, batch_mix_fn=homogeneous_concat_mix
    )
    of = dict(zip(("a/train", "b/train", "a/train#2"), weights, strict=True))
    assert [facts.name for facts in mixed.sources()] == list(of)
    run = StreamRun(mixed, Stream(0, 1))
    for _ in range(12):
        assert_weighs(read(next(run)), [of[leaf[0]] for leaf in leaves(run.key)])


class Masked(DefaultTaskEncoder):
    """Batches of tokens, of which none has a loss before number `first`."""

    def __init__(self, form: str, first: int = 1 << 30) -> None:
        super().__init__()
        self.form, self.first = form, first
        if form in ("packed_batch", "huggingface"):
            self.packing = Packing(64, output=form)

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        ids = torch.tensor(list(sample.text.encode()))
        mask = torch.full((len(ids),), self.current_batch_index >= self.first)
        if self.form == "labels":
            return {"input_ids": ids, "labels": ids.masked_fill(~mask, -100)}
        return {"__key__": sample.__key__, "input_ids": ids, "assistant_masks": mask}

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])


@pytest.mark.parametrize("form", ["packed_batch", "huggingface", "labels", "mask"])
@pytest.mark.parametrize("first", [50, 1 << 30])  # samples are buffered
def test_run_without_any_loss_warns_once(sets, caplog, form, first) -> None:
    settings = {"batch_size": 1, "worker_config": ONE, "shuffle_buffer_size": None}
    loader = get_savable_loader(
        get_train_dataset(sets / "a", task_encoder=Masked(form, first), **settings)
    )
    for number, _ in enumerate(islice(loader, 210), 1):
        warnings = [r for r in caplog.messages if r.startswith("No token has a loss in the first")]
        assert len(warnings) == (number >= 100 and first > 100)


@pytest.mark.parametrize(("weight", "num"), [(0, 1), (0.5, 0)])
def test_run_of_sources_without_a_loss_warns_once(sets, caplog, weight, num) -> None:
    loader = get_savable_loader(
        get_train_dataset(sets / "a", batch_size=1, worker_config=ONE, loss_weight=weight)
    )
    assert len([*islice(loader, 150)]) == 150
    assert sum("No token has a loss" in message for message in caplog.messages) == num
