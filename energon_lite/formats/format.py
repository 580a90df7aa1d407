"""A format of datasets: where samples lie on storage, and the functions that handle them.

A format is one class; `formats.known.FORMATS` lists all of them, and no other module asks for the
name of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from energon_lite.formats.shards import BlockReader
from energon_lite.names.energon_modules import LazyFunction, import_name
from energon_lite.storage.files import is_folder, is_there


class Opened(NamedTuple):
    """The samples of a dataset, or of one split part of it.

    Attributes:
        reader: reads samples by their numbers; the name of a file is `KEY.PART`.
        data: names the content of the dataset, to notice that it changed.
        size_bytes: bytes of all samples.
        slice_length: number of consecutive samples that stay together where the order is shuffled.
        excluded: positions of samples that the reader does not count, rising.
        content: a digest of keys and bytes, to notice that the data were written again under the
            same names, with the same sizes. Empty if it is not known.
    """

    reader: BlockReader
    data: str
    size_bytes: int
    slice_length: int = 1
    excluded: Sequence[int] = ()
    content: str = ""


class Format(ABC):
    """One kind of dataset.

    A subclass sets `name` and `suffix`, and writes `open`; the samples of such a file are crude,
    with a key and parts.

    Attributes:
        name: of the format, as in "a JSONL file".
        suffix: of its files, with a dot.
        only_part: the one split part, which every split consists of; None for folders of split
            parts with configs.
        part: the one part of all samples; None where they may have others.
        class_home: `module:name` of the factory of a source.
    """

    name: str
    suffix: str
    only_part: str | None = "all"
    part: str | None = None
    class_home = "energon_lite.sources.crude_file:CrudeFileFactory"
    info: Any = LazyFunction("energon_lite.extras.inspect.info:file_info")
    lint: Any = LazyFunction("energon_lite.extras.inspect.lint:lint_file")

    def is_mine(self, path: PurePath) -> bool:
        """Returns whether the dataset at a path is of this format; decides by its name."""
        return path.suffix.lower() == self.suffix and not is_folder(path)

    @abstractmethod
    def open(self, path: PurePath, **settings: Any) -> Opened:
        """Opens a dataset.

        Args:
            path: the file or folder.
            settings: `max_open`, the number of files that stay open between two reads; for formats
                with split parts also `split_part` and `split_config`.

        Raises:
            FileNotFoundError: There is no such dataset.
            DatasetFormatError: It is not as it should be.
            EmptyDatasetError: It has no sample.
        """

    def factory(self, path: PurePath, **settings: Any) -> Any:
        """Returns the factory of a source; see `sources.source_factory.SourceFactory`."""
        return import_name(self.class_home)(path, format=self, **settings)

    def place_of(self, number: int) -> str:
        """Names a sample in messages by its number, counted from 0."""
        return f"sample {number}"

    def split_parts(self, path: PurePath) -> Sequence[str]:
        """Returns the names of the split parts of a dataset."""
        del path
        return [self.only_part or ""]

    def beside(self, path: PurePath, name: str) -> tuple[PurePath, PurePath]:
        """Returns where files about a dataset lie, such as its lengths.

        Args:
            path: the dataset.
            name: kind of the files.

        Returns:
            The folder that no link may lead out of, and the folder of these files in it.
        """
        return path.parent, path.with_name(f"{path.name}.{name}")

    def is_indexed(self, path: PurePath) -> bool | None:
        """Returns whether the samples need not be searched for; None where there is no index."""
        del path
        return None

    def check(self, path: PurePath, report: Any) -> None:
        """Adds to a `LintReport` what is wrong with the files beside the samples."""
        del path, report

    def prepare(self, path: PurePath, request: Any) -> Any:
        """Writes the index of a dataset; see `prepare_dataset`.

        Raises:
            ValueError: The format has no index.
        """
        del request
        if not is_there(path):
            raise FileNotFoundError(f"{path} does not exist; check the path")
        raise ValueError(f"{path} is a {self.name} file, which has no index; use it as it is")

    def files(self, path: PurePath) -> Any:
        """Returns access to the files of a dataset by key; see `core.file_store.FileStore`.

        Raises:
            NotImplementedError: The format has no such access.
        """
        raise NotImplementedError(
            f"{path}: files of {self.name} have no file store; prepare a folder of tar shards"
        )
