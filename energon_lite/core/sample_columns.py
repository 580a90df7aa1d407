"""Samples as columns: where no hook looks at single samples, a batch is made of them at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

_new = object.__new__


class Columns(ABC):
    """Several samples that a batch is made of at once."""

    @abstractmethod
    def samples(self) -> list[Any]:
        """Returns the samples one by one."""

    @abstractmethod
    def batch(self) -> Any:
        """Returns the batch that the library's `batch` makes of the samples."""


class SampleColumns(Columns):
    """Samples of one of the library's types, field by field; none of the values is a tensor.

    Args:
        kind: their type, of which the constructor does nothing but set the fields.
        fields: for each field, also those that have a default, the values in the order of the
            samples.
    """

    def __init__(self, kind: type[Any], fields: dict[str, list[Any]]) -> None:
        self.kind, self.fields = kind, fields

    def samples(self) -> list[Any]:
        """Returns the samples one by one."""
        made = [_new(self.kind) for _ in self.fields["__key__"]]
        for name, column in self.fields.items():
            deque(map(setattr, made, repeat(name), column), maxlen=0)
        return made

    def batch(self) -> Any:
        """Returns what `generic_batch` makes of the samples."""
        return self.kind(**self.fields)


def joined_samples(parts: Sequence[Columns | list[Any]]) -> Columns | list[Any]:
    """Returns samples that follow each other: as columns if all parts are columns of one type."""
    first = parts[0] if parts else []
    if len(parts) <= 1:
        return first
    if isinstance(first, SampleColumns) and all(
        isinstance(part, SampleColumns) and part.kind is first.kind for part in parts
    ):
        columns = [part.fields for part in parts if isinstance(part, SampleColumns)]
        names = first.fields
        joined = {name: [*chain.from_iterable(own[name] for own in columns)] for name in names}
        return SampleColumns(first.kind, joined)
    return [*chain.from_iterable(map(samples_of, parts))]


def samples_of(part: Any) -> Any:
    """Returns the samples of columns one by one; anything else as it is."""
    return part.samples() if isinstance(part, Columns) else part
