"""Every example in metadatasets/ is read, built on small sets and iterated."""

from __future__ import annotations

import shutil
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    get_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.metadataset.nodes import KEYS, MetadatasetFile, OlderEntry, OlderSplit, leaves
from energon_lite.metadataset.read import read_metadataset, split_names
from energon_lite.metadataset.values import Subset, WrittenSchedule, keys_of
from energon_lite.storage.yaml import load_yaml

from .conftest import REPO
from .helpers import caption_set, text_set
from .metadataset.test_schema import SCHEMA, matches

FOLDER = REPO / "metadatasets"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.yaml"))
NUM_SAMPLES = {"captions": 40, "captions_generated": 24, "web": 60, "books": 20, "chats": 12}
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)


class Texts(DefaultTaskEncoder):
    """Encodes captions and texts as texts, so that one batch may have both."""

    @stateless
    def encode_sample(self, sample: Any) -> TextSample:
        text = sample.text if isinstance(sample, TextSample) else sample.caption
        return TextSample.derive_from(sample, text=text)

    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All folders that the examples name, and the examples beside them."""
    root = tmp_path_factory.mktemp("metadatasets")
    for name in EXAMPLES:
        shutil.copy(FOLDER / name, root)
    for name, number in {**NUM_SAMPLES, "text": 30}.items():
        make = caption_set if name.startswith("captions") else text_set
        make(root / name, number)
    return root


@pytest.fixture(autouse=True)
def demo_data(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_DATA", str(sets))
    monkeypatch.setenv("ENERGON_LITE_TRUST", "1")  # to read it


def training(path: Path, **settings: Any) -> Any:
    return get_loader(
        get_train_dataset(
            path, batch_size=8, shuffle_buffer_size=8, task_encoder=Texts(), worker_config=ONE,
            **settings,
        )
    )  # fmt: skip


def shares_after(path: Path, num_batches: int) -> dict[str, tuple[float, float]]:
    """Asked and given share of each source, to whole percents."""
    loader = training(path)
    assert sum(1 for _ in islice(loader, num_batches)) == num_batches
    stats = loader.stats()
    return {n: (round(s.target_share, 2), round(s.actual_share, 2)) for n, s in stats.items()}


def places(batch: Any) -> list[tuple[str, Any]]:
    """Folder and number of each sample."""
    return [(str(s.dataset_path), s.index) for sources in batch.__sources__ for s in sources]


def test_there_are_examples_and_the_readme_lists_them() -> None:
    text = (FOLDER / "README.md").read_text()
    assert len(EXAMPLES) >= 8
    assert [name for name in EXAMPLES if f"[{name}]({name})" not in text] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_names_the_schema_and_what_it_shows(name: str) -> None:
    first, second = (FOLDER / name).read_text().splitlines()[:2]
    assert first == "# yaml-language-server: $schema=../docs/metadataset.schema.json"
    assert second.startswith("# ")
    assert (FOLDER / first.split("=")[1]).is_file()
    assert matches(load_yaml(FOLDER / name), SCHEMA)


SPLITS = [(name, split) for name in EXAMPLES for split in split_names(FOLDER / name)]


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_example_is_read_built_and_iterated(name: str, split: str, sets: Path) -> None:
    found = leaves(read_metadataset(sets / name, split))
    assert found
    if split != "train":
        return  # the demo's has a part of its own, see test_examples; the other one is below
    loader = training(sets / name)
    batches = list(islice(loader, 60))
    assert len(batches) == 60
    for batch in batches:
        assert batch.loss_weight.shape == (8,)
    assert sum(s.samples for s in loader.stats().values()) == 480
    assert all(s.samples for s in loader.stats().values() if s.target_share)


def test_blend_has_its_weights_and_loss_weights(sets: Path) -> None:
    shares = shares_after(sets / "blend.yaml", 100)
    names = ["captions", "web", "books", "captions_generated", "chats"]
    asked = [0.4, 0.3, 0.15, 0.1, 0.05]
    assert list(shares) == [f"{name}/train" for name in names]
    assert [a for a, _ in shares.values()] == asked
    assert [g for _, g in shares.values()] == pytest.approx(asked, abs=0.011)
    factors = {leaf.loss_weight for leaf in leaves(read_metadataset(sets / "blend.yaml", "train"))}
    seen = {weight for batch in islice(training(sets / "blend.yaml"), 20)
            for weight in batch.__loss_weight__}  # fmt: skip
    assert seen == factors == {1.0, 0.3, 0.5, 2.0}


def test_curriculum_begins_with_the_web_and_has_no_chats(sets: Path) -> None:
    shares = shares_after(sets / "curriculum.yaml", 100)
    assert shares["web/train"][0] == 0.8
    assert shares["chats/train"] == (0.0, 0.0)


def test_epoch_has_each_sample_as_often_as_its_repetitions(sets: Path) -> None:
    loader = training(sets / "epochized.yaml", repeat=False)
    keys = Counter(key for batch in loader for key in batch.__key__)
    expected = {"books": Fraction(1), "captions": Fraction("2.5"), "web": Fraction("0.1")}
    assert sum(keys.values()) == sum(NUM_SAMPLES[name] * n for name, n in expected.items())
    stats = loader.stats()
    for name, repetitions in expected.items():
        assert stats[f"{name}/train"].epochs == float(repetitions)


def test_nested_weights_multiply_and_a_set_may_come_twice(sets: Path) -> None:
    shares = shares_after(sets / "nested.yaml", 200)
    assert shares["captions/train"][0] == 0.38  # 2/4 * 3/4
    assert shares["captions/train#3"][0] == 0.25
    assert len(shares) == 8
    assert all(asked == pytest.approx(given, abs=0.011) for asked, given in shares.values())


def test_tokens_are_shared_by_weight(sets: Path) -> None:
    loader = training(sets / "tokens.yaml")
    for _ in islice(loader, 300):
        pass
    given = [stats.actual_share for stats in loader.stats().values()]
    assert given == pytest.approx([0.6, 0.3, 0.1], abs=0.01)


def test_training_and_validation_share_no_sample(sets: Path) -> None:
    path = sets / "validation.yaml"
    dataset = get_val_dataset(path, batch_size=4, task_encoder=Texts(), worker_config=ONE)
    held_out = [place for batch in get_loader(dataset) for place in places(batch)]
    assert len(held_out) == 4 + 2  # a tenth of 40 captions and of 20 books
    trained = [place for batch in islice(training(path), 40) for place in places(batch)]
    assert len(trained) == 320
    assert len(set(trained)) == 36 + 18
    assert not set(held_out) & set(trained)


def test_every_key_of_the_grammar_is_on_the_page_and_no_other() -> None:
    page = REPO / "docs" / "reference" / "metadatasets.md"
    text = page.read_text().split("## Different from Energon")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = {key.strip("`") for row in rows for key in row.strip().split(", ")}
    kinds = [*KEYS, MetadatasetFile, OlderSplit, OlderEntry, WrittenSchedule, Subset]
    assert listed == {name for kind in kinds for name in keys_of(kind)}
