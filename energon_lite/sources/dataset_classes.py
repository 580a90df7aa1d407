"""Makes samples of parts: by a field map, by a function, crude, or by a class of the user's.

Users subclass `DefaultDecoderWebdatasetFactory` and set `__sample_type__`, or write `dataset.yaml`
and never see a factory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from os import PathLike
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.samples import CrudeSample, Sample, make_crude
from energon_lite.core.stacking import LOSS_WEIGHT
from energon_lite.core.state import JSON
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.formats.field_access import FieldMap, check_fields
from energon_lite.sources.sample_loader import (
    FieldMapMaker,
    FileFunction,
    LoaderMaker,
    PartFilter,
    SampleLoader,
    SampleMaker,
)
from energon_lite.sources.webdataset import BaseWebdatasetFactory

T_sample = TypeVar("T_sample")

AnyPath = str | PathLike[str]
Decode = Callable[[dict[str, Any]], dict[str, Any]]
Wanted = Callable[[str], bool] | Collection[str] | None

_DECODER = SampleDecoder()
_DECODER_SETTINGS = ("image_decode", "av_decode", "video_decode_audio", "guess_content")
# Sources of one blend often have the same field map.
_makers: WeakValueDictionary[tuple[type, str], FieldMapMaker] = WeakValueDictionary()


class DefaultGenericWebdatasetFactory(BaseWebdatasetFactory[T_sample]):
    """Samples of undecoded parts, by a field map, by a function, or by an own `load_sample`.

    Args:
        path: the folder.
        subflavors: tags; they go over those of `dataset.yaml`.
        field_map: which part, or JSON entry, goes into which field.
        sample_loader: makes a dict of fields of a dict of parts; or where that function is, as
            `file.py:function` in `.nv-meta`.
        part_filter: which parts are read, as names or as a function; goes with `sample_loader`.
        sample_type: class of the samples; by default `__sample_type__`.
        kwargs: as in `BaseWebdatasetFactory`.

    Raises:
        TypeError: There is no sample type.
        DatasetFormatError: The arguments contradict each other, or do not fit the sample type.
    """

    _decoder: SampleDecoder | Decode | None = None

    def __init__(
        self,
        path: AnyPath,
        *,
        subflavors: Mapping[str, Any] | None = None,
        field_map: Mapping[str, str | list[str]] | None = None,
        sample_loader: str | Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        part_filter: str | Wanted = None,
        sample_type: type[Sample] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(sample_loader, str):
            sample_loader = FileFunction.of(path, sample_loader, "sample_loader")
        if isinstance(part_filter, str):
            part_filter = FileFunction.of(path, part_filter, "part_filter")
        super().__init__(path, subflavors=subflavors, part_filter=part_filter, **kwargs)
        self.sample_type = sample_type or self.__sample_type__
        self._field_map: Any = field_map
        self._maker = self._make_maker(field_map, sample_loader, part_filter)

    def _make_maker(
        self,
        field_map: Mapping[str, str | list[str]] | None,
        sample_loader: Callable[[dict[str, Any]], dict[str, Any]] | None,
        part_filter: Wanted,
    ) -> SampleMaker | None:
        sample_type = self.sample_type
        if field_map is None and sample_loader is None and not self._is_plain:
            return None
        if sample_type is None:
            raise TypeError(f"{type(self).__name__} must set __sample_type__ to its sample class")
        where = f"dataset of {sample_type.__name__}"
        if (field_map is None) == (sample_loader is None):
            raise DatasetFormatError(
                f"{where} needs exactly one of field_map and sample_loader, "
                f"and has {'both' if field_map else 'neither'}"
            )
        if sample_loader is not None:
            if part_filter is None:
                raise DatasetFormatError(
                    f"{where}: sample_loader needs part_filter, the parts that it reads"
                )
            return LoaderMaker(sample_type, sample_loader, self.seed)
        if part_filter is not None:
            raise DatasetFormatError(
                f"{where}: part_filter goes with sample_loader only; field_map names its parts"
            )
        equal = sample_type, repr(field_map)
        maker = _makers.get(equal)
        if maker is None:
            fields = FieldMap(field_map)
            check_fields(fields, sample_type, "field_map")
            maker = _makers[equal] = FieldMapMaker(sample_type, fields)
        self._wants = PartFilter(maker.field_map.parts)
        return maker

    @property
    def _is_plain(self) -> bool:
        """Whether parts become samples as this library does it, without code of the user."""
        own = (type(self).load_sample, type(self).sample_filter)
        is_ours = all(method.__module__.startswith("energon_lite.") for method in own)
        return is_ours and (self._decoder is None or isinstance(self._decoder, SampleDecoder))

    def load_sample(self, sample: dict[str, Any]) -> T_sample:
        """Makes a sample of its parts, as they are."""
        maker = self._maker
        if maker is None:
            raise DatasetFormatError(
                f"{type(self).__name__} has neither field_map nor sample_loader; make the sample "
                "in load_sample, without super()"
            )
        service = {name: sample[name] for name in ("__key__", "__restore_key__", "__sources__")}
        service |= {"__subflavors__": self.subflavors.copy(), LOSS_WEIGHT: self.loss_weight}
        parts = {name: value for name, value in sample.items() if not name.startswith("__")}
        made: T_sample = maker(parts, service)
        return made

    def sample_loader(self) -> SampleLoader:
        """Makes what turns tar bytes into samples."""
        if not self._is_plain:
            return super().sample_loader()
        decoder: Any = self._decoder
        assert self._maker is not None
        return SampleLoader(self.path, self._wants, decoder, self._maker, self.subflavors)

    def sample_settings(self) -> dict[str, JSON]:
        """Returns sample type, decoder and field map; a `sample_loader` cannot be compared."""
        decoder = self._decoder
        settings: dict[str, JSON] = {
            "decoder": None if decoder is None else type(decoder).__qualname__,
            "sample_type": self.sample_type.__name__ if self.sample_type else None,
            "field_map": self._field_map,
        }
        if isinstance(decoder, SampleDecoder):
            settings["decoder"] = decoder.config()
        return settings if self._is_plain else {**super().sample_settings(), **settings}


class DefaultDecoderWebdatasetFactory(DefaultGenericWebdatasetFactory[T_sample]):
    """A base for the user's dataset classes: set `__sample_type__` and name it in dataset.yaml.

    A subclass may set `_decoder` to any function from a dict of parts to a dict of values, such as
    webdataset's `Decoder`, or override `load_sample`.

    Args:
        path: the folder.
        decoder: how parts become values; None leaves bytes.
        auto_decode: False leaves bytes, too.
        kwargs: as in `DefaultGenericWebdatasetFactory`; `image_decode`, `av_decode`,
            `video_decode_audio` and `guess_content`, which classes for Energon 6 pass, make a
            `SampleDecoder` that replaces `decoder`, and are attributes as well.
    """

    def __init__(
        self,
        path: AnyPath,
        *,
        decoder: SampleDecoder | Decode | None = _DECODER,
        auto_decode: bool = True,
        **kwargs: Any,
    ) -> None:
        settings = {name: kwargs.pop(name) for name in _DECODER_SETTINGS if name in kwargs}
        if settings:
            decoder = SampleDecoder(**settings)
        for name in _DECODER_SETTINGS:
            setattr(self, name, getattr(decoder, name, getattr(_DECODER, name)))
        if self._decoder is None:  # a subclass may have set its own before
            self._decoder = decoder if auto_decode else None
        super().__init__(path, **kwargs)

    @property
    def decoder(self) -> SampleDecoder | Decode | None:
        """Makes values of parts; None for bytes."""
        return self._decoder

    def load_sample(self, sample: dict[str, Any]) -> T_sample:
        """Decodes the parts and makes a sample of them."""
        return super().load_sample(sample if self._decoder is None else self._decoder(sample))


class StandardWebdatasetFactory(DefaultDecoderWebdatasetFactory[T_sample]):
    """Typed samples by a field map, or by a function of the user.

    Args:
        path: the folder.
        sample_type: class of the samples.
        kwargs: as in `DefaultDecoderWebdatasetFactory`.
    """

    def __init__(self, path: AnyPath, *, sample_type: type[Sample], **kwargs: Any) -> None:
        super().__init__(path, sample_type=sample_type, **kwargs)


class CrudeWebdataset(DefaultDecoderWebdatasetFactory[CrudeSample]):
    """Untyped samples, dicts of decoded parts, for cookers.

    Args:
        path: the folder.
        kwargs: as in `DefaultDecoderWebdatasetFactory`; `part_filter` may be set without
            `sample_loader`, and all parts are read by default.
    """

    __sample_type__: ClassVar[type[Any] | None] = CrudeSample

    def __init__(self, path: AnyPath, **kwargs: Any) -> None:
        if "sample_loader" in kwargs or "field_map" in kwargs:
            raise ValueError(
                f"{path}: a crude dataset has no sample_loader or field_map; "
                "cook its samples in the task encoder, or name a sample_type"
            )
        super().__init__(path, **kwargs)

    def _make_maker(self, *_: Any) -> SampleMaker:
        return make_crude

    def sample_settings(self) -> dict[str, JSON]:
        """Returns the decoder."""
        settings = super().sample_settings()
        return {k: v for k, v in settings.items() if k not in ("sample_type", "field_map")}
