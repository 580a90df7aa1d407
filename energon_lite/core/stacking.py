"""Puts the values of several samples together: stacking, padding, concatenating, field by field.

A dataclass may hide a field: constructors take it, but `dataclasses.fields` does not list it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from operator import attrgetter
from typing import Any, TypeVar

import torch

from energon_lite.core.batch_memory import stack

T = TypeVar("T")

# Carried with every sample; in a batch always plain lists with one entry per sample.
LOSS_WEIGHT = "__loss_weight__"
SERVICE_FIELDS = frozenset(
    {"__key__", "__restore_key__", "__subflavors__", "__sources__", LOSS_WEIGHT}
)


# What losses ignore, as those of torch and transformers do by default: the padding of labels.
IGNORE_INDEX = -100
_Join = Callable[[Sequence[torch.Tensor], int], torch.Tensor]


# The kind of a `Field` that is neither `ClassVar` nor `InitVar`.
_USUAL: Any = dataclasses.fields(dataclasses.make_dataclass("_", ["x"]))[0]._field_type  # type: ignore[attr-defined]


class _Hidden:
    """The kind of a hidden field: equal to the usual one, but another object.

    `dataclasses` makes constructors, and `replace` its copies, of fields whose kind *equals* the
    usual one; `fields`, `asdict`, `repr`, `==` and slots see those whose kind *is* the usual one.
    """

    def __eq__(self, other: object) -> bool:
        return other is _USUAL

    __hash__ = None  # type: ignore[assignment]


def hide_field(dataclass: type, name: str) -> None:
    """Hides a field of a dataclass, and of subclasses made later, from `fields` and `asdict`.

    Constructors still take it, and `replace`, `copy` and `pickle` keep it.
    """
    vars(dataclass)["__dataclass_fields__"][name]._field_type = _Hidden()


def constructor_names(dataclass: type) -> tuple[str, ...]:
    """Returns the names of all fields that a constructor takes, with the hidden ones."""
    fields: dict[str, Any] = getattr(dataclass, "__dataclass_fields__")  # noqa: B009
    return tuple(f.name for f in fields.values() if f.init and f._field_type == _USUAL)


class Layout(enum.Enum):
    """The way in which a type is taken apart when several of its instances are put together."""

    TENSOR = enum.auto()
    DICT = enum.auto()
    DATACLASS = enum.auto()
    NAMED_TUPLE = enum.auto()
    OWN_METHOD = enum.auto()
    VALUE = enum.auto()


def _find_layout(kind: type[Any]) -> tuple[Layout, tuple[str, ...]]:
    """Returns how instances of `kind` are taken apart, and the names of their fields.

    Only fields that the constructor takes are named. Worked out once per type.
    """
    if issubclass(kind, torch.Tensor):
        return Layout.TENSOR, ()
    if issubclass(kind, (dict, UserDict)):
        return Layout.DICT, ()
    if dataclasses.is_dataclass(kind):
        layout = Layout.OWN_METHOD if hasattr(kind, "from_samples") else Layout.DATACLASS
        return layout, constructor_names(kind)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return Layout.NAMED_TUPLE, tuple(kind._fields)
    return Layout.VALUE, ()


# Worked out once per type.
layout_of: Callable[[type[Any]], tuple[Layout, tuple[str, ...]]] = cache(_find_layout)  # type: ignore[assignment]


def batch_stack(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stacks tensors of one shape along a new first dimension.

    Args:
        batch: B tensors of shape (*D).

    Returns:
        Shape (B, *D).

    Raises:
        ValueError: There is no tensor, or a shape differs; names both shapes.
        TypeError: An element is not a tensor; names it.
    """
    remedy = ". Use batch_pad_stack, or bring them to one shape."
    _check_tensors("batch_stack", batch, attrgetter("shape"), remedy)
    return stack(batch)


@cache
def padding_of(field: Any) -> int:
    """Returns what a field is padded with: -100 for `labels`, `label_ids`, `x_labels`; else 0."""
    words = str(field).lower().removesuffix("_ids").split("_")
    return IGNORE_INDEX if words[-1] in ("label", "labels") else 0


