"""Every dataset class against all laws; and the laws against datasets that break them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from energon_lite import (
    BatchDataset,
    BlendDataset,
    BucketBatchDataset,
    Buckets,
    ConcatDataset,
    EpochizeDataset,
    FilterDataset,
    GcDataset,
    GroupBatchDataset,
    IterMapDataset,
    LimitDataset,
    LogSampleDataset,
    MapDataset,
    MixBatchDataset,
    ModalitySplit,
    PackedSamplesOutput,
    Packing,
    PackingDataset,
    RepeatDataset,
    SavableDataset,
    ShuffleBufferDataset,
    SkipSample,
    SplitModalityBatchDataset,
    TextSample,
    WorkerConfig,
    sample_rng,
    stateless,
)
from energon_lite.balance import CostModel
from energon_lite.core.dataset import Cursor, StreamRun, Traits
from energon_lite.core.errors import StateError
from energon_lite.core.stage import Stage, StageCursor
from energon_lite.core.state import COUNT, JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import current_batch_index, current_sample_index
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import UserFunction
from energon_lite.formats.length_files import write_lengths
from energon_lite.order.schedules import Schedule
from energon_lite.sources.dataset_config import load_factory
from energon_lite.sources.source import WebdatasetSource
from energon_lite.stages.balanced_lists import BalancedLists
from energon_lite.stages.batching import BatchLists, BucketLists, GroupLists
from energon_lite.stages.blend import TokenBlendDataset
from energon_lite.stages.loss_weights import LossWeightDataset
from energon_lite.stages.modality_batches import ModalityLists, PlannedBatches
from energon_lite.stages.pack_lists import PackLists, SelectedLists
from energon_lite.stages.packing_stage import PackMembers
from energon_lite.stages.plan_order import OrderDataset, order_of
from energon_lite.stages.planned_packs import PlannedPacks
from energon_lite.stages.token_lengths import MeasureDataset
from energon_lite.testing import LawError, check_dataset

from ..helpers import (
    ENCODERS,
    caption_set,
    ignore,
    number_of,
    source_of,
    text_set,
    train,
    validation,
)

NUM_SAMPLES = 23
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=5)
QUIET = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)
LOGGING = WorkerConfig(rank=0, world_size=1, num_workers=0, worker_log_level=1)

Case = Callable[[Path], SavableDataset[Any]]


def texts(root: Path, *, repeat: bool = False, training: bool = True, **order: Any) -> Any:
    """A source of 23 texts."""
    return source_of(root, repeat=repeat, training=training, config=CONFIG, **order)


def parity(sample: TextSample) -> tuple[int, None]:
    return number_of(sample) % 2, None


@stateless
def loud(sample: TextSample) -> TextSample:
    return TextSample.derive_from(sample, text=sample.text.upper())


@stateless
def twice(sample: TextSample) -> Iterator[TextSample]:
    yield sample
    yield sample


def drawing(sample: TextSample) -> TextSample:
    noise = f"{torch.rand(()).item()} {np.random.randn()} {random.gauss(0, 1)}"
    return TextSample.derive_from(sample, text=f"{sample.text} {noise}")


def drawing_seldom(sample: TextSample) -> TextSample:
    return drawing(sample) if number_of(sample) % 7 == 3 else sample


def drawing_twice(sample: TextSample) -> Iterator[TextSample]:
    first = random.random()
    for _ in range(number_of(sample) % 3):
        yield TextSample.derive_from(sample, text=f"{sample.text} {first} {np.random.rand()}")


def drawn_list(samples: list[TextSample]) -> dict[str, Any]:
    return {"texts": [sample.text for sample in samples], "order": torch.randperm(9).tolist()}


@stateless
def listed(samples: list[TextSample]) -> dict[str, Any]:
    return {"texts": [sample.text for sample in samples], "__restore_key__": ()}


def stage(function: Callable[[Any], Any]) -> UserFunction:
    return UserFunction(function, name=function.__name__, seed=5)


SOURCE_CASES: list[Case] = [
    lambda root: texts(root, repeat=True, shuffle_buffer_size=8, max_samples_per_sequence=4),
    lambda root: texts(root, shuffle_buffer_size=8, max_samples_per_sequence=4),
    lambda root: texts(root, parallel_shard_iters=3, max_samples_per_sequence=3),
    lambda root: texts(root, repeat=True, shuffle_over_epochs=2, shuffle_buffer_size=5),
    lambda root: texts(root, repeat=True, shuffle_over_epochs=-1),
    lambda root: texts(root, repeat=True, shuffle_over_epochs=None, block=4),
    lambda root: texts(root, training=False, block=4),
]
ORDER_CASES: list[Case] = [
    lambda root: order_of(texts(root, repeat=True, shuffle_buffer_size=8)),
    lambda root: order_of(texts(root)),
]
MAP_CASES: list[Case] = [
    lambda root: MapDataset(texts(root, repeat=True), stage(loud)),
    lambda root: MapDataset(texts(root), stage(twice)),
    *(lambda root, name=name: train(root, name, repeat=False)(QUIET) for name in ENCODERS),
    lambda root: MapDataset(texts(root, repeat=True), stage(drawing)),
    lambda root: MapDataset(texts(root), stage(drawing_seldom)),
    lambda root: MapDataset(MapDataset(texts(root), stage(drawing_seldom)), stage(drawing_twice)),
    lambda root: BatchDataset(MapDataset(texts(root), stage(drawing)), 4, stage(drawn_list)),
    lambda root: BatchDataset(MapDataset(texts(root), stage(twice)), 4, stage(drawn_list)),
    lambda root: MapDataset(MapDataset(texts(root), stage(drawing_seldom)), stage(twice)),
    lambda root: train(root, "expanding batches", batch_size=4)(QUIET),
    lambda root: validation(root, "expanding")(QUIET),
]


def length(sample: TextSample) -> int:
    return 1 + number_of(sample) % 5


def other(root: Path, **order: Any) -> Any:
    """Another source of the same texts."""
    return texts(root, name="other", **order)


def blend(*pairs: Any, **settings: Any) -> BlendDataset[Any]:
    return BlendDataset(*pairs, **settings)


def measured(dataset: SavableDataset[Any]) -> MeasureDataset[Any]:
    return MeasureDataset(dataset, stage(length))


def ones(root: Path, **order: Any) -> BatchDataset[Any]:
    return BatchDataset(texts(root, **order), 1, stage(listed))


FADING = Schedule("linear", ((0, 1.0), (20, 0.0)))
BLEND_CASES: list[Case] = [
    lambda root: blend((texts(root, repeat=True), 1), (other(root, repeat=True), 2.5)),
    lambda root: blend((texts(root), 1), (other(root), 2.5)),
    lambda root: blend((texts(root), 1), (texts(root), 1)),
    lambda root: blend((texts(root), 1), (other(root), 3), until="first"),
    lambda root: blend((texts(root), 1), (other(root), 3), until="all_once"),
    lambda root: blend((texts(root), 1), until="all_once"),
    lambda root: blend((texts(root), 1), (other(root), 3), until="forever"),
    lambda root: blend((texts(root), 1), (other(root), 3), blend_mode="random"),
    lambda root: blend((texts(root, repeat=True), FADING), (other(root, repeat=True), 1)),
    lambda root: blend((BatchDataset(texts(root), 3, stage(listed)), 1), (ones(root), 1)),
    lambda root: GroupBatchDataset(
        blend((texts(root), 1), (other(root), 2)), 3, stage(parity), stage(listed)
    ),
]
CONCAT_CASES: list[Case] = [
    lambda root: ConcatDataset(texts(root, training=False, block=2), other(root, training=False)),
    lambda root: ConcatDataset(texts(root), other(root, repeat=True)),
    lambda root: ConcatDataset(texts(root), ones(root), MapDataset(other(root), stage(twice))),
]
REPEAT_CASES: list[Case] = [
    lambda root: RepeatDataset(texts(root), repeats=1.3),
    lambda root: RepeatDataset(texts(root), repeats=0.2),
    lambda root: RepeatDataset(texts(root)),
]
MIX_CASES: list[Case] = [
    lambda root: MixBatchDataset(
        (ones(root, repeat=True), 6), (ones(root, repeat=True, name="b"), 4), batch_size=4
    ),
    lambda root: MixBatchDataset(
        (ones(root), 6), (MapDataset(texts(root), stage(twice)), 4), batch_size=4
    ),
]
TOKEN_CASES: list[Case] = [
    lambda root: measured(token_blend(texts(root, repeat=True), other(root, repeat=True))),
    lambda root: measured(token_blend(texts(root), other(root))),
    lambda root: measured(token_blend(texts(root), other(root), until="first")),
    lambda root: measured(token_blend(texts(root), other(root), until="all_once")),
    lambda root: token_blend(
        texts(root, name="a"), other(root),
        lengths={name: np.arange(1, 24) for name in ("a", "other")},
    ),
]  # fmt: skip


def token_blend(first: Any, second: Any, **settings: Any) -> TokenBlendDataset[Any]:
    return TokenBlendDataset((first, 1), (second, 2), **settings)


def is_odd(sample: TextSample) -> bool:
    return number_of(sample) % 2 == 1


def some_twice(samples: Iterator[TextSample]) -> Iterator[TextSample]:
    """Drops each third sample and gives each fifth twice."""
    for sample in samples:
        number = number_of(sample)
        if number % 3:
            yield sample
        if number % 5 == 0:
            yield TextSample.derive_from(sample, text="again")


def pairs_swapped(samples: Iterator[TextSample]) -> Iterator[TextSample]:
    """Holds each second sample back."""
    for first in samples:
        second = next(samples, None)
        yield from (first,) if second is None else (second, first)


def iterated(dataset: SavableDataset[Any], function: Any, stateless: bool) -> IterMapDataset[Any]:
    return IterMapDataset(dataset, function, stateless_iter_fn=stateless)


@stateless
def numbered(sample: TextSample) -> TextSample:
    """Writes down slot and number of the sample, which a resume must not change."""
    numbers = f"{current_batch_index()} {current_sample_index()}"
    return TextSample.derive_from(sample, text=f"{sample.text} {numbers}")


def noisy(samples: Iterator[TextSample]) -> Iterator[TextSample]:
    """Yields each sample with one random number, and some with another."""
    for sample in samples:
        for _ in range(1 + number_of(sample) % 2):
            yield TextSample.derive_from(sample, text=f"{sample.text} {sample_rng().random()}")


def picky(samples: Iterator[TextSample]) -> Iterator[TextSample]:
    for sample in samples:
        if number_of(sample) % 5 == 2:
            raise SkipSample
        yield sample


def first_four(samples: Iterator[TextSample]) -> Iterator[TextSample]:
    return itertools.islice(samples, 4)


@stateless(restore_seeds=True)
def at_random(sample: TextSample) -> bool:
    return random.random() < 0.5


def drawing_pairs(samples: Iterator[TextSample]) -> Iterator[TextSample]:
    for sample in samples:
        noise = random.random()
        for _ in range(2):
            text = f"{sample.text} {noise} {np.random.rand()}"
            yield TextSample.derive_from(sample, text=text)


def whole(dataset: SavableDataset[Any]) -> IterMapDataset[Any]:
    return IterMapDataset(MapDataset(dataset, stage(numbered)), pairs_swapped)


ITER_CASES: list[Case] = [
    lambda root: iterated(texts(root, repeat=True), pairs_swapped, False),
    lambda root: blend((whole(texts(root)), 1), (other(root), 1)),
    lambda root: RepeatDataset(whole(texts(root))),
    lambda root: ConcatDataset(texts(root, training=False), whole(other(root, training=False))),
    lambda root: BatchDataset(whole(texts(root)), 3, stage(listed)),
    lambda root: MapDataset(whole(texts(root)), stage(twice)),
    lambda root: iterated(BatchDataset(texts(root), 2, stage(listed)), iter, False),
    lambda root: iterated(texts(root), noisy, True),
    lambda root: iterated(texts(root), noisy, False),
    lambda root: iterated(MapDataset(texts(root), stage(drawing)), drawing_pairs, False),
    lambda root: iterated(texts(root), picky, True),
    lambda root: iterated(texts(root), picky, False),
    lambda root: iterated(texts(root), first_four, False),
    lambda root: iterated(ShuffleBufferDataset(texts(root), 4), pairs_swapped, False),
    lambda root: iterated(texts(root), some_twice, True),
    lambda root: iterated(texts(root), pairs_swapped, False),
    lambda root: iterated(MapDataset(texts(root), stage(twice)), pairs_swapped, False),
]
SHUFFLE_CASES: list[Case] = [
    # A batch that is made again below must not change the slot of the one above.
    lambda root: BatchDataset(
        ShuffleBufferDataset(BatchDataset(texts(root), 1, stage(listed)), 4), 2, stage(listed_dicts)
    ),
    lambda root: ShuffleBufferDataset(texts(root), 5),
    lambda root: ShuffleBufferDataset(texts(root, repeat=True), 5),
    lambda root: ShuffleBufferDataset(texts(root), 99),
    lambda root: ShuffleBufferDataset(texts(root), None),
    lambda root: ShuffleBufferDataset(MapDataset(texts(root), stage(twice)), 4),
]


def packs(dataset: SavableDataset[Any], **settings: Any) -> PackingDataset[Any]:
    """Packs of texts of 1..5 tokens."""
    packing = Packing(**{"capacity": 7, "buffer_size": 6, **settings})
    measure = length if isinstance(packing.capacity, int) else resources
    return PackingDataset(
        dataset, None, packing, stage(listed), sample_length=measure, slicer=letters
    )


def resources(sample: TextSample) -> dict[str, int]:
    return {"tokens": length(sample), "odd": number_of(sample) % 2, "more": 99}


def letters(sample: TextSample, start: int, stop: int) -> TextSample:
    return TextSample.derive_from(sample, text=sample.text[start:stop])


def by_parity(sample: TextSample) -> tuple[str, bool]:
    return "odd", is_odd(sample)


def first_three(samples: list[TextSample]) -> PackedSamplesOutput:
    """Packs the even ones of the first three, and pushes back what comes after them."""
    even = [sample for sample in samples[:3] if not is_odd(sample)]
    return PackedSamplesOutput([even, []], samples[3:])


def pairs_of(samples: list[TextSample]) -> list[list[TextSample]]:
    ordered = sorted(samples, key=length)
    return [ordered[i : i + 2] for i in range(0, len(ordered), 2)]


def filled(dataset: SavableDataset[Any], **settings: Any) -> PackLists:
    return PackLists(MeasureDataset(dataset, stage(length)), Packing(capacity=7, **settings))


COST = CostModel(token=1, token_squared=0.5)


def balanced(dataset: SavableDataset[Any]) -> BalancedLists:
    packing = {"balance": "quantile_sync", "balance_window": 3, "cost": COST}
    return BalancedLists(filled(dataset, buffer_size=3, **packing))


SHARED = {"balance": "global_window", "balance_window": 2, "cost": COST}


def planned(dataset: SavableDataset[Any], **settings: Any) -> PackingDataset[Any]:
    """The same packs as of `packs`, planned in windows of few samples."""
    return packs(dataset, **{"lengths": "index", "plan_window": 5, **settings})


def planned_only(dataset: SavableDataset[Any], **settings: Any) -> PlannedPacks:
    packing = Packing(capacity=7, lengths="index", plan_window=7, **settings)
    return PlannedPacks(MeasureDataset(dataset, stage(length)), packing)


def planned_batches(dataset: SavableDataset[Any], **settings: Any) -> Any:
    made = ModalitySplit(**{"group_by": "modality", "lengths": "index", "window": 2, **settings})
    return SplitModalityBatchDataset(dataset, made, 2, stage(listed), sample_length=length)


PLANNED_BATCH_CASES: list[Case] = [
    lambda root: planned_batches(texts(root)),
    lambda root: planned_batches(texts(root, repeat=True), longest_first=True),
    lambda root: planned_batches(texts(root), end="drop"),
    lambda root: planned_batches(texts(root), end="pad"),
    lambda root: planned_batches(
        blend((texts(root, repeat=True), 1), (other(root, repeat=True), 3)), group_by="source"
    ),
]
PLANNED_CASES: list[Case] = [
    lambda root: planned(texts(root)),
    lambda root: planned(texts(root, repeat=True)),
    lambda root: planned(texts(root), plan_window=None, algorithm="best"),
    lambda root: planned(MapDataset(texts(root), stage(loud)), capacity={"tokens": 9, "odd": 2}),
    lambda root: planned(texts(root, repeat=True), capacity=4, overlong="drop"),
    lambda root: planned(texts(root), capacity=4, overlong="alone", **SHARED),
    lambda root: planned(texts(root), capacity=3, overlong="truncate"),
    lambda root: planned(texts(root, repeat=True), capacity=2, overlong="split", **SHARED),
    lambda root: planned(texts(root), drop_last=True, max_samples=2),
    lambda root: planned(texts(root), end_of_data="drop", align=2, capacity=8, **SHARED),
    lambda root: planned(texts(root, repeat=True), **SHARED),
    lambda root: planned(texts(root), group_by="modality", **SHARED),
    lambda root: planned(
        blend((texts(root, repeat=True), 1), (other(root, repeat=True), 2)),
        group_by="source",
        **SHARED,
    ),
    lambda root: planned(
        blend((texts(root), 1), (texts(root), 2)),
        balance="quantile_sync",
        balance_window=3,
        cost=COST,
    ),
    lambda root: planned(ConcatDataset(texts(root), other(root))),
    lambda root: planned(RepeatDataset(texts(root), repeats=1.5)),
    lambda root: BatchDataset(planned(texts(root, repeat=True)), 2, stage(listed_packs)),
    lambda root: RepeatDataset(planned(texts(root))),
]
PACKING_CASES: list[Case] = [
    lambda root: packs(texts(root)),
    lambda root: packs(texts(root, repeat=True)),
    lambda root: packs(texts(root), max_samples=2),
    lambda root: packs(texts(root), capacity={"tokens": 9, "odd": 2}),
    lambda root: packs(texts(root), algorithm="best"),
    lambda root: packs(texts(root, repeat=True), algorithm="first_fit_decreasing", buffer_size=9),
    lambda root: packs(texts(root), algorithm="sequential", drop_last=True),
    lambda root: packs(texts(root), capacity=4, overlong="drop"),
    lambda root: packs(texts(root), capacity=4, overlong="alone"),
    lambda root: packs(texts(root), capacity=3, overlong="truncate"),
    lambda root: packs(texts(root), capacity=2, overlong="split"),
    lambda root: packs(texts(root, repeat=True), align=2, end_of_data="drop", capacity=8),
    lambda root: packs(texts(root), end_of_data="drop", buffer_size=3, max_samples=1),
    lambda root: packs(texts(root), group_by=by_parity),
    lambda root: packs(texts(root), balance="quantile_sync", balance_window=3, cost=COST),
    lambda root: packs(
        texts(root, repeat=True), balance="quantile_sync", balance_window=4, cost=COST
    ),
    lambda root: packs(blend((texts(root), 1), (other(root), 2)), group_by="source"),
    lambda root: packs(token_blend(texts(root, repeat=True), other(root, repeat=True))),
    lambda root: BatchDataset(packs(texts(root, repeat=True)), 2, stage(listed_packs)),
    lambda root: PackingDataset(
        texts(root), 5, stage(pairs_of), stage(listed), sample_encoder=stage(loud)
    ),
    lambda root: PackingDataset(texts(root, repeat=True), 6, stage(first_three), stage(listed)),
    lambda root: PackingDataset(texts(root), 6, stage(pairs_of), stage(twice_packed)),
]


@stateless
def listed_dicts(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"items": items, "slot": current_batch_index(), "__restore_key__": ()}


@stateless
def listed_packs(samples: list[Any]) -> dict[str, Any]:
    return {"packs": samples, "__restore_key__": ()}


@stateless
def twice_packed(samples: list[TextSample]) -> Iterator[dict[str, Any]]:
    for text in ("once", "again"):
        yield {"texts": [sample.text for sample in samples], "text": text, "__restore_key__": ()}


def two_or_one(length: int) -> int:
    return 2 if length < 4 else 1


def buckets(dataset: SavableDataset[Any], **settings: Any) -> BucketBatchDataset[Any]:
    """Batches of texts of 1..5 tokens, by default of 10."""
    own = {name: settings.pop(name) for name in ("batch_size", "drop_last") if name in settings}
    if "batch_size" not in own and "batch_size_fn" not in settings:
        settings.setdefault("max_tokens", 10)
    made = Buckets(**{"window": 6, **settings})
    return BucketBatchDataset(dataset, made, stage(listed), sample_length=length, **own)


BUCKET_CASES: list[Case] = [
    lambda root: buckets(texts(root)),
    lambda root: buckets(texts(root, repeat=True), longest_first=True),
    lambda root: buckets(texts(root), window=99),
    lambda root: buckets(texts(root), window=1),
    lambda root: buckets(texts(root), drop_last=True),
    lambda root: buckets(texts(root), batch_size=4),
    lambda root: buckets(texts(root, repeat=True), batch_size=4, group_by=by_parity),
    lambda root: buckets(texts(root), batch_size=3, drop_last=True),
    lambda root: buckets(texts(root), batch_size_fn=two_or_one, align=2),
    lambda root: buckets(texts(root), max_tokens=10, batch_size=3),
    lambda root: buckets(texts(root), max_tokens=4, overlong="drop", align=2),
    lambda root: buckets(texts(root), max_tokens=4, overlong="alone"),
    lambda root: buckets(blend((texts(root), 1), (other(root), 2)), group_by="source"),
    lambda root: buckets(token_blend(texts(root), other(root)), max_tokens=4, overlong="drop"),
]

EVEN_SPLIT = {True: 1.0, False: 1.0}
UNEVEN_SPLIT = {True: 1.0, False: 5.0}


def split(dataset: SavableDataset[Any], **settings: Any) -> SplitModalityBatchDataset[Any]:
    """Batches of two texts, both of odd or both of even number."""
    made = ModalitySplit(**{"group_by": is_odd, "shares": EVEN_SPLIT, "window": 3, **settings})
    return SplitModalityBatchDataset(dataset, made, 2, stage(listed), sample_length=length)


def by_source(dataset: SavableDataset[Any], **settings: Any) -> SplitModalityBatchDataset[Any]:
    """Batches of two texts of one source."""
    return split(dataset, **{"group_by": "source", "shares": None, **settings})


SPLIT_CASES: list[Case] = [
    lambda root: split(texts(root)),
    lambda root: split(texts(root), end="drop"),
    lambda root: split(texts(root), end="pad"),
    lambda root: split(texts(root), end="pad", shares=UNEVEN_SPLIT),
    lambda root: split(texts(root), shares={**EVEN_SPLIT, "never": 1}),
    lambda root: split(texts(root), shares={**EVEN_SPLIT, "never": 1}, end="drop"),
    lambda root: split(texts(root, repeat=True)),
    lambda root: split(texts(root, repeat=True), longest_first=True),
    lambda root: split(texts(root, repeat=True), shares=UNEVEN_SPLIT, max_surplus=1, window=1),
    lambda root: by_source(blend((texts(root, repeat=True), 1), (other(root, repeat=True), 2.5))),
    lambda root: by_source(blend((texts(root), 1), (other(root), 2.5))),
    lambda root: split(MapDataset(texts(root), stage(twice))),
    lambda root: split(train(root, "skipping", batch_size=None, repeat=False)(QUIET)),
    lambda root: RepeatDataset(split(texts(root))),
]

CASES: dict[type, list[Case]] = {
    PackingDataset: PACKING_CASES + PLANNED_CASES,
    PlannedPacks: [
        lambda root: planned_only(texts(root)),
        lambda root: planned_only(texts(root, repeat=True), **SHARED),
    ],
    PackLists: [
        lambda root: filled(texts(root)),
        lambda root: filled(texts(root, repeat=True), buffer_size=3),
    ],
    BalancedLists: [
        lambda root: balanced(texts(root)),
        lambda root: balanced(texts(root, repeat=True)),
    ],
    SelectedLists: [
        lambda root: SelectedLists(texts(root), 5, stage(pairs_of)),
        lambda root: SelectedLists(texts(root, repeat=True), 6, stage(first_three)),
        lambda root: SelectedLists(texts(root), 4, stage(pairs_of), drop_last=True),
    ],
    PackMembers: [
        lambda root: PackMembers(filled(texts(root)), stage(loud)),
        lambda root: PackMembers(filled(texts(root, loss_weight=0.5))),
    ],
    IterMapDataset: ITER_CASES,
    ShuffleBufferDataset: SHUFFLE_CASES,
    FilterDataset: [
        lambda root: FilterDataset(texts(root), filter_fn=is_odd),
        lambda root: FilterDataset(MapDataset(texts(root), stage(twice)), filter_fn=is_odd),
        lambda root: FilterDataset(texts(root, repeat=True), filter_fn=at_random),
        lambda root: GroupBatchDataset(
            FilterDataset(texts(root), filter_fn=is_odd), 2, stage(parity), stage(listed)
        ),
    ],
    GcDataset: [
        lambda root: GcDataset(texts(root), every_n_iter=3),
        lambda root: GcDataset(train(root, "skipping")(QUIET), every_n_iter=0),
    ],
    LogSampleDataset: [
        lambda root: LogSampleDataset(texts(root), "train"),
        lambda root: LogSampleDataset(texts(root), "train", worker_config=LOGGING),
        lambda root: LogSampleDataset(
            BatchDataset(texts(root, repeat=True), 3, stage(listed)), "train", worker_config=LOGGING
        ),
    ],
    BlendDataset: BLEND_CASES,
    ConcatDataset: CONCAT_CASES,
    RepeatDataset: REPEAT_CASES,
    MixBatchDataset: MIX_CASES,
    TokenBlendDataset: TOKEN_CASES,
    MeasureDataset: [lambda root: measured(texts(root))],
    LossWeightDataset: [
        lambda root: LossWeightDataset(BatchDataset(texts(root, loss_weight=0.5), 4, listed)),
        lambda root: LossWeightDataset(texts(root)),
    ],
    WebdatasetSource: SOURCE_CASES,
    OrderDataset: ORDER_CASES,
    MapDataset: MAP_CASES,
    SplitModalityBatchDataset: SPLIT_CASES + PLANNED_BATCH_CASES,
    PlannedBatches: [
        lambda root: PlannedBatches(
            measured(texts(root)), ModalitySplit("source", lengths="index", window=2), batch_size=3
        )
    ],
    ModalityLists: [
        lambda root: ModalityLists(
            measured(texts(root)), ModalitySplit(is_odd, EVEN_SPLIT, window=2), batch_size=3
        )
    ],
    BucketBatchDataset: BUCKET_CASES,
    BucketLists: [
        lambda root: BucketLists(measured(texts(root)), Buckets(window=6), batch_size=4),
        lambda root: BucketLists(measured(texts(root)), Buckets(max_tokens=9, window=6)),
    ],
    BatchLists: [
        lambda root: BatchLists(texts(root, block=4), 4),
        lambda root: BatchLists(texts(root, repeat=True), 4),
        lambda root: BatchLists(texts(root), 4, drop_last=True),
    ],
    GroupLists: [
        lambda root: GroupLists(texts(root), stage(parity), 3),
        lambda root: GroupLists(texts(root, repeat=True), stage(parity), 3),
    ],
    BatchDataset: [
        lambda root: BatchDataset(texts(root), 4, stage(listed)),
        lambda root: BatchDataset(texts(root, repeat=True), 4, stage(listed)),
    ],
    GroupBatchDataset: [
        lambda root: GroupBatchDataset(texts(root), 3, stage(parity), stage(listed)),
        lambda root: GroupBatchDataset(
            MapDataset(texts(root, repeat=True), stage(twice)), 3, stage(parity), stage(listed)
        ),
        lambda root: GroupBatchDataset(
            texts(root), 3, stage(parity), stage(listed), drop_last=True
        ),
    ],
    EpochizeDataset: [lambda root: EpochizeDataset(texts(root, repeat=True), 7)],
    LimitDataset: [lambda root: LimitDataset(texts(root, training=False), 7)],
}


def indexed_texts(folder: Path) -> Path:
    """Texts with a length index of two resources."""
    root = text_set(folder / "texts", NUM_SAMPLES)
    factory = load_factory(root, worker_config=CONFIG)
    numbers = np.arange(NUM_SAMPLES)
    lengths = {"tokens": 1 + numbers % 5, "odd": numbers % 2}
    write_lengths(root, factory.split_part, "index", lengths, factory.data)
    return root


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return indexed_texts(tmp_path_factory.mktemp("laws"))


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GcDataset` would collect the garbage of the test process thousands of times."""
    monkeypatch.setattr("energon_lite.extras.energon.observers.gc.collect", lambda: 0)


