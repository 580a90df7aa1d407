"""Batches that are made of columns equal those made of samples, whatever the encoder does."""

from __future__ import annotations

import json
import random
import tempfile
import threading
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    Batch,
    DefaultTaskEncoder,
    SkipSample,
    TaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
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
from energon_lite.sources.sample_loader import SampleLoader
from energon_lite.stages.map import MapCursor
from energon_lite.task_encoder.base import AugmentTaskEncoder

from ..conftest import examples, write_tar
from ..helpers import metadataset, prepared, take_singly, text_set

# The bytes of the text of a sample, and whether it has a second part; some cannot be decoded.
TEXTS = st.sampled_from([b"", b"abc", "zwölf".encode(), b"\xff\xfe", b"x" * 900])
SAMPLES = st.lists(st.tuples(TEXTS, st.sampled_from([False] * 9 + [True])), min_size=1, max_size=50)


@edataclass
class OwnBatch(Batch):
    text: list[str]


class Pair(NamedTuple):
    text: list[str]


class Missing(NamedTuple):
    absent: list[str]


class Plain(TaskEncoder[Any, Any, Any, Any]):
    pass


class Undecoded(DefaultTaskEncoder):
    decoder = None


class EncodesSamples(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        if sample.text == "abc":
            raise SkipSample
        sample.text += "!"
        return sample


class EncodesTwice(EncodesSamples):
    @stateless(restore_seeds=True)
    def postencode_sample(self, sample: TextSample) -> dict[str, Any]:
        if sample.text == "!":
            raise ValueError("empty")
        noise = float(torch.rand(())) + random.random()
        return {**basic_sample_keys(sample), "text": sample.text, "noise": noise}


class Draws(EncodesSamples):
    def postencode_sample(self, sample: TextSample) -> TextSample:
        sample.text += str(random.random())
        return sample


class DrawsBefore(DefaultTaskEncoder):
    def encode_sample(self, sample: TextSample) -> TextSample:
        sample.text += str(random.random())
        return sample

    @stateless
    def postencode_sample(self, sample: TextSample) -> TextSample:
        if sample.text.startswith("zw"):
            raise SkipSample
        return sample


class Batches(DefaultTaskEncoder):
    @stateless
    def batch(self, samples: list[TextSample]) -> Any:
        assert type(samples) is list
        return super().batch([sample for sample in samples if sample.text] or samples)


class EncodesBatches(DefaultTaskEncoder):
    @stateless
    def encode_batch(self, batch: TextSample) -> Any:
        if not batch.text[0]:
            raise ValueError("empty")
        for flavors in batch.__subflavors__ or []:
            flavors["seen"] = batch.__key__
        return {"text": batch.text, "keys": batch.__restore_key__, "of": batch.__sources__}


class Augmented(AugmentTaskEncoder[Any, Any, Any, Any]):
    @stateless
    def encode_batch(self, batch: Any) -> Any:
        return [batch.text]


ENCODERS = [
    Plain, DefaultTaskEncoder, Undecoded, EncodesSamples, Batches, EncodesBatches,
    lambda: DefaultTaskEncoder(raw_batch_type=dict), lambda: DefaultTaskEncoder(batch_type=Pair),
    lambda: DefaultTaskEncoder(raw_batch_type=OwnBatch, batch_type=dict),
    lambda: DefaultTaskEncoder(encoded_sample_type=dict), lambda: Augmented(DefaultTaskEncoder()),
    lambda: DefaultTaskEncoder(raw_batch_type=Missing), lambda: Augmented(Batches()),
    EncodesTwice, Draws, DrawsBefore,
]  # fmt: skip


def plain(item: Any) -> Any:
    """Returns a batch with its type and all fields, also the hidden one."""
    names = layout_of(type(item))[1]
    if not names:
        return type(item), repr(dict(item) if isinstance(item, dict) else item)
    return type(item), {name: repr(getattr(item, name)) for name in names}


def run_of(dataset: Any, num: int) -> list[Any]:
    """Returns the batches, with the state after each, and what was counted."""
    loader = get_savable_loader(dataset, max_skip_rate=1)
    found: list[Any] = []
    try:
        for item in islice(loader, num):
            found.append((plain(item), loader.save_state_rank()["streams"]))
    except FatalSampleError as error:  # too many failures in a row
        found.append(str(error))
    stats = {name: (s.samples, s.draws, s.skipped) for name, s in loader.stats().items()}
    return [*found, stats]


def by_samples(dataset: Any, num: int, *, one_by_one: bool = False) -> list[Any]:
    """Returns the same where samples are made first, and batches of these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskEncoder, "_takes_columns", property(lambda self: False))
        if one_by_one:
            patch.setattr(SampleLoader, "together", lambda self, block: None)
            take_singly(patch, MapCursor)
        return run_of(dataset(), num)


def written(folder: Path, name: str, samples: list[Any]) -> Path:
    root = folder / name
    root.mkdir()
    members = [
        (f"{name}{i:03d}.{part}", text)
        for i, (text, has_more) in enumerate(samples)
        for part in (("jpg", "txt") if has_more else ("txt",))
    ]
    write_tar(root / "a.tar", members)
    return prepared(root, "TextSample", {"text": "txt"})


def test_batch_type_is_also_that_of_raw_batches_unless_there_is_one() -> None:
    sample = TextSample(__key__="k", __restore_key__=("a", 0), text="t")
    assert type(DefaultTaskEncoder(batch_type=OwnBatch).batch([sample])) is OwnBatch
    both = DefaultTaskEncoder(batch_type=dict, raw_batch_type=OwnBatch)
    assert type(both.batch([sample])) is OwnBatch


@examples(8)
@given(
    sets=st.lists(SAMPLES, min_size=1, max_size=3),
    encoder=st.sampled_from(ENCODERS),
    size=st.integers(1, 20),
    num_streams=st.integers(1, 3),
    is_training=st.booleans(),
    drop_last=st.booleans(),
)
def test_batches_of_columns_are_those_of_samples(
    sets, encoder, size, num_streams, is_training, drop_last
) -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        leaves = []
        for name, samples in zip("abc", sets, strict=False):
            written(folder, name, [*samples, (b"well", False)])
            own = {"loss_weight": len(samples), "subflavors": {"n": 1}, "split_part": "train"}
            leaves.append({"path": str(folder / name), **own})
        blend = metadataset({})
        blend["splits"] = {"train": {"blend": leaves}, "val": {"concat": leaves}}
        config = WorkerConfig(
            rank=0, world_size=1, num_workers=0, num_streams=num_streams,
            global_error_handler=lambda *seen: errors.append(repr(seen)),
        )  # fmt: skip
        errors: list[str] = []

        def dataset() -> Any:
            common: dict[str, Any] = {"worker_config": config, "task_encoder": encoder()}
            if not is_training:
                return get_val_dataset(blend, batch_size=size, **common)
            return get_train_dataset(
                blend, batch_size=size, batch_drop_last=drop_last, shuffle_buffer_size=5,
                max_samples_per_sequence=7, **common,
            )  # fmt: skip

        found = run_of(dataset(), 12)
        assert found == by_samples(dataset, 12)
        assert found == by_samples(dataset, 12, one_by_one=True)
        if not any(isinstance(item, str) for item in found):  # else what was read ahead counts
            # Samples that are read together fail before hooks of those that are before them do.
            third = len(errors) // 3
            parts = [sorted(errors[i * third : (i + 1) * third]) for i in range(3)]
            assert parts == parts[:1] * 3


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


def test_each_batch_is_resumed_and_restored(tmp_path) -> None:
    root = text_set(tmp_path / "a", 50)
    loader = get_savable_loader(texts(root))
    states, batches = [], []
    for batch in islice(loader, 12):
        batches.append(plain(batch))
        assert plain(loader.restore_sample(batch.__restore_key__)) == plain(batch)
        states.append(json.loads(json.dumps(loader.save_state_rank())))
    for place, state in enumerate(states[:-1]):
        again = get_savable_loader(texts(root)).with_restored_state_rank(state)
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
