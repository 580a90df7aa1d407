"""What the library does around every hook: limits, seeds, generators, groups, cookers."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import (
    AugmentTaskEncoder,
    Buckets,
    Cooker,
    DefaultTaskEncoder,
    FatalSampleError,
    Packing,
    SampleDecoder,
    SkipSample,
    TaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    sample_rng,
    stateless,
)

from ..helpers import assert_same, crude_set, ignore, keys_of, number_of, through_json


def loader_of(path: Path, encoder: Any, *, seed: int = 0, streams: int = 1, **settings: Any) -> Any:
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=0, num_streams=streams, seed_offset=seed,
        global_error_handler=settings.pop("handler", ignore),
    )  # fmt: skip
    loader = {k: settings.pop(k) for k in ("max_skip_rate", "skip_log") if k in settings}
    settings = {"batch_size": None, "shuffle_buffer_size": 10, **settings}
    dataset = get_train_dataset(path, worker_config=config, task_encoder=encoder, **settings)
    return get_savable_loader(dataset, **loader)


def encoder_with(**hooks: Any) -> Any:
    """A task encoder of a few hooks."""
    return type("Encoder", (DefaultTaskEncoder,), hooks)()


def first(loader: Any, number: int) -> list[Any]:
    found = list(islice(iter(loader), number))
    assert len(found) == number
    return found


def first_of(path: Path, number: int = 1, *, loader: Any = (), **hooks: Any) -> list[Any]:
    """The first items under an encoder of a few hooks."""
    return first(loader_of(path, encoder_with(**hooks), **dict(loader)), number)


def raising(error: Any, calls: list[Any]) -> Callable[..., Any]:
    """A hook that always fails, and notes the samples that it got."""

    def encode_sample(self: Any, sample: Any) -> Any:
        calls.append(sample.__key__)
        raise error

    return encode_sample


IN_ORDER = {"shuffle_over_epochs_multiplier": None, "shuffle_buffer_size": 0}


# ------------------------------------------------------------------------- failures and their limit


@pytest.mark.parametrize("restore_seeds", [False, True])
@pytest.mark.parametrize("tolerance", [1, 7])
def test_failure_tolerance_is_honoured_with_and_without_restore_seeds(
    texts, restore_seeds, tolerance
) -> None:
    calls: list[str] = []
    marked = stateless(restore_seeds=restore_seeds, failure_tolerance=tolerance)
    hook = marked(raising(ValueError("never works"), calls))
    with pytest.raises(FatalSampleError) as caught:
        first_of(texts, encode_sample=hook)
    assert len(calls) == tolerance
    words = (f"failed {tolerance} times in a row", f"failure_tolerance={tolerance}", calls[-1])
    for word in (*words, "never works", "test_hooks.py"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("expected", "more"), [(100, {}), (5, {"__default_failure_tolerance__": 5})]
)
def test_default_failure_tolerance_is_100_and_the_class_may_set_another(
    texts, expected, more
) -> None:
    calls: list[str] = []
    with pytest.raises(FatalSampleError, match=f"failed {expected} times in a row"):
        first_of(texts, encode_sample=raising(ValueError("never works"), calls), **more)
    assert len(calls) == expected


def test_failure_tolerance_of_a_cooker_is_honoured(crude) -> None:
    @stateless(failure_tolerance=3)
    def cook(sample: Any) -> Any:
        raise ValueError("raw")

    with pytest.raises(FatalSampleError, match="failed 3 times in a row"):
        first_of(crude, cookers=[Cooker(cook)])


def test_one_success_starts_the_count_of_failures_again(texts) -> None:
    @stateless(failure_tolerance=2)
    def encode_sample(self: Any, sample: Any) -> Any:
        if number_of(sample) % 2:
            raise ValueError("odd")
        return sample

    loader = loader_of(
        texts, encoder_with(encode_sample=encode_sample), max_skip_rate=1, **IN_ORDER
    )
    assert [number_of(s) for s in first(loader, 60)] == [*range(0, 40, 2)] * 3
    assert loader.num_skipped == {"texts/train": 59}


def test_tolerance_0_on_an_always_failing_hook_ends_by_the_rate_of_skips(texts) -> None:
    calls: list[str] = []
    hook = stateless(failure_tolerance=0)(raising(ValueError("never works"), calls))
    with pytest.raises(FatalSampleError, match=r"more than max_skip_rate=0\.01") as caught:
        first_of(texts, encode_sample=hook)
    assert 100 < len(calls) < 110
    for part in ("stream 0", "texts/train", "encode_sample", "never works", "Repair"):
        assert part in str(caught.value)


def test_skip_sample_is_no_failure_and_does_not_end_a_row_of_them(texts) -> None:
    """Skips between failures: three failures in a row, and a limit of three."""
    order = iter("sfsfsssf")

    @stateless(failure_tolerance=3)
    def encode_sample(self: Any, sample: Any) -> Any:
        raise SkipSample if next(order) == "s" else ValueError("bad")

    with pytest.raises(FatalSampleError, match="failed 3 times in a row"):
        first_of(texts, encode_sample=encode_sample)
    assert next(order, None) is None


def test_many_skips_on_purpose_are_no_failures(texts) -> None:
    @stateless(failure_tolerance=1)
    def encode_sample(self: Any, sample: Any) -> Any:
        if number_of(sample) != 7:
            raise SkipSample
        return sample

    loader = loader_of(texts, encoder_with(encode_sample=encode_sample))
    assert [sample.__key__ for sample in first(loader, 20)] == ["00007"] * 20
    assert loader.num_skipped["texts/train"] >= 19 * 39


def test_endless_skipping_on_purpose_is_logged(texts, caplog) -> None:
    calls: list[int] = []

    def encode_sample(self: Any, sample: Any) -> Any:
        calls.append(1)
        if len(calls) > 10_100:
            return sample
        raise SkipSample

    first_of(texts, encode_sample=encode_sample)
    assert "skipped 10000 samples in a row on purpose" in caplog.text


@pytest.mark.parametrize(
    "error",
    [NameError, ImportError, MemoryError, RecursionError, SyntaxError, SystemError, StopIteration],
)
def test_errors_that_mean_wrong_code_end_the_run_at_once(texts, error) -> None:
    calls: list[str] = []
    with pytest.raises(FatalSampleError, match="of the code") as caught:
        first_of(texts, encode_sample=raising(error("of the code"), calls))
    assert len(calls) == 1
    assert isinstance(caught.value.__cause__, error)


def test_error_handler_gets_error_sample_and_sources_and_may_raise(texts) -> None:
    seen = []

    def handler(error: Exception, sample: Any, sources: Any) -> None:
        seen.append((error, sample, sources))
        raise error

    hook = raising(KeyError("field"), [])
    with pytest.raises(KeyError) as caught:
        first_of(texts, encode_sample=hook, loader={"handler": handler})
    ((error, sample, sources),) = seen
    assert error is caught.value
    assert isinstance(sample, TextSample)
    assert sources[0].shard_name.endswith(".tar")
    notes = " ".join(error.__notes__)
    for part in ("encode_sample", "test_hooks.py", sample.__key__):
        assert part in notes


# Types and values that are not hashable, or do not equal another one of the same value.
NO_GROUPS: dict[str, Any] = {
    "Tensor": torch.tensor(1), "ndarray": np.ones(1), "list": ["a"], "dict": {"a": 1},
    "float": float("nan"), "float64": np.float64("inf"), "object": (1, ("a", object())),
}  # fmt: skip
NONE = "returned None; return the sample, or raise Skip"
SIZES = "exactly one of the two must be None"
# Hooks, the batch size, how many items are asked for, and the words of the error.
FATAL: list[Any] = [
    *(({name: lambda self, value: None}, 2, 1, NONE) for name in (
        "encode_sample", "preencode_sample", "postencode_sample", "batch", "encode_batch")),
    ({"encode_sample": lambda self, sample: (s for s in [sample])}, None, 1,
     "write the hook with `yield`"),
    ({"batch_group_criterion": lambda self, sample: (0, 3)}, 4, 1, SIZES),
    ({"batch_group_criterion": lambda self, sample: (0, None)}, None, 1, SIZES),
    ({"batch_group_criterion": lambda self, sample: (0, 2 + number_of(sample) % 2)}, None, 10,
     "a group has one batch size"),
    ({"batch_group_criterion": lambda self, sample: (0, 2.5)}, None, 1, "batch size 2.5"),
    *(({"batch_group_criterion": lambda self, sample, group=group: (group, None)}, 2, 1,
       rf"'0\d+': .*lambda.* returned .*\({kind}\) as a group; return a text")
      for kind, group in NO_GROUPS.items()),
    *(({"batching": Buckets(max_tokens=99, group_by=lambda sample, group=group: group),
        "sample_length": lambda self, sample: 1}, 2, 1,
       rf"'0\d+': group_by returned .*\({kind}\) as a group; return a text")
      for kind, group in NO_GROUPS.items()),
    ({"packing": Packing(8), "sample_length": lambda self, sample: None}, 2, 1,
     "returned None; return the sample's tokens, a number"),
]  # fmt: skip


@pytest.mark.parametrize(("hooks", "batch_size", "number", "words"), FATAL)
def test_hook_that_cannot_work_is_an_error_with_a_remedy(
    texts, hooks, batch_size, number, words
) -> None:
    encoder = encoder_with(**hooks, __default_failure_tolerance__=1)
    with pytest.raises(FatalSampleError, match=words):
        first(loader_of(texts, encoder, batch_size=batch_size), number)


class Parity(DefaultTaskEncoder):
    """Odd and even samples apart; the criterion fails on some."""

    @stateless
    def batch_group_criterion(self, sample: TextSample) -> Any:
        number = number_of(sample)
        if number % 5 == 3:
            raise ValueError("has no group")
        return number % 2, None


def same(self: Any, value: Any) -> Any:
    return value


REFUSED: list[tuple[Any, str]] = [
    (encoder_with(encode_sample=same, preencode_sample=same),
     "both encode_sample and preencode_sample"),
    (type("NotMarked", (Parity,), {"encode_sample": same})(), "Put @stateless on encode_sample"),
]  # fmt: skip


@pytest.mark.parametrize(("encoder", "words"), REFUSED)
def test_hooks_that_contradict_are_refused_at_construction(texts, encoder, words) -> None:
    with pytest.raises(ValueError, match=words):
        loader_of(texts, encoder, batch_size=4)


def test_failing_batch_is_skipped_and_counts_its_samples(texts) -> None:
    def batch(self: Any, samples: Any) -> Any:
        if any(number_of(s) == 11 for s in samples):
            raise ValueError("no such batch")
        return super(type(self), self).batch(samples)

    loader = loader_of(texts, encoder_with(batch=batch), batch_size=4, repeat=False)
    keys = [key for b in loader for key in keys_of(b)]
    assert len(keys) == 36
    assert "00011" not in keys
    assert loader.num_skipped == {"texts/train": 4}


# -------------------------------------------------------------------------------------- randomness


def noise() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), random.random()]


class Seeded(DefaultTaskEncoder):
    @stateless(restore_seeds=True)
    def encode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"{noise()}")


class Asking(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        numbers = [sample_rng().random(), sample_rng().integers(100)]
        return TextSample.derive_from(sample, text=f"{numbers}")


@pytest.mark.parametrize("encoder", [Seeded, Asking])
def test_restore_sample_returns_the_noise_of_each_stream_and_each_of_two_loaders(
    texts, encoder
) -> None:
    """Seeds are made for each call; nothing is kept from another stream, loader or seed."""
    loaders = [loader_of(texts, encoder(), seed=seed, streams=3) for seed in (1, 2, 1)]
    found = [first(loader, 12) for loader in loaders]
    assert_same(found[0], found[2])
    for i in reversed(range(12)):
        for loader, samples in zip(loaders, found, strict=True):
            assert_same(loader.restore_sample(samples[i].__restore_key__), samples[i])
    sample = found[0][0]
    assert loaders[1].restore_sample(sample.__restore_key__).text != sample.text
    assert {sample.__restore_key__[-1] % 3 for sample in found[0]} == {0, 1, 2}
    assert len({sample.text for samples in found[:2] for sample in samples}) == 24


@pytest.mark.parametrize("encoder", [Seeded, Asking])
def test_noise_of_a_sample_differs_from_epoch_to_epoch(texts, encoder) -> None:
    noises: dict[str, set[str]] = {}
    for sample in first(loader_of(texts, encoder()), 120):
        noises.setdefault(sample.__key__, set()).add(sample.text)
    assert {len(found) for found in noises.values()} == {3}


def test_hooks_of_one_sample_have_different_noise(texts) -> None:
    @stateless
    def draw(self: Any, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"{sample.text} {sample_rng().random()}")

    (sample,) = first_of(texts, preencode_sample=draw, postencode_sample=draw)
    assert len(set(sample.text.split()[-2:])) == 2


def test_sample_rng_outside_of_a_hook_is_an_error() -> None:
    for look in (sample_rng, lambda: DefaultTaskEncoder().current_batch_index):
        with pytest.raises(RuntimeError, match="No sample is being processed"):
            look()


# -------------------------------------------------------------------------------------- generators


class Yielding(DefaultTaskEncoder):
    """Returns one object three times, changed in between, and further noise."""

    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        item = TextSample.derive_from(sample, text="")
        for _ in range(3):
            item.text = f"{sample.text} {sample_rng().random():.6f}"
            yield item


def test_generator_that_yields_one_object_repeatedly_emits_separate_items(texts) -> None:
    loader = loader_of(texts, Yielding(), batch_size=6)
    seen = []
    for batch in first(loader, 10):
        assert len(set(batch.__restore_key__[2:])) == 6
        seen += batch.text
        assert_same(loader.restore_sample(batch.__restore_key__), batch)
    assert len(set(seen)) == 60
    # The noise does not depend on what is drawn between the items.
    assert seen == [sample.text for sample in first(loader_of(texts, Yielding()), 60)]


def test_generator_that_fails_half_way_keeps_the_items_before(texts) -> None:
    @stateless
    def encode_sample(self: Any, sample: Any) -> Any:
        yield sample
        raise ValueError("after the first")

    loader = loader_of(texts, encoder_with(encode_sample=encode_sample), repeat=False)
    assert len(list(loader)) == 40
    assert loader.num_skipped == {"texts/train": 40}


def test_skips_before_a_generator_are_counted_once_though_the_run_is_resumed_inside(texts) -> None:
    @stateless
    def preencode_sample(self: Any, sample: Any) -> Any:
        if number_of(sample) % 2:
            raise SkipSample
        return sample

    @stateless
    def batch(self: Any, samples: Any) -> Any:
        yield from samples

    def make() -> Any:
        encoder = encoder_with(preencode_sample=preencode_sample, batch=batch)
        return loader_of(texts, encoder, repeat=False, batch_size=4)

    loader = make()
    for _ in range(20):
        resumed = make()
        resumed.load_state_dict(through_json(loader.state_dict()))
        loader = resumed
        assert next(iter(loader), None) is not None
    assert loader.num_skipped == {"texts/train": 20}


class SetLater(DefaultTaskEncoder):
    """Chooses its hooks when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.encode_sample = self.louder  # type: ignore[method-assign]
        self.encode_batch = lambda batch: {"texts": batch.text}  # type: ignore[method-assign]

    @stateless
    def louder(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=sample.text.upper())


