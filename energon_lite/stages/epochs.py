"""The ends of passes: virtual epochs and limits.

Both end a pass in the *loader*, after a number of items of its rank. The streams stay as they are,
so that the order of the items does not depend on the number of ranks. A loader sees the end of a
whole pipeline only, therefore neither may stand below a blend, a concatenation or a batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from energon_lite.core.arguments import at_least
from energon_lite.core.dataset import SavableDataset, Traits
from energon_lite.core.stage import Stage
from energon_lite.core.topology import WorkerConfig
from energon_lite.names.energon_modules import import_name

T = TypeVar("T")

# Imported on first use.
_LOG_SAMPLES = "energon_lite.extras.energon.observers:LogSampleDataset"


class EpochizeDataset(Stage[T]):
    """Ends each pass after `length` items per rank; the next pass continues from there.

    State: none; the loader's state has the place in the virtual epoch.
    Length: `length`.
    Keys: as below.

    Args:
        dataset: the items.
        length: items of each rank in a pass. A run may resume with another length.
        worker_config: by default that of the dataset.

    Raises:
        ValueError: `length` is below 1, or the pass is ended below already.
    """

    def __init__(
        self, dataset: SavableDataset[T], length: int, worker_config: WorkerConfig | None = None
    ) -> None:
        super().__init__(dataset, worker_config)
        if dataset.pass_length is not None:
            raise ValueError("The pass is ended below already; give one virtual epoch or limit.")
        self.length = at_least("length", length)

    def own_traits(self, below: Traits) -> Traits:
        """Adds the length, and that the next pass continues."""
        return dataclasses.replace(below, training=True, pass_length=self.length, ordering=True)


class LimitDataset(EpochizeDataset[T]):
    """Ends each pass after at most `length` items per rank.

    State: none.
    Length: at most `length`.
    Keys: as below.

    Args:
        dataset: the items.
        length: items of each rank in a pass.
        reset_after_epoch: accepted for Energon's signature; a validation pass always starts again.
        worker_config: by default that of the dataset.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        length: int,
        *,
        reset_after_epoch: bool = False,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        super().__init__(dataset, length, worker_config=worker_config)

    def own_traits(self, below: Traits) -> Traits:
        """Adds the length."""
        return dataclasses.replace(below, pass_length=self.length, ordering=True)


def _logged(dataset: SavableDataset[Any], mode: str, level: int) -> SavableDataset[Any]:
    config = dataset.worker_config
    is_on = config is not None and config.should_log(level)
    return import_name(_LOG_SAMPLES)(dataset, mode) if is_on else dataset


def virtual_epochs(dataset: SavableDataset[Any], length: int) -> SavableDataset[Any]:
    """Wraps a training dataset in an `EpochizeDataset` for a positive length; 0 is no end.

    From `worker_log_level` 1 on its items are logged.
    """
    dataset = _logged(dataset, "train", 1)
    return EpochizeDataset(dataset, length) if length else dataset


def limited(dataset: SavableDataset[Any], limit: int | None) -> SavableDataset[Any]:
    """Wraps a validation dataset in a `LimitDataset` for a positive limit; 0 and None are none.

    From `worker_log_level` 2 on its items are logged.
    """
    dataset = _logged(dataset, "val", 2)
    return LimitDataset(dataset, limit) if limit else dataset
