"""Counts what a run yielded, by source, batch by batch; saved, reduced over ranks, logged."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import torch.distributed as dist

from energon_lite.core.arrays import Float64Array
from energon_lite.core.dataset import SavableDataset, SourceFacts
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.keys import leaves
from energon_lite.core.stream_context import SKIP_ALLOWANCE, CostRow, SkipRecord
from energon_lite.core.tables import table_lines
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.loader.count_table import COUNTED, SUMMED, CountTable
from energon_lite.loader.rank_store import TIMEOUT_SEC, Exchange
from energon_lite.loader.workers.rank_feed import Delivery
from energon_lite.names.energon_modules import LazyFunction


@dataclasses.dataclass
class SourceStats:
    """The counts of one source.

    Attributes:
        samples: samples in the batches. A sample that is split, or expanded by a hook, counts once,
            with its first part; one that fills a batch up again does not count.
        batches: batches with samples of the source, or parts of them.
        draws: samples drawn: those in the batches, skipped, dropped with a last batch, expanded to
            nothing, or read ahead.
        skipped: samples skipped, on purpose or for an error.
        tokens: length of all that is in the batches, by the task encoder's `sample_length`, or by
            the index of a blend of tokens; else 0.
        overlong: samples that were too long for a pack, and were cut, split or packed alone; those
            that were dropped are in `skipped`.
        loss_weight_sum: the loss weights of the samples, summed, each as it was at its time.
        read_ahead: samples that were read into the buffers of packs, groups or a shuffle, and are
            in no batch yet. A rank that others hand their streams to may have less than 0.
        epochs: samples drawn and not read ahead, over the size of the source.
        target_share: the part of all samples that the blend asks of it, up to here; of all tokens,
            if it blends tokens.
        actual_share: its actual share of all samples, or tokens.
        read_sec: seconds of reading and decoding, in whichever process did it.
        encode_sec: seconds in the hooks, of a batch's hooks by its part in the batch.
        wait_sec: seconds that the training loop waited for its batches, by its part in each.
        loss_sum: the weighted losses that `loader.record_loss` added, summed.
        loss_count: the sum of their weights; 0 without such a call.
        loss: their mean.
    """

    samples: int = 0
    batches: int = 0
    draws: int = 0
    skipped: int = 0
    tokens: int = 0
    overlong: int = 0
    read_ahead: int = 0
    loss_weight_sum: float = 0.0
    epochs: float = 0.0
    target_share: float = 0.0
    actual_share: float = 0.0
    read_sec: float = 0.0
    encode_sec: float = 0.0
    wait_sec: float = 0.0
    loss_sum: float = 0.0
    loss_count: float = 0.0
    loss: float = 0.0


class Stats(dict[str, SourceStats]):
    """Statistics by source id, of one rank or of several together.

    Attributes:
        target: the target samples of each source, of the whole run up to here.
        facts: what is known of each source.
        unit: what shares are of, "samples" or "tokens".
        place: rank, number of ranks, and workers of each, of the loader; after `reduced`, one rank
            stands for all.
        ranks: after `reduced`, the counts of each rank.
        num_streams: of the run; 0 if it is not known.
        memory_bytes: the memory of each worker process of this rank, without what they share.
        waited_sec: how long the training loop waited for batches since the loader was made, or
            restored.
        workers_needed: how many workers of this rank would have sufficed: seconds of reading and of
            hooks for each second of the training loop without its waits; None before two batches.
        fetched: of datasets in object stores, `requests`, `bytes`, `retries`, `waits` and
            `wait_sec` of their folder by source: of all programs of this machine that fetch at the
            same time.
    """

    _write_stats = LazyFunction("energon_lite.extras.report.stats_file:write_stats")
    place: tuple[int, int, int | None] = (0, 1, None)
    ranks: Sequence[Mapping[str, Mapping[str, float]]] = ()
    num_streams = 0
    memory_bytes: Sequence[int] = ()
    waited_sec = 0.0
    workers_needed: float | None = None
    fetched: Mapping[str, Mapping[str, float]] = {}

    def __init__(
        self,
        counted: Mapping[str, SourceStats],
        target: Mapping[str, float],
        facts: Mapping[str, SourceFacts],
        unit: str = "samples",
    ) -> None:
        names = dict.fromkeys((*facts, *counted))
        super().__init__(
            (name, dataclasses.replace(counted.get(name, SourceStats()))) for name in names
        )
        self.target = dict(target)
        self.facts = dict(facts)
        self.unit = unit
        total = sum(getattr(stats, unit) for stats in self.values())
        total_target = sum(self.target.values())
        for name, stats in self.items():
            if name in self.facts:
                used = stats.draws - stats.read_ahead
                stats.epochs = used / max(1, self.facts[name].num_samples)
            stats.actual_share = getattr(stats, unit) / total if total else 0.0
            stats.loss = stats.loss_sum / (stats.loss_count or 1.0)
            stats.target_share = self.target.get(name, 0.0) / total_target if total_target else 0.0

    def merged(self, others: Iterable[Mapping[str, SourceStats]]) -> Stats:
        """Returns the statistics of this rank and others together."""
        ranks = [{name: vars(stats) for name, stats in rank.items()} for rank in (self, *others)]
        return Stats(_sums(ranks), self.target, self.facts, self.unit)

    def reduced(self, group: Any = None) -> Stats:
        """Returns the statistics of all ranks together; every rank must call it.

        Args:
            group: the `torch.distributed` group of the data-parallel ranks; by default all. Without
                `torch.distributed` these are the statistics of this process.

        Raises:
            StateError: Some ranks did not call it within 300 s.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self
        own, world_size = dist.get_rank(group), dist.get_world_size(group)
        config = WorkerConfig(
            rank=own, world_size=world_size, num_workers=0, data_parallel_group=group
        )
        plain = {name: dataclasses.asdict(stats) for name, stats in self.items()}
        ranks = Exchange(config, TIMEOUT_SEC).gather(plain, "stats().reduced()") or []
        found = Stats(_sums(ranks), self.target, self.facts, self.unit)
        found.place, found.ranks = (0, 1, self.place[2]), ranks
        return found

    def scalars(self, prefix: str = "data/") -> dict[str, float]:
        """Returns every figure under a name such as `data/coco/train/actual_share`."""
        return (
            {
                f"{prefix}{name}/{field}": float(value)
                for name, stats in self.items()
                for field, value in dataclasses.asdict(stats).items()
                if stats.loss_count or field not in ("loss", "loss_sum", "loss_count")
            }
            | {
                f"{prefix}{name}/fetched_{field}": value
                for name, counts in self.fetched.items()
                for field, value in counts.items()
            }
            | {f"{prefix}worker_{n}/memory_bytes": own for n, own in enumerate(self.memory_bytes)}
        )

    def write_to(self, writer: Any, step: int) -> None:
        """Writes every figure to a logger, or a line of them to a JSONL file.

        A file gets plain counts, from which `energon-lite report` makes a report.

        Args:
            writer: the path of a JSONL file; or what has `add_scalar(name, value, step)`, as
                TensorBoard's `SummaryWriter`, `log_metrics(dict, step=...)`, as a logger of
                Lightning, or `log(dict, step=...)`, as wandb and an `Accelerator`.
            step: the training step.

        Raises:
            TypeError: `writer` is none of these.
        """
        self._write_stats(self, writer, step)

    def __str__(self) -> str:
        """Returns a table for people."""
        rows = [("source", "target", "actual", "samples", "epochs", "skipped")]
        rows += [
            (
                name, f"{s.target_share:.2%}", f"{s.actual_share:.2%}", f"{s.samples:,}",
                f"{s.epochs:.2f}", f"{s.skipped:,}",
            )
            for name, s in self.items()
        ]  # fmt: skip
        return "\n".join(table_lines(rows))


