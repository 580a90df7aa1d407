"""What stages refuse when they are built or read: the call, the error, its words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import (
    BatchDataset,
    BlendDataset,
    Buckets,
    ConcatDataset,
    DefaultTaskEncoder,
    EpochizeDataset,
    FatalSampleError,
    FilterDataset,
    GroupBatchDataset,
    IterMapDataset,
    LimitDataset,
    MapDataset,
    ModalitySplit,
    Packing,
    RepeatDataset,
    SavableDataset,
    ShuffleBufferDataset,
    SplitModalityBatchDataset,
    TextSample,
    WorkerConfig,
    get_train_dataset,
    stateless,
)
from energon_lite.core.user_function import UserFunction
from energon_lite.order.schedules import Schedule
from energon_lite.stages.batching import BatchLists
from energon_lite.stages.blend import TokenBlendDataset

from ..helpers import source_of

NUM_TEXTS = 10
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


@stateless
def key_of(sample: Any) -> str:
    return str(sample.__key__)


@stateless
def letters(sample: Any) -> Any:
    yield from sample.text.split()[0]


def in_one_group(sample: Any) -> tuple[int, int | None]:
    return 0, None


def length(sample: Any) -> int:
    return len(sample.text)


class Bare(DefaultTaskEncoder):
    """Has no length."""


class Measured(DefaultTaskEncoder):
    def sample_length(self, sample: Any) -> int:
        return length(sample)


class Expanding(Measured):
    def postencode_sample(self, sample: Any) -> Iterator[Any]:
        yield sample


class Grouped(Measured):
    @stateless
    def batch_group_criterion(self, sample: TextSample) -> tuple[int, None]:
        return 0, None


class Selecting(Measured):
    def select_samples_to_pack(self, samples: list[Any]) -> Any:
        return [samples]


class Halving(Measured):
    @stateless
    def encode_batch(self, batch: Any) -> Iterator[Any]:
        yield batch


class Sets:
    """Makes sources of one set, and pipelines over it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, name: str = "a", **order: Any) -> Any:
        return source_of(self.root, name=name, **order)

    def pair(self) -> SavableDataset[Any]:
        return BlendDataset((self("a", repeat=True), 1), (self("b", repeat=True), 1))

    def split(self, dataset: Any, split: Any, batcher: Any = list, **made: Any) -> Any:
        made = {"sample_length": length, **made}
        return SplitModalityBatchDataset(dataset, split, 2, batcher, **made)

    def train(self, encoder: type[Any], batch_size: int | None = 1, **settings: Any) -> Any:
        made = encoder()
        for name in ("packing", "batching"):
            if name in settings:
                setattr(made, name, settings.pop(name))
        return get_train_dataset(
            self.root, worker_config=ONE, batch_size=batch_size, task_encoder=made, **settings
        )


