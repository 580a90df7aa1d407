"""Metadata of images, video and audio, as `index.sqlite` keeps them: written and read by key.

The key of an entry is `<sample key>.<part>` in a WebDataset, and in any other folder the path
relative to the folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, ClassVar, TypeVar

from energon_lite.core.errors import did_you_mean
from energon_lite.core.json_text import read_json
from energon_lite.formats.nvmeta import META, is_utf8
from energon_lite.formats.sqlite import INDEX_SQLITE, INDEX_TABLES, MEDIA_COLUMNS, ReadOnlyDatabase
from energon_lite.storage import files

_AGAIN = "run `energon-lite prepare-media {} --media-metadata-by-extension`"
_MEDIA_OF_SAMPLES = (
    "SELECT sample_index, sample_key, part_name, coalesce(metadata_type, ''), "
    "coalesce(metadata_json, '') FROM samples CROSS JOIN sample_parts "
    "USING (tar_file_id, sample_index) LEFT JOIN media_metadata "
    "ON entry_key = sample_key || '.' || part_name "
    "WHERE tar_file_id = ? AND sample_index BETWEEN ? AND ? "
    "ORDER BY sample_index, content_byte_offset"
)
Metadata = TypeVar("Metadata", bound="MediaMetadataBase")


class MediaMetadataType(str, Enum):
    """Kinds of media metadata; the values are those that the index stores."""

    AV = "av"
    IMAGE = "image"

    @classmethod
    def from_string(cls, value: str) -> MediaMetadataType:
        """Returns the type of this value.

        Raises:
            ValueError: There is none.
        """
        try:
            return cls(value)
        except ValueError:
            hint = did_you_mean(str(value), [kind.value for kind in cls])
            raise ValueError(f"Unsupported media metadata type: {value!r}.{hint}") from None


@dataclasses.dataclass(slots=True)
class MediaMetadataBase:
    """Facts of an image, a video or a recording that are known without decoding it."""

    metadata_type: ClassVar[MediaMetadataType]

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that are known."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in values if value is not None}

    @classmethod
    def from_dict(cls: type[Metadata], payload: Mapping[str, Any]) -> Metadata:
        """Creates metadata from what `to_dict` returned.

        Raises:
            ValueError: A field is unknown, missing, or of another type.
        """
        if not isinstance(payload, Mapping):
            raise ValueError(f"{cls.__name__}: {payload!r:.100} is no JSON object")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in payload.items():
            if name not in fields:
                raise ValueError(
                    f"{cls.__name__} has no field {name!r}.{did_you_mean(name, fields)}"
                )
            kinds = _KINDS[str(fields[name].type).split(" ")[0]]
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise ValueError(f"{cls.__name__}: {name}={value!r:.100} is no {kinds[0].__name__}")
        try:
            return cls(**payload)
        except TypeError as error:
            raise ValueError(f"{cls.__name__}: {error}") from None


_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,)}


@dataclasses.dataclass(slots=True, kw_only=True)
class ImageMetadata(MediaMetadataBase):
    """Size and format of an image.

    Attributes:
        width: in pixels.
        height: in pixels.
        format: Pillow's name, such as `JPEG`.
        mode: Pillow's name, such as `RGB`.
    """

    metadata_type: ClassVar[MediaMetadataType] = MediaMetadataType.IMAGE

    width: int
    height: int
    format: str
    mode: str

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width, for functions that also get decoded images."""
        return self.height, self.width


@dataclasses.dataclass(slots=True, kw_only=True)
class AVMetadata(MediaMetadataBase):
    """Size and length of a video, a recording, or both; None where there is no such stream.

    Attributes:
        video_duration: where the last frame ends. [Unit: second]
        video_num_frames: number of frames.
        video_fps: frames per second, on average.
        video_width: in pixels.
        video_height: in pixels.
        audio_duration: where the last sample ends. [Unit: second]
        audio_channels: number of channels.
        audio_sample_rate: samples per second.
        audio_num_samples: samples of each channel.
    """

    metadata_type: ClassVar[MediaMetadataType] = MediaMetadataType.AV

    video_duration: float | None = None
    video_num_frames: int | None = None
    video_fps: float | None = None
    video_width: int | None = None
    video_height: int | None = None
    audio_duration: float | None = None
    audio_channels: int | None = None
    audio_sample_rate: int | None = None
    audio_num_samples: int | None = None

    def get_metadata(self, **_which: bool) -> AVMetadata:
        """Returns itself, for functions that also get an `AVDecoder`."""
        return self


_CLASSES: dict[MediaMetadataType, type[MediaMetadataBase]] = {
    kind.metadata_type: kind for kind in (ImageMetadata, AVMetadata)
}


