"""Field maps: which part, or which entry of a part, becomes which field of a sample."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from energon_lite.core.errors import DatasetFormatError, FieldAccessError, did_you_mean
from energon_lite.core.stacking import SERVICE_FIELDS

# "json[a][0]": the part, then keys in brackets.
_PATH = re.compile(r"(?P<part>[^\[\],]+)(?P<keys>(?:\[[^\[\]]+\])*)")
_KEY = re.compile(r"\[([^\[\]]+)\]")
_COMMA = re.compile(r",(?![^\[\]]*\])")  # not inside brackets
_Getter = Callable[[Mapping[str, Any]], Any]

_LONGEST = 1000  # of an access string [Unit: character]
# The value of a path that leads nowhere; None is a value.
MISSING: Any = object()

# Set by the pipeline for every sample; a field map may name the key only.
_MAPPABLE_SERVICE_FIELDS = frozenset({"__key__"})


def is_reserved(part: str) -> bool:
    """Returns whether a part is named as service fields are, `__key__`; no run reads such parts."""
    return part.startswith("__") and part.endswith("__")


@dataclasses.dataclass(frozen=True)
class FieldPath:
    """One way to a value: a part, and keys that lead into it.

    Attributes:
        part: Name of the part, in small letters.
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
        for depth, key in enumerate(self.keys):
            parent = FieldPath(self.part, self.keys[:depth])
            value = parent.find(sample)
            if _step(value, key) is MISSING:
                return f"{self}: no [{key}], {parent} {_contents(value)}"
        return f"{self}: found"


def _find(field: str, paths: tuple[FieldPath, ...], sample: Mapping[str, Any]) -> Any:
    """Returns the value of the first of several paths that leads to one."""
    for path in paths:
        value = path.find(sample)
        if value is not MISSING:
            return value
    tried = "; ".join(path.why_missing(sample) for path in paths)
    parts = [name for name in sample if not name.startswith("__")]
    raise FieldAccessError(
        f"field {field!r}: {tried}. The sample has the parts {listing(parts)}. Correct field_map "
        "in dataset.yaml, or exclude the sample."
    )


def _find_all(getters: list[_Getter], sample: Mapping[str, Any]) -> list[Any]:
    return [getter(sample) for getter in getters]


