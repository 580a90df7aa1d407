"""Items for which a function says yes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import SkipSample
from energon_lite.core.topology import WorkerConfig
from energon_lite.core.user_function import UserFunction
from energon_lite.stages.mapping import FunctionConfig, MapDataset, function_config

T = TypeVar("T")


class _Keep:
    """Passes an item on, or leaves it out on purpose."""

    __stateless__ = True

    def __init__(self, filter_fn: Callable[[Any], Any]) -> None:
        self.__wrapped__ = filter_fn

    def __call__(self, item: Any) -> Any:
        if not self.__wrapped__(item):
            raise SkipSample
        return item


class FilterDataset(MapDataset[T]):
    """Keeps the items for which a function gives something true; the others count as left out.

    State: none of its own.
    Length: as below; what is filtered out is not foreseen.
    Keys: as below.

    Args:
        dataset: the items.
        filter_fn: a function of one item; the same item must always get the same answer.
        filter_fn_config: what is to be noticed, on a resume, if it changes; a dict, or a function
            that gives one.
        worker_config: by default that of the dataset.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        *,
        filter_fn: Callable[[T], Any],
        filter_fn_config: FunctionConfig = None,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        config = worker_config or dataset.worker_config
        function = UserFunction(_Keep(filter_fn), name="filter", config=config)
        super().__init__(dataset, function, worker_config=worker_config)
        self.function_config = function_config(filter_fn_config, "filter_fn_config")