@pytest.mark.parametrize(
    ("case", "number"),
    [
        pytest.param(case, i, id=f"{kind.__name__}-{i}")
        for kind, cases in CASES.items()
        for i, case in enumerate(cases)
    ],
)
def test_dataset_keeps_all_laws(case: Case, number: int, root: Path) -> None:
    # Two streams for every eighth case of a kind, and fewer items for what are only other settings;
    # `make soak` has more streams, and more items.
    items = 6 if number < 6 else 4
    check_dataset(case(root), num_streams=(1 if number % 8 else 2,), max_items=items)


@pytest.mark.soak
@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_dataset_keeps_all_laws_in_all_streams(case: Case, root: Path) -> None:
    check_dataset(case(root), max_items=14)


def test_dataset_of_pictures_keeps_all_laws(tmp_path: Path) -> None:
    root = caption_set(tmp_path / "captions", 11)
    check_dataset(train(root, batch_size=2, repeat=False)(CONFIG), max_items=8)


def test_more_streams_than_samples_keep_all_laws(tmp_path: Path) -> None:
    root = text_set(tmp_path / "few", 3)
    check_dataset(train(root)(CONFIG), num_streams=(7,), max_items=3)
    check_dataset(train(root, repeat=False)(CONFIG), num_streams=(7,), max_items=3)