def batch_pad_stack(batch: Sequence[torch.Tensor], padding: int = 0) -> torch.Tensor:
    """Pads tensors at the end of every dimension to one shape and stacks them.

    Args:
        batch: B tensors with the same number of dimensions; different types are promoted.
        padding: the value of the padding.

    Returns:
        Shape (B, *M), where M holds the largest size of each dimension.

    Raises:
        ValueError: There is no tensor, or the numbers of dimensions differ; names both shapes.
        TypeError: An element is not a tensor; names it.

    Example:
        >>> batch_pad_stack([torch.tensor([1, 2, 3]), torch.tensor([4])]).tolist()
        [[1, 2, 3], [4, 0, 0]]
    """
    _check_tensors("batch_pad_stack", batch)
    if len({tensor.shape for tensor in batch}) == 1:
        return stack(batch)
    return _concat_padded([tensor.unsqueeze(0) for tensor in batch], padding)


def batch_list(batch: list[T]) -> list[T]:
    """Returns the list itself: the values of a batch side by side."""
    return batch


def generic_batch(batch: list[Any]) -> Any:
    """Puts values together by the type of the first one.

    Tensors are padded and stacked: `labels` with -100, as `padding_of` returns, others with 0.
    Dicts, dataclasses and NamedTuples are put together field by field, into a dict or an instance
    of the same class; service fields (`__key__`, ...) become plain lists with one entry per value.
    A dataclass with a `from_samples` uses that. Anything else (text, numbers, numpy arrays, None)
    stays the list.

    Args:
        batch: B values of one type.

    Returns:
        The batch of B.

    Raises:
        ValueError: The list is empty, shapes do not fit, or dicts have different keys.
        TypeError: Values of different types cannot be put together.
    """
    return _combine(batch, batch_pad_stack, "generic_batch")