class FieldMap:
    """Makes the fields of a sample from its parts.

    `image: jpg,png` takes the first part that is there; `caption: json[text][0]` goes into it;
    `images: [jpg.0, jpg.1]` makes a list of values, of which none may be missing.

    Args:
        mapping: Access string of each field, or a list of them, as in `dataset.yaml`.
        where: File and key, for errors.

    Attributes:
        mapping: As it was passed.
        paths: The paths to each value, tried in this order; by the name of the field, or by field
            and position, as in `images[0]`.
        getters: Names of fields, and what returns the value of each; a KeyError where a whole part
            is missing, of which `access` names what there is.
        parts: All parts that may be needed.
        direct: Where each field is one whole part, the field of each part; else None.

    Raises:
        DatasetFormatError: It is not a map of strings, or a string is malformed.
    """

    def __init__(self, mapping: object, where: str = "field_map") -> None:
        if not isinstance(mapping, Mapping) or not mapping:
            raise DatasetFormatError(
                f"{where}: expected a map from fields to parts, such as `image: jpg,png`, but "
                f"found {mapping!r}."
            )
        self.mapping: dict[str, str | list[str]] = dict(mapping)
        self.paths: dict[str, tuple[FieldPath, ...]] = {}
        self.getters: list[tuple[str, _Getter]] = []
        for field, access in mapping.items():
            texts = access if isinstance(access, list) else [access]
            if not texts or not all(isinstance(text, str) for text in (field, *texts)):
                raise DatasetFormatError(
                    f"{where}.{field}: expected text such as `jpg,png` or `json[caption]`, or a "
                    f"list of such texts, `[jpg.0, jpg.1]`, but found {access!r}."
                )
            if texts is access:
                getters = [self._getter(f"{field}[{i}]", t, where) for i, t in enumerate(texts)]
                self.getters.append((field, partial(_find_all, getters)))
            else:
                self.getters.append((field, self._getter(field, access, where)))
        self.parts = frozenset(path.part for paths in self.paths.values() for path in paths)
        whole = {paths[0].part: name for name, paths in self.paths.items() if _is_part(paths)}
        self.direct = whole if list(whole.values()) == list(mapping) else None

    def _getter(self, name: str, access: str, where: str) -> _Getter:
        paths = self.paths[name] = _parse_paths(access, f"{where}.{name}")
        return (
            operator.itemgetter(paths[0].part) if _is_part(paths) else partial(_find, name, paths)
        )

    def access(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the value of every field.

        Args:
            sample: Decoded parts by name.

        Raises:
            FieldAccessError: A field has no value; names it, what was tried and what there is.
        """
        try:
            return {name: get(sample) for name, get in self.getters}
        except KeyError:
            # A whole part is missing: raises the error that names it.
            return {name: _find(name, paths, sample) for name, paths in self.paths.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the mapping only."""
        return FieldMap, (self.mapping,)


class FieldSpec(NamedTuple):
    """A field of a sample type that a field map may name."""

    name: str
    type_name: str
    is_required: bool


def mappable_fields(sample_type: type[Any]) -> dict[str, FieldSpec]:
    """Returns the fields of a sample type that a field map may name."""
    return {
        field.name: FieldSpec(
            field.name,
            field.type if isinstance(field.type, str) else field.type.__name__,
            field.default is field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(sample_type)
        if field.init and field.name not in SERVICE_FIELDS
    }


def check_fields(field_map: FieldMap, sample_type: type[Any], where: str) -> None:
    """Checks that a field map fits a sample type, before any sample is read.

    Args:
        field_map: The map.
        sample_type: A dataclass.
        where: File and key, for errors.

    Raises:
        DatasetFormatError: A field does not exist, is set by the pipeline, or a required one is
            missing; or a part is named like a service field.
    """
    own = mappable_fields(sample_type)
    for name in field_map.mapping:
        if name in SERVICE_FIELDS and name not in _MAPPABLE_SERVICE_FIELDS:
            raise DatasetFormatError(
                f"{where}: {name!r} is set for every sample by the pipeline. Remove it."
            )
        if name not in own and name not in SERVICE_FIELDS:
            hint = did_you_mean(name, own)
            raise DatasetFormatError(
                f"{where}: {sample_type.__name__} has no field {name!r}.{hint}"
            )
    if reserved := sorted(filter(is_reserved, field_map.parts)):
        raise DatasetFormatError(
            f"{where}: parts named like service fields, {', '.join(reserved)}, are not read. "
            "Rename them in the tars."
        )
    missing = [
        name for name, spec in own.items() if spec.is_required and name not in field_map.mapping
    ]
    if missing:
        raise DatasetFormatError(
            f"{where}: {sample_type.__name__} needs the field "
            f"{' and '.join(map(repr, missing))}, which the field map does not name. "
            f"Add `{missing[0]}: <part>`."
        )


def _parse_paths(access: str, where: str) -> tuple[FieldPath, ...]:
    if len(access) > _LONGEST:
        raise DatasetFormatError(
            f"{where}: {access[:40]!r}... has {len(access):,} characters; give at most {_LONGEST}"
        )
    paths = []
    for text in map(str.strip, _COMMA.split(access)):
        match = _PATH.fullmatch(text)
        if match is None:
            raise DatasetFormatError(
                f"{where}: {text!r} is not a part with keys in brackets, such as `jpg` or "
                "`json[caption][0]`. Alternatives are separated by commas: `jpg,png`."
            )
        paths.append(FieldPath(match["part"].strip().lower(), tuple(_KEY.findall(match["keys"]))))
    return tuple(paths)


def _is_part(paths: tuple[FieldPath, ...]) -> bool:
    """Whether there is one path, to a whole part."""
    return len(paths) == 1 and not paths[0].keys


def _step(value: Any, key: str) -> Any:
    try:
        if isinstance(value, dict):
            return value.get(key, MISSING)
        return value[int(key)] if isinstance(value, list | tuple) else MISSING
    except (ValueError, IndexError):
        return MISSING


def _contents(value: Any) -> str:
    if isinstance(value, dict):
        return f"has the keys {listing(value)}"
    if isinstance(value, (list, tuple)):
        return f"is a list of {len(value)}"
    if isinstance(value, bytes):
        return "is bytes (not decoded)"
    return f"is of type {type(value).__name__}"


def spelled(parts: Collection[str], names: Iterable[str]) -> list[str]:
    """Returns the names that are those of some parts, apart from capitals."""
    return [name for name in names if name.lower() in parts]


def listing(names: Any, limit: int = 10) -> str:
    """Lists names, the first `limit` of them."""
    names = list(names)
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return (", ".join(map(repr, names[:limit])) + more) or "(none)"
