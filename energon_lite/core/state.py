"""Snapshots of cursors, as JSON and back, and the comparison of configurations.

A snapshot is cheap to take and opaque on its way through worker processes; it becomes JSON
only when a state is saved.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, NamedTuple, Union

import numpy as np

from energon_lite.core.errors import (
    DatasetFormatError,
    DecodingError,
    SampleException,
    StateError,
    describe,
)
from energon_lite.core.key_columns import KeyedFields, as_columns, from_columns

JSON = Union[None, bool, int, float, str, "list[JSON]", "dict[str, JSON]"]
RestoreKey = tuple[Any, ...]

FORMAT = "energon_lite.loader"
# More than any run has; times streams and copies of the data it fits 64 bits.
MAX_COUNT = 10**15
_MAX_INT = 2**128  # the state of numpy's PCG64 has as many bits
# Of these packages are the frames of an error that no code of the user's has part in.
_OWN = ("energon_lite.", "numpy", "numba", "json")
# The one key of what `state_dict()` of a loader returns.
STATE_KEY = "loader_state"
# The fields "keys" and "rows" of a snapshot in a few columns, from this number of samples on.
_COLUMNS, _MANY = "columns of samples", 64
VERSION = 7


class Kind(NamedTuple):
    """The kind of a saved attribute of a cursor.

    Attributes:
        start: its value at the start of a stream.
        fits: whether a value may be restored.
        text: what it is, for messages.
    """

    start: Any
    fits: Callable[[Any], bool]
    text: str


def _is_count(value: Any) -> bool:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_integer and 0 <= value <= MAX_COUNT


def _is_column(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype == np.int64)
    is_right = type(value) is tuple and {*map(type, value)} <= {int}
    return is_right and (not value or max(map(abs, value)) <= MAX_COUNT)


COUNT = Kind(0, _is_count, "a count")
FLAG = Kind(False, lambda value: type(value) is bool, "true or false")
NUMBER = Kind(0.0, lambda value: type(value) in (int, float), "a number")
TEXT = Kind("", lambda value: type(value) is str, "a text")
COLUMN = Kind((), _is_column, "a column of integers")
KEY = Kind((), lambda value: type(value) is tuple, "a restore key")


def rows(*columns: Kind) -> Kind:
    """Returns the kind of a table: a tuple of rows, each with one value of each column's kind."""

    def fits(value: Any) -> bool:
        return type(value) is tuple and all(
            type(row) is tuple
            and len(row) == len(columns)
            and all(kind.fits(entry) for kind, entry in zip(columns, row, strict=True))
            for row in value
        )

    return Kind((), fits, f"rows of {', '.join(kind.text for kind in columns)}")


