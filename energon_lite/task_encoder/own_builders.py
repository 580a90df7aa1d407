"""Pipelines that a task encoder puts together itself, by an own `build_train_datasets`."""

from __future__ import annotations

from typing import Any

from energon_lite.core.dataset import AnyDataset, SavableDataset
from energon_lite.core.topology import WorkerConfig
from energon_lite.metadataset.energon_api import LoadedDataset, check_is_list, loaded_datasets
from energon_lite.metadataset.nodes import Node
from energon_lite.metadataset.open import LeafOpener
from energon_lite.stages.loss_weights import LossWeightDataset
from energon_lite.task_encoder.hook_checks import is_older
from energon_lite.task_encoder.hooks import Hooks


def own_training(hooks: Hooks, opener: LeafOpener, repeat: bool, **settings: Any) -> AnyDataset:
    """Makes the training dataset by the user's `build_train_datasets`.

    Args:
        hooks: the hooks of the task encoder.
        opener: the tree, and what opens its leaves.
        repeat: whether epoch follows epoch.
        settings: the other arguments of `build_train_datasets`.

    Raises:
        ValueError: The metadataset says more than the list of datasets that it gets.
        TypeError: It returned no dataset.
    """
    build = hooks.encoder.build_train_datasets
    check_is_list(opener.node, build.__qualname__)
    loaded = loaded_datasets(opener.node, opener)
    if not is_older(build):
        settings = {**settings, "blend_mode": loaded.blend_mode, "repeat": repeat}
        return _finished(hooks, build, loaded.datasets, settings)
    if not repeat:
        raise TypeError(f"repeat=False, but {build.__qualname__} has no parameter `repeat`")
    size = settings["shuffle_buffer_size"] or 0
    pairs = []
    for one in loaded.datasets:
        source = one.dataset.build(shuffle_buffer_size=size, repeat=True)
        pairs.append((hooks.cooked(source, one.dataset), one.weight or 1.0))
    return _finished(hooks, build, pairs, settings)


def own_validation(hooks: Hooks, node: Node, opener: LeafOpener, **settings: Any) -> AnyDataset:
    """Makes the validation dataset by the user's `build_val_datasets`; weights do not count."""
    loaded: list[LoadedDataset] = loaded_datasets(node, opener).datasets
    return _finished(hooks, hooks.encoder.build_val_datasets, loaded, settings)


def _finished(hooks: Hooks, build: Any, datasets: Any, settings: dict[str, Any]) -> AnyDataset:
    config = hooks.config or WorkerConfig.default_worker_config()
    dataset = build(datasets=datasets, worker_config=config, **settings)
    if not isinstance(dataset, SavableDataset):
        raise TypeError(
            f"{build.__qualname__} returned {dataset!r:.80}; return the dataset that it builds"
        )
    return dataset if _is_weighed(dataset) else LossWeightDataset(dataset)


def _is_weighed(dataset: AnyDataset) -> bool:
    below = dataset.children
    return isinstance(dataset, LossWeightDataset) or (len(below) == 1 and _is_weighed(below[0]))
