"""Samples as columns: where no hook looks at single samples, a batch is made of them at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple

from energon_lite.core.samples import CrudeSample, SourceInfo, make_crude

# Twice as quick as calling the class, which goes through a Python function.
_new_source, _new = tuple.__new__, object.__new__
# The first entry of a row, which no sample of a user has.
_ROW = object()
# Entries of the restore keys of sources.
_name_of, _index_of = itemgetter(0), itemgetter(2)
# Entries of origins.
_path_of, _subflavors_of, _weight_of = itemgetter(0), itemgetter(1), itemgetter(2)
_copy = methodcaller("copy")


class Origin(NamedTuple):
    """The facts that all samples of a source share: its path, their subflavors and loss weight."""

    path: str
    subflavors: dict[str, Any]
    loss_weight: float


class Columns(ABC):
    """Several samples that a batch is made of at once."""

    @abstractmethod
    def samples(self) -> list[Any]:
        """Returns the samples one by one."""

    @abstractmethod
    def batch(self) -> Any:
        """Returns the batch that the library's `batch` makes of the samples."""


class SampleForm(NamedTuple):
    """A layout of samples of one of the library's types, each of one file for one field.

    Attributes:
        kind: their type, of which the constructor does nothing but set the fields.
        field: the name of the field; its values are texts or bytes. In crude samples it is the name
            of the file without the key.
        defaults: names and values of the fields that are equal in all samples.
    """

    kind: type[Any]
    field: str
    defaults: Sequence[tuple[str, Any]]

    def is_like(self, other: SampleForm) -> bool:
        """Whether samples of both can be put into the same columns."""
        return self.kind is other.kind and self.field == other.field


class SampleColumns(Columns):
    """Samples of one form.

    Args:
        form: what they have in common.
        origins: those of their sources, by the first entry of a restore key.
        columns: keys, restore keys of sources, values of the one field, names of the shards, and
            names of the files.
    """

    def __init__(
        self, form: SampleForm, origins: Mapping[str, Origin], columns: Sequence[list[Any]]
    ) -> None:
        self.form, self.origins, self.columns = form, origins, columns

    def own_fields(self) -> dict[str, list[Any]]:
        """Returns the values of the fields that are not left for later."""
        form, (keys, restore_keys, values, *_) = self.form, self.columns
        weights = map(_weight_of, map(self.origins.__getitem__, map(_name_of, restore_keys)))
        own = {"__key__": keys, "__restore_key__": restore_keys, "__loss_weight__": [*weights]}
        same = {name: [value] * len(keys) for name, value in form.defaults}
        return {**own, form.field: values, **same}

    @property
    def later(self) -> partial[dict[str, list[Any]]]:
        """Returns a function that returns the fields that few training loops look at."""
        return partial(later_fields, self.origins, self.columns[1], *self.columns[3:])

    def fields(self) -> dict[str, list[Any]]:
        """Returns the values of each field."""
        return self.own_fields() | self.later()

    def samples(self) -> list[Any]:
        """Returns the samples one by one."""
        if self.form.kind is CrudeSample:
            return self._crude()
        return samples_from(self.form.kind, self.fields())

    def _crude(self) -> list[CrudeSample]:
        made = []
        for key, own, value, shard, file in zip(*self.columns, strict=True):
            path, subflavors, weight = self.origins[own[0]]
            service = {
                "__key__": key, "__restore_key__": own, "__subflavors__": subflavors.copy(),
                "__sources__": (_new_source(SourceInfo, (path, own[2], shard, (file,))),),
            }  # fmt: skip
            if weight != 1:
                service["__loss_weight__"] = weight
            made.append(make_crude({file[len(key) + 1 :]: value}, service))
        return made

    def batch(self) -> Any:
        """Returns what `generic_batch` makes of the samples; some fields are left for later."""
        made: Any = _new(self.form.kind)
        for name, values in self.own_fields().items():
            setattr(made, name, values)
        made._later = self.later
        return made


def later_fields(
    origins: Mapping[str, Origin], restore_keys: Any, shards: list[str], files: list[str]
) -> dict[str, list[Any]]:
    """Returns the fields of samples that few training loops look at; see `SampleColumns`."""
    of_each = [*map(origins.__getitem__, map(_name_of, restore_keys))]
    places = map(_path_of, of_each), map(_index_of, restore_keys), shards, zip(files)
    return {
        "__subflavors__": [*map(_copy, map(_subflavors_of, of_each))],
        "__sources__": [*zip(map(_new_source, repeat(SourceInfo), zip(*places, strict=False)))],
    }


def samples_from(kind: type[Any], fields: dict[str, list[Any]]) -> list[Any]:
    """Returns samples of a type, of what `SampleColumns.fields` returned."""
    keys, restore_keys, weights, *rest, subflavors, sources = fields.values()
    made = [_new(kind) for _ in keys]
    columns = made, keys, restore_keys, subflavors, sources, weights
    for sample, key, restore_key, flavors, own, weight in zip(*columns, strict=True):
        sample.__key__ = key
        sample.__restore_key__ = restore_key
        sample.__subflavors__ = flavors
        sample.__sources__ = own
        sample.__loss_weight__ = weight
    for name, column in zip([*fields][3:-2], rest, strict=True):
        deque(map(setattr, made, repeat(name), column), maxlen=0)
    return made


def joined_samples(parts: Sequence[Columns | list[Any]]) -> Columns | list[Any]:
    """Returns samples that follow each other: as columns if all parts are columns of one type."""
    first = parts[0] if parts else []
    if len(parts) <= 1:
        return first
    similar = [
        part
        for part in parts
        if isinstance(part, SampleColumns)
        and isinstance(first, SampleColumns)
        and part.form.is_like(first.form)
    ]
    if len(similar) < len(parts):
        return [*chain.from_iterable(map(samples_of, parts))]
    origins = similar[0].origins
    for part in similar:
        if part.origins is not similar[0].origins:
            origins = {**origins, **part.origins}
    columns = zip(*[part.columns for part in similar], strict=True)
    joined = [[*chain.from_iterable(column)] for column in columns]
    return SampleColumns(similar[0].form, origins, joined)


def samples_of(part: Any) -> Any:
    """Returns the samples of columns one by one; anything else as it is."""
    return part.samples() if isinstance(part, Columns) else part
