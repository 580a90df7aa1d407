"""Field maps: which part, or which entry of a part, becomes which field of a sample."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from energon_lite.core.errors import DatasetFormatError, FieldAccessError, did_you_mean
from energon_lite.core.stacking import SERVICE_FIELDS

# "json[a][0]": the part, then keys in brackets.
_PATH = re.compile(r"(?P<part>[^\[\],]+)(?P<keys>(?:\[[^\[\]]+\])*)")
_KEY = re.compile(r"\[([^\[\]]+)\]")

_LONGEST = 1000  # of an access string [Unit: character]
# What a path gives where it leads nowhere; None is a value.
MISSING: Any = object()

# Set by the pipeline for every sample; a field map may name the key only.
_MAPPABLE_SERVICE_FIELDS = frozenset({"__key__"})


@dataclasses.dataclass(frozen=True)
class FieldPath:
    """One way to a value: a part, and keys that lead into it.

    Attributes:
        part: Name of the part.
        keys: Taken one after the other; on a list a key is a position.
    """

    part: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Writes the path as in a field map, `json[a][0]`."""
        return self.part + "".join(f"[{key}]" for key in self.keys)

    def find(self, sample: Mapping[str, Any]) -> Any:
        """Returns the value, or `MISSING`."""
        value = sample.get(self.part, MISSING)
        for key in self.keys:
            value = _step(value, key)
        return value

    def why_missing(self, sample: Mapping[str, Any]) -> str:
        """Describes at which step the path ends, and what is there instead."""
        if self.part not in sample:
            return f"{self}: no part {self.part!r}"
        value = sample[self.part]
        for depth, key in enumerate(self.keys):
            entry = _step(value, key)
            if entry is MISSING:
                parent = FieldPath(self.part, self.keys[:depth])
                return f"{self}: no [{key}], {parent} {_contents(value)}"
            value = entry
        return f"{self}: found"


class _ListGetter:
    """Finds the values of a field that is a list."""

    __slots__ = ("getters",)

    def __init__(self, getters: tuple[_Getter, ...]) -> None:
        self.getters = getters

    def __call__(self, sample: Mapping[str, Any]) -> list[Any]:
        return [getter(sample) for getter in self.getters]


class _Getter:
    """Finds the value of a field that is not just a part."""

    __slots__ = ("field", "paths")

    def __init__(self, field: str, paths: tuple[FieldPath, ...]) -> None:
        self.field = field
        self.paths = paths

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        for path in self.paths:
            value = path.find(sample)
            if value is not MISSING:
                return value
        tried = [path.why_missing(sample) for path in self.paths]
        parts = [name for name in sample if not name.startswith("__")]
        raise FieldAccessError(
            f"field {self.field!r}: {'; '.join(tried)}. The sample has the parts "
            f"{_listing(parts)}. Correct field_map in dataset.yaml, or leave the sample out."
        )


