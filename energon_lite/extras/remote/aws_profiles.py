"""Profiles of `~/.aws`, read as the tools of AWS do."""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from energon_lite.core.errors import DatasetFormatError

# The files are read again before this, as programs renew keys in them.
_VALID = timedelta(minutes=10)
# Keys of profiles whose credentials only the tools of AWS can get.
_OF_TOOLS = (
    "role_arn", "sso_session", "sso_start_url", "credential_process", "login_session",
)  # fmt: skip
_ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")


def aws_settings(name: str = "") -> dict[str, Any]:
    """Returns the arguments of `S3Store` in a profile; the environment comes before it.

    Args:
        name: of the profile; by default that of AWS_PROFILE, or "default".

    Raises:
        DatasetFormatError: The profile is not there, or has keys that only AWS's tools understand.
    """
    values = _profile(name)
    found = dict[str, Any]()
    for key, setting, variables in (
        ("region", "region", _REGIONS), ("endpoint_url", "endpoint", _ENDPOINTS),
    ):  # fmt: skip
        if key in values and not any(map(os.environ.get, variables)):
            found[setting] = values[key]
    if any(map(os.environ.get, _CREDENTIALS)) and not name:
        return found
    if "aws_access_key_id" in values:
        _keys(name)
        found.update(credential_provider=lambda: _keys(name), skip_signature=False)
    elif other := next((key for key in _OF_TOOLS if key in values), None):
        raise DatasetFormatError(
            f"AWS profile {_name(name)!r} has {other}, which only AWS's tools understand; run "
            f'eval "$(aws configure export-credentials --profile {_name(name)} --format env)"'
        )
    return found


def _name(name: str) -> str:
    environ = os.environ
    return name or environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"


def _profile(name: str) -> Mapping[str, str]:
    """Returns the values of a profile in both files; those of the second one count."""
    own, found = _name(name), dict[str, str]()
    sections = {
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"): f"profile {own}",
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"): own,
    }
    for file, section in sections.items():
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(Path(file).expanduser(), "utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError) as error:  # has lines of the file
            raise DatasetFormatError(f"{file} cannot be read: {type(error).__name__}") from None
        for title in {own, section} & {*parser.sections()}:
            found.update(parser[title])
    if not found and own != "default":
        raise DatasetFormatError(f"AWS profile {own!r} is in none of {', '.join(sections)}")
    return found


def _keys(name: str) -> dict[str, Any]:
    values = _profile(name)
    try:
        return {
            "access_key_id": values["aws_access_key_id"],
            "secret_access_key": values["aws_secret_access_key"],
            "token": values.get("aws_session_token"),
            "expires_at": datetime.now(timezone.utc) + _VALID,
        }
    except KeyError as error:
        raise DatasetFormatError(f"AWS profile {_name(name)!r} has no {error.args[0]}") from None