def concat_pad(batch: Sequence[torch.Tensor], padding: int = 0) -> torch.Tensor:
    """Concatenates along the first dimension and pads the others at the end.

    Args:
        batch: Tensors of shapes (N_i, *D_i) with the same number of dimensions, at least one.
        padding: the value of the padding.

    Returns:
        Shape (sum of N_i, *M), where M holds the largest size of each other dimension.

    Raises:
        ValueError: There is no tensor, a tensor has no dimension, or their numbers differ.
        TypeError: An element is not a tensor; names it.

    Example:
        >>> concat_pad([torch.ones(1, 2), torch.ones(1, 3)]).tolist()
        [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    _check_tensors("concat_pad", batch)
    if batch[0].ndim == 0:
        raise ValueError(
            "concat_pad: tensors without a dimension cannot be concatenated. "
            "Use batch_stack, or give each one dimension first."
        )
    if len({tensor.shape[1:] for tensor in batch}) == 1:
        return torch.cat(tuple(batch))
    return _concat_padded(batch, padding)


def generic_concat(batch: list[Any]) -> Any:
    """Puts batches together as `generic_batch` does samples, but concatenates their tensors.

    Tensors go through `concat_pad`; lists become lists of lists.

    Args:
        batch: Batches of one type.

    Returns:
        One value of that type.

    Raises:
        ValueError: The list is empty, shapes do not fit, or dicts have different keys.
        TypeError: Values of different types cannot be put together.
    """
    return _combine(batch, concat_pad, "generic_concat")


def homogeneous_concat_mix(samples: list[Any]) -> Any:
    """Concatenates batches that are all of one type, as `generic_concat`.

    Args:
        samples: Batches of one type, one of each source that is mixed.

    Returns:
        One batch.

    Raises:
        TypeError: The batches have different types; names them.
        ValueError: The list is empty, or shapes do not fit.
    """
    kinds = {type(value): None for value in samples}
    if len(kinds) > 1:
        raise TypeError(
            "homogeneous_concat_mix: the batches have the types "
            f"{', '.join(kind.__qualname__ for kind in kinds)}, but must have one. Let all mixed "
            "sources give the same batch type, or mix them with a function of your own."
        )
    return generic_concat(samples)


def batch_column(field: Any, column: list[Any]) -> Any:
    """Puts the values of a field together as `generic_batch` does."""
    return _combine(column, batch_pad_stack, "generic_batch", padding_of(field))


def _combine(values: list[Any], join_tensors: _Join, name: str, padding: int = 0) -> Any:
    """Puts values together field by field; tensors through `join_tensors`."""
    if not values:
        raise ValueError(f"{name}: the list is empty; at least one value is needed.")
    first = values[0]
    kind = type(first)
    layout, names = layout_of(kind)
    if layout is Layout.VALUE:
        return values
    if layout is Layout.TENSOR:
        return join_tensors(values, padding)
    if layout is Layout.OWN_METHOD and name == "generic_batch":
        return kind.from_samples(values)
    columns: Iterable[tuple[Any, list[Any]]]
    if layout is Layout.DICT:
        columns = _dict_columns(values, name)
    else:
        try:
            columns = zip(names, _columns(values, names), strict=True)
        except AttributeError as error:
            raise TypeError(_odd_one_out(name, values)) from error
    fields = {
        field: column
        if field in SERVICE_FIELDS
        else _combine_field(field, column, join_tensors, name)
        for field, column in columns
    }
    return fields if layout is Layout.DICT else kind(**fields)


def _columns(values: list[Any], names: tuple[str, ...]) -> Iterable[list[Any]]:
    """Returns, for each field, its values; all fields of a value at once, which takes half as long.

    Raises:
        AttributeError: A value lacks a field.
    """
    if len(names) < 2:
        return [[getattr(value, name) for value in values] for name in names]
    return map(list, zip(*map(attrgetter(*names), values), strict=True))


def _dict_columns(values: list[Any], name: str) -> list[tuple[Any, list[Any]]]:
    """Returns the keys of dicts, each with its values."""
    if not all(isinstance(value, (dict, UserDict)) for value in values):
        raise TypeError(_odd_one_out(name, values))
    if any(LOSS_WEIGHT in value for value in values):  # which a dict has only if it is not 1
        values = [{LOSS_WEIGHT: 1.0, **value} for value in values]
    keys = values[0].keys()
    for index, value in enumerate(values):
        if value.keys() != keys:
            missing = sorted(map(str, keys - value.keys()))
            extra = sorted(map(str, value.keys() - keys))
            raise ValueError(
                f"{name}: dict {index} has other keys than dict 0 (missing: {missing}, extra: "
                f"{extra}). Give all the same keys, or put this field together in your own `batch`."
            )
    return [(key, [value[key] for value in values]) for key in keys]


def _combine_field(field: Any, column: list[Any], join_tensors: _Join, name: str) -> Any:
    # Most fields of a text sample are plain values: they are settled without another call.
    if layout_of(type(column[0]))[0] is Layout.VALUE:
        return column
    try:
        return _combine(column, join_tensors, name, padding_of(field))
    except (TypeError, ValueError) as error:
        # The innermost field is named first: "field 'boxes' of field 'target' of ...".
        error.args = (f"field {field!r}: {error}", *error.args[1:])
        raise


def _odd_one_out(name: str, values: Iterable[Any]) -> str:
    kinds = [type(value).__qualname__ for value in values]
    index = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0)
    return (
        f"{name}: element {index} is a {kinds[index]} where element 0 is a {kinds[0]}. "
        "All must have one type."
    )


def _check_tensors(
    name: str,
    tensors: Sequence[Any],
    same: Callable[[torch.Tensor], Any] = attrgetter("ndim"),
    remedy: str = "; the numbers of dimensions must be equal.",
) -> None:
    """Checks that all are tensors, and what is the same for all of them."""
    if not len(tensors):
        raise ValueError(f"{name}: the list is empty; at least one tensor is needed.")
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name}: element {index} is a {type(tensor).__qualname__}, not a tensor. "
                "Give every sample a tensor here, or put this field together in your own `batch`."
            )
    if len({*map(same, tensors)}) > 1:
        index = next(i for i, tensor in enumerate(tensors) if same(tensor) != same(tensors[0]))
        raise ValueError(
            f"{name}: element {index} has shape {tuple(tensors[index].shape)} where element 0 has "
            f"{tuple(tensors[0].shape)}{remedy}"
        )


def _concat_padded(tensors: Sequence[torch.Tensor], padding: int) -> torch.Tensor:
    """Concatenates along the first dimension; pads the others."""
    nums, *sizes = zip(*(tensor.shape for tensor in tensors), strict=True)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    if padding < 0 and not dtype.is_signed:
        raise ValueError(f"{dtype} cannot hold the padding {padding}; make it int64")
    padded = tensors[0].new_full((sum(nums), *map(max, sizes)), padding, dtype=dtype)
    for rows, tensor in zip(padded.split_with_sizes(nums), tensors, strict=True):
        rows[tuple(map(slice, tensor.shape))] = tensor
    return padded
