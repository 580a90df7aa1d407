"""How long encoded samples are, for blends by tokens and for statistics."""

from __future__ import annotations

from typing import Any, TypeVar

from energon_lite.core.activity import current_activity
from energon_lite.core.dataset import Cursor, SavableDataset, WrapperDataset
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import LEFT_OUT, FunctionRun, UserFunction

T = TypeVar("T")


class MeasureDataset(WrapperDataset[T]):
    """Counts the tokens of each sample that comes by; the samples stay as they are.

    State: none of its own.
    Length: as below.
    Keys: as below.

    Args:
        dataset: the encoded samples.
        length_fn: gives a sample's tokens, or a dict of lengths with an entry "tokens".
    """

    def __init__(self, dataset: SavableDataset[T], length_fn: UserFunction) -> None:
        super().__init__(dataset)
        self.function = length_fn

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Gives a fresh cursor."""
        return _MeasureCursor(self.dataset.cursor(stream), self.function)

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the sample again."""
        item: T = self.dataset.restore_sample(restore_key)
        return item

    def config(self) -> dict[str, JSON]:
        """As below: measuring changes nothing."""
        return self.dataset.config()


class _MeasureCursor(Cursor[T]):
    def __init__(self, inner: Cursor[T], function: UserFunction) -> None:
        self._inner = inner
        self._run = FunctionRun(function)

    def __next__(self) -> T:
        while True:
            item = next(self._inner)
            found = self._run.call(self._inner.key, item)
            if found is LEFT_OUT:
                continue
            self.key = self._inner.key
            current_activity().measured(self.key, tokens_of(found, self._run.spec.where))
            return item

    def snapshot(self) -> Snapshot:
        return self._inner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._inner.restore(snapshot)


def tokens_of(length: Any, where: str) -> int:
    """Gives the tokens that `sample_length` told, alone or among other resources.

    Raises:
        FatalSampleError: It told something else.
    """
    tokens: Any = length.get("tokens") if isinstance(length, dict) else length
    if isinstance(tokens, bool) or not hasattr(tokens, "__index__") or int(tokens) < 0:
        raise FatalSampleError(
            f"{where} gave {length!r:.80}; return the sample's tokens as an integer of at least 0, "
            'or a dict of resources with an entry "tokens"'
        )
    return int(tokens)
