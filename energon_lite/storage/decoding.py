"""Decodes the parts of a sample by their names."""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import get_worker_info

from energon_lite.core.errors import DecodingError, add_note, did_you_mean
from energon_lite.core.samples import CrudeSample
from energon_lite.storage import decode_limits
from energon_lite.storage.decode_limits import MAX_DECODED_BYTES, TooLargeError, check_size
from energon_lite.storage.images import (
    IMAGE_EXTENSIONS,
    IMAGE_MODES,
    UNDECODED,
    image_decoder,
    image_format,
)

logger = logging.getLogger(__name__)

PartDecoder = Callable[[bytes], Any]

AV_EXTENSIONS = frozenset({"mp4", "avi", "mov", "webm", "mkv", "flac", "mp3", "wav", "flv"})
AV_MODES = ("AVDecoder", "torch", "pyav")

# As they are called in an error: "part 'jpe' is not a JPEG".
_FORMAT_NAMES = {
    "jpg": "JPEG",
    "jpe": "JPEG",
    "jpeg": "JPEG",
    "jfif": "JPEG",
    "tif": "TIFF",
    "webp": "WebP",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleDecoder:
    """Decodes parts by the text after the last dot of their names (`seg.png` is a PNG).

    If that is a number, it is the text before it that counts (`jpg.0` is a JPEG).

    | part | becomes |
    |---|---|
    | `txt text transcript` | str (UTF-8) |
    | `json jsn` | what the JSON says |
    | `cls cls2 index inx id` | int |
    | `jpg png webp gif tif bmp ...`, in capitals too | image, by `image_decode` |
    | `npy`, `npz` | numpy array, dict of them |
    | `ten tb`, `mp msg`, `cbor` | tenbin, msgpack, CBOR |
    | `X.gz` | as part X, unpacked first |
    | `pkl pickle pyd pth` | bytes, and a warning, unless named in `unpickle` |
    | `mp4 avi mov webm mkv flac mp3 wav flv` | bytes in this version, whatever `av_decode` says |
    | anything else | bytes |

    Images: a mode without prefix gives a numpy array (H, W, C), with `torch` a tensor (C, H, W),
    with `pil` a Pillow image; the suffix 8 gives uint8, otherwise float32 in [0, 1]. Grey modes
    (`l`) have no channel axis: (H, W). Every kind of image works in every mode; of 16-bit images
    the upper byte is taken. The image is recognised by its content, so a PNG in a `jpg` part works.

    Attributes:
        image_decode: One of `l8 rgb8 rgba8 l rgb rgba`, these with `torch` before them, `torch`
            (as `torchrgb`), or `pill pil pilrgb pilrgba`. With `bytes` images stay as they are, for
            a later hook to decode: `SampleDecoder(...).decode("jpg", raw)`.
        av_decode: `AVDecoder`, `torch` or `pyav`; without effect in this version.
        video_decode_audio: Without effect in this version.
        guess_content: Whether parts with an unknown name are decoded when their first bytes are
            those of an image.
        max_bytes: Bytes that a part may have when it is decoded; a larger one is a broken sample.
            For images the pixels count, and for JSON, msgpack and CBOR an estimate. Parts that stay
            bytes are not limited.
        unpickle: Which of `pkl`, `pickle`, `pyd`, `pth` are decoded. Unpickling runs whatever code
            the dataset holds: name them only for data that you trust.

    Raises:
        ValueError: A setting has a value that does not exist.
    """

    image_decode: str = "torchrgb"
    av_decode: str = "AVDecoder"
    video_decode_audio: bool = False
    guess_content: bool = False
    unpickle: tuple[str, ...] = ()
    max_bytes: int = MAX_DECODED_BYTES
    _decoders: dict[str, PartDecoder | None] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks the settings."""
        if self.image_decode not in (*IMAGE_MODES, UNDECODED):
            image_decoder(self.image_decode)  # raises, with the closest mode
        if self.av_decode not in AV_MODES:
            hint = did_you_mean(self.av_decode, AV_MODES)
            raise ValueError(f"av_decode: unknown mode {self.av_decode!r}.{hint}")
        given: Any = self.unpickle  # a list, or a single name, is taken as well
        names = (given,) if isinstance(given, str) else tuple(given)
        for name in names:
            if name not in _PICKLE_DECODERS:
                hint = did_you_mean(name, _PICKLE_DECODERS)
                raise ValueError(f"unpickle: {name!r} is not a part that is unpickled.{hint}")
        object.__setattr__(self, "unpickle", names)
        size: Any = self.max_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"max_bytes={size!r} must be a whole number of bytes above 0")

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the decoders, which are made again when needed."""
        return {name: value for name, value in vars(self).items() if name != "_decoders"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the settings."""
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_decoders", {})

    def config(self) -> dict[str, Any]:
        """Returns the settings as plain JSON; `max_bytes` only where it is not the default."""
        limit = {"max_bytes": self.max_bytes} if self.max_bytes != MAX_DECODED_BYTES else {}
        return {
            **limit,
            "image_decode": self.image_decode,
            "av_decode": self.av_decode,
            "video_decode_audio": self.video_decode_audio,
            "guess_content": self.guess_content,
            "unpickle": list(self.unpickle),
        }

    def decoder_of(self, part: str) -> PartDecoder | None:
        """Returns the function that decodes a part; None for one that stays bytes.

        The same function each time. It raises `DecodingError`, which names the part and says what
        the bytes look like, or `ImportError` for a format whose package is not installed.
        """
        try:
            return self._decoders[part]
        except KeyError:
            decoder = self._decoders[part] = self._make_decoder(part)
            return decoder

    def decode(self, fname: str, raw: bytes) -> Any:
        """Decodes one part.

        Args:
            fname: Name of the part or of a file; only the text after its last dot counts.
            raw: Its content.

        Returns:
            The value, or `raw` itself for a part that stays bytes.

        Raises:
            DecodingError: The content is not what the name says.
        """
        # Not by the whole name: the table of decoders would grow with every file.
        stem = fname.removesuffix(".gz")
        before, _, extension = stem.rpartition(".")
        if extension.isdecimal():
            extension = before.rpartition(".")[2]
        decoder = self.decoder_of(extension + fname[len(stem) :])
        if decoder is None:
            return raw
        try:
            return decoder(raw)
        except DecodingError as error:
            add_note(error, f"file {fname!r}")
            raise

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Decodes all parts of a sample.

        Args:
            sample: Parts by name. Service entries (`__key__`, ...) and values that are not bytes
                are passed on.

        Returns:
            A new dict; a `CrudeSample` if `sample` is one.

        Raises:
            DecodingError: The content of a part is not what its name says; names the part.
        """
        decoded: dict[str, Any] = CrudeSample() if isinstance(sample, CrudeSample) else {}
        for part, value in sample.items():
            if isinstance(value, bytes) and not part.startswith("__"):
                decoder = self.decoder_of(part)
                decoded[part] = value if decoder is None else decoder(value)
            else:
                decoded[part] = value
        return decoded

    def _make_decoder(self, part: str) -> PartDecoder | None:
        if part == "gz" or part.endswith(".gz"):
            return _Unzipped(part, self.max_bytes, self._plain_decoder(part[:-3]))
        return self._plain_decoder(part)

    def _plain_decoder(self, part: str) -> PartDecoder | None:
        stem, _, extension = part.rpartition(".")
        if stem and extension.isdecimal():  # one of several, as `jpg.0`
            extension = stem.rpartition(".")[2]
        lower = extension.lower()
        if lower in IMAGE_EXTENSIONS:
            if self.image_decode == UNDECODED:
                return None
            return self._image_decoder(part)
        if lower in AV_EXTENSIONS:
            return None
        if extension in _DECODERS:
            what, decode = _DECODERS[extension]
            return _guarded(part, what, decode, self.max_bytes)
        if extension in _LIMITED_DECODERS:
            what, limited = _LIMITED_DECODERS[extension]
            decode = functools.partial(limited, max_bytes=self.max_bytes)
            return _guarded(part, what, decode, self.max_bytes)
        if extension in _PICKLE_DECODERS:
            if extension not in self.unpickle:
                _warn_of_pickle(extension)
                return None
            return _guarded(part, "a pickle", _PICKLE_DECODERS[extension], self.max_bytes)
        if self.guess_content and self.image_decode != UNDECODED:
            return _GuessedPart(self._image_decoder(part))
        return None

    def _image_decoder(self, part: str) -> _ImagePart:
        return _ImagePart(part, image_decoder(self.image_decode, self.max_bytes))


@functools.cache
def _warn_of_pickle(extension: str) -> None:
    """Logs once, in the first worker only, that a part stays bytes."""
    worker = get_worker_info()
    if worker is None or worker.id == 0:
        logger.warning(
            "A part %r stays bytes, since unpickling it runs whatever code the dataset holds. For "
            "data that you trust, set decoder = SampleDecoder(unpickle=(%r,)) on the task encoder",
            extension,
            extension,
        )


def _guarded(part: str, what: str, decode: PartDecoder, max_bytes: int) -> PartDecoder:
    """Makes every failure of `decode` a `DecodingError`."""

    def decode_part(raw: bytes) -> Any:
        try:
            if len(raw) > max_bytes:
                check_size(len(raw), max_bytes, "as it is stored")
            return decode(raw)
        except ImportError:  # not the fault of the sample
            raise
        except TooLargeError as error:
            raise DecodingError(f"part {part!r} of {len(raw):,} bytes {error}") from error
        # A recursion or an allocation that the content asks for is the fault of the sample, too.
        except Exception as error:
            raise DecodingError(_describe(part, what, raw, error)) from error

    return decode_part


class _ImagePart:
    """Decodes an image; tells a damaged image from what is no image."""

    def __init__(self, part: str, decode: PartDecoder) -> None:
        extension = part.rpartition(".")[2].lower()
        name = _FORMAT_NAMES.get(extension, extension.upper())
        self.part = part
        self.what = f"{'an' if name[0] in 'AEFHILMNORSX' else 'a'} {name}"
        self.decode = decode

    def __call__(self, raw: bytes) -> Any:
        try:
            return self.decode(raw)
        except ImportError:
            raise
        except TooLargeError as error:
            raise DecodingError(f"part {self.part!r} of {len(raw):,} bytes {error}") from error
        except Exception as error:
            found = image_format(raw)
            if found is None:  # Pillow's text names nothing but the address of a stream
                text = _describe(self.part, self.what, raw, None)
            else:
                text = f"part {self.part!r} is a broken {found} of {len(raw):,} bytes: {error}"
            raise DecodingError(text) from error


class _GuessedPart:
    """Decodes what looks like an image, and leaves the rest bytes."""

    def __init__(self, image: _ImagePart) -> None:
        self.image = image

    def __call__(self, raw: bytes) -> Any:
        return raw if image_format(raw) is None else self.image(raw)


class _Unzipped:
    """Unpacks gzip, then decodes with the decoder of the part inside, if it has one."""

    def __init__(self, part: str, max_bytes: int, inner: PartDecoder | None) -> None:
        unzip = functools.partial(decode_limits.gunzip, max_bytes=max_bytes)
        self.unzip = _guarded(part, "gzip data", unzip, max_bytes)
        self.inner = inner

    def __call__(self, raw: bytes) -> Any:
        unzipped = self.unzip(raw)
        return unzipped if self.inner is None else self.inner(unzipped)


def _describe(part: str, what: str, raw: bytes, error: Exception | None) -> str:
    """Describes the fault: `part 'jpg' is not a JPEG (starts with 3c 68 74 6d)`."""
    if not raw:
        return f"part {part!r} is empty (0 bytes), not {what}"
    text = f"part {part!r} is not {what} (starts with {raw[:4].hex(' ')})"
    return text if error is None else f"{text}: {error}"


def _load_torch(raw: bytes) -> Any:
    # The variable is webdataset's, and has the same meaning there.
    weights_only = os.environ.get("WDS_PYTORCH_WEIGHTS_ONLY", "0") == "1"
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=weights_only)


_DECODERS: dict[str, tuple[str, PartDecoder]] = {
    **dict.fromkeys(("txt", "text", "transcript"), ("UTF-8 text", bytes.decode)),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), ("a whole number", int)),
    "npy": ("a plain npy array", decode_limits.npy),
}

_LIMITED_DECODERS: dict[str, tuple[str, Callable[..., Any]]] = {
    **dict.fromkeys(("json", "jsn"), ("JSON", decode_limits.json_value)),
    "npz": ("an npz archive of plain arrays", decode_limits.npz),
    **dict.fromkeys(("ten", "tb"), ("tenbin data", decode_limits.tenbin)),
    **dict.fromkeys(("mp", "msg"), ("msgpack data", decode_limits.msgpack)),
    "cbor": ("CBOR data", decode_limits.cbor),
}

_PICKLE_DECODERS: dict[str, PartDecoder] = {
    "pkl": pickle.loads,
    "pickle": pickle.loads,
    "pyd": pickle.loads,
    "pth": _load_torch,
}
