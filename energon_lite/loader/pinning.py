"""Batches in page-locked memory, from which a GPU copies while the training loop goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory

from energon_lite.loader.turns import Delivery


def pinned(delivery: Delivery) -> Delivery:
    """Returns the delivery with its tensors in page-locked memory."""
    item: Any = pin_memory(delivery.item)  # type: ignore[no-untyped-call]
    return delivery._replace(item=item)


class PinnedAhead:
    """Copies the next batch into page-locked memory while the last one is being used."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pinning")
        self._ahead: Future[Delivery] | None = None

    def next(self, receive: Callable[[], Delivery], is_ready: Callable[[], bool]) -> Delivery:
        """Returns the next delivery.

        Args:
            receive: returns the next delivery.
            is_ready: whether it would do so without a wait.

        Raises:
            Exception: Of `receive`; where it was called ahead, after the delivery before.
        """
        ahead, self._ahead = self._ahead, None
        delivery = (ahead or self._received(receive)).result()
        if is_ready():
            self._ahead = self._received(receive)
        return delivery

    def _received(self, receive: Callable[[], Delivery]) -> Future[Delivery]:
        try:
            return self._thread.submit(pinned, receive())
        except Exception as error:
            failed: Future[Delivery] = Future()
            failed.set_exception(error.with_traceback(None))  # whose frames have the future
            return failed

    def drop(self) -> None:
        """Drops what was received ahead."""
        self._ahead = None
