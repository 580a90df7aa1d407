"""How long encoded samples are, for packing, blends by tokens and statistics."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, TypeVar

from energon_lite.batching.rules import Buckets, Packing
from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.stage import PerItemStage
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import current_context
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED, FunctionRun, UserFunction

T = TypeVar("T")


class MeasureDataset(PerItemStage[T]):
    """Counts the tokens of each sample that comes by; the samples stay as they are.

    State: none.
    Length: as below.
    Keys: as below.

    Args:
        dataset: the encoded samples.
        length_fn: returns a sample's tokens, or a dict of lengths with an entry "tokens".
        packing: by which samples that are too long for a pack, or a batch, are dropped or cut; what
            does not come into one is not counted.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        length_fn: UserFunction,
        packing: Packing | Buckets | None = None,
    ) -> None:
        super().__init__(dataset)
        self.function = length_fn
        self.packing = packing

    def cursor(self, stream: Stream) -> MeasureCursor[T]:
        """Returns a fresh cursor."""
        return MeasureCursor(
            self, self.dataset.cursor(dataclasses.replace(stream, is_measured=True))
        )

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the sample again."""
        item: T = self.dataset.restore_sample(restore_key)
        return item

    def config(self) -> dict[str, JSON]:
        """As below: measuring changes nothing."""
        return self.dataset.config()


class MeasureCursor(Cursor[T]):
    """A place among measured samples.

    Attributes:
        length: what `length_fn` returned for the sample that `next` returned last.
    """

    length: Any

    def __init__(self, spec: MeasureDataset[T], inner: Cursor[T]) -> None:
        self._packing = spec.packing
        # Of samples up to here all tokens count.
        self._longest = sys.maxsize if spec.packing is None else spec.packing.longest
        self._inner = inner
        self._run = FunctionRun(spec.function)

    def __next__(self) -> T:
        """Returns the next sample, measured."""
        while True:
            item = next(self._inner)
            key = self._inner.key
            found = self._run.call(key, item)
            if found is SKIPPED:
                continue
            self.key = key
            self.length = found
            is_plain = type(found) is int and 0 <= found <= self._longest
            tokens = found if is_plain else self._counted(found)
            current_context().measured(key, tokens)
            return item

    def _counted(self, found: Any) -> int:
        tokens = tokens_of(found, self._run.spec)
        return tokens if self._packing is None else self._packing.kept_tokens(found)

    def snapshot(self) -> Snapshot:
        """Returns the place between two samples."""
        return self._inner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the place of a snapshot."""
        self._inner.restore(snapshot)


def tokens_of(length: Any, function: UserFunction) -> int:
    """Returns the tokens that `sample_length` returned, alone or among other resources.

    Raises:
        FatalSampleError: It returned something else.
    """
    tokens: Any = length.get("tokens") if isinstance(length, dict) else length
    if isinstance(tokens, bool) or not hasattr(tokens, "__index__") or int(tokens) < 0:
        raise FatalSampleError(
            f"{function.where} returned {length!r:.80}; return tokens as an integer of at least 0, "
            'or a dict of resources with an entry "tokens"'
        )
    return int(tokens)
