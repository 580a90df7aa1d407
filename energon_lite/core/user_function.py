"""Runs every function of the user: counts, seeds, tolerates failures, expands, stamps keys."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from itertools import islice
from pathlib import Path
from sys import getrefcount
from time import perf_counter
from types import GeneratorType
from typing import Any, TypeVar, overload

from numpy.random import Generator

from energon_lite.core.errors import (
    FATAL_EXCEPTIONS,
    DecodingError,
    ErrorHandler,
    FatalSampleError,
    Place,
    SkipSample,
    add_note,
    describe,
    log_exception,
    note_place,
    pass_on,
    place_of,
    reraise_exception,
)
from energon_lite.core.global_generators import call_seeded
from energon_lite.core.keys import Siblings, leaves, name_of_key
from energon_lite.core.sample_columns import samples_of
from energon_lite.core.samples import field_of, sources_of
from energon_lite.core.seeds import key_of
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import SkipRecord, StreamContext, current_context, replaying
from energon_lite.core.topology import WorkerConfig, current

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_FAILURE_TOLERANCE = 100
# A function that fails at one line on each of its first ten inputs is wrong.
_FIRST_INPUTS = 10
# Names of shards or samples in a message.
_MOST_NAMES = 8
# What `getrefcount` returns for an object that is only in a list.
(_IN_LIST,) = map(getrefcount, [object()])

# Results that are nothing to be checked or stamped, such as lengths.
_PLAIN_TYPES = frozenset((int, float, bool, str, tuple))


class _Skipped:
    """Stands for the result of a call that was skipped."""


SKIPPED = _Skipped()


@overload
def stateless(fn: F) -> F: ...
@overload
def stateless(
    fn: None = None, *, restore_seeds: bool = False, failure_tolerance: int | None = None
) -> Callable[[F], F]: ...
def stateless(
    fn: F | None = None, *, restore_seeds: bool = False, failure_tolerance: int | None = None
) -> F | Callable[[F], F]:
    """Marks a hook or cooker whose result depends on its input only, so that it can be run again.

    Args:
        fn: the function, if used without arguments.
        restore_seeds: seed torch, numpy and random from the sample around each call, and put them
            back after it (about 0.02 ms). `sample_rng()` does without that. A call outside of a
            pipeline is seeded by the active worker config, if there is one.
        failure_tolerance: failures in a row that end the run; 0 for any number; None for 100.
    """

    def mark(function: F) -> F:
        if restore_seeds and inspect.isfunction(function):
            function = function if inspect.isgeneratorfunction(function) else _seeded(function)
        function.__stateless__ = True  # type: ignore[attr-defined]
        function.__restore_seeds__ = restore_seeds  # type: ignore[attr-defined]
        function.__failure_tolerance__ = failure_tolerance  # type: ignore[attr-defined]
        return function

    return mark if fn is None else mark(fn)


def _seeded(function: F) -> F:
    """Returns a function that seeds its calls, but for those of a pipeline, which seeds itself."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        config = WorkerConfig.active_worker_config if current.context is None else None
        if config is None:
            return function(*args, **kwargs)
        place = config.worker_seed(), config.active_worker_sample_index
        return call_seeded(key_of("restore_seeds", *place), function, *args, **kwargs)

    return call  # type: ignore[return-value]


