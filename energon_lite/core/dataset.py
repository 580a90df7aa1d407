"""Datasets, and cursors that are the place of one stream in them: the types of every stage.

A `SavableDataset` is immutable, picklable and cheap to send to a worker. A `Cursor` is one
stream's place in it. The six laws that bind them are written down in docs/architecture.md and
tested by `energon_lite.testing.check_dataset`.
"""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.utils.data import IterableDataset
from typing_extensions import Self

from energon_lite.core.arguments import ELSEWHERE
from energon_lite.core.arrays import Int64Array
from energon_lite.core.global_generators import GENERATORS_DRAWN, StreamGenerators
from energon_lite.core.sample_columns import Columns, joined_samples, samples_of
from energon_lite.core.state import COUNT, JSON, NUMBER, Kind, RestoreKey, Snapshot, as_damage
from energon_lite.core.stream_context import DEFAULT_MAX_SKIP_RATE, StreamContext
from energon_lite.core.topology import Stream, WorkerConfig, count_rank_items, current
from energon_lite.core.user_function import UserFunction
from energon_lite.names.energon_modules import Described, LazyFunction, import_name

# Methods of other datasets, which may be looked for here.
_METHODS = ("filter", "map", "select", "shuffle", "take", "train_test_split")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Cursor(Iterator[T_co], ABC):
    """The place of one stream in a dataset; a subclass defines `__next__` or `take`.

    Attributes:
        key: the restore key of the item that `next` returned last.
    """

    key: RestoreKey

    def __next__(self) -> T_co:
        """Returns the next item."""
        while not (items := samples_of(self.take(1)[0])):
            pass
        item: T_co = items[0]
        return item

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Returns the place between two items; cheap."""

    @abstractmethod
    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the place of a snapshot of an equal dataset and stream.

        Raises:
            StateError: The snapshot is of another kind of stage.
        """

    def take(self, n: int) -> tuple[list[T_co] | Columns, list[RestoreKey]]:
        """Returns some of the next `n` items, and their restore keys.

        They are those that are made together, by default one; none if all of these were skipped.

        Raises:
            StopIteration: There is none.
        """
        del n
        return [next(self)], [self.key]


