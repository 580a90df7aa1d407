"""Builds datasets of batches from a path: sources, blends, then the hooks of a task encoder."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from energon_lite.core.arguments import at_least
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.topology import WorkerConfig
from energon_lite.metadataset.build import build_training, build_validation
from energon_lite.metadataset.nodes import Node, leaves
from energon_lite.metadataset.open import LeafOpener, open_node
from energon_lite.names.energon_modules import import_name
from energon_lite.sources.source_factory import BaseCoreDatasetFactory
from energon_lite.stages.epochs import limited, virtual_epochs
from energon_lite.task_encoder.base import AnyTaskEncoder, checked_encoder
from energon_lite.task_encoder.hooks import Batching, Hooks

# Builds pipelines with the `build_train_datasets` and `build_val_datasets` of a user.
_OWN_BUILDERS = "energon_lite.extras.energon.list_builders"

AnyPath = str | PathLike[str] | Mapping[str, Any]


def get_train_dataset(
    path: AnyPath,
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
    repeat: bool | int = True,
    **kwargs: Any,
) -> SavableDataset[Any]:
    """Builds the training dataset of a prepared folder or a metadataset.

    Args:
        path: the folder, the YAML file of a metadataset, or the content of such a file as a dict.
        split_part: the split part of the folder, or the split of the metadataset.
        worker_config: this process's place in the run; by default 4 workers.
        batch_size: number of samples of a batch, or of packs with packing; None for single items.
        batch_drop_last: whether an incomplete last batch is dropped (without `repeat`).
        packing_buffer_size: number of samples to select packs from; takes precedence over the
            encoder's `packing`.
        shuffle_buffer_size: number of samples among which a stream shuffles; None, 0 and 1 for no
            shuffling. It costs no memory.
        max_samples_per_sequence: maximum number of samples that stay together in file order; by
            default the mean size of a shard.
        virtual_epoch_length: number of items of each rank in a pass; 0 for no end.
        shuffle_over_epochs_multiplier: 1 permutes each epoch, n > 1 n copies as one; -1 draws
            slices with replacement; None keeps the file order.
        task_encoder: by default `DefaultTaskEncoder()`.
        repeat: True for endless training. False for passes of one epoch; a number for passes of
            several. A `blend` that ends by its `until` has passes in any case.
        kwargs: `subflavors`, `parallel_shard_iters`, `trust` (run code that a dataset names),
            `sample_type` (a class that the class of all samples must be, or come from),
            `field_map`, `sample_loader` and `part_filter` where `dataset.yaml` has none; for a
            folder also `dataset_config`, `split_config`, `name`, `loss_weight`, `subset` (first
            sample and the one after the last).

    Raises:
        ValueError: An argument or a file of the dataset is invalid.
        FileNotFoundError: The folder does not exist, or is not prepared.
    """
    batching = _batching(batch_size, batch_drop_last, packing_buffer_size)
    hooks, opener = _open(
        path, split_part, task_encoder, worker_config, kwargs, True, batching,
        shuffle_over_epochs_multiplier, max_samples_per_sequence=max_samples_per_sequence,
        shuffle_buffer_size=shuffle_buffer_size, virtual_epoch_length=virtual_epoch_length,
    )  # fmt: skip
    if hooks.encoder.overrides("build_train_datasets"):
        own: SavableDataset[Any] = import_name(_OWN_BUILDERS, "own_training")(
            hooks, opener, repeat, **batching._asdict(), shuffle_buffer_size=shuffle_buffer_size,
            virtual_epoch_length=virtual_epoch_length,
        )  # fmt: skip
        return own
    dataset = hooks.build(build_training(opener, repeat), batching)
    return virtual_epochs(dataset, virtual_epoch_length)


def get_val_dataset(
    path: AnyPath,
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
    """Builds the validation dataset of a prepared folder: each sample once, in file order.

    The datasets of a metadataset follow each other in the order of the file; weights are ignored.

    Args:
        path: as in `get_train_dataset`.
        split_part: as in `get_train_dataset`.
        worker_config: as in `get_train_dataset`.
        batch_size: number of samples of a batch; None for single samples.
        batch_drop_last: whether an incomplete last batch is dropped.
        packing_buffer_size: as in `get_train_dataset`.
        limit: maximum number of items of each rank in a pass; 0 or None for all.
        task_encoder: the hooks; by default `DefaultTaskEncoder()`.
        kwargs: as in `get_train_dataset`.

    Raises:
        ValueError: An argument or a file of the dataset is invalid.
        FileNotFoundError: The folder does not exist, or is not prepared.
    """
    batching = _batching(batch_size, batch_drop_last, packing_buffer_size)
    hooks, opener = _open(
        path, split_part, task_encoder, worker_config, kwargs, False, batching, limit=limit
    )
    return _validation(hooks, opener, opener.node, batching, limit)


def get_val_datasets(
    path: AnyPath,
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
    """Builds one validation dataset for each leaf; see `get_val_dataset`."""
    batching = _batching(batch_size, batch_drop_last, packing_buffer_size)
    hooks, opener = _open(
        path, split_part, task_encoder, worker_config, kwargs, False, batching, limit=limit
    )
    return [
        (_validation(hooks, opener, leaf, batching, limit), opener.factories[-1])
        for leaf in leaves(opener.node)
    ]


def _validation(
    hooks: Hooks, opener: LeafOpener, node: Node, batching: Batching, limit: int | None
) -> SavableDataset[Any]:
    """Builds the validation dataset of the leaves below a node."""
    if hooks.encoder.overrides("build_val_datasets"):
        own: SavableDataset[Any] = import_name(_OWN_BUILDERS, "own_validation")(
            hooks, node, opener, limit=limit, **batching._asdict()
        )
        return own
    return limited(hooks.build(build_validation(node, opener), batching), limit)


def _open(
    path: AnyPath,
    split_part: str,
    task_encoder: AnyTaskEncoder | None,
    worker_config: Any,
    kwargs: dict[str, Any],
    training: bool,
    batching: Batching,
    multiplier: int | None = 1,
    **sizes: int | None,
) -> tuple[Hooks, LeafOpener]:
    """Checks the arguments and reads the path; returns the hooks and the opener of the leaves."""
    if not (worker_config is None or isinstance(worker_config, WorkerConfig)):
        raise TypeError(
            f"worker_config={worker_config!r:.80} is no WorkerConfig; pass WorkerConfig(rank=..., "
            "world_size=..., num_workers=...) or WorkerConfig.default_worker_config(num_workers), "
            "called"
        )
    hooks = Hooks(checked_encoder(task_encoder), worker_config)
    sizes = _sizes(**sizes)
    return hooks, LeafOpener(
        node=open_node(path, split_part, kwargs),
        cook=hooks.cooked,
        decoder=hooks.decoder(kwargs),
        shuffle_buffer_size=sizes.get("shuffle_buffer_size"),
        block=batching.batch_size,
        settings={"max_samples_per_sequence": sizes.get("max_samples_per_sequence"), **kwargs},
        training=training,
        worker_config=worker_config,
        multiplier=multiplier,
        check_index=hooks.check_index,
    )


# The smallest value of each size, and what others mean.
_LEAST = {
    "batch_size": (1, ", or None for no batches"),
    "packing_buffer_size": (1, ", or None for no packing by a function"),
    "shuffle_buffer_size": (0, "; 0, 1 and None are for no shuffling"),
    "max_samples_per_sequence": (1, ", or None for the mean size of a shard"),
    "virtual_epoch_length": (0, "; 0 is for no end"),
    "limit": (0, "; 0 and None are for no limit"),
}


def _sizes(**sizes: int | None) -> dict[str, int | None]:
    """Returns sizes as integers, after checking them.

    Args:
        sizes: by the names of the arguments; None stands for the default.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below its minimum.
    """
    return {
        name: None if size is None else at_least(name, size, *_LEAST[name])
        for name, size in sizes.items()
    }


def _batching(batch_size: Any, batch_drop_last: Any, packing_buffer_size: Any) -> Batching:
    sizes = _sizes(batch_size=batch_size, packing_buffer_size=packing_buffer_size)
    if batch_drop_last not in (True, False):
        raise TypeError(f"batch_drop_last={batch_drop_last!r:.80} must be True or False")
    return Batching(**sizes, batch_drop_last=bool(batch_drop_last))
