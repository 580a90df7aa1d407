"""Predicts a training run: what it will read of each source, and how long its ranks will wait.

The datasets that `get_train_dataset` builds are run by their own cursors over the order of the
samples and their stored lengths; no sample is read. So a forecast is the run, not an estimate.

Axes: K intervals of the run, N sources, P packs, R ranks, S streams, T steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from energon_lite.balance import CostModel, idle_share, imbalance
from energon_lite.batching.rules import Packing
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.topology import RankSlots, Stream, WorkerConfig
from energon_lite.core.user_function import UserFunction
from energon_lite.inspect.draws import Draws, PackDraws, StreamDraws
from energon_lite.inspect.text import counted
from energon_lite.metadataset.build import build_training
from energon_lite.metadataset.open import LeafOpener, open_node
from energon_lite.stages.measuring import MeasureDataset
from energon_lite.stages.pack_lists import PlannedPacks
from energon_lite.stages.plan_order import PlannableDataset

AnyPath = str | PathLike[str] | Mapping[str, Any]
AnyDataset = SavableDataset[Any]

# Samples that are drawn one by one; what a longer run has after these is extrapolated.
MAX_DRAWS = 5_000_000
NUM_INTERVALS = 8
# A source whose samples come more often gets a warning: from there on, repeated text adds little.
# Source: N. Muennighoff et al., "Scaling data-constrained language models", NeurIPS 2023.
MANY_EPOCHS = 4
# Linear work and attention cost the same for a sample of this many tokens; for most models it is
# some ten to forty thousand.
DEFAULT_COST = CostModel(token=1.0, token_squared=1 / 24_576)


@dataclasses.dataclass(frozen=True)
class SourcePlan:
    """What a run will read of one source.

    Attributes:
        name: the source's id.
        size: samples of an epoch.
        asked_share: target share: the part of all samples (or tokens) by the weights.
        given_share: actual share; None where it depends on lengths that only the run will measure.
            So are the following.
        samples: samples of the source in the run.
        epochs: how often each of its samples comes, on average.
        tokens: tokens of the source in the run; also None where they are not counted.
        read_bytes: bytes read for it, at the mean size of its samples.
    """

    name: str
    size: int
    asked_share: float
    given_share: float | None = None
    samples: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    read_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Interval:
    """Shares in a part of the run.

    Attributes:
        start: its first step.
        stop: the step after its last one.
        asked: target share by source.
        given: actual share by source; None where it is not known.
    """

    start: int
    stop: int
    asked: dict[str, float]
    given: dict[str, float] | None


@dataclasses.dataclass(frozen=True)
class PackPlan:
    """What packs a run will have.

    Attributes:
        capacity: tokens of a pack.
        lengths: name of the length index.
        packs: packs of all ranks.
        fill: the share of their room that is filled, in 0..1.
        dropped: samples that are in no pack: too long, or without a length.
        packs_per_pass: of all streams; None of endless data.
    """

    capacity: int
    lengths: str
    packs: int
    fill: float
    dropped: int
    packs_per_pass: int | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will read.

    Attributes:
        path: what was planned.
        split_part: its split.
        unit: what shares are of, "samples" or "tokens".
        steps_asked: steps that were asked for.
        steps: steps that there are; fewer where the data end.
        drawn_steps: steps whose samples were drawn one by one; later ones are extrapolated. 0 where
            only target shares are known.
        more_batches: batches that some ranks still have after the last step of all ranks.
        batch_size: samples, or packs, of a micro-batch.
        world_size: ranks.
        num_streams: streams of the run.
        sources: what is read of each source.
        intervals: shares over time.
        warnings: what may not be intended.
        packing: what packs there are, if the plan is one of packs.
    """

    path: str
    split_part: str
    unit: str
    steps_asked: int
    steps: int
    drawn_steps: int
    more_batches: int
    batch_size: int
    world_size: int
    num_streams: int
    sources: tuple[SourcePlan, ...]
    intervals: tuple[Interval, ...]
    warnings: tuple[str, ...]
    packing: PackPlan | None = None

    @property
    def samples(self) -> int | None:
        """Samples of all sources."""
        return _sum(source.samples for source in self.sources)

    @property
    def read_bytes(self) -> int | None:
        """Bytes read for all sources."""
        return _sum(source.read_bytes for source in self.sources)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON-serialisable values."""
        return {**dataclasses.asdict(self), "samples": self.samples, "read_bytes": self.read_bytes}


@dataclasses.dataclass(frozen=True)
class BalanceRow:
    """One way to make steps of the same samples.

    Attributes:
        name: which way.
        full: the share of tokens that is not padding.
        imbalance: the mean over steps of 1 - mean / max of the costs of the ranks' batches.
        idle: the share of all ranks' time in which they wait for the slowest rank.
        costs: of each step for each rank, shape (T, R); not in the JSON.
    """

    name: str
    full: float
    imbalance: float
    idle: float
    costs: Float64Array = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class BalanceReport:
    """How long ranks will wait for each other.

    Attributes:
        path: of the data.
        ranks: data-parallel ranks, one stream each.
        steps: steps that were looked at.
        samples: samples in them, packed in the order in which they come.
        capacity: tokens of a pack.
        overlong: how many of these are longer than a pack.
        skipped: samples of length 0 before the last of these; they are in no pack.
        rows: padded batches, and packs in several orders.
    """

    path: str
    ranks: int
    steps: int
    samples: int
    capacity: int
    overlong: int
    skipped: int
    rows: tuple[BalanceRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON-serialisable values."""
        rows = [{k: v for k, v in vars(row).items() if k != "costs"} for row in self.rows]
        return {**vars(self), "rows": rows}


