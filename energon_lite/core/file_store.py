"""File stores: files that are read one by one, by key; and stores over other stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from energon_lite.core.samples import SourceInfo, add_source_info
from energon_lite.core.state import JSON

T_co = TypeVar("T_co", covariant=True)


class FileStoreDecoder(ABC):
    """Decodes files by their names, as `SampleDecoder` does."""

    @abstractmethod
    def decode(self, fname: str, data: bytes) -> Any:
        """Decodes one file.

        Args:
            fname: its name, or the name of a part.
            data: its content.
        """


class FileStore(Generic[T_co]):
    """Files that are read one by one, by key. A subclass has `__getitem__` and `get_path`."""

    def __getitem__(self, key: str) -> tuple[T_co, SourceInfo]:
        """Reads one file.

        Returns:
            The content, and where it comes from.

        Raises:
            KeyError: There is no such file.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __getitem__")

    def get(self, key: str, sample: Any = None) -> T_co:
        """Reads one file, and appends its source to `sample`.

        Args:
            key: the key of the file.
            sample: a sample or crude sample that uses the file.

        Raises:
            KeyError: There is no such file.
        """
        data, source = self[key]
        if sample is not None:
            add_source_info(sample, source)
        return data

    def get_raw(self, key: str) -> tuple[Any, SourceInfo]:
        """Reads one file without decoding it; a store that decodes has its own method."""
        return self[key]

    def decode_raw(self, key: str, data: Any) -> Any:
        """Returns what `self[key]` returns, of the bytes that `get_raw` returned."""
        del key
        return data

    def get_path(self) -> str:
        """Returns the path of the store."""
        raise NotImplementedError(f"{type(self).__name__} has no get_path")

    def get_media_metadata(self, key: str) -> Any:
        """Returns the stored metadata of an image, a video or a recording.

        Raises:
            RuntimeError: The store has no media metadata.
            KeyError: There is none of this file.
        """
        raise RuntimeError(f"{self}: has no media metadata, as that of {key!r}")

    def config(self) -> dict[str, JSON]:
        """Returns what decides the content, for comparison with checkpoints."""
        return {"store": type(self).__name__}

    def __str__(self) -> str:
        """Names the class and the path."""
        return f"{type(self).__name__}({self.get_path()!r})"


class FileStoreWrapper(FileStore[T_co]):
    """A store over another store, to which all is passed on.

    Args:
        inner: the other store.
    """

    def __init__(self, inner: FileStore[Any]) -> None:
        self.inner = inner

    def _key(self, key: str) -> str:
        """Returns the key of a file in the other store."""
        return key

    def __getitem__(self, key: str) -> tuple[T_co, SourceInfo]:
        """Reads one file of the other store."""
        return self.inner[self._key(key)]

    def get_raw(self, key: str) -> tuple[Any, SourceInfo]:
        """Reads one file of the other store without decoding it."""
        return self.inner.get_raw(self._key(key))

    def decode_raw(self, key: str, data: Any) -> Any:
        """Decodes as the other store."""
        return self.inner.decode_raw(self._key(key), data)

    def get_path(self) -> str:
        """Returns the path of the other store."""
        return self.inner.get_path()

    def get_media_metadata(self, key: str) -> Any:
        """Returns the metadata that the other store has."""
        return self.inner.get_media_metadata(self._key(key))

    def config(self) -> dict[str, JSON]:
        """Returns the configuration of the other store."""
        return self.inner.config()

    def __str__(self) -> str:
        """Names the class and the other store."""
        return f"{type(self).__name__}({self.inner})"


class DecodeFileStore(FileStoreWrapper[Any]):
    """A store that decodes the files of another one.

    Args:
        inner: the store of bytes.
        decoder: decodes a file by its key.
    """

    def __init__(self, inner: FileStore[bytes], *, decoder: FileStoreDecoder) -> None:
        super().__init__(inner)
        self.decoder = decoder

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        """Reads and decodes one file."""
        data, source = self.inner[key]
        return self.decoder.decode(key, data), source

    def decode_raw(self, key: str, data: Any) -> Any:
        """Decodes the bytes of a file."""
        return self.decoder.decode(key, super().decode_raw(key, data))


class PrimaryFileStore(FileStoreWrapper[T_co]):
    """The store of the samples themselves: a key `.wav` is that of the current sample.

    Args:
        inner: the store of the dataset.
        current_key: the key of the current sample.
    """

    def __init__(self, inner: FileStore[T_co], current_key: str) -> None:
        super().__init__(inner)
        self.current_key = current_key

    def _key(self, key: str) -> str:
        return self.current_key + key if key.startswith(".") else key