# A plain dataset of two numbers a stream, and what can be wrong with one. It is written as a user
# would write it, from the public base classes alone.


class Numbers(SavableDataset[Any]):
    """The numbers below `stop`, dealt to the streams in turn, as `(number, text)`."""

    text = "number {}"

    def __init__(self, stop: int = 12) -> None:
        self.stop = stop

    def cursor(self, stream: Stream) -> Cursor[Any]:
        return NumbersCursor(self, stream)

    def config(self) -> dict[str, JSON]:
        return {"stage": "numbers", "stop": self.stop}

    def item(self, number: int) -> Any:
        return {"number": number, "text": self.text.format(number)}

    def restore_sample(self, restore_key: RestoreKey) -> Any:
        if restore_key[0] != "numbers":
            raise ValueError(f"{restore_key} is not of this dataset")
        return self.item(restore_key[2])

    def num_items(self, stream: Stream) -> int:
        return len(range(stream.index, self.stop, stream.num_streams))

    def own_traits(self, below: Traits) -> Traits:
        return dataclasses.replace(below, training=True)


class NumbersCursor(Cursor[Any]):
    def __init__(self, numbers: Any, stream: Stream) -> None:
        self.numbers = numbers
        self.stream = stream
        self.place = 0

    def __next__(self) -> Any:
        number = self.place * self.stream.num_streams + self.stream.index
        if number >= self.numbers.stop:
            raise StopIteration
        self.place += 1
        self.key = ("numbers", 0, number, number)
        return self.numbers.item(number)

    def snapshot(self) -> Snapshot:
        return Snapshot("numbers", {"place": self.place})

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("numbers", 0)
        self.place = snapshot.count("place")


