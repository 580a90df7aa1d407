"""What is logged of failures: each place once with its traceback, then numbers."""

from __future__ import annotations

import json
import logging
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from energon_lite import (
    Buckets,
    DefaultTaskEncoder,
    FatalSampleError,
    Packing,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.core.errors import DecodingError, log_exception, place_of
from energon_lite.core.keys import name_of_key
from energon_lite.extras.lengths.length_index import measure_lengths

from ..conftest import write_tar
from ..helpers import number_of, prepared, text_set

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1)


def run(path: Path, encoder: Any, number: int, batch_size: int | None = None) -> Any:
    dataset = get_train_dataset(
        path, worker_config=CONFIG, batch_size=batch_size, shuffle_buffer_size=None,
        task_encoder=encoder, shuffle_over_epochs_multiplier=None,
    )  # fmt: skip
    loader = get_savable_loader(dataset, max_skip_rate=1)
    assert len(list(islice(loader, number))) == number
    return loader


class FailsTwice(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Three of four samples fail: two at one line, one at another, in a function called there."""

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        if number_of(sample) % 4 == 1:
            json.loads("{")  # raised in a module that is installed, but it is this line
        if number_of(sample) % 4 in (2, 3):
            raise ValueError(f"not {number_of(sample)}")
        return sample


def test_failing_hook_is_logged_once_at_each_place_with_its_line_and_then_counted(texts, caplog):
    with caplog.at_level(logging.INFO, logger="energon_lite.core.errors"):
        loader = run(texts, FailsTwice(), 60)
    # 59 samples of each kind are skipped before the 60th that is not, 118 at the second line.
    assert loader.num_skipped == {"texts/train": 177}
    records = [record for record in caplog.records if record.name.endswith("core.errors")]
    first, second, *rest = records
    assert [record.getMessage().split(" times")[0] for record in rest] == [
        "Skipped 10", "Skipped 10", "Skipped 100",
    ]  # fmt: skip
    for record, error, line, key in (
        (first, "JSONDecodeError", 'json.loads("{")', "00001"),
        (second, "ValueError: not 2", "raise ValueError(f", "00002"),
    ):
        text = record.getMessage()
        for part in (error, line, "test_failures.py", f"sample {key} (shard-000.tar)"):
            assert part in text
        assert "texts/train" not in text  # no restore keys
        assert record.exc_info is not None
    assert all(record.exc_info is None for record in rest)
    assert "sample 00" in rest[-1].getMessage()


class FailsOnDicts(DefaultTaskEncoder[Any, Any, Any, Any]):
    @stateless
    def preencode_sample(self, sample: TextSample) -> Any:
        return {"text": sample.text}

    def batch(self, samples: list[Any]) -> Any:
        numbers = [int(sample["text"].split()[1]) for sample in samples]
        samples.clear()
        if 0 in numbers:
            raise ValueError("the first batch")
        return {"numbers": numbers}


def test_samples_without_a_key_are_named_by_source_and_number(texts, caplog) -> None:
    run(texts, FailsOnDicts(), 1, batch_size=10)
    assert "sample texts/train[0], texts/train[1], " in caplog.text
    assert "texts/train[7] and 2 more" in caplog.text
    assert "('texts/train', 0" not in caplog.text


def test_samples_that_cannot_be_read_are_logged_once_for_each_shard_and_kind(tmp_path, caplog):
    for name in "ab":
        members = [(f"{name}{i:02d}.json", b"{}" if i > 11 else b"no json") for i in range(15)]
        write_tar(tmp_path / "data" / f"{name}.tar", [*members, (f"{name}99.txt", b"")])
    prepared(tmp_path / "data", "TextSample", {"text": "json"})
    run(tmp_path / "data", DefaultTaskEncoder(), 4)
    skips = [line.getMessage() for line in caplog.records if "kipped" in line.getMessage()]
    first, tenth, other_kind, other_shard, _ = skips
    assert first.startswith("Skipped: DecodingError: part 'json' is not JSON")
    assert "a.tar, sample 'a00'. What else fails so in this shard is counted." in first
    assert tenth.startswith(f"Skipped 10 times so far in {tmp_path / 'data' / 'a.tar'}, the last")
    assert "FieldAccessError" in other_kind
    assert "b.tar, sample 'b00'" in other_shard


def test_shards_elsewhere_are_named_by_their_addresses(caplog) -> None:
    source = SimpleNamespace(dataset_path="s3://bucket/data", shard_name="a.tar")
    for _ in range(10):
        log_exception(OSError(5, "gone"), None, [source])
    assert "Skipped 10 times so far in s3://bucket/data/a.tar, the last time" in caplog.text


def test_place_is_the_innermost_line_of_the_user() -> None:
    def innermost() -> None:
        raise KeyError("x")

    try:
        innermost()
    except KeyError as error:
        place = place_of(error)
    assert place is not None
    assert (place.error, Path(place.file).name) == ("KeyError", "test_failures.py")
    assert place.line == innermost.__code__.co_firstlineno + 1
    assert place_of(ValueError("never raised")) is None


def test_restore_keys_are_named_by_their_samples() -> None:
    key = ("batch", 0, ("encode_sample", 2, ("a/train", 0, 5, 5)), ("b", 1, 6, 7))
    assert name_of_key(key) == "a/train[5], b[6]"
    assert name_of_key(("odd",)) == "('odd',)"


class StoppedOnce(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Two samples stop the run, each once."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        vars(self).update(settings)
        self.left: set[int] = set()

    @stateless
    def postencode_sample(self, sample: TextSample) -> TextSample:
        if (number := number_of(sample)) in self.left:
            self.left.remove(number)
            raise FatalSampleError(f"stopped at {number}")
        return sample

    def sample_length(self, sample: TextSample) -> int:
        return 1 + number_of(sample) * 7 % 31

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> list[str]:
        return [sample.__key__ for sample in samples]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packing": Packing(capacity=32, algorithm="streaming")},
        {"packing": Packing(capacity=32, lengths="index")},
        {"batching": Buckets(max_tokens=64)},
    ],
    ids=["batches", "streamed packs", "planned packs", "buckets"],
)
def test_iterated_dataset_goes_on_with_the_batch_that_a_fatal_error_was_met_in(settings, tmp_path):
    root = text_set(tmp_path / "texts", 60)
    encoder = StoppedOnce(**settings)
    measure_lengths(root, encoder, name="index", num_workers=0)
    dataset = get_val_dataset(
        root, split_part="train", worker_config=CONFIG, batch_size=3, task_encoder=encoder
    )
    unbroken = list(dataset)
    encoder.left = {20, 41}
    found, errors, items = [], [], iter(dataset)
    while True:
        try:
            found.append(next(items))
        except StopIteration:
            break
        except FatalSampleError as error:
            errors.append(str(error))
    assert len(errors) == 2
    assert not encoder.left
    assert found == unbroken


# ------------------------------------------------------ code that fails on each of its first inputs


def with_hooks(**hooks: Any) -> Any:
    return type("Own", (DefaultTaskEncoder,), hooks)()


def misspelt(self: Any, sample: Any) -> Any:
    return sample.captionn


def without_self(sample: Any) -> Any:
    return sample


def forgets(self: Any, sample: Any) -> None:
    """Returns nothing."""


def misspelt_generator(self: Any, sample: Any) -> Any:
    yield sample.captionn


def misspelt_batch(self: Any, samples: Any) -> Any:
    return samples[0].captionn


def first_of(path: Path, encoder: Any, *, num_workers: int = 0, handler: Any = log_exception,
             streams: int = 1, **settings: Any) -> Any:  # fmt: skip
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=num_workers, num_streams=streams,
        global_error_handler=handler,
    )  # fmt: skip
    dataset = get_train_dataset(path, worker_config=config, batch_size=2, task_encoder=encoder,
                                shuffle_buffer_size=None,
                                shuffle_over_epochs_multiplier=None)  # fmt: skip
    return get_savable_loader(dataset, **settings)


@pytest.mark.parametrize(
    ("num_workers", "hook", "function", "text"),
    [
        (0, "encode_sample", misspelt, "no attribute 'captionn'"),
        (2, "encode_sample", misspelt, "no attribute 'captionn'"),
        (2, "encode_sample", without_self, "takes 1 positional argument"),
        (0, "encode_sample", forgets, "returned None"),
        (0, "preencode_sample", misspelt_generator, "no attribute 'captionn'"),
        (0, "batch", misspelt_batch, "no attribute 'captionn'"),
        (0, "encode_batch", forgets, "returned None"),
    ],
)
def test_run_whose_first_samples_all_fail_at_one_line_stops_after_ten(
    tmp_path, num_workers, hook, function, text
) -> None:
    root = text_set(tmp_path / "texts", 60, 5)
    loader = first_of(root, with_hooks(**{hook: function}), num_workers=num_workers, streams=2)
    with loader, pytest.raises(FatalSampleError) as caught:
        next(iter(loader))
    message = str(caught.value)
    code = function.__code__
    body = code.co_firstlineno + (text == "no attribute 'captionn'")
    for part in (
        f"{function.__name__} (test_failures.py:{code.co_firstlineno}) failed on each of its first "
        f"10 inputs at {code.co_filename}:{body}",
        text,
        "raise SkipSample",
        "failure_tolerance",
    ):
        assert part in message


class FirstFail(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Its first 15 calls raise something."""

    def __init__(self, *raised: Any) -> None:
        super().__init__()
        self.raised = raised or (ValueError("bad"),)
        self.calls = 0

    def encode_sample(self, sample: TextSample) -> TextSample:
        self.calls += 1
        if self.calls <= 15:
            raise self.raised[self.calls % len(self.raised)]
        return sample


class Tolerant(FirstFail):
    __default_failure_tolerance__ = 101


class Marked(FirstFail):
    encode_sample = stateless(failure_tolerance=100)(  # the default, but chosen
        lambda self, sample: FirstFail.encode_sample(self, sample)
    )


def keep_quiet(error: Exception, sample: Any, sources: Any) -> None: ...


@pytest.mark.parametrize(
    ("encoder", "settings"),
    [
        (FirstFail(SkipSample("not wanted")), {}),
        (FirstFail(OSError("a file")), {}),
        (FirstFail(DecodingError("a part")), {}),
        (FirstFail(ValueError("one"), TypeError("other")), {}),
        (Tolerant(), {}),
        (Marked(), {}),
        (FirstFail(), {"handler": keep_quiet}),
        (FirstFail(), {"max_skip_rate": 0.5}),
    ],
    ids=[
        "skips", "files", "parts", "several errors", "tolerance", "own tolerance", "handler",
        "rate",
    ],
)  # fmt: skip
def test_first_samples_that_may_fail_stop_no_run(tmp_path, encoder, settings) -> None:
    root = text_set(tmp_path / "texts", 60)
    assert len(next(iter(first_of(root, encoder, **settings))).__key__) == 2
    assert encoder.calls == 17
    with pytest.raises(FatalSampleError, match="on each of its first 10 inputs"):
        next(iter(first_of(root, FirstFail())))


@pytest.mark.parametrize("has_worked", ["in the pass", "before a resume"])
def test_run_that_has_worked_does_not_stop_at_ten_failures(tmp_path, has_worked) -> None:
    root = text_set(tmp_path / "texts", 60)
    encoder = FirstFail()
    encoder.calls = 15
    loader = first_of(root, encoder)
    next(iter(loader))
    if has_worked == "before a resume":
        state, loader = loader.save_state_rank(), first_of(root, encoder)
        loader.restore_state_rank(state)
    encoder.calls = 0
    assert len(next(iter(loader)).__key__) == 2
    assert encoder.calls == 17


def test_broken_files_at_the_start_stop_no_run(tmp_path) -> None:
    members = [(f"{i:03d}.json", b"no json" if i < 20 else b'{"a": "b"}') for i in range(40)]
    write_tar(tmp_path / "data/a.tar", members)
    prepared(tmp_path / "data", "TextSample", {"text": "json[a]"})
    loader = first_of(tmp_path / "data", DefaultTaskEncoder())
    assert next(iter(loader)).__key__ == ["020", "021"]


@pytest.mark.parametrize("function", [forgets, without_self], ids=["no result", "no self"])
def test_failing_function_is_logged_once_and_not_for_each_shard(
    tmp_path, caplog, monkeypatch, function
) -> None:
    monkeypatch.setattr("energon_lite.core.errors._counts", Counter())
    root = text_set(tmp_path / "texts", 15, 5)
    loader = first_of(root, with_hooks(encode_sample=function), max_skip_rate=1)
    with pytest.raises(FatalSampleError, match="failed 100 times in a row"):
        next(iter(loader))
    lines = [r.getMessage() for r in caplog.records if r.name.endswith("core.errors")]
    code = function.__code__
    assert f"What else fails so at {code.co_filename}:{code.co_firstlineno} is counted" in lines[0]
    assert [line.split(" times")[0] for line in lines[1:]] == ["Skipped 10", "Skipped 100"]
