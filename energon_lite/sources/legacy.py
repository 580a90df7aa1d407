"""Energon's old dataset classes, one for each sample type: `CaptioningWebdataset` and so on."""

from __future__ import annotations

import warnings
from os import PathLike
from typing import Any

from energon_lite.core import samples
from energon_lite.core.samples import Sample
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


class CaptioningWebdataset(_LegacyWebdataset):
    """Samples of type `CaptioningSample`."""

    __sample_type__ = samples.CaptioningSample


class ImageWebdataset(_LegacyWebdataset):
    """Samples of type `ImageSample`."""

    __sample_type__ = samples.ImageSample


class ImageClassificationWebdataset(_LegacyWebdataset):
    """Samples of type `ImageClassificationSample`."""

    __sample_type__ = samples.ImageClassificationSample


class InterleavedWebdataset(_LegacyWebdataset):
    """Samples of type `InterleavedSample`."""

    __sample_type__ = samples.InterleavedSample


class SimilarityInterleavedWebdataset(_LegacyWebdataset):
    """Samples of type `SimilarityInterleavedSample`."""

    __sample_type__ = samples.SimilarityInterleavedSample


class VQAWebdataset(_LegacyWebdataset):
    """Samples of type `VQASample`."""

    __sample_type__ = samples.VQASample


class VQAOCRWebdataset(_LegacyWebdataset):
    """Samples of type `VQAOCRSample`."""

    __sample_type__ = samples.VQAOCRSample


class MultiChoiceVQAWebdataset(_LegacyWebdataset):
    """Samples of type `MultiChoiceVQASample`."""

    __sample_type__ = samples.MultiChoiceVQASample


class OCRWebdataset(_LegacyWebdataset):
    """Samples of type `OCRSample`."""

    __sample_type__ = samples.OCRSample


class TextWebdataset(_LegacyWebdataset):
    """Samples of type `TextSample`."""

    __sample_type__ = samples.TextSample


class VidQAWebdataset(_LegacyWebdataset):
    """Samples of type `VidQASample`."""

    __sample_type__ = samples.VidQASample
