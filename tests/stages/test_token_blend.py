"""Blends by tokens, through the whole pipeline: measured lengths, or a stored index."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from energon_lite import (
    DefaultTaskEncoder,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    stateless,
)
from energon_lite.core.errors import DatasetFormatError, FatalSampleError, StateError
from energon_lite.core.keys import leaves
from energon_lite.core.seeds import key_of
from energon_lite.formats.length_files import write_lengths
from energon_lite.sources.dataset_config import load_factory
from energon_lite.stages.blend import TokenBlendDataset
from energon_lite.testing import check_dataset

from ..helpers import Ranks, assert_same, blend_maker, number_of, text_set, through_json

MEANS = {"short": 400, "long": 4000, **{f"s{i}": 60 * 2**i for i in range(8)}}
NUM_SAMPLES = 60
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


def tokens_of(source: str, number: int) -> int:
    """The length of a sample: lognormal, from a hash."""
    uniform = (key_of("tokens", source, number) % 10**6 + 0.5) / 10**6
    return max(1, round(MEANS[source] * math.exp(NormalDist(-0.08, 0.4).inv_cdf(uniform))))


def source_of(sample: Any) -> str:
    return Path(sample.__sources__[0].dataset_path).name


class Lengths(DefaultTaskEncoder):
    def sample_length(self, sample: TextSample) -> int:
        return tokens_of(source_of(sample), number_of(sample))


class Resources(Lengths):
    """Returns the tokens among others, as a numpy integer."""

    def sample_length(self, sample: TextSample) -> Any:
        tokens = np.int64(super().sample_length(sample))
        return {"tokens": tokens, "images": 3, "__restore_key__": "mine"}


class Skipping(Lengths):
    """Two thirds of the short ones are left out, and a few of the long ones fail."""

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        if source_of(sample) == "short" and number_of(sample) % 3:
            raise SkipSample
        if number_of(sample) % 10 == 7:
            raise ValueError("fails")
        return sample


class Expanding(Lengths):
    """Makes 0..3 samples of each, of lengths of their own."""

    @stateless
    def encode_sample(self, sample: TextSample) -> Iterator[TextSample]:
        for i in range(number_of(sample) % 4):
            yield TextSample.derive_from(sample, text="x" * i)

    def sample_length(self, sample: TextSample) -> int:
        return super().sample_length(sample) // (1 + len(sample.text))


class Grouping(Lengths):
    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return sample

    @stateless
    def batch_group_criterion(self, sample: TextSample) -> tuple[int, None]:
        return number_of(sample) % 4, None


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    for name in MEANS:
        text_set(root / name, NUM_SAMPLES)
        index(root / name, [tokens_of(name, i) for i in range(NUM_SAMPLES)])
    return root


def index(folder: Path, lengths: Any, name: str = "tok") -> None:
    """Stores the lengths of a folder's samples."""
    factory = load_factory(folder, split_part="train")
    write_lengths(folder, "train", name, np.array(lengths, dtype=np.int64), factory.data)


def blend_of(root: Path, split: str, encoder: Any = Lengths, **settings: Any) -> Any:
    """A maker of the training dataset of a file with `split`."""
    return blend_maker(root, split, encoder, **{"shuffle_buffer_size": 8, **settings})


def actual_tokens(batches: Any, encoder: type[Lengths] = Lengths) -> dict[str, int]:
    """The tokens that the loop received, by source."""
    found: dict[str, int] = {}
    for batch in batches:
        for key, number, text in zip(
            batch.__restore_key__[2:], batch.__key__, batch.text, strict=True
        ):
            (leaf,) = leaves(key)
            name = leaf[0].split("/")[0]
            tokens = tokens_of(name, int(number))
            found[name] = found.get(name, 0) + (
                tokens // (1 + len(text)) if encoder is Expanding else tokens
            )
    return found


def shares(tokens: dict[str, int]) -> dict[str, float]:
    total = sum(tokens.values())
    return {name: number / total for name, number in tokens.items()}


HALVES = "unit: tokens\nblend: [{path: short}, {path: long}]"


