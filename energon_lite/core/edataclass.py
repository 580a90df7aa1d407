"""`edataclass`, and what every sample and batch class gets with it: moving and extending."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import inspect
import types
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar, overload

import torch
from torch.utils.data._utils.collate import default_collate_fn_map
from typing_extensions import Self, dataclass_transform

from energon_lite.core.stacking import SERVICE_FIELDS, layout_of
from energon_lite.names.energon_modules import Described

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

    Its `repr` is short: it has the shapes of tensors and the start of texts. A class that defines
    `__repr__` keeps its `__repr__`.

    `super()` without arguments works in its methods, which `dataclass(slots=True)` breaks before
    Python 3.14: it builds a second class, and methods keep pointing at the first.

    Args:
        cls: The class.
        options: As of `dataclasses.dataclass`; they win over `slots=True, kw_only=True`.

    Returns:
        The dataclass, or with options a decorator.
    """

    def decorate(original: type[T]) -> type[T]:
        if options.get("repr", True) and "__repr__" not in vars(original):
            original.__repr__ = Described.__repr__  # type: ignore[method-assign, assignment]
        made = dataclasses.dataclass(**{"slots": True, "kw_only": True, **options})(original)
        if made is not original:
            _point_super_at(made, instead_of=original)
        return made

    return decorate if cls is None else decorate(cls)


def _point_super_at(made: type, *, instead_of: type) -> None:
    """Makes `super()` and `__class__` in the methods of `made` mean `made`."""
    for function in _functions_of(vars(made).values()):
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # the cell is empty
                if cell.cell_contents is instead_of:
                    cell.cell_contents = made


def _functions_of(members: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Yields the functions among class members, also inside properties and decorators."""
    for member in members:
        if isinstance(member, types.FunctionType):
            yield member
        if isinstance(member, property):
            yield from _functions_of((member.fget, member.fset, member.fdel))
        elif hasattr(member, "__wrapped__"):
            yield from _functions_of((member.__wrapped__,))


def converted(value: Any, method: str, call: Callable[[Any], Any]) -> Any:
    """Copies a value with the results of `call` in place of all its tensors.

    Goes through mappings, dataclasses, NamedTuples, lists and tuples. A part of another type with a
    method of this name is converted by `call`, too; anything else is passed on, as are service
    fields, which hold no tensors.

    Args:
        value: the value.
        method: name of the method that `call` calls on a tensor: "to" or "pin_memory".
        call: converts a tensor, or a part with such a method.
    """
    own = getattr(type(value), method, None)
    if callable(own) and own is not getattr(PinMemoryMixin, method):
        return call(value)
    return _converted_parts(value, method, call)


def _converted_parts(value: Any, method: str, call: Callable[[Any], Any]) -> Any:
    """Copies a value with its parts converted, also where the value has such a method."""

    def convert(part: Any) -> Any:
        return converted(part, method, call)

    clone: Any
    if isinstance(value, Mapping):
        entries = {key: convert(entry) for key, entry in value.items()}
        if not isinstance(value, (dict, UserDict)):
            return type(value)(entries)  # type: ignore[call-arg]
        clone = copy.copy(value)  # keeps the class, and e.g. a default factory
        clone.update(entries)
        return clone
    if isinstance(value, tuple):
        if hasattr(value, "_make"):
            return value._make(map(convert, value))
        return tuple(map(convert, value)) if type(value) is tuple else value
    if isinstance(value, list):
        clone = copy.copy(value)
        clone[:] = map(convert, value)
        return clone
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        clone = _shallow_copy(value)
        names = {field.name for field in dataclasses.fields(value)}
        for name in names.union(getattr(clone, "__dict__", ())) - SERVICE_FIELDS:
            if has_own(value, name):
                # Not setattr: a frozen dataclass refuses it.
                part = object.__getattribute__(value, name)
                object.__setattr__(clone, name, convert(part))
        return clone
    return value


def moving(device: Any, dtype: torch.dtype | None, non_blocking: bool) -> Callable[[Any], Any]:
    """Returns what moves a tensor, or a part of a batch that has a method `to`."""
    if isinstance(device, torch.dtype):
        device, dtype = None, device
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype} must be floating point: it is of floating point tensors")

    def move(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            own_dtype = dtype if part.is_floating_point() else None
            return part.to(device=device, dtype=own_dtype, non_blocking=non_blocking)
        place = () if device is None else (device,)
        return part.to(*place, **({} if dtype is None else {"dtype": dtype}))

    return move


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


class PinMemoryMixin(Described):
    """Returns a dataclass `pin_memory()`, which torch's DataLoader calls, and `to`, `cuda`, `cpu`.

    All of them return a copy, with the tensors that lie in fields and further attributes, also
    inside lists, tuples, mappings and dataclasses. A part of another type with a method of this
    name is converted by it. A field or method of a subclass with one of these names replaces ours.

    It has no `__slots__`: as in Energon, code may set further attributes on samples and batches.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Lets a field have the name of a method: `dataclass` would take it for its default.

        The class keeps the short `repr`, for which `dataclass` would make a long one.
        """
        super().__init_subclass__(**options)
        if cls.__repr__ is Described.__repr__:
            cls.__repr__ = Described.__repr__  # type: ignore[method-assign]
        for name in inspect.get_annotations(cls):
            if callable(vars(PinMemoryMixin).get(name)) and name not in vars(cls):
                setattr(cls, name, dataclasses.field())

    def pin_memory(self) -> Self:
        """Copies the instance with all its tensors in page-locked memory."""
        return _converted_parts(self, "pin_memory", lambda part: part.pin_memory())  # type: ignore[no-any-return]

    def to(
        self,
        device: torch.device | torch.dtype | str | int | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """Copies the instance with all its tensors on a device.

        Args:
            device: where to; None for where they are. A dtype is taken for `dtype`.
            dtype: of all floating point tensors; None to keep theirs.
            non_blocking: whether copies from page-locked memory may be under way on return.

        Raises:
            TypeError: `dtype` is of integers, bools or complex numbers.
        """
        return _converted_parts(self, "to", moving(device, dtype, non_blocking))  # type: ignore[no-any-return]

    def cuda(self, device: torch.device | int | None = None, non_blocking: bool = False) -> Self:
        """Copies the instance with all its tensors on a GPU, by default the current one."""
        place = "cuda" if device is None else device
        return converted(self, "to", moving(place, None, non_blocking))  # type: ignore[no-any-return]

    def cpu(self) -> Self:
        """Copies the instance with all its tensors on the CPU."""
        return converted(self, "to", moving("cpu", None, False))  # type: ignore[no-any-return]


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
    """Returned to torch's default collate function for samples and batches."""
    raise TypeError(
        f"torch's DataLoader cannot collate {type(batch[0]).__name__} objects. Batches are made by "
        "the dataset (batch_size=... of get_train_dataset): use energon_lite.get_loader(dataset), "
        "which is a torch DataLoader, or DataLoader(dataset, batch_size=None)"
    )


default_collate_fn_map[ExtendableDataclassMixin] = _refuse
