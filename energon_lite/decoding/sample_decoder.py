"""Decodes the parts of a sample by their names."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
import pickle
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.utils.data import get_worker_info

from energon_lite.core.arguments import at_least
from energon_lite.core.errors import DecodingError, add_note, did_you_mean
from energon_lite.core.file_store import FileStoreDecoder
from energon_lite.core.samples import CrudeSample
from energon_lite.decoding import images, part_formats
from energon_lite.decoding.image_size import ImageSize
from energon_lite.names.energon_modules import LazyFunction
from energon_lite.storage.files import warn_once

PartDecoder = Callable[[bytes], Any]
AVDecoderType = Literal["torch", "AVDecoder", "pyav", "bytes"]

# Names in errors: "part 'jpe' is not a JPEG".
_FORMAT_NAMES = {**dict.fromkeys(("jpg", "jpe", "jfif"), "JPEG"), "tif": "TIFF", "webp": "WebP"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleDecoder(FileStoreDecoder):
    """Decodes parts by the text after the last dot of their names (`seg.png` is a PNG).

    If that is a number, it is the text before it that counts (`jpg.0` is a JPEG).

    | part | becomes |
    |---|---|
    | `txt text transcript` | str (UTF-8) |
    | `json jsn` | the value of the JSON |
    | `cls cls2 index inx id` | int |
    | `jpg png webp avif gif tif bmp ...`, in capitals too | image, by `image_decode` |
    | `npy`, `npz` | numpy array, dict of them |
    | `ten tb`, `mp msg`, `cbor` | tenbin, msgpack, CBOR |
    | `X.gz` | as part X, unpacked first |
    | `pkl pickle pyd pth` | bytes, and a warning, unless named in `unpickle` |
    | `mp4 avi mov webm mkv flac mp3 wav flv m4a`, in capitals too | by `av_decode` |
    | anything else | bytes |

    In tars the names of parts have no case: `000.TXT` is part `txt`. HEIC requires pillow-heif.

    Images: a mode without prefix makes a numpy array (H, W, C), with `torch` a tensor (C, H, W),
    with `pil` a Pillow image; the suffix 8 makes uint8, otherwise float32 in [0, 1]. Grey modes
    (`l`) have no channel axis: (H, W). Every kind of image works in every mode; of 16-bit images
    the upper byte is taken. The image is recognised by its content, so a PNG in a `jpg` part works.

    Attributes:
        image_decode: One of `l8 rgb8 rgba8 l rgb rgba`, these with `torch` before them, `torch`
            (as `torchrgb`), or `pill pil pilrgb pilrgba`. With `bytes` images stay as they are, for
            a later hook to decode: `SampleDecoder(...).decode("jpg", raw)`.
        image_size: Limits to which larger images are made smaller, in proportion: a dict of one or
            more of `shortest_edge`, `longest_edge` and `max_pixels`, or a number for the first of
            them. Images are resized with a bicubic filter and antialiasing, and never made larger;
            JPEGs are decoded at 1/2, 1/4 or 1/8 of their size before.
        av_decode: What audio and video become: `AVDecoder`, from which a hook takes clips, `torch`
            for `AVData` with all frames or samples, `pyav` for PyAV's open container; they need
            `pip install energon_lite[av]`. With `bytes` they stay as they are.
        video_decode_audio: Whether `torch` decodes the audio of videos, too.
        guess_content: Whether parts with an unknown name are decoded when their first bytes are
            those of an image, audio or video.
        max_bytes: Bytes that a part may have when it is decoded; a larger one is a broken sample.
            For images the pixels count, and for JSON, msgpack and CBOR an estimate. Parts that stay
            bytes are not limited.
        unpickle: Which of `pkl`, `pickle`, `pyd`, `pth` are decoded. Unpickling runs whatever code
            the dataset holds: name them only for data that you trust.

    Raises:
        ValueError: A setting has a value that does not exist.
    """

    _av_part_decoder = LazyFunction("energon_lite.extras.media.av_decoder:av_part_decoder")
    image_decode: str = "torchrgb"
    av_decode: str = "AVDecoder"
    video_decode_audio: bool = False
    guess_content: bool = False
    unpickle: tuple[str, ...] = ()
    max_bytes: int = part_formats.MAX_DECODED_BYTES
    image_size: ImageSize | Mapping[str, int] | int | None = None
    _decoders: dict[str, PartDecoder | None] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks the settings."""
        if self.image_decode not in (*images.IMAGE_MODES, images.UNDECODED):
            images.image_decoder(self.image_decode)  # raises, with the closest mode
        if self.av_decode not in (*part_formats.AV_MODES, images.UNDECODED):
            hint = did_you_mean(self.av_decode, (*part_formats.AV_MODES, images.UNDECODED))
            raise ValueError(f"av_decode: unknown mode {self.av_decode!r}.{hint}")
        wanted: Any = self.unpickle  # a list, or a single name, is taken as well
        names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
        for name in names:
            if name not in _PICKLE_DECODERS:
                hint = did_you_mean(name, _PICKLE_DECODERS)
                raise ValueError(f"unpickle: {name!r} is not a part that is unpickled.{hint}")
        object.__setattr__(self, "unpickle", names)
        object.__setattr__(self, "max_bytes", at_least("max_bytes", self.max_bytes))
        if self.image_size is not None:
            if self.image_decode == images.UNDECODED:
                raise ValueError(
                    f"image_size={self.image_size!r} has no effect with image_decode='bytes'"
                )
            object.__setattr__(self, "image_size", ImageSize.of(self.image_size))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the settings only."""
        return functools.partial(type(self), **self._settings()), ()

    def _settings(self) -> dict[str, Any]:
        names = (field.name for field in dataclasses.fields(self) if field.init)
        return {name: getattr(self, name) for name in names}

    def config(self) -> dict[str, Any]:
        """Returns the settings for the configuration; the last two only if they are not default."""
        settings = {**self._settings(), "unpickle": list(self.unpickle)}
        if self.max_bytes == part_formats.MAX_DECODED_BYTES:
            del settings["max_bytes"]
        del settings["image_size"]
        return settings if self.limits is None else {**settings, "image_size": self.limits.config()}

    @property
    def limits(self) -> ImageSize | None:
        """The limits of `image_size`."""
        return None if self.image_size is None else ImageSize.of(self.image_size)

    def decoder_of(self, part: str) -> PartDecoder | None:
        """Returns the function that decodes a part; None for one that stays bytes.

        The same function each time. It raises `DecodingError`, which names the part and the first
        bytes, or `ImportError` for a format whose package is not installed.
        """
        try:
            return self._decoders[part]
        except KeyError:
            decoder = self._decoders[part] = self._make_decoder(part)
            return decoder

    def is_text(self, part: str, num_bytes: int) -> bool:
        """Returns whether a part of up to `num_bytes` becomes the text that it is in UTF-8."""
        decode, _ = _DECODERS.get(_extension_of(part), (None, ""))
        return (
            decode is bytes.decode and num_bytes <= self.max_bytes and type(self) is SampleDecoder
        )

    def decode(self, fname: str, raw: bytes) -> Any:
        """Decodes one part.

        Args:
            fname: Name of the part or of a file; only the text after its last dot counts.
            raw: Its content.

        Returns:
            The value, or `raw` itself for a part that stays bytes.

        Raises:
            DecodingError: The content does not match the name.
        """
        # Not by the whole name: the table of decoders would grow with every file.
        stem = fname.removesuffix(".gz")
        decoder = self.decoder_of(_extension_of(stem) + fname[len(stem) :])
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
            DecodingError: The content of a part does not match its name; names the part.
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
        if part != "gz" and not part.endswith(".gz"):
            return self._unzipped_decoder(part)
        gunzip = functools.partial(part_formats.gunzip, max_bytes=self.max_bytes)
        unzip = _guarded(part, gunzip, "gzip data", self.max_bytes)
        inner = self._unzipped_decoder(part[:-3])
        return unzip if inner is None else lambda raw: inner(unzip(raw))

    def _unzipped_decoder(self, part: str) -> PartDecoder | None:
        extension = _extension_of(part)
        if extension in _DECODERS:
            return _guarded(part, *_DECODERS[extension], self.max_bytes)
        if extension in _LIMITED_DECODERS:
            limited, what = _LIMITED_DECODERS[extension]
            decode = functools.partial(limited, max_bytes=self.max_bytes)
            return _guarded(part, decode, what, self.max_bytes)
        if extension in self.unpickle:
            return _guarded(part, _PICKLE_DECODERS[extension], "a pickle", self.max_bytes)
        if extension in _PICKLE_DECODERS:
            _warn_of_pickle(extension)
        else:
            return self._media_decoder(part, extension.lower())
        return None

    def _media_decoder(self, part: str, extension: str) -> PartDecoder | None:
        """Returns what decodes an image, audio or video: by its name, or by its first bytes."""
        image = av = None
        if self.image_decode != images.UNDECODED:
            decode = images.image_decoder(self.image_decode, self.limits, self.max_bytes)
            image = _guarded(part, decode)
        is_av = extension in part_formats.AV_EXTENSIONS
        if self.av_decode != images.UNDECODED and (is_av or self.guess_content):
            decode = self._av_part_decoder(self.av_decode, self.video_decode_audio, self.max_bytes)
            av = _guarded(part, decode, "audio or video")
        if extension in images.IMAGE_EXTENSIONS:
            return image
        if is_av:
            return av
        if not self.guess_content or (image is None and av is None):
            return None

        def guess(raw: bytes) -> Any:
            if images.image_format(raw) is not None:
                return raw if image is None else image(raw)
            return av(raw) if av is not None and part_formats.is_av(raw) else raw

        return guess


def _extension_of(part: str) -> str:
    """Returns the text after the last dot; before a number (`jpg.0`) the text in front of it."""
    stem, _, extension = part.rpartition(".")
    return stem.rpartition(".")[2] if stem and extension.isdecimal() else extension


def _warn_of_pickle(extension: str) -> None:
    """Warns once that a part stays bytes; of several workers, the first one does."""
    worker = get_worker_info()
    if worker is None or worker.id == 0:
        warn_once(
            f"A part {extension!r} stays bytes, since unpickling it runs whatever code the dataset "
            "holds. For data that you trust, set decoder = "
            f"SampleDecoder(unpickle=({extension!r},)) on the task encoder"
        )


def _guarded(
    part: str, decode: PartDecoder, what: str = "", max_bytes: float = math.inf
) -> PartDecoder:
    """Turns failures of `decode` into a `DecodingError`; without `what` it decodes images."""

    def decode_part(raw: bytes) -> Any:
        try:
            if len(raw) > max_bytes:
                part_formats.check_size(len(raw), int(max_bytes), "as it is stored")
            return decode(raw)
        except ImportError:  # not the fault of the sample
            raise
        except part_formats.RefusedPartError as error:
            raise DecodingError(f"part {part!r} of {len(raw):,} bytes {error}") from error
        # A recursion or an allocation that the content causes is the fault of the sample, too.
        except Exception as error:
            if isinstance(error, NameError) or (not what and _is_of_wrong_code(error)):
                raise
            text = _not(what, raw, error) if what else _not_image(part, raw, error)
            raise DecodingError(f"part {part!r} {text}") from error

    return decode_part


def _is_of_wrong_code(error: Exception) -> bool:
    """Whether this package itself raised an error that no content of an image causes there."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    is_ours = innermost.f_globals.get("__name__", "").startswith(__package__)
    return is_ours and isinstance(error, (AttributeError, TypeError))


