"""Packs planned by a length index: laws, what the plan knows, what is left out, what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.balance import CostModel, imbalance
from energon_lite.batching.window_packs import pack_planned
from energon_lite.core.dataset import SavableDataset, StreamRun
from energon_lite.core.errors import StateError
from energon_lite.core.state import Snapshot
from energon_lite.core.topology import Stream
from energon_lite.extras.lengths.length_index import measure_lengths

from ..conftest import examples
from ..helpers import (
    ignore,
    metadataset,
    number_of,
    text_set,
    through_json,
)

NUM_SAMPLES = 600
COST = CostModel(token=1, token_squared=0.1)
SHARED: dict[str, Any] = {"balance": "global_window", "balance_window": 8, "cost": COST}
BROKEN, SKIPPED = 17, 23


def length_of(number: int) -> int:
    return 1 + number * 7919 % 61


class Encoder(DefaultTaskEncoder):
    """Packs are lists of numbers."""

    def __init__(self, length: Callable[[int], int] = length_of, **packing: Any) -> None:
        super().__init__()
        self.length = length
        self.packing = Packing(**{"capacity": 64, "lengths": "index", **packing})

    def sample_length(self, sample: TextSample) -> Any:
        number = number_of(sample)
        assert self.packing is not None
        if len(self.packing.resources) == 1:
            return self.length(number)
        return {"tokens": self.length(number), "tiles": number % 3}

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> list[int]:
        return [number_of(sample) for sample in samples]

    @stateless
    def slice_sample(self, sample: TextSample, start: int, stop: int) -> TextSample:
        return sample


class Failing(Encoder):
    """One sample fails when it is read, another is skipped then."""

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        if number_of(sample) == BROKEN:
            raise ValueError("broken")
        if number_of(sample) == SKIPPED:
            raise SkipSample
        return sample


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = text_set(tmp_path_factory.mktemp("planned") / "texts", NUM_SAMPLES)
    measure_lengths(root, Encoder(), name="index", num_workers=0)
    both = Encoder(capacity={"tokens": 64, "tiles": 9})
    measure_lengths(root, both, name="both", num_workers=0)
    return root


def config(rank: int = 0, world_size: int = 1, **more: Any) -> WorkerConfig:
    return WorkerConfig(
        **{
            "rank": rank, "world_size": world_size, "num_workers": 0, "num_streams": 4,
            "global_error_handler": ignore, **more,
        }
    )  # fmt: skip


def packed(
    path: Any, encoder: Encoder, worker_config: WorkerConfig | None = None, **more: Any
) -> SavableDataset[Any]:
    given = {"batch_size": None, "repeat": False, "shuffle_buffer_size": 50, **more}
    return get_train_dataset(
        path, task_encoder=encoder, worker_config=worker_config or config(), **given
    )


def lists_of(dataset: SavableDataset[Any], stream: int = 0, num_streams: int = 4) -> list[Any]:
    return list(StreamRun(dataset, Stream(stream, num_streams)))


def steps_of(dataset: SavableDataset[Any], num_streams: int = 4) -> list[tuple[Any, ...]]:
    """What all streams give in each cycle that is whole."""
    return list(zip(*(lists_of(dataset, s, num_streams) for s in range(num_streams)), strict=False))


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 12), max_size=60),
    num_groups=st.integers(1, 3),
    multiple=st.integers(1, 4),
    is_last=st.booleans(),
    choices=st.fixed_dictionaries(
        {},
        optional={
            "max_samples": st.integers(1, 4),
            "drop_last": st.booleans(),
            "end_of_data": st.sampled_from(["pack", "drop"]),
            "algorithm": st.sampled_from(["streaming", "best", "first_fit", "sequential"]),
            "align": st.integers(1, 4),
        },
    ),
    waited=st.integers(0, 60),
)
def test_window_loses_nothing_and_keeps_its_multiple(
    lengths: list[int], num_groups: int, multiple: int, is_last: bool, choices: Any, waited: int
) -> None:
    packing = Packing(8, overlong="alone", **choices)  # above 8, each is alone
    groups = np.arange(len(lengths)) % num_groups
    rows = np.array(lengths, dtype=np.int64).reshape(-1, 1)
    found = pack_planned(
        rows, groups, np.arange(len(lengths)) < waited, packing, multiple=multiple, is_last=is_last
    )
    packs = found.packs.tolist()
    everything = sorted([i for pack in packs for i in pack] + found.carried.tolist())
    assert everything == list(range(len(lengths)))
    align = packing.token_alignment
    for pack, group in zip(packs, found.groups.tolist(), strict=True):
        assert {i % num_groups for i in pack} == {group}
        assert len(pack) == 1 or sum(-(-lengths[i] // align) * align for i in pack) <= 8
    if not is_last:
        assert all(count % multiple == 0 for count in Counter(found.groups.tolist()).values())
    elif not packing.drop_last and packing.end_of_data == "pack":
        assert not len(found.carried)


def test_streams_of_a_shared_plan_have_similar_packs(root: Path) -> None:
    def idle(**more: Any) -> float:
        steps = steps_of(packed(root, Encoder(plan_window=150, **more)))
        costs = [[sum(COST.combine(n, n * n) for n in map(length_of, p)) for p in s] for s in steps]
        return float(imbalance(np.array(costs, dtype=float)))

    assert idle(**SHARED) < 0.5 * idle(cost=COST)


def test_batches_of_a_shared_plan_are_of_one_group(root: Path) -> None:
    encoder = Listing(
        capacity={"tokens": 64, "tiles": 9}, lengths="both", group_by="modality", plan_window=80,
        **SHARED,
    )  # fmt: skip
    dataset = packed(root, encoder, batch_size=3, repeat=True)
    runs = [StreamRun(dataset, Stream(index, 4)) for index in range(4)]
    kinds = []
    for _ in range(40):
        step = [next(run) for run in runs]
        assert {len(batch) for batch in step} == {3}
        found = {number % 3 > 0 for batch in step for pack in batch for number in pack}
        assert len(found) == 1
        kinds += found
    assert len(set(kinds)) == 2


def test_finite_streams_of_a_shared_plan_differ_by_a_pack_at_most(root: Path) -> None:
    dataset = packed(root, Encoder(plan_window=40, **SHARED))
    counts = [len(lists_of(dataset, stream)) for stream in range(4)]
    assert max(counts) - min(counts) <= 1
    dropping = packed(root, Encoder(plan_window=40, drop_last=True, **SHARED))
    assert len({len(lists_of(dropping, stream)) for stream in range(4)}) == 1


def test_regression_pass_without_a_pack_yields_nothing(tmp_path: Path) -> None:
    encoder = Encoder(lambda number: 70, overlong="drop")
    path = text_set(tmp_path / "texts", 9)
    measure_lengths(path, encoder, name="index", num_workers=0)
    dataset = packed(path, encoder, batch_size=2)
    assert lists_of(dataset) == []
    assert list(get_savable_loader(dataset, max_skip_rate=1)) == []


def test_what_fails_leaves_its_place_empty_and_is_counted(root: Path) -> None:
    dataset = packed(root, Failing(plan_window=40))
    expected = packed(root, Encoder(plan_window=40))
    gone, records = {BROKEN, SKIPPED}, []
    for index in range(4):
        run = StreamRun(dataset, Stream(index, 4))
        kept = [[n for n in pack if n not in gone] for pack in lists_of(expected, index)]
        assert list(run) == [pack for pack in kept if pack]
        records += run.context.take_records()
    assert sorted(record.on_purpose for record in records) == [False, True]


def test_regression_packs_that_fail_whole_do_not_damage_a_state(root: Path) -> None:
    """They waited with the others for their turn, and a checkpoint with them was refused."""

    class EveryOther(Encoder):
        @stateless
        def encode_sample(self, sample: TextSample) -> TextSample:
            if number_of(sample) % 2:
                raise SkipSample
            return sample

    encoder = EveryOther(
        max_samples=1, plan_window=5, balance="quantile_sync", balance_window=6, cost=COST
    )
    dataset = packed(root, encoder)
    whole = lists_of(dataset)
    numbers = [number for stream in range(4) for (number,) in lists_of(dataset, stream)]
    assert sorted(numbers) == list(range(0, NUM_SAMPLES, 2))
    run = StreamRun(dataset, Stream(0, 4))
    for place in range(40):
        resumed = StreamRun(dataset, Stream(0, 4))
        resumed.restore(Snapshot.from_json(json.loads(json.dumps(run.snapshot().to_json()))))
        assert [next(resumed) for _ in range(9)] == whole[place : place + 9]
        next(run)


@pytest.mark.parametrize("more", [{}, SHARED], ids=["own", "shared"])
def test_each_sample_counts_with_its_own_pack(root: Path, more: dict[str, Any]) -> None:
    """Also beside such that fail: else it counts again after a resume between the two packs."""

    class OneInFive(Encoder):
        @stateless
        def encode_sample(self, sample: TextSample) -> TextSample:
            if number_of(sample) % 5 == 2 or 50 <= number_of(sample) < 80:
                raise ValueError("broken")
            return sample

    dataset = packed(root, OneInFive(plan_window=40, capacity=40, overlong="split", **more))

    def counted(streams: Iterable[int], has_resumes: bool) -> Counter[str]:
        found: Counter[str] = Counter()
        for index in streams:
            run = StreamRun(dataset, Stream(index, 4), max_skip_rate=1)
            is_over = False
            while not is_over:
                if has_resumes:
                    snapshot = run.snapshot()
                    run = StreamRun(dataset, Stream(index, 4), max_skip_rate=1)
                    run.restore(snapshot)
                is_over = next(run, None) is None
                found["skipped"] += len(run.context.take_records())
                for _, draws, _, _, tokens, overlong, *_ in run.context.take_costs():
                    found.update(draws=draws, tokens=tokens, overlong=overlong)
        return found

    failing = [n for n in range(NUM_SAMPLES) if n % 5 == 2 or 50 <= n < 80]
    whole = counted(range(4), has_resumes=False)
    assert whole["draws"] == NUM_SAMPLES
    assert whole["skipped"] == len(failing)
    assert whole["tokens"] == sum(length_of(n) for n in range(NUM_SAMPLES) if n not in failing)
    assert counted((0, 3), has_resumes=True) == counted((0, 3), has_resumes=False)


def test_samples_without_length_are_skipped_and_counted(tmp_path: Path) -> None:
    root = text_set(tmp_path / "texts", 60)
    measure_lengths(root, Failing(), name="index", num_workers=0)
    dataset = packed(root, Encoder())
    records = []
    for index in range(4):
        run = StreamRun(dataset, Stream(index, 4))
        given = [number for pack in run for number in pack]
        assert not {BROKEN, SKIPPED} & set(given)
        records += run.context.take_records()
    assert len(records) == 2
    assert all("length 0" in record.error for record in records)


@pytest.mark.parametrize("more", [{}, SHARED], ids=["own", "shared"])
def test_drops_are_counted_once_also_after_a_resume(root: Path, more: dict[str, Any]) -> None:
    dataset = packed(root, Encoder(capacity=50, overlong="drop", plan_window=30, **more))
    dropped = []
    for index in range(4):
        run = StreamRun(dataset, Stream(index, 4))
        while True:
            snapshot = run.snapshot()
            run = StreamRun(dataset, Stream(index, 4))
            run.restore(snapshot)
            if next(run, None) is None:
                break
            dropped += [record.restore_key for record in run.context.take_records()]
    expected = [i for i in range(NUM_SAMPLES) if length_of(i) > 50]
    assert sorted(key[2] for key in dropped) == expected


def test_other_index_is_noticed_by_a_checkpoint(tmp_path: Path) -> None:
    root = text_set(tmp_path / "texts", 60)
    for shift, expected in ((0, None), (1, "lengths")):
        measure_lengths(
            root, Encoder(lambda n, s=shift: 1 + s + n % 9), name="index", num_workers=0
        )
        encoder = Encoder(lambda n, s=shift: 1 + s + n % 9)
        loader = get_savable_loader(packed(root, encoder, repeat=True))
        if expected is None:
            next(iter(loader))
            state = through_json(loader.save_state_rank())
            (root / ".nv-meta/energon_lite/lengths/index/train.json").unlink()
            continue
        with pytest.raises(StateError, match=expected):
            loader.restore_state_rank(state)


def test_validation_knows_its_packs(root: Path) -> None:
    dataset = get_val_dataset(
        root, split_part="train", batch_size=2, task_encoder=Listing(), worker_config=config()
    )
    assert len(dataset) == sum(1 for _ in get_savable_loader(dataset))


class Listing(Encoder):
    @stateless
    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


def test_lengths_of_tokens_alone_tell_no_modalities(root: Path) -> None:
    with pytest.raises(ValueError, match="tokens only"):
        packed(root, Encoder(group_by="modality"))


def blend_of(root: Path, weight: float) -> dict[str, Any]:
    entries = [{"path": str(root), "weight": 1}, {"path": str(root), "weight": weight}]
    return metadataset({"blend": entries})


def test_hooks_that_draw_are_called_in_the_order_of_the_packs(root: Path) -> None:
    """So the numbers in a first item, which are not seeded for each call, stay as they were."""
    called: list[str] = []

    class Drawing(Encoder):
        def encode_sample(self, sample: TextSample) -> TextSample:
            called.append(f"{sample.__key__} of {sample.__restore_key__[0]}")
            random.random()
            return sample

        @stateless
        def pack_selected_samples(self, samples: list[TextSample]) -> Any:
            return [f"{sample.__key__} of {sample.__restore_key__[0]}" for sample in samples]

    dataset = packed(blend_of(root, 1), Drawing(capacity=640), repeat=True)
    packs = next(StreamRun(dataset, Stream(0, 4)))
    assert called == packs
    assert len({name.partition(" ")[2] for name in called}) == 2
