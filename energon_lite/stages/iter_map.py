"""A function of the user over the iterator of all items."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

from numpy.random import Generator

from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.errors import FatalSampleError, StateError, describe
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import StreamContext, current_context
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import SKIPPED, FunctionRun, UserFunction
from energon_lite.stages.map import (
    FunctionConfig,
    MapDataset,
    as_user_function,
    passing_over,
    plain_config,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


def same_length(length: int) -> int:
    """Returns the length of a function that gives one item for each."""
    return length


class _OnEachInput:
    """Runs a function over iterators on one item alone."""

    def __init__(self, iter_map_fn: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        functools.update_wrapper(self, iter_map_fn)
        self.iter_map_fn = iter_map_fn

    def __call__(self, item: Any) -> Iterator[Any]:
        yield from self.iter_map_fn(iter((item,)))


class IterMapDataset(MapDataset[T]):
    """Returns what a function makes of the iterator of a stream's items.

    With `stateless_iter_fn`, the function is run on each input alone, as an iterator of one. A
    resume then goes on at once, and items can be made again. Without, it is run over a whole pass
    and may hold items back; a resume runs it over the pass again, which takes the time that the
    pass took so far. What is below it then counts the samples that are drawn on its own, so that
    it can be run again beside others in a blend: there, `current_sample_index` is not unique.

    An input at which the function raises `SkipSample`, or fails within the usual tolerance, is left
    out and counted. The function then begins anew behind it, and what it held is lost.

    State: with `stateless_iter_fn`, the place before the last input and how many items it gave.
    Without, how many items were given in which slots: one row of numbers as long as each batch
    takes equally many, and one more where that changes.
    Length: `len_map_fn` of that below.
    Keys: `("iter_map", j, key of the input)` for the j-th item after an input was read.

    Args:
        dataset: the items.
        iter_map_fn: gives an iterator for an iterator. For randomness use `sample_rng()`, which
            goes with the input that was read last.
        len_map_fn: gives the number of outputs for a number of items.
        stateless_iter_fn: whether an item depends on nothing but the last input read; an input may
            give any number of items.
        iter_map_fn_config: as `map_fn_config` of a `MapDataset`.
        worker_config: gives seed and error handlers; by default that of the dataset.

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

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        if self.function.is_stateless:
            return super().cursor(stream)
        return _PassCursor(self, self.dataset.cursor(stream))

    def num_items(self, stream: Stream) -> int:
        """Counts the items, as `len_map_fn` tells."""
        return self.len_map_fn(self.dataset.num_items(stream))

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Runs the function again on the input alone.

        Raises:
            ValueError: It is not stateless, or the key is not one of its own.
        """
        if not self.function.is_stateless:
            raise ValueError(
                f"{self.function.where} is run over whole passes, so {restore_key!r} cannot be "
                "made again; give stateless_iter_fn=True if each item depends on one input only"
            )
        return super().restore_sample(restore_key)

    def config(self) -> dict[str, JSON]:
        """Returns what decides the content; the function itself cannot be compared."""
        config = super().config()
        below = config.pop("of")
        return {**config, "stateless_iter_fn": self.function.is_stateless, "of": below}


class _Inputs(Iterator[Any]):
    """What a function reads; knows the last input, and which errors came from below.

    Attributes:
        key: restore key of the last input; () before the first.
        item: the last input.
        num_read: inputs since the function began.
        num_outputs: items given since the last input.
        error: what came from below instead of an input.
    """

    def __init__(self, inner: Cursor[Any], function: UserFunction) -> None:
        self._inner = inner
        self._function = function
        self.key: RestoreKey = ()
        self.item: Any = None
        self.num_read = self.num_outputs = 0
        self.error: Exception | None = None

    def __next__(self) -> Any:
        try:
            self.item = next(self._inner)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            raise
        self.key = self._inner.key
        self.num_read += 1
        self.num_outputs = 0
        self._function.enter(current_context(), self.key)
        return self.item


class _PassCursor(Cursor[T]):
    """A function over a whole pass: its place is the number of items that it gave."""

    def __init__(self, spec: IterMapDataset[T], inner: Cursor[Any]) -> None:
        self._function = spec.function
        self._iter_map_fn = spec.iter_map_fn
        self._run = FunctionRun(spec.function)
        self._inputs = _Inputs(inner, spec.function)
        self._items: Iterator[T] | None = None
        self._rng: Generator | None = None
        self._has_ended = False
        self._given = 0
        self._slots = SlotRows()
        # Samples that were drawn when the pass began, and those after what is below drew its own.
        self._first_draw: int | None = None
        self._draws = 0

    def __next__(self) -> T:
        if self._has_ended:
            raise StopIteration
        context = current_context()
        of_all = context.num_draws
        if self._first_draw is None:
            self._first_draw = self._draws = of_all
        context.num_draws = before = self._draws
        try:
            item = self._pull(context)
        finally:
            self._draws = context.num_draws
            context.num_draws = of_all + self._draws - before
        inputs = self._inputs
        self.key = ("iter_map", inputs.num_outputs, *([inputs.key] if inputs.key else ()))
        inputs.num_outputs += 1
        self._given += 1
        self._slots.add(context.batch_index)
        return item

    def _pull(self, context: StreamContext) -> T:
        inputs, function = self._inputs, self._function
        while True:
            # What the function drew for its last input goes on where it was.
            function.enter(context, inputs.key, inputs.num_outputs)
            context.rng = self._rng
            try:
                if self._items is None:
                    inputs.num_read = 0
                    self._items = iter(self._iter_map_fn(inputs))
                item: Any = next(self._items, SKIPPED)
                if item is None:
                    raise TypeError(f"{function.where} gave None, which is no item")
            except Exception as error:
                if error is inputs.error:
                    raise
                self._begin_again(error)
                continue
            finally:
                self._rng = context.rng
            if item is SKIPPED:
                self._has_ended = True
                raise StopIteration
            self._run.failures = 0
            return item  # type: ignore[no-any-return]

    def _begin_again(self, error: Exception) -> None:
        """Leaves out the input at which the function failed."""
        inputs = self._inputs
        self._items = None
        if not inputs.num_read:
            raise FatalSampleError(
                f"{self._function.where} failed before it read anything: {describe(error)}"
            ) from error
        self._run.left_out(error, inputs.key, inputs.item)

    def snapshot(self) -> Snapshot:
        fields = {
            "given": self._given,
            "ended": int(self._has_ended),
            "draws": self._first_draw or 0,
            "slots": self._slots.rows(),
        }
        return Snapshot("iter_map", fields)

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("iter_map", 0)
        given, ended = snapshot.count("given"), snapshot.count("ended")
        first_draw = snapshot.count("draws")
        slots = checked_rows(snapshot.field("slots"))
        if sum(row[2] * row[3] for row in slots) != given or ended > 1:
            raise StateError(
                f"The checkpoint's iter_map gave {given} items, ended={ended}, in slots {slots}; "
                "it was edited or damaged."
            )
        if not given and not ended:
            return
        logger.info(
            "%s is run again over the %d items that it gave; with stateless_iter_fn=True a resume "
            "would go on at once", self._function.where, given,
        )  # fmt: skip
        self._first_draw = self._draws = first_draw
        context = current_context()
        before = context.batch_index
        with passing_over():
            for first, step, number, num_items in slots:
                for k in range(number):
                    context.batch_index = first + k * step
                    self._pass_over(num_items, given)
            context.batch_index = before
            if ended and next(self, SKIPPED) is not SKIPPED:
                raise StateError(f"{self._function.where} gives more than {given} items now")

    def _pass_over(self, number: int, given: int) -> None:
        for _ in range(number):
            if next(self, SKIPPED) is SKIPPED:
                raise StateError(
                    f"{self._function.where} gave {given} items before, and only {self._given} "
                    "now; it must give the same whenever it is run"
                )


class SlotRows:
    """How many items were given in which slots, in few numbers where that is regular.

    Example:
        Four items in each of the slots 1, 3 and 5, and one in slot 7 so far, are the rows
        (first slot, step, slots, items in each) = (1, 2, 3, 4), (7, 0, 1, 1).
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int]] = []
        self._slot = -1
        self._num_items = 0

    def add(self, slot: int) -> None:
        """Counts an item given in `slot`."""
        if slot != self._slot:
            self._rows = list(self.rows())
            self._slot, self._num_items = slot, 0
        self._num_items += 1

    def rows(self) -> tuple[tuple[int, int, int, int], ...]:
        """Returns the rows, with the items of the last slot so far."""
        if not self._num_items:
            return ()
        here = self._slot
        if self._rows:
            *others, (first, step, number, num_items) = self._rows
            is_next = number == 1 or here == first + step * number
            if num_items == self._num_items and is_next:
                step = here - first if number == 1 else step
                return (*others, (first, step, number + 1, num_items))
        return (*self._rows, (here, 0, 1, self._num_items))


def checked_rows(rows: Any) -> tuple[tuple[int, int, int, int], ...]:
    """Returns the rows of a checkpoint.

    Raises:
        StateError: They are none.
    """
    for row in rows if isinstance(rows, tuple) else (None,):
        if not (
            isinstance(row, tuple)
            and len(row) == 4
            and all(type(value) is int and value >= 0 for value in row)
            and min(row[2:]) > 0
        ):
            raise StateError(f"'slots' of the checkpoint's iter_map is {rows!r:.80}")
    return rows  # type: ignore[no-any-return]
