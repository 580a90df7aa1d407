"""A function of the user on each item, and one that keeps or drops items."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, ClassVar, TypeVar

from energon_lite.core.dataset import Cursor, SavableDataset, Traits
from energon_lite.core.errors import SkipSample, StateError
from energon_lite.core.keys import first_leaf, name_of_key
from energon_lite.core.sample_columns import Columns, samples_of
from energon_lite.core.stage import Stage, StageCursor
from energon_lite.core.state import COUNT, JSON, KEY, RestoreKey, Snapshot
from energon_lite.core.stream_context import current_context
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import (
    DEFAULT_FAILURE_TOLERANCE,
    SKIPPED,
    FunctionRun,
    UserFunction,
    unskipped,
)

T = TypeVar("T")

# A generator function's time is counted once for this number of items.
_ITEMS_PER_COST = 32

# Settings of a user's function: a JSON-serialisable dict, or a function that returns one.
FunctionConfig = dict[str, JSON] | Callable[[], dict[str, JSON]] | None


def as_user_function(
    function: Callable[[Any], Any] | UserFunction,
    name: str,
    config: WorkerConfig | None,
    is_stateless: bool | None = None,
    failure_tolerance: int = DEFAULT_FAILURE_TOLERANCE,
) -> UserFunction:
    """Returns what runs a function, with the seed and the error handlers of a `WorkerConfig`.

    Raises:
        TypeError: It is a `UserFunction`, which has all of that, and is to have other settings.
    """
    if not isinstance(function, UserFunction):
        return UserFunction(
            function,
            name=name,
            seed=config.seed_offset if config else 0,
            config=config,
            is_stateless=is_stateless,
            failure_tolerance=failure_tolerance,
        )
    if is_stateless is not None or failure_tolerance != DEFAULT_FAILURE_TOLERANCE:
        raise TypeError(
            f"{function.where} is a UserFunction, which defines whether it is stateless and "
            "how many failures it may have; set is_stateless and failure_tolerance there"
        )
    return function


def plain_config(config: FunctionConfig, name: str) -> dict[str, JSON]:
    """Returns a function's settings as an entry `name` of a stage's config; nothing for None.

    Raises:
        TypeError: They are no JSON-serialisable dict; names the argument.
    """
    value: Any = config() if callable(config) else config
    if value is None:
        return {}
    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={value!r:.200} is not JSON-serialisable ({error})") from error
    # json writes tuples as lists and all keys as text: such settings would differ from their own.
    if not isinstance(value, dict) or plain != value:
        raise TypeError(
            f"{name}={value!r:.200} is not a JSON-serialisable dict; use texts as keys, and lists "
            "instead of tuples"
        )
    return {name: plain}


class MapDataset(Stage[T]):
    """Calls a function on each item; a generator function may make any number of items of one.

    Items for which it raises `SkipSample`, or fails within its tolerance, are skipped and counted.

    State: for a generator function how many items of the current input were returned, and the
    restore key of the input; or the place before that input, where it cannot be re-created. For
    other functions none.
    Length: as below; skips and expansion are not predicted.
    Keys: a generator function's j-th item has `(name, j, key of the input)`; others keep the key.

    Args:
        dataset: the items.
        map_fn: a function of one argument.
        stateless_map_fn: whether its result depends on its input only; None to see whether
            `@stateless` marks it.
        map_fn_config: what is to be noticed, on a resume, if it changes; a JSON-serialisable dict,
            or a function that returns one, which is called here.
        failure_tolerance: failures in a row that end the run; 0 for any number. The tolerance that
            `@stateless` was given has precedence.
        worker_config: has seed and error handlers; by default that of the dataset.

    Raises:
        TypeError: The settings are not JSON-serialisable; or a `UserFunction` and other settings.
    """

    config_name: ClassVar[str] = "map_fn_config"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        map_fn: Callable[[Any], T] | UserFunction,
        *,
        stateless_map_fn: bool | None = None,
        map_fn_config: FunctionConfig = None,
        failure_tolerance: int = DEFAULT_FAILURE_TOLERANCE,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        super().__init__(dataset, worker_config)
        self.function = as_user_function(
            map_fn, "map", self.worker_config, stateless_map_fn, failure_tolerance
        )
        self.name = self.function.name
        self.function_config = plain_config(map_fn_config, self.config_name)

    def own_traits(self, below: Traits) -> Traits:
        """Adds whether the function is stateless, and whether it is a generator."""
        return dataclasses.replace(
            below,
            replayable=below.replayable and self.function.is_stateless,
            drops=below.drops or self.function.is_generator,
            per_item=not self.function.is_generator,
            obstacle=f"{self.function.where} is a generator, which makes any number of samples of "
            "one; packs that are planned by a length index need one of each",
        )

    def open(self, inner: Cursor[Any], stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return (_ExpandCursor if self.function.is_generator else MapCursor)(self, inner)

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Re-creates the input and calls the function on it."""
        result: T = self.function.again(restore_key, self.dataset.restore_sample)
        return result

    def own_settings(self) -> dict[str, JSON]:
        """Returns what decides the content; the function itself cannot be compared."""
        function = self.function
        own: dict[str, JSON] = {"seeded": function.restore_seeds, "expands": function.is_generator}
        return own | self.function_config


