"""Finds out size, format and length of images, video and audio from their headers, undecoded.

Of an image Pillow reads the header. Of a video or recording PyAV reads the header and the end where
they are enough, as in an mp4; of other containers all packets are read.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import BinaryIO, NamedTuple

from energon_lite.decoding.images import image_format, image_header
from energon_lite.decoding.part_formats import is_av
from energon_lite.extras.media.av_decoder import AVDecoder
from energon_lite.extras.media.media_metadata import (
    AVMetadata,
    ImageMetadata,
    MediaMetadataBase,
    MediaMetadataType,
    serialize_media_metadata,
)
from energon_lite.storage.files import ByteFile, open_bytes

_IMAGES = "bmp gif ico j2k jp2 jpx jpeg jpg png tif tiff webp"
_RECORDINGS = "aac avi flac m4a m4v mkv mov mp3 mp4 ogg wav webm"
IMAGES = frozenset(_IMAGES.split())
RECORDINGS = frozenset(_RECORDINGS.split())
_HEAD_BYTES = 32
_BUFFER_BYTES = 16 << 10
_ICON = b"\0\0\1\0"


class MediaFilterStrategy(str, Enum):
    """The ways to choose files with media metadata."""

    EXTENSION = "EXTENSION"
    HEADER = "HEADER"
    GLOB = "GLOB"


@dataclasses.dataclass
class MediaFilterConfig:
    """The choice of files that get media metadata.

    Attributes:
        strategy: by the extension of the name, by the first bytes of the content (and the
            extension, if they show nothing), or by patterns of the name.
        patterns: of names, such as `*.jpg`, in lower or upper case; with `GLOB` only.
    """

    strategy: MediaFilterStrategy
    patterns: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def parse(cls, glob: str | None, header: bool, extension: bool) -> MediaFilterConfig:
        """Creates a filter from options of the command line.

        Args:
            glob: patterns, separated by commas.
            header: whether to choose by content.
            extension: whether to choose by extension.

        Raises:
            ValueError: None of them is set, or several.
        """
        if (glob is not None) + header + extension != 1:
            raise ValueError(
                "Exactly one of GLOB, HEADER, or EXTENSION media filters must be enabled "
                "(--media-metadata-by-glob, -header or -extension). You can use multiple glob "
                "patterns by separating them by commas."
            )
        if glob is None:
            return cls(MediaFilterStrategy.HEADER if header else MediaFilterStrategy.EXTENSION)
        patterns = [pattern.strip() for pattern in glob.split(",") if pattern.strip()]
        if not patterns:
            raise ValueError(f"{glob!r} is no pattern of names; write some as '*.jpg,*.mp4'")
        return cls(MediaFilterStrategy.GLOB, patterns)

    def row(self) -> tuple[str, str]:
        """Returns strategy and patterns as the index stores them."""
        return self.strategy.value, ",".join(self.patterns)

    def should_consider_all(self) -> bool:
        """Returns whether the name of a file does not matter."""
        return self.strategy is MediaFilterStrategy.HEADER

    def should_consider_media(self, name: str) -> bool:
        """Returns whether a file of this name may have media metadata."""
        if self.strategy is MediaFilterStrategy.GLOB:
            lower = name.lower()
            return any(fnmatchcase(lower, pattern.lower()) for pattern in self.patterns)
        return self.should_consider_all() or _type_by_name(name) is not None

    def extract_metadata(
        self, source: bytes | str | os.PathLike[str] | BinaryIO, filename: str | None = None
    ) -> MediaMetadataBase | None:
        """Reads the metadata of one file.

        Args:
            source: the content, a path, or an open file.
            filename: name of the file; not needed with a path.

        Returns:
            The metadata; None if the file is not chosen, no medium, or cannot be read.
        """
        with suppress(UnreadableMediaError):
            if isinstance(source, str | os.PathLike):
                path = Path(source)
                return read_metadata(filename or path.name, open_bytes(path).stream(), self)
            if filename is None:
                raise ValueError("extract_metadata needs a filename with bytes or an open file")
            opened = io.BytesIO(source) if isinstance(source, bytes) else source
            return read_metadata(filename, opened, self)
        return None


class UnreadableMediaError(ValueError):
    """A file that should be an image, video or recording cannot be read as one."""


def _type_by_name(name: str) -> MediaMetadataType | None:
    extension = name.rpartition(".")[2].lower()
    if extension in IMAGES:
        return MediaMetadataType.IMAGE
    return MediaMetadataType.AV if extension in RECORDINGS else None


def _type_by_content(head: bytes) -> MediaMetadataType | None:
    if image_format(head) is not None or head.startswith(_ICON):
        return MediaMetadataType.IMAGE
    # A frame of mp3 or aac: eleven set bits, a layer and a bit rate that exist.
    is_frame = head[:1] == b"\xff" and len(head) > 2 and head[1] & 0xF0 == 0xF0 != head[2] & 0xF0
    # Brands that `is_av` does not know, and Ogg: PyAV finds out what is in them.
    is_other = head[4:8] == b"ftyp" or head.startswith(b"OggS")
    return MediaMetadataType.AV if is_av(head) or is_frame or is_other else None


def read_metadata(name: str, file: BinaryIO, config: MediaFilterConfig) -> MediaMetadataBase | None:
    """Reads the metadata of one file from its header.

    Args:
        name: of the file.
        file: the content, open for reading, that can seek.
        config: which files are chosen.

    Returns:
        The metadata; None if the file is not chosen, or no medium.

    Raises:
        UnreadableMediaError: The file is broken, or no medium although its name is that of one.
        ImportError: It is a video or recording, and PyAV is not installed.
        OSError: Its storage failed.
    """
    if not config.should_consider_media(name):
        return None
    kind = _type_by_name(name)
    if config.strategy is not MediaFilterStrategy.EXTENSION:
        kind = _type_by_content(file.read(_HEAD_BYTES)) or kind
        file.seek(0)
    if kind is None:
        return None
    try:
        if kind is MediaMetadataType.IMAGE:
            width, height, format_name, mode = image_header(file)
            return ImageMetadata(width=width, height=height, format=format_name, mode=mode)
        found = AVDecoder(file).get_metadata(get_audio_num_samples=True)
        if found == AVMetadata():
            raise ValueError("it has neither a video nor an audio stream")
        return found
    except ImportError:
        raise
    except Exception as error:  # Pillow and FFmpeg may raise anything for a corrupt header
        if isinstance(error, OSError) and type(error).__module__ == "builtins" and error.errno:
            raise  # of the storage
        what = "image" if kind is MediaMetadataType.IMAGE else "video or audio"
        reason = getattr(error.__cause__ or error, "strerror", None) or str(error)
        if type(error).__name__ == "UnidentifiedImageError":  # names nothing but a Python object
            reason = "the content is that of no image"
        raise UnreadableMediaError(f"{name}: no {what} that can be read ({reason})") from None


def has_pyav() -> bool:
    """Returns whether the metadata of video and audio can be read here."""
    return find_spec("av") is not None


# ------------------------------------------------------------------------------------ many files


class MediaFile(NamedTuple):
    """A file that may have media metadata: by itself, or a member of a tar.

    Attributes:
        key: under which its metadata are stored.
        path: the file, or the tar.
        offset: where the content begins. [Unit: byte]
        size: of the content; None for the whole file. [Unit: byte]
    """

    key: str
    path: PurePath
    offset: int = 0
    size: int | None = None


class MediaRows(NamedTuple):
    """The findings in some files.

    Attributes:
        rows: (entry key, type, JSON) per file with metadata.
        unreadable: files that should have metadata and cannot be read.
        without_pyav: video and audio files that are passed over, because PyAV is not installed.
        first: the error of the first unreadable file, or "".
    """

    rows: list[tuple[str, str, str]]
    unreadable: int
    without_pyav: int
    first: str


def media_rows(media_files: Iterable[MediaFile], config: MediaFilterConfig) -> MediaRows:
    """Reads the metadata of files.

    Raises:
        OSError: A file cannot be opened, or its storage failed.
    """
    rows: list[tuple[str, str, str]] = []
    counts: Counter[str] = Counter()
    first = ""
    for key, file in _chosen_files(media_files, config):
        try:
            found = read_metadata(key, file, config)
        except ImportError:
            counts["without_pyav"] += 1
            continue
        except UnreadableMediaError as error:
            first = first or str(error)[:300]
            counts["unreadable"] += 1
            continue
        if found is not None:
            kind, text = serialize_media_metadata(found)
            rows.append((key, kind.value, text))
    return MediaRows(rows, counts["unreadable"], counts["without_pyav"], first)


def _chosen_files(
    media_files: Iterable[MediaFile], config: MediaFilterConfig
) -> Iterator[tuple[str, BinaryIO]]:
    """Yields the chosen files, open; the members of one tar through one open file."""
    current: ByteFile | None = None
    for key, path, offset, size in media_files:
        if not config.should_consider_media(key):
            continue
        if current is None or path != current.path:
            current = open_bytes(path)
        stop = current.size_bytes if size is None else offset + size
        yield key, current.stream(_BUFFER_BYTES, offset, stop)
