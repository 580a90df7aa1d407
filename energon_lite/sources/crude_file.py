"""Files of samples as sources of crude samples; each split has all samples of a file."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.file_store import FileStore
from energon_lite.core.samples import CrudeSample, make_crude
from energon_lite.core.state import JSON
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.formats.format import Format
from energon_lite.sources.sample_loader import SampleLoader
from energon_lite.sources.source_factory import SourceFactory


@dataclass(eq=False)
class CrudeFileLoader(SampleLoader):
    """Makes crude samples; errors name them as the format does."""

    format: Format | None = None

    def place_of(self, members: Any, shard: str, place: int) -> str:
        """Names a sample in errors."""
        del members, shard
        assert self.format is not None
        return f"{self.root}, {self.format.place_of(place)}"


class CrudeFileFactory(SourceFactory[CrudeSample]):
    """All samples of a file, as crude samples.

    Args:
        path: the file.
        format: its format.
        split_part: only for the name.
        decoder: how parts become values.
        dataset_config: refused: files of samples have no configs.
        split_config: refused, too.
        trust: without effect: a file of samples names no code.
        kwargs: as in `SourceFactory`. `part_filter` is called with the names of parts; samples lack
            those for which it returns False.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is not as it should be, or a config is named.
        EmptyDatasetError: The file, or the subset, has no sample.
    """

    __sample_type__: ClassVar[type[Any] | None] = CrudeSample
    _loader: type[CrudeFileLoader] = CrudeFileLoader

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        format: Format,
        split_part: str | None = None,
        decoder: SampleDecoder | None = None,
        dataset_config: str | None = None,
        split_config: str | None = None,
        trust: bool | None = None,
        **kwargs: Any,
    ) -> None:
        del trust
        for name, value in (("dataset_config", dataset_config), ("split_config", split_config)):
            if value is not None:
                raise DatasetFormatError(
                    f"{name}={value!r:.80} is for dataset folders, and {path} is a {format.name} "
                    "file, which has no split parts and only crude samples; leave it out"
                )
        own_part = format.only_part or ""
        super().__init__(path, split_part=split_part or own_part, **kwargs)
        self.split_part = own_part
        self._format = format
        self._decoder = decoder or SampleDecoder()
        self._read_from(format.open(self.path, max_open=self.max_open))

    def as_file_store(self) -> FileStore[bytes]:
        """Returns access to the files of samples by key."""
        store: FileStore[bytes] = self._format.files(self.path)
        return store

    def sample_loader(self) -> SampleLoader:
        """Makes what turns bytes into samples."""
        return self._loader(
            self.path, self._wants, self._decoder, make_crude, self.subflavors, format=self._format
        )

    def sample_settings(self) -> dict[str, JSON]:
        """Returns the decoder."""
        return {"decoder": self._decoder.config()}
