"""Placeholders for names of Energon that do not exist yet: importable, with an error on use."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, NoReturn

from energon_lite.names.energon_modules import name_table

# Name -> why it does not exist here, or what to use instead.
REASONS: dict[str, str] = {
    name: reason for reason, names in name_table("later.txt").items() for name in names
}
_INSIDE = "this is an inner part of Megatron-Energon, without a counterpart here"


class Later(ABCMeta):
    """The type of placeholders, which have no instances and explain themselves on use."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses to create an instance.

        Raises:
            NotImplementedError: Always; names what to use instead.
        """
        del args, kwargs
        raise NotImplementedError(_explain(cls))

    def __getattr__(cls, name: str) -> Any:
        """Refuses class attributes; those that Python itself looks up do not exist."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(_explain(cls))

    def __getitem__(cls, item: Any) -> Any:
        """Returns the placeholder itself: `Lazy[bytes]` in annotations."""
        del item
        return cls


def _explain(cls: type) -> str:
    name = next((base.__name__ for base in cls.__mro__ if base.__name__ in REASONS), cls.__name__)
    return f"{name}: {REASONS.get(name, _INSIDE)}. See docs/migrating.md."


def __getattr__(name: str) -> Any:
    """Creates the placeholder of a name, once."""
    if name.startswith("_"):
        raise AttributeError(name)
    placeholder = Later(name, (), {"__doc__": REASONS.get(name, _INSIDE), "__module__": __name__})
    return globals().setdefault(name, placeholder)
