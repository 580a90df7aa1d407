"""A function of the user over the iterator of all items."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

from numpy.random import Generator

from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.errors import FatalSampleError, StateError, describe
from energon_lite.core.stage import StageCursor
from energon_lite.core.state import COUNT, FLAG, JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import StreamContext, current_context
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import SKIPPED, FunctionRun, UserFunction
from energon_lite.stages.map import (
    FunctionConfig,
    MapDataset,
    WrappedFunction,
    as_user_function,
    plain_config,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


def same_length(length: int) -> int:
    """Returns the length of a function that returns one item for each."""
    return length


class _OnEachInput(WrappedFunction):
    """Runs a function over iterators on one item alone."""

    def __call__(self, item: Any) -> Iterator[Any]:
        yield from self.function(iter((item,)))


class IterMapDataset(MapDataset[T]):
    """Returns what a function makes of the iterator of a stream's items.

    With `stateless_iter_fn`, the function is run on each input alone, as an iterator of one. A
    resume is then immediate, and items can be re-created. Without, it is run over a whole pass and
    may buffer items; a resume runs it over the pass again, which takes the time that the pass took
    so far. What is below it then counts slots and draws on its own, so that it can be run again
    beside others in a blend: there, `current_batch_index` is the number of the item that it makes,
    and `current_sample_index` is not unique.

    An input at which the function raises `SkipSample`, or fails within the usual tolerance, is
    skipped and counted. The function then begins again behind it, and what it buffered is lost.

    State: with `stateless_iter_fn`, that of a generator in a `MapDataset`. Without, how many items
    were returned, and how many samples the stream had drawn before.
    Length: `len_map_fn` of that below.
    Keys: `("iter_map", j, key of the input)` for the j-th item after an input was read.

    Args:
        dataset: the items.
        iter_map_fn: returns an iterator for an iterator. For randomness use `sample_rng()`, which
            belongs to the input that was read last.
        len_map_fn: returns the number of outputs for a number of items.
        stateless_iter_fn: whether an item depends on nothing but the last input read; an input may
            have any number of items.
        iter_map_fn_config: as `map_fn_config` of a `MapDataset`.
        worker_config: has seed and error handlers; by default that of the dataset.

    Raises:
        ValueError: The function wants `restore_seeds` and is run over a whole pass.
    """

    config_name: ClassVar[str] = "iter_map_fn_config"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        iter_map_fn: Callable[[Iterator[Any]], Iterator[T]],
        *,
        len_map_fn: Callable[[int], int] = same_length,
        stateless_iter_fn: bool = False,
        iter_map_fn_config: FunctionConfig = None,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        config = worker_config or dataset.worker_config
        function = as_user_function(
            _OnEachInput(iter_map_fn), "iter_map", config, is_stateless=stateless_iter_fn
        )
        # Whatever it is: its result is iterated.
        function.is_generator = True
        if function.restore_seeds and not stateless_iter_fn:
            raise ValueError(
                f"{function.where} has restore_seeds=True, which needs stateless_iter_fn=True: a "
                "seed belongs to one input. Use sample_rng() instead."
            )
        super().__init__(dataset.nested(), function, worker_config=worker_config)
        self.function_config = plain_config(iter_map_fn_config, self.config_name)
        self.iter_map_fn = iter_map_fn
        self.len_map_fn = len_map_fn

    def open(self, inner: Cursor[Any], stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        if self.function.is_stateless:
            return super().open(inner, stream)
        return _PassCursor(self, inner, stream)

    def num_items(self, stream: Stream) -> int:
        """Counts the items by `len_map_fn`."""
        return self.len_map_fn(self.dataset.num_items(stream))

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Runs the function again on the input alone.

        Raises:
            ValueError: It is not stateless, or the key belongs to another stage.
        """
        if not self.function.is_stateless:
            raise ValueError(
                f"{self.function.where} is run over whole passes, so {restore_key!r} cannot be "
                "re-created; give stateless_iter_fn=True if each item depends on one input only"
            )
        return super().restore_sample(restore_key)

    def own_settings(self) -> dict[str, JSON]:
        """Returns what decides the content; the function itself cannot be compared."""
        return {**super().own_settings(), "stateless_iter_fn": self.function.is_stateless}


