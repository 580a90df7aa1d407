"""Batches of like lengths: nothing lost, nothing over the budget, resumed bit by bit."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import (
    BucketBatchDataset,
    Buckets,
    DefaultTaskEncoder,
    Packing,
    SavableDataset,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.keys import leaves
from energon_lite.core.topology import Stream
from energon_lite.stages.token_lengths import MeasureCursor

from ..helpers import Ranks, ignore, metadataset, number_of, take_singly, text_set

NUM_SAMPLES = 60
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("buckets") / "texts", NUM_SAMPLES)


class Lines(DefaultTaskEncoder):
    """Samples whose lengths a list gives, by number."""

    def __init__(self, lengths: Any = None, **buckets: Any) -> None:
        super().__init__()
        self.lengths = lengths or [1 + (7 * i) % 13 for i in range(NUM_SAMPLES)]
        if not {"batch_size_fn", "max_tokens"} & buckets.keys():
            buckets["max_tokens"] = 32
        self.batching = Buckets(**{"window": 16, **buckets})

    def length_of(self, number: int) -> int:
        return int(self.lengths[number % len(self.lengths)])

    def sample_length(self, sample: Any) -> int:
        return self.length_of(number_of(sample))

    @stateless
    def encode_batch(self, batch: Any) -> dict[str, Any]:
        numbers = [int(key) for key in batch.__key__]
        return {
            "numbers": numbers,
            "lengths": [self.length_of(number) for number in numbers],
            "texts": batch.text,
            "slot": self.current_batch_index,
            "keys": batch.__restore_key__[2:],
        }


class Fixed(Lines):
    """Batches of a fixed number of samples."""

    def __init__(self, lengths: Any = None, **buckets: Any) -> None:
        super().__init__(lengths, **{"max_tokens": None, **buckets})


def training(root: Any, encoder: Any, config: WorkerConfig = ONE, **arguments: Any) -> Any:
    arguments = {"batch_size": None, "shuffle_buffer_size": 16, **arguments}
    return get_train_dataset(root, worker_config=config, task_encoder=encoder, **arguments)


def one_pass(root: Path, encoder: Any, **arguments: Any) -> tuple[list[Any], Any]:
    """All batches of a pass over the data, and the loader that gave them."""
    dataset = training(root, encoder, repeat=False, **arguments)
    loader = get_savable_loader(dataset, max_skip_rate=1, watchdog_timeout_seconds=None)
    return list(iter(loader)), loader


def numbers_of(batches: list[Any]) -> list[int]:
    return sorted(number for batch in batches for number in batch["numbers"])


def area(batch: Any, align: int = 1) -> int:
    return len(batch["lengths"]) * (-(-max(batch["lengths"]) // align) * align)


def padding(batches: list[Any]) -> float:
    return 1 - sum(sum(b["lengths"]) for b in batches) / sum(map(area, batches))


def blend_of(*paths: Path, **keys: Any) -> dict[str, Any]:
    entries = [{"path": str(path), "name": path.name} for path in paths]
    return metadataset({**keys, "blend": entries})


# ---------------------------------------------------------------------------------- conservation


def test_batch_that_needs_several_windows_is_full(root) -> None:
    batches, _ = one_pass(root, Fixed(window=4), batch_size=20)
    assert [len(batch["numbers"]) for batch in batches] == [20, 20, 20]


def test_rest_at_the_end_is_dropped_and_counted_with_drop_last(root) -> None:
    for drop_last, sizes in ((False, {7: 8, 4: 1}), (True, {7: 8})):
        batches, loader = one_pass(root, Fixed(), batch_size=7, batch_drop_last=drop_last)
        assert Counter(len(batch["numbers"]) for batch in batches) == sizes
        (stats,) = loader.stats().values()
        assert (stats.samples, stats.skipped) == ((56, 4) if drop_last else (60, 0))


# --------------------------------------------------------- what others of this kind are known for


def test_windows_leave_no_short_batches_behind(root) -> None:
    batches, _ = one_pass(root, Fixed(window=10), batch_size=4)
    assert [len(batch["numbers"]) for batch in batches] == [4] * 15
    endless = islice(get_savable_loader(training(root, Fixed(window=7), batch_size=4)), 200)
    assert {len(batch["numbers"]) for batch in endless} == {4}


def test_groups_whose_lengths_alternate_have_full_batches(root) -> None:
    # Sorted by length alone, each neighbour is of the other group.
    encoder = Fixed(list(range(1, 61)), group_by=lambda sample: number_of(sample) % 2, window=20)
    batches, _ = one_pass(root, encoder, batch_size=4)
    sizes = Counter(len(batch["numbers"]) for batch in batches)
    assert sizes == {4: 14, 2: 2}
    assert all(len({number % 2 for number in batch["numbers"]}) == 1 for batch in batches)


def test_rare_group_waits_and_comes_in_the_end(root) -> None:
    encoder = Fixed(group_by=lambda sample: number_of(sample) == 7, window=8)
    batches, _ = one_pass(root, encoder, batch_size=3)
    assert numbers_of(batches) == list(range(NUM_SAMPLES))
    assert [7] in [batch["numbers"] for batch in batches]


class Listening(Lines):
    """Records which samples are made."""

    def __init__(self, lengths: Any = None, **buckets: Any) -> None:
        super().__init__(lengths, **buckets)
        self.calls: list[str] = []
        self.measured: list[str] = []

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        self.calls.append(sample.__key__)
        return sample

    def sample_length(self, sample: Any) -> int:
        self.measured.append(sample.__key__)
        return super().sample_length(sample)


def test_samples_are_measured_once(root) -> None:
    encoder = Listening()
    one_pass(root, encoder)
    assert sorted(encoder.measured) == [f"{number:05d}" for number in range(NUM_SAMPLES)]


# ---------------------------------------------------------------------------------------- windows


def test_reading_keeps_pace_so_that_no_batch_waits_for_a_whole_window(root) -> None:
    encoder = Listening(max_tokens=None, window=40)
    reads = []
    for _ in islice(get_savable_loader(training(root, encoder, batch_size=4)), 60):
        reads.append(len(encoder.calls))
        encoder.calls.clear()
    assert reads == [44] + [4] * 59


def test_larger_windows_pad_less(root) -> None:
    lengths = [1 + (37 * i) % 101 for i in range(NUM_SAMPLES)]
    shares = []
    for window in (8, 32, 256):
        loader = get_savable_loader(training(root, Fixed(lengths, window=window), batch_size=4))
        shares.append(padding(list(islice(loader, 300))))
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.04


def test_order_of_batches_does_not_go_by_length(root) -> None:
    batches = list(islice(get_savable_loader(training(root, Lines(window=48))), 400))
    means = np.array([np.mean(batch["lengths"]) for batch in batches])
    means -= means.mean()
    assert abs(np.mean(means[1:] * means[:-1]) / means.var()) < 0.25


def test_streams_yield_batches_of_similar_lengths_at_the_same_step(root) -> None:
    lengths = [1 + (37 * i) % 101 for i in range(NUM_SAMPLES)]

    def make(config: WorkerConfig) -> SavableDataset[Any]:
        return training(root, Fixed(lengths, window=60), config, batch_size=4)

    slots = Ranks(make, 4, num_streams=4).steps(90)
    longest = np.array([max(slots[slot]["lengths"]) for slot in sorted(slots)]).reshape(-1, 4)
    assert longest.mean() / longest.max(1).mean() > 0.9


def test_order_is_another_in_each_window(root) -> None:
    lengths = [1 + (37 * i) % 101 for i in range(NUM_SAMPLES)]
    for longest_first in (False, True):
        encoder = Fixed(lengths, window=60, longest_first=longest_first)
        batches = islice(get_savable_loader(training(root, encoder, batch_size=4)), 20 * 15)
        areas = np.array([area(batch) for batch in batches]).reshape(20, 15)
        firsts = (areas.argmax(1) == 0).sum()
        assert longest_first <= firsts < 8
        assert len({tuple(order) for order in areas.argsort(1).tolist()}) > 15


def test_longest_batch_comes_first_by_setting(root) -> None:
    batches, _ = one_pass(root, Fixed(window=99, longest_first=True), batch_size=6)
    assert max(batches[0]["lengths"]) == 13
    assert area(batches[0]) == max(map(area, batches))
    others, _ = one_pass(root, Fixed(window=99), batch_size=6)
    assert sorted(map(area, others)) == sorted(map(area, batches))


# ---------------------------------------------------------------------------------------- resumes


# --------------------------------------------------------------------------------------- pipeline


def test_blend_of_tokens_counts_what_comes_into_batches(root, tmp_path) -> None:
    blend = blend_of(root, text_set(tmp_path / "other", 50), unit="tokens")

    class Mixed(Lines):
        def sample_length(self, sample: Any) -> int:
            is_long = sample.__restore_key__[0] == "texts" and number_of(sample) % 2
            return 100 if is_long else super().sample_length(sample)

    encoder = Mixed(overlong="drop")
    loader = get_savable_loader(training(blend, encoder), max_skip_rate=1)
    found: Counter[str] = Counter()
    for batch in islice(loader, 500):
        for key, length in zip(batch["keys"], batch["lengths"], strict=True):
            found[next(leaves(key))[0]] += length
    assert found["texts"] == pytest.approx(sum(found.values()) / 2, rel=0.05)


def test_both_encoding_hooks_run_before_samples_share_a_batch(root) -> None:
    class Both(Lines):
        @stateless
        def preencode_sample(self, sample: TextSample) -> TextSample:
            return TextSample.derive_from(sample, text=f"pre {sample.text}")

        @stateless
        def postencode_sample(self, sample: TextSample) -> TextSample:
            return TextSample.derive_from(sample, text=f"post {sample.text}")

    batches, _ = one_pass(root, Both())
    assert all(text.startswith("post pre") for batch in batches for text in batch["texts"])


class Unmeasured(DefaultTaskEncoder):
    batching = Buckets(max_tokens=8)


class Packed(Lines):
    packing = Packing(64)


class Grouped(Lines):
    @stateless
    def batch_group_criterion(self, sample: TextSample) -> tuple[int, None]:
        return 0, None


class Wrong(Lines):
    def __init__(self) -> None:
        super().__init__()
        self.batching = 8192  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("encoder", "error", "text"),
    [
        (Unmeasured, ValueError, "Unmeasured has `batching`, but does not say how long"),
        (Packed, ValueError, "Packed has both `batching` and packing"),
        (Grouped, ValueError, "Grouped has both `batching` and batch_group_criterion"),
        (Wrong, TypeError, "Wrong.batching=8192; make it Buckets"),
        (Fixed, ValueError, "batch_size=None, and Buckets has neither max_tokens nor"),
    ],
)
def test_pipeline_that_cannot_batch_by_length_is_refused_when_it_is_built(
    root, encoder, error, text
) -> None:
    with pytest.raises(error, match=text):
        training(root, encoder())


def test_length_may_be_among_others(root) -> None:
    class Resources(Lines):
        def sample_length(self, sample: Any) -> Any:
            return {"tiles": 3, "tokens": np.int64(super().sample_length(sample))}

    batches, _ = one_pass(root, Resources())
    plain, _ = one_pass(root, Lines())
    assert [b["numbers"] for b in batches] == [b["numbers"] for b in plain]


def test_stage_works_without_a_task_encoder(root) -> None:
    @stateless
    def keys(samples: list[TextSample]) -> list[str]:
        return [sample.__key__ for sample in samples]

    source = get_train_dataset(
        root, worker_config=ONE, batch_size=None, shuffle_buffer_size=None, repeat=False
    )
    dataset = BucketBatchDataset(
        source, Buckets(window=8), keys, sample_length=lambda sample: len(sample.text), batch_size=7
    )
    batches = list(dataset)
    assert len(dataset) == len(batches) == 9
    assert sorted(key for batch in batches for key in batch) == [
        f"{number:05d}" for number in range(NUM_SAMPLES)
    ]


class Kinds(Lines):
    """Samples that have a length of each kind, are skipped, or fail."""

    def length_of(self, number: int) -> int:
        return 0

    def sample_length(self, sample: Any) -> Any:
        found = self.lengths[number_of(sample) % len(self.lengths)]
        if found == "skip":
            raise SkipSample
        return 1 // 0 if found == "fail" else found


def trace(root: Path, encoder: Any) -> list[Any]:
    """What comes out of a run, with the state after each batch and what was counted."""
    run = StreamRun(training(root, encoder), Stream(0, 1), max_skip_rate=1)
    found = [(batch, json.dumps(run.snapshot().to_json())) for batch in islice(run, 12)]
    skipped = [(record.restore_key, record.error) for record in run.context.take_records()]
    draws = [(source, draws, tokens) for source, draws, _, _, tokens, _ in run.context.take_costs()]
    return [*found, run.context.tokens, draws, sorted(skipped)]


@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(
        st.one_of(
            st.integers(1, 33), st.sampled_from(["skip", "fail"]),
            st.integers(1, 33).map(np.int64), st.integers(1, 33).map(lambda n: {"tokens": n}),
        ),
        min_size=1, max_size=20,
    ).filter(lambda found: any(length in range(33) for length in found)),
    is_by_source=st.booleans(), size=st.sampled_from([None, 3]),
)  # fmt: skip
def test_reading_many_samples_at_once_equals_reading_one_by_one(
    root: Path, lengths: list[Any], is_by_source: bool, size: int | None
) -> None:
    group_by = "source" if is_by_source else None
    settings = {"overlong": "drop", "group_by": group_by, "max_tokens": 32}

    with pytest.MonkeyPatch.context() as patch:
        take_singly(patch, MeasureCursor)
        expected = trace(root, Kinds(lengths, **settings))
    assert trace(root, Kinds(lengths, **settings)) == expected
