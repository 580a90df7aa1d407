"""`edataclass`, and what every sample and batch class gets with it: pinning and extending."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

import torch
from torch.utils.data._utils.collate import default_collate_fn_map
from typing_extensions import Self, dataclass_transform

from energon_lite.core.stacking import SERVICE_FIELDS, layout_of

T = TypeVar("T")


@overload
@dataclass_transform(kw_only_default=True)
def edataclass(cls: type[T], /) -> type[T]: ...


@overload
@dataclass_transform(kw_only_default=True)
def edataclass(cls: None = None, /, **options: Any) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(kw_only_default=True)
def edataclass(cls: type[T] | None = None, /, **options: Any) -> Any:
    """Makes a dataclass with slots and keyword-only fields; used bare or with options.

    `super()` without arguments works in its methods, which `dataclass(slots=True)` breaks before
    Python 3.14: it builds a second class, and methods keep pointing at the first.

    Args:
        cls: The class.
        options: As of `dataclasses.dataclass`; they win over `slots=True, kw_only=True`.

    Returns:
        The dataclass, or with options a decorator.
    """

    def decorate(original: type[T]) -> type[T]:
        made = dataclasses.dataclass(**{"slots": True, "kw_only": True, **options})(original)
        if made is not original:
            _point_super_at(made, instead_of=original)
        return made

    return decorate if cls is None else decorate(cls)


def _point_super_at(made: type, *, instead_of: type) -> None:
    """Makes `super()` and `__class__` in the methods of `made` mean `made`."""
    for function in _functions_of(vars(made).values()):
        for cell in function.__closure__ or ():
            try:
                if cell.cell_contents is instead_of:
                    cell.cell_contents = made
            except ValueError:  # the cell is empty
                continue


def _functions_of(members: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Yields the functions among class members, also inside properties and decorators."""
    for member in members:
        if isinstance(member, types.FunctionType):
            yield member
        if isinstance(member, property):
            yield from _functions_of((member.fget, member.fset, member.fdel))
        elif hasattr(member, "__wrapped__"):
            yield from _functions_of((member.__wrapped__,))
        elif isinstance(member, (classmethod, staticmethod)):
            yield from _functions_of((member.__func__,))


def pin_memory(value: Any) -> Any:
    """Copies a value with all its tensors in page-locked memory.

    Goes through dicts, dataclasses, NamedTuples, lists and tuples; anything else is passed on, as
    are service fields, which hold no tensors.
    """
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if isinstance(value, dict):
        pinned = copy.copy(value)  # keeps the class, and e.g. a default factory
        pinned.update((key, pin_memory(entry)) for key, entry in value.items())
        return pinned
    if isinstance(value, tuple):
        entries = [pin_memory(entry) for entry in value]
        if hasattr(value, "_make"):
            return value._make(entries)
        return tuple(entries) if type(value) is tuple else value
    if isinstance(value, list):
        return [pin_memory(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        clone = _shallow_copy(value)
        for field in dataclasses.fields(value):
            if field.name not in SERVICE_FIELDS:
                # Not setattr: a frozen dataclass refuses it.
                object.__setattr__(clone, field.name, pin_memory(getattr(value, field.name)))
        return clone
    return value


def _shallow_copy(value: Any) -> Any:
    """Returns a copy; its service fields are left for later if those of the value are."""
    later = getattr(value, "_later", None)
    if later is None:
        return copy.copy(value)
    clone = object.__new__(type(value))
    vars(clone).update(vars(value))
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        if has_own(value, name):
            object.__setattr__(clone, name, object.__getattribute__(value, name))
    return clone


def has_own(value: Any, name: str) -> bool:
    """Whether an attribute is there without the help of `__getattr__`."""
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


class PinMemoryMixin:
    """Returns a dataclass `pin_memory()`, which torch's DataLoader calls on what it returns.

    It has no `__slots__`: as in Energon, code may set further attributes on samples and batches.
    """

    def pin_memory(self) -> Self:
        """Copies the instance with all its tensors in page-locked memory."""
        pinned: Self = pin_memory(self)
        return pinned


class ExtendableDataclassMixin:
    """Returns a dataclass `extend()`, which makes an instance from one of a base class."""

    __slots__ = ()

    @classmethod
    def extend(cls, src: Any, **kwargs: Any) -> Self:
        """Makes an instance with the fields of `src`.

        Args:
            src: An instance of a base class of this class.
            kwargs: The fields that this class adds; a field of `src` may be replaced as well.

        Raises:
            TypeError: `src` is not of a base class, or a field is missing or unknown.
        """
        if not isinstance(src, type) and issubclass(cls, type(src)):
            values = {name: getattr(src, name) for name in layout_of(type(src))[1]}
            values.update(kwargs)
            return cls(**values)
        raise TypeError(
            f"{cls.__qualname__}.extend: a {type(src).__qualname__} cannot be extended to a "
            f"{cls.__qualname__}, which is not its subclass. Use {cls.__qualname__}.derive_from "
            "and name the fields."
        )


def _refuse(batch: list[Any], **_: Any) -> Any:
    """What torch's default collate function finds for samples and batches."""
    raise TypeError(
        f"torch's DataLoader cannot collate {type(batch[0]).__name__} objects. Batches are made by "
        "the dataset (batch_size=... of get_train_dataset): use energon_lite.get_loader(dataset), "
        "which is a torch DataLoader, or DataLoader(dataset, batch_size=None)"
    )


default_collate_fn_map[ExtendableDataclassMixin] = _refuse
