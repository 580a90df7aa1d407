"""Energon's builders of a pipeline, as methods that a task encoder may override and call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

from energon_lite.core.dataset import AnyDataset, SavableDataset
from energon_lite.core.file_store import FileStore
from energon_lite.core.topology import WorkerConfig
from energon_lite.metadataset.loaded import (
    DatasetBlendMode,
    LoadedDataset,
    check_is_list,
    loaded_datasets,
)
from energon_lite.metadataset.nodes import Node
from energon_lite.metadataset.open import LeafOpener
from energon_lite.stages.blend import BlendDataset
from energon_lite.stages.concat import ConcatDataset, RepeatDataset, total_items
from energon_lite.stages.epochs import limited, virtual_epochs
from energon_lite.task_encoder.hooks import Batching, Hooks

if TYPE_CHECKING:
    from energon_lite.task_encoder.base import AnyTaskEncoder


class PipelineBuilders:
    """The steps that build a pipeline. An override changes only its step.

    `build_train_datasets` and `build_val_datasets` are called only if they are overridden, as they
    get a list of datasets, which cannot express every metadataset. The other builders are always
    called.
    """

    def build_train_datasets(
        self,
        *,
        datasets: Sequence[LoadedDataset],
        worker_config: WorkerConfig | None,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        virtual_epoch_length: int = 0,
        shuffle_buffer_size: int | None = None,
        blend_mode: DatasetBlendMode = DatasetBlendMode.NONE,
        repeat: bool = True,
    ) -> AnyDataset:
        """Builds the training dataset from opened datasets: blended, encoded, batched.

        Args:
            datasets: the datasets, each with its weight or repetitions.
            worker_config: this process's place in the run.
            batch_size: as in `get_train_dataset`.
            batch_drop_last: as in `get_train_dataset`.
            packing_buffer_size: as in `get_train_dataset`.
            virtual_epoch_length: as in `get_train_dataset`.
            shuffle_buffer_size: as in `get_train_dataset`.
            blend_mode: the meaning of the numbers of the datasets.
            repeat: whether epoch follows epoch.

        Raises:
            ValueError: `repeat=False`, and the datasets are blended by weights.
        """
        hooks = self._hooks(worker_config)
        is_epoch = blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS
        is_concat = blend_mode is DatasetBlendMode.NONE and len(datasets) > 1
        if blend_mode is DatasetBlendMode.DATASET_WEIGHT and not repeat:
            raise ValueError("repeat=False: a blend by weights is endless; use epochs of it")
        made = []
        for loaded in datasets:
            settings: dict[str, Any] = {
                "shuffle_buffer_size": shuffle_buffer_size or 0,
                "repeat": repeat and not is_epoch and not is_concat,
                "block": batch_size or 1,
            }
            if is_epoch and loaded.repetitions not in (None, 1):
                # Through the text: 0.1 is a tenth, not the nearest binary number.
                settings["repetitions"] = Fraction(str(loaded.repetitions))
            source = loaded.dataset.build(**settings)
            made.append(hooks.cooked(source, loaded.dataset, loaded.aux))
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
        dataset = hooks.build(dataset, Batching(batch_size, batch_drop_last, packing_buffer_size))
        return virtual_epochs(dataset, virtual_epoch_length)

    def build_val_datasets(
        self,
        *,
        datasets: Sequence[LoadedDataset],
        worker_config: WorkerConfig | None,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        limit: int | None = None,
    ) -> AnyDataset:
        """Builds the validation dataset from opened datasets: one after the other, each once.

        Args:
            datasets: the datasets; their weights and repetitions are ignored.
            worker_config: this process's place in the run.
            batch_size: as in `get_val_dataset`.
            batch_drop_last: as in `get_val_dataset`.
            packing_buffer_size: as in `get_val_dataset`.
            limit: as in `get_val_dataset`.
        """
        hooks = self._hooks(worker_config)
        made = [
            hooks.cooked(loaded.dataset.build(block=batch_size or 1), loaded.dataset, loaded.aux)
            for loaded in datasets
        ]
        dataset = made[0] if len(made) == 1 else ConcatDataset(*made)
        batching = Batching(batch_size, batch_drop_last, packing_buffer_size)
        return limited(hooks.build(dataset, batching), limit)

    def build_cook_crude_sample(
        self,
        dataset: AnyDataset,
        *,
        worker_config: WorkerConfig | None,
        subflavors: Mapping[str, Any],
        get_primary_aux: Callable[[], FileStore[Any]],
        aux: Mapping[str, FileStore[Any]] | None = None,
    ) -> AnyDataset:
        """Puts the first cooker that matches over crude samples.

        Args:
            dataset: the crude samples of one source.
            worker_config: seed and error handlers.
            subflavors: the subflavors of the source.
            get_primary_aux: returns the file store of the source, for a cooker that needs it.
            aux: the other file stores that the cooker gets, by name.

        Raises:
            ValueError: No cooker matches.
        """
        hooks = self._hooks(worker_config)
        return hooks.cook(dataset, subflavors, get_primary_aux, aux or {})

    def build_encode_sample(
        self, dataset: AnyDataset, *, worker_config: WorkerConfig | None
    ) -> AnyDataset:
        """Puts `encode_sample` or `preencode_sample` over cooked samples.

        Args:
            dataset: the samples.
            worker_config: seed and error handlers.
        """
        return self._hooks(worker_config).encoded(dataset)

    def build_batch(
        self,
        dataset: AnyDataset,
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig | None,
    ) -> AnyDataset:
        """Puts packing, batching and the hooks from `postencode_sample` on over encoded samples.

        Args:
            dataset: the samples.
            batch_size: as in `get_train_dataset`.
            batch_drop_last: as in `get_train_dataset`.
            packing_buffer_size: as in `get_train_dataset`.
            worker_config: seed and error handlers.
        """
        batching = Batching(batch_size, batch_drop_last, packing_buffer_size)
        return self._hooks(worker_config).batched(dataset, batching)

    def _hooks(self, worker_config: WorkerConfig | None) -> Hooks:
        return Hooks(cast("AnyTaskEncoder", self), worker_config)


def _is_older(builder: Callable[..., Any]) -> bool:
    """Returns whether a `build_train_datasets` was written before Energon had blend modes.

    Such a builder gets pairs (dataset, weight), as Energon's page on custom blending still shows.
    """
    parameters = inspect.signature(builder).parameters
    has_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return not has_any and "blend_mode" not in parameters


def own_training(hooks: Hooks, opener: LeafOpener, repeat: bool, **settings: Any) -> AnyDataset:
    """Builds the training dataset with the `build_train_datasets` of the user.

    Args:
        hooks: the hooks of the task encoder.
        opener: the tree, and what opens its leaves.
        repeat: whether epoch follows epoch.
        settings: the other arguments of `build_train_datasets`.

    Raises:
        ValueError: A list of datasets cannot express the metadataset.
        TypeError: The builder returned no dataset.
    """
    build = hooks.encoder.build_train_datasets
    check_is_list(opener.node, build.__qualname__)
    loaded = loaded_datasets(opener.node, opener)
    if not _is_older(build):
        settings = {**settings, "blend_mode": loaded.blend_mode, "repeat": repeat}
        return _finished(hooks, build, loaded.datasets, settings)
    if not repeat:
        raise TypeError(f"repeat=False, but {build.__qualname__} has no parameter `repeat`")
    size = settings["shuffle_buffer_size"] or 0
    pairs = []
    for one in loaded.datasets:
        source = one.dataset.build(shuffle_buffer_size=size, repeat=True)
        pairs.append((hooks.cooked(source, one.dataset, one.aux), one.weight or 1.0))
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
