"""From a path to a dataset of batches: sources, then the task encoder's hooks in their order."""

from __future__ import annotations

import warnings
from os import PathLike
from typing import Any, NamedTuple

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.topology import WorkerConfig
from energon_lite.core.user_function import UserFunction
from energon_lite.sources.dataset_config import load_factory
from energon_lite.sources.webdataset import (
    BaseCoreDatasetFactory,
    BaseWebdatasetFactory,
    CrudeWebdataset,
)
from energon_lite.stages.batching import BatchDataset, GroupBatchDataset
from energon_lite.stages.flow import EpochizeDataset, limited
from energon_lite.stages.mapping import MapDataset
from energon_lite.storage.decoding import SampleDecoder
from energon_lite.task_encoder.base import CookFunction, DefaultTaskEncoder, TaskEncoder
from energon_lite.task_encoder.cooking import find_cooker

AnyTaskEncoder = TaskEncoder[Any, Any, Any, Any]


def get_train_dataset(
    path: str | PathLike[str],
    *,
    split_part: str = "train",
    worker_config: WorkerConfig | None = None,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    shuffle_buffer_size: int | None = None,
    max_samples_per_sequence: int | None = None,
    virtual_epoch_length: int = 0,
    shuffle_over_epochs_multiplier: int | None = 1,
    task_encoder: AnyTaskEncoder | None = None,
    repeat: bool = True,
    **kwargs: Any,
) -> SavableDataset[Any]:
    """Makes the training dataset of a prepared folder.

    Args:
        path: the folder.
        split_part: which part of it.
        worker_config: this process's place in the run; by default 4 workers.
        batch_size: samples of a batch; None for single samples.
        batch_drop_last: whether a last batch that is not full is left out (without `repeat`).
        packing_buffer_size: not in this version.
        shuffle_buffer_size: samples among which a stream shuffles; None, 0 and 1 for none. It
            costs no memory.
        max_samples_per_sequence: how many samples stay together in file order, at most; by default
            the mean size of a shard.
        virtual_epoch_length: items of each rank after which a pass ends; 0 for no end.
        shuffle_over_epochs_multiplier: 1 permutes each epoch, n > 1 n copies as one; -1 draws
            slices with replacement; None keeps the file order.
        task_encoder: by default `DefaultTaskEncoder()`.
        repeat: whether epoch follows epoch for ever; else a pass is one epoch.
        kwargs: `dataset_config`, `split_config`, `subflavors`, `parallel_shard_iters`, `name`,
            `trust` (run code that the dataset names).

    Raises:
        ValueError: An argument, or a file of the dataset, is wrong.
        FileNotFoundError: The folder is missing, or not prepared.
    """
    if virtual_epoch_length < 0:
        raise ValueError(f"virtual_epoch_length={virtual_epoch_length} is negative; 0 for no end")
    encoder = task_encoder or DefaultTaskEncoder()
    factory = _factory(
        path,
        encoder,
        kwargs,
        training=True,
        split_part=split_part,
        worker_config=worker_config,
        max_samples_per_sequence=max_samples_per_sequence,
        shuffle_over_epochs=shuffle_over_epochs_multiplier,
    )
    source = factory.build(
        shuffle_buffer_size=shuffle_buffer_size or 0, repeat=repeat, block=batch_size or 1
    )
    batching = _Batching(batch_size, batch_drop_last, packing_buffer_size)
    dataset = _encoded(source, factory, encoder, batching, worker_config)
    return EpochizeDataset(dataset, virtual_epoch_length) if virtual_epoch_length else dataset


def get_val_dataset(
    path: str | PathLike[str],
    *,
    split_part: str = "val",
    worker_config: WorkerConfig | None = None,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    limit: int | None = None,
    task_encoder: AnyTaskEncoder | None = None,
    **kwargs: Any,
) -> SavableDataset[Any]:
    """Makes the validation dataset of a prepared folder: each sample once, in file order.

    Args:
        path: the folder.
        split_part: which part of it.
        worker_config: as in `get_train_dataset`.
        batch_size: samples of a batch; None for single samples.
        batch_drop_last: whether the last batch is left out if it is not full.
        packing_buffer_size: not in this version.
        limit: items of each rank in a pass, at most; 0 or None for all.
        task_encoder: the hooks; by default `DefaultTaskEncoder()`.
        kwargs: as in `get_train_dataset`.

    Raises:
        ValueError: An argument, or a file of the dataset, is wrong.
        FileNotFoundError: The folder is missing, or not prepared.
    """
    datasets = get_val_datasets(
        path,
        split_part=split_part,
        worker_config=worker_config,
        batch_size=batch_size,
        batch_drop_last=batch_drop_last,
        packing_buffer_size=packing_buffer_size,
        limit=limit,
        task_encoder=task_encoder,
        **kwargs,
    )
    return datasets[0][0]


