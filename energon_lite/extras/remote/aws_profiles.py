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
_OF_TOOLS = ("role_arn", "sso_session", "sso_start_url", "credential_process", "login_session")
# What comes before a profile.
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
_PLACES = {
    "region": ("region", "AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint_url": ("endpoint", "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
}


def aws_settings(name: str = "") -> dict[str, Any]:
    """Returns the arguments of `S3Store` in a profile; the environment comes before it.

    Args:
        name: of the profile; by default that of AWS_PROFILE, or "default".

    Raises:
        DatasetFormatError: The profile is not there, or has keys that only AWS's tools understand.
    """
    named = name or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    own = named or "default"
    values, found = _profile(own), dict[str, Any]()
    for key, (setting, *variables) in _PLACES.items():
        if key in values and not any(map(os.environ.get, variables)):
            found[setting] = values[key]
    if any(map(os.environ.get, _CREDENTIALS)) and not name:
        return found
    if "aws_access_key_id" in values:
        _keys(own)
        return {**found, "credential_provider": lambda: _keys(own), "skip_signature": False}
    if other := next((key for key in _OF_TOOLS if key in values), None):
        raise DatasetFormatError(
            f"AWS profile {own!r} has {other}, which only AWS's tools understand; run "
            f'eval "$(aws configure export-credentials --profile {own} --format env)"'
        )
    return found


def _profile(own: str) -> Mapping[str, str]:
    """Returns the values of a profile in both files; those of the second one count."""
    sections, found = dict[str, set[str]](), dict[str, str]()
    sections[os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")] = {own, f"profile {own}"}
    sections[os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")] = {own}
    for file, titles in sections.items():
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(Path(file).expanduser(), "utf-8")
        except (configparser.Error, ValueError, OSError) as error:  # its text has lines of the file
            raise DatasetFormatError(f"{file} cannot be read: {type(error).__name__}") from None
        for title in titles & {*parser.sections()}:
            found.update(parser[title])
    if not found and own != "default":
        raise DatasetFormatError(f"AWS profile {own!r} is in none of {', '.join(sections)}")
    return found


def _keys(own: str) -> dict[str, Any]:
    values = _profile(own)
    if "aws_secret_access_key" not in values:
        raise DatasetFormatError(f"AWS profile {own!r} has no aws_secret_access_key")
    keys = {"access_key_id": "aws_access_key_id", "secret_access_key": "aws_secret_access_key"}
    found = {name: values.get(key) for name, key in {**keys, "token": "aws_session_token"}.items()}
    return {**found, "expires_at": datetime.now(timezone.utc) + _VALID}