# ------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("num_streams", [pytest.param(1, marks=pytest.mark.soak), 4])
@pytest.mark.parametrize(
    ("split", "expected", "encoder"),
    [
        (HALVES, {"short": 0.5, "long": 0.5}, Lengths),
        (HALVES, {"short": 0.5, "long": 0.5}, Resources),
        (HALVES.replace("short}", "short, weight: 3}"), {"short": 0.75, "long": 0.25}, Lengths),
        (HALVES, {"short": 0.5, "long": 0.5}, Skipping),
        (HALVES, {"short": 0.5, "long": 0.5}, Expanding),
        (HALVES, {"short": 0.5, "long": 0.5}, Grouping),
    ],
)
def test_shares_of_tokens_are_met_within_a_percent(
    sets, split, expected, encoder, num_streams
) -> None:
    run = Ranks(blend_of(sets, split, encoder), 1, num_streams=num_streams)
    number = 2000 if encoder is Expanding else 1200
    batches = run.slots(number)
    assert len(batches) == number
    found = shares(actual_tokens(batches.values(), encoder))
    assert found == pytest.approx(expected, rel=0.01)
    stats = run.loaders[0].stats()
    assert {n.split("/")[0]: s.actual_share for n, s in stats.items()} == pytest.approx(
        expected, rel=0.01
    )
    assert {n.split("/")[0]: s.target_share for n, s in stats.items()} == pytest.approx(expected)
    assert {n.split("/")[0]: s.tokens for n, s in stats.items()} == pytest.approx(
        actual_tokens(batches.values(), encoder), rel=0 if encoder is not Grouping else 0.01
    )


def test_ten_sources_have_their_shares_of_tokens(sets) -> None:
    entries = ", ".join(f"{{path: {name}, weight: {i + 1}}}" for i, name in enumerate(MEANS))
    run = Ranks(blend_of(sets, f"unit: tokens\nblend: [{entries}]", batch_size=8), 1, num_streams=2)
    found = actual_tokens(run.slots(1500).values())
    longest = max(tokens_of("long", i) for i in range(NUM_SAMPLES))
    total = sum(found.values())
    assert total > 200 * longest
    for i, name in enumerate(MEANS):  # of each stream at most one sample more or less
        assert abs(found[name] - (i + 1) / 55 * total) <= 2 * longest


def test_nested_blends_of_tokens_multiply_their_shares(sets) -> None:
    split = """
    unit: tokens
    blend:
    - {path: s0}
    - {weight: 3, blend: [{path: short}, {path: long, weight: 2}]}
    """
    run = Ranks(blend_of(sets, split), 1)
    found = shares(actual_tokens(run.slots(2000).values()))
    assert found == pytest.approx({"s0": 0.25, "short": 0.25, "long": 0.5}, rel=0.01)


def test_schedule_of_tokens_is_followed(sets) -> None:
    split = """
    unit: tokens
    blend:
    - {path: short, weight: {schedule: step, points: {0: 1, 2000: 3}}}
    - {path: long}
    """
    run = Ranks(blend_of(sets, split), 2, num_streams=4)
    assert shares(actual_tokens(run.slots(1000).values())) == pytest.approx(
        {"short": 0.5, "long": 0.5}, rel=0.02
    )
    assert shares(actual_tokens(run.slots(1000).values())) == pytest.approx(
        {"short": 0.75, "long": 0.25}, rel=0.03
    )


def errors_of(batches: Any, expected: dict[str, float]) -> list[float]:
    """The largest distance from the shares after each batch, in longest samples."""
    longest = max(tokens_of(name, i) for name in expected for i in range(NUM_SAMPLES))
    given = dict.fromkeys(expected, 0)
    found = []
    for batch in batches:
        for name, tokens in actual_tokens([batch]).items():
            given[name] += tokens
        total = sum(given.values())
        found.append(max(abs(given[n] - s * total) for n, s in expected.items()) / longest)
    return found


INDEXED = HALVES + "\nlengths: tok"


@pytest.mark.parametrize("num_streams", [1, 4])
@pytest.mark.parametrize("weight", [1, 3, 0.1])
def test_with_an_index_every_prefix_of_a_stream_is_within_one_longest_sample(
    sets, num_streams, weight
) -> None:
    split = INDEXED.replace("short}", f"short, weight: {weight}}}")
    make = blend_of(sets, split, DefaultTaskEncoder, batch_size=1)
    run = Ranks(make, 1, num_streams=num_streams)
    batches = list(run.slots(1200).values())
    expected = {"short": weight / (weight + 1), "long": 1 / (weight + 1)}
    for stream in range(num_streams):
        assert max(errors_of(batches[stream::num_streams], expected)) <= 1
    assert max(errors_of(batches, expected)) <= 1 + 0.5 * num_streams


def test_measured_lengths_come_within_two_longest_samples_once_they_are_known(sets) -> None:
    run = Ranks(blend_of(sets, HALVES, batch_size=1), 1)
    errors = errors_of(run.slots(1500).values(), {"short": 0.5, "long": 0.5})
    assert max(errors) <= 8
    assert max(errors[400:]) <= 1


# --------------------------------------------------------------------------------------- resuming


class NotReplayable(Expanding):
    """As above, but nobody says that it can be run again."""

    def encode_sample(self, sample: TextSample) -> Iterator[TextSample]:
        for i in range(1 + number_of(sample) % 3):
            yield TextSample.derive_from(sample, text="x" * i)