def get_val_datasets(
    path: str | PathLike[str],
    *,
    split_part: str = "val",
    worker_config: WorkerConfig | None = None,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    limit: int | None = None,
    task_encoder: AnyTaskEncoder | None = None,
    **kwargs: Any,
) -> list[tuple[SavableDataset[Any], BaseCoreDatasetFactory[Any]]]:
    """Makes one validation dataset for each leaf; see `get_val_dataset`."""
    encoder = task_encoder or DefaultTaskEncoder()
    factory = _factory(
        path,
        encoder,
        kwargs,
        training=False,
        split_part=split_part,
        worker_config=worker_config,
    )
    source = factory.build(block=batch_size or 1)
    batching = _Batching(batch_size, batch_drop_last, packing_buffer_size)
    dataset = _encoded(source, factory, encoder, batching, worker_config)
    return [(limited(dataset, limit), factory)]


def _factory(
    path: str | PathLike[str], encoder: AnyTaskEncoder, kwargs: dict[str, Any], **settings: Any
) -> BaseWebdatasetFactory[Any]:
    decoder = _decoder(encoder, kwargs)
    allowed = {
        "dataset_config", "split_config", "subflavors", "parallel_shard_iters", "trust", "name",
    }  # fmt: skip
    unknown = set(kwargs) - allowed
    if unknown:
        raise TypeError(
            f"unexpected keyword argument {sorted(unknown)[0]!r}; "
            f"besides the named ones there are {', '.join(sorted(allowed))}"
        )
    return load_factory(path, decoder=decoder, **settings, **kwargs)


def _decoder(encoder: AnyTaskEncoder, kwargs: dict[str, Any]) -> SampleDecoder | None:
    """Gives the encoder's decoder, or the one that Energon's old keywords describe."""
    auto_decode = kwargs.pop("auto_decode", True)
    old = {
        name: kwargs.pop(name)
        for name in ("image_decode", "av_decode", "video_decode_audio")
        if name in kwargs
    }
    if kwargs.pop("handler", None) is not None:
        warnings.warn(
            "handler is ignored; set WorkerConfig.global_error_handler", FutureWarning, 4
        )
    if old:
        warnings.warn(
            f"{', '.join(old)}: set `decoder = SampleDecoder(...)` on the task encoder instead",
            FutureWarning,
            stacklevel=4,
        )
        return SampleDecoder(**old)
    return encoder.decoder if auto_decode else None


class _Batching(NamedTuple):
    """How samples become batches, as the user asked for it."""

    batch_size: int | None
    drop_last: bool
    packing_buffer_size: int | None


def _encoded(
    dataset: SavableDataset[Any],
    factory: BaseWebdatasetFactory[Any],
    encoder: AnyTaskEncoder,
    batching: _Batching,
    config: WorkerConfig | None,
) -> SavableDataset[Any]:
    """Puts the hooks that do something over a source, each as a stage."""
    batch_size, drop_last, packing_buffer_size = batching
    if packing_buffer_size is not None:
        raise ValueError("packing_buffer_size: this version does not pack; leave it at None")

    def hook(name: str, function: Any = None) -> UserFunction:
        return UserFunction(
            function or getattr(encoder, name),
            name=name,
            seed=config.seed_offset if config else 0,
            config=config,
            failure_tolerance=encoder.__default_failure_tolerance__,
        )

    if isinstance(factory, CrudeWebdataset):
        cook = hook("cook", _cook_function(factory, encoder))
        dataset = MapDataset(dataset, cook)
    for name in _encoding_hooks(encoder):
        dataset = MapDataset(dataset, hook(name))
    if encoder.overrides("batch_group_criterion"):
        criterion = hook("batch_group_criterion")
        dataset = GroupBatchDataset(
            dataset, batch_size, criterion, hook("batch"), drop_last=drop_last
        )
    elif batch_size is not None:
        dataset = BatchDataset(dataset, batch_size, hook("batch"), drop_last=drop_last)
    else:
        return dataset
    if encoder.overrides("encode_batch"):
        dataset = MapDataset(dataset, hook("encode_batch"))
    return dataset


def _cook_function(factory: CrudeWebdataset, encoder: AnyTaskEncoder) -> CookFunction:
    cooker = find_cooker(encoder.cookers, factory.subflavors, str(factory.path))
    if cooker.need_cache or cooker.need_primary:
        raise ValueError(
            f"{factory.path}: cooker {cooker.cook.__name__} asks for a cache or the primary file "
            "store, which this version does not have"
        )
    return CookFunction(encoder, cooker)


def _encoding_hooks(encoder: AnyTaskEncoder) -> list[str]:
    """Lists the per-sample hooks that do something, in their order."""
    hooks = [name for name in ("preencode_sample", "encode_sample") if encoder.overrides(name)]
    if len(hooks) == 2:
        if type(encoder).encode_sample is not DefaultTaskEncoder.encode_sample:
            raise ValueError(
                f"{type(encoder).__name__} has both encode_sample and preencode_sample; write the "
                "first part of encode_sample as preencode_sample and the rest as postencode_sample"
            )
        hooks.remove("encode_sample")
    return hooks + ["postencode_sample"] * encoder.overrides("postencode_sample")
