"""Energon's records of states, for code that builds or takes them apart; states here are dicts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from energon_lite.names.energon_modules import ROOT

# The modules of Energon that have the records; the others are in the first.
_HOME = "savable_loader"
_HOMES = {
    "Bucket": "wrappers.group_batch_dataset",
    "SliceState": "flavors.webdataset.sample_loader",
}


class _Record(type):
    """The type of the records: a pickle finds them under Energon's name where that resolves."""

    @property
    def __module__(cls) -> str:  # type: ignore[override]
        home = _HOMES.get(cls.__name__, _HOME)
        name = f"megatron.energon.{home}"
        return name if name in sys.modules else f"{ROOT}.{home}"

    def __instancecheck__(cls, instance: Any) -> bool:
        is_state = cls.__name__ == "SavableDataLoaderState" and isinstance(instance, dict)
        return is_state or super().__instancecheck__(instance)


class SavableDatasetState(dict[str, Any], metaclass=_Record):
    """A dict whose entries are attributes, too: `rng`, `dataset_state`, `sample_index`."""

    def __getattr__(self, name: str) -> Any:
        """Returns an entry."""
        if name not in self:
            raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {list(self)}")
        return self[name]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the class and a dict, which `torch.load` reads where it knows the class."""
        return type(self), (dict(self),)


class SavableDatasetCheckpoint(SavableDatasetState):
    """The same, with `state` and `offset`."""


class SavableCheckpoint(SavableDatasetState):
    """The same, with `state`, `checkpoint_time` and `sample_index`."""


class SavableDataLoaderState(SavableDatasetState):
    """The same, with `worker_states`, `next_worker_id` and `micro_batch_size`.

    Every dict is an instance of it, as the states that loaders return are.
    """


@dataclass(slots=True)
class Bucket(metaclass=_Record):
    """The samples of one group that wait for a batch."""

    batch_size: int
    samples: Any


@dataclass(slots=True)
class SliceState(metaclass=_Record):
    """A slice of a dataset that is read, and its next sample."""

    index: int
    current: int
