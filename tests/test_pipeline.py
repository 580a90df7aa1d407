"""The entry points: names, arguments and defaults as in Energon."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    EpochizeDataset,
    SampleDecoder,
    TextSample,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.topology import Stream
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.storage.yaml import load_yaml

from .conftest import jpeg, write_tar
from .helpers import caption_set, text_sets

NUM_TEXTS = 20
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


@pytest.fixture(scope="session")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return caption_set(tmp_path_factory.mktemp("pipeline") / "captions", 8)


def test_worker_config_is_optional_everywhere(texts) -> None:
    dataset = get_train_dataset(texts, batch_size=2)
    assert dataset.worker_config is None
    loader = get_savable_loader(dataset)
    assert loader.worker_config.num_workers == 4
    own = get_savable_loader(dataset, worker_config=CONFIG)
    assert len(list(islice(iter(own), 3))) == 3
    assert get_savable_loader(get_val_dataset(texts, split_part="train", batch_size=2))


def test_seeds_of_loader_and_dataset_must_agree(texts) -> None:
    dataset = get_train_dataset(texts, worker_config=CONFIG, batch_size=2)
    other = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=1)
    with pytest.raises(ValueError, match=r"seed_offset=1, the dataset's has 0"):
        get_savable_loader(dataset, worker_config=other)


def test_all_arguments_of_energon_are_accepted(texts) -> None:
    dataset = get_train_dataset(
        texts, split_part="train", worker_config=CONFIG, batch_size=2, batch_drop_last=True,
        packing_buffer_size=None, shuffle_buffer_size=100, max_samples_per_sequence=10,
        virtual_epoch_length=3, shuffle_over_epochs_multiplier=1, repeat=True,
        task_encoder=DefaultTaskEncoder(), parallel_shard_iters=2, subflavors={"a": 1},
    )  # fmt: skip
    assert isinstance(dataset, EpochizeDataset)
    loader = get_savable_loader(
        dataset, worker_config=CONFIG, checkpoint_every_sec=1, checkpoint_every_min_n_samples=1,
        n_checkpoints=1, gc_collect_every_n_steps=1, prefetch_factor=1, cache_pool=None,
        watchdog_timeout_seconds=10, watchdog_initial_timeout_seconds=10, fail_on_timeout=False,
    )  # fmt: skip
    batches = list(loader)
    assert len(batches) == 3
    assert batches[0].__subflavors__ == [{"a": 1}] * 2


def test_val_datasets_are_pairs_of_dataset_and_source(texts) -> None:
    ((dataset, factory),) = get_val_datasets(
        texts, split_part="train", worker_config=CONFIG, batch_size=None
    )
    assert len(factory) == len(dataset) == 20
    assert factory.path == texts
    assert [sample.__key__ for sample in dataset] == [f"{i:05d}" for i in range(20)]
    assert not dataset.training


def test_unknown_argument_is_named_with_those_there_are(texts) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'sufle'; .*subflavors"):
        get_train_dataset(texts, worker_config=CONFIG, batch_size=2, sufle=1)


def test_wrong_arguments_of_loaders_are_refused_by_name(texts) -> None:
    dataset = get_train_dataset(texts, worker_config=CONFIG, batch_size=2)
    with pytest.raises(ValueError, match="prefetch_factor=0"):
        get_loader(dataset, prefetch_factor=0)
    with pytest.raises(ValueError, match="cache_pool"):
        get_loader(dataset, cache_pool=object())  # type: ignore[arg-type]


def test_unshuffled_training_emits_the_file_order_in_slots(texts) -> None:
    """Two streams, batches of three; 20 samples, so that the seventh batch wraps round."""
    dataset = get_train_dataset(
        texts,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2),
        batch_size=3,
        shuffle_over_epochs_multiplier=None,
    )
    batches = list(islice(iter(get_savable_loader(dataset)), 14))
    numbers = [int(key) for batch in batches for key in batch.__key__]
    assert numbers == [i % 20 for i in range(42)]


def test_old_decoding_arguments_warn_and_work(captions) -> None:
    with pytest.warns(FutureWarning, match="image_decode"):
        dataset = get_train_dataset(
            captions, worker_config=CONFIG, batch_size=None, image_decode="torchrgb8"
        )
    assert next(iter(dataset)).image.dtype == torch.uint8
    with pytest.warns(FutureWarning, match="handler is ignored"):
        get_train_dataset(captions, worker_config=CONFIG, batch_size=None, handler=print)


def test_encoder_decides_the_decoding(captions) -> None:
    class Raw(DefaultTaskEncoder):
        decoder = None

    class Bytes8(DefaultTaskEncoder):
        decoder = SampleDecoder(image_decode="torchrgb8")

    settings: dict[str, Any] = {"worker_config": CONFIG, "batch_size": None}
    assert isinstance(
        next(iter(get_train_dataset(captions, task_encoder=Raw(), **settings))).image, bytes
    )
    sample = next(iter(get_train_dataset(captions, task_encoder=Bytes8(), **settings)))
    assert sample.image.dtype == torch.uint8


@pytest.mark.parametrize("names", [("jpg.0", "jpg.1"), ("0.jpg", "1.jpg")])
def test_several_pictures_of_a_sample_are_a_list(tmp_path, names) -> None:
    members = []
    for i in range(3):
        members += [(f"{i}.{name}", jpeg(10 * i + k)) for k, name in enumerate(names)]
        members.append((f"{i}.json", json.dumps({"caption": f"of {i}"}).encode()))
    write_tar(tmp_path / "shard.tar", members)
    found = {"image": list(names), "caption": "json[caption]"}
    prepare: Any = {"split_parts": {"train": ".*"}, "sample_type": "CaptioningSample"}
    prepare_dataset(tmp_path, **prepare, field_map=found, num_workers=0)
    assert load_yaml(tmp_path / ".nv-meta" / "dataset.yaml")["field_map"] == found
    dataset = get_val_dataset(tmp_path, split_part="train", worker_config=CONFIG, batch_size=None)
    samples = list(get_savable_loader(dataset))
    assert [sample.caption for sample in samples] == ["of 0", "of 1", "of 2"]
    decode = SampleDecoder().decode
    for i, sample in enumerate(samples):
        expected = [decode("jpg", jpeg(10 * i + k)) for k in range(2)]
        assert isinstance(sample.image, list)
        assert all(map(torch.equal, sample.image, expected))
    with pytest.raises(DatasetFormatError, match=r"'image\[1\]'.*png"):
        prepare_dataset(
            tmp_path, **prepare, field_map={"image": [names[0], "png"], "caption": "json"},
            num_workers=0, force_overwrite=True,
        )  # fmt: skip


def test_encoder_may_change_types(texts) -> None:
    encoder = DefaultTaskEncoder(encoded_sample_type=dict, batch_type=dict)
    dataset = get_train_dataset(texts, worker_config=CONFIG, batch_size=2, task_encoder=encoder)
    batch = next(iter(dataset))
    assert type(batch) is dict
    assert len(batch["text"]) == 2
    same = DefaultTaskEncoder(encoded_sample_type=TextSample)
    single = get_train_dataset(texts, worker_config=CONFIG, batch_size=None, task_encoder=same)
    assert isinstance(next(iter(single)), TextSample)


def metadataset(folder: Path, text: str) -> Path:
    """Writes a metadataset beside the folders that it names."""
    path = folder / "meta.yaml"
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\n"
    path.write_text(head + textwrap.dedent(text))
    return path


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_sets(tmp_path_factory.mktemp("sets"), a=50, b=20, c=5)


def sources_of(dataset: Any) -> dict[str, float]:
    return {facts.name: facts.loss_weight for facts in dataset.sources()}


def test_blend_of_a_file_has_its_shares_and_loss_weights(sets) -> None:
    path = metadataset(
        sets,
        """
        splits:
          train:
            loss_weight: 0.5
            blend:
            - {weight: 3, path: a, loss_weight: 0.2}
            - weight: 1
              blend: [{path: b}, {path: c, weight: 3}]
            - {weight: 0, path: not_there}
        """,
    )
    dataset = get_train_dataset(path, worker_config=CONFIG, batch_size=8)
    assert sources_of(dataset) == {"a/train": 0.1, "b/train": 0.5, "c/train": 0.5}
    loader = get_savable_loader(dataset)
    for batch in islice(loader, 200):
        expected = [0.1 if "/a/" in f"{s[0].dataset_path}/" else 0.5 for s in batch.__sources__]
        assert batch.loss_weight.tolist() == pytest.approx(expected)
    stats = loader.stats()
    asked = {"a/train": 1200, "b/train": 100, "c/train": 300}
    for name, number in asked.items():
        assert abs(stats[name].samples - number) <= 5
        assert stats[name].target_share == pytest.approx(number / 1600)
        assert stats[name].epochs == stats[name].samples / stats.facts[name].num_samples
    assert stats["a/train"].loss_weight_sum == pytest.approx(0.1 * stats["a/train"].samples)


def test_nested_blends_have_the_weights_of_energons_example(sets) -> None:
    inner = sets / "inner.yaml"
    metadataset(sets, "splits: {train: {blend: [{path: b}, {path: c, weight: 3}]}}").rename(inner)
    path = metadataset(sets, "splits: {train: {blend: [{path: a, weight: 3}, {path: inner.yaml}]}}")
    dataset = get_train_dataset(path, worker_config=CONFIG, batch_size=None)
    shares = dataset.expected(1000)
    assert shares == pytest.approx({"a/train": 750, "b/train": 62.5, "c/train": 187.5})


def test_leaf_used_twice_has_two_orders(sets) -> None:
    path = metadataset(sets, "splits: {train: {blend: [{path: a}, {path: a}]}}")
    dataset = get_train_dataset(path, worker_config=CONFIG, batch_size=None)
    assert list(sources_of(dataset)) == ["a/train", "a/train#2"]
    samples = list(islice(dataset, 100))
    orders = {
        name: [s.__key__ for s in samples if s.__restore_key__[0] == name]
        for name in sources_of(dataset)
    }
    first, second = orders.values()
    assert sorted(first) == sorted(second)  # an epoch of each
    assert first != second


@pytest.mark.parametrize("num_streams", [1, 7])
def test_epochized_blend_has_exact_counts_in_every_epoch(sets, num_streams) -> None:
    entries = "[{path: a, repetitions: 1.5}, {path: b}, {path: c, repetitions: 0.5}]"
    path = metadataset(sets, f"splits: {{train: {{blend_epochized: {entries}}}}}")
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=num_streams)
    dataset = get_train_dataset(path, worker_config=config, batch_size=None, repeat=False)
    loader = get_savable_loader(dataset)
    seen: Counter[Any] = Counter()
    for epoch in range(1, 5):
        counts = Counter(sample.__restore_key__[0] for sample in loader)
        assert counts == {"a/train": 75, "b/train": 20, "c/train": 2}
        seen.update(sample for sample in _keys_of(dataset, epoch - 1, num_streams))
    # Over four epochs of 1.5 repetitions each sample came six times, of 0.5 (2 of 5) once or twice.
    numbers: dict[str, set[int]] = {}
    for (name, _), number in seen.items():
        numbers.setdefault(name, set()).add(number)
    assert numbers == {"a/train": {6}, "b/train": {4}, "c/train": {1, 2}}


@pytest.mark.parametrize("split", [
    "a", "{path: a}", "{blend_epochized: [{path: a, repetitions: 1.5}, {path: b}]}",
    "{concat: [{path: a}, {path: b}]}",
])  # fmt: skip
@pytest.mark.parametrize(("repeat", "num_streams"), [(1, 3), (3, 1), (2, 3)])
def test_a_pass_of_several_epochs_has_each_sample_as_often(
    sets, split, repeat, num_streams
) -> None:
    path: Any = sets / "a" if split == "a" else metadataset(sets, f"splits: {{train: {split}}}")
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=num_streams)

    def loader(repeat: int) -> Any:
        return get_savable_loader(
            get_train_dataset(path, worker_config=config, batch_size=None, repeat=repeat)
        )

    def keys(samples: Any) -> list[Any]:
        return [sample.__restore_key__[::2] for sample in samples]

    several, alone = loader(repeat), loader(False)
    length = len(several)
    whole = keys(several)
    assert len(whole) == length
    assert Counter(whole) == Counter(key for _ in range(repeat) for key in keys(alone))
    for at in (1, length // 2, length - 1):
        first = loader(repeat)
        begun = keys(islice(first, at))
        resumed = loader(repeat)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert begun + keys(resumed) == whole


def _keys_of(dataset: Any, epoch: int, num_streams: int) -> list[tuple[str, int]]:
    found = []
    for index in range(num_streams):
        run = StreamRun(dataset, Stream(index, num_streams, epoch))
        found += [(sample.__restore_key__[0], sample.__restore_key__[2]) for sample in run]
    return found


def test_blend_without_an_end_is_refused_where_it_must_end(sets) -> None:
    path = metadataset(sets, "splits: {train: {blend: [{path: a}, {path: b}]}}")
    with pytest.raises(ValueError, match=r"until: first.*until: all_once.*blend_epochized"):
        get_train_dataset(path, worker_config=CONFIG, batch_size=2, repeat=False)


def test_nested_blend_with_another_end_stays_a_separate_blend(sets) -> None:
    inner = "{until: all_once, blend: [{path: b}, {path: c}]}"
    path = metadataset(sets, f"splits: {{train: {{until: first, blend: [{{path: a}}, {inner}]}}}}")
    dataset = get_train_dataset(path, worker_config=CONFIG, batch_size=None)
    counts = Counter(sample.__restore_key__[0] for sample in get_savable_loader(dataset))
    # As one blend it would end with the 5 samples of c, after about 10 of a.
    assert counts["b/train"] >= 15
    assert abs(counts["c/train"] - counts["b/train"]) <= 5
    assert abs(counts["a/train"] - counts["b/train"] - counts["c/train"]) <= 5


@pytest.mark.parametrize(
    ("until", "expected"),
    [("first", {"a/train": range(15, 26), "b/train": {20}}), ("all_once", None)],
)
def test_blend_with_an_end_has_passes(sets, until, expected) -> None:
    path = metadataset(
        sets, f"splits: {{train: {{until: {until}, blend: [{{path: a}}, {{path: b}}]}}}}"
    )
    dataset = get_train_dataset(path, worker_config=CONFIG, batch_size=None)
    assert not dataset.endless
    loader = get_savable_loader(dataset)
    for _ in range(3):
        length = len(loader)  # of the pass that comes
        keys = [sample.__restore_key__ for sample in loader]
        counts = Counter(key[0] for key in keys)
        if expected is None:
            # b comes again and again until a has ended: every sample of both, a's just once.
            assert counts["a/train"] == 50
            assert len({key[2] for key in keys if key[0] == "b/train"}) == 20
            assert abs(counts["b/train"] - 50) <= 5
        else:
            assert all(counts[name] in numbers for name, numbers in expected.items())
        assert length == len(keys)


def test_validation_of_a_blend_is_each_sample_once_in_file_order(sets) -> None:
    path = metadataset(
        sets,
        "splits: {val: {split_part: train, blend: [{path: b, weight: 9}, {path: c}, {path: a}]}}",
    )
    loader = get_loader(get_val_dataset(path, worker_config=CONFIG, batch_size=7))
    keys = [
        (source[0].dataset_path, key)
        for batch in loader
        for source, key in zip(batch.__sources__, batch.__key__, strict=True)
    ]
    assert [Path(path).name for path, _ in keys] == ["b"] * 20 + ["c"] * 5 + ["a"] * 50
    assert len(set(keys)) == 75
    datasets = get_val_datasets(path, worker_config=CONFIG, batch_size=7)
    assert [len(factory) for _, factory in datasets] == [20, 5, 50]
    assert [len(list(get_loader(dataset))) for dataset, _ in datasets] == [3, 1, 8]


def test_subsets_compose_and_leave_no_gap(sets) -> None:
    def keys(subset: str, outer: str = "{range: [0%, 100%]}") -> set[str]:
        path = metadataset(
            sets,
            f"splits: {{val: {{split_part: train, subset: {outer}, "
            f"concat: [{{path: b, subset: {subset}}}]}}}}",
        )
        loader = get_loader(get_val_dataset(path, worker_config=CONFIG, batch_size=None))
        return {sample.__key__ for sample in loader}

    parts = [keys("{range: [0%, 33%]}"), keys("{range: [33%, 100%]}")]
    assert [len(part) for part in parts] == [6, 14]
    assert not parts[0] & parts[1]
    assert len(keys("{range: [3, end]}")) == 17
    assert sorted(keys("{range: [25%, 75%]}", "{range: [0%, 50%]}")) == [
        f"{i:05d}" for i in range(5, 10)
    ]
    with pytest.raises(ValueError, match="ends after the last of 20 samples"):
        keys("{range: [3, 21]}")
