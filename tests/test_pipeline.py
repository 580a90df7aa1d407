"""The entry points: names, arguments and defaults as in Energon."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    BatchDataset,
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
from energon_lite.sources.source import WebdatasetSource

from .helpers import caption_set, text_set

CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("pipeline") / "texts", 20)


@pytest.fixture(scope="session")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return caption_set(tmp_path_factory.mktemp("pipeline") / "captions", 8)


def test_whole_road_from_a_folder_to_batches(captions) -> None:
    dataset = get_train_dataset(
        captions, worker_config=CONFIG, batch_size=4, shuffle_buffer_size=10
    )
    batch = next(iter(get_loader(dataset)))
    assert batch.image.shape == (4, 3, 16, 24)
    assert batch.image.dtype == torch.float32
    assert len(batch.caption) == len(batch.__key__) == 4


def test_default_encoder_puts_no_stage_over_samples(texts) -> None:
    single = get_train_dataset(texts, worker_config=CONFIG, batch_size=None)
    assert isinstance(single, WebdatasetSource)
    batched = get_train_dataset(texts, worker_config=CONFIG, batch_size=2)
    assert isinstance(batched, BatchDataset)


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
        texts,
        split_part="train",
        worker_config=CONFIG,
        batch_size=2,
        batch_drop_last=True,
        packing_buffer_size=None,
        shuffle_buffer_size=100,
        max_samples_per_sequence=10,
        virtual_epoch_length=3,
        shuffle_over_epochs_multiplier=1,
        task_encoder=DefaultTaskEncoder(),
        repeat=True,
        parallel_shard_iters=2,
        subflavors={"a": 1},
    )
    assert isinstance(dataset, EpochizeDataset)
    loader = get_savable_loader(
        dataset,
        worker_config=CONFIG,
        checkpoint_every_sec=1,
        checkpoint_every_min_n_samples=1,
        n_checkpoints=1,
        gc_collect_every_n_steps=1,
        prefetch_factor=1,
        cache_pool=None,
        watchdog_timeout_seconds=10,
        watchdog_initial_timeout_seconds=10,
        fail_on_timeout=False,
    )
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": 2, "virtual_epoch_length": -1}, "virtual_epoch_length=-1"),
        ({"batch_size": 2, "shuffle_buffer_size": -1}, "shuffle_buffer_size=-1"),
        ({"batch_size": 2, "packing_buffer_size": 5}, "packing_buffer_size"),
        ({"batch_size": 2, "shuffle_over_epochs_multiplier": 0}, "multiplier=0"),
        ({"batch_size": 2, "max_samples_per_sequence": 0}, "max_samples_per_sequence=0"),
    ],
)
def test_senseless_arguments_are_refused_by_name(texts, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        get_train_dataset(texts, worker_config=CONFIG, **settings)


def test_unknown_argument_is_named_with_those_there_are(texts) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'sufle'; .*subflavors"):
        get_train_dataset(texts, worker_config=CONFIG, batch_size=2, sufle=1)


def test_wrong_arguments_of_loaders_are_refused_by_name(texts) -> None:
    dataset = get_train_dataset(texts, worker_config=CONFIG, batch_size=2)
    with pytest.raises(ValueError, match="prefetch_factor=0"):
        get_loader(dataset, prefetch_factor=0)
    with pytest.raises(ValueError, match="cache_pool"):
        get_loader(dataset, cache_pool=object())  # type: ignore[arg-type]


def test_unshuffled_training_gives_the_file_order_in_slots(texts) -> None:
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


def test_encoder_may_change_types(texts) -> None:
    encoder = DefaultTaskEncoder(encoded_sample_type=dict, batch_type=dict)
    dataset = get_train_dataset(texts, worker_config=CONFIG, batch_size=2, task_encoder=encoder)
    batch = next(iter(dataset))
    assert type(batch) is dict
    assert len(batch["text"]) == 2
    single = get_train_dataset(
        texts,
        worker_config=CONFIG,
        batch_size=None,
        task_encoder=DefaultTaskEncoder(encoded_sample_type=TextSample),
    )
    assert isinstance(next(iter(single)), TextSample)