@dataclass(eq=False)
class UserFunction:
    """A function of the user with everything that is known about it; immutable.

    Args:
        function: takes one argument; may be a generator function.
        name: the hook's name, part of seeds and of the restore keys that it expands.
        seed: the run's seed.
        config: where the error handlers come from.
        is_stateless: whether its result depends on its input only; None to see whether
            `@stateless` marks it.
        failure_tolerance: failures in a row that end the run; 0 for any number.
        takes_columns: whether the function, which takes lists, takes `Columns` as well.
    """

    function: Callable[..., Any]
    _: KW_ONLY
    name: str
    seed: int = 0
    config: InitVar[WorkerConfig | None] = None
    is_stateless: Any = None
    failure_tolerance: int = DEFAULT_FAILURE_TOLERANCE
    takes_columns: bool = False

    def __post_init__(self, config: WorkerConfig | None) -> None:
        """Reads what marks the function, and the handlers."""
        function = self.function
        self.is_generator = inspect.isgeneratorfunction(inspect.unwrap(function))
        if self.is_stateless is None:
            self.is_stateless = bool(getattr(function, "__stateless__", False))
        # Cookers, which are replayed whether they are marked or not, have this attribute.
        self.may_draw = bool(getattr(function, "__may_draw__", not self.is_stateless))
        self.restore_seeds = bool(getattr(function, "__restore_seeds__", False))
        self.on_error: ErrorHandler = config.global_error_handler if config else log_exception
        own_tolerance = getattr(function, "__failure_tolerance__", None)
        limits = own_tolerance, self.failure_tolerance, self.on_error
        self.has_default_limits = limits == (None, DEFAULT_FAILURE_TOLERANCE, log_exception)
        if own_tolerance is not None:
            self.failure_tolerance = own_tolerance
        self.on_restore_error: ErrorHandler = (
            config.restore_error_handler if config else reraise_exception
        )

    @property
    def where(self) -> str:
        """Names the function with file and line."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else name

    def doing(self, key: RestoreKey, argument: Any) -> str:
        """Names the stage and the function, and the samples and shards that it is called with."""
        name, sources = describe_input(argument)
        shards = ", ".join(dict.fromkeys(str(getattr(s, "shard_name", "")) for s in sources or ()))
        of = f" ({_shortened(shards)})" if shards else ""
        return f"stage {self.name}, {self.where}, sample {_shortened(name or name_of_key(key))}{of}"

    def enter(self, context: StreamContext, key: RestoreKey, number: int = 0) -> None:
        """Records that the function starts, or resumes after `number` items, on the input `key`."""
        context.enter(self.name, self.seed, key)
        generators = context.generators
        if self.may_draw and generators is not None and generators.drawn:
            generators.seed("hook", self.seed, key, self.name, number)

    def call(self, key: RestoreKey, argument: Any) -> Any:
        """Calls the function once, seeded if it wants to be; whatever it raises goes through."""
        self.enter(current_context(), key)
        result = self._run_seeded((self.seed, key, self.name), self.function, argument)
        is_same = result is argument and result is not None
        return result if is_same else self.checked(key, result)

    def _run_seeded(self, seeds: tuple[Any, ...], function: Callable[..., Any], *args: Any) -> Any:
        if not self.restore_seeds:
            return function(*args)
        return call_seeded(key_of("restore_seeds", *seeds), function, *args)

    def checked(self, key: RestoreKey, result: Any) -> Any:
        """Returns a result with its restore key; refuses what is none."""
        kind = type(result)
        if kind in _PLAIN_TYPES:
            return result
        if result is None or kind is GeneratorType:
            raise _bad_result(self, result)
        return _stamped(result, key)

    def expand(self, key: RestoreKey, argument: Any) -> Iterator[tuple[RestoreKey, Any]]:
        """Runs a generator function; yields each item with its restore key."""
        items = iter(self.function(argument))
        context = current_context()
        rng: Generator | None = None
        for number in itertools.count():
            self.enter(context, key, number)
            # Its draws of sample_rng() continue from item to item.
            context.rng = rng
            item = self._run_seeded((self.seed, key, self.name, number), next, items, SKIPPED)
            rng = context.rng
            if item is SKIPPED:
                return
            if item is None:
                raise _bad_result(self, item)
            own_key = (self.name, number, key)
            # The function may change an object that it keeps, while a batch holds it.
            may_change = isinstance(item, (dict, list)) or hasattr(item, "__restore_key__")
            if may_change and max(map(getrefcount, [item])) > _IN_LIST + 1:
                item = copy.copy(item)
            yield own_key, _stamped(item, own_key)

    def again(self, restore_key: RestoreKey, make: Callable[[RestoreKey], Any]) -> Any:
        """Re-creates the item of `restore_key`; `make` does the same for the input.

        Raises:
            ValueError: The function skips the sample now, or the key belongs to another function.
        """
        with replaying():
            try:
                return self._again(restore_key, make)
            except SkipSample as error:
                raise ValueError(
                    f"{self.where} skips {name_of_key(restore_key)} now, but returned it before; "
                    "a hook that may be run again must not depend on anything but its input"
                ) from error
            except Exception as error:
                add_note(error, f"while {name_of_key(restore_key)} was re-created")
                self.on_restore_error(error, None, None)
                raise

    def _again(self, restore_key: RestoreKey, make: Callable[[RestoreKey], Any]) -> Any:
        if not self.is_generator:
            return self.call(restore_key, make(restore_key))
        if len(restore_key) != 3 or restore_key[0] != self.name:
            raise ValueError(f"{restore_key!r} is not a restore key of {self.name}")
        siblings = current_context().siblings or Siblings(())
        found = siblings.take(restore_key, SKIPPED)
        if found is not SKIPPED:
            return found
        _, number, inner_key = restore_key
        numbers = siblings.numbers(self.name, inner_key) | {number}
        made: dict[RestoreKey, Any] = {}
        try:
            items = self.expand(inner_key, make(inner_key))
            for place, (key, item) in enumerate(islice(items, max(numbers) + 1)):
                if place in numbers:
                    made[key] = item
        except Exception as error:
            pass_on(error)
            if restore_key not in made:  # else a sibling fails, and will when it is asked for
                raise
        if restore_key not in made:
            raise ValueError(
                f"{self.where} makes no item {number} of {name_of_key(inner_key)} any more"
            )
        found = made.pop(restore_key)
        siblings.keep(made)
        return found


@dataclass(eq=False)
class FunctionRun:
    """One stream's use of a `UserFunction`: skips inputs that fail, within the limits.

    Attributes:
        failures: how many there were in a row. It counts up from -10 while no call has returned:
            0 is reached from below if the first ten calls failed at one line.
        first: the line where the first call failed.
    """

    spec: UserFunction
    failures: int = -_FIRST_INPUTS
    first: Place | None = None

    def call(self, key: RestoreKey, argument: Any) -> Any:
        """Calls the function; returns `SKIPPED` if it skipped or failed."""
        own = argument.copy() if type(argument) is list else argument  # it may sort it
        try:
            result = self.spec.call(key, own)
        except Exception as error:
            self.count_skip(error, key, argument)
            return SKIPPED
        self.failures = 0
        return result

    def call_each(
        self, keys: Sequence[RestoreKey], arguments: Sequence[Any], ends: list[float] | None = None
    ) -> list[Any]:
        """Calls the function on each of several inputs, as `call` does.

        Args:
            keys: restore keys of the inputs.
            arguments: the inputs.
            ends: receives the time at the end of each call.
        """
        spec, context, results = self.spec, current_context(), list[Any]()
        function, name, seed = spec.function, spec.name, spec.seed
        drawn = context.generators is not None and context.generators.drawn
        is_seeded = spec.restore_seeds or (drawn and spec.may_draw)
        pairs = zip(keys, arguments, strict=True)
        while len(results) < len(keys):
            num_before = len(results)
            try:
                for key, argument in pairs:
                    own = argument.copy() if type(argument) is list else argument
                    if is_seeded:
                        result = spec.call(key, own)
                    else:
                        context.enter(name, seed, key)
                        result = function(own)
                        kind = type(result)
                        if kind is dict and "__restore_key__" not in result:
                            pass  # nothing is to be written into it
                        elif result is not own and kind is not int:
                            result = spec.checked(key, result)
                    results.append(result)
                    if ends is not None:
                        ends.append(perf_counter())
                self.failures = 0
            except Exception as error:
                if len(results) > num_before:
                    self.failures = 0
                self.count_skip(error, key, argument)
                results.append(SKIPPED)
                if ends is not None:
                    ends.append(perf_counter())
        return results

    def call_timed(self, keys: Sequence[RestoreKey], arguments: Sequence[Any]) -> list[Any]:
        """Calls the function on each of several inputs; counts the time for their sources."""
        context, start = current_context(), perf_counter()
        ends: list[float] = []
        # Calls for one source are timed together.
        is_single = len({key[0] for key in keys}) == 1
        results = self.call_each(keys, arguments, None if is_single else ends)
        for key, since, end in zip(keys, [start, *ends], ends or [perf_counter()], strict=False):
            context.spend(key, end - since)
        return results

    def expand(self, key: RestoreKey, argument: Any) -> Iterator[tuple[RestoreKey, Any]]:
        """Runs the generator function; ends early where it skips or fails."""
        # The input counts with its first item, which may be skipped as well.
        is_dropped = True
        try:
            own = argument.copy() if type(argument) is list else argument
            for own_key, item in self.spec.expand(key, own):
                self.failures, is_dropped = 0, False
                yield own_key, item
            if is_dropped:
                current_context().release(key)
        except Exception as error:
            self.count_skip(error, key, argument, is_dropped=is_dropped)

    def count_skip(
        self,
        error: Exception,
        key: RestoreKey,
        argument: Any,
        *,
        is_noted: bool = False,
        is_dropped: bool = True,
    ) -> None:
        """Counts a skip or a failure.

        Args:
            error: what was raised.
            key: restore key of the input.
            argument: the input.
            is_noted: whether the error's notes say already where it came from.
            is_dropped: whether no item was made of the input.

        Raises:
            FatalSampleError: The error is one of wrong code, or there were too many.
            Exception: A handler of a signal raised it.
        """
        spec = self.spec
        on_purpose = isinstance(error, SkipSample)
        if not on_purpose:
            pass_on(error)
        argument = samples_of(argument)
        name, sources = describe_input(argument)
        name = name or name_of_key(key)
        if not on_purpose:
            if not is_noted:
                add_note(error, spec.doing(key, argument))
            if isinstance(error, FATAL_EXCEPTIONS):
                raise FatalSampleError(f"{spec.name}: {describe(error)}") from error
        lost = list(leaves(key))
        source = str(lost[0][0]) if lost and lost[0] else ""
        current_context().count_skip(
            SkipRecord(key, name, source, spec.name, describe(error), on_purpose, len(lost)),
            is_dropped,
        )
        if on_purpose:
            return
        note_place(error, spec.function)
        spec.on_error(error, argument, sources)
        self.failures += 1
        if self.failures <= 0:
            self._check_first(error)
        if spec.failure_tolerance and self.failures >= spec.failure_tolerance:
            raise FatalSampleError(
                f"{spec.where} failed {self.failures} times in a row (failure_tolerance="
                f"{spec.failure_tolerance}), the last time with {describe(error)}"
            ) from error

    def _check_first(self, error: Exception) -> None:
        """Stops a run whose first inputs all fail at one line of the user's code.

        The usual limits hold where files are broken, and where the user sets limits or handles
        errors.

        Raises:
            FatalSampleError: They have failed there.
        """
        spec, place = self.spec, place_of(error)
        self.first = self.first or place
        is_code = place == self.first and not isinstance(error, (OSError, DecodingError))
        if not (place and is_code and spec.has_default_limits and current_context().is_new):
            self.failures += _FIRST_INPUTS
        elif self.failures == 0:
            raise FatalSampleError(
                f"{spec.where} failed on each of its first {_FIRST_INPUTS} inputs at {place.file}:"
                f"{place.line}, the last time with {describe(error)}. Correct it, raise SkipSample "
                "for what is not wanted, or allow it by @stateless(failure_tolerance=n)"
            ) from error


def unskipped(results: list[Any], *columns: list[Any]) -> tuple[list[Any], ...]:
    """Returns results of `call_each`, and what belongs to them, without those that were skipped."""
    if _Skipped not in map(type, results):
        return results, *columns
    rows = [i for i, result in enumerate(results) if result is not SKIPPED]
    return tuple([column[i] for i in rows] for column in (results, *columns))


# What hooks return that return no sample.
_RESULTS = {
    "sample_length": "the sample's tokens, a number (or a dict of numbers)",
    "batch_group_criterion": "(group, batch size or None)",
    "select_samples_to_pack": "a list of lists of samples",
}


def _bad_result(spec: UserFunction, result: Any) -> Exception:
    if result is None:
        return TypeError(
            f"{spec.where} returned None; return {_RESULTS.get(spec.name, 'the sample')}, or raise "
            "SkipSample to skip it"
        )
    return FatalSampleError(
        f"{spec.where} returns a generator but is no generator function itself; "
        "write the hook with `yield`, so that its items can be numbered"
    )


def _stamped(item: Any, key: RestoreKey) -> Any:
    """Writes the restore key on items that have a place for it."""
    if isinstance(item, dict):
        if "__restore_key__" in item:
            item["__restore_key__"] = key
    elif hasattr(item, "__restore_key__") and not isinstance(item, tuple):
        item.__restore_key__ = key
    return item


def _shortened(names: str) -> str:
    """Returns the first of several names, and how many there are besides."""
    found = names.split(", ")
    rest = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    return ", ".join(found[:_MOST_NAMES]) + rest


def describe_input(argument: Any) -> tuple[str, Any]:
    """Returns the sample key (or those of a list of samples) and the sources of a hook's input."""
    argument = samples_of(argument)
    if isinstance(argument, list):
        described = [describe_input(entry) for entry in argument]
        sources = [source for _, found in described for source in found or ()]
        return ", ".join(name for name, _ in described if name), sources or None
    key = getattr(argument, "__keys__", None) or field_of(argument, "__key__")  # of a pack
    name = ", ".join(map(str, key)) if isinstance(key, list) else str("" if key is None else key)
    return name, sources_of(argument) or None