class WrappedFunction:
    """A function of the user that is called in another way; a subclass defines how."""

    __call__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        # Its name and place for messages, and what @stateless marks it with.
        functools.update_wrapper(self, function)
        self.function = function


class _Keep(WrappedFunction):
    """Returns an item, or skips it on purpose."""

    def __call__(self, item: Any) -> Any:
        if not self.function(item):
            raise SkipSample
        return item


class FilterDataset(MapDataset[T]):
    """Filters items by a predicate; the others count as skipped.

    Items for which the predicate fails are skipped as failures, within the usual tolerance.

    State: none.
    Length: as below; what is filtered out is not predicted.
    Keys: as below.

    Args:
        dataset: the items.
        filter_fn: a function of one item, which it does not change; None counts as no. If it is
            random, it needs `sample_rng()` or `@stateless(restore_seeds=True)`.
        filter_fn_config: as `map_fn_config` of a `MapDataset`.
        worker_config: has seed and error handlers; by default that of the dataset.

    Raises:
        TypeError: The function is a generator function, whose result is always true.
    """

    config_name: ClassVar[str] = "filter_fn_config"

    def __init__(
        self,
        dataset: SavableDataset[T],
        *,
        filter_fn: Callable[[T], Any],
        filter_fn_config: FunctionConfig = None,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        config = worker_config or dataset.worker_config
        function = as_user_function(_Keep(filter_fn), "filter", config)
        if function.is_generator:
            raise TypeError(
                f"filter_fn: {function.where} is a generator, which is true for all items; "
                "return True or False"
            )
        super().__init__(dataset, function, worker_config=worker_config)
        self.function_config = plain_config(filter_fn_config, self.config_name)

    def own_traits(self, below: Traits) -> Traits:
        """Replays as the dataset below: a kept item needs no second call of the predicate."""
        return dataclasses.replace(below, per_item=True)

    restore_sample = Stage.restore_sample


def takes_turns(function: UserFunction, dataset: SavableDataset[Any]) -> bool:
    """Returns whether a function and those below draw from the same generators, item by item."""
    return function.may_draw and bool(dataset.drawing)


class MapCursor(StageCursor[T]):
    """A place among items of which each has been given to a function."""

    key: RestoreKey = ()

    def __init__(self, spec: MapDataset[T], inner: Cursor[Any]) -> None:
        super().__init__(spec, inner)
        self._run = FunctionRun(spec.function)
        self._takes_turns = takes_turns(spec.function, spec.dataset)

    def __next__(self) -> T:
        """Returns the next item."""
        inner = self.inner
        while True:
            item, start = next(inner), perf_counter()
            key = inner.key
            result = self._run.call(key, item)
            current_context().spend(key, perf_counter() - start)
            if result is not SKIPPED:
                self.key = key
                return result  # type: ignore[no-any-return]

    def take(self, n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
        """Returns some of the next items, and their restore keys."""
        items, keys = self.inner.take(1 if self._takes_turns else n)
        results, keys = unskipped(self._run.call_timed(keys, samples_of(items)), keys)
        self.key = keys[-1] if keys else self.key
        return results, keys


class _ExpandCursor(StageCursor[T]):
    """Returns the items that a generator function makes of each input.

    Inside an input, the state is its restore key and the place behind it; or the place before it,
    where inputs cannot be re-created.

    Attributes:
        done: items of the current input that were returned.
        slot: the slot in which the input was read.
        draws: samples that the stream had drawn before it.
        tokens: measured of the items returned, where the input will be drawn again.
        input: the restore key of the input, if it can be re-created.
    """

    saved: ClassVar = {"done": COUNT, "slot": COUNT, "draws": COUNT, "tokens": COUNT, "input": KEY}
    done: int
    slot: int
    draws: int
    tokens: int
    input: RestoreKey
    key: RestoreKey = ()

    def __init__(self, spec: MapDataset[T], inner: Cursor[Any]) -> None:
        super().__init__(spec, inner)
        self._can_replay = spec.dataset.can_restore_sample()
        self._run = FunctionRun(spec.function)
        self._items: Iterator[tuple[RestoreKey, T]] | None = None
        self._spent_sec = 0.0
        # Where inputs cannot be re-created: the place before the current one, the tokens that were
        # measured by then, and its source.
        self._before: Snapshot | None = None
        self._tokens: Counter[str] = Counter()
        self._tokens_before, self._source = 0, ""

    def __next__(self) -> T:
        while True:
            items = self._items or self._begin()
            start = perf_counter()
            found = next(items, None)
            self._spent_sec += perf_counter() - start
            if found is None or self.done % _ITEMS_PER_COST == 0:
                current_context().spend(self.input or self.inner.key, self._spent_sec)
                self._spent_sec = 0.0
            if found is None:
                self._end()
                continue
            self.done += 1
            self.key, result = found
            return result

    def _begin(self) -> Iterator[tuple[RestoreKey, T]]:
        """Reads the next input."""
        before = None if self._can_replay else self.inner.snapshot()
        context = current_context()
        slot, draws = context.batch_index, context.num_draws
        item = next(self.inner)
        key = self.inner.key
        self.slot, self.draws, self._before = slot, draws, before
        if self._can_replay:
            self.input = key
        else:
            self._source, self._tokens = first_leaf(key)[0], context.tokens
            self._tokens_before = self._tokens[self._source]
        self._items = self._run.expand(key, item)
        return self._items

    def _end(self) -> None:
        self._items = self._before = None
        self.done = self.slot = self.draws = self.tokens = 0
        self.input = ()

    def places(self) -> Sequence[Snapshot]:
        return super().places() if self._before is None else (self._before,)

    def fields(self) -> dict[str, Any]:
        if self._before is not None:
            self.tokens = self._tokens[self._source] - self._tokens_before
        return super().fields()

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        done, self.done, self._items = self.done, 0, None
        key, function, context = self.input, self.spec.function, current_context()
        if not done:
            return
        if bool(key) != self._can_replay:
            raise StateError(
                f"The checkpoint stands inside {function.where}, of the input {key!r:.80}, which "
                f"can {'' if self._can_replay else 'not '}be re-created here; mark the hooks "
                "before it @stateless as they were"
            )
        # The input is read again, as of its slot, and its first items are passed over.
        with context.passing(self.slot):
            if key:
                self._items = self._run.expand(key, self.spec.dataset.restore_sample(key))
            else:
                context.num_draws = self.draws
            for number in range(done):
                if next(self, SKIPPED) is SKIPPED or (self.done, self.input) != (number + 1, key):
                    raise StateError(
                        f"{function.where} made {done} items or more of "
                        f"{name_of_key(key or self.inner.key)} before, and {number} now; it must "
                        "depend on its input only"
                    )
        if self.tokens:
            context.tokens[self._source] += self.tokens
