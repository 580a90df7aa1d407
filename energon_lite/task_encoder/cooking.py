"""Cookers: functions that make typed samples of crude ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

from energon_lite.core.samples import CrudeSample, SourceInfo
from energon_lite.core.stacking import SERVICE_FIELDS

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_NEED_CACHE = "__cooker_need_cache__"
_NEED_PRIMARY = "__cooker_need_primary__"


@dataclasses.dataclass(frozen=True)
class Cooker(Generic[T]):
    """A function that makes a sample of a `CrudeSample`, and the datasets that it is for.

    Attributes:
        cook: Called as `cook(crude_sample, **aux)`, where aux are the auxiliary data sources of
            the dataset, with `cache` and `primary` where the `cooker` decorator asks for them.
        has_subflavors: The dataset must have these subflavors; None for any dataset.
    """

    cook: Callable[..., T]
    has_subflavors: Mapping[str, Any] | None = None

    @property
    def need_cache(self) -> bool:
        """Whether the function wants the cache pool as `cache`."""
        return bool(getattr(self.cook, _NEED_CACHE, False))

    @property
    def need_primary(self) -> bool:
        """Whether the function wants the primary file store as `primary`."""
        return bool(getattr(self.cook, _NEED_PRIMARY, False))

    def is_match(self, subflavors: Mapping[str, Any] | None) -> bool:
        """Tells whether the cooker is for a dataset with these subflavors."""
        if self.has_subflavors is None:
            return True
        given = subflavors or {}
        return all(
            key in given and given[key] == value for key, value in self.has_subflavors.items()
        )


@overload
def cooker(fn: F, *, need_cache: bool = False, need_primary: bool = False) -> F: ...


@overload
def cooker(
    fn: None = None, *, need_cache: bool = False, need_primary: bool = False
) -> Callable[[F], F]: ...


def cooker(fn: Any = None, *, need_cache: bool = False, need_primary: bool = False) -> Any:
    """Says what a cook function wants to be given; used bare or with arguments.

    Args:
        fn: The function.
        need_cache: Pass the cache pool as `cache`.
        need_primary: Pass the primary file store as `primary`.
    """

    def decorate(function: F) -> F:
        setattr(function, _NEED_CACHE, need_cache)
        setattr(function, _NEED_PRIMARY, need_primary)
        return function

    return decorate if fn is None else decorate(fn)


def basic_sample_keys(
    crude_sample: CrudeSample | Mapping[str, Any],
    additional_source_info: Sequence[SourceInfo] = (),
) -> dict[str, Any]:
    """Gives the service fields of a crude sample, to be passed to the constructor of a sample.

    Args:
        crude_sample: The sample; fields that it does not have are left out.
        additional_source_info: Sources that the cooker read besides; put at the end.

    Example:
        >>> basic_sample_keys(CrudeSample(__key__="a", __restore_key__=("Webdataset", 0), txt="A"))
        {'__key__': 'a', '__restore_key__': ('Webdataset', 0)}
    """
    fields = {name: value for name, value in crude_sample.items() if name in SERVICE_FIELDS}
    if additional_source_info:
        fields["__sources__"] = (*(fields.get("__sources__") or ()), *additional_source_info)
    return fields


def find_cooker(
    cookers: Sequence[Cooker[Any]], subflavors: Mapping[str, Any] | None, where: str
) -> Cooker[Any]:
    """Gives the first cooker that is for a dataset.

    Args:
        cookers: Of the task encoder.
        subflavors: Of the dataset.
        where: The dataset, for errors.

    Raises:
        ValueError: There is no cooker at all, or none for these subflavors.
    """
    for candidate in cookers:
        if candidate.is_match(subflavors):
            return candidate
    if not cookers:
        raise ValueError(
            f"{where}: crude dataset found, but no cookers registered. Give the task encoder "
            "`cookers = [Cooker(cook_function)]`, or the dataset a sample_type and field_map."
        )
    wanted = ", ".join(_describe(candidate) for candidate in cookers)
    raise ValueError(
        f"{where}: No cooker found for subflavors: {dict(subflavors or {})}. Registered: {wanted}. "
        "Correct the subflavors, or add a cooker without has_subflavors as the last one."
    )


def _describe(candidate: Cooker[Any]) -> str:
    name = getattr(candidate.cook, "__qualname__", repr(candidate.cook))
    return f"{name} for {dict(candidate.has_subflavors or {})}"
