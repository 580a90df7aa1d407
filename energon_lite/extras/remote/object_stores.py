"""Objects of S3, GCS, Azure and HTTP servers; only the fetcher imports this, and so obstore.

A store that was used before a fork hangs in the child, and asynchronous calls may abort a program
at its end. So all calls are synchronous, in threads of a process that was started by exec.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from obstore import exceptions, store

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.remote.aws_profiles import aws_settings
from energon_lite.extras.remote.msc_profiles import profile_named
from energon_lite.extras.remote.msc_stores import ONE_BY_ONE, Profiled

# Requests are repeated and counted by `retries`.
_RETRY: Any = {"max_retries": 0}
_CLIENT: Any = {"timeout": "30s", "connect_timeout": "5s", "pool_max_idle_per_host": "256"}
_ADDRESS = re.compile(r"https?://\S+")
# Errors of the search for credentials, which asks the machine at last.
_NO_CREDENTIALS = re.compile(r"//169\.254\.|//metadata|[Tt]oken|[Cc]redential|Account must be")
# Bodies of answers may repeat what was sent; the status and the code of an error do not.
_STATUS = re.compile(r"status(?: code)?:? (\d{3}\b[ A-Za-z]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_OWN_VALUES = ("AWS_", "GOOGLE_", "AZURE_", "MSC_")
_PASSING = ("408", "425", "429")
# Errors that pass, and have a status of those that do not.
_PASSING_CODES = ("RequestTimeout", "RequestTimeTooSkewed", "OperationAborted")
# A list of a bucket that is missing has this error; one of an empty folder has none.
NO_BUCKET = "there is no such bucket; check its name and the endpoint"
_SETTINGS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or AWS_SKIP_SIGNATURE=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "msc": "credentials_provider in the profile",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY",
}


# Instead of whichever object it is.
ANY: Any = object()


class Facts(NamedTuple):
    """An object as it is now.

    Attributes:
        size_bytes: its size.
        e_tag: differs between objects that had the key one after the other.
        version: the same, where the store keeps versions.
    """

    size_bytes: int
    e_tag: str | None
    version: str | None


@cache
def _store_at(scheme: str, place: str) -> Any:
    """Returns the store of a bucket, container or server, with settings of the environment."""
    # An endpoint without TLS is one that the user has named.
    options = {"client_options": {**_CLIENT, "allow_http": True}, "retry_config": _RETRY}
    if scheme == "msc":
        return Profiled(profile_named(place), options)
    if scheme == "s3":
        return store.S3Store(place, **ONE_BY_ONE, **aws_settings(), **options)
    if scheme == "gs":
        return store.GCSStore(place, **options)
    if scheme == "az":
        return store.AzureStore(place, **options)
    options["client_options"] = {**_CLIENT, "allow_http": scheme == "http"}
    return store.HTTPStore.from_url(f"{scheme}://{place}", **options)


@lru_cache(1 << 14)
def _object_at(address: str) -> tuple[Any, str]:
    """Returns the store of an address, and the key in it."""
    scheme, _, rest = address.partition("://")
    place, _, key = rest.partition("/")
    with _errors_of(address):
        found = _store_at(scheme, place)
        return found.at(key) if isinstance(found, Profiled) else (found, key)


_REFUSALS = (
    exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, exceptions.GenericError,
    exceptions.AlreadyExistsError,
)  # fmt: skip
_KINDS: dict[type[BaseException], tuple[int, str]] = {
    FileNotFoundError: (errno.ENOENT, "there is no such object"),
    exceptions.NotFoundError: (errno.ENOENT, "there is no such object"),
    exceptions.PermissionDeniedError: (
        errno.EACCES, "the store refuses access; check the credentials of this process, or give "
        "them permission",
    ),
    exceptions.UnauthenticatedError: (
        errno.EACCES, "the store does not accept the credentials; they are missing or expired",
    ),
    exceptions.PreconditionError: (
        errno.ESTALE, "the object was replaced after it was opened; write new data under new names",
    ),
    exceptions.AlreadyExistsError: (errno.EEXIST, "another program has written it meanwhile"),
    exceptions.NotSupportedError: (errno.ENOTSUP, "this store cannot do that"),
}  # fmt: skip


class _errors_of:  # noqa: N801  as `contextlib.suppress`; a generator would take many times as long
    """Makes each error one of the system that names the address and what to do, and no secret."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        """Begins a request."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Explains what the request raised."""
        if error is not None:  # multi-storage-client may raise any, and obstore panic
            scheme = self._address.partition(":")[0]
            raise OSError(*_explained(error, scheme), self._address) from None


