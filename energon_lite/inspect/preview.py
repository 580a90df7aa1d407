"""The samples of a dataset as text, one after the other."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch

from energon_lite.core.topology import WorkerConfig
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.metadataset.energon_api import load_dataset

_COLUMNS, _ROWS = 60, 12  # of a picture
_SHADES = " .:-=+*#%@"
_MAX_TEXT = 400
_HIDDEN = ("__restore_key__", "__sources__")


def sample_texts(
    path: str | os.PathLike[str], split_part: str, *, dataset_config: str | None = None,
    trust: bool | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yields each sample of a split as text: its fields, their types and values.

    Samples are decoded, but no task encoder or cooker runs.

    Args:
        path: a prepared folder, a JSONL file or a metadataset.
        split_part: the split.
        dataset_config: file name in `.nv-meta`, by default `dataset.yaml`.
        trust: whether code that the dataset names may be run.

    Raises:
        FileNotFoundError: The path does not exist.
        DatasetFormatError: It is not valid, or has no such split.
    """
    settings = {"dataset_config": dataset_config} if dataset_config else {}
    loaded = load_dataset(path, **settings).get_datasets(
        training=False, split_part=split_part, decoder=SampleDecoder(), trust=trust,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )  # fmt: skip
    for entry in loaded.datasets:
        for sample in entry.dataset.build():
            yield sample_text(sample)


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
