"""Blends by tokens, through the whole pipeline: measured lengths, or a stored index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    SkipSample,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    stateless,
)
from energon_lite.core.errors import DatasetFormatError, FatalSampleError, StateError
from energon_lite.core.keys import leaves
from energon_lite.core.seeds import key_of
from energon_lite.formats.length_files import write_lengths
from energon_lite.sources.dataset_config import load_factory

from ..conftest import write_tar
from ..helpers import (
    Ranks,
    assert_same,
    blend_maker,
    caption_set,
    number_of,
    prepared,
    text_set,
    through_json,
)

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


INDEXED = HALVES + "\nlengths: tok"
NESTED = """
unit: tokens
blend:
- {path: s0}
- {weight: 3, blend: [{path: short}, {path: long, weight: 2}]}
"""
EVEN = {"short": 0.5, "long": 0.5}
THIRDS = {"long/train": 1 / 3, "short/train": 1 / 3, "long/train#2": 1 / 3}


EVEN_BLENDS = [
    *((HALVES, EVEN, kind) for kind in (Lengths, Skipping, Expanding)),
    (INDEXED, EVEN, DefaultTaskEncoder),
]
OTHER_BLENDS = [
    (NESTED, {"s0": 0.25, "short": 0.25, "long": 0.5}, Lengths),
    (INDEXED.replace("path: long}", "path: long, subset: {range: [40, 60]}}"), EVEN,
     DefaultTaskEncoder),
]  # fmt: skip


@pytest.mark.parametrize("num_streams", [pytest.param(1, marks=pytest.mark.soak), 4])
@pytest.mark.parametrize(
    ("split", "expected", "encoder", "error"),
    [
        *((*blend, 0.05) for blend in EVEN_BLENDS),
        *(
            pytest.param(*blend, 0.01, marks=pytest.mark.soak)
            for blend in EVEN_BLENDS + OTHER_BLENDS
        ),
    ],
)
def test_shares_of_tokens_are_met(sets, split, expected, encoder, error, num_streams) -> None:
    run = Ranks(blend_of(sets, split, encoder), 1, num_streams=num_streams)
    batches = run.slots(round((20 if encoder is Expanding else 12) / error))
    found = actual_tokens(batches.values(), encoder)
    assert shares(found) == pytest.approx(expected, rel=error)
    stats = {name.split("/")[0]: own for name, own in run.loaders[0].stats().items()}
    assert run.loaders[0].stats().unit == "tokens"
    assert {n: s.actual_share for n, s in stats.items()} == pytest.approx(expected, rel=error)
    assert {n: s.target_share for n, s in stats.items()} == pytest.approx(expected)
    assert {n: s.tokens for n, s in stats.items()} == found
    assert (sum(s.skipped for s in stats.values()) > 1 / error) == (encoder is Skipping)


@pytest.mark.parametrize(
    ("blend", "expected"),
    [
        ("[{path: long}, {path: short}, {path: long}]", THIRDS),
        ("[{path: short, name: same}, {path: long, name: same}]", {"same": 0.5, "same#2": 0.5}),
        ("[{path: short, name: 'a#1'}, {path: long}]", {"a#1": 0.5, "long/train": 0.5}),
    ],
)
def test_sources_of_any_names_have_the_lengths_of_their_folder(sets, blend, expected) -> None:
    split = f"unit: tokens\nlengths: tok\nblend: {blend}"
    loader = get_savable_loader(blend_of(sets, split, DefaultTaskEncoder, batch_size=1)(ONE))
    found = dict.fromkeys(expected, 0)
    for batch in islice(loader, 400):
        name = Path(batch.__sources__[0][0].dataset_path).name
        ((source, *_),) = leaves(batch.__restore_key__)
        found[source] += tokens_of(name, int(batch.__key__[0]))
    assert {name: s.tokens for name, s in loader.stats().items()} == found
    assert shares(found) == pytest.approx(expected, rel=0.05)


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


@pytest.mark.parametrize("num_streams", [1, 4])
def test_with_an_index_every_prefix_of_a_stream_is_within_one_longest_sample(
    sets, num_streams
) -> None:
    split = INDEXED.replace("short}", "short, weight: 3}")
    make = blend_of(sets, split, DefaultTaskEncoder, batch_size=1)
    run = Ranks(make, 1, num_streams=num_streams)
    batches = list(run.slots(400).values())
    expected = {"short": 0.75, "long": 0.25}
    for stream in range(num_streams):
        assert max(errors_of(batches[stream::num_streams], expected)) <= 1
    assert max(errors_of(batches, expected)) <= 1 + 0.5 * num_streams


# Characters of the texts, and the shares.
DOCUMENTS = {"long": (4000, 3), "crude": (400, 4), "lines.jsonl": (400, 2), "tiny": (20, 1)}
LONGEST = 8000


@stateless
def text_of_json(sample: Any) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"])


class Documents(DefaultTaskEncoder):
    cookers = (Cooker(text_of_json),)

    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts as text parts, as JSON parts and as lines, half to twice as long as their mean."""
    root = tmp_path_factory.mktemp("documents")
    for name, (mean, _) in DOCUMENTS.items():
        sizes = [mean // 2 + key_of(name, i) % (3 * mean // 2) for i in range(200)]
        records = [json.dumps({"text": "x" * size}) for size in sizes]
        if name == "lines.jsonl":
            (root / name).write_text("\n".join(records))
        elif name == "crude":
            write_tar(root / name / "0.tar", [
                (f"{i}.json", record.encode()) for i, record in enumerate(records)
            ])  # fmt: skip
            prepared(root / name, "CrudeWebdataset")
        else:
            write_tar(root / name / "0.tar", [
                (f"{i}.txt", b"x" * size) for i, size in enumerate(sizes)
            ])  # fmt: skip
            prepared(root / name, "TextSample", {"text": "txt"})
    return root


@pytest.mark.parametrize("num_streams", [1, 12])
def test_shares_of_tokens_are_near_from_the_first_steps(documents, num_streams) -> None:
    entries = [f"{{path: {name}, weight: {own}}}" for name, (_, own) in DOCUMENTS.items()]
    split = f"unit: tokens\nblend: [{', '.join(entries)}]"
    make = blend_of(documents, split, Documents, batch_size=12)
    expected = Ranks(make, 1, num_streams=num_streams).slots(48)
    given: dict[str, int] = dict.fromkeys(DOCUMENTS, 0)
    errors = []
    for batch in expected.values():
        for (source,), text in zip(batch.__sources__, batch.text, strict=True):
            given[Path(source.dataset_path).name] += len(text)
        total = sum(given.values())
        wanted = {name: total * own / 10 for name, (_, own) in DOCUMENTS.items()}
        errors.append(max(abs(given[name] - wanted[name]) for name in given) / LONGEST)
    assert max(errors) <= 1


def test_with_index_and_sample_length_tokens_are_those_measured(sets) -> None:
    class Half(Lengths):
        def sample_length(self, sample: TextSample) -> int:
            return super().sample_length(sample) // 2

    loader = get_savable_loader(blend_of(sets, INDEXED, Half)(ONE))
    plain = get_savable_loader(blend_of(sets, INDEXED, DefaultTaskEncoder)(ONE))
    assert_same(list(islice(loader, 100)), list(islice(plain, 100)))
    for name, s in loader.stats().items():
        assert s.tokens == pytest.approx(plain.stats()[name].tokens / 2, rel=0.01)


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


@pytest.mark.parametrize("names", [["short"], ["long", "more", "short"]])
def test_edited_blend_resumes_with_an_index(tmp_path, names) -> None:
    for name in ("short", "long", "more"):
        text_set(tmp_path / name, 9)
        index(tmp_path / name, range(1, 10))
    loader = get_savable_loader(blend_of(tmp_path, INDEXED, DefaultTaskEncoder)(ONE))
    before = list(islice(loader, 5))
    paths = ", ".join(f"{{path: {name}}}" for name in names)
    after = f"unit: tokens\nlengths: tok\nblend: [{paths}]"
    make = blend_of(tmp_path, after, DefaultTaskEncoder)
    resumed, state = get_savable_loader(make(ONE)), through_json(loader.save_state_rank())
    edits = resumed.restore_state_global([state], migrate=True)
    assert len(edits) == 1 if len(names) == 1 else any("more/train: added" in e for e in edits)
    # The samples of what stays follow each other: each once in an epoch.
    batches = [*before, *islice(resumed, 8)]
    found = [leaf for batch in batches for leaf in leaves(batch.__restore_key__)]
    epoch = [leaf[2] for leaf in found if leaf[0] == "short/train"][:9]
    assert sorted(epoch) == list(range(9))
    index(tmp_path / "short", range(2, 11))
    with pytest.raises(StateError, match=r"Checkpoint has lengths=.*source short/train"):
        get_savable_loader(make(ONE)).restore_state_global([state], migrate=True)


NO_FOLDER = INDEXED.replace("{path: long}", "{concat: [{path: long}, {path: s0}]}")


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


@pytest.mark.parametrize(
    ("split", "error", "words"),
    [
        (HALVES + "\nlengths: none", FileNotFoundError, r"meta.yaml:\d+, .*'none'.* or remove"),
        (NO_FOLDER, DatasetFormatError, r"meta.yaml:\d+.*`lengths` needs a dataset folder"),
        (HALVES, ValueError, r"sample_length\(self, sample\) .*or name a stored"),
    ],
)
def test_blend_without_lengths_is_refused(sets, split, error, words) -> None:
    with pytest.raises(error, match=words):
        blend_of(sets, split, DefaultTaskEncoder)(ONE)


@pytest.mark.parametrize(
    ("number", "data", "words"),
    [
        (9, "another fingerprint", "other data with as many samples"),
        (8, None, "of 8 samples, the split part has 9 now"),
    ],
)
def test_index_of_other_data_is_refused(tmp_path, number, data, words) -> None:
    for name in ("short", "long"):
        text_set(tmp_path / name, 9)
        index(tmp_path / name, range(1, 10))
    data = data or load_factory(tmp_path / "long", split_part="train").data
    write_lengths(tmp_path / "long", "train", "tok", np.arange(number), data)
    with pytest.raises(DatasetFormatError, match=words):
        blend_of(tmp_path, INDEXED)(ONE)


@pytest.mark.parametrize("length", [-1, 2.5, True, {"images": 3}])
def test_senseless_length_stops_the_run_with_what_it_was(sets, length) -> None:
    class Senseless(Lengths):
        def sample_length(self, sample: TextSample) -> Any:
            return length

    loader = get_savable_loader(blend_of(sets, HALVES, Senseless)(ONE))
    with pytest.raises(FatalSampleError, match="return the sample's tokens as an integer"):
        next(iter(loader))


def test_bytes_of_pictures_are_no_estimate(tmp_path) -> None:
    caption_set(tmp_path / "pictures", 30)
    text_set(tmp_path / "texts", 30)

    class Texts(DefaultTaskEncoder):
        def sample_length(self, sample: Any) -> int:
            return 10

    split = "unit: tokens\nblend: [{path: pictures}, {path: texts}]"
    loader = get_savable_loader(blend_of(tmp_path, split, Texts, batch_size=None)(ONE))
    found = [source_of(sample) for sample in islice(loader, 40)]
    assert abs(found.count("pictures") - 20) <= 2
