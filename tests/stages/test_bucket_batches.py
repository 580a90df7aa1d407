"""Batches of like lengths: samples are measured once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from energon_lite import (
    Buckets,
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from ..helpers import ignore, number_of

NUM_TEXTS = 60
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)


class Lines(DefaultTaskEncoder):
    """Samples whose lengths repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.batching = Buckets(window=16)
        self.measured: list[str] = []

    @stateless
    def preencode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"pre {sample.text}")

    @stateless
    def postencode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"post {sample.text}")

    def sample_length(self, sample: Any) -> Any:
        self.measured.append(sample.__key__)
        return (3, 1, 4, 1, 5)[number_of(sample) % 5]


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
