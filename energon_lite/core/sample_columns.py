"""Samples as columns: where no hook looks at single samples, a batch is made of them at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

_new = object.__new__


class SampleColumns(NamedTuple):
    """Samples of one of the library's types, field by field; none of the values is a tensor.

    Attributes:
        kind: their type, of which the constructor does nothing but set the fields.
        fields: for each field, also those that have a default, the values in the order of the
            samples.
    """

    kind: type[Any]
    fields: dict[str, list[Any]]

    def samples(self) -> list[Any]:
        """Returns the samples one by one."""
        made = [_new(self.kind) for _ in self.fields["__key__"]]
        for name, column in self.fields.items():
            deque(map(setattr, made, repeat(name), column), maxlen=0)
        return made

    def batch(self) -> Any:
        """Returns what `generic_batch` makes of the samples."""
        return self.kind(**self.fields)


def joined_samples(parts: Sequence[SampleColumns | list[Any]]) -> SampleColumns | list[Any]:
    """Returns samples that follow each other: as columns if all parts are columns of one type."""
    first = parts[0] if parts else []
    if len(parts) <= 1:
        return first
    if isinstance(first, SampleColumns) and all(
        isinstance(part, SampleColumns) and part.kind is first.kind for part in parts
    ):
        columns = [part.fields for part in parts if isinstance(part, SampleColumns)]
        return first._replace(
            fields={name: [*chain.from_iterable(f[name] for f in columns)] for name in first.fields}
        )
    return [*chain.from_iterable(map(samples_of, parts))]


def samples_of(part: Any) -> Any:
    """Returns the samples of columns one by one; anything else as it is."""
    return part.samples() if isinstance(part, SampleColumns) else part
