"""Builds sources: what folders of shards and other kinds of files have in common.

A factory knows where the samples are, and how they are ordered; `build` makes the source.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from functools import lru_cache
from math import inf
from numbers import Integral
from os import PathLike
from pathlib import PurePath
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np

from energon_lite.core.arguments import at_least
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import EmptyDatasetError
from energon_lite.core.file_store import FileStore
from energon_lite.core.samples import CrudeSample, Sample, tags_of_source
from energon_lite.core.state import JSON
from energon_lite.core.topology import NO_GROUPS, WorkerConfig
from energon_lite.formats.format import Opened
from energon_lite.formats.shards import MAX_OPEN
from energon_lite.order.source_order import SourceOrder
from energon_lite.sources.sample_loader import PartFilter, SampleLoader
from energon_lite.sources.source import WebdatasetSource
from energon_lite.storage import files, local_paths

T_sample = TypeVar("T_sample")
Subset: TypeAlias = "tuple[int, int] | Callable[[int], tuple[int, int]] | None"

_TRAIN_PARALLEL = 16
# So that all places of an epoch, for as many samples as there can be, have numbers of 63 bits.
_LARGEST_MULTIPLIER = 1_000_000


class BaseCoreDatasetFactory(ABC, Generic[T_sample]):
    """Anything that a source can be built of."""

    __sample_type__: ClassVar[type[Any] | None] = None
    sample_type: type[Any] | None = None
    paths: list[PurePath]
    subflavors: dict[str, Any]

    @abstractmethod
    def build(
        self,
        worker_rotation_offset: int = 0,
        *,
        shuffle_buffer_size: int = 0,
        repeat: bool = False,
        block: int = 1,
    ) -> SavableDataset[T_sample]:
        """Makes the dataset."""

    @abstractmethod
    def __len__(self) -> int:
        """Counts the samples."""

    @property
    def is_crude(self) -> bool:
        """Whether cookers convert the samples."""
        return issubclass(self.__sample_type__ or Sample, CrudeSample)

    def as_file_store(self) -> FileStore[Any]:
        """Returns access to the files of the dataset by key.

        Raises:
            NotImplementedError: The class of the dataset has no such access.
        """
        raise NotImplementedError(f"{type(self).__name__} has no file store")


class SourceFactory(BaseCoreDatasetFactory[T_sample]):
    """Builds the source of the samples that a reader reads.

    A subclass opens the samples, and calls `_read_from`.

    Args:
        path: the folder or file.
        split_part: which part; "train", "val", ...
        training: whether the order is shuffled.
        worker_config: seed and error handlers.
        shuffle_over_epochs: 1 permutes each epoch; n > 1 permutes n copies as one epoch; -1 draws
            slices with replacement; None keeps the file order.
        parallel_shard_iters: slices that are read side by side; by default 16 in training.
        max_samples_per_sequence: longest slice of samples that stay together; by default the mean
            size of a shard.
        subset: (first, last + 1) of the split part's samples, of which only those are used, or a
            function that returns it for their number; excluded samples count here.
        part_filter: which parts are read, as names or as a function; all by default.
        subflavors: tags of the samples.
        name: id of the source in states and keys; by default folder name and split part.
        loss_weight: factor for the loss of each sample.
        max_open: shards that stay open between two reads.
    """

    opened: Opened

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        split_part: str = "train",
        training: bool = True,
        worker_config: WorkerConfig | None = None,
        shuffle_over_epochs: int | None = 1,
        parallel_shard_iters: int | None = None,
        max_samples_per_sequence: int | None = None,
        subset: Subset = None,
        part_filter: Callable[[str], bool] | Collection[str] | None = None,
        subflavors: Mapping[str, Any] | None = None,
        name: str | None = None,
        loss_weight: float = 1.0,
        max_open: int = MAX_OPEN,
    ) -> None:
        self.path = files.absolute(local_paths.local_path(path))
        self.paths = [self.path]
        self.split_part = split_part
        self.training = training
        self.worker_config = worker_config
        self.seed = worker_config.seed_offset if worker_config else 0
        self.nodes = worker_config.nodes if worker_config else NO_GROUPS
        self.subset = subset
        self.subflavors = tags_of_source(subflavors or {})
        self._wants = PartFilter(part_filter)
        self.name = name or f"{files.resolved(self.path).name}/{split_part}"
        self.shuffle_over_epochs = _checked_multiplier(shuffle_over_epochs)
        default_parallel = _TRAIN_PARALLEL if training else 1
        self.parallel_shard_iters = _at_least_one(
            "parallel_shard_iters", parallel_shard_iters, default_parallel
        )
        self.max_samples_per_sequence = max_samples_per_sequence
        self.loss_weight = _checked_loss_weight(loss_weight)
        self.max_open = max_open

    def _read_from(self, opened: Opened) -> None:
        """Sets what reads the samples."""
        self.opened = opened
        self._first, self._last = self._reader_range()
        self._max_slice = _at_least_one(
            "max_samples_per_sequence", self.max_samples_per_sequence, opened.slice_length
        )

    def __len__(self) -> int:
        """Counts the samples of the split part, or of its subset, without the excluded ones."""
        return self._last - self._first

    def _reader_range(self) -> tuple[int, int]:
        """Returns first and last + 1 of the reader's samples, without the excluded ones."""
        subset, excluded = self.subset, self.opened.excluded
        if subset is None:
            return 0, self.num_samples_of_part
        total = self.num_samples_of_part + len(excluded)
        start, stop = subset(total) if callable(subset) else subset
        if not 0 <= start <= stop <= total:
            raise ValueError(
                f"{self.path}: subset [{start}, {stop}] does not lie in the {total} samples of "
                f"split part {self.split_part!r}"
            )
        first, last = (edge - bisect_left(excluded, edge) for edge in (start, stop))
        if first == last:
            raise EmptyDatasetError(
                f"{self.path}: subset [{start}, {stop}] of split part {self.split_part!r} has no "
                "sample"
            )
        return first, last

    @abstractmethod
    def sample_loader(self) -> SampleLoader:
        """Makes what turns the bytes of a sample into the sample."""

    @abstractmethod
    def sample_settings(self) -> dict[str, JSON]:
        """Returns what decides how samples are made, for comparison with checkpoints."""

    def build(
        self,
        worker_rotation_offset: int = 0,
        *,
        shuffle_buffer_size: int = 0,
        repeat: bool = False,
        block: int = 1,
        repetitions: Fraction | None = None,
    ) -> WebdatasetSource[T_sample]:
        """Makes the source.

        Args:
            worker_rotation_offset: of Energon; no stream begins with a certain worker here.
            shuffle_buffer_size: samples of a stream's shuffle window; 0 and 1 for none.
            repeat: whether epoch follows epoch for ever.
            block: samples that file order deals to a stream at a time.
            repetitions: how many times a finite pass has all samples; rounded down to samples.

        Raises:
            EmptyDatasetError: `repetitions` leave no sample.
        """
        del worker_rotation_offset
        if shuffle_buffer_size < 0:
            raise ValueError(f"shuffle_buffer_size={shuffle_buffer_size} is negative")
        multiplier = self.shuffle_over_epochs if self.training else None
        order = SourceOrder(
            source=self.name,
            num_samples=len(self),
            seed=self.seed,
            endless=repeat,
            multiplier=multiplier,
            max_slice=self._max_slice,
            interleave=self.parallel_shard_iters,
            window=shuffle_buffer_size,
            block=block,
            first=self._first,
            pass_samples=None if repetitions is None else self._repeated(repetitions),
            nodes=NO_GROUPS if multiplier is None else self.nodes,
        )
        loader = self.sample_loader()
        loader.loss_weight = self.loss_weight
        return WebdatasetSource(
            order=order,
            reader=self.opened.reader,
            loader=loader,
            data=self.data,
            content=self.opened.content,
            settings=self._settings(order, repetitions),
            is_training=self.training,
            split_part=self.split_part,
            num_bytes=self.opened.size_bytes * len(self) // self.num_samples_of_part,
            worker_config=self.worker_config,
        )

    @property
    def num_samples_of_part(self) -> int:
        """The number of samples of the split part, without the excluded ones."""
        return self.opened.reader.num_samples

    @property
    def data(self) -> str:
        """Hash of the split part's data."""
        return self.opened.data

    def _settings(self, order: SourceOrder, repetitions: Fraction | None) -> dict[str, JSON]:
        """Returns what the user set, by its public names."""
        settings: dict[str, JSON] = {
            "split_part": self.split_part,
            "training": self.training,
            "repeat": order.endless,
            "shuffle_over_epochs_multiplier": order.multiplier,
            "shuffle_buffer_size": order.window,
        }
        if order.multiplier is None:
            settings["block"] = order.block
        else:
            settings["max_samples_per_sequence"] = self._max_slice
            settings["parallel_shard_iters"] = self.parallel_shard_iters
        if order.nodes.num_groups > 1:
            settings["node_groups"], settings["ranks_per_node"] = order.nodes
        if len(self) < self.num_samples_of_part:
            settings["subset"] = [self._first, self._last]
        if repetitions is not None:
            settings["repetitions"] = str(repetitions)
        if self.loss_weight != 1:
            settings["loss_weight"] = self.loss_weight
        settings["subflavors"] = self.subflavors
        settings.update(self.sample_settings())
        shared: Any = plain(settings)
        return shared  # type: ignore[no-any-return]

    def _repeated(self, repetitions: Fraction) -> int:
        num_samples = len(self) * repetitions.numerator // repetitions.denominator
        if num_samples == 0:
            raise EmptyDatasetError(
                f"{self.path}: {repetitions} repetitions of {len(self)} samples are none at all"
            )
        return num_samples


def _at_least_one(name: str, value: int | None, default: int) -> int:
    if value is None:
        return max(1, default)
    return min(at_least(name, value, also=", or None"), sys.maxsize)


def _checked_loss_weight(value: float) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, np.number))
        or not 0 <= value < inf
    ):
        raise ValueError(f"loss_weight={value!r} must be a number of at least 0")
    return float(value)


def _checked_multiplier(value: Any) -> int | None:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if value is None or (is_integer and (value == -1 or 1 <= value <= _LARGEST_MULTIPLIER)):
        return None if value is None else int(value)
    raise ValueError(
        f"shuffle_over_epochs_multiplier={value!r:.40} must be at least 1 and at most "
        f"{_LARGEST_MULTIPLIER:,}, -1 (with replacement), or None (no shuffling)"
    )


def plain(value: Any) -> JSON:
    """Returns a value as JSON; what JSON does not know, as its text.

    Equal values are one object, which must not be changed: sources often have the same settings.
    """
    return _parsed(json.dumps(value, default=str))


@lru_cache(1024)
def _parsed(text: str) -> JSON:
    return json.loads(text)  # type: ignore[no-any-return]