# ----------------------------------------------------------------------------------- what is read


def plan(
    path: AnyPath,
    *,
    steps: int,
    batch_size: int = 1,
    split_part: str = "train",
    world_size: int = 1,
    num_streams: int | None = None,
    repeat: bool = True,
    trust: bool | None = None,
    seed_offset: int = 0,
    packing: Packing | None = None,
    **kwargs: Any,
) -> Plan:
    """Predicts a training run without reading; hooks that skip, expand or group are not predicted.

    Args:
        path: the folder, the YAML file of a metadataset, or what such a file holds as a dict.
        steps: of the run; in each, every rank takes one micro-batch.
        batch_size: samples of a micro-batch.
        split_part: which part of the folder, or split of the metadataset.
        world_size: data-parallel ranks.
        num_streams: of the run, by default `world_size`; counts depend on it by a few samples.
        repeat: as in `get_train_dataset`.
        trust: as in `get_train_dataset`.
        seed_offset: as in `WorkerConfig`; counts depend on it by a few samples.
        packing: how samples are packed, with a length index; `batch_size` then counts packs.
        kwargs: the further keyword arguments of `get_train_dataset` that decide the order.

    Raises:
        ValueError: An argument, or a file of the dataset, is wrong.
        FileNotFoundError: A folder is missing, or not prepared.
    """
    _refuse_zeros(steps=steps, batch_size=batch_size)
    config = WorkerConfig(
        rank=0, world_size=world_size, num_workers=0,
        num_streams=num_streams, seed_offset=seed_offset,
    )  # fmt: skip
    run = RunShape(steps, batch_size, world_size, config.default_num_streams)
    dataset = _opened(path, split_part, batch_size, repeat, config, {"trust": trust, **kwargs})
    if packing is None:
        forecast, pack_plan = _sample_forecast(dataset, run), None
    else:
        forecast, pack_plan = _pack_forecast(
            _planned(dataset, packing, seed_offset, batch_size), run
        )
    sources = tuple(_source_plans(dataset, forecast))
    return Plan(
        path=path_text(path),
        split_part=split_part,
        unit="tokens" if forecast.by_tokens else "samples",
        steps_asked=steps, steps=forecast.steps, drawn_steps=forecast.drawn_steps,
        more_batches=forecast.more_batches, batch_size=batch_size, world_size=world_size,
        num_streams=run.num_streams, sources=sources,
        intervals=tuple(_intervals(sources, forecast)),
        warnings=tuple(_warnings(sources, forecast, run, dataset.endless)),
        packing=pack_plan,
    )  # fmt: skip


