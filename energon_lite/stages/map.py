"""A function of the user on each item, and one that keeps or drops items."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar, TypeVar

from energon_lite.core.dataset import Cursor, SavableDataset, Traits
from energon_lite.core.errors import SkipSample, StateError
from energon_lite.core.stage import Stage
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import current_context
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import (
    DEFAULT_FAILURE_TOLERANCE,
    SKIPPED,
    FunctionRun,
    UserFunction,
    name_of_key,
)

T = TypeVar("T")

# A generator function's time is counted once for so many items.
_ITEMS_PER_COST = 32

# Settings of a user's function: a dict of plain JSON, or a function that gives one.
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
            f"{function.where} is a UserFunction, which says itself whether it is stateless and "
            "how many failures it may have; set is_stateless and failure_tolerance there"
        )
    return function


def plain_config(given: FunctionConfig, name: str) -> dict[str, JSON]:
    """Returns a function's settings as an entry `name` of a stage's config; nothing for None.

    Raises:
        TypeError: They are no dict of plain JSON; names the argument.
    """
    value: Any = given() if callable(given) else given
    if value is None:
        return {}
    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={value!r:.200} is not plain JSON ({error})") from error
    # json writes tuples as lists and all keys as text: such settings would differ from their own.
    if not isinstance(value, dict) or plain != value:
        raise TypeError(
            f"{name}={value!r:.200} is not a dict of plain JSON; use texts as keys, and lists "
            "instead of tuples"
        )
    return {name: plain}


class MapDataset(Stage[T]):
    """Calls a function on each item; a generator function may give any number of items for one.

    Items for which it raises `SkipSample`, or fails within its tolerance, are left out and counted.

    State: for a generator function how many items of the current input were given, and its restore
    key; or the place before that input, where it cannot be made again. For others none of its own.
    Length: as below; skips and expansion are not foreseen.
    Keys: a generator function's j-th item has `(name, j, key of the input)`; others keep the key.

    Args:
        dataset: the items.
        map_fn: a function of one argument.
        stateless_map_fn: whether its result depends on its input only; None to see whether
            `@stateless` marks it.
        map_fn_config: what is to be noticed, on a resume, if it changes; a dict of plain JSON, or a
            function that gives one, which is called here.
        failure_tolerance: failures in a row that end the run; 0 for any number. One that is given
            to `@stateless` goes before.
        worker_config: gives seed and error handlers; by default that of the dataset.

    Raises:
        TypeError: The settings are not plain JSON; or a `UserFunction` and other settings of it.
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
        super().__init__(dataset)
        self.worker_config = worker_config or self.worker_config
        self.function = as_user_function(
            map_fn, "map", self.worker_config, stateless_map_fn, failure_tolerance
        )
        self.function_config = plain_config(map_fn_config, self.config_name)

    def cursor(self, stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        inner = self.dataset.cursor(stream)
        if self.function.is_generator:
            return _ExpandCursor(inner, self.function, self.dataset)
        return _MapCursor(inner, self.function)

    def own_traits(self, below: Traits) -> Traits:
        """Adds whether the function is stateless, and how many items it makes of one."""
        return dataclasses.replace(
            below,
            replayable=below.replayable and self.function.is_stateless,
            drops=below.drops or self.function.is_generator,
            per_item=not self.function.is_generator,
            obstacle=f"{self.function.where} is a generator, which makes any number of samples of "
            "one; packs that are planned by a length index need one of each",
        )

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the input again and calls the function on it."""
        result: T = self.function.again(restore_key, self.dataset.restore_sample)
        return result

    def config(self) -> dict[str, JSON]:
        """Returns what decides the content; the function itself cannot be compared."""
        function = self.function
        return {
            "stage": function.name,
            "seeded": function.restore_seeds,
            "expands": function.is_generator,
            **self.function_config,
            "of": self.dataset.config(),
        }


class _Keep:
    """Passes an item on, or leaves it out on purpose."""

    def __init__(self, filter_fn: Callable[[Any], Any]) -> None:
        # Its name and place for messages, and what @stateless marks it with.
        functools.update_wrapper(self, filter_fn)
        self.filter_fn = filter_fn

    def __call__(self, item: Any) -> Any:
        if not self.filter_fn(item):
            raise SkipSample
        return item


class FilterDataset(MapDataset[T]):
    """Keeps the items for which a function gives something true; the others count as left out.

    Items for which the function fails are left out as failures are, within the usual tolerance.

    State: none of its own.
    Length: as below; what is filtered out is not foreseen.
    Keys: as below.

    Args:
        dataset: the items.
        filter_fn: a function of one item, which it leaves as it is; None counts as no. If it is
            random, it needs `sample_rng()` or `@stateless(restore_seeds=True)`.
        filter_fn_config: as `map_fn_config` of a `MapDataset`.
        worker_config: gives seed and error handlers; by default that of the dataset.

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
        """Replays as the dataset below: what was kept needs no second question."""
        return dataclasses.replace(below, per_item=True)

    def restore_sample(self, restore_key: RestoreKey) -> T:
        """Makes the item again."""
        item: T = self.dataset.restore_sample(restore_key)
        return item


class _MapCursor(Cursor[T]):
    def __init__(self, inner: Cursor[Any], function: UserFunction) -> None:
        self._inner = inner
        self._call = FunctionRun(function).call

    def __next__(self) -> T:
        inner = self._inner
        while True:
            item = next(inner)
            start = perf_counter()
            result = self._call(inner.key, item)
            current_context().spend(inner.key, perf_counter() - start)
            if result is not SKIPPED:
                self.key = inner.key
                return result  # type: ignore[no-any-return]

    def snapshot(self) -> Snapshot:
        return self._inner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._inner.restore(snapshot)


class _ExpandCursor(Cursor[T]):
    """Returns the items that a generator function makes of each input.

    Inside an input, the state is its restore key and the place after it; or the place before it,
    where inputs cannot be made again.
    """

    def __init__(
        self, inner: Cursor[Any], function: UserFunction, below: SavableDataset[Any]
    ) -> None:
        self._inner = inner
        self._function = function
        self._below = below if below.can_restore_sample() else None
        self._run = FunctionRun(function)
        self._name = function.name
        self._items: Iterator[tuple[RestoreKey, T]] | None = None
        self._input: RestoreKey = ()
        self._before: Snapshot | None = None
        self._slot = self._draws = 0
        self._given = 0
        self._spent_sec = 0.0

    def __next__(self) -> T:
        while True:
            if self._items is None:
                if self._below is None:
                    self._before = self._inner.snapshot()
                context = current_context()
                self._slot, self._draws = context.batch_index, context.num_draws
                self._given = 0
                item = next(self._inner)
                self._input = self._inner.key
                self._items = self._run.expand(self._input, item)
            start = perf_counter()
            found = next(self._items, None)
            self._spent_sec += perf_counter() - start
            if found is None or self._given % _ITEMS_PER_COST == 0:
                current_context().spend(self._input, self._spent_sec)
                self._spent_sec = 0.0
            if found is None:
                self._items = None
                continue
            self._given += 1
            self.key, result = found
            return result

    def snapshot(self) -> Snapshot:
        if self._items is None:
            return Snapshot(self._name, {"given": 0}, (self._inner.snapshot(),))
        place = self._before or self._inner.snapshot()
        fields: dict[str, Any] = {"given": self._given, "slot": self._slot, "draws": self._draws}
        fields["input"] = () if self._before else self._input
        return Snapshot(self._name, fields, (place,))

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect(self._name, 1)
        given = snapshot.count("given")
        self._inner.restore(snapshot.inner[0])
        self._items = None
        self._given = 0
        if not given:
            return
        key = snapshot.fields.get("input")  # None in states of before there were such keys
        is_key = type(key) is tuple and bool(key) == (self._below is not None)
        if "input" in snapshot.fields and not is_key:
            raise StateError(
                f"The checkpoint stands inside {self._function.where}, of the input {key!r:.80}, "
                f"which can {'' if self._below else 'not '}be made again here; mark the hooks "
                "before it @stateless as they were"
            )
        # The input is taken again, as of its slot, and its first items are passed over.
        context = current_context()
        slot, context.batch_index = context.batch_index, snapshot.count("slot")
        self._slot, self._draws = context.batch_index, snapshot.count("draws")
        with passing_over():
            if self._below is not None and key:
                self._take_again(key, self._below.restore_sample(key), given)
            else:
                context.num_draws = self._draws
                for number in range(given):
                    next(self)
                    if self._given != number + 1:  # of the next input
                        self._refuse_fewer(self._input, given, number)
        context.batch_index = slot

    def _take_again(self, key: RestoreKey, item: Any, given: int) -> None:
        current_context().batch_index = self._slot
        self._input, self._given = key, given
        self._items = self._run.expand(key, item)
        for number in range(given):
            if next(self._items, None) is None:
                self._refuse_fewer(key, given, number)

    def _refuse_fewer(self, key: RestoreKey, given: int, number: int) -> None:
        raise StateError(
            f"{self._function.where} gave {given} items or more of {name_of_key(key)} "
            f"before, and {number} now; it must depend on its input only"
        )


class _PassingOver(threading.local):
    is_on = False


_passing_over = _PassingOver()


@contextmanager
def passing_over() -> Iterator[None]:
    """Marks the items of a `with` block as emitted before the run was resumed."""
    before, _passing_over.is_on = _passing_over.is_on, True
    try:
        yield
    finally:
        _passing_over.is_on = before


def is_passed_over() -> bool:
    """Returns whether the current item was given before the run was resumed."""
    return _passing_over.is_on
