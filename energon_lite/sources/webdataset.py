"""Prepared WebDataset folders as sources: what all of Energon's dataset classes share.

A factory knows which folder and which split; `build` makes the source. How samples are made of
parts is for the classes in `sources.dataset_classes`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from os import PathLike
from typing import Any, TypeVar

from energon_lite.core.errors import EmptyDatasetError
from energon_lite.core.state import JSON
from energon_lite.core.topology import WorkerConfig
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.prepare.media import add_media_metadata
from energon_lite.prepare.run import iter_dataset_content, prepare_like_energon
from energon_lite.sources.excluded import excluded_positions
from energon_lite.sources.sample_loader import OwnMaker, SampleLoader
from energon_lite.sources.source_factory import SourceFactory, Subset
from energon_lite.storage import nvmeta
from energon_lite.storage.shards import MAX_OPEN, ShardReader
from energon_lite.stores.file_stores import WebdatasetFileStore

T_sample = TypeVar("T_sample")


class BaseWebdatasetFactory(SourceFactory[T_sample]):
    """One split part of a prepared folder.

    Args:
        path: the folder.
        split_part: which part; "train", "val", ...
        training: whether the order is shuffled.
        worker_config: seed and error handlers.
        shuffle_over_epochs: 1 permutes each epoch; n > 1 permutes n copies as one epoch; -1 draws
            slices with replacement; None keeps the file order.
        parallel_shard_iters: slices that are read side by side; by default 16 in training.
        max_samples_per_sequence: longest slice of samples that stay together; by default the mean
            size of a shard.
        split_config: name of the split file in `.nv-meta`.
        part_filter: which parts are read, as names or as a function; all by default.
        subflavors: tags; they go over those of `dataset.yaml`.
        decoder: for the classes that decode: how parts become values; None leaves bytes.
        name: id of the source in states and keys; by default folder name and split part.
        subset: (first, last + 1) of the split part's samples, of which only those are used, or a
            function that returns it for their number; excluded samples count here.
        loss_weight: factor for the loss of each sample.
        max_open: shards that stay open between two reads.

    Raises:
        FileNotFoundError: The folder, or a shard of the split, is missing.
        DatasetFormatError: A file of the dataset is not as it should be.
        EmptyDatasetError: The split part has no sample.
    """

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
        split_config: str | None = None,
        part_filter: Callable[[str], bool] | Collection[str] | None = None,
        subflavors: Mapping[str, Any] | None = None,
        decoder: SampleDecoder | None = None,
        name: str | None = None,
        loss_weight: float = 1.0,
        max_open: int = MAX_OPEN,
    ) -> None:
        del decoder
        self.split_config, self.subset = split_config, subset
        super().__init__(
            path, split_part=split_part, training=training, worker_config=worker_config,
            shuffle_over_epochs=shuffle_over_epochs, parallel_shard_iters=parallel_shard_iters,
            max_samples_per_sequence=max_samples_per_sequence, part_filter=part_filter,
            subflavors=subflavors, name=name, loss_weight=loss_weight,
        )  # fmt: skip
        info = nvmeta.read_info(self.path)
        self._part = nvmeta.SplitFile(self.path, info, split_config).part(split_part)
        excluded = excluded_positions(self.path, info, self._part)
        numbers = {shard: number for number, shard in enumerate(info.shard_counts)}
        reader = ShardReader(
            self.path, self._part.shards, self._part.counts,
            [numbers[shard] for shard in self._part.shards], excluded, max_open,
        )  # fmt: skip
        if reader.num_samples == 0:
            raise EmptyDatasetError(
                f"{self.path}: every sample of split part {split_part!r} is excluded"
            )
        mean_shard = -(-sum(self._part.counts) // len(self._part.counts))
        self._read_from(reader, mean_shard, subset, excluded)

    def as_file_store(self) -> WebdatasetFileStore:
        """Returns access to the files of the folder by key.

        Raises:
            FileNotFoundError: The folder has no `index.sqlite`.
        """
        return WebdatasetFileStore(self.path)

    prepare_dataset = staticmethod(prepare_like_energon)
    iter_dataset_content = staticmethod(iter_dataset_content)
    add_media_metadata = staticmethod(add_media_metadata)

    def load_sample(self, raw_data: dict[str, Any]) -> T_sample:
        """Makes a sample of its parts; a class of the user's may do it in its own way.

        Args:
            raw_data: the parts that are read, as bytes, with `__key__`, `__shard__`,
                `__restore_key__` and `__sources__`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load_sample")

    def sample_filter(self, key: str) -> bool:
        """Whether the sample of a key is used; the others are skipped."""
        del key
        return True

    def sample_loader(self) -> SampleLoader:
        """Makes what turns tar bytes into samples: here by `load_sample`."""
        make = OwnMaker(self.load_sample, self.sample_filter, self.seed)
        return SampleLoader(self.path, self._wants, None, make, self.subflavors)

    def sample_settings(self) -> dict[str, JSON]:
        """Returns what decides how samples are made of parts, for comparison with checkpoints."""
        return {"decoder": None, "dataset_class": type(self).__qualname__}

    def _fingerprint(self) -> tuple[str, int]:
        excluded = tuple(sorted(self._part.excluded.items()))
        return nvmeta.fingerprint(self.path, self._part.shards, self._part.counts, excluded)
