"""Facts about objects: asked for many at a time, and remembered for a minute."""

from __future__ import annotations

import errno
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from energon_lite.extras.remote import object_stores
from energon_lite.extras.remote.retries import retried

_NUM_THREADS = 128
# For how long facts count: an object that is replaced meanwhile is noticed when it is read.
# [Unit: second]
_FRESH_SEC, _JUST_SEC = 60.0, 1.0


class Statuses:
    """Remembers sizes and ETags of objects for a while; used by many threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS)
        self._found: dict[str, tuple[float, dict[str, Any]]] = {}

    def known(self, address: str) -> dict[str, Any] | None:
        """Returns the status of an object if it is remembered; makes no request."""
        since, status = self._found.get(address, (0.0, None))
        return status if time.monotonic() < since + _FRESH_SEC else None

    def of(self, addresses: list[str]) -> list[dict[str, Any]]:
        """Returns the size and identity of each object, or whether there are others below it.

        Raises:
            OSError: One cannot be found out.
        """
        return [*self._pool.map(self._status, addresses)]

    def _status(self, address: str) -> dict[str, Any]:
        if known := self.known(address):
            return known
        facts = retried(lambda: object_stores.facts_of(address))
        if facts is not None:
            status = {"size": facts.size_bytes, "identity": [facts.e_tag, facts.version]}
            self._found[address] = time.monotonic(), status
            return status
        try:
            return {"is_folder": bool(retried(lambda: object_stores.names_below(address, 1)))}
        except OSError as error:
            is_none = error.errno in (errno.ENOENT, errno.ENOTSUP)
            if not is_none or error.strerror == object_stores.NO_BUCKET:
                raise
            return {"is_folder": False}

    def forget(self, address: str) -> None:
        """Forgets an object that is another one now."""
        self._found.pop(address, None)

    def expire(self) -> None:
        """Forgets all but what was just found: a program that starts sees what is there now."""
        since = time.monotonic() - _JUST_SEC
        self._found = {k: own for k, own in self._found.copy().items() if own[0] > since}
