"""Energon's builders of a pipeline, as methods that a task encoder may override and call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from energon_lite.core.dataset import AnyDataset
from energon_lite.core.file_store import FileStore
from energon_lite.core.topology import WorkerConfig
from energon_lite.metadataset.loaded import DatasetBlendMode, LoadedDataset
from energon_lite.names.energon_modules import LazyFunction
from energon_lite.task_encoder.hooks import Batching, Hooks

if TYPE_CHECKING:
    from energon_lite.task_encoder.base import AnyTaskEncoder


class PipelineBuilders:
    """The steps that build a pipeline. An override changes only its step.

    `build_train_datasets` and `build_val_datasets` are called only if they are overridden, as they
    get a list of datasets, which cannot express every metadataset. The other builders are always
    called.
    """

    _blended = LazyFunction("energon_lite.extras.energon.list_builders:blended")
    _concatenated = LazyFunction("energon_lite.extras.energon.list_builders:concatenated")

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
        batching = Batching(batch_size, batch_drop_last, packing_buffer_size)
        dataset: AnyDataset = self._blended(
            self._hooks(worker_config), datasets, batching, blend_mode, repeat,
            shuffle_buffer_size=shuffle_buffer_size, virtual_epoch_length=virtual_epoch_length,
        )  # fmt: skip
        return dataset

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
        batching = Batching(batch_size, batch_drop_last, packing_buffer_size)
        hooks = self._hooks(worker_config)
        dataset: AnyDataset = self._concatenated(hooks, datasets, batching, limit)
        return dataset

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