def serialize_media_metadata(metadata: MediaMetadataBase) -> tuple[MediaMetadataType, str]:
    """Returns the type and the JSON under which the index stores metadata.

    Example:
        >>> serialize_media_metadata(AVMetadata(video_fps=30.0))[1]
        '{"video_fps":30.0}'
    """
    return metadata.metadata_type, json.dumps(metadata.to_dict(), separators=(",", ":"))


def deserialize_media_metadata(
    metadata_type: str | MediaMetadataType, metadata_json: str
) -> MediaMetadataBase:
    """Creates metadata from what `serialize_media_metadata` returned.

    Raises:
        ValueError: The type is unknown, or the JSON does not fit it.
    """
    kind = MediaMetadataType.from_string(metadata_type)
    return _CLASSES[kind].from_dict(read_json(metadata_json, "media metadata"))


# ------------------------------------------------------------------------------------- reading


class MediaDatabase(ReadOnlyDatabase):
    """The media metadata of a prepared WebDataset, or of a folder after `prepare-media`.

    Args:
        root: the folder.

    Raises:
        RuntimeError: The folder has no `index.sqlite`, or this one has no media metadata.
        DatasetFormatError: The file is no SQLite database, or has other tables.
    """

    def __init__(self, root: PurePath) -> None:
        path, self._again = root / META / INDEX_SQLITE, _AGAIN.format(root)
        try:
            super().__init__(path, {**INDEX_TABLES, **MEDIA_COLUMNS}, self._again)
        except (FileNotFoundError, NotADirectoryError):
            raise RuntimeError(
                f"Media metadata database missing at {path}; {self._again}"
            ) from None
        if not MEDIA_COLUMNS.keys() <= self.tables:
            self.__exit__()
            raise RuntimeError(f"{path}: holds no media metadata; {self._again}")

    def __getitem__(self, entry_key: str) -> MediaMetadataBase:
        """Returns the metadata of one file.

        Raises:
            KeyError: There are none of this file.
            DatasetFormatError: They are invalid.
        """
        query = "SELECT metadata_type, metadata_json FROM media_metadata WHERE entry_key = ?"
        rows = self.rows(query, (entry_key,), str, str) if is_utf8(entry_key) else []
        if not rows:
            raise KeyError(
                f"{self.path}: no media metadata of {entry_key!r}: the file is not there, cannot "
                f"be read, or was not chosen; {self._again}"
            )
        try:
            return deserialize_media_metadata(*rows[0])
        except ValueError as error:
            raise self.error(f"entry {entry_key!r}: {error}") from None

    @property
    def has_samples(self) -> bool:
        """Whether the index has the samples of a WebDataset, and their parts."""
        return INDEX_TABLES.keys() <= self.tables

    def samples(
        self, tar_file_id: int, first: int, last: int
    ) -> dict[int, tuple[str, list[tuple[str, str, str]]]]:
        """Returns the files of samples of a WebDataset with their stored metadata.

        Args:
            tar_file_id: number of the shard.
            first: sample_index of the first sample.
            last: of the last one.

        Returns:
            Key and (part, type, JSON) of each file, by sample_index; type and JSON are empty where
            there are no metadata.
        """
        found: dict[int, tuple[str, list[tuple[str, str, str]]]] = {}
        rows = self.rows(_MEDIA_OF_SAMPLES, (tar_file_id, first, last), int, str, str, str, str)
        for index, key, part, kind, text in rows:
            found.setdefault(index, (key, []))[1].append((part, kind, text))
        return found


def read_media_metadata(root: Path, entry_key: str) -> MediaMetadataBase:
    """Returns the stored metadata of one file.

    Args:
        root: folder of a WebDataset, or of files.
        entry_key: `<sample key>.<part>`, or the path relative to the folder.

    Raises:
        RuntimeError: The folder has no media metadata.
        KeyError: There are none of this file.
        DatasetFormatError: The database is corrupt.
    """
    return media_database(root)[entry_key]


# Databases that stay open. Those of a parent process are neither used nor closed after a fork.
_open: dict[tuple[int, PurePath], tuple[Any, MediaDatabase]] = {}
_MAX_OPEN = 16


def media_database(root: PurePath) -> MediaDatabase:
    """Opens the media metadata of a folder, unless this process has them open."""
    try:
        status = files.status_of(root / META / INDEX_SQLITE)
    except OSError:
        status = None
    place, version = (os.getpid(), root), status and status.identity
    held = _open.get(place)
    if held is not None and version is not None and held[0] == version:
        return held[1]
    database = MediaDatabase(root)
    own = [other for other in [*_open] if other[0] == place[0]]
    if len(own) >= _MAX_OPEN:
        _open.pop(own[0], None)
    _open[place] = version, database
    return database