def _explained(error: BaseException, scheme: str) -> tuple[int, str]:
    if isinstance(error, DatasetFormatError):
        return errno.EINVAL, str(error)
    text = str(error).partition("Debug source")[0]
    status, code = _STATUS.search(text), _code_in(text)
    if code in _PASSING_CODES:
        return errno.EIO, f"the store answers {code}"
    if code == "NoSuchBucket":
        return errno.ENOENT, NO_BUCKET
    mark = f" ({code})" if code else ""
    known = _KINDS.get(type(error))
    if known is not None:
        return known[0], known[1] + mark
    if not isinstance(error, Exception):
        return errno.EINVAL, "the store cannot be used so; check its endpoint and other settings"
    if scheme in _SETTINGS and _NO_CREDENTIALS.search(text[: status.start()] if status else text):
        return errno.EACCES, f"no credentials for this store are found; set {_SETTINGS[scheme]}"
    if "error sending request" in text:
        return errno.EIO, "the server cannot be reached; check the address and the network"
    if status or scheme == "msc":  # a text may have values of the profile
        found = status[1].strip() if status else type(error).__name__
        is_final = status is not None and status[1][0] == "4" and status[1][:3] not in _PASSING
        return errno.EINVAL if is_final else errno.EIO, f"the store answers {found}{mark}"
    for name, value in os.environ.items():
        if name.startswith(_OWN_VALUES) and value:
            text = text.replace(value, f"${name}")
    return errno.EIO, " ".join(_ADDRESS.sub("the store", text).split())[:300]


def _code_in(text: str) -> str:
    """Returns the code in the text of a store's error; "" without."""
    code = _CODE.search(text)
    return code[1] if code else ""


def facts_of(address: str) -> Facts | None:
    """Returns the facts about an object; None if there is none."""
    objects, key = _object_at(address)
    if not key:
        return None
    try:
        with _errors_of(address):
            try:
                found = objects.head(key)
            except _REFUSALS:  # the answer to HEAD has no body, where the code of an error is
                found = objects.get(key).meta
    except FileNotFoundError:
        return None
    if found["e_tag"] is None and isinstance(objects, (store.S3Store, store.GCSStore)):
        text = "the answer has no ETag, so it may be from a proxy and not from the store"
        raise OSError(errno.EIO, f"{text}; check the endpoint", address)
    return Facts(found["size"], found["e_tag"], None if found["e_tag"] else found["version"])


def names_below(address: str, most: int | None = None) -> list[str]:
    """Returns the names below a prefix, one level deep; those of prefixes with a `/` at the end."""
    objects, key = _object_at(address)
    prefix = f"{key.rstrip('/')}/" if key else ""
    with _errors_of(address):
        if most is not None:  # one page is enough
            page: Any = next(iter(objects.list(prefix or None, chunk_size=most)), [])
            return [entry["path"][len(prefix) :] for entry in page]
        found = objects.list_with_delimiter(prefix or None)
    folders = [f"{name.rstrip('/')}/" for name in found["common_prefixes"]]
    return [name[len(prefix) :] for name in (*folders, *(o["path"] for o in found["objects"]))]


def read_range(address: str, start: int, stop: int, e_tag: str | None) -> Any:
    """Returns bytes of an object, as a buffer; the error `ESTALE` if it is another object now."""
    options: Any = {"range": (start, stop)}
    if e_tag:
        options["if_match"] = e_tag
    with _errors_of(address):
        objects, key = _object_at(address)
        data = memoryview(objects.get(key, options=options).bytes())
    if len(data) != stop - start:
        text = f"the store returned {len(data):,} bytes for {stop - start:,}"
        raise OSError(errno.EIO, text, address)
    return data


def write_whole(address: str, data: bytes | Path, over: Any = ANY) -> None:
    """Writes an object, whole or not at all.

    Args:
        address: of the object.
        data: its content, or a file with it.
        over: ETag and version of the object that it replaces, where the store can compare; None:
            there must be none. It is also well if the content is there already.

    Raises:
        OSError: `EEXIST` if another program wrote the object meanwhile.
    """
    objects, key = _object_at(address)
    with _errors_of(address):
        try:
            objects.put(key, data, mode=_mode(over))
        except exceptions.NotSupportedError:
            if over is ANY:
                raise
            objects.put(key, data, mode="overwrite")
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            if _code_in(str(error)) in _PASSING_CODES:
                raise
            # A request of which the answer was lost has been done.
            if bytes(objects.get(key).bytes()) != data:
                raise exceptions.AlreadyExistsError from None


def _mode(over: Any) -> Any:
    """Returns the condition of a write as obstore takes it."""
    if over is ANY:
        return "overwrite"
    if over is None:
        return "create"
    return {name: value for name, value in zip(("e_tag", "version"), over, strict=True) if value}


def remove(address: str) -> None:
    """Removes an object, if it is there."""
    objects, key = _object_at(address)
    with suppress(FileNotFoundError), _errors_of(address):
        objects.delete(key)