def broken(law: str, **overrides: Any) -> Any:
    """A `Numbers` whose cursor has other methods; named after the law that it breaks."""
    methods = {k: v for k, v in overrides.items() if not k.startswith("dataset_")}
    cursor = type("BrokenCursor", (NumbersCursor,), methods)
    of_dataset = {k.removeprefix("dataset_"): v for k, v in overrides.items() if k not in methods}
    made = type("Broken", (Numbers,), {"cursor": lambda self, s: cursor(self, s), **of_dataset})
    return pytest.param(made, law, id=overrides.get("__doc__", law))


def _next_with(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda cursor: change(cursor, NumbersCursor.__next__(cursor))


def _snapshot_with(**fields: Callable[[Any], Any]) -> Callable[[Any], Snapshot]:
    def snapshot(self: Any) -> Snapshot:
        more = {name: make(self) for name, make in fields.items()}
        return Snapshot("numbers", {"place": self.place, **more})

    return snapshot


def _restore_off_by_one(self: Any, snapshot: Snapshot) -> None:
    NumbersCursor.restore(self, snapshot)
    self.place = max(0, self.place - 1)


def _restore_forgets_to_check(self: Any, snapshot: Snapshot) -> None:
    self.place = snapshot.fields.get("place", 0)


def _restore_with_key_error(self: Any, snapshot: Snapshot) -> None:
    snapshot.expect("numbers", 0)
    self.place = snapshot.fields["place"]


def _restore_that_counts(self: Any, snapshot: Snapshot) -> None:
    NumbersCursor.restore(self, snapshot)
    self.numbers.stop -= 1


def _snapshot_that_draws(self: Any) -> Snapshot:
    snapshot = NumbersCursor.snapshot(self)
    self.place += self.place == 3
    return snapshot


def _forgets_the_end(self: Any, snapshot: Snapshot) -> None:
    NumbersCursor.restore(self, snapshot)
    if self.place * self.stream.num_streams + self.stream.index >= self.numbers.stop:
        self.place = 0


def _shared_place(self: Any) -> Any:
    self.numbers.shared = getattr(self.numbers, "shared", 0) + 1
    item = NumbersCursor.__next__(self)
    return {**item, "number": item["number"] + (self.numbers.shared > 200)}


def _noted(self: Any, item: Any) -> Any:
    self.numbers.last = item["number"]
    return item


def _with_one_list(self: Any, item: Any) -> Any:
    held = self.__dict__.setdefault("held", [])
    held.append(item["number"])
    return {**item, "all": held}


def _random_item(self: Any, number: int) -> Any:
    return {
        "number": number,
        "x": [random.random, np.random.rand, lambda: torch.rand(1)][number % 3](),
    }


def _wasteful_item(self: Any, number: int) -> Any:
    random.random()
    return Numbers.item(self, number)


def _same_key(self: Any, item: Any) -> Any:
    self.key = ("numbers", 0, item["number"] // 2, item["number"] // 2)
    return item


def _other_draw(self: Any, item: Any) -> Any:
    self.key = ("numbers", 0, item["number"] // 2, item["number"])
    return item


def _skipping(self: Any) -> Any:
    item = NumbersCursor.__next__(self)
    return NumbersCursor.__next__(self) if item["number"] % 5 == 2 else item


def _takes_any_key(self: Any, restore_key: RestoreKey) -> Any:
    return self.item(int(restore_key[-1]))


def _next_item(self: Any, restore_key: RestoreKey) -> Any:
    return {**Numbers.restore_sample(self, restore_key), "again": True}


def _moves_on_replay(self: Any, restore_key: RestoreKey) -> Any:
    self.text = "seen {}"
    return Numbers.restore_sample(self, restore_key)


BROKEN = [
    broken("Resume", __doc__="an item again", restore=_restore_off_by_one),
    broken("Resume", __doc__="saving moves", snapshot=_snapshot_that_draws),
    broken("Resume", __doc__="starts again after the end", restore=_forgets_the_end),
    broken("Resume", __doc__="restore does nothing", restore=lambda self, snapshot: None),
    broken(
        "Resume", __doc__="saves another state than restored",
        snapshot=_snapshot_with(visits=lambda self: id(self)),
    ),
    broken("Resume", __doc__="gives one list again and again", __next__=_next_with(_with_one_list)),
    broken("", __doc__="restore changes the dataset", restore=_restore_that_counts),
    broken("", __doc__="cursors share a place", __next__=_shared_place),
    broken("Independence", __doc__="notes the last item", __next__=_next_with(_noted)),
    broken(
        "Independence", __doc__="config changes", __next__=_next_with(_noted),
        dataset_config=lambda self: {"last": getattr(self, "last", 0)},
        dataset___getstate__=lambda self: {"stop": self.stop},
    ),
    broken(
        "Independence", __doc__="cannot be pickled",
        dataset___init__=lambda self: self.__dict__.update(stop=12, f=lambda: 0),
    ),
    broken("Partition", __doc__="one key twice", __next__=_next_with(_same_key)),
    broken("Partition", __doc__="one sample drawn twice", __next__=_next_with(_other_draw)),
    broken("Partition", __doc__="drops without a word", __next__=_skipping),
    broken("Replay", __doc__="another item", dataset_restore_sample=_next_item),
    broken("Replay", __doc__="takes any key", dataset_restore_sample=_takes_any_key),
    broken("Replay", __doc__="disturbs iteration", dataset_restore_sample=_moves_on_replay),
    broken(
        "Plain state", __doc__="a tuple as key",
        snapshot=_snapshot_with(seen=lambda self: {1: "a"}),
    ),
    broken(
        "Plain state", __doc__="payloads",
        snapshot=_snapshot_with(cache=lambda self: "x" * 200 * self.place),
    ),
    broken(
        "Plain state", __doc__="all that was given",
        snapshot=_snapshot_with(given=lambda self: tuple(range(2 * self.place))),
    ),
    broken("Refusal", __doc__="takes any state", restore=_restore_forgets_to_check),
    broken("Refusal", __doc__="KeyError", restore=_restore_with_key_error),
    broken("", __doc__="random items", dataset_item=_random_item),
    broken("Not random", __doc__="draws without need", dataset_item=_wasteful_item),
]  # fmt: skip


def test_dataset_that_keeps_the_laws_passes() -> None:
    check_dataset(Numbers())


@pytest.mark.parametrize(("made", "law"), BROKEN)
def test_broken_dataset_is_found_out(
    made: type[Numbers], law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Classes made here have no name that pickle finds, unless they are put where it looks.
    monkeypatch.setattr(f"{__name__}.Broken", made, raising=False)
    made.__module__, made.__qualname__ = __name__, "Broken"
    with pytest.raises(LawError) as caught:
        check_dataset(made(), max_items=14)
    text = str(caught.value)
    assert text.startswith(law)
    assert "Broken, stream " in text or "Broken cannot be pickled" in text


def test_error_names_law_class_stream_position_and_difference() -> None:
    class Changing(Numbers):
        calls = 0

        def item(self, number: int) -> Any:
            Changing.calls += 1
            return {"numbers": [1, number + (Changing.calls == 20)]}

    with pytest.raises(LawError) as caught:
        check_dataset(Changing(8), num_streams=(2,), picklable=False)
    assert str(caught.value) == (
        "Resume: Changing, stream 0 of 2, restored after 0 items, then after 3: item 3 differs at "
        ".item['numbers'][1]: 6 != 7"
    )


def test_dataset_without_items_is_no_vacuous_pass() -> None:
    with pytest.raises(ValueError, match="has no item"):
        check_dataset(Numbers(0))


class EveryNth(Stage[Any]):
    """Keeps every n-th item: a stage of a user's, with state."""

    name, settings = "every_nth", ("n",)

    def __init__(self, dataset: SavableDataset[Any], n: int) -> None:
        super().__init__(dataset)
        self.n = n

    def num_items(self, stream: Stream) -> int:
        return self.dataset.num_items(stream) // self.n

    def own_traits(self, below: Traits) -> Traits:
        return dataclasses.replace(below, drops=True)

    def open(self, inner: Cursor[Any], stream: Stream) -> Cursor[Any]:
        return EveryNthCursor(self, inner)


class EveryNthCursor(StageCursor[Any]):
    saved: ClassVar = {"seen": COUNT}
    seen: int

    def __next__(self) -> Any:
        while True:
            item = next(self.inner)
            self.seen += 1
            if self.seen % self.spec.n == 0:
                return item


@pytest.mark.parametrize("endless", [False, True])
def test_declared_stage_keeps_all_laws(tmp_path: Path, endless: bool) -> None:
    root = text_set(tmp_path / "texts", NUM_SAMPLES)
    dataset = EveryNth(MapDataset(texts(root, repeat=endless), stage(twice)), 3)
    check_dataset(BatchDataset(dataset, 2, stage(listed)), max_items=8)
    assert dataset.config()["n"] == 3
    state = StreamRun(dataset, Stream(0, 1)).snapshot().inner[0].to_json()
    assert isinstance(state, dict)
    assert (state["stage"], state["seen"]) == ("every_nth", 0)


@pytest.mark.parametrize("seen", [-1, 1.5, "many", True, None])
def test_declared_state_of_another_kind_is_refused(seen: Any) -> None:
    run = StreamRun(EveryNth(Numbers(), 3), Stream(0, 1))
    state: Any = run.snapshot().to_json()
    state["inner"][0]["seen"] = seen
    with pytest.raises(StateError, match=f"'every_nth' has seen={seen!r}, which is not a count"):
        run.restore(Snapshot.from_json(state))


def test_half_applied_state_is_found_out() -> None:
    class Half(Numbers):
        def cursor(self, stream: Stream) -> Cursor[Any]:
            return HalfCursor(self, stream)

    class HalfCursor(NumbersCursor):
        def restore(self, snapshot: Snapshot) -> None:
            self.numbers.__dict__["text"] = "garbled {}"
            super().restore(snapshot)
            self.numbers.__dict__.pop("text")

    with pytest.raises(LawError, match=r"Refusal: Half, .* refused; afterwards"):
        check_dataset(Half(), picklable=False)


def test_refused_state_leaves_the_stream_where_it_was() -> None:
    run = StreamRun(Numbers(), Stream(0, 1))
    assert [next(run)["number"] for _ in range(3)] == [0, 1, 2]
    state = run.snapshot().to_json()
    assert isinstance(state, dict)
    for garbage in ("x", -1, None, 1.5):
        with pytest.raises(StateError):
            run.restore(Snapshot.from_json({**state, "items": garbage}))
    assert next(run)["number"] == 3