KEY = ("texts/train", 0, 1, 1)
NO_JSON = ({1: 2}, {"a": (1, 2)}, {"a": float("nan")}, [1], {"a": object()})
BY_SOURCE = ModalitySplit("source")
RISING = Schedule("linear", ((0, 0.5), (9, 1.0)))
FUNCTION = UserFunction(key_of, name="key")
Refused = tuple[Callable[[Sets], Any], type[Exception], str]
REFUSED: dict[str, list[Refused]] = {
    "lists": [
        (lambda s: BatchDataset(s(), 0, list), ValueError, "batch_size=0 must be at least 1"),
        (lambda s: [*GroupBatchDataset(s(), None, lambda sample: (0, 0), list)], ValueError,
         "batch_size=0 must be at least 1"),
        (lambda s: [*GroupBatchDataset(s(), None, lambda own: (0, 2 + length(own) % 2), list)],
         FatalSampleError, "a group has one batch size"),
        (lambda s: GroupBatchDataset(s(), 2, in_one_group, letters), ValueError,
         "is a generator; with groups `batch` must not"),
        (lambda s: BatchLists(s(), 2).restore_sample(KEY), ValueError,
         "is not the restore key of a batch"),
        (lambda s: BatchDataset(s(), 4, list, batcher_config={"pad": object()}), TypeError,
         r"^batcher_config=.* JSON-serialisable"),
        (lambda s: ShuffleBufferDataset(s(), -1), ValueError, "size=-1 is negative"),
    ],
    "map": [
        (lambda s: MapDataset(s(), letters).restore_sample(("map", 9, ("a", 0, 1, 1))), ValueError,
         "makes no item 9"),
        *((lambda s, key=key: MapDataset(s(), letters).restore_sample(key), ValueError,
           "is not a restore key") for key in (("other", 0, ()), ())),
        *((lambda s, own=own: MapDataset(s(), key_of, map_fn_config=own), TypeError,
           "^map_fn_config=.* JSON-serialisable") for own in NO_JSON),
        *((lambda s, own=own: MapDataset(s(), FUNCTION, **own), TypeError,
           r"key_of \(test_refusals.py:\d+\) is a UserFunction")
          for own in ({"failure_tolerance": 3}, {"stateless_map_fn": True})),
        (lambda s: FilterDataset(s(), filter_fn=letters), TypeError,
         r"letters \(test_refusals.py:\d+\) is a generator"),
        (lambda s: FilterDataset(s(), filter_fn=key_of, filter_fn_config={3: 1}), TypeError,
         r"config=\{3: 1\} is not a JSON-serialisable dict"),
    ],
    "repeat and concat": [
        *((lambda s, own=own: RepeatDataset(s(), repeats=own), ValueError,
           "must be above 0, or None for ever") for own in (0, -1, float("inf"), float("nan"))),
        (lambda s: RepeatDataset(s(repeat=True)), ValueError, "never ends"),
        (lambda s: RepeatDataset(s(), repeats=2, restart=False), ValueError,
         "restart=False would leave later passes empty"),
        (lambda s: ConcatDataset(s(repeat=True), s("b")), ValueError,
         "a never ends, so what comes after it"),
    ],
    "ends of passes": [
        *((lambda s, own=own: LimitDataset(s(), own), ValueError, f"length={own} must be at least")
          for own in (0, -1)),
        (lambda s: LimitDataset(LimitDataset(s(), 3), 2), ValueError,
         "ended below already.*give one virtual epoch or limit"),
        (lambda s: EpochizeDataset(LimitDataset(s(), 3), 2), ValueError, "ended below already"),
    ],
    "packs": [
        (lambda s: s.train(Bare, packing_buffer_size=8), ValueError,
         "Bare has no select_samples_to_pack. Give it one, or `packing = Packing"),
        (lambda s: s.train(Bare, packing=Packing(8)), ValueError,
         "Bare has `packing`, but does not say how long a sample is"),
        (lambda s: s.train(Selecting, packing=Packing(8)), ValueError,
         "has both `packing` and select_samples_to_pack"),
        (lambda s: s.train(Expanding, packing=Packing(8)), ValueError,
         "is a generator, but works on samples that were chosen"),
        (lambda s: s.train(Selecting, packing_buffer_size=0), ValueError,
         "packing_buffer_size=0 must be at least 1"),
        (lambda s: s.train(Measured, packing=64), TypeError,
         r"Measured.packing=64; make it Packing\(capacity"),
    ],
    "buckets": [
        (lambda s: s.train(Bare, None, batching=Buckets(max_tokens=8)), ValueError,
         "Bare has `batching`, but does not say how long"),
        (lambda s: s.train(Measured, None, batching=Buckets(max_tokens=8), packing=Packing(8)),
         ValueError, "Measured has both `batching` and packing"),
        (lambda s: s.train(Grouped, None, batching=Buckets(max_tokens=8)), ValueError,
         "Grouped has both `batching` and batch_group_criterion"),
        (lambda s: s.train(Measured, None, batching=8192), TypeError,
         "Measured.batching=8192; make it Buckets"),
        (lambda s: s.train(Measured, None, batching=Buckets()), ValueError,
         "batch_size=None, and Buckets has neither max_tokens nor"),
    ],
    "modalities": [
        (lambda s: s.split(s.pair(), "source"), TypeError, "must be a ModalitySplit"),
        (lambda s: s.split(s.pair(), BY_SOURCE, sample_length=None), TypeError,
         "pass sample_length"),
        (lambda s: s.split(s.pair(), BY_SOURCE, letters), ValueError,
         "is a generator; a batch of one group must stay one"),
        (lambda s: SplitModalityBatchDataset(s(), BY_SOURCE, 0, list, sample_length=length),
         ValueError, "batch_size=0 must be at least 1"),
        (lambda s: s.split(s.pair(), ModalitySplit({"a": "images"})), ValueError,
         "no group for source 'b'.* Add"),
        (lambda s: s.split(s.pair(), ModalitySplit({"a": "images", "b": 1.5})), ValueError,
         r"group_by\['b'\]=1.5 is no group"),
        (lambda s: s.split(s.pair(), ModalitySplit("source", {"a": 1})), ValueError,
         "shares has no entry for group 'b'"),
        (lambda s: s.split(BlendDataset((s(repeat=True), RISING), (s("b", repeat=True), 1)),
                           BY_SOURCE),
         ValueError, r"follows a schedule.* Give ModalitySplit the parts"),
        (lambda s: s.split(TokenBlendDataset((s(), 1), (s("b"), 1)), BY_SOURCE), ValueError,
         r"shares of tokens.* Give ModalitySplit the parts"),
        (lambda s: s.train(Measured, None, batching=BY_SOURCE), ValueError, "has no batch_size"),
        (lambda s: s.train(Measured, 2, batching=BY_SOURCE, packing_buffer_size=4), ValueError,
         "has no select_samples_to_pack"),
        (lambda s: s.train(Halving, 2, batching=BY_SOURCE), ValueError,
         r"Halving.encode_batch is a generator; .* out of step"),
        (lambda s: s.train(Measured, 2, batching=ModalitySplit("source", end="pad"),
                           batch_drop_last=True),
         ValueError, 'batch_drop_last=True contradicts end="pad"'),
    ],
    "blends of tokens": [
        (lambda s: TokenBlendDataset((s(), 1), lengths={"other": np.arange(60)}), ValueError,
         "no entry for source 'a'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        pytest.param(*row, id=f"{kind}-{i}")
        for kind in REFUSED
        for i, row in enumerate(REFUSED[kind])
    ],
)
def test_refused_with_a_reason(texts, call, error, words) -> None:
    with pytest.raises(error, match=words):
        call(Sets(texts))


OVER: list[Callable[[Any, Any], SavableDataset[Any]]] = [
    lambda limit, other: ConcatDataset(limit, other),
    lambda limit, other: BlendDataset((limit, 1), (other, 1)),
    lambda limit, other: BlendDataset((limit, 1), (other, 1), until="forever"),
    lambda limit, _: RepeatDataset(limit),
    lambda limit, _: BatchDataset(limit, 4, list),
    lambda limit, _: BatchDataset(MapDataset(limit, lambda item: item), 4, list),
    lambda limit, _: ShuffleBufferDataset(limit, 3),
    lambda limit, _: IterMapDataset(limit, iter),
]


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("kind", [EpochizeDataset, LimitDataset])
def test_end_of_a_pass_inside_another_dataset_is_refused_with_the_remedy(texts, kind, over) -> None:
    source = partial(source_of, texts)
    with pytest.raises(ValueError, match=r"limit of 5 items .* around the outermost dataset"):
        over(kind(source(), 5), source(name="b"))
