"""Energon's old dataset classes, one for each sample type: `CaptioningWebdataset` and so on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from os import PathLike
from typing import Any

from energon_lite.core.samples import SAMPLE_TYPES, Sample
from energon_lite.sources.dataset_classes import DefaultDecoderWebdatasetFactory


class _LegacyWebdataset(DefaultDecoderWebdatasetFactory[Sample]):
    """Warns that `sample_type` replaces the class."""

    def __init__(self, path: str | PathLike[str], **kwargs: Any) -> None:
        name = type(self).__name__
        warnings.warn(
            f"{name} is deprecated; write `sample_type: {{__module__: energon_lite, "
            f"__class__: {name.removesuffix('Webdataset')}Sample}}` in dataset.yaml",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__(path, **kwargs)


def _classes() -> Iterator[tuple[str, type[_LegacyWebdataset]]]:
    for kind in SAMPLE_TYPES.values():
        name = f"{kind.__name__.removesuffix('Sample')}Webdataset"
        members = {
            "__doc__": f"Samples of type `{kind.__name__}`.",
            "__module__": __name__,
            "__sample_type__": kind,
        }
        yield name, type(name, (_LegacyWebdataset,), members)


def __getattr__(name: str) -> type[_LegacyWebdataset]:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


globals().update(_classes())