def test_hooks_that_are_set_on_the_instance_are_called(texts) -> None:
    for encoder in (SetLater(), AugmentTaskEncoder(SetLater())):
        (batch,) = first(loader_of(texts, encoder, batch_size=3), 1)
        assert all(text.startswith("TEXT") for text in batch["texts"])


# ------------------------------------------------------------------------------------------ groups


def test_sample_whose_group_fails_is_put_into_no_bucket(texts) -> None:
    loader = loader_of(texts, Parity(), batch_size=4, repeat=False)
    numbers = [[int(key) for key in keys_of(batch)] for batch in loader]
    assert len(numbers) == 8
    assert all(len({number % 2 for number in batch}) == 1 for batch in numbers)
    assert sorted(n for batch in numbers for n in batch) == [n for n in range(40) if n % 5 != 3]
    assert loader.num_skipped == {"texts/train": 8}


def test_each_group_may_have_its_own_batch_size(texts) -> None:
    def group(self: Any, sample: Any) -> Any:
        return number_of(sample) % 2, 2 + number_of(sample) % 2

    batches = first_of(texts, 20, batch_group_criterion=group)
    assert {(int(b.__key__[0]) % 2, len(b.__key__)) for b in batches} == {(0, 2), (1, 3)}


def test_groups_may_be_scalars_of_numpy_and_nested_tuples(texts) -> None:
    class Kind(enum.Enum):
        EVEN, ODD = 0, 1

    for make in (
        np.int64, np.float32, np.str_, np.bool_, float, Kind, lambda n: (torch.Size([n]), (n, "a")),
    ):  # fmt: skip
        own = {"batch_size": 4, "repeat": False}
        encoder = encoder_with(
            batch_group_criterion=lambda self, sample, make=make: (
                make(number_of(sample) % 2),
                None,
            )
        )
        loader = loader_of(texts, encoder, **own)
        batches = list(loader)
        assert [len(keys_of(batch)) for batch in batches] == [4] * 10


