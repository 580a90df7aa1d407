"""Profiles of multi-storage-client: what `msc://profile/path` means by its configuration files.

Source: the documentation of multi-storage-client 1.3, and its schema of configuration files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from energon_lite.core.errors import DatasetFormatError, did_you_mean
from energon_lite.storage.yaml import YamlMap, load_yaml

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NONE: Any = {}
# Profiles that need no file: the files of the machine.
_OF_THE_MACHINE = ("default", "__filesystem__")


class Profile(NamedTuple):
    """A storage provider and its credentials.

    Attributes:
        name: of the profile.
        kind: type of the provider: `s3`, ...
        options: of the provider.
        issuer: type of the credentials provider; "" for the environment.
        secrets: options of the credentials provider.
        unknown: key of the profile that no store of ours has; "" for none.
        file: where it is written.
    """

    name: str
    kind: str = "file"
    options: Any = _NONE
    issuer: str = ""
    secrets: Any = _NONE
    unknown: str = ""
    file: str = ""

    def __repr__(self) -> str:
        return f"Profile({self.name!r}, {self.file!r})"

    def error(self, what: str) -> DatasetFormatError:
        """Returns an error with the place of the profile."""
        return DatasetFormatError(f"{self.file}, profile {self.name!r}: {what}")

    def checked(self, what: str, value: Any, known: dict[str, str]) -> dict[str, str]:
        """Returns options under the names that `known` has for them; "" for what has no effect.

        Raises:
            UnmappedError: An option is not known.
        """
        other = next((key for key in value if key not in known), None)
        if other is not None:
            raise UnmappedError(self, f"{what}.options.{other}")
        return {known[key]: str(item) for key, item in value.items() if known[key]}


class UnmappedError(DatasetFormatError):
    """A profile has a key that only multi-storage-client itself understands."""

    def __init__(self, profile: Profile, key: str) -> None:
        super().__init__(
            f"{profile.file}, profile {profile.name!r}: {key} is not known here. Install "
            "multi-storage-client, which then reads for this profile (pip install "
            "multi-storage-client), or write a profile without it"
        )


def _candidates() -> Iterator[Path]:
    """Yields where a configuration may lie; the first file counts."""
    home, environ = Path.home(), os.environ
    if environ.get("MSC_CONFIG"):
        yield Path(environ["MSC_CONFIG"]).absolute()
        return
    others = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    stems = [
        *([Path(environ["XDG_CONFIG_HOME"], "msc/config")] if "XDG_CONFIG_HOME" in environ else []),
        home / ".msc_config", home / ".config/msc/config",
        *(Path(folder, "msc/config") for folder in others if folder), Path("/etc/msc_config"),
    ]  # fmt: skip
    for stem in stems:
        yield from (stem.with_name(stem.name + suffix) for suffix in (".yaml", ".json"))


@lru_cache(64)
def _content_of(file: Path, _stamp: tuple[int, int]) -> tuple[YamlMap, frozenset[str]]:
    """Reads a file; returns its content, and the variables that it names."""
    content = load_yaml(file)
    if not isinstance(content, YamlMap):
        raise DatasetFormatError(f"{file}: must be a mapping with the key 'profiles'")
    return content, frozenset(_VARIABLE.findall(file.read_text()))


def _files() -> Iterator[tuple[Path, tuple[int, int], YamlMap, frozenset[str]]]:
    """Yields the configuration file and those that it includes: path, stamp, content, variables."""
    todo, seen = [next((place for place in _candidates() if place.is_file()), None)], set()
    while todo:
        file = todo.pop()
        if file is None or file in seen:
            continue
        seen.add(file)
        facts = file.stat()
        stamp = facts.st_mtime_ns, facts.st_size
        content, names = _content_of(file, stamp)
        yield file, stamp, content, names
        todo += [file.parent / str(other) for other in content.get("include") or ()]


def fingerprint() -> list[Any]:
    """Returns what decides on credentials: files, and the variables in them; never raises."""
    found: list[Any] = []
    try:
        for file, stamp, _, names in _files():
            found.append([file, stamp, sorted((name, os.environ.get(name)) for name in names)])
    except (OSError, ValueError) as error:  # raised where a profile is used
        found.append(str(error))
    return found


def profile_named(name: str) -> Profile:
    """Returns a profile.

    Raises:
        DatasetFormatError: There is none of this name, or it is malformed; names the file.
        OSError: A file cannot be read.
    """
    known: dict[str, tuple[Any, str]] = {}
    for file, _, content, _ in _files():
        for key, value in (content.get("profiles") or {}).items():
            if known.setdefault(key, (value, str(file)))[0] != value:
                raise Profile(key, file=str(file)).error(f"is another one in {known[key][1]}")
    if name not in known:
        if name in _OF_THE_MACHINE:
            return Profile(name)
        where = next(iter(known.values()))[1] if known else "no configuration file (MSC_CONFIG)"
        raise DatasetFormatError(f"msc://{name}: {where} has no such profile.{_like(name, known)}")
    raw, path = known[name]
    blank = Profile(name, file=path)
    value = _with_variables(raw, blank)
    kind, options = _part(value, "storage_provider", blank)
    issuer, secrets = _part(value, "credentials_provider", blank)
    others = value.keys() - {"storage_provider", "credentials_provider", "caching_enabled", "retry"}
    unknown = min(others, default="")
    if not kind and not unknown:
        raise blank.error("storage_provider: {type: s3, options: ...} is missing")
    return Profile(name, kind, options, issuer, secrets, unknown, path)


def _like(name: str, known: dict[str, Any]) -> str:
    return did_you_mean(name, known) if known else " Write it: profiles: {...}"


def _part(value: Any, key: str, profile: Profile) -> tuple[str, dict[str, Any]]:
    """Returns type and options of a provider; "" where there is none."""
    part: Any = value.get(key, _NONE) if isinstance(value, dict) else None
    if part == {}:
        return "", {}
    options = (part.get("options") or {}) if isinstance(part, dict) else None
    if not isinstance(options, dict) or not isinstance(part.get("type"), str):
        raise profile.error(f"{key} must be a mapping with 'type' and 'options'")
    return part["type"], options


def _with_variables(value: Any, profile: Profile) -> Any:
    """Returns values with `${VARIABLE}` replaced, of lists and mappings, too."""
    if isinstance(value, dict):
        return {key: _with_variables(item, profile) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_variables(item, profile) for item in value]
    if not isinstance(value, str):
        return value
    missing = [name for name in _VARIABLE.findall(value) if name not in os.environ]
    if missing:
        raise profile.error(f"environment variable {missing[0]!r} is not set; set it")
    return _VARIABLE.sub(lambda match: os.environ[match[1]], value)
