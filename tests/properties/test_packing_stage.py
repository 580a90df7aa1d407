"""Any settings of packing: nothing lost or doubled, no limit exceeded, resumed anywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    SavableDataset,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_train_dataset,
    stateless,
)
from energon_lite.balance import CostModel
from energon_lite.formats.length_files import write_lengths
from energon_lite.sources.dataset_config import load_factory

from ..conftest import examples
from ..helpers import Ranks, assert_same, metadataset, number_of, text_set

SIZES = {"a": 17, "b": 5}
COST = CostModel(token=1, token_squared=0.1, tile=3)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stage")
    for name, size in SIZES.items():
        text_set(folder / name, size)
    return folder


class Encoder(DefaultTaskEncoder):
    """Some samples are skipped, some have tiles, and all have a length by their number."""

    def __init__(self, lengths: list[int], skips: int, packing: Packing) -> None:
        super().__init__()
        self.lengths, self.skips = lengths, skips
        self.packing = packing

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        number = number_of(sample)
        if number % 7 < self.skips:
            raise SkipSample
        length = self.lengths[number % len(self.lengths)]
        ids = torch.full((length,), number + (1000 if sample.__restore_key__[0] == "b" else 0))
        return {"__key__": sample.__key__, "__restore_key__": (), "input_ids": ids}

    def sample_length(self, sample: dict[str, Any]) -> dict[str, int]:
        tokens = len(sample["input_ids"])
        if "tiles" not in self.packing.resources:
            return {"tokens": tokens}
        return {"tokens": tokens, "tiles": tokens % 3 if self.packing.overlong != "split" else 0}


def by_parity(sample: dict[str, Any]) -> bool:
    return int(sample["input_ids"][0]) % 2 == 0


@st.composite
def encoders(draw: Any) -> Encoder:
    planned = {"lengths": "index", "plan_window": draw(st.integers(1, 30))}
    if not draw(st.booleans()):
        planned = {}
    balance = draw(st.sampled_from([None, "quantile_sync", *["global_window"] * len(planned)]))
    # With tokens alone and enough of them buffered, the streaming search sets prices.
    tiles = draw(st.sampled_from([{}, {"tiles": draw(st.integers(2, 9))}]))
    packing = Packing(
        capacity={"tokens": draw(st.integers(8, 40)), **tiles},
        algorithm=draw(st.sampled_from(["streaming", "streaming", "best", "sequential"])),
        buffer_size=draw(st.integers(1, 12) | st.sampled_from([32, 40])),
        max_samples=draw(st.none() | st.integers(1, 4)),
        group_by=draw(
            st.sampled_from([None, "source", "modality", None if planned else by_parity])
        ),
        overlong=draw(st.sampled_from(["drop", "truncate", "split", "alone"])),
        align=draw(st.sampled_from([1, 2, 4])),
        balance=balance,
        balance_window=draw(st.integers(1, 5)),
        cost=(COST if tiles else CostModel(token=1)) if balance else None,
        loss=draw(st.sampled_from(["token", "sample"])),
        layout=draw(st.sampled_from(["padded", "thd"])),
        **planned,
    )
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=12))
    return Encoder(lengths, draw(st.integers(0, 2)), packing)


def write_index(root: Path, encoder: Encoder) -> None:
    """Some of those that are skipped have no length, the others are left out when they are read."""
    for name, size in SIZES.items():
        numbers = np.arange(size)
        tokens = np.array([encoder.lengths[number % len(encoder.lengths)] for number in numbers])
        tokens[(numbers % 7 < encoder.skips) & (numbers % 2 == 0)] = 0
        tiles = tokens % 3 if encoder.packing.overlong != "split" else tokens * 0
        factory = load_factory(root / name)
        write_lengths(
            root / name, "train", "index", {"tokens": tokens, "tiles": tiles}, factory.data
        )


def maker(root: Path, encoder: Encoder, batch_size: int, repeat: bool) -> Any:
    if encoder.packing.lengths is not None:
        write_index(root, encoder)
    members = [{"path": str(root / name), "name": name} for name in SIZES]
    split = {"blend": members, **({} if repeat else {"until": "all_once"})}
    blend = metadataset(split if repeat else {"concat": members})

    def make(config: WorkerConfig) -> SavableDataset[Any]:
        return get_train_dataset(
            blend, worker_config=config, batch_size=batch_size, shuffle_buffer_size=6,
            task_encoder=encoder, repeat=repeat,
        )  # fmt: skip

    return make


def expected_tokens(encoder: Encoder) -> Counter[int]:
    packing, found = encoder.packing, Counter()
    for name, size in SIZES.items():
        for number in range(size):
            if number % 7 < encoder.skips:
                continue
            length = encoder.lengths[number % len(encoder.lengths)]
            is_long = length > packing.longest
            if packing.overlong == "drop" and is_long:
                continue
            kept = min(length, packing.longest) if packing.overlong == "truncate" else length
            found[number + (1000 if name == "b" else 0)] += kept
    return found


@examples(5)
@given(encoder=encoders(), batch_size=st.integers(1, 3), num_streams=st.integers(1, 5))
def test_pass_has_each_token_that_its_policy_keeps_once(
    root, encoder, batch_size, num_streams
) -> None:
    run = Ranks(maker(root, encoder, batch_size, repeat=False), 1, num_streams=num_streams)
    packing = encoder.packing
    found: Counter[int] = Counter()
    for batch in run.rest().values():
        if packing.overlong != "alone":
            longest = packing.tokens * (1 if packing.layout == "padded" else batch_size)
            assert int(batch.cu_seqlens_padded.max()) <= longest
            starts = batch.cu_seqlens_padded[batch.cu_seqlens_padded < packing.tokens]
            assert packing.layout == "thd" or (starts % packing.token_alignment == 0).all()
        found.update(batch.input_ids[batch.segment_ids > 0].tolist())
        if packing.layout == "padded" and packing.max_samples and packing.overlong != "alone":
            assert int((batch.cu_seqlens.diff() > 0).sum(dim=1).max()) <= packing.max_samples
    assert found == expected_tokens(encoder)


@examples(8)
@given(
    encoder=encoders(),
    batch_size=st.integers(1, 3),
    num_streams=st.sampled_from([1, 2, 4, 6]),
    stops=st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(0, 9)), max_size=3),
)
def test_run_resumed_anywhere_on_any_ranks_is_the_unbroken_one(
    root, encoder, batch_size, num_streams, stops
) -> None:
    make = maker(root, encoder, batch_size, repeat=True)
    if not expected_tokens(encoder):
        return  # nothing would ever come
    found: dict[int, Any] = {}
    run = Ranks(make, 1, num_streams=num_streams)
    for world_size, steps in stops:
        found.update(run.steps(steps) if steps else {})
        run = Ranks(make, world_size, states=run.save())
    found.update(run.steps(3))
    expected = Ranks(make, 1, num_streams=num_streams).slots(max(found) + 1)
    assert_same(found, {slot: expected[slot] for slot in found})
