"""`len` of packs, buckets and groups that are chosen while samples are read."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    BlendDataset,
    Buckets,
    DefaultTaskEncoder,
    Packing,
    SavableDataLoader,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.balance import CostModel
from energon_lite.stages.collect import CollectDataset

from ..conftest import examples, write_tar
from ..helpers import assert_same, prepared, through_json

NUM_SAMPLES, CAPACITY = 2_000, 512


REPORTED: list[Exception] = []


def report(error: Exception, *_: Any) -> None:
    REPORTED.append(error)


def texts(folder: Path, seed: int, mean: float) -> Path:
    rng = random.Random(seed)
    lengths = [min(CAPACITY, 1 + int(rng.lognormvariate(mean, 0.6))) for _ in range(NUM_SAMPLES)]
    for shard in range(4):
        members = [
            (f"{i:05d}.txt", b"x" * lengths[i])
            for i in range(shard * NUM_SAMPLES // 4, (shard + 1) * NUM_SAMPLES // 4)
        ]
        write_tar(folder / f"{shard}.tar", members)
    return prepared(folder, "TextSample", {"text": "txt"})


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("lengths") / "short", 1, 3.5)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("lengths") / "long", 2, 4.5)


class Lists(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Counts the samples that are measured; packs are lists of keys."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.calls = 0
        self.__dict__.update(settings)

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: TextSample) -> Any:
        self.calls += 1
        torch.rand(1), random.random()
        return sample

    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> list[str]:
        return [sample.__key__ for sample in samples]

    def batch(self, samples: list[Any]) -> Any:
        return samples if isinstance(samples[0], list) else [s.__key__ for s in samples]


class Packs(Lists):
    packing = Packing(capacity=CAPACITY, buffer_size=64)


class Skipping(Packs):
    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        self.calls += 1
        number = int(sample.__key__)
        if number % 3 == 0:
            raise SkipSample
        if number % 50 == 1:
            raise ValueError("broken")
        return sample


class Expanding(Packs):
    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        yield sample
        yield TextSample.derive_from(sample, text=sample.text[:20])


class Broken(Packs):
    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        self.calls += 1
        raise ValueError("broken")


class Unwanted(Packs):
    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        self.calls += 1
        raise SkipSample


class Selecting(Lists):
    @stateless
    def select_samples_to_pack(self, samples: list[TextSample]) -> list[list[TextSample]]:
        return [samples[i : i + 7] for i in range(0, len(samples), 7)]


class Groups(Lists):
    def batch_group_criterion(self, sample: TextSample) -> tuple[bool, int]:
        is_long = len(sample.text) > 40
        return is_long, 4 if is_long else 16


def make(
    root: Path,
    encoder: Any,
    *,
    validation: bool = False,
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> SavableDataLoader[Any]:
    place = {"rank": 0, "world_size": 1, "num_workers": 0, "num_streams": 2, **(config or {})}
    place["global_error_handler"] = report
    settings = {"batch_size": 2, "task_encoder": encoder, **settings}
    if validation:
        dataset = get_val_dataset(
            root, split_part="train", worker_config=WorkerConfig(**place), **settings
        )
    else:
        settings = {"repeat": False, **settings}
        dataset = get_train_dataset(root, worker_config=WorkerConfig(**place), **settings)
    return get_savable_loader(dataset, max_skip_rate=1)


def _lists(dataset: Any) -> CollectDataset[Any]:
    while not isinstance(dataset, CollectDataset):
        (dataset,) = dataset.children
    return dataset


def balanced() -> Packing:
    cost = CostModel(token=1, token_squared=0.01)
    return Packing(capacity=CAPACITY, balance="quantile_sync", cost=cost)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "packs": (Packs, {}),
    "best fit": (lambda: Lists(packing=Packing(capacity=CAPACITY, algorithm="best")), {}),
    "balanced": (lambda: Lists(packing=balanced()), {}),
    "split": (lambda: Lists(packing=Packing(capacity=CAPACITY, max_samples=4)), {}),
    "buckets": (lambda: Lists(batching=Buckets(max_tokens=2_048)), {"batch_size": None}),
    "selected": (Selecting, {"packing_buffer_size": 70}),
    "groups": (Groups, {"batch_size": None}),
    "skipping": (Skipping, {}),
    "expanding": (Expanding, {}),
}


@pytest.mark.parametrize("validation", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS)
def test_length_is_a_few_percent_off_and_exact_after_a_pass(short, kind, validation) -> None:
    encoder, settings = KINDS[kind]
    loader = make(short, encoder(), validation=validation, **settings)
    estimate, number = len(loader), sum(1 for _ in loader)
    assert 20 < number < NUM_SAMPLES / 4
    assert estimate == pytest.approx(number, rel=0.1)
    assert len(loader) == number


def test_length_is_exact_for_data_that_are_read_whole(tmp_path) -> None:
    folder = tmp_path / "few"
    write_tar(folder / "a.tar", [(f"{i:03d}.txt", b"x" * (20 + 7 * i % 90)) for i in range(150)])
    prepared(folder, "TextSample", {"text": "txt"})
    loader = make(folder, Packs(), config={"num_streams": 1}, batch_size=1)
    assert len(loader) == sum(1 for _ in loader) < 30


@pytest.mark.parametrize("shares", [(1.0, 1.0), (4.0, 1.0)])
def test_endless_blend_has_an_epochs_worth_by_its_shares(short, long, shares) -> None:
    def measured(*weights: float) -> float:
        """Returns the mean number of samples in a pack."""
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
        both = [
            get_train_dataset(root, batch_size=None, worker_config=config) for root in (short, long)
        ]
        blend = BlendDataset(*zip(both, weights, strict=True))
        dataset = Packs().build_batch(blend, batch_size=1, worker_config=config)
        loader = get_savable_loader(dataset)
        number, packs = len(loader), iter(loader)
        samples = sum(len(next(packs)[0]) for _ in range(400))
        assert 2 * NUM_SAMPLES / number == pytest.approx(samples / 400, rel=0.1)
        return number

    assert measured(*shares) > 100


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders by their number of samples."""
    found = {}
    for number in (8, 30, 100):
        folder = tmp_path_factory.mktemp("small") / str(number)
        members = [(f"{i:03d}.txt", b"x" * (20 + 37 * i % 150)) for i in range(number)]
        write_tar(folder / "a.tar", members)
        found[number] = prepared(folder, "TextSample", {"text": "txt"})
    return found


