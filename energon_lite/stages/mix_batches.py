"""Batches whose samples come from several datasets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.stacking import batch_list
from energon_lite.core.state import RestoreKey
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import UserFunction
from energon_lite.order.schedules import Weight
from energon_lite.stages.batching import BatchDataset
from energon_lite.stages.blend import BlendDataset
from energon_lite.stages.loss_weights import LossWeightCursor, LossWeightDataset
from energon_lite.stages.map import as_user_function

T = TypeVar("T")


class MixBatchDataset(BatchDataset[T]):
    """Batches whose samples come from several datasets, by weight.

    State, Length, Keys: those of a batch over a `BlendDataset`.

    Args:
        datasets: pairs (dataset, weight); datasets of batches should have batches of one, so that
            `batch_size` of them make a batch.
        batch_size: items of the datasets in a batch.
        batch_mix_fn: makes a batch of a list of such items; `homogeneous_concat_mix` for batches of
            one type. By default the list itself.
        until: as in `BlendDataset`.
        blend_mode: as in `BlendDataset`.
        worker_config: by default that of the datasets.
    """

    def __init__(
        self,
        *datasets: tuple[SavableDataset[Any], Weight],
        batch_size: int,
        batch_mix_fn: Callable[[list[Any]], T] | UserFunction | None = None,
        until: str | None = None,
        blend_mode: str = "exact",
        worker_config: WorkerConfig | None = None,
    ) -> None:
        blend = BlendDataset(
            *datasets, until=until, blend_mode=blend_mode, worker_config=worker_config
        )
        mix = batch_mix_fn or batch_list
        if not isinstance(mix, UserFunction):
            mix = as_user_function(mix, "batch_mix_fn", blend.worker_config, is_stateless=True)
        super().__init__(blend, batch_size, mix)

    def open(self, inner: Cursor[Any], stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor, of batches with the loss weights of all their samples."""
        return LossWeightCursor(LossWeightDataset(self), super().open(inner, stream))

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Re-creates the batch with its loss weights."""
        batch = super().restore_sample(restore_key)
        LossWeightDataset(self).weigh(batch, restore_key)
        return batch
