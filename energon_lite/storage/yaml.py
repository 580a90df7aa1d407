"""The one reader and writer of YAML and JSON files, with the scalar rules of Energon's files.

Source: YAML 1.2.2 for the syntax; the scalar rules were found by running Megatron-Energon 7.4.1.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import yaml

from energon_lite.core.errors import DatasetFormatError, did_you_mean
from energon_lite.core.json_text import MAX_DEPTH, read_json
from energon_lite.storage.files import read_file

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("yes", "true"), True),
    **dict.fromkeys(("no", "false"), False),
    **dict.fromkeys(("null", "~", ""), None),
}
# float() reads these, but in our files they are words.
_NOT_NUMBERS = ("inf", "infinity", "nan")
_LONGEST_NUMBER = 1000
_CORE_TAGS = "tag:yaml.org,2002:"
_KNOWN_TAGS = {_CORE_TAGS + kind for kind in ("str", "int", "float", "bool", "null", "map", "seq")}

# Characters of all that the aliases of a document stand for, with `_VALUE` more for each value: so
# 10,000 aliases may stand for 100 values each.
MAX_ALIASED = 256 << 20
_VALUE = 64
# Many datasets have settings of equal text, at most so long.
_SHORT = 4096
# The .info.yaml of a million shards has 40 MB.
MAX_YAML_BYTES = 128 << 20


class YamlMap(dict[str, Any]):
    """A mapping that knows where it was written.

    Attributes:
        file: name of the file, as the caller wrote it.
        line: first line of the mapping, counted from 1; 0 where it is unknown (JSON).
        lines: the line of each key.
    """

    def __init__(self, file: str = "", line: int = 0) -> None:
        """Makes an empty mapping that starts at `line` of `file`."""
        super().__init__()
        self.file = file
        self.line = line
        self.lines: dict[str, int] = {}

    def place(self, key: str | None = None, path: str | None = None) -> str:
        """Names a place for an error text, as `FILE:LINE, PATH`.

        Args:
            key: the key whose line is meant; None for the mapping itself.
            path: key path that is named; by default the key.
        """
        line = self.line if key is None else self.lines.get(key, self.line)
        path = key if path is None else path
        file = f"{self.file}:{line}" if line else self.file
        return f"{file}, {path}" if path else file


# libyaml's parser of events does not recurse, unlike its composer of nodes.
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(yaml.SafeDumper):
    """Writes block style; quotes each string that a reader would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Writes a value that occurs twice in full: Energon does not resolve aliases."""
        del data
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if _scalar(text) == text else "'"
    return dumper.represent_scalar(_CORE_TAGS + "str", text, style if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(YamlMap, _Dumper.represent_dict)


def _scalar(text: str) -> Any:
    """Returns the value of a plain scalar.

    Example:
        >>> [_scalar(text) for text in ("010", "1e3", "1_000", "No", "on", "0x10", "1:30", ".inf")]
        [10, 1000.0, 1000, False, 'on', '0x10', '1:30', '.inf']
    """
    if len(text) > _LONGEST_NUMBER:
        return text
    lower = text.lower()
    if lower in _WORDS:
        return _WORDS[lower]
    if lower.lstrip("+-") in _NOT_NUMBERS:
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


OnDouble = Callable[[str], None]


def refuse_double(message: str) -> None:
    """Raises a DatasetFormatError: a key that is there twice is an error."""
    raise DatasetFormatError(message)


class _Reader:
    """Makes Python values of the events of one document.

    Few lines of aliases to aliases can stand for billions of values, through which every reader of
    the document would walk. So what they stand for is counted, by arithmetic.
    """

    def __init__(self, parser: Any, file: str, on_double: OnDouble) -> None:
        self._next = parser.get_event
        self._file = file
        self._on_double = on_double
        # By anchor its value, or the event of a scalar, and its size; None before its end.
        self._anchors: dict[str, tuple[Any, int] | None] = {}
        self._aliased = 0
        self._depth = 0

    def document(self) -> Any:
        """Returns the value of the only document."""
        self._next()
        if type(self._next()) is yaml.StreamEndEvent:
            raise DatasetFormatError(f"{self._file}: the file is empty; write it, or remove it")
        value, _ = self._value(self._next())
        self._next()
        event = self._next()
        if type(event) is not yaml.StreamEndEvent:
            raise self._error(event, "a second document starts here; keep one document per file")
        return value

    def _error(self, event: Any, message: str) -> DatasetFormatError:
        return DatasetFormatError(f"{self._file}:{event.start_mark.line + 1}: {message}")

    def _value(self, event: Any) -> tuple[Any, int]:
        """Reads the value that begins with an event; returns it, and its size, see `_VALUE`."""
        value, size = self._resolved(event)
        if type(value) is yaml.ScalarEvent:
            return (value.value if value.style else _scalar(value.value)), size
        return value, size

    def _resolved(self, event: Any) -> tuple[Any, int]:
        """Does the same, but returns the event of a scalar."""
        kind, anchor = type(event), event.anchor
        if kind is yaml.AliasEvent:
            return self._target(event)
        if event.tag not in (None, "!") and event.tag not in _KNOWN_TAGS:
            raise self._error(event, f"tag {event.tag!r:.80} is not supported; remove it")
        if anchor is not None:
            if anchor in self._anchors:
                raise self._error(event, f"no valid YAML: found duplicate anchor {anchor!r:.80}")
            self._anchors[anchor] = None
        found: tuple[Any, int] = event, _VALUE + len(event.value) if kind is yaml.ScalarEvent else 0
        if kind is not yaml.ScalarEvent:
            if self._depth >= MAX_DEPTH:
                text = f"more than {MAX_DEPTH} levels of nesting; write it flatter"
                raise self._error(event, text)
            self._depth += 1
            found = self._list() if kind is yaml.SequenceStartEvent else self._mapping(event)
            self._depth -= 1
        if anchor is not None:
            self._anchors[anchor] = found
        return found

    def _target(self, event: Any) -> tuple[Any, int]:
        if event.anchor not in self._anchors:
            raise self._error(event, f"no valid YAML: found undefined alias {event.anchor!r:.80}")
        target = self._anchors[event.anchor]
        if target is None:
            raise self._error(event, "an alias lies inside of what it stands for; remove it")
        self._aliased += target[1]
        if self._aliased > MAX_ALIASED:
            raise self._error(
                event,
                f"up to here the aliases stand for more than {MAX_ALIASED >> 20} MB of values; "
                "use fewer, or write smaller anchors",
            )
        return target

    def _list(self) -> tuple[list[Any], int]:
        values, total = [], _VALUE
        while type(event := self._next()) is not yaml.SequenceEndEvent:
            value, size = self._value(event)
            values.append(value)
            total += size
        return values, total

    def _mapping(self, start: Any) -> tuple[YamlMap, int]:
        found, total = YamlMap(self._file, start.start_mark.line + 1), _VALUE
        merged: list[Any] = []
        while type(event := self._next()) is not yaml.MappingEndEvent:
            line = event.start_mark.line + 1
            key, key_size = self._resolved(event)
            if type(key) is not yaml.ScalarEvent:
                raise self._error(event, "a key must be a word, not a list or a mapping")
            value, size = self._value(self._next())
            total += key_size + size
            if key.value == "<<" and not key.style:
                merged += value if isinstance(value, list) else [value]
                if not all(isinstance(item, YamlMap) for item in merged):
                    raise self._error(event, "'<<' merges mappings only")
                continue
            if key.value in found:
                self._on_double(
                    f"{self._file}:{line}: key {key.value!r:.80} is there twice "
                    f"(first in line {found.lines[key.value]})"
                )
            found.lines[key.value] = line
            found[key.value] = value
        for other in merged:
            for key in other.keys() - found.keys():
                found.lines[key] = other.lines[key]
            for key in other:
                found.setdefault(key, other[key])
        return found, total


def _parse_json(text: str, name: str, on_double: OnDouble) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> YamlMap:
        value = YamlMap(name)
        for key, item in items:
            if key in value:
                on_double(f"{name}: key {key!r:.80} is there twice")
            value[key] = item
        return value

    if not text.strip():
        raise DatasetFormatError(f"{name}: the file is empty; write it, or remove it")
    return read_json(text, name, pairs=pairs)


@lru_cache(256)
def _common(text: str) -> Any:
    """Reads a short document without an error, once for all files that have this text."""
    try:
        return _Reader(_Parser(text), "", refuse_double).document()
    except (DatasetFormatError, yaml.YAMLError, UnicodeEncodeError):
        return None


def _as_of(value: Any, name: str) -> Any:
    """Copies what `_common` returned, for the file `name`."""
    if type(value) is YamlMap:
        copy = YamlMap(name, value.line)
        copy.lines = value.lines
        copy.update((key, _as_of(item, name)) for key, item in value.items())
        return copy
    return [_as_of(item, name) for item in value] if type(value) is list else value


def parse_yaml(text: str, name: str, on_double: OnDouble = refuse_double) -> Any:
    """Reads one document of YAML (or JSON, when `name` ends in `.json`).

    Mappings become `YamlMap`, keys are always strings, and plain scalars follow Energon's rules:
    `yes/no/true/false` in any case are bools, `010` is 10, `1e3` a float; `on`, `0x10`, dates and
    `.inf` are strings. Anchors, aliases and `<<` are resolved, an empty value is None.

    Args:
        text: the document.
        name: the file's name, for error texts and for `YamlMap.file`.
        on_double: called with an error text for a key that is there twice; the last value counts
            if it does not raise, as it does by default.

    Raises:
        DatasetFormatError: No valid document, none at all, several, a key that is there twice, or
            nesting, aliases, numbers or a length that no honest document has.
    """
    if name.endswith(".json"):
        return _parse_json(text, name, on_double)
    # A copy of what aliases stand for could be large.
    if len(text) <= _SHORT and "*" not in text and (common := _common(text)) is not None:
        return _as_of(common, name)
    if len(text) > MAX_YAML_BYTES:
        raise DatasetFormatError(
            f"{name}: {len(text):,} characters of YAML, where at most {MAX_YAML_BYTES:,} are read; "
            "write it as JSON, or as several files"
        )
    try:
        return _Reader(_Parser(text), name, on_double).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        raise DatasetFormatError(f"{place}: no valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise DatasetFormatError(f"{name}: no valid YAML: {error}") from None


def load_yaml(path: PurePath, on_double: OnDouble = refuse_double) -> Any:
    """Reads a YAML or JSON file (by its suffix) as `parse_yaml` does.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: The file is not one valid document in UTF-8.
    """
    try:
        text = read_file(path).removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise DatasetFormatError(
            f"{path}: no UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    return parse_yaml(text, str(path), on_double)


def dump_yaml(value: Any) -> str:
    """Writes JSON-serialisable values in block style, keys in their order.

    Example:
        >>> print(dump_yaml({"split_parts": {"train": ["a.tar"]}, "exclude": []}), end="")
        split_parts:
          train:
          - a.tar
        exclude: []
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


def dump_config(value: Any, name: str) -> str:
    """Writes the file `name`: JSON where it ends in `.json`, else YAML."""
    if name.endswith(".json"):
        return json.dumps(value, indent=2, ensure_ascii=False)
    return dump_yaml(value)


def check_keys(mapping: YamlMap, allowed: Collection[str], where: str) -> None:
    """Refuses keys that nothing reads.

    Args:
        mapping: what was read.
        allowed: the keys that may be there.
        where: key path of `mapping` in its file, "" at the top.

    Raises:
        DatasetFormatError: Names the first key that is not allowed, and the closest that is.
    """
    for key in mapping:
        if key not in allowed:
            hint = did_you_mean(key, allowed)
            raise DatasetFormatError(f"{mapping.place(key, where)}: unknown key {key!r}.{hint}")