def _not(what: str, raw: bytes, error: object = "") -> str:
    """Describes a part that cannot be decoded: `is not a JPEG (starts with 3c 68 74 6d)`."""
    if not raw:
        return f"is empty (0 bytes), not {what}"
    return f"is not {what} (starts with {raw[:4].hex(' ')}){error and f': {error}'}"


def _not_image(part: str, raw: bytes, error: Exception) -> str:
    """Describes an image that cannot be decoded: a corrupt image, or no image."""
    found = images.image_format(raw)
    if isinstance(error, images.NoPlugInError):
        return f"is {found}: {error}"
    if found is not None:
        # Where Pillow cannot identify an image, its text names the address of a stream.
        why = "its header cannot be read" if "BytesIO object at" in str(error) else error
        return f"is a broken {found} of {len(raw):,} bytes: {why}"
    extension = _extension_of(part).lower()
    name = _FORMAT_NAMES.get(extension, extension.upper())
    return _not(f"{'an' if name[0] in 'AEFHILMNORSX' else 'a'} {name}", raw)


def _load_torch(raw: bytes) -> Any:
    # The variable is webdataset's, and has the same meaning there.
    weights_only = os.environ.get("WDS_PYTORCH_WEIGHTS_ONLY", "0") == "1"
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=weights_only)


_DECODERS: dict[str, tuple[PartDecoder, str]] = {
    **dict.fromkeys(("txt", "text", "transcript"), (bytes.decode, "UTF-8 text")),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), (int, "a whole number")),
    "npy": (part_formats.npy, "a plain npy array"),
    **dict.fromkeys(("ten", "tb"), (part_formats.tenbin, "tenbin data")),
}

_LIMITED_DECODERS: dict[str, tuple[Callable[..., Any], str]] = {
    **dict.fromkeys(("json", "jsn"), (part_formats.json_value, "JSON")),
    "npz": (part_formats.npz, "an npz archive of plain arrays"),
    **dict.fromkeys(("mp", "msg"), (part_formats.msgpack, "msgpack data")),
    "cbor": (part_formats.cbor, "CBOR data"),
}

_PICKLE_DECODERS: dict[str, PartDecoder] = {
    **dict.fromkeys(("pkl", "pickle", "pyd"), pickle.loads),
    "pth": _load_torch,
}
