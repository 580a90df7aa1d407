"""The one reader and writer of YAML and JSON files, with the scalar rules of Energon's files.

Source: YAML 1.2.2 for the syntax; the scalar rules were found by running Megatron-Energon 7.4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from energon_lite.core.errors import DatasetFormatError, did_you_mean
from energon_lite.core.json_text import MAX_DEPTH, read_json
from energon_lite.storage.files import read_file

_WORDS: dict[str, bool | None] = {
    "yes": True,
    "true": True,
    "no": False,
    "false": False,
    "null": None,
    "~": None,
    "": None,
}
# float() reads these, but in our files they are words.
_NOT_NUMBERS = ("inf", "infinity", "nan")
_LONGEST_NUMBER = 1000
_CORE_TAGS = "tag:yaml.org,2002:"
_KNOWN_TAGS = {_CORE_TAGS + kind for kind in ("str", "int", "float", "bool", "null", "map", "seq")}
_NO_KEY = "a key must be a word, not a list or a mapping"

# Characters of all that the aliases of a document stand for, with `_VALUE` more for each value: so
# 10,000 aliases may stand for 100 values each.
MAX_ALIASED = 256 << 20
_VALUE = 64
# The .info.yaml of a million shards has 40 MB.
MAX_YAML_BYTES = 128 << 20


class YamlMap(dict[str, Any]):
    """A mapping that knows where it was written.

    Attributes:
        file: name of the file, as given to the reader.
        line: first line of the mapping, counted from 1; 0 where it is unknown (JSON).
        lines: the line of each key.
    """

    def __init__(self, file: str = "", line: int = 0) -> None:
        """Makes an empty mapping that starts at `line` of `file`."""
        super().__init__()
        self.file = file
        self.line = line
        self.lines: dict[str, int] = {}

    def place(self, key: str | None = None, where: str = "") -> str:
        """Names a place for an error text, as `FILE:LINE, KEYPATH`.

        Args:
            key: the key whose line is meant; None for the mapping itself.
            where: key path of this mapping in its file, "" at the top.
        """
        line = self.lines.get(key, self.line) if key is not None else self.line
        file = f"{self.file}:{line}" if line else self.file
        path = ".".join(part for part in (where, key) if part)
        return ", ".join(part for part in (file, path) if part)


# libyaml's parser of events knows no recursion, unlike its composer of nodes.
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


def _represent_map(dumper: yaml.SafeDumper, value: YamlMap) -> yaml.MappingNode:
    return dumper.represent_dict(dict(value))


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(YamlMap, _represent_map)


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


class _Open:
    """A mapping or list that has begun and not ended.

    Attributes:
        size: its characters, aliases written out; see `_VALUE`.
        key: key of a mapping whose value comes next; None where a key comes next.
        is_merge: whether that key is `<<`.
        merged: the mappings that `<<` names.
    """

    __slots__ = ("anchor", "is_merge", "key", "key_line", "merged", "size", "value")

    def __init__(self, value: Any, anchor: str | None) -> None:
        self.value, self.anchor = value, anchor
        self.size = _VALUE
        self.key: str | None = None
        self.key_line = 0
        self.is_merge = False
        self.merged: list[YamlMap] = []


class _Builder:
    """Makes Python values of the events of one document, with no recursion.

    Few lines of aliases to aliases can stand for billions of values, through which every reader of
    the document would walk. So what they stand for is counted, by arithmetic.
    """

    def __init__(self, file: str, on_double: OnDouble) -> None:
        self.file = file
        self.on_double = on_double
        self.open = [_Open([], None)]
        # By anchor its value, or the event of a scalar, and its size; None before its end.
        self.anchors: dict[str, tuple[Any, int] | None] = {}
        self.aliased = 0

    def error(self, event: Any, message: str) -> DatasetFormatError:
        return DatasetFormatError(f"{self.file}:{event.start_mark.line + 1}: {message}")

    def take(self, event: Any) -> None:
        """Takes the next event inside the document."""
        kind = type(event)
        if kind is yaml.ScalarEvent:
            self._scalar(event)
            if event.anchor is not None:
                self._declare(event)
                self.anchors[event.anchor] = event, _VALUE + len(event.value)
        elif kind is yaml.AliasEvent:
            target, size = self._target(event)
            if type(target) is yaml.ScalarEvent:
                self._scalar(target)
            else:
                self._put(event, target, size)
        elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
            self._begin(event, kind is yaml.MappingStartEvent)
        else:
            self._end(event)

    def _scalar(self, event: Any) -> None:
        if event.tag is not None:
            self._check_tag(event)
        top, value = self.open[-1], event.value
        top.size += _VALUE + len(value)
        if type(top.value) is list:
            top.value.append(value if event.style else _scalar(value))
        elif top.key is None:
            top.key, top.key_line = value, event.start_mark.line + 1
            top.is_merge = value == "<<" and not event.style
        elif top.is_merge:
            raise self._no_merge(top)
        else:
            self._set(top, value if event.style else _scalar(value))

    def _check_tag(self, event: Any) -> None:
        tag = event.tag
        if tag is not None and tag != "!" and tag not in _KNOWN_TAGS:
            raise self.error(event, f"tag {tag!r:.80} is not supported; remove it")

    def _declare(self, event: Any) -> None:
        if event.anchor in self.anchors:
            raise self.error(event, f"no valid YAML: found duplicate anchor {event.anchor!r:.80}")
        self.anchors[event.anchor] = None

    def _target(self, event: Any) -> tuple[Any, int]:
        if event.anchor not in self.anchors:
            raise self.error(event, f"no valid YAML: found undefined alias {event.anchor!r:.80}")
        target = self.anchors[event.anchor]
        if target is None:
            raise self.error(event, "an alias lies inside of what it stands for; remove it")
        self.aliased += target[1]
        if self.aliased > MAX_ALIASED:
            raise self.error(
                event,
                f"up to here the aliases stand for more than {MAX_ALIASED >> 20} MB of values; "
                "use fewer, or write smaller anchors",
            )
        return target

    def _begin(self, event: Any, is_mapping: bool) -> None:
        self._check_tag(event)
        top = self.open[-1]
        if top.key is None and type(top.value) is YamlMap:
            raise self.error(event, _NO_KEY)
        if len(self.open) > MAX_DEPTH:
            raise self.error(event, f"more than {MAX_DEPTH} levels of nesting; write it flatter")
        if event.anchor is not None:
            self._declare(event)
        value = YamlMap(self.file, event.start_mark.line + 1) if is_mapping else []
        self.open.append(_Open(value, event.anchor))

    def _end(self, event: Any) -> None:
        done = self.open.pop()
        for other in done.merged:
            for key in other.keys() - done.value.keys():
                done.value.lines[key] = other.lines[key]
            for key in other:
                done.value.setdefault(key, other[key])
        if done.anchor is not None:
            self.anchors[done.anchor] = done.value, done.size
        self._put(event, done.value, done.size)

    def _put(self, event: Any, value: Any, size: int) -> None:
        """Puts a finished mapping or list into the one around it."""
        top = self.open[-1]
        top.size += size
        if type(top.value) is list:
            top.value.append(value)
        elif top.key is None:
            raise self.error(event, _NO_KEY)
        elif top.is_merge:
            top.merged.extend(value if isinstance(value, list) else [value])
            if not all(isinstance(item, YamlMap) for item in top.merged):
                raise self._no_merge(top)
            top.key = None
        else:
            self._set(top, value)

    def _no_merge(self, top: _Open) -> DatasetFormatError:
        return DatasetFormatError(f"{self.file}:{top.key_line}: '<<' merges mappings only")

    def _set(self, top: _Open, value: Any) -> None:
        key, lines = top.key, top.value.lines
        if key in lines:
            self.on_double(
                f"{self.file}:{top.key_line}: key {key!r:.80} is there twice "
                f"(first in line {lines[key]})"
            )
        lines[key] = top.key_line
        top.value[key] = value
        top.key = None


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
    if len(text) > MAX_YAML_BYTES:
        raise DatasetFormatError(
            f"{name}: {len(text):,} characters of YAML, where at most {MAX_YAML_BYTES:,} are read; "
            "write it as JSON, or as several files"
        )
    try:
        return _document(_Parser(text), _Builder(name, on_double))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        raise DatasetFormatError(f"{place}: no valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise DatasetFormatError(f"{name}: no valid YAML: {error}") from None


def _document(parser: Any, builder: _Builder) -> Any:
    """Returns the value of the only document in a stream of events."""
    num_documents = 0
    while True:
        event = parser.get_event()
        kind = type(event)
        if kind is yaml.DocumentStartEvent:
            num_documents += 1
            if num_documents > 1:
                raise builder.error(
                    event, "a second document starts here; keep one document per file"
                )
        elif kind is yaml.StreamEndEvent:
            break
        elif kind is not yaml.DocumentEndEvent and kind is not yaml.StreamStartEvent:
            builder.take(event)
    if not num_documents:
        raise DatasetFormatError(f"{builder.file}: the file is empty; write it, or remove it")
    return builder.open[0].value[0]


def load_yaml(path: Path, on_double: OnDouble = refuse_double) -> Any:
    """Reads a YAML or JSON file (by its suffix) as `parse_yaml` does.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: The file is not one valid document in UTF-8.
    """
    try:
        text = read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetFormatError(
            f"{path}: no UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    return parse_yaml(text, str(path), on_double)


def dump_yaml(value: Any) -> str:
    """Writes plain values in block style, keys in their order.

    Example:
        >>> print(dump_yaml({"split_parts": {"train": ["a.tar"]}, "exclude": []}), end="")
        split_parts:
          train:
          - a.tar
        exclude: []
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))


def check_keys(mapping: Mapping[str, Any], allowed: Collection[str], where: str) -> None:
    """Refuses keys that nobody reads.

    Args:
        mapping: what was read; a `YamlMap` lets the error name file and line.
        allowed: the keys that may be there.
        where: key path of `mapping` in its file, "" at the top.

    Raises:
        DatasetFormatError: Names the first key that is not allowed, and the closest that is.
    """
    for key in mapping:
        if key in allowed:
            continue
        place = where
        if isinstance(mapping, YamlMap):
            line = mapping.lines.get(key, mapping.line)
            file = f"{mapping.file}:{line}" if line else mapping.file
            place = ", ".join(part for part in (file, where) if part)
        hint = did_you_mean(key, allowed)
        raise DatasetFormatError(f"{place}: unknown key {key!r}.{hint}")