@pytest.mark.parametrize(
    ("split", "encoder"),
    [
        (HALVES, Lengths),
        (HALVES, Skipping),
        (HALVES, Expanding),
        (HALVES, NotReplayable),
        (HALVES, Grouping),
        (INDEXED, DefaultTaskEncoder),
        (INDEXED, Expanding),
    ],
)
@pytest.mark.parametrize("num_streams", [1, 4])
def test_resumed_run_is_the_unbroken_one_bit_by_bit(sets, split, encoder, num_streams) -> None:
    make = blend_of(sets, split, encoder, batch_size=3)
    whole = Ranks(make, 1, num_streams=num_streams)
    expected = whole.slots(360)
    found: dict[int, Any] = {}
    run = Ranks(make, 1, num_streams=num_streams)
    for world_size, number in ((1, 1), (1, 6), (2, 9), (4, 44), (1, 120), (2, 180)):
        part = run.slots(number - number % len(run.loaders))
        assert not part.keys() & found.keys()
        found.update(part)
        run = Ranks(make, world_size, states=run.save())
    assert len(found) > 300
    assert_same(found, {slot: expected[slot] for slot in found})


def test_state_does_not_grow(sets) -> None:
    for encoder in (Lengths, Skipping, Expanding):
        run = Ranks(blend_of(sets, HALVES, encoder), 1)
        sizes = []
        for _ in range(6):
            run.steps(100)
            (state,) = run.save()
            assert through_json(state) == state
            sizes.append(len(str(state["streams"])))
        assert max(sizes) < 2500
        assert sizes[-1] < sizes[0] + 300


def test_all_laws_hold_over_many_draws(sets) -> None:
    for encoder in (Lengths, Expanding):
        dataset = blend_of(sets, HALVES, encoder, batch_size=3)(ONE)
        check_dataset(dataset, max_items=30, num_streams=(2,))


# ------------------------------------------------------------------------------------ stored index


def test_index_needs_no_sample_length(sets) -> None:
    loader = get_savable_loader(blend_of(sets, INDEXED, DefaultTaskEncoder)(ONE))
    batches = list(islice(loader, 500))
    stats = loader.stats()
    found = actual_tokens(batches)
    assert {name.split("/")[0]: s.tokens for name, s in stats.items()} == found
    assert stats.unit == "tokens"
    for name, s in stats.items():
        assert s.actual_share == pytest.approx(found[name.split("/")[0]] / sum(found.values()))
        assert s.target_share == 0.5


def test_with_index_and_sample_length_tokens_are_those_measured(sets) -> None:
    class Half(Lengths):
        def sample_length(self, sample: TextSample) -> int:
            return super().sample_length(sample) // 2

    loader = get_savable_loader(blend_of(sets, INDEXED, Half)(ONE))
    plain = get_savable_loader(blend_of(sets, INDEXED, DefaultTaskEncoder)(ONE))
    assert_same(list(islice(loader, 100)), list(islice(plain, 100)))
    for name, s in loader.stats().items():
        assert s.tokens == pytest.approx(plain.stats()[name].tokens / 2, rel=0.01)


def test_missing_index_is_refused_with_its_place(sets) -> None:
    with pytest.raises(FileNotFoundError, match=r"meta.yaml:\d+, .*'none'.* or remove"):
        blend_of(sets, HALVES + "\nlengths: none")(ONE)


def test_index_of_other_data_is_refused(tmp_path) -> None:
    for name in ("short", "long"):
        text_set(tmp_path / name, 9)
    index(tmp_path / "short", range(9))
    write_lengths(tmp_path / "long", "train", "tok", np.arange(9), "another fingerprint")
    with pytest.raises(DatasetFormatError, match=r"other data with as many samples"):
        blend_of(tmp_path, INDEXED)(ONE)
    factory = load_factory(tmp_path / "long", split_part="train")
    write_lengths(tmp_path / "long", "train", "tok", np.arange(8), factory.data)
    with pytest.raises(DatasetFormatError, match="of 8 samples, the split part has 9 now"):
        blend_of(tmp_path, INDEXED)(ONE)


def test_checkpoint_does_not_resume_with_another_index(tmp_path) -> None:
    for name in ("short", "long"):
        text_set(tmp_path / name, 9)
        index(tmp_path / name, range(1, 10))
    make = blend_of(tmp_path, INDEXED, DefaultTaskEncoder)
    run = Ranks(make, 1)
    run.slots(5)
    states = run.save()
    index(tmp_path / "long", range(2, 11))
    with pytest.raises(StateError, match="lengths"):
        Ranks(make, 1, states=states).slots(1)
    index(tmp_path / "long", range(1, 10))
    assert Ranks(make, 1, states=states).slots(1)


