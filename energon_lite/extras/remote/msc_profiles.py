"""Profiles of multi-storage-client and rclone: what `msc://profile/path` means.

multi-storage-client itself reads their files; it is imported for the first profile.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from energon_lite.core.errors import DatasetFormatError, did_you_mean

PACKAGE = "multistorageclient"
_NONE: Any = {}
# Profiles that need no file: the files of the machine.
_OF_THE_MACHINE = ("default", "__filesystem__")
# Keys of profiles: what is used, and what has no effect here.
_USED = {"storage_provider", "credentials_provider", "caching_enabled", "retry", "name"}


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
            raise UnmappedError(f"{what}.options.{other}")
        return {known[key]: str(item) for key, item in value.items() if known[key]}


class UnmappedError(Exception):
    """A profile has a key that only multi-storage-client itself understands."""


def profile_named(name: str) -> Profile:
    """Returns a profile.

    Raises:
        DatasetFormatError: There is none of this name, or it is malformed; names the file.
    """
    known = _profiles()
    if name not in known:
        if name in _OF_THE_MACHINE:
            return Profile(name)
        if find_spec(PACKAGE) is None:
            text = "needs multi-storage-client: pip install 'energon_lite[msc]'"
            raise DatasetFormatError(f"msc://{name} {text}")
        where = next(iter(known.values()))[1] if known else "no configuration (MSC_CONFIG, rclone)"
        raise DatasetFormatError(
            f"msc://{name}: {where} has no such profile."
            + (did_you_mean(name, known) if known else " Write it: profiles: {...}")
        )
    raw, file = known[name]
    blank = Profile(name, file=file)
    try:
        value = import_module(f"{PACKAGE}.utils").expand_env_vars(raw)
    except ValueError as error:  # names the value, too; after a bare `$` it may be of a secret
        missing = re.search(r"\{\w+\}", str(error).partition(" in '")[0])
        text = f"environment variable ${missing[0] if missing else '...'} is not set; set it"
        raise blank.error(text) from None
    provider, issuer = (value.get(f"{key}_provider") or {} for key in ("storage", "credentials"))
    unknown = min(value.keys() - _USED, default="")
    kind, options = provider.get("type", ""), provider.get("options") or {}
    secrets = issuer.get("options") or {}
    return Profile(name, kind, options, issuer.get("type", ""), secrets, unknown, file)


def _profiles() -> dict[str, tuple[dict[str, Any], str]]:
    """Returns all profiles, each with the file in which it is written."""
    if find_spec(PACKAGE) is None:
        return {}
    config, rclone = (import_module(f"{PACKAGE}.{name}") for name in ("config", "rclone"))
    found = dict[str, tuple[dict[str, Any], str]]()
    for read in (config.StorageClientConfig.read_msc_config, rclone.read_rclone_config):
        try:
            content, file = read()
        except Exception as error:  # its text may have values of profiles
            cause: Any = next((own for own in error.args if isinstance(own, Exception)), error)
            place = getattr(cause, "json_path", type(cause).__name__)
            raise DatasetFormatError(
                "The configuration of multi-storage-client is malformed "
                f"(MSC_CONFIG={os.environ.get('MSC_CONFIG', '')!r}; or rclone.conf): {place}"
            ) from None
        for key, value in ((content or {}).get("profiles") or {}).items():
            if found.setdefault(key, (value, str(file)))[0] != value:
                raise Profile(key, file=str(file)).error(f"is another one in {found[key][1]}")
    return found
