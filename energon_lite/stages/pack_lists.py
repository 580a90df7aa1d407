"""Lists of samples that fill packs: by length, or chosen by a function."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from energon_lite.batching.collector import Collector
from energon_lite.batching.one_by_one import SelectedPacks
from energon_lite.batching.rules import Default, Packing
from energon_lite.batching.stream_packs import StreamPacks
from energon_lite.batching.window_packs import WindowPacks
from energon_lite.core.compiled import compile_all
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED, FunctionRun, UserFunction, describe_input
from energon_lite.stages.collect import CollectCursor, CollectDataset
from energon_lite.stages.token_lengths import MeasureDataset, MeasuredLists


def pack_settings(packing: Packing) -> dict[str, JSON]:
    """Returns what of a `Packing` decides which samples share a pack."""
    group_by = packing.group_by
    return {
        "capacity": dict(zip(packing.resources, packing.capacities, strict=True)),
        "algorithm": packing.algorithm,
        "packing_buffer_size": packing.buffer_size,
        "max_samples": packing.max_samples,
        "group_by": "function" if callable(group_by) else group_by,
        "overlong": packing.overlong,
        "align": list(packing.alignments),
        "drop_last": packing.drop_last,
        "end_of_data": packing.end_of_data,
    }


def cost_settings(packing: Packing) -> list[JSON]:
    """Returns what of a `Packing` decides the cost of a pack."""
    return [packing.cost.token, packing.cost.token_squared, packing.cost.tile]


class PackLists(MeasuredLists):
    """Lists of samples that fill packs; of one group each.

    State: that of `CollectDataset`.
    Length: at most that below.
    Keys: `("pack", slot, key, key, ...)`; that of a part of a sample that is too long for a pack is
    `("piece", start, stop, key)`.

    Args:
        dataset: the samples, measured; they must be replayable, as buffered ones are saved as keys.
        packing: how they are packed.
        per_batch: packs of a batch above.
    """

    name, kind, what = "pack", "pack", "Packs"

    def __init__(self, dataset: MeasureDataset[Any], packing: Packing, per_batch: int = 1) -> None:
        super().__init__(dataset, packing)
        self.packing = packing
        self.lists_per_batch = per_batch
        self.joins_epochs = not isinstance(packing.buffer_size, Default)
        self.keeps_lengths = packing.balance == "quantile_sync"
        compile_all()  # before there are worker processes

    def own_settings(self) -> dict[str, JSON]:
        """Returns what decides which samples share a pack."""
        own = {"joins_epochs": self.joins_epochs}
        return {**super().own_settings(), **pack_settings(self.packing), **own}

    def collector(self, stream: Stream, cursor: CollectCursor) -> Collector:
        """Returns what chooses the packs of a stream."""
        packing = self.packing
        if self.endless:  # nothing is dropped where an epoch ends
            packing = replace(packing, drop_last=False, end_of_data="pack")
        if packing.algorithm == "streaming":
            return StreamPacks(packing)
        return WindowPacks(packing, packing.buffer_size, grows=True)


@dataclass
class PackedSamplesOutput:
    """May be returned by `select_samples_to_pack` instead of a list of packs.

    Attributes:
        packs: lists of samples.
        pushback: samples to be looked at again, with those read next.
    """

    packs: list[list[Any]]
    pushback: list[Any] = field(default_factory=list)


class SelectedLists(CollectDataset[list[Any]]):
    """Lists of samples that a function chose from a full buffer.

    When no pack is left, the buffer is filled up and given to the function. Samples that it puts
    neither into a pack nor back are dropped, and counted.

    State: that of `CollectDataset`.
    Length: at most that below.
    Keys: `("pack", slot, key, key, ...)`.

    Args:
        dataset: the samples; they must be replayable, as buffered ones are saved as keys.
        buffer_size: samples of a full buffer.
        select: returns packs, lists of samples, or a `PackedSamplesOutput`.
        drop_last: whether what is buffered when the data end is dropped.
    """

    name, settings = "select_packs", ("packing_buffer_size", "drop_last")
    kind, what = "pack", "Packs"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        buffer_size: int,
        select: UserFunction,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset)
        if buffer_size < 1:
            raise ValueError(f"packing_buffer_size={buffer_size} must be at least 1")
        if select.is_generator:
            raise ValueError(f"{select.where} is a generator; return the list of packs")
        self.packing_buffer_size = buffer_size
        self.select = select
        self.drop_last = drop_last

    def collector(self, stream: Stream, cursor: CollectCursor) -> SelectedPacks:
        """Returns what asks the function for packs of a stream."""
        select = _Select(FunctionRun(self.select), cursor)
        return SelectedPacks(self.packing_buffer_size, select, self.drop_last)


@dataclass
class _Select:
    """The user's function, as a function of the numbers of buffered samples."""

    run: FunctionRun
    cursor: CollectCursor

    def __call__(self, numbers: list[int], is_last: bool) -> tuple[list[list[int]], list[int]]:
        cursor = self.cursor
        keys, samples = cursor.buffered(numbers)
        found = self.run.call(("select", *keys), samples)
        if found is SKIPPED:
            cursor.forget(numbers)  # they were counted
            return [], []
        packs, pushback = self._parts(found)
        by_id = dict(zip(map(id, samples), numbers, strict=True))
        by_key: dict[RestoreKey, int] = {}
        unused = dict.fromkeys(numbers)

        def number_of(sample: Any) -> int:
            number = by_id.get(id(sample))
            if number is None:
                # The function may have made a new sample of one that it got.
                by_key.update(() if by_key else zip(keys, numbers, strict=True))
                number = by_key.get(getattr(sample, "__restore_key__", ()), -1)
            if unused.pop(number, number) is not None:
                raise FatalSampleError.from_sample_key(
                    describe_input(sample)[0] or repr(sample)[:80],
                    f"{self.run.spec.where} returned it "
                    + ("but did not get it" if number < 0 else "twice")
                    + "; put each sample that it gets into one pack, or into `pushback`",
                )
            cursor.replace(number, sample)
            return number

        chosen = [[number_of(sample) for sample in pack] for pack in packs if len(pack)]
        rest = [number_of(sample) for sample in pushback]
        cursor.drop(unused, "select_samples_to_pack put it into no pack")
        if not chosen and rest and not unused:
            rest = self._dropped(rest, is_last)
        return chosen, rest

    def _parts(self, found: Any) -> tuple[list[list[Any]], list[Any]]:
        packs, pushback = found, []
        if isinstance(found, PackedSamplesOutput):
            packs, pushback = found.packs, found.pushback
        if not isinstance(packs, (list, tuple)) or not all(
            isinstance(pack, (list, tuple)) for pack in packs
        ):
            raise FatalSampleError(
                f"{self.run.spec.where} returned {packs!r:.80}; return a list of lists of samples"
            )
        return list(packs), list(pushback)

    def _dropped(self, rest: list[int], is_last: bool) -> list[int]:
        """Ends what would be repeated for ever: the function took nothing of a full buffer."""
        if not is_last:
            raise FatalSampleError(
                f"{self.run.spec.where} pushed all {len(rest)} samples of a full buffer back and "
                "made no pack; use a larger packing_buffer_size, or let it make a pack"
            )
        self.cursor.drop(rest, "pushed back at the end of the data")
        return []