# ----------------------------------------------------------------------------------------- cookers


@pytest.fixture
def crude(tmp_path: Path) -> Path:
    return crude_set(tmp_path / "crude", 12)


class Decoding(DefaultTaskEncoder):
    """Decodes by its own function, and sets its cookers in `__init__`."""

    @staticmethod
    def decoder(parts: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {k: v.decode() if isinstance(v, bytes) else v for k, v in parts.items()}

    def __init__(self, cook: Any = None) -> None:
        super().__init__()
        self.cookers = [Cooker(cook or self.cook)]  # type: ignore[misc]

    def cook(self, crude: Any) -> TextSample:
        return TextSample(**basic_sample_keys(crude), text=crude["txt"].upper())


@stateless(restore_seeds=True)
def seeded_cook(sample: Any) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=f"{sample['txt']} {noise()}".upper())


@pytest.mark.parametrize("cook", [None, seeded_cook])
def test_cooker_is_replayed_and_may_be_set_on_the_instance_beside_a_decoder(crude, cook) -> None:
    loader = loader_of(crude, Decoding(cook))
    samples = first(loader, 24)
    assert all(sample.text.startswith("TEXT") for sample in samples)
    assert len({sample.text for sample in samples}) == (24 if cook else 12)
    assert loader.can_restore_sample()
    for sample in samples:
        assert_same(loader.restore_sample(sample.__restore_key__), sample)
    resumed = loader_of(crude, Decoding(cook))
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert_same(first(resumed, 5), first(loader, 5))