@examples(8)
@given(
    num_samples=st.sampled_from([8, 30, 100]),
    num_streams=st.integers(1, 24),
    batch_size=st.integers(1, 3),
    kind=st.sampled_from(["packs", "best fit", "buckets", "plain"]),
)
def test_endless_lists_are_rounded_up_once_for_all_streams(
    small, num_samples, num_streams, batch_size, kind
) -> None:
    """Where no stream ends, none has a list that is not full."""
    encoder, settings = KINDS[kind] if kind != "plain" else (Lists, {})
    settings = {"batch_size": batch_size, "repeat": True, **settings}
    loader = make(small[num_samples], encoder(), config={"num_streams": num_streams}, **settings)
    number, batches, num_read = len(loader), iter(loader), 0
    for _ in range(read := 20 + 2 * num_streams):
        batch = next(batches)
        num_read += sum(map(len, batch)) if isinstance(batch[0], list) else len(batch)
    expected = num_samples * read / num_read
    assert 0.75 * expected - 1 <= number <= 1.35 * expected + 2
    assert number == len(get_savable_loader(loader.dataset))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_length_is_the_same_on_all_ranks_and_after_pickling(short, num_workers) -> None:
    found = []
    for rank in range(2):
        config = {"rank": rank, "world_size": 2, "num_workers": num_workers, "num_streams": 4}
        loader = make(short, Packs(), config=config, repeat=True)
        again = pickle.loads(pickle.dumps(loader.dataset))
        found += [len(loader), len(loader.dataset), len(again)]
        assert "trial" in vars(_lists(loader.dataset))
        assert "trial" not in vars(_lists(pickle.loads(pickle.dumps(loader.dataset))))
    assert len(set(found)) == 1
    assert found[0] > 1
    one = make(short, Packs(), config={"num_workers": num_workers, "num_streams": 4}, repeat=True)
    assert len(one) == pytest.approx(2 * found[0], abs=1)


def test_length_changes_nothing_of_the_run(short) -> None:
    encoder = Skipping()
    loader, expected = make(short, encoder), make(short, Skipping())
    REPORTED.clear()
    before = random.getstate(), torch.get_rng_state().tolist(), pickle.dumps(loader.config())
    state = through_json(loader.state_dict())
    assert len(loader) > 0
    assert encoder.calls > 0
    assert REPORTED == []
    after = random.getstate(), torch.get_rng_state().tolist(), pickle.dumps(loader.config())
    assert after == before
    assert through_json(loader.state_dict()) == state
    batches, wanted = iter(loader), iter(expected)
    for _ in range(20):
        assert_same([next(batches)], [next(wanted)])
        len(loader)
    assert REPORTED != []
    resumed = make(short, Skipping())
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert len(resumed) == len(loader)
    assert_same(list(iter(resumed)), [*wanted])


def test_samples_are_read_once_and_only_where_lists_depend_on_them(short) -> None:
    encoder = Packs()
    loader = make(short, encoder)
    assert len(loader) == len(loader) == len(get_savable_loader(loader.dataset))
    assert 0 < encoder.calls <= 1_100
    for settings in ({"virtual_epoch_length": 5, "repeat": True}, {"packing": None}):
        encoder = Packs() if "packing" not in settings else Lists()
        length = settings.get("virtual_epoch_length", NUM_SAMPLES // 2)
        settings.pop("packing", None)
        assert len(make(short, encoder, **settings)) == length
        assert encoder.calls == 0
    assert len(make(short, Packs(), validation=True, limit=3)) == 3


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("kind", [Broken, Unwanted])
def test_samples_that_all_fail_count_as_one_pack_each(short, kind, repeat) -> None:
    encoder = kind()
    assert len(make(short, encoder, repeat=repeat)) == NUM_SAMPLES / 2
    assert encoder.calls < 1_200


def test_consumer_beyond_an_estimate_that_is_too_low_skips_nothing(short, monkeypatch) -> None:
    whole = list(iter(make(short, Packs())))
    monkeypatch.setattr(CollectDataset, "trial", (0.0, 0.001))
    loader = make(short, Packs())
    batches = iter(loader)
    assert len(loader) < 3
    for _ in range(5):
        next(batches)
    loader.set_epoch(0)
    loader.skip_first_batches(5)
    assert_same(list(iter(loader)), whole[5:])
