"""Describes what a sample, a batch or a dict holds: the kind of each field, and a short summary.

A description is plain data. A page and a terminal draw the same one.
"""

from __future__ import annotations

import dataclasses
import io
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from energon_lite.core.samples import SourceInfo, sources_of
from energon_lite.core.state import RestoreKey
from energon_lite.decoding.images import image_format, image_header
from energon_lite.decoding.part_formats import is_av
from energon_lite.extras.media.av_decoder import AVDecoder
from energon_lite.extras.media.media_metadata import AVMetadata
from energon_lite.extras.view.media_bytes import av_type
from energon_lite.extras.view.words import array_text, counted, size_text

Kind = Literal[
    "text", "number", "picture", "audio", "video", "json", "conversation", "tensor", "list",
    "bytes", "other",
]  # fmt: skip

# Entries of a list, or rows of a batch, that get a view each.
MAX_ITEMS = 32
_MAX_DEPTH = 4
# Written as far as the metadata is known.
_AV_TEXTS: dict[Kind, tuple[str, ...]] = {
    "video": (
        "{video_width} x {video_height}", "{video_duration:.1f} s", "{video_fps:.3g} frames/s",
        "with audio, {audio_sample_rate:,} Hz",
    ),
    "audio": ("{audio_duration:.1f} s", "{audio_sample_rate:,} Hz"),
}  # fmt: skip
# The names of speaker and text in a turn of a conversation.
_TURNS = (("role", "content"), ("from", "value"), ("sender", "text"))


@dataclasses.dataclass(frozen=True)
class FieldView:
    """One field of a sample.

    Attributes:
        name: of the field, or the number of an entry of a list.
        kind: how it is drawn. A `picture` is a tensor (C, H, W), an array (H, W, C), a Pillow
            image or the bytes of a file; `audio` and `video` are bytes, `AVDecoder` or metadata; a
            `conversation` is a list of turns (see `turns_of`); a `list` has `items`.
        summary: size, shape, length or duration in a few words.
        value: the value itself.
        items: views of the entries of a `list`, the first `MAX_ITEMS` of them.
        longest_edge: of a picture, in pixels.
    """

    name: str
    kind: Kind
    summary: str
    value: Any = dataclasses.field(repr=False)
    items: tuple[FieldView, ...] = ()
    longest_edge: int = 0


@dataclasses.dataclass(frozen=True)
class SampleFacts:
    """The service fields of a sample or batch.

    Attributes:
        type_name: name of its class.
        keys: its key; of a batch, the keys of its samples.
        restore_key: from this the pipeline can re-create it; empty where there is none.
        subflavors: the tags of each sample.
        sources: where its bytes come from.
        loss_weights: of each sample.
    """

    type_name: str
    keys: tuple[str, ...]
    restore_key: RestoreKey
    subflavors: tuple[Mapping[str, Any], ...]
    sources: tuple[SourceInfo, ...]
    loss_weights: tuple[float, ...]


