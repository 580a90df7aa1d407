"""Lists of samples that are planned by a length index before anything is read."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from energon_lite.batching.rules import TOKENS
from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import Cursor, context_of
from energon_lite.core.errors import StateError
from energon_lite.core.keys import whole
from energon_lite.core.state import RestoreKey, Snapshot
from energon_lite.core.stream_context import StreamContext, current_context
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED
from energon_lite.sources.source import WebdatasetSource
from energon_lite.stages.batching import Collected
from energon_lite.stages.measuring import MeasureDataset
from energon_lite.stages.planned.order import OrderReader, PlannableDataset
from energon_lite.stages.planned.reading import PlannedLengths, PlanReader
from energon_lite.stages.planned.window import PlannedWindow, Planner, unit_keys

# Counts of streams and passes that are kept, as a plan takes seconds.
_MOST_COUNTED = 4096


class PlannedLists(Collected):
    """Lists of samples, planned window by window of the order; nothing is held back.

    State: the window's number and the place in it, the places in the order where it begins, and
    the restore keys of the few samples that came over from the window before.
    Length: as the plan of a pass says; of endless data, about that of an epoch.

    Args:
        dataset: the samples, measured; each stage works on single samples, or on their order.
        measured: what the index says, by name.
        is_shared: whether each stream makes the plan of all, and takes its part.

    Raises:
        ValueError: The order is not known before reading.
        FileNotFoundError: A source has no such index.
    """

    def __init__(
        self, dataset: MeasureDataset[Any], measured: PlannedLengths, is_shared: bool
    ) -> None:
        super().__init__(dataset)
        self.measured = measured
        self.is_shared = is_shared
        self.plannable = PlannableDataset(self.dataset)
        self.digest, self.mean_tokens = self._totals()
        self._counted: dict[tuple[int, int, int], int] = {}

    @abstractmethod
    def planner(self, stream: Stream) -> Planner:
        """Returns what plans a stream's windows."""

    @property
    @abstractmethod
    def samples_per_list(self) -> float:
        """About how many samples a list has."""

    def cursor(self, stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        return PlanCursor(self, stream)

    def lengths(self, source: str) -> tuple[Int64Array, ...]:
        """Opens the lengths of a source's samples; shape (N,) for each resource, tokens first."""
        opened, index = self.plannable.sources[source], self.measured.index
        return tuple(opened.stored_lengths(index, name) for name in self._resources(opened))

    def _resources(self, source: WebdatasetSource[Any]) -> tuple[str, ...]:
        """Names what is looked up: what limits a list, and what tells modalities."""
        resources, index = self.measured.resources, self.measured.index
        if not self.measured.has_modality or len(resources) > 1:
            return resources
        stored = source.stored_facts(index).get("resources", ())
        others = tuple(name for name in stored if name != TOKENS)
        if not others:
            source.stored_lengths(index)  # says if there is none at all
            raise ValueError(
                f'{source.reader.root}: group_by="modality", but length index {index!r} has '
                "tokens only. Let sample_length give a dict with what an image takes, too, as in "
                '{"tokens": n, "images": m}, and write the index anew'
            )
        return resources + others

    def _totals(self) -> tuple[str, dict[str, float]]:
        """Returns a hash of all lengths, and the mean tokens of a sample by source."""
        digest, means = hashlib.blake2b(digest_size=16), {}
        for name in sorted(self.plannable.sources):
            columns = self.lengths(name)
            for lengths in columns:
                digest.update(np.ascontiguousarray(lengths, dtype="<i8").data)
            means[name] = float(columns[0].mean()) if len(columns[0]) else 0.0
        return digest.hexdigest(), means

    @cached_property
    def shares(self) -> dict[str, float]:
        """Samples by source, of a million; of a pass, where the blend does not tell."""
        asked = self.dataset.expected(1e6)
        return asked or {facts.name: float(facts.num_samples) for facts in self.sources()}

    def num_items(self, stream: Stream) -> int:
        """Counts the lists of a stream's pass; of endless data, about those of its first epoch."""
        if self.endless:
            return -(-self.dataset.num_items(stream) // max(1, int(self.samples_per_list)))
        about = (stream.index, stream.num_streams, stream.pass_index)
        if about not in self._counted:
            if len(self._counted) > _MOST_COUNTED:
                self._counted.clear()
            self._counted.update(self._count(stream))
        return self._counted[about]

    def _count(self, stream: Stream) -> dict[tuple[int, int, int], int]:
        """Counts the lists of a stream; of a shared plan, which is made once, those of all."""
        own, total = 0, np.zeros(stream.num_streams, dtype=np.int64)
        with context_of(StreamContext(stream, max_skip_rate=1.0)):
            for window in self.windows(stream):
                own += len(window.packs)
                if window.num_lists is not None:
                    total += window.num_lists
        counts = enumerate(total.tolist()) if self.is_shared else [(stream.index, own)]
        return {(index, stream.num_streams, stream.pass_index): num for index, num in counts}

    def windows(self, stream: Stream) -> Iterator[PlannedWindow]:
        """Returns the plans of a stream's windows, of which nothing is read."""
        return PlanCursor(self, stream).windows()

    @property
    def samples_are_known(self) -> bool:
        """It is not: that depends on their lengths."""
        return False

    def expected(self, num_items: float) -> dict[str, float]:
        """Counts the samples of so many lists of the mean size."""
        return self.dataset.expected(num_items * self.samples_per_list)

    def restore_member(self, key: RestoreKey) -> Any:
        """Makes one sample of a list again; the whole of it, of a part."""
        return self.dataset.restore_sample(whole(key))


class PlanCursor(Cursor[list[Any]]):
    """A stream's place among planned lists."""

    def __init__(self, spec: PlannedLists, stream: Stream) -> None:
        self._spec = spec
        self._stream = stream
        self._names = list(spec.plannable.sources)
        self._planner = spec.planner(stream)
        numbers = range(stream.num_streams) if spec.is_shared else [stream.index]
        order = spec.plannable.order
        self._readers = [
            OrderReader(order, self._names, replace(stream, index=number)) for number in numbers
        ]
        self._number = self._given = 0
        self._carried: tuple[RestoreKey, ...] = ()
        self._window: PlannedWindow | None = None
        self._reader: PlanReader | None = None
        self._mark()

    def _mark(self) -> None:
        """Keeps where the window begins."""
        self._starts = tuple(reader.snapshot() for reader in self._readers)
        self._draws = tuple(reader.num_draws for reader in self._readers)

    def __next__(self) -> list[Any]:
        """Returns the samples of the next list; one of which none could be made is passed over."""
        while not (pairs := self._next_list()):
            pass
        self.key = (self._spec.kind, current_context().batch_index, *(key for key, _ in pairs))
        return [sample for _, sample in pairs]

    def _next_list(self) -> list[tuple[RestoreKey, Any]]:
        window = self._with_packs()
        if self._reader is None:
            self._reader = PlanReader(
                self._spec.plannable, self._spec.measured, window, self._given, self._names,
                self._stream,
            )  # fmt: skip
        units = window.packs[self._given]
        self._given += 1
        keys = unit_keys(window.refs, window.units, units, self._names)
        reader, self._reader = self._reader, None
        samples = [next(reader) for _ in keys]
        self._reader = reader  # after an error, the next pack begins with another one
        return [(k, s) for k, s in zip(keys, samples, strict=True) if s is not SKIPPED]

    def skip(self, n: int) -> None:
        """Passes over `n` planned lists, which are not read: also such as could not be made."""
        while n > 0:
            window = self._with_packs()
            step = min(n, len(window.packs) - self._given)
            self._given += step
            self._reader = None
            n -= step

    @property
    def cost(self) -> float:
        """What the pack given last costs, by its cost model."""
        assert self._window is not None
        return float(self._window.costs[self._given - 1])

    def windows(self) -> Iterator[PlannedWindow]:
        """Yields the plans of the windows to come, of which nothing is read."""
        while True:
            try:
                window = self._with_packs()
            except StopIteration:
                return
            self._given = len(window.packs)
            yield window

    def _with_packs(self) -> PlannedWindow:
        """Returns the window with the next pack."""
        window = self._window or self._plan()
        while self._given >= len(window.packs):
            if window.is_last:
                raise StopIteration
            self._number += 1
            self._given = 0
            self._carried = window.carried
            self._mark()
            window = self._plan()
        return window

    def _plan(self) -> PlannedWindow:
        window = self._planner.plan(self._number, self._carried, self._readers)
        if self._given > len(window.packs):
            raise StateError(
                f"The checkpoint's stage 'plan' gave {self._given} packs of a window that "
                f"has {len(window.packs)}; it was edited or damaged."
            )
        if not self._given:  # else it was counted with a pack that was given
            window.notes.count()
        self._window, self._reader = window, None
        return window

    def snapshot(self) -> Snapshot:
        """Returns the place."""
        fields = {
            "window": self._number,
            "given": self._given,
            "draws": self._draws,
            "held": self._carried,
        }
        return Snapshot("plan", fields, self._starts)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the place of a snapshot; the window is planned again when it is needed."""
        snapshot.expect("plan", len(self._readers))
        draws, carried = snapshot.field("draws"), snapshot.field("held")
        number, given = snapshot.count("window"), snapshot.count("given")
        try:
            places = list(zip(self._readers, snapshot.inner, map(int, draws), strict=True))
            for key in carried:
                _check_key(key)
        except (TypeError, ValueError) as error:
            raise StateError(f"The checkpoint's stage 'plan' is damaged: {error}") from error
        for reader, inner, num_draws in places:
            reader.restore(inner, num_draws)
        self._number, self._given, self._carried = number, given, carried
        self._starts, self._draws = snapshot.inner, draws
        self._window = self._reader = None


def _check_key(key: Any) -> None:
    if not isinstance(key, tuple) or len(whole(key)) != 4:
        raise ValueError(f"{key!r:.80} is no restore key of a sample")
