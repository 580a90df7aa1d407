"""Cookers: functions that convert crude samples to typed samples."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

from energon_lite.core.samples import CrudeSample, SourceInfo
from energon_lite.core.stacking import SERVICE_FIELDS
from energon_lite.names.energon_modules import energon_names

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

__getattr__ = energon_names(__name__)


@dataclasses.dataclass(frozen=True)
class Cooker(Generic[T]):
    """A function that converts a `CrudeSample`, and the subflavors of the datasets that it is for.

    Attributes:
        cook: Called as `cook(crude_sample, **aux)`, with the file stores of the dataset.
        has_subflavors: The dataset must have these subflavors; None for any dataset.
    """

    cook: Callable[..., T]
    has_subflavors: Mapping[str, Any] | None = None

    @property
    def need_primary(self) -> bool:
        """Whether the function gets the file store of its dataset, as `primary`."""
        return get_cooker_need_primary(self.cook)

    @cached_property
    def need_cache(self) -> bool:
        """Whether the function gets the cache pool of the loader, as `cache`."""
        return get_cooker_need_cache(self.cook)

    def is_match(self, subflavors: Mapping[str, Any] | None) -> bool:
        """Returns whether the cooker is for a dataset with these subflavors."""
        return dict(self.has_subflavors or {}).items() <= dict(subflavors or {}).items()


@overload
def cooker(fn: F, *, need_cache: bool = False, need_primary: bool = False) -> F: ...


@overload
def cooker(
    fn: None = None, *, need_cache: bool = False, need_primary: bool = False
) -> Callable[[F], F]: ...


def cooker(fn: Any = None, *, need_cache: bool = False, need_primary: bool = False) -> Any:
    """Marks a cook function; used bare or with arguments.

    Args:
        fn: The function.
        need_cache: Whether the function gets the cache pool of the loader, as `cache`.
        need_primary: Whether the function gets the file store of its dataset, as `primary`.
    """

    def mark(function: Any) -> Any:
        function.__cooker_need_primary__ = need_primary
        function.__cooker_need_cache__ = need_cache
        return function

    return mark if fn is None else mark(fn)


def get_cooker_need_cache(fn: Callable[..., Any]) -> bool:
    """Returns whether `@cooker` marks a function as one that needs the cache pool of the loader."""
    return bool(getattr(fn, "__cooker_need_cache__", False))


def get_cooker_need_primary(fn: Callable[..., Any]) -> bool:
    """Returns whether `@cooker` marks a function as one that needs the store of its dataset."""
    return bool(getattr(fn, "__cooker_need_primary__", False))


def basic_sample_keys(
    crude_sample: CrudeSample | Mapping[str, Any], additional_source_info: Sequence[SourceInfo] = ()
) -> dict[str, Any]:
    """Returns the service fields of a crude sample, to be passed to the constructor of a sample.

    Args:
        crude_sample: The sample; fields that it lacks are omitted.
        additional_source_info: Further sources that the cooker read; appended.

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
    """Returns the first cooker that is for a dataset.

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
            "`cookers = [Cooker(cook_function)]`, or a dataset of tars a sample_type and field_map."
        )
    wanted = ", ".join(_describe(candidate) for candidate in cookers)
    raise ValueError(
        f"{where}: No cooker found for subflavors: {dict(subflavors or {})}. Registered: {wanted}. "
        "Correct the subflavors, or add a cooker without has_subflavors as the last one."
    )


def check_takes(cooker: Cooker[Any], names: Collection[str], where: str) -> None:
    """Checks that a cooker takes a crude sample, file stores, and a cache pool.

    Args:
        cooker: the cooker.
        names: those of the arguments after the crude sample.
        where: The dataset, for errors.

    Raises:
        TypeError: It lacks a parameter, or has one that nothing is passed for.
    """
    try:
        signature = inspect.signature(cooker.cook)
    except ValueError:  # a function of C without one
        return
    try:
        signature.bind(None, **dict.fromkeys(names))
    except TypeError as error:
        arguments = ", ".join(["crude_sample", *(f"{name}=..." for name in names)])
        raise TypeError(
            f"{where}: the cooker {_describe(cooker)} is called with ({arguments}): {error}. The "
            "names are those of 'aux' of the dataset; `primary` comes with need_primary=True, and "
            "`cache` with need_cache=True. Correct the names, or the parameters of the function"
        ) from None


def _describe(candidate: Cooker[Any]) -> str:
    name = getattr(candidate.cook, "__qualname__", repr(candidate.cook))
    return f"{name} for {dict(candidate.has_subflavors or {})}"