def test_index_over_something_else_than_datasets_is_refused(sets) -> None:
    split = INDEXED.replace("{path: long}", "{concat: [{path: long}, {path: s0}]}")
    with pytest.raises(
        DatasetFormatError, match=r"meta.yaml:\d+.*`lengths` needs a dataset folder"
    ):
        blend_of(sets, split)(ONE)


def test_subsets_take_their_own_part_of_the_index(sets) -> None:
    split = INDEXED.replace("{path: long}", "{path: long, subset: {range: [40, 60]}}")
    loader = get_savable_loader(blend_of(sets, split, DefaultTaskEncoder)(ONE))
    found = actual_tokens(islice(loader, 600))
    assert {n.split("/")[0]: s.tokens for n, s in loader.stats().items()} == found
    assert shares(found) == pytest.approx({"short": 0.5, "long": 0.5}, rel=0.02)


def test_leaf_used_twice_has_one_index(sets) -> None:
    split = "unit: tokens\nlengths: tok\nblend: [{path: long}, {path: short}, {path: long}]"
    loader = get_savable_loader(blend_of(sets, split, DefaultTaskEncoder)(ONE))
    assert len(list(islice(loader, 900))) == 900
    stats = loader.stats()
    assert list(stats) == ["long/train", "short/train", "long/train#2"]
    assert all(s.actual_share == pytest.approx(1 / 3, rel=0.02) for s in stats.values())


def test_two_folders_of_one_name_have_their_own_index(sets) -> None:
    split = """
    unit: tokens
    lengths: tok
    blend: [{path: short, name: same}, {path: long, name: same}]
    """
    loader = get_savable_loader(blend_of(sets, split, DefaultTaskEncoder, batch_size=1)(ONE))
    found = {"short": 0, "long": 0}
    for batch in islice(loader, 1000):
        name = Path(batch.__sources__[0][0].dataset_path).name
        found[name] += tokens_of(name, int(batch.__key__[0]))
    assert shares(found) == pytest.approx({"short": 0.5, "long": 0.5}, rel=0.01)


def test_number_sign_in_a_name_is_a_part_of_it(sets) -> None:
    split = INDEXED.replace("path: short", "path: short, name: 'a#1'")
    loader = get_savable_loader(blend_of(sets, split, DefaultTaskEncoder)(ONE))
    assert len(list(islice(loader, 50))) == 50
    assert loader.stats()["a#1"].tokens > 0


def test_renamed_sources_keep_their_lengths(sets) -> None:
    split = """
    blend_mode: random
    blend:
    - {path: long}
    - {unit: tokens, blend_mode: exact, lengths: tok, blend: [{path: short}, {path: long}]}
    """
    dataset = blend_of(sets, split, DefaultTaskEncoder, batch_size=None)(ONE)
    found = {"short/train": 0, "long/train#2": 0}
    for sample in islice(dataset, 1500):
        name = sample.__restore_key__[0]
        if name in found:
            found[name] += tokens_of(name.split("/")[0], number_of(sample))
    assert min(found.values()) > 100_000
    assert shares(found) == pytest.approx(dict.fromkeys(found, 0.5), rel=0.02)


def test_lengths_that_lack_a_source_are_refused(sets) -> None:
    source = load_factory(sets / "short", worker_config=ONE).build(repeat=True)
    with pytest.raises(ValueError, match="no entry for source 'short/train'"):
        TokenBlendDataset((source, 1), lengths={"long/train": np.arange(60)})


# ----------------------------------------------------------------------------------------- refusals


def test_neither_sample_length_nor_index_is_refused_with_both_ways_out(sets) -> None:
    with pytest.raises(ValueError, match=r"sample_length\(self, sample\) .*or name a stored"):
        blend_of(sets, HALVES, DefaultTaskEncoder)(ONE)


@pytest.mark.parametrize("length", [-1, 2.5, "7", True, {"images": 3}, {"tokens": None}])
def test_senseless_length_stops_the_run_with_what_it_was(sets, length) -> None:
    class Senseless(Lengths):
        def sample_length(self, sample: TextSample) -> Any:
            return length

    loader = get_savable_loader(blend_of(sets, HALVES, Senseless)(ONE))
    with pytest.raises(FatalSampleError, match="return the sample's tokens as an integer"):
        next(iter(loader))


def test_sample_without_a_length_is_skipped_and_counted(sets) -> None:
    class Failing(Lengths):
        def sample_length(self, sample: TextSample) -> Any:
            if number_of(sample) % 5 == 0:
                raise SkipSample
            return super().sample_length(sample)

    run = Ranks(blend_of(sets, HALVES, Failing), 1)
    batches = run.slots(1000)
    assert all(int(key) % 5 for batch in batches.values() for key in batch.__key__)
    assert shares(actual_tokens(batches.values())) == pytest.approx(
        {"short": 0.5, "long": 0.5}, rel=0.02
    )
    assert sum(s.skipped for s in run.loaders[0].stats().values()) > 100
