"""Prepared WebDataset folders as sources: what all of Energon's dataset classes share.

A factory knows which folder and which split; `build` makes the source. How samples are made of
parts is for the classes in `sources.dataset_classes`.
"""

from __future__ import annotations

from os import PathLike
from typing import Any, TypeVar

from energon_lite.core.file_store import FileStore
from energon_lite.core.state import JSON
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.formats.prepared_folder import PreparedFolder
from energon_lite.names.energon_modules import LazyFunction
from energon_lite.sources.sample_loader import OwnMaker, SampleLoader
from energon_lite.sources.source_factory import SourceFactory

T_sample = TypeVar("T_sample")


class WebdatasetPreparator:
    """Energon's name for what prepares folders; see `prepare_dataset` of this package."""

    prepare_dataset = LazyFunction("energon_lite.extras.prepare.run:prepare_like_energon")
    iter_dataset_content = LazyFunction("energon_lite.extras.prepare.indexing:iter_dataset_content")
    add_media_metadata = LazyFunction(
        "energon_lite.extras.prepare.prepare_media:add_media_metadata"
    )


class BaseWebdatasetFactory(SourceFactory[T_sample], WebdatasetPreparator):
    """One split part of a prepared folder.

    Args:
        path: the folder.
        split_config: name of the split file in `.nv-meta`.
        decoder: for the classes that decode: how parts become values; None leaves bytes.
        kwargs: as in `SourceFactory`; subflavors go over those of `dataset.yaml`.

    Raises:
        FileNotFoundError: The folder, or a shard of the split, is missing.
        DatasetFormatError: A file of the dataset is not as it should be.
        EmptyDatasetError: The split part has no sample.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        split_config: str | None = None,
        decoder: SampleDecoder | None = None,
        **kwargs: Any,
    ) -> None:
        del decoder
        self.split_config = split_config
        super().__init__(path, **kwargs)
        self._read_from(
            PreparedFolder().open(
                self.path,
                split_part=self.split_part,
                split_config=split_config,
                max_open=self.max_open,
            )
        )

    def as_file_store(self) -> FileStore[bytes]:
        """Returns access to the files of the folder by key.

        Raises:
            FileNotFoundError: The folder has no `index.sqlite`.
        """
        store: FileStore[bytes] = PreparedFolder().files(self.path)
        return store

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