# ---------------------------------------------------------------------------------- replay, indices


def test_hook_that_is_not_stateless_runs_but_cannot_be_replayed(texts) -> None:
    loader = loader_of(texts, encoder_with(encode_sample=same))
    assert len(first(loader, 3)) == 3
    assert not loader.can_restore_sample()
    assert loader_of(texts, Seeded()).can_restore_sample()


def test_replay_of_a_sample_that_is_skipped_now_is_an_error(texts) -> None:
    skips: list[int] = []

    @stateless
    def encode_sample(self: Any, sample: Any) -> Any:
        if skips:
            raise SkipSample
        return sample

    loader = loader_of(texts, encoder_with(encode_sample=encode_sample))
    (sample,) = first(loader, 1)
    skips.append(1)
    with pytest.raises(ValueError, match="must not depend on anything but its input"):
        loader.restore_sample(sample.__restore_key__)


@pytest.mark.parametrize(
    "key", [(), ("x",), ("texts/train", 0, 4000, 0), ("texts/train", 0, -1, 0)]
)
def test_replay_of_a_senseless_key_is_refused(texts, key) -> None:
    with pytest.raises(ValueError, match=r"restore key|has samples"):
        loader_of(texts, Seeded()).restore_sample(key)


def test_indices_count_batches_and_draws_of_the_run(texts) -> None:
    seen: list[tuple[int, int]] = []

    @stateless
    def encode_sample(self: Any, sample: Any) -> Any:
        seen.append((self.current_batch_index, self.current_sample_index))
        return sample

    first_of(texts, 6, encode_sample=encode_sample, loader={"batch_size": 3, "streams": 2})
    assert [batch for batch, _ in seen] == [m for m in range(6) for _ in range(3)]
    assert [draw for _, draw in seen[:9]] == [0, 2, 4, 1, 3, 5, 6, 8, 10]


def test_hooks_may_use_one_encoder_in_two_loaders_at_once(texts) -> None:
    encoder = Seeded()
    one, two = loader_of(texts, encoder, seed=1), loader_of(texts, encoder, seed=2)
    expected = [first(loader_of(texts, Seeded(), seed=seed), 10) for seed in (1, 2)]
    left, right = iter(one), iter(two)
    found = [(next(left), next(right)) for _ in range(10)]
    assert_same([a for a, _ in found], expected[0])
    assert_same([b for _, b in found], expected[1])


# ---------------------------------------------------------------------------------------- decoding


def test_auto_decode_false_changes_nothing_for_later_calls(texts) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    for encoder in (None, DefaultTaskEncoder()):
        settings = {"worker_config": config, "batch_size": None, "task_encoder": encoder}
        raw = get_train_dataset(texts, auto_decode=False, **settings)
        assert isinstance(next(iter(raw)).text, bytes)
        for make in (get_train_dataset, get_val_dataset):
            decoded = make(texts, split_part="train", **settings)
            assert isinstance(next(iter(decoded)).text, str)
        assert isinstance(next(iter(raw)).text, bytes)
    assert isinstance(TaskEncoder.decoder, SampleDecoder)
