"""A small data set, its loaders, and a model that notes what it was trained on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from energon_lite import (
    Batch,
    DefaultTaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)

NUM_STREAMS = 12  # a multiple of all world sizes
OF_LOADER = ("state_timeout_sec", "end")


class DictEncoder(DefaultTaskEncoder):
    """Batches as dicts, as a trainer hands them to `model(**batch)`."""

    @stateless
    def encode_batch(self, batch: Batch) -> dict[str, Any]:
        numbers = [float(key) for key in batch.__key__]
        return {"x": torch.tensor(numbers)[:, None] / 100, "keys": list(batch.__key__)}


class Model(nn.Module):
    """One weight; `seen` has the keys of each batch it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.seen: list[list[str]] = []
        self.validated: list[list[str]] = []

    def forward(self, x: Tensor, keys: list[str], **_: Tensor) -> dict[str, Tensor]:
        (self.seen if self.training else self.validated).append(list(keys))
        return {"loss": (self.linear(x) - x.flip(0)).square().mean()}


def worker_config(num_workers: int = 0, group: Any = None, num_streams: int = NUM_STREAMS):
    config = WorkerConfig.default_worker_config(num_workers, group)
    config.num_streams = num_streams
    return config


def train_loader(folder, config=None, *, batch_size=2, **settings):
    config = config or worker_config()
    of_loader = {name: settings.pop(name) for name in OF_LOADER if name in settings}
    settings = {"shuffle_buffer_size": 10, "task_encoder": DictEncoder(), **settings}
    dataset = get_train_dataset(folder, batch_size=batch_size, worker_config=config, **settings)
    return get_savable_loader(dataset, **of_loader)


def val_loader(folder, config=None, *, batch_size=2, **settings):
    config = config or worker_config()
    settings = {"split_part": "train", "task_encoder": DictEncoder(), **settings}
    return get_savable_loader(
        get_val_dataset(folder, batch_size=batch_size, worker_config=config, **settings)
    )


def in_slot_order(ranks: list[list[list[str]]]) -> list[list[str]]:
    """The batches of all ranks, one step after the other."""
    return [keys for step in zip(*ranks, strict=True) for keys in step]


def keys_of(batch: dict[str, Any]) -> list[str]:
    return list(batch["keys"])


def keys_in(batches: Iterable[list[str]]) -> list[str]:
    return [key for keys in batches for key in keys]
