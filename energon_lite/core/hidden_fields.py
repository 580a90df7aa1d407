"""Fields of dataclasses that constructors take, but that `dataclasses.fields` does not list."""

from __future__ import annotations

import dataclasses
from typing import Any

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