def _refuse_zeros(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


class RunShape(NamedTuple):
    """How a run goes through its data: in each step every rank takes a batch of items."""

    steps: int
    batch_size: int
    world_size: int
    num_streams: int

    @property
    def step_items(self) -> int:
        """Items of a step."""
        return self.world_size * self.batch_size

    def streams(self) -> list[Stream]:
        """Lists the streams."""
        return [Stream(index, self.num_streams) for index in range(self.num_streams)]


@dataclasses.dataclass(frozen=True)
class _Forecast:
    """What a run will have: samples of each interval and source.

    Attributes:
        steps, drawn_steps, more_batches: as in `Plan`.
        targets: shape (K, N), by the weights. Of a blend by tokens, only the shares mean something.
        samples: shape (K, N); None where they are not known.
        tokens: shape (K, N), if they are known.
        by_tokens: whether shares are of tokens.
        drawn_items: samples, or packs, of the drawn steps.
        drawn_tokens: tokens in these.
    """

    steps: int
    drawn_steps: int
    targets: Float64Array
    by_tokens: bool
    samples: Float64Array | None = None
    tokens: Float64Array | None = None
    more_batches: int = 0
    drawn_items: int = 0
    drawn_tokens: int = 0

    @property
    def actual(self) -> Float64Array | None:
        """What actual shares are shares of; shape (K, N)."""
        return self.tokens if self.by_tokens else self.samples


def _opened(
    path: AnyPath,
    split_part: str,
    batch_size: int,
    repeat: bool,
    config: WorkerConfig,
    settings: dict[str, Any],
) -> AnyDataset:
    """Builds what `get_train_dataset` does, up to the hooks."""
    window = settings.pop("shuffle_buffer_size", None)
    multiplier = settings.pop("shuffle_over_epochs_multiplier", 1)
    slice_length = settings.pop("max_samples_per_sequence", None)
    opener = LeafOpener(
        node=open_node(path, split_part, settings),
        cook=lambda source, _: source,
        shuffle_buffer_size=window,
        block=batch_size,
        settings={"max_samples_per_sequence": slice_length, **settings},
        training=True,
        worker_config=config,
        multiplier=multiplier,
    )
    return build_training(opener, repeat)


def _planned(
    dataset: AnyDataset, packing: Packing, seed: int, packs_per_batch: int = 1
) -> PlannedPacks:
    if packing.lengths is None:
        raise ValueError("a plan of packs needs a length index; name it: Packing(lengths=...)")
    measured = MeasureDataset(dataset, UserFunction(_no_sample, name="sample_length"), packing)
    return PlannedPacks(measured, packing, seed, packs_per_batch)


def _no_sample(sample: Any) -> int:
    raise AssertionError(f"a forecast reads nothing, but there is {sample!r:.80}")


def _sample_forecast(dataset: AnyDataset, run: RunShape) -> _Forecast:
    names = [facts.name for facts in dataset.sources()]
    if dataset.traits.measures:
        ends = [edge * run.step_items for edge in interval_edges(run.steps)]
        return _Forecast(run.steps, 0, _targets(dataset, ends), by_tokens=True)
    lengths = dataset.lengths_by_source()
    by_tokens = set(names) <= set(lengths)
    order = PlannableDataset(dataset).order
    streams = [
        StreamDraws(order, stream, names, lengths if by_tokens else None)
        for stream in run.streams()
    ]
    return _drawn(dataset, dataset, run, streams, 1, by_tokens=by_tokens, has_tokens=by_tokens)


def _pack_forecast(packs: PlannedPacks, run: RunShape) -> tuple[_Forecast, PackPlan]:
    names = [facts.name for facts in packs.sources()]
    streams = [PackDraws(packs, stream, names) for stream in run.streams()]
    forecast = _drawn(
        packs.dataset, packs, run, streams, packs.samples_per_list,
        by_tokens=packs.traits.unit == "tokens", has_tokens=True,
    )  # fmt: skip
    room = forecast.drawn_items * packs.packing.tokens
    more_steps = forecast.steps - forecast.drawn_steps
    return forecast, PackPlan(
        capacity=packs.packing.tokens,
        lengths=str(packs.packing.lengths),
        packs=forecast.drawn_items + more_steps * run.step_items,
        fill=forecast.drawn_tokens / room if room else 1.0,
        dropped=sum(stream.num_dropped for stream in streams),
        packs_per_pass=None if packs.endless else sum(map(packs.num_items, run.streams())),
    )


def _drawn(
    dataset: AnyDataset,
    items: AnyDataset,
    run: RunShape,
    streams: Sequence[StreamDraws],
    samples_per_item: float,
    *,
    by_tokens: bool,
    has_tokens: bool,
) -> _Forecast:
    """Draws the items of a run up to `MAX_DRAWS` samples, and extrapolates the steps after these.

    Args:
        dataset: the samples, whose blends have the target shares.
        items: the samples, or packs of them.
        run: how it goes through the items.
        streams: of `items`.
        samples_per_item: about how many samples an item has.
        by_tokens: whether shares are of tokens.
        has_tokens: whether tokens are known.
    """
    most = max(1, int(MAX_DRAWS / samples_per_item) // run.step_items)
    steps_BS, drawn_steps, num_batches = _draw_steps(streams, run, min(run.steps, most))
    steps = drawn_steps
    if drawn_steps == most:
        steps = run.steps
        if not items.endless:
            steps = min(steps, sum(map(items.num_items, run.streams())) // run.step_items)
    edges = np.array(interval_edges(steps))
    samples = np.zeros((max(1, len(edges) - 1), len(dataset.sources())))
    tokens = np.zeros_like(samples)
    num_items = 0
    for stream in streams if drawn_steps else ():
        steps_P = steps_BS[np.arange(stream.num_items) // run.batch_size, stream.index]
        num_items += int(((steps_P >= 0) & (steps_P < drawn_steps)).sum())
        drawn = stream.draws()
        steps_D = steps_P[drawn.items]
        is_in = (steps_D >= 0) & (steps_D < drawn_steps)
        intervals = np.searchsorted(edges, steps_D[is_in], side="right") - 1
        cells = intervals * samples.shape[1] + drawn.sources[is_in]
        for table, column in ((samples, drawn.counts), (tokens, drawn.tokens)):
            table += np.bincount(cells, column[is_in], samples.size).reshape(samples.shape)
    drawn_tokens = int(tokens.sum())
    if steps > drawn_steps:
        more = _extrapolated(dataset, samples.sum(axis=0), drawn_steps, edges)
        per_sample = tokens.sum(axis=0) / np.maximum(samples.sum(axis=0), 1)
        samples += more
        tokens += more * per_sample
    ends = [0, *np.cumsum(samples.sum(axis=1)).astype(int).tolist()]
    return _Forecast(
        steps, drawn_steps, _targets(dataset, ends), by_tokens, samples,
        tokens if has_tokens else None,
        more_batches=num_batches - steps * run.world_size if steps < run.steps else 0,
        drawn_items=num_items, drawn_tokens=drawn_tokens,
    )  # fmt: skip


def _draw_steps(
    streams: Sequence[StreamDraws], run: RunShape, num_steps: int
) -> tuple[Int64Array, int, int]:
    """Draws what the first steps need.

    Returns:
        The step of each batch of each stream, or -1, shape (B, S); how many of the steps there are,
        each with a batch for every rank; and the number of batches.
    """
    num_batches = -(-num_steps * run.world_size // run.num_streams)
    while True:
        for stream in streams:
            stream.draw_up_to(num_batches * run.batch_size)
        batches_S = np.array([-(-stream.num_items // run.batch_size) for stream in streams])
        steps_BS = np.full((int(batches_S.max()), run.num_streams), -1)
        turns: Any = np.arange(-(-steps_BS.size // run.world_size))
        found = num_steps
        for rank in range(run.world_size):
            slots = RankSlots(0, rank, run.world_size, run.num_streams).slot(turns)
            batches, indices = np.divmod(slots, run.num_streams)
            # Ranks skip the slots of streams that have ended, each rank for itself.
            has_batch = batches < batches_S[indices]
            here = np.arange(has_batch.sum())
            steps_BS[batches[has_batch], indices[has_batch]] = here
            found = min(found, len(here))
        if found == num_steps or all(stream.has_ended for stream in streams):
            return steps_BS, found, int(batches_S.sum())
        num_batches *= 2


def _extrapolated(
    dataset: AnyDataset, samples_N: Float64Array, drawn_steps: int, edges_K: Int64Array
) -> Float64Array:
    """Returns the samples of the steps that were not drawn, shape (K, N).

    The target shares of that time count, and for each source how far the drawn samples are from
    their targets: of a blend by tokens, a source of long samples has fewer of them.
    """
    per_step = samples_N.sum() / drawn_steps
    more_K = np.diff(np.maximum(edges_K, drawn_steps)) * per_step
    ends = samples_N.sum() + np.cumsum([0.0, *more_K])
    targets_N = _targets(dataset, [0, ends[0]])[0]
    is_known = targets_N > 0
    scale_N = np.divide(samples_N, targets_N, out=np.ones_like(samples_N), where=is_known)
    shares_KN = _targets(dataset, ends.tolist()) * scale_N
    totals_K1 = shares_KN.sum(axis=1, keepdims=True)
    shares_KN = np.divide(shares_KN, totals_K1, out=shares_KN, where=totals_K1 > 0)
    extrapolated: Float64Array = shares_KN * more_K[:, None]
    return extrapolated


def _targets(dataset: AnyDataset, ends: Sequence[float]) -> Float64Array:
    """Returns the samples by the weights between two numbers of samples; (len(ends) - 1, N)."""
    names = [facts.name for facts in dataset.sources()]
    found = [dataset.expected(end) for end in ends]
    rows = np.array([[by_source.get(name, 0.0) for name in names] for by_source in found])
    targets: Float64Array = np.maximum(np.diff(rows, axis=0), 0.0)
    return targets


def interval_edges(steps: int) -> list[int]:
    """Cuts a run into intervals of equal length: the first step of each, and the end.

    Example:
        >>> interval_edges(20)
        [0, 3, 5, 8, 10, 13, 15, 18, 20]
    """
    number = min(steps, NUM_INTERVALS)
    # Rounded up, since step * number // steps is the interval of a step.
    return [-(-k * steps // number) for k in range(number + 1)] if number else [0]


def _source_plans(dataset: AnyDataset, forecast: _Forecast) -> Iterator[SourcePlan]:
    targets, actual = _shares(forecast.targets.sum(axis=0)), forecast.actual
    for number, source in enumerate(dataset.sources()):
        known: dict[str, Any] = {}
        if forecast.samples is not None and actual is not None:
            samples = round(float(forecast.samples[:, number].sum()))
            known = {
                "given_share": float(_shares(actual.sum(axis=0))[number]),
                "samples": samples,
                "epochs": samples / source.num_samples,
                "read_bytes": samples * source.num_bytes // source.num_samples,
            }
            if forecast.tokens is not None:
                known["tokens"] = round(float(forecast.tokens[:, number].sum()))
        yield SourcePlan(source.name, source.num_samples, float(targets[number]), **known)


def _intervals(sources: Sequence[SourcePlan], forecast: _Forecast) -> Iterator[Interval]:
    names = [source.name for source in sources]
    for k, (start, stop) in enumerate(pairwise(interval_edges(forecast.steps))):
        target, actual = (
            None if table is None else dict(zip(names, _shares(table[k]).tolist(), strict=True))
            for table in (forecast.targets, forecast.actual)
        )
        yield Interval(start, stop, target or {}, actual)


def _shares(counts: Float64Array) -> Float64Array:
    total = counts.sum()
    shares: Float64Array = counts / total if total else counts
    return shares


def _warnings(
    sources: tuple[SourcePlan, ...], forecast: _Forecast, run: RunShape, is_endless: bool
) -> Iterator[str]:
    if forecast.samples is None:
        yield (
            "a blend has `unit: tokens` and no index of lengths, so that its samples depend on "
            "what the run will measure: only the target shares are known. Name a stored index "
            "with `lengths` in the blend to plan samples"
        )
        if not is_endless:
            yield "the data are finite; when their pass ends is not known either"
    if forecast.steps < run.steps:
        more = f"; batches that only some ranks have then: {forecast.more_batches:,}"
        yield (
            f"the pass ends after {forecast.steps:,} of {run.steps:,} steps"
            f"{more if forecast.more_batches else ''}. Repeat the data, or plan fewer steps"
        )
    for source in sources:
        if source.epochs is not None and source.epochs > MANY_EPOCHS:
            yield (
                f"{source.name}: each of its {source.size:,} samples comes {source.epochs:,.1f} "
                "times. Give it less weight, or more data"
            )
        elif source.samples == 0:
            yield (
                f"{source.name}: none of its {source.size:,} samples comes. Give it more weight, "
                "or the run more steps"
            )


def _sum(numbers: Iterable[int | None]) -> int | None:
    found = list(numbers)
    return None if None in found else sum(number or 0 for number in found)


# ---------------------------------------------------------------------------------- idle time


def balance_report(
    path: AnyPath,
    *,
    lengths: str,
    capacity: int,
    ranks: int,
    steps: int = 512,
    split_part: str = "train",
    window: int = 64,
    buffer_size: int = 256,
    cost: CostModel = DEFAULT_COST,
    trust: bool | None = None,
    seed_offset: int = 0,
    **packing: Any,
) -> BalanceReport:
    """Predicts the packs of each rank, in the orders that `Packing(balance=...)` has.

    Args:
        path: a folder, a metadataset file, or what such a file holds as a dict.
        lengths: name of the length index; every dataset needs it.
        capacity: tokens of a pack.
        ranks: data-parallel ranks.
        steps: steps to look at, in each of which every rank takes a pack.
        split_part: which part of the folder, or split of the metadataset.
        window: `balance_window`, packs in a window of either order.
        buffer_size: samples that packs are chosen from.
        cost: what a pack costs.
        trust: whether code that the dataset names may be run.
        seed_offset: as in `WorkerConfig`.
        packing: further settings of `Packing`, such as `group_by`. Samples that are longer than a
            pack are truncated by default.

    Raises:
        FileNotFoundError: A folder, or its length index, is missing.
        ValueError: An argument, or a file of the dataset, is wrong; or it has no sample.
    """
    _refuse_zeros(capacity=capacity, ranks=ranks, steps=steps)
    if not any(dataclasses.astuple(cost)[:2]):
        raise ValueError("the cost of a token and that of a pair are both 0; give one above 0")
    config = WorkerConfig(
        rank=0, world_size=ranks, num_workers=0, num_streams=ranks, seed_offset=seed_offset
    )
    order = {"trust": trust, "shuffle_buffer_size": 1000}
    dataset = _opened(path, split_part, 1, True, config, order)
    rules = Packing(
        capacity, lengths=lengths, buffer_size=buffer_size, balance_window=window, cost=cost,
        **{"overlong": "truncate", **packing},
    )  # fmt: skip
    try:
        return _compared(path_text(path), dataset, rules, ranks, steps, seed_offset)
    except ValueError as error:
        raise ValueError(f"{path_text(path)}, length index {lengths!r}: {error}") from error


def _compared(
    path: str, dataset: AnyDataset, rules: Packing, ranks: int, steps: int, seed: int
) -> BalanceReport:
    orders: dict[str, Any] = {
        "packs, as they come": None,
        f"packs, quantile sync of {rules.balance_window}": "quantile_sync",
        f"packs, shared plan of {counted(rules.balance_window, 'step')}": "global_window",
    }
    found = {}
    for name, balance in orders.items():
        packs = _planned(dataset, dataclasses.replace(rules, balance=balance), seed)
        found[name] = _rank_packs(packs, steps, ranks)
    drawn, _, in_order = next(iter(found.values()))
    samples = int(drawn.counts.sum())
    padded = _padded(in_order, round(samples / (steps * ranks)), steps, rules.tokens, rules.cost)
    rows = [
        _balance_row(
            name, int(each.draws.tokens.sum()) / (steps * ranks * rules.tokens), each.costs
        )
        for name, each in found.items()
    ]
    return BalanceReport(
        path=path, ranks=ranks, steps=steps, samples=samples, capacity=rules.tokens,
        overlong=int((drawn.stored[drawn.counts > 0] > rules.tokens).sum()),
        skipped=sum(int((lengths_D == 0).sum()) for lengths_D in in_order),
        rows=(padded, *rows),
    )  # fmt: skip


class _RankPacks(NamedTuple):
    """The packs of all ranks.

    Attributes:
        draws: what is in them.
        costs: shape (T, R).
        in_order: for each rank the tokens of its samples in their order, up to the last in a pack.
    """

    draws: Draws
    costs: Float64Array
    in_order: list[Int64Array]


def _rank_packs(packs: PlannedPacks, steps: int, ranks: int) -> _RankPacks:
    if not any(packs.mean_tokens.values()):
        raise ValueError("all samples have length 0; measure them again")
    names = [facts.name for facts in packs.sources()]
    found, columns, in_order = [], [], []
    for stream in (Stream(rank, ranks) for rank in range(ranks)):
        own = PackDraws(packs, stream, names)
        own.draw_up_to(steps)
        if own.num_items < steps:
            raise ValueError(
                f"steps={steps}, but a pass of the data has {own.num_items} packs for a rank; look "
                "at fewer"
            )
        draws = own.draws()
        found.append(Draws(*(column[draws.items < steps] for column in draws)))
        columns.append(own.costs()[:steps])
        samples = StreamDraws(packs.plannable.order, stream, names, own.lengths)
        last = int(found[-1].positions.max())
        samples.draw_up_to(last + 1)
        in_order.append(samples.draws().stored[: last + 1])
    joined = Draws(*map(np.concatenate, zip(*found, strict=True)))
    return _RankPacks(joined, np.stack(columns, axis=1), in_order)


def _padded(
    in_order: Sequence[Int64Array], batch_size: int, steps: int, capacity: int, cost: CostModel
) -> BalanceRow:
    """Returns the row of batches that are padded to their longest sample."""
    batch_size = max(1, batch_size)
    used = size = 0
    columns = []
    for tokens in in_order:
        own = np.minimum(tokens[tokens > 0], capacity)
        batches = own[: len(own) // batch_size * batch_size].reshape(-1, batch_size)[:steps]
        longest = batches.max(axis=1)
        used += int(batches.sum())
        size += int(longest.sum()) * batch_size
        columns.append([cost.combine(batch_size * n, batch_size * n * n) for n in longest.tolist()])
    num_steps = min(map(len, columns))
    costs = np.array([column[:num_steps] for column in columns]).T
    return _balance_row(f"batches of {batch_size}, padded", used / size if size else 1.0, costs)


def _balance_row(name: str, full: float, costs: Float64Array) -> BalanceRow:
    # Rounding may leave a little less than nothing.
    return BalanceRow(name, full, max(0.0, imbalance(costs)), max(0.0, idle_share(costs)), costs)


def path_text(path: AnyPath) -> str:
    """Returns the path of data for people."""
    return "(a dict)" if isinstance(path, Mapping) else str(path)
