"""A function of the user over the iterator of all items."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from energon_lite.core.activity import activity_or, current_activity, replaying
from energon_lite.core.dataset import Cursor, SavableDataset, WrapperDataset
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.stages.mapping import FunctionConfig, function_config

T = TypeVar("T")

IterFunction = Callable[[Iterator[Any]], Iterator[T]]

logger = logging.getLogger(__name__)


def same_length(length: int) -> int:
    """Gives the length of a function that gives one item for each."""
    return length


class IterMapDataset(WrapperDataset[T]):
    """Gives what a function makes of the iterator of a stream's items.

    State: if each output depends only on the last input read (`stateless_iter_fn`), the place
    before that input and how many outputs it gave. Else the number of outputs given: a resume then
    runs the pass again from its start, which takes as long as it took.
    Length: `len_map_fn` of that below.
    Keys: `("iter_map", j, key of the input)` for the j-th output of an input; without
    `stateless_iter_fn` they cannot be replayed.

    Args:
        dataset: the items.
        iter_map_fn: gives an iterator for an iterator.
        len_map_fn: gives the number of outputs for a number of items.
        stateless_iter_fn: whether an output depends on nothing but the last input read; an input
            may give any number of outputs.
        iter_map_fn_config: what is to be noticed, on a resume, if it changes; a dict, or a function
            that gives one.
        worker_config: by default that of the dataset.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        iter_map_fn: IterFunction[T],
        *,
        len_map_fn: Callable[[int], int] = same_length,
        stateless_iter_fn: bool = False,
        iter_map_fn_config: FunctionConfig = None,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        super().__init__(dataset.nested())
        self.worker_config = worker_config or self.worker_config
        self.iter_map_fn = iter_map_fn
        self.len_map_fn = len_map_fn
        self.is_stateless = stateless_iter_fn
        self._config = function_config(iter_map_fn_config, "iter_map_fn_config")

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Gives a fresh cursor."""
        return _IterCursor(self, stream)

    def num_items(self, stream: Stream) -> int:
        """Counts the outputs, as `len_map_fn` tells."""
        return self.len_map_fn(self.dataset.num_items(stream))

    def can_restore_sample(self) -> bool:
        """Whether outputs depend on one input each, which can be made again."""
        return self.is_stateless and self.dataset.can_restore_sample()

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the input again, and its outputs up to the one with the key."""
        if len(restore_key) != 3 or restore_key[0] != "iter_map" or not self.is_stateless:
            raise ValueError(f"{restore_key!r} is not a restore key of an iter_map")
        _, number, key = restore_key
        with replaying():
            outputs = iter(self.iter_map_fn(iter([self.dataset.restore_sample(key)])))
            for i, item in enumerate(outputs):
                if i == number:
                    return item
        raise ValueError(f"iter_map_fn gives no output {number} for {key!r} any more")

    def config(self) -> dict[str, JSON]:
        """Gives what decides the content; the function itself cannot be compared."""
        return {
            "stage": "iter_map",
            "stateless": self.is_stateless,
            "expands": True,
            **self._config,
            "of": self.dataset.config(),
        }


class _Inputs(Iterator[Any]):
    """The items on their way into the function; notes where the last one came from."""

    def __init__(self, inner: Cursor[Any], stream: Stream) -> None:
        self.inner = inner
        self.stream = stream
        self.before = inner.snapshot()
        self.slot = self.draws = 0
        self.outputs = 0

    def __next__(self) -> Any:
        before = self.inner.snapshot()
        activity = activity_or(self.stream)
        slot, draws = activity.batch_index, activity.num_draws
        try:
            return next(self.inner)
        finally:
            self.before, self.slot, self.draws = before, slot, draws
            self.outputs = 0


class _IterCursor(Cursor[T]):
    def __init__(self, spec: IterMapDataset[T], stream: Stream) -> None:
        self._spec = spec
        self._stream = stream
        self._given = 0
        self._start()

    def _start(self) -> None:
        self._inputs = _Inputs(self._spec.dataset.cursor(self._stream), self._stream)
        self._items: Iterator[T] | None = None

    def __next__(self) -> T:
        if self._items is None:
            self._items = iter(self._spec.iter_map_fn(self._inputs))
        item = next(self._items)
        inputs = self._inputs
        self.key = ("iter_map", inputs.outputs, getattr(inputs.inner, "key", ()))
        inputs.outputs += 1
        self._given += 1
        return item

    def snapshot(self) -> Snapshot:
        inputs = self._inputs
        if not self._spec.is_stateless:
            return Snapshot("iter_map", {"given": self._given}, (inputs.inner.snapshot(),))
        fields = {"given": inputs.outputs, "slot": inputs.slot, "draws": inputs.draws}
        inner = inputs.before if inputs.outputs else inputs.inner.snapshot()
        return Snapshot("iter_map", fields if inputs.outputs else {"given": 0}, (inner,))

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("iter_map", 1)
        given = snapshot.count("given")
        self._start()
        self._given = 0
        activity = current_activity()
        if self._spec.is_stateless:
            self._inputs.inner.restore(snapshot.inner[0])
            self._inputs.before = snapshot.inner[0]
            slot = activity.batch_index
            if given:
                activity.batch_index = snapshot.count("slot")
                activity.num_draws = snapshot.count("draws")
            for _ in range(given):
                next(self)
            activity.batch_index = slot
            return
        # The place below is not needed, but one that does not fit is refused.
        self._inputs.inner.restore(snapshot.inner[0])
        self._start()
        activity.num_draws = 0
        if given:
            logger.info(
                "IterMapDataset: stream %d runs its function over %d outputs again; with "
                "stateless_iter_fn=True it would go on at once", self._stream.index, given,
            )  # fmt: skip
        for _ in range(given):
            next(self)
        # The place is the same; but what lies below notes, too, in which slot it was reached.
        self._inputs.inner.restore(snapshot.inner[0])
