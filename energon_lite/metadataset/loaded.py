"""The opened leaves of a split as a list, which Energon's builders of a pipeline take."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from energon_lite.sources.source_factory import BaseCoreDatasetFactory


class DatasetBlendMode(enum.Enum):
    """The meaning of the numbers in a list of datasets."""

    NONE = "none"
    DATASET_WEIGHT = "dataset_weight"
    SAMPLE_REPETITIONS = "sample_repetitions"


@dataclass(kw_only=True)
class LoadedDataset:
    """One leaf, opened.

    Attributes:
        dataset: builds the source.
        weight: share of the whole blend at the start of the run; None outside of blends.
        repetitions: how often an epoch has each sample; None outside of epochized blends.
        aux: the file stores that its cookers get, by name; None for none.
    """

    dataset: BaseCoreDatasetFactory[Any]
    weight: float | None = None
    repetitions: float | None = None
    aux: dict[str, Any] | None = None


@dataclass(kw_only=True)
class LoadedDatasetList:
    """The leaves of a split, in the order of the file."""

    datasets: list[LoadedDataset]
    blend_mode: DatasetBlendMode = DatasetBlendMode.NONE