def taken(cursor: Cursor[T], n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
    """Returns the next `n` items, or what is left, and their restore keys."""
    parts: list[list[T] | Columns] = []
    keys: list[RestoreKey] = []
    with suppress(StopIteration):
        while len(keys) < n:
            part, own = cursor.take(n - len(keys))
            parts.append(part)
            keys += own
    return joined_samples(parts), keys


class SourceFacts(NamedTuple):
    """Facts of a source that are known before anything is read.

    Attributes:
        name: the source's id.
        num_samples: samples of an epoch.
        num_bytes: bytes of its shards; 0 where that is not known.
        loss_weight: factor for the loss of its samples.
    """

    name: str
    num_samples: int
    num_bytes: int = 0
    loss_weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Traits:
    """Facts of a dataset that are known before anything is read.

    Attributes:
        training: whether the next `iter` of a loader continues (training) or starts again
            (validation).
        endless: whether a pass has no end.
        replayable: whether `restore_sample` returns equal items: every function is stateless.
        lockstep: whether all ranks must be in the same cycle at the same step.
        pass_length: items of each rank before a loader ends a pass early; None for all.
        unit: what the shares of the sources are of: "samples" or "tokens".
        measures: whether the order depends on lengths that are measured while samples are read.
        each_once: whether a finite pass has each sample of its sources exactly once.
        drops: whether samples may be dropped without being counted as skipped.
        weighted: whether items have the loss weights of their samples.
        unasked_weights: whether there are loss weights other than 1, and the task encoder does not
            say whether dicts get them.
        per_item: whether each item is made of one item below, or of none, in the same order.
            This trait and the next two are those of the dataset itself, not of what is below.
        ordering: whether it only decides which item below comes next.
        obstacle: why its items cannot be planned without reading, where it is neither.
    """

    training: bool = False
    endless: bool = False
    replayable: bool = True
    lockstep: bool = False
    pass_length: int | None = None
    unit: str = "samples"
    measures: bool = False
    each_once: bool = True
    drops: bool = False
    weighted: bool = False
    unasked_weights: bool = False
    per_item: bool = False
    ordering: bool = False
    obstacle: str = ""

    @classmethod
    def merged(cls, children: Sequence[Traits]) -> Traits:
        """Returns what holds for datasets together; ends of passes only for a single one."""
        of_any = ("training", "endless", "lockstep", "measures", "drops", "unasked_weights")
        found: dict[str, Any] = {n: any(getattr(c, n) for c in children) for n in of_any}
        for name in ("replayable", "each_once"):
            found[name] = all(getattr(child, name) for child in children)
        if len(children) == 1:
            found |= {"pass_length": children[0].pass_length, "weighted": children[0].weighted}
        return cls(**found, unit=children[0].unit if children else "samples")


class SavableDataset(Described, IterableDataset[T_co], ABC):
    """Describes what the samples are; iterating changes nothing in it.

    It is an `IterableDataset` for trainers that check. `get_loader` runs it; torch's
    own `DataLoader` reads it as a whole, so with `batch_size=None` and at most one worker process.
    """

    worker_config: WorkerConfig | None = None
    # A resume re-creates the samples of its buffer.
    buffers_samples: bool = False
    # Whether `len` counts samples of all ranks: that of a loader, as in torch.
    counts_samples: bool = False
    # The names of the datasets below, unlike each other, if there are several.
    labels: Sequence[str] = ()

    @abstractmethod
    def cursor(self, stream: Stream) -> Cursor[T_co]:
        """Returns a fresh cursor at the start of a stream."""

    @abstractmethod
    def config(self) -> dict[str, JSON]:
        """Returns the settings that decide the content."""

    @abstractmethod
    def restore_sample(self, restore_key: RestoreKey) -> T_co:
        """Re-creates the item that carried `restore_key`.

        Raises:
            ValueError: The key is not one of this dataset.
        """

    @abstractmethod
    def num_items(self, stream: Stream) -> int:
        """Counts the items of a stream's pass (of its first epoch, if it is endless).

        Samples that are skipped or expanded while reading are not predicted.
        Where the size of lists depends on their samples, each sample counts as a list.
        """

    def num_samples(self, stream: Stream) -> int:
        """Counts the samples that the items of a stream's pass are made of, before skipping."""
        below, num_items = self.children, self.num_items(stream)
        samples = sum(child.num_samples(stream) for child in below) if below else num_items
        items = sum(child.num_items(stream) for child in below)
        return num_items * samples // items if items else samples

    def check_end(self, stream: Stream) -> None:
        """Checks that blends reach the end that they wait for.

        Raises:
            ValueError: A blend never does.
        """
        for child in self.children:
            child.check_end(stream)

    def own_traits(self, below: Traits) -> Traits:
        """Returns what is known of this dataset before anything is read.

        Args:
            below: what is known of the datasets right below, together; of a leaf the defaults.
        """
        return below

    @cached_property
    def traits(self) -> Traits:
        """The facts of this dataset that are known before anything is read."""
        return self.own_traits(Traits.merged([child.traits for child in self.children]))

    @cached_property
    def drawing(self) -> list[tuple[UserFunction, bool]]:
        """The functions that may draw, and whether a resume may make their calls again."""
        return [(f, is_again) for f, is_again in _with_repeats(self) if f.may_draw]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what follows from the rest: a changed copy has other traits."""
        left = ("traits", "drawing")
        return {name: value for name, value in vars(self).items() if name not in left}

    @property
    def training(self) -> bool:
        """Whether the next `iter` of a loader continues (training) or starts again (validation)."""
        return self.traits.training

    @property
    def endless(self) -> bool:
        """Whether a pass has no end."""
        return self.traits.endless

    @property
    def pass_length(self) -> int | None:
        """The number of items of each rank before a loader ends a pass early; None for all."""
        return self.traits.pass_length

    @property
    def run_seed(self) -> int:
        """The seed of the run, by the worker config."""
        return self.worker_config.seed_offset if self.worker_config else 0

    def can_restore_sample(self) -> bool:
        """Whether `restore_sample` returns equal items: every stage is replayable."""
        return self.traits.replayable

    def assert_can_restore(self) -> None:
        """Raises a ValueError if `restore_sample` does not work."""
        if not self.can_restore_sample():
            raise ValueError(f"{type(self).__name__}: a function in it is not marked @stateless")

    def len_rank(self) -> int:
        """Counts the items of this rank in a pass, as `len()`."""
        return count_rank_items(self, self.worker_config)

    @property
    def children(self) -> tuple[SavableDataset[Any], ...]:
        """The datasets right below; none for a leaf."""
        return ()

    def with_children(self, children: Sequence[SavableDataset[Any]]) -> Self:
        """Returns this dataset over others than those right below it."""
        if children:
            raise TypeError(f"{type(self).__name__} is a leaf; there is nothing below it")
        return self

    def sources(self) -> list[SourceFacts]:
        """Lists the sources below, in their order."""
        return [facts for child in self.children for facts in child.sources()]

    def renamed(self, names: Mapping[str, str]) -> SavableDataset[T_co]:
        """Returns this dataset with other ids of its sources."""
        if not any(facts.name in names for facts in self.sources()) or not self.children:
            return self
        return self.with_children([child.renamed(names) for child in self.children])

    def nested(self) -> SavableDataset[Any]:
        """Returns this dataset as a part of another one.

        Raises:
            ValueError: It ends passes after a number of items, which only a loader can do.
        """
        if self.pass_length is not None:
            raise ValueError(
                f"A virtual epoch or limit of {self.pass_length} items ends the passes of a whole "
                "pipeline; it cannot stand below a blend, concatenation, repetition, batch or "
                "buffer. Build the parts without virtual_epoch_length and limit, and put "
                "EpochizeDataset or LimitDataset around the outermost dataset"
            )
        return self

    def expected(self, num_items: float) -> dict[str, float]:
        """Returns how many samples of each source the first items of the run should have.

        Args:
            num_items: items of all streams together.

        Returns:
            Samples by source, before skipping and expanding; empty where that is not known.
        """
        names = [facts.name for facts in self.sources()]
        return {names[0]: num_items} if len(names) == 1 else {}

    def lengths_by_source(self) -> dict[str, Int64Array]:
        """Returns the tokens of each sample, (N,), of sources whose order depends on an index."""
        return {
            name: lengths
            for child in self.children
            for name, lengths in child.lengths_by_source().items()
        }

    def planned_by(self) -> list[tuple[Any, str]]:
        """Lists the sources whose samples are planned by a length index, with its name."""
        return [pair for child in self.children for pair in child.planned_by()]

    _refuse_loader = LazyFunction("energon_lite.extras.trainers.torch_loaders:refuse_loader")
    _check_caller = LazyFunction("energon_lite.extras.trainers.torch_loaders:check_caller")

    @property
    def functions(self) -> tuple[UserFunction, ...]:
        """The functions of the user that this dataset itself calls."""
        return tuple(value for value in vars(self).values() if isinstance(value, UserFunction))

    def __len__(self) -> int:
        """Counts the items of this rank in a pass (an epoch, if endless), before any skipping.

        Where the size of lists depends on their samples, each sample counts as one. Of the dataset
        of a loader, `loader.dataset`, it is the number of samples of all ranks.

        Raises:
            TypeError: A loader ends passes after a number of batches.
        """
        if not self.counts_samples:
            return self.len_rank()
        if self.pass_length is not None:
            end = f"passes end after {self.pass_length} batches of each rank"
            raise TypeError(f"len(loader.dataset): {end}; count len(batch.__key__) in the loop")
        num_streams = self.worker_config.default_num_streams if self.worker_config else 1
        return sum(self.num_samples(Stream(index, num_streams)) for index in range(num_streams))

    if not TYPE_CHECKING:  # else all attributes would be known
        __getitem__ = LazyFunction("energon_lite.extras.trainers.habits:refuse_index")

        def __getattr__(self, name: str) -> Any:
            if name in _METHODS:
                raise AttributeError(import_name(ELSEWHERE)("a dataset has no", name))
            return self.__getattribute__(name)

    def __iter__(self) -> Iterator[T_co]:
        """Iterates the whole dataset as one stream, without a loader.

        After an error, the next item is the one that failed.

        Raises:
            RuntimeError: Several worker processes of a `torch.utils.data.DataLoader` do so, or one
                makes batches of batches.
        """
        return _WholePass(self, self._check_caller(self, sys._getframe(1)))


AnyDataset = SavableDataset[Any]


def depth_of(dataset: AnyDataset, kind: type) -> int:
    """Counts how many datasets of a kind lie in one another."""
    below = max((depth_of(child, kind) for child in dataset.children), default=0)
    return below + isinstance(dataset, kind)


def generators_of(
    dataset: SavableDataset[Any], stream: Stream, drawn: Sequence[str] = ()
) -> StreamGenerators | None:
    """Returns what a stream's hooks may draw from; None if all are marked `@stateless`.

    Args:
        dataset: the pipeline.
        stream: the stream.
        drawn: names of the generators that were drawn from so far.
    """
    if not dataset.drawing:
        return None
    is_again = any(is_again for _, is_again in dataset.drawing)
    return StreamGenerators(dataset.run_seed, stream, drawn, is_again)


def drawing_functions(dataset: AnyDataset) -> Iterator[UserFunction]:
    """Yields the functions that may draw from the global generators, also with seeds of their own.

    Args:
        dataset: the pipeline.
    """
    yield from (f for f, _ in _with_repeats(dataset) if f.may_draw or f.restore_seeds)


def _with_repeats(
    dataset: Any, is_expanded: bool = False, is_buffered: bool = False
) -> Iterator[tuple[UserFunction, bool]]:
    """Yields the functions of the user, and whether a resume may make their calls again.

    Args:
        dataset: a dataset of the pipeline.
        is_expanded: whether a generator hook lies above; its last input is re-created.
        is_buffered: whether a buffer lies above; its samples are re-created.
    """
    is_buffered = is_buffered or dataset.buffers_samples
    is_expanded = is_expanded or any(function.is_generator for function in dataset.functions)
    for function in dataset.functions:
        yield function, is_expanded or (is_buffered and function.is_stateless)
    for child in dataset.children:
        yield from _with_repeats(child, is_expanded, is_buffered)


# What a `StreamRun` saves.
_STREAM_STATE = {
    **dict.fromkeys(("items", "draws", "last_failure"), COUNT),
    "failures": Kind(0.0, lambda fill: NUMBER.fits(fill) and fill >= 0, "a number of failures"),
    "generators": GENERATORS_DRAWN,
}


class StreamRun(Iterator[T]):
    """Drives one stream of a pipeline: numbers its items and collects what it skipped.

    State: number of items returned, how far failures are above their rate, and which global
    generators hooks draw from.
    """

    def __init__(
        self,
        dataset: SavableDataset[T],
        stream: Stream,
        max_skip_rate: float = DEFAULT_MAX_SKIP_RATE,
    ) -> None:
        self.stream = stream
        self.context = StreamContext(stream, max_skip_rate)
        self.context.generators = generators_of(dataset, stream)
        self.context.worker_config = dataset.worker_config
        self.num_returned = 0
        self._is_restored = False
        self._name = f"stream {stream.index}"
        self._dataset = dataset
        self._cursor = dataset.cursor(stream)

    @property
    def key(self) -> RestoreKey:
        """The restore key of the item that was returned last."""
        return self._cursor.key

    def __next__(self) -> T:
        """Returns the stream's next item."""
        context = self.context
        context.batch_index = self.num_returned * self.stream.num_streams + self.stream.index
        try:
            item: T = _called_in(context, next, self._cursor)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            if self._is_restored and (damage := as_damage(error, self._name)) is not error:
                raise damage from error
            raise
        context.num_quiet = 0
        context.release(self._cursor.key, is_returned=True)
        self.num_returned += 1
        return item

    def snapshot(self) -> Snapshot:
        """Returns the place between two items."""
        fields: dict[str, Any] = {"items": self.num_returned, "draws": self.context.num_draws}
        if self.context.fill:
            fields["failures"] = self.context.fill
            fields["last_failure"] = self.context.last_draw
        if self.context.generators is not None and self.context.generators.names:
            fields["generators"] = self.context.generators.names
        return Snapshot("stream", fields, (self._cursor.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the place of a snapshot; if that fails, everything is as before."""
        snapshot.expect("stream", 1)
        fields = {name: kind.start for name, kind in _STREAM_STATE.items()} | snapshot.fields
        for name in ("items", "draws"):  # the others are saved where they are not at their start
            fields[name] = snapshot.field(name)
        fields = Snapshot("stream", fields).checked(_STREAM_STATE)
        num_returned, drawn = fields["items"], fields["generators"]
        context = StreamContext(self.stream, self.context.max_skip_rate)
        context.worker_config = self.context.worker_config
        cursor = self._dataset.cursor(self.stream)
        context.generators = generators_of(self._dataset, self.stream, drawn)
        context.batch_index = num_returned * self.stream.num_streams + self.stream.index
        try:
            _called_in(context, cursor.restore, snapshot.inner[0])
        except Exception as error:
            if (damage := as_damage(error, self._name)) is not error:
                raise damage from error
            raise
        # Re-created items may have drawn, too.
        context.generators = generators_of(self._dataset, self.stream, drawn)
        # What is skipped while samples are re-created was counted when it was skipped first.
        context.take_records()
        context.take_costs()
        context.lengths.clear()
        context.fill, context.last_draw = float(fields["failures"]), fields["last_failure"]
        context.num_draws = fields["draws"]
        self.context, self.num_returned, self._cursor = context, num_returned, cursor
        self._is_restored = True

    def skip(self, n: int) -> None:
        """Passes over `n` items; another rank counts what is skipped on the way."""
        for _ in range(n):
            next(self)
        self.context.take_records()
        self.context.take_costs()


def _called_in(context: StreamContext, function: Callable[[Any], T], argument: object) -> T:
    """Calls a function of a cursor, with a context as the current one."""
    # No manager of contexts sets it: a signal handler that raises in one leaves it set.
    before, current.context = current.context, context
    try:
        if torch._C._len_torch_function_stack():  # as torch.set_default_device leaves it
            function = partial(_on_cpu, function)
        if context.generators is None:
            return function(argument)
        with context.generators.turn, context.generators:
            return function(argument)
    finally:
        current.context = before


def _on_cpu(function: Callable[[Any], T], argument: object) -> T:
    """Calls a function whose tensors are on the CPU, whatever the default device is."""
    with torch.device("cpu"):
        return function(argument)


class _WholePass(Iterator[T]):
    """Iterates a dataset as one stream; an error leaves it where it stood."""

    def __init__(self, dataset: SavableDataset[T], is_batched_again: bool = False) -> None:
        self._run = StreamRun(dataset, Stream(0, 1))
        self._length, self._is_batched_again = dataset.pass_length, is_batched_again

    def __next__(self) -> T:
        """Returns the next item."""
        run = self._run
        if self._length is not None and run.num_returned >= self._length:
            raise StopIteration
        place = run.snapshot()
        try:
            item = next(run)
        except StopIteration:
            raise
        except BaseException:
            run.restore(place)
            raise
        if self._is_batched_again and run.key[0] in ("batch", "pack"):
            SavableDataset._refuse_loader(0)
        return item