# One row per delivery: its costs, skips and wait. A mark: sums, shape (11, N), rows that are not in
# them yet, and the number of items.
_Row = tuple[Sequence[CostRow], Sequence[SkipRecord], "float | None"]
CounterMark = tuple[Float64Array, tuple[_Row, ...], int]
_MAX_ROWS = 64
_SECONDS = [*map(COUNTED.index, ("read_sec", "encode_sec", "wait_sec"))]
_DRAWS, _SAMPLES, _LOSS = map(COUNTED.index, ("draws", "samples", "loss_weight_sum"))
_AHEAD = COUNTED.index("read_ahead")
_Losses = tuple[str, tuple[float, float]]


class Counter:
    """Counts what one rank yields, and the targets of its run, by source.

    Args:
        dataset: the pipeline, which knows what it asks.
        names: of the sources in its configuration.
        counted: counts before the last restore, of the ranks that this one continues.
        before: of a rank, with the target of each source up to there.
        num_items: items that the whole run yielded before.

    Attributes:
        mark: what was counted; set to an earlier value, it forgets what came since.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        names: Iterable[str],
        counted: Sequence[CountTable] = (),
        before: CountTable | None = None,
        num_items: int = 0,
    ) -> None:
        self._dataset = dataset
        # The columns of the sources: those of the configuration, then others as they come.
        self._places = {name: place for place, name in enumerate(names)}
        # Up to the last restore, and up to here.
        self._target_draws = lru_cache(2)(lambda n: self._of(_target_draws(dataset, n)))
        self._items_before = num_items
        target = dict(zip(before.names, before.target, strict=True)) if before else {}
        self._target_before = self._of(target)
        more = {facts.name: facts.loss_weight - 1 for facts in dataset.sources()}
        self._loss_weights = 1 + self._of(more)
        # Sums are made of whole numbers of samples, so that they do not drift.
        self._before = np.zeros((len(COUNTED), 0))
        for table in counted:
            places = self._placed(table.names)
            self._before = self._whole(self._before)
            self._before[:, places] += table.counts
        # Values that are never changed, so that a caller can return to them.
        self.mark: CounterMark = (self._before, (), 0)
        self._clock: tuple[float, float] | None = (
            None  # when the first was asked for, the last came
        )

    def _placed(self, names: Iterable[str]) -> list[int]:
        places = self._places
        return [places.setdefault(name, len(places)) for name in names]

    def _of(self, values: Mapping[str, float]) -> Float64Array:
        places = self._placed(values)
        column = np.zeros(len(self._places))
        column[places] = [*values.values()]
        return column

    def _whole(self, found: Float64Array, rest: float = 0.0) -> Float64Array:
        """Returns a copy with all sources that are known by now."""
        whole = np.full((*found.shape[:-1], len(self._places)), rest)
        whole[..., : found.shape[-1]] = found
        return whole

    def add(
        self, costs: Sequence[CostRow], skipped: Sequence[SkipRecord], wait_sec: float | None = None
    ) -> None:
        """Counts what was drawn and spent up to a batch, or up to the end of a stream.

        Args:
            costs: by source.
            skipped: the skipped samples.
            wait_sec: how long the batch was waited for; None at the end of a stream.
        """
        if len(self.mark[1]) == _MAX_ROWS:
            _ = self._counted
        if wait_sec is not None:
            now = perf_counter()
            self._clock = (self._clock or (now - wait_sec, now))[0], now
        counted, rows, num_items = self.mark
        row = costs, skipped, wait_sec
        self.mark = (counted, (*rows, row), num_items + (wait_sec is not None))

    @property
    def _counted(self) -> Float64Array:
        counted, rows, num_items = self.mark
        if rows:
            added = _summed(rows)
            places = self._placed(added)
            counted = self._whole(counted)
            counted[:, places] += [[getattr(own, n) for own in added.values()] for n in COUNTED]
            self.mark = (counted, (), num_items)
        return counted

    def _target(self, num_items: int) -> Float64Array:
        """Returns the target samples of each source in the run's first items.

        The target up to the last restore is the one that was saved, also of another blend.
        """
        own_items = self.mark[-1]
        since = self._counted.sum(axis=1) - self._before.sum(axis=1)
        draws = since[_DRAWS] - since[_AHEAD]
        # Draws in an item on this rank stand for those on the others; all targets together are the
        # draws up to the last restore.
        per_item = draws / own_items if own_items else 1.0
        first = round(self._target_before.sum() or self._items_before * per_item)
        stop = first + round((num_items - self._items_before) * per_item)
        now, then = self._target_draws(stop), self._target_draws(first)
        return self._whole(self._target_before) + self._whole(now) - self._whole(then)

    def table(self, num_items: int) -> CountTable:
        """Returns all counts and targets, where the whole run has yielded `num_items`."""
        target, counts = self._target(num_items), self._whole(self._counted)
        before, weights = self._whole(self._before), self._whole(self._loss_weights, 1.0)
        since = weights * (counts[_SAMPLES] - before[_SAMPLES])
        counts[_LOSS] = before[_LOSS] + since
        return CountTable([*self._places], target, counts)

    def stats(self, num_items: int, losses: Iterable[_Losses] = ()) -> Stats:
        """Returns the statistics, where the whole run has yielded `num_items`.

        Args:
            num_items: items of all ranks.
            losses: sources with the weighted sum of their losses, and the sum of the weights.
        """
        facts = {facts.name: facts for facts in self._dataset.sources()}
        rows: dict[str, Any] = self.table(num_items).rows()
        target = {name: row.pop("target") for name, row in rows.items()}
        counted = {name: SourceStats(**row) for name, row in rows.items()}
        for name, own in losses:
            counted[name].loss_sum, counted[name].loss_count = own
        found = Stats(counted, target, facts, self._dataset.traits.unit)
        read, encode, found.waited_sec = (
            self._counted[_SECONDS].sum(1) - self._before[_SECONDS].sum(1)
        ).tolist()
        first, last = self._clock or (0.0, 0.0)
        if (own_sec := last - first - found.waited_sec) > 0:
            found.workers_needed = (read + encode) / own_sec
        return found


def _sums(ranks: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, SourceStats]:
    """Returns the counts of several ranks together, by source."""
    sums = collections.defaultdict[str, SourceStats](SourceStats)
    for rank in ranks:
        for source, fields in rank.items():
            for name in SUMMED:
                setattr(sums[source], name, getattr(sums[source], name) + fields[name])
    return sums


def _summed(rows: Sequence[_Row]) -> dict[str, SourceStats]:
    """Returns what rows count, by source."""
    added = collections.defaultdict[str, SourceStats](SourceStats)
    for costs, skipped, wait_sec in rows:
        for source, number in lost_samples(skipped).items() if skipped else ():
            added[source].skipped += number
        total = sum([row[7] for row in costs])
        for (
            source,
            draws,
            read_sec,
            encode_sec,
            tokens,
            overlong,
            samples,
            parts,
            released,
        ) in costs:
            stats = added[source]
            stats.draws += draws
            stats.overlong += overlong
            stats.read_sec += read_sec
            stats.encode_sec += encode_sec
            stats.tokens += tokens
            stats.samples += samples
            stats.batches += parts > 0
            stats.read_ahead += draws - released
            if wait_sec is not None and total:
                stats.wait_sec += wait_sec * parts / total
    return added


def lost_samples(records: Sequence[SkipRecord]) -> dict[str, int]:
    """Counts the skipped samples by source; a skipped batch may mix several."""
    pairs = ((record, leaf) for record in records for leaf in leaves(record.restore_key))
    return collections.Counter(leaf[0] if leaf else record.source for record, leaf in pairs)


def _target_draws(dataset: SavableDataset[Any], num_draws: int) -> dict[str, float]:
    """Returns the target samples of each source in the first draws of all passes."""
    while not dataset.traits.ordering and len(dataset.children) == 1:
        (dataset,) = dataset.children  # lists and functions change no shares
    passes, rest = 0, num_draws
    if not dataset.endless:
        length = dataset.num_items(Stream(0, 1))
        passes, rest = divmod(num_draws, length) if length else (0, 0)
    found = dataset.expected(rest)
    if passes:
        for name, number in dataset.expected(length).items():
            found[name] = found.get(name, 0.0) + passes * number
    # Items of a blend that are batches count as their samples.
    total = sum(found.values())
    return {name: number * num_draws / total for name, number in found.items() if total}


# The part of a pass that may fail above `max_skip_rate`; one sample always may.
_ALLOWED_PART = 0.05


class FailureLimit:
    """Ends a validation pass that lost too many samples; others have no limit here.

    A rank that alone lost more than the whole pass may stops at once, where no rank waits for it.
    What the ranks lost together is compared when the pass ends, if they can talk.

    Args:
        dataset: the pipeline.
        max_skip_rate: failures per sample; 1 for any number.
    """

    def __init__(self, dataset: SavableDataset[object], max_skip_rate: float) -> None:
        self._is_on = not (dataset.training or dataset.endless) and max_skip_rate < 1
        self._max_skip_rate = max_skip_rate
        self._num_samples = sum(facts.num_samples for facts in dataset.sources())
        self._last: SkipRecord | None = None

    def counted(self, failed: int, drawn: int, delivery: Delivery) -> tuple[int, int]:
        """Returns the counts with another batch, or the end of a stream."""
        if not self._is_on:
            return failed, drawn
        drawn += sum([row[1] for row in delivery.costs])
        for record in delivery.skipped:
            if not record.on_purpose:
                failed += record.num_samples
                self._last = record
        return failed, drawn

    def check(self, failed: int, drawn: int, *, is_whole: bool) -> None:
        """Compares failures with the samples of the pass.

        Args:
            failed: samples that failed.
            drawn: samples drawn.
            is_whole: whether these are of the whole pass, and not of a part of it.

        Raises:
            FatalSampleError: They are too many.
        """
        num_samples = drawn if is_whole else max(drawn, self._num_samples)
        above = min(SKIP_ALLOWANCE, max(1.0, _ALLOWED_PART * num_samples))
        allowed = int(self._max_skip_rate * num_samples + above)
        if failed <= allowed or not self._is_on:
            return
        record, last = self._last, "on other ranks"
        if record is not None:
            place = f"{record.sample_key!r} of {record.source}, stage {record.stage}"
            last = f"the last here {place}: {record.error}"
        raise FatalSampleError(
            f"Of {num_samples:,} samples of this validation pass {failed:,} failed, and "
            f"max_skip_rate={self._max_skip_rate:g} allows {allowed:,} ({last}). What is left is "
            "another validation set. Repair the data or the code, raise SkipSample for samples "
            "that are not wanted, or give the loader a higher max_skip_rate."
        )
