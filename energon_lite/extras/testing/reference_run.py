"""The items of an unbroken run of a stream, and the comparison of other runs with it."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from energon_lite.core.dataset import SavableDataset, StreamRun
from energon_lite.core.errors import add_note
from energon_lite.core.global_generators import GlobalStates
from energon_lite.core.state import RestoreKey, Snapshot
from energon_lite.core.topology import Stream


class LawError(AssertionError):
    """A dataset breaks a law; the text names law, class, stream, position and difference."""


class Entry(NamedTuple):
    """An item and the restore key that it came with."""

    key: RestoreKey
    item: Any


END = object()


class ReferenceRun:
    """One stream, with the first items of an unbroken run."""

    def __init__(self, dataset: SavableDataset[Any], stream: Stream, max_items: int) -> None:
        self.dataset = dataset
        self.stream = stream
        self.name = type(dataset).__name__
        run = self.run()
        # Copies: a dataset that returns one object repeatedly changes the items before.
        self.entries = [Entry(run.key, _copied(item)) for item in islice(run, max_items)]
        self.has_ended = len(self.entries) < max_items

    def run(self, dataset: SavableDataset[Any] | None = None) -> StreamRun[Any]:
        """Starts the stream, of this dataset or of a copy."""
        # Not `or`: a dataset has a length, which may take long to count.
        dataset = self.dataset if dataset is None else dataset
        return StreamRun(dataset, self.stream, max_skip_rate=1.0)

    def restored(self, state: str) -> StreamRun[Any]:
        """Starts the stream at a saved state."""
        run = self.run()
        run.restore(Snapshot.from_json(json.loads(state)))
        return run

    def error(self, law: str, where: str, what: str) -> LawError:
        """Makes the error of a broken law."""
        place = f"stream {self.stream.index} of {self.stream.num_streams}"
        return LawError(f"{law}: {self.name}, {place}, {where}: {what}")

    def compare(self, law: str, where: str, old: Any, new: Any, what: str = "differs at") -> None:
        """Raises unless two values are equal."""
        if difference := first_difference(old, new):
            raise self.error(law, where, f"{what} {difference}")

    @contextmanager
    def during(self, law: str, where: str) -> Iterator[None]:
        """Turns whatever goes wrong into an error of the law."""
        try:
            yield
        except LawError:
            raise
        except Exception as error:
            raise self.error(law, where, f"raised {type(error).__name__}: {error}") from error

    def expect(
        self, law: str, where: str, run: StreamRun[Any], first: int, stop: int | None = None
    ) -> None:
        """Raises unless a run returns items `first` to `stop` of this stream, or the rest."""
        with self.during(law, where):
            for i in range(first, len(self.entries) if stop is None else stop):
                item = next(run, END)
                if item is END:
                    raise self.error(law, where, f"the stream ends before item {i}")
                returned = Entry(run.key, item)
                self.compare(law, where, self.entries[i], returned, f"item {i} differs at")
            if stop is None and self.has_ended:
                for _ in range(2):
                    if next(run, END) is not END:
                        raise self.error(law, where, f"item {len(self.entries)} is one too many")


@contextmanager
def global_seeds(seed: int) -> Iterator[Callable[[], Sequence[Any]]]:
    """Seeds the global generators for a `with` block; yields a function that reads their states."""
    before = GlobalStates()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield lambda: (torch.get_rng_state(), np.random.get_state(), random.getstate())
    finally:
        before.put()


def _copied(item: Any) -> Any:
    try:
        return copy.deepcopy(item)
    except Exception as error:
        add_note(error, "check_dataset copies items to see whether they change later")
        raise


def first_difference(old: Any, new: Any) -> str | None:
    """Describes where two values first differ; None if they are equal all the way down.

    Types must be the same; NaN equals NaN; tensors and arrays are compared by dtype, shape and
    content; objects without an `==` of their own by the attributes that pickle takes along.

    Example:
        >>> first_difference({"a": [1, 2]}, {"a": [1, 3]})
        "['a'][1]: 2 != 3"
    """
    if old is new:
        return None
    if type(old) is not type(new):
        return f": {type(old).__name__} {old!r:.80} != {type(new).__name__} {new!r:.80}"
    if isinstance(old, (torch.Tensor, np.ndarray)):
        return _array_difference(old, new)
    parts, others = _parts_of(old), _parts_of(new)
    if parts is None or others is None:
        is_same = old == new or (old != old and new != new)
        return None if is_same else f": {old!r:.200} != {new!r:.200}"
    if parts.keys() != others.keys():
        if isinstance(old, dict):
            return f": keys {[*old]} != {[*new]}"
        return f": {len(old)} != {len(new)} entries"
    for name, part in parts.items():
        difference = first_difference(part, others[name])
        if difference is not None:
            return _step_to(old, name) + difference
    return None


def _parts_of(value: Any) -> dict[Any, Any] | None:
    """Returns what a value consists of, by name; None for a value whose class defines `==`."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    equal: Any = type(value).__eq__
    if equal is not object.__eq__:
        return None
    # What pickle would make it of: each copy has its own locks and open files.
    reduced: Any = value.__reduce_ex__(4)
    is_plain = reduced[0] is copyreg.__newobj__ and isinstance(reduced[2], dict)  # type: ignore[attr-defined]
    return {"": reduced[2] if is_plain else reduced}


def _step_to(value: Any, name: Any) -> str:
    """Returns how Python writes a part of a value."""
    fields = getattr(value, "_fields", None)
    if isinstance(value, tuple) and fields:
        return f".{fields[name]}"
    if isinstance(value, (dict, list, tuple)):
        return f"[{name!r}]"
    return f".{name}" if name else ""


def _array_difference(old: Any, new: Any) -> str | None:
    if old.dtype != new.dtype or old.shape != new.shape:
        return f": {old.dtype} {tuple(old.shape)} != {new.dtype} {tuple(new.shape)}"
    if old.dtype == object:
        return first_difference(old.tolist(), new.tolist())
    different = np.asarray((old != new) & ~((old != old) & (new != new)))
    if not different.any():
        return None
    place = tuple(int(i) for i in np.argwhere(different)[0])
    return f"[{', '.join(map(str, place))}]: {old[place]!r} != {new[place]!r}"