class FieldMap:
    """Makes the fields of a sample from its parts.

    `image: jpg,png` takes the first part that is there; `caption: json[text][0]` goes into it;
    `images: [jpg.0, jpg.1]` makes a list of values, of which none may be missing.

    Attributes:
        fields: Names of the fields, in the order of the YAML.
        paths: The ways to each value, tried in this order; by the name of the field, or by field
            and position, as in `images[0]`.
        parts: All parts that may be needed.
        direct: Where each field is one part as it is, the field of each part; else None.
    """

    __slots__ = ("_getters", "_mapping", "direct", "fields", "parts", "paths")

    def __init__(self, mapping: Mapping[str, str | list[str]], where: str = "field_map") -> None:
        """Prepares the access to each field; `parse` checks the mapping first."""
        self.fields: tuple[str, ...] = tuple(mapping)
        self.paths: dict[str, tuple[FieldPath, ...]] = {}
        self._mapping: dict[str, str | list[str]] = {}
        getters = []
        for name, access in mapping.items():
            texts = {name: access} if isinstance(access, str) else _labelled(name, access)
            ways = {label: _parse_ways(text, f"{where}.{label}") for label, text in texts.items()}
            self.paths.update(ways)
            plain = [",".join(map(str, own)) for own in ways.values()]
            self._mapping[name] = plain[0] if isinstance(access, str) else plain
            getters.append((name, _make_getter(ways, isinstance(access, str))))
        self._getters = tuple(getters)
        self.parts = frozenset(path.part for ways in self.paths.values() for path in ways)
        texts = {a: name for name, a in self._mapping.items() if isinstance(a, str)}
        direct = {part: name for part, name in texts.items() if part in self.parts}
        self.direct = direct if len(direct) == len(self.fields) == len(self.parts) else None

    @classmethod
    def parse(cls, mapping: object, where: str) -> FieldMap:
        """Reads a field map.

        Args:
            mapping: Access string of each field, or a list of them, as in `dataset.yaml`.
            where: File and key, for errors.

        Raises:
            DatasetFormatError: It is not a map of strings, or a string is malformed.
        """
        if not isinstance(mapping, Mapping) or not mapping:
            raise DatasetFormatError(
                f"{where}: expected a map from fields to parts, such as `image: jpg,png`, but "
                f"found {mapping!r}."
            )
        for field, access in mapping.items():
            texts = access if isinstance(access, list) else [access]
            if not isinstance(field, str) or not texts or not all(map(_is_text, texts)):
                raise DatasetFormatError(
                    f"{where}.{field}: expected text such as `jpg,png` or `json[caption]`, or a "
                    f"list of such texts, `[jpg.0, jpg.1]`, but found {access!r}."
                )
        return cls(mapping, where)

    def access(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the value of every field.

        Args:
            sample: Decoded parts by name.

        Raises:
            FieldAccessError: A field has no value; names it, what was tried and what there is.
        """
        try:
            return {name: get(sample) for name, get in self._getters}
        except KeyError:
            # A plain part is missing; find out which, and say so.
            return {name: _Getter(name, ways)(sample) for name, ways in self.paths.items()}

    def to_mapping(self) -> dict[str, str | list[str]]:
        """Returns the access string of each field, or their list, as `parse` reads it."""
        return {
            name: access if isinstance(access, str) else [*access]
            for name, access in self._mapping.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the mapping only."""
        return FieldMap, (self._mapping,)

    def __eq__(self, other: object) -> bool:
        """Compares fields and paths."""
        return self.paths == other.paths if isinstance(other, FieldMap) else NotImplemented

    def __hash__(self) -> int:
        """Hashes fields and paths."""
        return hash(tuple(self.paths.items()))

    def __repr__(self) -> str:
        """Shows the access strings."""
        return f"FieldMap({self.to_mapping()})"


def check_fields(field_map: FieldMap, sample_type: type[Any], where: str) -> None:
    """Checks that a field map fits a sample type, before any sample is read.

    Args:
        field_map: The map.
        sample_type: A dataclass.
        where: File and key, for errors.

    Raises:
        DatasetFormatError: A field does not exist, is set by the pipeline, or a required one is
            missing.
    """
    own = {
        field.name: field
        for field in dataclasses.fields(sample_type)
        if field.init and field.name not in SERVICE_FIELDS
    }
    for name in field_map.fields:
        if name in own or name in _MAPPABLE_SERVICE_FIELDS:
            continue
        if name in SERVICE_FIELDS:
            raise DatasetFormatError(
                f"{where}: {name!r} is set for every sample by the pipeline. Remove it."
            )
        raise DatasetFormatError(
            f"{where}: {sample_type.__name__} has no field {name!r}.{did_you_mean(name, own)}"
        )
    missing = [
        name
        for name, field in own.items()
        if name not in field_map.fields
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise DatasetFormatError(
            f"{where}: {sample_type.__name__} needs the field "
            f"{' and '.join(map(repr, missing))}, which the field map does not name. "
            f"Add `{missing[0]}: <part>`."
        )


def _make_getter(
    paths: Mapping[str, tuple[FieldPath, ...]], is_single: bool
) -> Callable[[Mapping[str, Any]], Any]:
    getters = tuple(_Getter(label, ways) for label, ways in paths.items())
    if not is_single:
        return _ListGetter(getters)
    (path, *others) = getters[0].paths
    return getters[0] if others or path.keys else operator.itemgetter(path.part)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _labelled(field: str, texts: list[str]) -> dict[str, str]:
    return {f"{field}[{place}]": text for place, text in enumerate(texts)}


def _parse_ways(access: str, where: str) -> tuple[FieldPath, ...]:
    if len(access) > _LONGEST:
        raise DatasetFormatError(
            f"{where}: {access[:40]!r}... has {len(access):,} characters; give at most {_LONGEST}"
        )
    return tuple(_parse_path(text.strip(), where) for text in _split(access))


def _split(access: str) -> list[str]:
    """Splits at the commas that are not inside brackets."""
    return re.split(r",(?![^\[\]]*\])", access)


def _parse_path(text: str, where: str) -> FieldPath:
    match = _PATH.fullmatch(text)
    if match is None:
        raise DatasetFormatError(
            f"{where}: {text!r} is not a part with keys in brackets, such as `jpg` or "
            "`json[caption][0]`. Alternatives are separated by commas: `jpg,png`."
        )
    return FieldPath(match["part"].strip(), tuple(_KEY.findall(match["keys"])))


def _step(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value.get(key, MISSING)
    if isinstance(value, (list, tuple)):
        try:
            return value[int(key)]
        except (ValueError, IndexError):
            return MISSING
    return MISSING


def _contents(value: Any) -> str:
    if isinstance(value, dict):
        return f"has the keys {_listing(value)}"
    if isinstance(value, (list, tuple)):
        return f"is a list of {len(value)}"
    if isinstance(value, bytes):
        return "is bytes (not decoded)"
    return f"is of type {type(value).__name__}"


def _listing(names: Any, limit: int = 20) -> str:
    """Lists names, the first `limit` of them."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:limit])
    if len(names) > limit:
        shown += f" and {len(names) - limit} more"
    return shown or "(none)"
