"""Items for which a function says yes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from energon_lite.core.dataset import SavableDataset, Traits
from energon_lite.core.errors import SkipSample
from energon_lite.core.state import RestoreKey
from energon_lite.core.topology import WorkerConfig
from energon_lite.stages.mapping import FunctionConfig, MapDataset, as_user_function, plain_config

T = TypeVar("T")


class _Keep:
    """Passes an item on, or leaves it out on purpose."""

    def __init__(self, filter_fn: Callable[[Any], Any]) -> None:
        # Its name and place for messages, and what @stateless marks it with.
        functools.update_wrapper(self, filter_fn)
        self.filter_fn = filter_fn

    def __call__(self, item: Any) -> Any:
        if not self.filter_fn(item):
            raise SkipSample
        return item


class FilterDataset(MapDataset[T]):
    """Keeps the items for which a function gives something true; the others count as left out.

    Items for which the function fails are left out as failures are, within the usual tolerance.

    State: none of its own.
    Length: as below; what is filtered out is not foreseen.
    Keys: as below.

    Args:
        dataset: the items.
        filter_fn: a function of one item, which it leaves as it is; None counts as no. If it is
            random, it needs `sample_rng()` or `@stateless(restore_seeds=True)`.
        filter_fn_config: as `map_fn_config` of a `MapDataset`.
        worker_config: gives seed and error handlers; by default that of the dataset.

    Raises:
        TypeError: The function is a generator function, whose result is always true.
    """

    config_name: ClassVar[str] = "filter_fn_config"

    def __init__(
        self,
        dataset: SavableDataset[T],
        *,
        filter_fn: Callable[[T], Any],
        filter_fn_config: FunctionConfig = None,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        config = worker_config or dataset.worker_config
        function = as_user_function(_Keep(filter_fn), "filter", config)
        if function.is_generator:
            raise TypeError(
                f"filter_fn: {function.where} is a generator, which is true for all items; "
                "return True or False"
            )
        super().__init__(dataset, function, worker_config=worker_config)
        self.function_config = plain_config(filter_fn_config, self.config_name)

    def own_traits(self, below: Traits) -> Traits:
        """Replays as the dataset below: what was kept needs no second question."""
        return dataclasses.replace(below, per_item=True)

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the item again."""
        item: T = self.dataset.restore_sample(restore_key)
        return item
