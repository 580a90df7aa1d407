"""The one reader and writer of YAML and JSON files, with the scalar rules of Energon's files.

Source: YAML 1.2.2 for the syntax; the scalar rules were found by running Megatron-Energon 7.4.1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from energon_lite.core.errors import DatasetFormatError, did_you_mean
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
_CORE_TAGS = "tag:yaml.org,2002:"
_CORE_KINDS = ("str", "int", "float", "bool", "null", "map", "seq")


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


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Composes nodes without deciding what plain scalars mean: `_scalar` does that."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  PyYAML wants a class attribute


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
    """Gives the value of a plain scalar.

    Example:
        >>> [_scalar(text) for text in ("010", "1e3", "1_000", "No", "on", "0x10", "1:30", ".inf")]
        [10, 1000.0, 1000, False, 'on', '0x10', '1:30', '.inf']
    """
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


class _Builder:
    """Makes Python values from the nodes of one document."""

    def __init__(self, file: str, on_double: OnDouble) -> None:
        self.file = file
        self.on_double = on_double
        self.done: dict[int, Any] = {}
        self.open: set[int] = set()

    def error(self, node: yaml.Node, message: str) -> DatasetFormatError:
        return DatasetFormatError(f"{self.file}:{node.start_mark.line + 1}: {message}")

    def build(self, node: yaml.Node) -> Any:
        """Gives the value of `node`; an anchor and its aliases give the same object."""
        if node.tag != "!" and node.tag not in {_CORE_TAGS + kind for kind in _CORE_KINDS}:
            raise self.error(node, f"tag {node.tag!r} is not supported; remove it")
        if isinstance(node, yaml.ScalarNode):
            return node.value if node.style else _scalar(node.value)
        if id(node) in self.done:
            return self.done[id(node)]
        if id(node) in self.open:
            raise self.error(node, "an alias lies inside of what it stands for")
        self.open.add(id(node))
        value: Any
        if isinstance(node, yaml.MappingNode):
            value = self.mapping(node)
        else:
            value = [self.build(child) for child in node.value]
        self.open.remove(id(node))
        self.done[id(node)] = value
        return value

    def mapping(self, node: yaml.MappingNode) -> YamlMap:
        value = YamlMap(self.file, node.start_mark.line + 1)
        merged: list[YamlMap] = []
        for key_node, child in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.error(key_node, "a key must be a word, not a list or a mapping")
            key = key_node.value
            if key == "<<" and not key_node.style:
                merged.extend(self.merged(child))
                continue
            line = key_node.start_mark.line + 1
            if key in value.lines:
                first = value.lines[key]
                text = f"{self.file}:{line}: key {key!r} is there twice (first in line {first})"
                self.on_double(text)
            value[key] = self.build(child)
            value.lines[key] = line
        for other in merged:
            for key in other.keys() - value.keys():
                value.lines[key] = other.lines[key]
            for key in other:
                value.setdefault(key, other[key])
        return value

    def merged(self, node: yaml.Node) -> list[YamlMap]:
        value = self.build(node)
        found = value if isinstance(value, list) else [value]
        if not all(isinstance(item, YamlMap) for item in found):
            raise self.error(node, "'<<' merges mappings only")
        return found


def _parse_json(text: str, name: str, on_double: OnDouble) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> YamlMap:
        value = YamlMap(name)
        for key, item in items:
            if key in value:
                on_double(f"{name}: key {key!r} is there twice")
            value[key] = item
        return value

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        if not text.strip():
            raise DatasetFormatError(f"{name}: the file is empty") from None
        raise DatasetFormatError(f"{name}:{error.lineno}: no valid JSON: {error.msg}") from None


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
        DatasetFormatError: No valid document, none at all, several, or a key that is there twice.
    """
    if name.endswith(".json"):
        return _parse_json(text, name, on_double)
    loader = _Loader(text)
    try:
        if not loader.check_node():
            raise DatasetFormatError(f"{name}: the file is empty")
        node = loader.get_node()
        if loader.check_node():
            line = loader.get_node().start_mark.line + 1
            raise DatasetFormatError(
                f"{name}:{line}: a second document starts here; keep one document per file"
            )
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        raise DatasetFormatError(f"{place}: no valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise DatasetFormatError(f"{name}: no valid YAML: {error}") from None
    finally:
        loader.dispose()
    return _Builder(name, on_double).build(node)


def load_yaml(path: Path, on_double: OnDouble = refuse_double) -> Any:
    """Reads a YAML or JSON file (by its suffix) as `parse_yaml` does.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: The file is not one valid document in UTF-8.
    """
    try:
        text = read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetFormatError(f"{path}: no UTF-8 text (byte {error.start})") from None
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
