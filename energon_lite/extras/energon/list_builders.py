"""Pipelines that are built from a list of opened datasets, as Energon's builders get them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from energon_lite.core.dataset import AnyDataset, SavableDataset
from energon_lite.core.topology import WorkerConfig
from energon_lite.extras.energon.loaded_leaves import check_is_list, loaded_datasets
from energon_lite.metadataset.loaded import DatasetBlendMode, LoadedDataset
from energon_lite.metadataset.nodes import Node
from energon_lite.metadataset.open import LeafOpener
from energon_lite.stages.blend import BlendDataset
from energon_lite.stages.concat import ConcatDataset, RepeatDataset, total_items
from energon_lite.stages.epochs import limited, virtual_epochs
from energon_lite.task_encoder.hooks import Batching, Hooks


def blended(
    hooks: Hooks,
    datasets: Sequence[LoadedDataset],
    batching: Batching,
    blend_mode: DatasetBlendMode,
    repeat: bool,
    *,
    shuffle_buffer_size: int | None,
    virtual_epoch_length: int,
) -> AnyDataset:
    """Builds the training dataset; see `TaskEncoder.build_train_datasets`."""
    is_epoch = blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS
    is_concat = blend_mode is DatasetBlendMode.NONE and len(datasets) > 1
    if blend_mode is DatasetBlendMode.DATASET_WEIGHT and not repeat:
        raise ValueError("repeat=False: a blend by weights is endless; use epochs of it")
    made = []
    for loaded in datasets:
        settings: dict[str, Any] = {
            "shuffle_buffer_size": shuffle_buffer_size or 0,
            "repeat": repeat and not is_epoch and not is_concat,
            "block": batching.batch_size or 1,
        }
        if is_epoch and loaded.repetitions not in (None, 1):
            # Through the text: 0.1 is a tenth, not the nearest binary number.
            settings["repetitions"] = Fraction(str(loaded.repetitions))
        made.append(_cooked(hooks, loaded, settings))
    if is_epoch:
        # Weighted by their sizes, all members end at the same time.
        dataset: AnyDataset = BlendDataset(*((d, float(total_items(d))) for d in made))
    elif blend_mode is DatasetBlendMode.DATASET_WEIGHT:
        weights = [1.0 if d.weight is None else float(d.weight) for d in datasets]
        dataset = BlendDataset(*zip(made, weights, strict=True), until="forever")
    else:
        dataset = ConcatDataset(*made) if is_concat else made[0]
    if repeat and not dataset.endless:
        dataset = RepeatDataset(dataset)
    return virtual_epochs(hooks.build(dataset, batching), virtual_epoch_length)


def concatenated(
    hooks: Hooks, datasets: Sequence[LoadedDataset], batching: Batching, limit: int | None
) -> AnyDataset:
    """Builds the validation dataset; see `TaskEncoder.build_val_datasets`."""
    made = [_cooked(hooks, loaded, {"block": batching.batch_size or 1}) for loaded in datasets]
    dataset = made[0] if len(made) == 1 else ConcatDataset(*made)
    return limited(hooks.build(dataset, batching), limit)


def _cooked(hooks: Hooks, loaded: LoadedDataset, settings: dict[str, Any]) -> AnyDataset:
    return hooks.cooked(loaded.dataset.build(**settings), loaded.dataset, loaded.aux)


def _is_older(builder: Callable[..., Any]) -> bool:
    """Returns whether a `build_train_datasets` was written before Energon had blend modes.

    Such a builder gets pairs (dataset, weight), as Energon's page on custom blending still shows.
    """
    parameters = inspect.signature(builder).parameters
    has_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return not has_any and "blend_mode" not in parameters


def own_training(
    hooks: Hooks, opener: LeafOpener, repeat: bool | int, **settings: Any
) -> AnyDataset:
    """Builds the training dataset with the `build_train_datasets` of the user.

    Args:
        hooks: the hooks of the task encoder.
        opener: the tree, and what opens its leaves.
        repeat: whether epoch follows epoch.
        settings: the other arguments of `build_train_datasets`.

    Raises:
        ValueError: A list of datasets cannot express the metadataset.
        TypeError: The builder returned no dataset, or `repeat` is a number of epochs.
    """
    build = hooks.encoder.build_train_datasets
    if not isinstance(repeat, bool):
        raise TypeError(f"repeat={repeat} must be True or False with {build.__qualname__}")
    check_is_list(opener.node, build.__qualname__)
    loaded = loaded_datasets(opener.node, opener)
    if not _is_older(build):
        settings = {**settings, "blend_mode": loaded.blend_mode, "repeat": repeat}
        return _finished(hooks, build, loaded.datasets, settings)
    if not repeat:
        raise TypeError(f"repeat=False, but {build.__qualname__} has no parameter `repeat`")
    own = {"shuffle_buffer_size": settings["shuffle_buffer_size"] or 0, "repeat": True}
    pairs = [(_cooked(hooks, one, own), one.weight or 1.0) for one in loaded.datasets]
    return _finished(hooks, build, pairs, settings)


def own_validation(hooks: Hooks, node: Node, opener: LeafOpener, **settings: Any) -> AnyDataset:
    """Builds the validation dataset with the `build_val_datasets` of the user; ignores weights."""
    build = hooks.encoder.build_val_datasets
    return _finished(hooks, build, loaded_datasets(node, opener).datasets, settings)


def _finished(hooks: Hooks, build: Any, datasets: Any, settings: dict[str, Any]) -> AnyDataset:
    config = hooks.config or WorkerConfig.default_worker_config()
    dataset = build(datasets=datasets, worker_config=config, **settings)
    if not isinstance(dataset, SavableDataset):
        raise TypeError(
            f"{build.__qualname__} returned {dataset!r:.80}; return the dataset that it builds"
        )
    return dataset if dataset.traits.weighted else hooks.weighed(dataset)