def fields_of(sample: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass, dict or NamedTuple by name; of others, one `value`.

    Fields of a dataclass that are not in its `repr` are omitted.
    """
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    if dataclasses.is_dataclass(sample):
        names = (field.name for field in dataclasses.fields(sample) if field.repr)
        return {name: getattr(sample, name, None) for name in names}
    if isinstance(sample, tuple) and hasattr(sample, "_asdict"):
        return dict(sample._asdict())
    return {"value": sample}


def field_views(sample: Any) -> list[FieldView]:
    """Describes the fields of a sample, a batch or a dict, without its service fields: `__key__`...

    Pictures that are bytes are not decoded, only their headers are read.
    """
    fields = fields_of(sample)
    return [view_of(name, value) for name, value in fields.items() if name[:2] != "__"]


def walked(views: Sequence[FieldView], path: str = "") -> Iterator[tuple[str, FieldView]]:
    """Yields views and the views inside of them, with their paths: "0", "1", "1-0", ..."""
    for number, view in enumerate(views):
        yield f"{path}{number}", view
        yield from walked(view.items, f"{path}{number}-")


def sample_facts(sample: Any) -> SampleFacts:
    """Returns the service fields of a sample, a batch or a dict, as far as it has them."""
    get: Any = sample.get if isinstance(sample, Mapping) else lambda n: getattr(sample, n, None)
    own = getattr(sample, "__keys__", None)  # of a pack
    return SampleFacts(
        type_name=type(sample).__name__,
        keys=tuple(map(str, own or _as_list(get("__key__")))),
        restore_key=tuple(get("__restore_key__") or ()),
        subflavors=tuple(tags for tags in _as_list(get("__subflavors__")) if tags),
        sources=tuple(s for s in sources_of(sample) if isinstance(s, SourceInfo)),
        loss_weights=tuple(map(float, _as_list(get("__loss_weight__")))),
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def view_of(name: str, value: Any, depth: int = 0) -> FieldView:
    """Describes one value.

    Args:
        name: of the field.
        value: any value.
        depth: lists and dicts that it lies in.
    """
    if isinstance(value, str):
        return FieldView(name, "text", counted(len(value), "character"), value)
    if value is None or isinstance(value, (bool, int, float, np.generic)):
        return FieldView(name, "number", "", value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _bytes_view(name, bytes(value))
    if isinstance(value, (AVDecoder, AVMetadata)):
        return _av_view(name, value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _array_view(name, value, depth)
    if hasattr(value, "getbands") and hasattr(value, "size"):  # Pillow's
        summary = f"{value.size[0]} x {value.size[1]}, {value.mode}"
        return FieldView(name, "picture", summary, value, longest_edge=max(value.size))
    return _nested_view(name, value, depth)


def turns_of(value: Any) -> list[tuple[str, Any]] | None:
    """Returns (speaker, content) of the turns of a conversation; None if it is none.

    A conversation is a list of dicts with `role` and `content` or `from` and `value`, or a dict
    that holds one as `messages`, `conversations` or `conversation`.
    """
    if isinstance(value, Mapping):
        names = ("messages", "conversations", "conversation")
        value = next((value[name] for name in names if name in value), None)
    if not isinstance(value, (list, tuple)) or not value:
        return None
    for speaker, content in _TURNS:
        if all(isinstance(t, Mapping) and speaker in t and content in t for t in value):
            return [(str(turn[speaker]), turn[content]) for turn in value]
    return None


def _is_picture(value: Any) -> bool:
    """Whether a tensor (C, H, W) or an array (H, W, C) or (H, W) can be drawn as a picture."""
    if value.ndim == 2:
        is_grey = isinstance(value, np.ndarray) and value.dtype == np.uint8
        return bool(is_grey and min(value.shape) > 1)
    axis = 0 if isinstance(value, torch.Tensor) else -1
    if value.ndim != 3 or value.shape[axis] not in (1, 3, 4) or 0 in value.shape:
        return False
    dtype = str(value.dtype).removeprefix("torch.")
    return dtype == "uint8" or dtype.startswith(("float", "bfloat"))


def _bytes_view(name: str, raw: bytes) -> FieldView:
    size = size_text(len(raw), 0)
    if image_format(raw[:32]) is not None:
        with suppress(ValueError, OSError):
            width, height, format_name, _ = image_header(io.BytesIO(raw))
            summary = f"{width} x {height} {format_name}, {size}"
            return FieldView(name, "picture", summary, raw, longest_edge=max(width, height))
    if is_av(raw[:32]) or raw[:4] == b"OggS":
        return _av_view(name, raw)
    return FieldView(name, "bytes", size, raw)


def _av_view(name: str, value: Any) -> FieldView:
    """Describes audio or video, which is bytes, an `AVDecoder` or metadata."""
    kind: Kind
    is_file = isinstance(value, bytes)
    size = [size_text(len(value), 0)] if is_file else []
    try:
        source = AVDecoder(io.BytesIO(value)) if is_file else value
        known = source.get_metadata(get_video_frame_count=False).to_dict()
    except Exception as error:  # PyAV is missing, or the content is broken
        if not is_file:
            return FieldView(name, "other", f"cannot be read: {error}"[:200], value)
        # A player may know better.
        kind = "audio" if av_type(value).startswith("audio") else "video"
        return FieldView(name, kind, size[0], value)
    kind = "video" if {"video_width", "video_fps"} & known.keys() else "audio"
    parts = []
    for text in _AV_TEXTS[kind]:
        with suppress(KeyError):
            parts.append(text.format_map(known))
    if "audio_channels" in known:
        parts.append(counted(known["audio_channels"], "channel"))
    return FieldView(name, kind, ", ".join([*parts, *size]), value)


def _array_view(name: str, value: Any, depth: int) -> FieldView:
    summary = array_text(value)
    if _is_picture(value):
        return FieldView(name, "picture", summary, value, longest_edge=max(value.shape))
    has_pictures = value.ndim > 3 and depth < _MAX_DEPTH and len(value) > 0
    items = _item_views(enumerate(value), depth) if has_pictures else ()
    if any(item.kind in ("picture", "list") for item in items):
        return FieldView(name, "list", summary, value, items)
    return FieldView(name, "tensor", summary, value)


def _nested_view(name: str, value: Any, depth: int) -> FieldView:
    """Describes a list, a dict, a dataclass, or anything else."""
    turns = turns_of(value)
    if turns is not None:
        return FieldView(name, "conversation", counted(len(turns), "turn"), value)
    if isinstance(value, Mapping):
        entries: Any = value.items()
        summary = counted(len(value), "key")
    elif isinstance(value, (list, tuple, set, frozenset)):
        listed = value if isinstance(value, Sequence) else [*value]
        entries, summary = enumerate(listed), counted(len(listed), "item")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries, summary = fields_of(value).items(), type(value).__name__
    else:
        return FieldView(name, "other", type(value).__name__, value)
    if is_plain(value):
        return FieldView(name, "json", summary, value)
    if depth >= _MAX_DEPTH:
        return FieldView(name, "other", summary, value)
    return FieldView(name, "list", summary, value, _item_views(entries, depth))


def _item_views(entries: Any, depth: int) -> tuple[FieldView, ...]:
    some = islice(entries, MAX_ITEMS)
    return tuple(view_of(str(name), entry, depth + 1) for name, entry in some)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value consists of texts, numbers, lists and dicts only."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return True
    if depth > 100:  # as deep as JSON may be that a page draws
        return False
    if isinstance(value, Mapping):
        are_names = all(isinstance(name, (str, int)) for name in value)
        return are_names and all(is_plain(entry, depth + 1) for entry in value.values())
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return all(is_plain(entry, depth + 1) for entry in value)
    return False


def short_text(value: Any, limit: int = 400, indent: int | None = None) -> str:
    """Writes a value of any kind in at most about `limit` characters; JSON also over lines."""
    if isinstance(value, str):
        text = value
    elif is_plain(value):
        encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, default=str)
        text = "".join(islice(encoder.iterencode(value), limit))
    else:
        text = reprlib.repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