class Names(Sequence[str]):
    """Names of datasets, as one text: a thousand are pickled, and kept by each stream, as one."""

    __slots__ = ("text",)

    def __init__(self, names: Iterable[str]) -> None:
        self.text = json.dumps([*names])

    def __iter__(self) -> Iterator[str]:
        """Yields the names."""
        return iter(json.loads(self.text))

    def __getitem__(self, number: Any) -> Any:
        """Returns a name, or several."""
        return json.loads(self.text)[number]

    def __len__(self) -> int:
        """Counts the names."""
        return len(json.loads(self.text))

    def __eq__(self, other: object) -> bool:
        """Compares with other such names."""
        return isinstance(other, Names) and self.text == other.text

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class Snapshot:
    """The place of a cursor between two items.

    Args:
        kind: the stage that made it; another kind of stage refuses it.
        fields: integers, strings, restore keys (tuples) and numpy arrays.
        inner: the snapshots of the cursors below.
        names: of these, where there may be several.
    """

    kind: str
    fields: dict[str, Any]
    inner: Sequence[Snapshot] = ()
    names: Sequence[str] = ()

    def __reduce__(self) -> Any:
        """Pickles the fields alone, in a fraction of the time that slots take."""
        return Snapshot, (self.kind, self.fields, self.inner, self.names)

    def __eq__(self, other: object) -> bool:
        """Compares by content."""
        return isinstance(other, Snapshot) and self.to_json() == other.to_json()

    def expect(self, kind: str, num_inner: int) -> Snapshot:
        """Returns the snapshot itself, if a stage `kind` over `num_inner` cursors made it.

        Raises:
            StateError: Another kind of stage made it.
        """
        if self.kind != kind or len(self.inner) != num_inner:
            raise StateError(
                f"The checkpoint has the state of a stage {self.kind!r} over {len(self.inner)} "
                f"others where this pipeline has {kind!r} over {num_inner}. "
                "Build the pipeline as it was when the state was saved."
            )
        return self

    def below(self, names: Sequence[str]) -> Sequence[Snapshot]:
        """Returns the snapshots below by name; without names, as they are.

        Raises:
            StateError: The snapshot has other names.
        """
        if not names or names == self.names:
            return self.inner
        found = dict(zip(self.names, self.inner, strict=True))
        if found.keys() != set(names):
            raise StateError(
                f"The checkpoint's stage {self.kind!r} has the datasets {', '.join(self.names)} "
                f"where this pipeline has {', '.join(names)}."
            )
        return tuple(found[name] for name in names)

    def expect_like(self, fresh: Snapshot) -> Snapshot:
        """Returns the snapshot itself, if it has stages and fields of a `fresh` one.

        Raises:
            StateError: It is of another pipeline, or corrupt.
        """
        self.expect(fresh.kind, len(fresh.inner))
        for name, value in fresh.fields.items():
            if type(value) is int:
                self.count(name)
            elif type(self.field(name)) is not type(value):
                raise StateError(
                    f"The checkpoint's state of stage {self.kind!r} has {name}="
                    f"{self.field(name)!r} where this pipeline has {value!r}"
                )
        for own, other in zip(self.below(fresh.names), fresh.inner, strict=True):
            own.expect_like(other)
        return self

    def field(self, name: str) -> Any:
        """Returns one field.

        Raises:
            StateError: The state does not have it.
        """
        try:
            return self.fields[name]
        except KeyError:
            raise StateError(
                f"The checkpoint's state of stage {self.kind!r} lacks {name!r}; "
                "it was cut short or edited."
            ) from None

    def count(self, name: str) -> int:
        """Returns a field that counts something.

        Raises:
            StateError: The state does not have it, or it is no count.
        """
        return int(self.checked({name: COUNT})[name])

    def checked(self, saved: Mapping[str, Kind]) -> dict[str, Any]:
        """Returns the fields that are declared in `saved`.

        Raises:
            StateError: A field is missing, or is not what it was declared to be.
        """
        values = {name: self.field(name) for name in saved}
        for name, kind in saved.items():
            if not kind.fits(values[name]):
                raise StateError(
                    f"The checkpoint's state of stage {self.kind!r} has {name}="
                    f"{values[name]!r:.80}, which is not {kind.text}; it was edited or corrupted."
                )
        return values

    def to_json(self) -> JSON:
        """Returns the snapshot as JSON-serialisable values."""
        value: dict[str, JSON] = {"stage": self.kind}
        value.update((name, _plain(field)) for name, field in _with_columns(self.fields).items())
        inner = [snapshot.to_json() for snapshot in self.inner]
        if self.inner:
            value["inner"] = dict(zip(self.names, inner, strict=True)) if self.names else inner
        return value

    @classmethod
    def from_json(cls, value: Any) -> Snapshot:
        """Makes a snapshot from a value that `to_json` returned.

        Raises:
            StateError: `value` is no snapshot.
        """
        if not isinstance(value, dict) or not isinstance(value.get("stage"), str):
            raise StateError(f"{str(value)[:80]!r} is not the state of a stage")
        inner = value.get("inner", [])
        if not isinstance(inner, (list, dict)):
            raise StateError(f"'inner' of stage {value['stage']!r} is not a list or a dict")
        names = tuple(inner) if isinstance(inner, dict) else ()
        below = inner.values() if isinstance(inner, dict) else inner
        fields = {
            name: _checked_field(entry, name, value["stage"])
            for name, entry in value.items()
            if name not in ("stage", "inner", _COLUMNS)
        }
        fields.update(_of_columns(value))
        return cls(value["stage"], fields, tuple(map(cls.from_json, below)), names)


