"""Facts about objects: one request for all of a folder, where one for each would be slow."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from energon_lite.extras.remote import object_stores
from energon_lite.extras.remote.object_stores import Facts
from energon_lite.extras.remote.retries import retried

# Objects of the first list of a folder, one page; of a longer one, made after a question that the
# first did not answer; and for each of several objects that are asked for at once. Those that are
# not in a list are asked for by this number of threads.
_PAGE, _MOST_LISTED, _LISTED_OF_EACH, _NUM_THREADS = 1000, 20_000, 4, 32
# For how long a list counts: an object that is replaced meanwhile is noticed when it is read, but
# not one that is new. [Unit: second]
_FRESH_SEC, _ABSENT_SEC = 60.0, 5.0
_JUST_SEC = 1.0
_HAVE_LISTS = ("s3:", "gs:")


class _Listed(NamedTuple):
    """A list of a folder.

    Attributes:
        facts: about objects, by address.
        folders: in it.
        is_whole: whether these are all.
        most: how many it could have.
        time_sec: when it was made.
    """

    facts: dict[str, Facts]
    folders: set[str]
    is_whole: bool
    most: int
    time_sec: float


class Listings:
    """Remembers lists of objects for some seconds; used by many threads.

    Args:
        found: called with the facts of all objects of a folder that is listed for the first time.
    """

    def __init__(self, found: Callable[[dict[str, Facts]], None] = lambda _: None) -> None:
        self._found = found
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}  # of folders that are listed
        self._unanswered = set[str]()
        self._listed: dict[str, _Listed] = {}
        # Whether a store writes ETags in lists as it does elsewhere; known by the first object.
        self._is_alike: dict[str, bool] = {}

    def known(self, address: str) -> dict[str, Any] | None:
        """Returns the status of an address if a list has it; makes no request."""
        listed = self._listed.get(address.rpartition("/")[0])
        if listed is None or not self._is_alike.get(_store_of(address)):
            return None
        age_sec, facts = time.monotonic() - listed.time_sec, listed.facts.get(address)
        if facts is not None and age_sec < _FRESH_SEC:
            return status_in(facts)
        if facts is None and listed.is_whole and age_sec < _ABSENT_SEC:
            return {"is_folder": address in listed.folders}
        return None

    def statuses(self, addresses: list[str]) -> list[dict[str, Any]]:
        """Returns the status of each object; see `status`.

        Raises:
            OSError: One cannot be found out.
        """
        numbers = Counter(address.rpartition("/")[0] for address in addresses)
        pool = ThreadPoolExecutor(_NUM_THREADS)
        try:
            [*pool.map(self._list, numbers, [_LISTED_OF_EACH * num for num in numbers.values()])]
            found = [self.known(own) or pool.submit(self.status, own) for own in addresses]
            return [own if isinstance(own, dict) else own.result() for own in found]
        finally:  # after an error the others are not waited for
            pool.shutdown(wait=False, cancel_futures=True)

    def status(self, address: str) -> dict[str, Any]:
        """Returns size, ETag and version of an object, or whether there are others below it.

        Raises:
            OSError: It cannot be found out.
        """
        folder = address.rpartition("/")[0]
        listed = self._list(folder, _MOST_LISTED if folder in self._unanswered else _PAGE)
        found = self.known(address)
        if found is not None:
            return found
        self._unanswered.add(folder)
        facts = retried(lambda: object_stores.facts_of(address))
        if facts is not None:
            if address in listed:
                self._is_alike.setdefault(_store_of(address), listed[address] == facts)
            return status_in(facts)
        try:
            return {"is_folder": bool(retried(lambda: object_stores.names_below(address, 1)))}
        except OSError as error:
            is_none = error.errno in (errno.ENOENT, errno.ENOTSUP)
            if not is_none or error.strerror == object_stores.NO_BUCKET:
                raise
            return {"is_folder": False}

    def forget(self, address: str) -> None:
        """Forgets the list of a folder of which an object is another one now."""
        with self._lock:
            self._listed.pop(address.rpartition("/")[0], None)

    def expire(self) -> None:
        """Forgets all lists but those just made: a program that starts sees what is there now."""
        with self._lock:
            since = time.monotonic() - _JUST_SEC
            self._listed = {k: own for k, own in self._listed.items() if own.time_sec > since}

    def _list(self, folder: str, most: int) -> dict[str, Facts]:
        """Lists at least a page of a folder if it is time; returns the facts in its list."""
        store, most = _store_of(folder), max(most, _PAGE)
        if not store.startswith(_HAVE_LISTS) or not self._is_alike.get(store, True):
            return {}
        with self._locks.setdefault(folder, threading.Lock()):
            listed = self._listed.get(folder)
            since = time.monotonic() - _FRESH_SEC
            if listed and since < listed.time_sec and (listed.is_whole or most <= listed.most):
                return listed.facts
            try:
                own = object_stores.facts_below(folder, most)
            except OSError:
                own = {}, set(), False
            with self._lock:
                self._listed[folder] = _Listed(*own, most, time.monotonic())
        if listed is None:
            self._found(own[0])
        return own[0]


def _store_of(address: str) -> str:
    """Returns the store in an address: scheme and bucket."""
    return "/".join(address.split("/")[:3])


def status_in(facts: Facts) -> dict[str, Any]:
    """Returns the status of an object as clients get it."""
    return {"size": facts.size_bytes, "identity": [facts.e_tag, facts.version]}