class _Inputs(Iterator[Any]):
    """The iterator that a function reads; knows the last input, and the errors from below.

    Attributes:
        key: restore key of the last input; () before the first.
        item: the last input.
        num_read: inputs since the function began.
        num_outputs: items returned since the last input.
        is_held: whether the last input was not counted as skipped.
        error: what came from below instead of an input.
    """

    def __init__(self, inner: Cursor[Any], function: UserFunction) -> None:
        self._inner = inner
        self._function = function
        self.key: RestoreKey = ()
        self.item: Any = None
        self.num_read = self.num_outputs = 0
        self.is_held = False
        self.error: Exception | None = None

    def release(self) -> None:
        """Counts the last input, if no item came of it."""
        if self.is_held and not self.num_outputs:
            current_context().release(self.key)
        self.is_held = False

    def __next__(self) -> Any:
        try:
            self.item = next(self._inner)
        except Exception as error:
            self.error = error
            raise
        self.release()
        self.key, self.is_held = self._inner.key, True
        self.num_read += 1
        self.num_outputs = 0
        self._function.enter(current_context(), self.key)
        return self.item


class _PassCursor(StageCursor[T]):
    """A function over a whole pass.

    Attributes:
        done: items that it returned.
        ended: whether the pass has ended.
        draws: samples that the stream had drawn when the pass began.
    """

    saved: ClassVar = {"done": COUNT, "ended": FLAG, "draws": COUNT}
    done: int
    ended: bool
    draws: int
    key: RestoreKey = ()

    def __init__(self, spec: IterMapDataset[T], inner: Cursor[Any], stream: Stream) -> None:
        super().__init__(spec)
        self._stream = stream
        self._run = FunctionRun(spec.function)
        self._inputs = _Inputs(inner, spec.function)
        self._items: Iterator[T] | None = None
        self._rng: Generator | None = None
        # Samples drawn by now, counted by what is below on its own; None before the pass begins.
        self._num_draws: int | None = None

    def __next__(self) -> T:
        if self.ended:
            raise StopIteration
        context = current_context()
        slot, of_all = context.batch_index, context.num_draws
        if self._num_draws is None:
            self.draws = self._num_draws = of_all
        context.num_draws = before = self._num_draws
        context.batch_index = self.done * self._stream.num_streams + self._stream.index
        try:
            item = self._pull(context)
        finally:
            self._num_draws = context.num_draws
            context.batch_index, context.num_draws = slot, of_all + self._num_draws - before
        inputs = self._inputs
        self.key = ("iter_map", inputs.num_outputs, *([inputs.key] if inputs.key else ()))
        inputs.num_outputs += 1
        self.done += 1
        return item

    def _pull(self, context: StreamContext) -> T:
        inputs, function = self._inputs, self.spec.function
        while True:
            # What the function drew for its last input continues where it was.
            function.enter(context, inputs.key, inputs.num_outputs)
            context.rng = self._rng
            try:
                if self._items is None:
                    inputs.num_read = 0
                    self._items = iter(self.spec.iter_map_fn(inputs))
                item: Any = next(self._items, SKIPPED)
                if item is None:
                    raise TypeError(f"{function.where} returned None, which is no item")
            except Exception as error:
                if error is inputs.error:
                    raise
                self._begin_again(error)
                continue
            finally:
                self._rng = context.rng
            if item is SKIPPED:
                inputs.release()
                self.ended = True
                raise StopIteration
            self._run.failures = 0
            return item  # type: ignore[no-any-return]

    def _begin_again(self, error: Exception) -> None:
        """Skips the input at which the function failed."""
        inputs = self._inputs
        self._items = None
        if not inputs.num_read:
            raise FatalSampleError(
                f"{self.spec.function.where} failed before it read anything: {describe(error)}"
            ) from error
        self._run.count_skip(error, inputs.key, inputs.item, is_dropped=not inputs.num_outputs)
        inputs.is_held = False

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        done, self.done, ended, self.ended = self.done, 0, self.ended, False
        if not done and not ended:
            return
        where = self.spec.function.where
        logger.info(
            "%s is run again over the %d items that it returned; with stateless_iter_fn=True a "
            "resume would be immediate", where, done,
        )  # fmt: skip
        self._num_draws, context = self.draws, current_context()
        with context.passing(context.batch_index):
            for number in range(done + ended):
                is_end = next(self, SKIPPED) is SKIPPED
                if is_end != (number == done):
                    raise StateError(
                        f"{where} returned {done} items before, and {number if is_end else 'more'}"
                        " now; it must return the same whenever it is run"
                    )