def _with_columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields in which the keys and rows of many buffered samples are columns."""
    keys: Any
    if isinstance(fields, KeyedFields):
        rest, (keys, rows) = fields.known, fields.table()
    else:
        rest, keys, rows = dict(fields), fields.get("keys", ()), fields.get("rows", ())
    if len(keys) >= _MANY and len(keys) == len(rows):
        # Keys that have something else than integers and texts stay as they are.
        with suppress(TypeError, ValueError, OverflowError):
            columns = as_columns(keys, rows)
            rest = {name: value for name, value in rest.items() if name not in ("keys", "rows")}
            return {**rest, _COLUMNS: columns}
    return dict(fields)


def _of_columns(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys and rows of a snapshot that has columns of them.

    Raises:
        StateError: The columns are corrupt.
    """
    if _COLUMNS not in value:
        return {}
    try:
        keys, rows = from_columns(value[_COLUMNS])
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, zlib.error) as error:
        raise StateError(
            f"{_COLUMNS!r} of stage {value['stage']!r} are corrupt: {describe(error)[:200]}"
        ) from error
    return {"keys": keys, "rows": rows}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.integer):
        return int(value)
    return value


def as_key(value: Any) -> Any:
    """Turns lists into tuples, at every depth: restore keys are tuples, and JSON has lists only."""
    if isinstance(value, list):
        return tuple(as_key(entry) for entry in value)
    return value


def _checked_field(value: Any, name: str, stage: str) -> Any:
    """Returns a field with tuples for lists, if it holds nothing but what stages save."""
    kind = type(value)
    if kind is list or kind is tuple:
        return tuple([_checked_field(entry, name, stage) for entry in value])
    if kind is dict:  # of a stage of the user's
        return {key: _checked_field(entry, name, stage) for key, entry in value.items()}
    is_right = (
        kind is str
        or value is None
        or kind is bool
        or (kind is int and -_MAX_INT < value < _MAX_INT)
        or (kind is float and math.isfinite(value))
    )
    if not is_right:
        raise StateError(
            f"The checkpoint's state of stage {stage!r} has {value!r:.80} in {name!r}, which no "
            "stage saves; it was edited or corrupted."
        )
    return value


def as_damage(error: Exception, place: str) -> Exception:
    """Returns what to raise for an error of our own code that a corrupt state has caused.

    Args:
        error: what was raised, while a state was restored or after.
        place: what was restored.

    Returns:
        A StateError; `error` itself where it has its text, or comes from code or data of the user.
    """
    has_text = isinstance(error, (StateError, DatasetFormatError, DecodingError, SampleException))
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    # A hook that failed on a sample has noted which; only re-created samples have other notes.
    notes = getattr(error, "__notes__", ())
    is_ours = all(name.startswith(_OWN) for name in modules)
    if has_text or not is_ours or not all(note.endswith(" was re-created") for note in notes):
        return error
    return StateError(
        f"The checkpoint's state of {place} leads to {describe(error)[:200]}: use another "
        "checkpoint if this one was edited; else this is a fault of energon_lite, please report it."
    )


def digest(value: Any) -> str:
    """Returns a digest of a JSON value, which is the same after any number of round trips."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def checksum(state: Mapping[str, Any]) -> str:
    """Returns the checksum of a rank's state; `pipeline` in it is that of its configuration."""
    return digest({**state, "config": None, "checksum": None})


class _None:
    """The value of a setting that is not there."""

    def __repr__(self) -> str:
        return "no such setting"


_NONE = _None()


def config_differences(saved: Any, here: Any, path: str = "") -> list[str]:
    """Lists, field by field, where a checkpoint's configuration differs from this pipeline's."""
    if isinstance(saved, dict) and isinstance(here, dict):
        # Two entries of one list are best distinguished by their name.
        name = here.get("name") if isinstance(here.get("name"), str) else None
        lead = f"{path}." if path else ""
        found = []
        for key in dict.fromkeys((*saved, *here)):
            # Stages lie "of" one another; their settings have names of their own.
            place = path if key == "of" else f"{lead}{key}"
            found += config_differences(saved.get(key, _NONE), here.get(key, _NONE), place)
        return [f"{line} (source {name})" for line in found] if name else found
    if isinstance(saved, list) and isinstance(here, list) and len(saved) == len(here):
        return [
            line
            for i, (old, new) in enumerate(zip(saved, here, strict=True))
            for line in config_differences(old, new, f"{path}[{i}]")
        ]
    if saved != here:
        return [f"Checkpoint has {path}={saved!r} where this pipeline has {here!r}"]
    return []
