"""Stores of the profiles of multi-storage-client; only the fetcher imports this."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from obstore import exceptions, store

from energon_lite.extras.remote.aws_profiles import aws_settings
from energon_lite.extras.remote.msc_profiles import PACKAGE, Profile, UnmappedError

# Tunings of the transfers of multi-storage-client, which have no effect here.
_TUNING = dict.fromkeys((
    "base_path", "type", "multipart_threshold", "multipart_chunksize", "max_concurrency",
    "io_chunksize",
    "max_pool_connections", "max_bandwidth", "connect_timeout", "read_timeout", "retries",
    "request_checksum_calculation", "response_checksum_validation", "rust_client", "project_id",
), "")  # fmt: skip
# By type: the store, what it calls options of the provider, and further settings.
# Objects are removed one by one, which stores without bulk deletes can do as well.
ONE_BY_ONE: dict[str, Any] = {"disable_bulk_delete": True}
_S3 = {"region_name": "region", "endpoint_url": "endpoint", "signature_version": "sign",
       "profile_name": "profile"}  # fmt: skip
_KINDS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    **dict.fromkeys(("s3", "s8k", "ais_s3"), (store.S3Store, _S3, ONE_BY_ONE)),
    "gcs_s3": (
        store.S3Store,
        _S3,
        {**ONE_BY_ONE, "endpoint": "https://storage.googleapis.com"},
    ),
    "gcs": (store.GCSStore, {"endpoint_url": "base_url"}, {}),
    "azure": (store.AzureStore, {"endpoint_url": "endpoint"}, {}),
}


class Profiled:
    """The stores of a profile: one for each bucket.

    Args:
        profile: the profile.
        common: settings of all stores.
    """

    def __init__(self, profile: Profile, common: dict[str, Any]) -> None:
        self._profile, self._common = profile, common
        self._base = str(profile.options.get("base_path") or "")
        self._make = cache(self._made)

    def at(self, key: str) -> tuple[Any, str]:
        """Returns the store of a path below the profile, and the key in it.

        Raises:
            DatasetFormatError: The profile is malformed, or has keys that nothing here knows.
        """
        if self._profile.kind == "file":
            return self._make(""), key
        place, _, inside = f"{self._base.strip('/')}/{key}".strip("/").partition("/")
        made = self._make(place)
        return made, key if isinstance(made, ClientStore) else inside

    def _made(self, place: str) -> Any:
        try:
            return self._mapped(place)
        except UnmappedError as key:
            try:
                return client_of(self._profile.name)
            except Exception as error:
                what = str(error) if isinstance(error, ImportError) else type(error).__name__
                text = f"{key} is not known here, and multi-storage-client cannot read it: {what}"
                raise self._profile.error(text) from None

    def _mapped(self, place: str) -> Any:
        own = self._profile
        if own.unknown:
            raise UnmappedError(own.unknown)
        if own.kind == "file":
            own.checked("storage_provider", own.options, _TUNING)
            return store.LocalStore(self._base or "/", mkdir=True)
        if own.kind not in _KINDS:
            raise UnmappedError(f"storage_provider.type {own.kind!r}")
        make, names, given = _KINDS[own.kind]
        found = own.checked("storage_provider", own.options, {**_TUNING, **names})
        settings: dict[str, Any] = {**given, **found}
        if settings.pop("sign", "").upper() == "UNSIGNED":
            settings["skip_signature"] = True
        elif own.issuer in _ISSUERS:
            kind, names, of = _ISSUERS[own.issuer]
            if kind is not make:
                raise UnmappedError(f"credentials_provider.type {own.issuer!r}")
            found = own.checked("credentials_provider", own.secrets, names)
            of(own, found, settings)
        elif own.issuer:
            raise UnmappedError(f"credentials_provider.type {own.issuer!r}")
        elif make is store.S3Store:
            settings = {**aws_settings(settings.pop("profile", "")), **settings}
        return make(place, **settings, **self._common)


def _s3_keys(own: Profile, found: dict[str, str], settings: dict[str, Any]) -> None:
    if not found.keys() >= {"access_key_id", "secret_access_key"}:
        raise own.error("credentials_provider: write access_key and secret_key")
    # The environment's are of others.
    settings["skip_signature"] = False
    settings["credential_provider"] = lambda: {"token": None, **found, "expires_at": None}


def _s3_file(own: Profile, found: dict[str, str], settings: dict[str, Any]) -> None:
    """Reads credentials as AWS's external processes write them; again where they expire."""

    def read() -> dict[str, Any]:
        try:
            value = json.loads(Path(found["path"]).read_bytes())
            end = value.get("Expiration")
            return {
                "access_key_id": value["AccessKeyId"],
                "secret_access_key": value["SecretAccessKey"],
                "token": value.get("SessionToken"),
                "expires_at": end and datetime.fromisoformat(end.replace("Z", "+00:00")),
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise own.error(
                "credentials_provider: credential_file_path must be of a file with AccessKeyId, "
                f"SecretAccessKey, SessionToken and Expiration ({type(error).__name__})"
            ) from None

    read()
    settings.update(skip_signature=False, credential_provider=read)


def _azure_keys(own: Profile, found: dict[str, str], settings: dict[str, Any]) -> None:
    pairs = [part.partition("=")[::2] for part in found.get("connection", "").split(";")]
    given = dict(pairs)
    names = {"AccountKey": "access_key", "SharedAccessSignature": "sas_token"}
    secret = {names[name]: value for name, value in pairs if name in names}
    if not secret:
        raise own.error("credentials_provider: connection has no key and no signature")
    settings["account_name"] = given.get("AccountName", "")
    if "BlobEndpoint" in given:
        settings.setdefault("endpoint", given["BlobEndpoint"])
    settings["credential_provider"] = lambda: {**secret, "expires_at": None}


def _azure_default(own: Profile, found: dict[str, str], settings: dict[str, Any]) -> None:
    del own, found
    host = settings.get("endpoint", "").partition("://")[2]
    settings["account_name"] = host.partition(".")[0]


_ISSUERS: dict[str, Any] = {
    "S3Credentials": (store.S3Store, {
        "access_key": "access_key_id", "secret_key": "secret_access_key", "session_token": "token",
    }, _s3_keys),
    "FileBasedCredentials": (store.S3Store, {"credential_file_path": "path"}, _s3_file),
    "AzureCredentials": (store.AzureStore, {"connection": "connection"}, _azure_keys),
    "DefaultAzureCredentials": (store.AzureStore, {}, _azure_default),
}  # fmt: skip


# ------------------------------------------------------------- what only multi-storage-client knows


class _Data:
    """Bytes, as obstore has them."""

    def __init__(self, data: bytes) -> None:
        self.bytes = lambda: data


class ClientStore:
    """A store of an installed multi-storage-client, with the methods of obstore's that are used.

    Args:
        client: its `StorageClient`.
        range_of: its `Range`.
    """

    def __init__(self, client: Any, range_of: Any) -> None:
        self._client, self._range_of = client, range_of

    def head(self, key: str) -> dict[str, Any]:
        """Returns the facts about an object."""
        found = self._client.info(key)
        if found.type != "file":
            raise FileNotFoundError(key)
        return {"size": found.content_length, "e_tag": found.etag or str(found.last_modified),
                "version": None}  # fmt: skip

    def get(self, key: str, options: Any = None) -> _Data:
        """Reads a range, after a look whether it is still the same object."""
        options = options or {}
        if "if_match" in options and self.head(key)["e_tag"] != options["if_match"]:
            raise exceptions.PreconditionError
        start, stop = options.get("range", (None, None))
        part = None if start is None else self._range_of(offset=start, size=stop - start)
        return _Data(self._client.read(key, byte_range=part))

    def list(self, prefix: str | None, chunk_size: int) -> Iterator[list[dict[str, Any]]]:
        """Yields the first objects below a prefix."""
        yield [
            {"path": one.key} for one in islice(self._client.list(path=prefix or ""), chunk_size)
        ]

    def list_with_delimiter(self, prefix: str | None) -> dict[str, Any]:
        """Returns what is below a prefix, one level deep."""
        found = list(self._client.list(path=prefix or "", include_directories=True))
        folders = [one.key for one in found if one.type != "file"]
        return {"common_prefixes": folders,
                "objects": [{"path": one.key} for one in found if one.type == "file"]}  # fmt: skip

    def put(self, key: str, data: Any, mode: Any) -> None:
        """Writes an object."""
        if mode != "overwrite":
            raise exceptions.NotSupportedError
        self._client.write(key, data.read_bytes() if isinstance(data, Path) else data)

    def delete(self, key: str) -> None:
        """Removes an object."""
        self._client.delete(key)


def client_of(name: str) -> ClientStore:
    """Returns a profile as an installed multi-storage-client reads it."""
    msc = import_module(PACKAGE)
    client = msc.StorageClient(msc.StorageClientConfig.from_file(profile=name))
    return ClientStore(client, msc.types.Range)
