"""A dataset and a loader are shown as the tree of their stages; nothing is read or started."""

from __future__ import annotations

import re
import threading
from multiprocessing import active_children

import pytest

from energon_lite import (
    DefaultTaskEncoder,
    MapDataset,
    Packing,
    SavableDataset,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.order.schedules import Schedule
from energon_lite.stages.blend import BlendDataset

from ..helpers import metadataset, text_set
from ..laws.test_laws import CASES, indexed_texts

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


class MyEncoder(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample):
        return sample


class Packs(MyEncoder):
    packing = Packing(64)

    def sample_length(self, sample):
        return len(sample.text)


def double(sample):
    return sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name, number in (("coco", 300), ("receipts", 24)):
        text_set(root / name, number)
    return root


def blend(folder, *weights, **settings):
    names = ("coco", "receipts")
    entries = [{"path": str(folder / n), "weight": w} for n, w in zip(names, weights, strict=True)]
    return metadataset({"blend": entries, **settings})


def train(path, encoder=None, batch_size=16, config=CONFIG, **settings):
    return get_train_dataset(
        path, worker_config=config, task_encoder=encoder, batch_size=batch_size, **settings
    )


def lines(dataset):
    """The lines of a repr, without the size and the folder of the test's data."""
    return re.sub(r"data\d+/|, [\d.]+ KiB", "", repr(dataset)).split("\n")


def test_a_loader_is_the_tree_of_its_stages(folder):
    config = WorkerConfig(rank=1, world_size=2, num_workers=2)
    loader = get_savable_loader(train(blend(folder, 3, 1), MyEncoder(), config=config))
    before = threading.active_count(), active_children()
    assert lines(loader) == [
        "SavableDataLoader(rank 1 of 2, 2 workers, 4 streams)", "└─ Batch(size 16)",
        "   └─ encode_sample (MyEncoder)", "      └─ Blend(exact)",
        "         ├─ 75.0 %  coco/train  300 samples",
        "         └─ 25.0 %  receipts/train  24 samples",
    ]  # fmt: skip
    assert re.search(r"24 samples, [1-9]\d\.\d KiB$", repr(loader))
    assert (threading.active_count(), active_children()) == before


def test_nothing_is_read_for_a_repr(folder, monkeypatch):
    dataset = train(blend(folder, 3, 1), Packs(), batch_size=2, virtual_epoch_length=100)

    def refuse(*_):
        raise AssertionError("this was read")

    monkeypatch.setattr("energon_lite.formats.shards.ShardReader.read", refuse)
    monkeypatch.setattr(SavableDataset, "__iter__", refuse)
    monkeypatch.setattr(SavableDataset, "__len__", refuse)
    assert lines(dataset)[:5] == [
        "Epochize(100 items of each rank in a pass)", "└─ Batch(size 2)",
        "   └─ Pack(capacity 64 tokens, streaming, packing buffer size 256, overlong error)",
        "      └─ sample_length (Packs)", "         └─ encode_sample (Packs)",
    ]  # fmt: skip


def test_functions_and_validation_are_named(folder):
    dataset = MapDataset(train(folder / "receipts", batch_size=None), double)
    assert lines(dataset)[0] == "map (double)"
    entries = [{"path": str(folder / name), "split_part": "train"} for name in ("coco", "receipts")]
    both = get_val_dataset(
        metadataset({"blend": entries}), split_part="train", batch_size=4, limit=5,
        worker_config=CONFIG,
    )  # fmt: skip
    assert lines(both) == [
        "Limit(5 items of each rank in a pass)", "└─ Batch(size 4)", "   └─ Concat",
        "      ├─ coco/train  300 samples", "      └─ receipts/train  24 samples",
    ]  # fmt: skip


def test_shares_over_time_are_said_in_words(folder):
    once = {"schedule": "linear", "points": {0: 0.5, 1000: 0.1}}
    shown = lines(train(blend(folder, once, 1)))
    assert shown[-2].startswith("   ├─  33.3 % → 9.1 % over 1,000 samples  coco/train")
    assert shown[-1].startswith("   └─ 66.7 % → 90.9 % over 1,000 samples  receipts/train")
    many = {"schedule": "step", "points": {i * 100: 1 + i % 2 for i in range(50)}}
    assert "50.0 % → 66.7 % → ... → 66.7 % over 4,900 samples" in repr(
        train(blend(folder, many, 1))
    )


def test_of_a_thousand_sources_the_first_are_shown(folder):
    source = train(folder / "receipts", batch_size=None)
    dataset = BlendDataset(*[(source, 1 + number) for number in range(1000)])
    shown = repr(dataset).split("\n")
    assert len(shown) == 12
    assert shown[1].startswith("├─ 0.0002 %  receipts/train  24 samples")
    assert shown[-1].startswith("└─ and 990 more  23,760 samples, ")


class Broken(SavableDataset):
    cursor = restore_sample = num_items = None

    def config(self):
        raise RuntimeError("not built yet")

    sources = config


class Named(MapDataset):
    def __repr__(self):
        return "my own"


def test_a_dataset_that_cannot_be_described_has_a_repr(folder):
    Broken.__abstractmethods__ = frozenset()
    assert "Broken object at" in repr(Broken())
    assert "BlendDataset object at" in repr(object.__new__(BlendDataset))
    dead = Schedule("linear", ((0, 0.0), (10, 1.0)))
    source = train(folder / "receipts", batch_size=None)
    assert "├─ scheduled  receipts/train" in repr(BlendDataset((source, dead), (source, dead)))
    assert repr(Named(source, double)) == "my own"


def test_every_dataset_has_a_tree(tmp_path):
    root, number = indexed_texts(tmp_path), 0
    for kind, cases in CASES.items():
        for case in cases:
            dataset, number = case(root), number + 1
            shown = repr(dataset)
            assert " object at " not in shown, kind.__name__
            assert all(facts.name in shown for facts in dataset.sources())
    assert number > 100
