"""Batches that are made of columns are those that are made again of their samples."""

from __future__ import annotations

import json
import threading
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    Batch,
    DefaultTaskEncoder,
    TaskEncoder,
    TextSample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.sample_columns import (
    Origin,
    SampleColumns,
    SampleForm,
    joined_samples,
    samples_of,
)
from energon_lite.core.stacking import layout_of
from energon_lite.loader.workers.watchdog import describe_thread
from energon_lite.task_encoder.base import AugmentTaskEncoder

from ..conftest import examples
from ..helpers import text_set


@edataclass
class OwnBatch(Batch):
    text: list[str]


class Missing(NamedTuple):
    absent: list[str]


class Plain(TaskEncoder[Any, Any, Any, Any]):
    pass


class Augmented(AugmentTaskEncoder[Any, Any, Any, Any]):
    @stateless
    def encode_batch(self, batch: Any) -> Any:
        return [batch.text]


def plain(item: Any) -> Any:
    """Returns a batch with its type and all fields, also the hidden one."""
    names = layout_of(type(item))[1]
    if not names:
        return type(item), repr(dict(item) if isinstance(item, dict) else item)
    return type(item), {name: repr(getattr(item, name)) for name in names}


def test_batch_type_is_also_that_of_raw_batches_unless_there_is_one() -> None:
    sample = TextSample(__key__="k", __restore_key__=("a", 0), text="t")
    assert type(DefaultTaskEncoder(batch_type=OwnBatch).batch([sample])) is OwnBatch
    both = DefaultTaskEncoder(batch_type=dict, raw_batch_type=OwnBatch)
    assert type(both.batch([sample])) is OwnBatch


def texts(root: Path, **keywords: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return get_train_dataset(
        root, batch_size=8, worker_config=config, shuffle_buffer_size=20,
        max_samples_per_sequence=10, **keywords,
    )  # fmt: skip


@pytest.mark.parametrize("encoder", [Plain, DefaultTaskEncoder, lambda: Augmented(Plain())])
def test_batches_are_made_of_columns_where_no_hook_looks_at_samples(
    tmp_path, monkeypatch, encoder
) -> None:
    batch, made = SampleColumns.batch, []
    monkeypatch.setattr(SampleColumns, "batch", lambda self: made.append(1) or batch(self))
    loader = get_savable_loader(texts(text_set(tmp_path / "a", 100), task_encoder=encoder()))
    # 100 samples come in blocks of other lengths than those of batches.
    assert len(list(islice(loader, 40))) == len(made) == 40


@pytest.mark.parametrize("encoder", [DefaultTaskEncoder, Plain])
def test_each_batch_is_resumed_and_restored(tmp_path, encoder) -> None:
    root = text_set(tmp_path / "a", 50)
    loader = get_savable_loader(texts(root, task_encoder=encoder()))
    states, batches = [], []
    for batch in islice(loader, 12):
        batches.append(plain(batch))
        assert plain(loader.restore_sample(batch.__restore_key__)) == plain(batch)
        states.append(json.loads(json.dumps(loader.save_state_rank())))
    for place, state in enumerate(states[:-1]):
        again = get_savable_loader(texts(root, task_encoder=encoder())).with_restored_state_rank(
            state
        )
        expected = batches[place + 1 : place + 4]
        assert [plain(batch) for batch in islice(again, len(expected))] == expected


def test_failing_default_batch_names_its_samples(tmp_path, caplog) -> None:
    encoder = DefaultTaskEncoder(raw_batch_type=Missing)
    loader = get_savable_loader(texts(text_set(tmp_path / "a", 30), task_encoder=encoder))
    with pytest.raises(FatalSampleError, match="absent"):
        next(iter(loader))
    assert "stage batch, DefaultTaskEncoder.batch" in caplog.text
    assert "sample 00010, 00012" in caplog.text
    assert "shard-001.tar" in caplog.text


@examples(10)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=6))
def test_joined_parts_have_the_samples_of_all(parts) -> None:
    number, made = 0, []
    for is_columns, size in parts:
        numbers = list(range(number, number + size))
        number += size
        columns = SampleColumns(
            SampleForm(TextSample, "text", []),
            {"a": Origin("/a", {}, 1.0)},
            [
                [str(n) for n in numbers],
                [("a", 0, n, n) for n in numbers],
                [f"text {n}" for n in numbers],
                ["s"] * size,
                [f"{n}.txt" for n in numbers],
            ],
        )
        made.append(columns if is_columns else columns.samples())
    found = joined_samples(made)
    assert [sample.text for sample in samples_of(found)] == [f"text {n}" for n in range(number)]
    are_columns = bool(parts) and all(is_columns for is_columns, _ in parts)
    assert isinstance(found, SampleColumns) == are_columns


def test_hook_that_is_stuck_among_several_samples_is_named(tmp_path) -> None:
    found = []

    class Stuck(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, sample: TextSample) -> TextSample:
            found.append(describe_thread(threading.get_ident()).splitlines()[0])
            return sample

    loader = get_savable_loader(texts(text_set(tmp_path / "a", 30), task_encoder=Stuck()))
    batch = next(iter(loader))
    assert len(found) == len(batch.text)
    for name, text in zip(batch.__key__, found, strict=True):
        assert "It runs stage encode_sample, " in text
        assert f"sample {name} (" in text
