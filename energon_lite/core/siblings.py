"""Items that are made again: those of one input of a generator hook together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import Siblings, replaying


@contextmanager
def together(siblings: Siblings) -> Iterator[None]:
    """For a `with` block, runs a generator hook once for all siblings that it is to make again.

    After it the stream is in the slot in which it was before.
    """
    with replaying() as context:
        before, slot = context.siblings, context.batch_index
        # What is being made again already may be part of more.
        context.siblings = before or siblings
        try:
            yield
        finally:
            # A batch was made again in its own slot.
            context.siblings, context.batch_index = before, slot


class Again:
    """Makes items of a buffer again, one by one, each when it is needed.

    Args:
        restore: makes one item.
        keys: the restore keys of all items of the buffer that may be asked for.
    """

    def __init__(
        self, restore: Callable[[RestoreKey], Any], keys: Iterable[RestoreKey] = ()
    ) -> None:
        self._restore = restore
        self._siblings = Siblings(keys)

    def __call__(self, key: RestoreKey) -> Any:
        """Makes the item of a key again."""
        with together(self._siblings):
            return self._restore(key)
