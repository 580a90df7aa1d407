"""Datasets over several others: unique source ids, and the route of a restore key."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from typing_extensions import Self

from energon_lite.core.dataset import SavableDataset, Traits
from energon_lite.core.keys import leaves
from energon_lite.core.state import RestoreKey
from energon_lite.core.topology import WorkerConfig

T = TypeVar("T")


def with_unique_sources(datasets: Sequence[SavableDataset[Any]]) -> list[SavableDataset[Any]]:
    """Numbers the sources that occur more than once, so that each has its own order.

    Example:
        Datasets over the sources (a), (b, a), (a) become datasets over (a), (b, a#2), (a#3).
    """
    seen: Counter[str] = Counter()
    taken = {facts.name for dataset in datasets for facts in dataset.sources()}
    unique = []
    for dataset in datasets:
        names = {}
        for facts in dataset.sources():
            seen[facts.name] += 1
            if seen[facts.name] == 1:
                continue
            new = f"{facts.name}#{seen[facts.name]}"
            while new in taken:
                seen[facts.name] += 1
                new = f"{facts.name}#{seen[facts.name]}"
            taken.add(new)
            names[facts.name] = new
        unique.append(dataset.renamed(names) if names else dataset)
    return unique


def label_of(dataset: SavableDataset[Any], number: int) -> str:
    """Names a dataset among its siblings: by its sources, or by its number where it has none."""
    names = [facts.name for facts in dataset.sources()]
    return "+".join(names) if names else f"#{number}"


class CombinedDataset(SavableDataset[T]):
    """A dataset over several others.

    Attributes:
        name: of the stage in configurations and states.
    """

    name: str = ""

    def __init__(
        self, datasets: Sequence[SavableDataset[Any]], worker_config: WorkerConfig | None = None
    ) -> None:
        for dataset in datasets:
            if not isinstance(dataset, SavableDataset):
                raise TypeError(
                    f"{type(self).__name__}: {dataset!r} is a {type(dataset).__name__}, not a "
                    "SavableDataset"
                )
        if not datasets:
            raise ValueError(f"{type(self).__name__} needs at least one dataset")
        configs = [dataset.worker_config for dataset in datasets]
        self.worker_config = worker_config or next((c for c in configs if c is not None), None)
        seeds = {config.seed_offset for config in configs if config is not None}
        if len(seeds) > 1:
            raise ValueError(
                f"{type(self).__name__}: the datasets have different seed_offset "
                f"({', '.join(map(str, sorted(seeds)))}); make all with one WorkerConfig"
            )
        self._set_datasets(with_unique_sources([dataset.nested() for dataset in datasets]))

    def _set_datasets(self, datasets: Sequence[SavableDataset[Any]]) -> None:
        self.datasets = tuple(datasets)
        self.labels = [label_of(dataset, i) for i, dataset in enumerate(self.datasets)]
        self._routes = {
            facts.name: i for i, dataset in enumerate(self.datasets) for facts in dataset.sources()
        }

    @property
    def children(self) -> tuple[SavableDataset[Any], ...]:
        """The datasets that are combined."""
        return self.datasets

    def with_children(self, children: Sequence[SavableDataset[Any]]) -> Self:
        """Returns this dataset over others."""
        other = copy.copy(self)
        other._set_datasets(children)
        return other

    def own_traits(self, below: Traits) -> Traits:
        """Returns what holds of all; streams draw from the datasets at different places."""
        return dataclasses.replace(below, lockstep=False, pass_length=None, ordering=True)

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Re-creates the item in the dataset whose source the key names."""
        for leaf in leaves(restore_key):
            number = self._routes.get(leaf[0]) if leaf else None
            if number is not None:
                item: T = self.datasets[number].restore_sample(restore_key)
                return item
        for dataset, label in zip(self.datasets, self.labels, strict=True):
            if not label.startswith("#"):
                continue
            try:  # one that does not say what its sources are
                return dataset.restore_sample(restore_key)  # type: ignore[no-any-return]
            except ValueError:
                continue
        raise ValueError(
            f"{restore_key!r} is of none of the sources {', '.join(list(self._routes)[:8])}"
        )
