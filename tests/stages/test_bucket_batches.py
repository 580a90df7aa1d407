"""Batches of like lengths: samples are measured once, and may be read many at once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    Buckets,
    DefaultTaskEncoder,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream
from energon_lite.stages.token_lengths import MeasureCursor

from ..conftest import examples
from ..helpers import ignore, number_of, take_singly

NUM_TEXTS = 60
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)


class Lines(DefaultTaskEncoder):
    """Samples whose lengths a list gives, by number; one may be skipped, or fail."""

    def __init__(self, lengths: Any = (3, 1, 4, 1, 5), **buckets: Any) -> None:
        super().__init__()
        self.lengths, self.batching = lengths, Buckets(window=16, **buckets)
        self.measured: list[str] = []

    @stateless
    def preencode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"pre {sample.text}")

    @stateless
    def postencode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"post {sample.text}")

    def sample_length(self, sample: Any) -> Any:
        self.measured.append(sample.__key__)
        found = self.lengths[number_of(sample) % len(self.lengths)]
        if found == "skip":
            raise SkipSample
        return 1 // 0 if found == "fail" else found


def training(root: Any, encoder: Any, **arguments: Any) -> Any:
    arguments = {"batch_size": None, "shuffle_buffer_size": 16, **arguments}
    return get_train_dataset(root, worker_config=ONE, task_encoder=encoder, **arguments)


def test_rest_at_the_end_is_dropped_and_counted_with_drop_last(texts) -> None:
    for drop_last, sizes in ((False, {7: 8, 4: 1}), (True, {7: 8})):
        encoder = Lines()
        dataset = training(texts, encoder, repeat=False, batch_size=7, batch_drop_last=drop_last)
        loader = get_savable_loader(dataset, max_skip_rate=1)
        batches = list(loader)
        assert Counter(len(batch.text) for batch in batches) == sizes
        assert all(text.startswith("post pre") for batch in batches for text in batch.text)
        (stats,) = loader.stats().values()
        assert (stats.samples, stats.skipped) == ((56, 4) if drop_last else (60, 0))
        assert sorted(encoder.measured) == [f"{number:05d}" for number in range(NUM_TEXTS)]


def trace(root: Path, encoder: Any) -> list[Any]:
    """What comes out of a run, with the state after each batch and what was counted."""
    run = StreamRun(training(root, encoder), Stream(0, 1), max_skip_rate=1)
    found = [
        (batch.__restore_key__, batch.text, json.dumps(run.snapshot().to_json()))
        for batch in islice(run, 12)
    ]
    skipped = [(record.restore_key, record.error) for record in run.context.take_records()]
    draws = [(row[0], row[1], row[4]) for row in run.context.take_costs()]
    return [*found, run.context.tokens, draws, sorted(skipped)]


@examples(8)
@given(
    lengths=st.lists(
        st.one_of(
            st.integers(1, 33), st.sampled_from(["skip", "fail"]),
            st.integers(1, 33).map(np.int64), st.integers(1, 33).map(lambda n: {"tokens": n}),
        ),
        min_size=1, max_size=20,
    ).filter(lambda found: any(length in range(33) for length in found)),
    is_by_source=st.booleans(),
)  # fmt: skip
def test_reading_many_samples_at_once_equals_reading_one_by_one(
    texts, lengths: list[Any], is_by_source: bool
) -> None:
    group_by = "source" if is_by_source else None
    settings = {"overlong": "drop", "group_by": group_by, "max_tokens": 32}
    with pytest.MonkeyPatch.context() as patch:
        take_singly(patch, MeasureCursor)
        expected = trace(texts, Lines(lengths, **settings))
    assert trace(texts, Lines(lengths, **settings)) == expected
