"""The samples of a dataset as text, one after the other."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from energon_lite.core.topology import WorkerConfig
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.extras.media.av_decoder import AVDecoder
from energon_lite.metadataset.build import build_training, build_validation
from energon_lite.metadataset.nodes import Blend, Leaf, walk
from energon_lite.metadataset.open import LeafOpener, open_node

_COLUMNS, _ROWS = 60, 12  # of a picture
_SHADES = " .:-=+*#%@"
_MAX_TEXT = 400
_HIDDEN = ("__restore_key__", "__sources__")


def sample_texts(
    path: str | os.PathLike[str], split_part: str, *, dataset_config: str | None = None,
    trust: bool | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yields the samples of a split as text: their fields, with types and values.

    Samples of a blend come in the order of a run, as many as its sources have. They are decoded,
    but no task encoder or cooker runs.

    Args:
        path: a prepared folder, a file of samples or a metadataset.
        split_part: the split.
        dataset_config: file name in `.nv-meta`, by default `dataset.yaml`.
        trust: whether code that the dataset names may be run.

    Raises:
        FileNotFoundError: The path does not exist.
        DatasetFormatError: It is not valid, or has no such split.
    """
    node = open_node(path, split_part, {"dataset_config": dataset_config} if dataset_config else {})
    is_by_tokens = any(isinstance(one, Blend) and one.unit == "tokens" for one in walk(node))
    is_blend = not isinstance(node, Leaf) and not is_by_tokens  # tokens need an encoder
    opener = LeafOpener(
        node=node, decoder=SampleDecoder(), settings={"trust": trust}, training=is_blend,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )  # fmt: skip
    make = build_training(opener, repeat=True) if is_blend else build_validation(node, opener)
    yield from map(sample_text, islice(make, sum(map(len, opener.factories))))


def sample_text(sample: Any) -> str:
    """Writes the fields of a sample, a line or a picture each."""
    fields = sample
    if dataclasses.is_dataclass(sample):
        fields = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
    lines = [f"{type(sample).__name__}"]
    for name, value in fields.items():
        if name not in _HIDDEN:
            lines.append(f" - {name} ({type(value)}): {_value_text(value)}")
            if isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[0] in (1, 3, 4):
                lines += [f"       {row}" for row in _picture_rows(value)]
    return "\n".join(lines)


def _value_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"shape {tuple(value.shape)}, {value.dtype}"
    if isinstance(value, AVDecoder):
        return ", ".join(f"{key} {entry}" for key, entry in value.get_metadata().to_dict().items())
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({len(text):,} characters)"


def _picture_rows(picture: torch.Tensor) -> list[str]:
    """Draws a picture (C, H, W) in characters, which are twice as high as wide."""
    grey = picture[:3].float().mean(0)
    grey = grey / (1 if picture.is_floating_point() else 255)
    size = (min(_ROWS, max(1, _COLUMNS * grey.shape[0] // (2 * grey.shape[1]))), _COLUMNS)
    small = torch.nn.functional.adaptive_avg_pool2d(grey[None], size)[0]
    shades = (small.clamp(0, 1) * (len(_SHADES) - 1)).round().long()
    return ["".join(_SHADES[shade] for shade in row) for row in shades.tolist()]
