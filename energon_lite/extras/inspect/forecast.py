"""Predicts what a training run will read of each source.

The datasets that `get_train_dataset` builds are run by their own cursors over the order of the
samples and their stored lengths; no sample is read. So a forecast is the run, not an estimate.

Axes: K intervals of the run, N sources, P packs, R ranks, S streams, T steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from energon_lite.batching.rules import Packing
from energon_lite.core.arguments import at_least
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.topology import ORDER_SETTINGS, Stream, WorkerConfig
from energon_lite.core.user_function import UserFunction
from energon_lite.extras.inspect.draws import RunShape, draw_packs, draw_run, draw_samples
from energon_lite.metadataset.build import build_training
from energon_lite.metadataset.open import LeafOpener, open_node
from energon_lite.stages.plan_order import order_of
from energon_lite.stages.planned_packs import PlannedPacks
from energon_lite.stages.token_lengths import MeasureDataset

AnyPath = str | PathLike[str] | Mapping[str, Any]
AnyDataset = SavableDataset[Any]
Progress = Callable[[str, int, int], None] | None

# Samples that are drawn one by one, and epochs of sources, which cost the most where sources are
# small; what a longer run has after these is extrapolated.
MAX_DRAWS, MAX_EPOCHS = 5_000_000, 20_000
NUM_INTERVALS = 8
# A source whose samples come more often gets a warning: from there on, repeated text adds little.
# Source: N. Muennighoff et al., "Scaling data-constrained language models", NeurIPS 2023.
MANY_EPOCHS = 4


@dataclasses.dataclass(frozen=True)
class SourcePlan:
    """The samples that a run will read of one source.

    Attributes:
        name: the source's id.
        size: samples of an epoch.
        target_share: target share: the part of all samples (or tokens) by the weights.
        actual_share: actual share; None where it depends on lengths that only the run will measure.
            So are the following.
        samples: samples of the source in the run.
        epochs: how often each of its samples comes, on average.
        tokens: tokens of the source in the run; also None where they are not counted.
        read_bytes: bytes read for it, at the mean size of its samples.
    """

    name: str
    size: int
    target_share: float
    actual_share: float | None = None
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
        target: target share by source.
        actual: actual share by source; None where it is not known.
    """

    start: int
    stop: int
    target: dict[str, float]
    actual: dict[str, float] | None


@dataclasses.dataclass(frozen=True)
class PackPlan:
    """The packs that a run will have.

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
    """All that a run will read.

    Attributes:
        path: what was planned.
        split_part: its split.
        unit: what shares are of, "samples" or "tokens".
        steps_requested: steps that were asked for.
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
        samples: samples of all sources; None where only target shares are known.
        read_bytes: bytes read for all sources.
    """

    path: str
    split_part: str
    unit: str
    steps_requested: int
    steps: int
    drawn_steps: int
    more_batches: int
    batch_size: int
    world_size: int
    num_streams: int
    sources: tuple[SourcePlan, ...]
    intervals: tuple[Interval, ...]
    warnings: tuple[str, ...]
    packing: PackPlan | None
    samples: int | None
    read_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON-serialisable values."""
        return dataclasses.asdict(self)


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
    packing: Packing | None = None,
    progress: Progress = None,
    **kwargs: Any,
) -> Plan:
    """Predicts a training run without reading; hooks that skip, expand or group are not predicted.

    Args:
        path: the folder, the YAML file of a metadataset, or what such a file holds as a dict.
        steps: of the run; in each, every rank takes one micro-batch.
        batch_size: samples of a micro-batch.
        split_part: which part of the folder, or split of the metadataset.
        world_size: data-parallel ranks.
        num_streams: by default `world_size`; counts depend on it by a few samples.
        repeat: as in `get_train_dataset`.
        trust: likewise.
        packing: how samples are packed, with a length index; `batch_size` then counts packs.
        progress: called with the step, and how many items are drawn, of how many.
        kwargs: others of `get_train_dataset` and `WorkerConfig` that decide the order.

    Raises:
        ValueError: An argument, or a file of the dataset, is wrong.
        FileNotFoundError: A folder is missing, or not prepared.
    """
    at_least("steps", steps), at_least("batch_size", batch_size)
    num_streams = world_size if num_streams is None else num_streams
    run = RunShape(steps, batch_size, world_size, num_streams)
    _check_size("a step", run.step_items)
    dataset = build_training(run_opener(path, split_part, run, trust=trust, **kwargs), repeat)
    packs = None if packing is None else _planned(dataset, packing, batch_size)
    forecast = _forecast(dataset, packs, run, progress)
    sources = tuple(_source_plans(dataset, forecast))
    return Plan(
        unit="tokens" if forecast.by_tokens else "samples",
        steps_requested=steps, steps=forecast.steps, drawn_steps=forecast.drawn_steps,
        more_batches=forecast.more_batches, batch_size=batch_size, world_size=world_size,
        num_streams=num_streams, sources=sources, intervals=tuple(_intervals(sources, forecast)),
        warnings=tuple(_warnings(sources, forecast, run, dataset.endless)),
        packing=forecast.packing, path=path_text(path), split_part=split_part,
        samples=_sum_of("samples", sources), read_bytes=_sum_of("read_bytes", sources),
    )  # fmt: skip


def _sum_of(name: str, sources: Sequence[SourcePlan]) -> int | None:
    """Adds up what is known of all sources; None where it is not known."""
    values = [getattr(source, name) for source in sources]
    return None if None in values else sum(values)


class _Forecast(NamedTuple):
    """The samples that a run will have of each source in each interval.

    Attributes:
        steps, drawn_steps, more_batches, packing: as in `Plan`.
        targets: shape (K, N), by the weights. Of a blend by tokens, only the shares mean something.
        by_tokens: whether shares are of tokens.
        samples: shape (K, N); None where they are not known.
        tokens: shape (K, N), if they are known.
    """

    steps: int
    drawn_steps: int
    targets: Float64Array
    by_tokens: bool
    samples: Float64Array | None = None
    tokens: Float64Array | None = None
    more_batches: int = 0
    packing: PackPlan | None = None

    @property
    def actual(self) -> Float64Array | None:
        """Returns what actual shares are shares of; shape (K, N)."""
        return self.tokens if self.by_tokens else self.samples


def run_opener(path: AnyPath, split_part: str, run: RunShape, **settings: Any) -> LeafOpener:
    """Returns what builds the datasets of a run as `get_train_dataset` does, up to the hooks.

    Args:
        path: as in `plan`.
        split_part: as in `plan`.
        run: its steps have no effect.
        settings: `decoder`, keyword arguments of `get_train_dataset`, and those of `WorkerConfig`
            that decide the order.
    """
    config = WorkerConfig(
        rank=0, world_size=run.world_size, num_workers=0, num_streams=run.num_streams,
        **{name: settings.pop(name) for name in ORDER_SETTINGS if name in settings},
    )  # fmt: skip
    return LeafOpener(
        shuffle_buffer_size=settings.pop("shuffle_buffer_size", None),
        multiplier=settings.pop("shuffle_over_epochs_multiplier", 1),
        decoder=settings.pop("decoder", None),
        node=open_node(path, split_part, settings), block=run.batch_size,
        settings={"max_samples_per_sequence": None, **settings}, training=True,
        worker_config=config,
    )  # fmt: skip


def _planned(dataset: AnyDataset, packing: Packing, packs_per_batch: int = 1) -> PlannedPacks:
    if packing.lengths is None:
        raise ValueError("a plan of packs needs a length index; name it: Packing(lengths=...)")
    measured = MeasureDataset(dataset, UserFunction(_no_sample, name="sample_length"), packing)
    return PlannedPacks(measured, packing, packs_per_batch)


def _no_sample(sample: Any) -> int:
    raise AssertionError(f"a forecast reads nothing, but there is {sample!r:.80}")


def _check_size(what: str, num_items: int) -> None:
    """Refuses to draw for hours, or more than the memory holds."""
    if num_items > MAX_DRAWS:
        raise ValueError(
            f"{what} has {num_items:,} samples, or packs, of all ranks; at most {MAX_DRAWS:,} "
            "are drawn. Give fewer steps, ranks, or samples in a batch"
        )


def _most_draws(dataset: AnyDataset) -> float:
    """Returns after how many samples a run is extrapolated."""
    expected = dataset.expected(MAX_DRAWS)
    epochs = sum(
        expected.get(facts.name, 0.0) / max(1, facts.num_samples) for facts in dataset.sources()
    )
    return MAX_DRAWS * min(1.0, MAX_EPOCHS / max(1.0, epochs))


def _forecast(
    dataset: AnyDataset, packs: PlannedPacks | None, run: RunShape, progress: Progress
) -> _Forecast:
    """Draws a run up to `MAX_DRAWS` samples, and extrapolates the steps after these."""
    if packs is None and dataset.traits.measures:
        ends = [edge * run.step_items for edge in interval_edges(run.steps)]
        return _Forecast(run.steps, 0, _targets(dataset, ends), by_tokens=True)
    names, lengths = [facts.name for facts in dataset.sources()], dataset.lengths_by_source()
    by_tokens = set(names) <= set(lengths)
    if packs is None:
        items, per_item = dataset, 1.0
        draw: Any = partial(draw_samples, order_of(dataset), lengths if by_tokens else {})
    else:
        items, per_item, draw = packs, packs.samples_per_list, partial(draw_packs, packs)
    most = max(1, int(_most_draws(dataset) / per_item) // run.step_items)
    drawn = draw_run(draw, run._replace(steps=min(run.steps, most)), progress)
    steps, per_pass = drawn.num_steps, None
    if not dataset.endless and (packs is not None or steps == most):
        streams = (Stream(index, run.num_streams) for index in range(run.num_streams))
        per_pass = sum(map(items.num_items, streams))
    if steps == most:
        steps = run.steps if per_pass is None else min(run.steps, per_pass // run.step_items)
    edges = np.array(interval_edges(steps))
    shape = (max(1, len(edges) - 1), len(names))
    cells = (np.searchsorted(edges, drawn.steps, side="right") - 1) * len(names)
    cells += drawn.draws.sources
    samples, tokens = (
        np.bincount(cells, column, shape[0] * shape[1]).astype(np.float64).reshape(shape)
        for column in (drawn.draws.counts, drawn.draws.tokens)
    )
    pack_plan = None
    if packs is not None:
        num_packs = len(np.unique(drawn.draws.items))
        pack_plan = PackPlan(
            capacity=packs.packing.tokens,
            lengths=packs.index,
            packs=num_packs + (steps - drawn.num_steps) * run.step_items,
            fill=float(tokens.sum()) / (num_packs * packs.packing.tokens) if num_packs else 1.0,
            dropped=drawn.num_dropped,
            packs_per_pass=per_pass,
        )
    if steps > drawn.num_steps:
        more = _extrapolated(dataset, samples.sum(axis=0), drawn.num_steps, edges)
        tokens = tokens + more * tokens.sum(axis=0) / np.maximum(samples.sum(axis=0), 1)
        samples = samples + more
    ends = [0, *np.cumsum(samples.sum(axis=1)).astype(int).tolist()]
    return _Forecast(
        steps, drawn.num_steps, _targets(dataset, ends), by_tokens, samples,
        None if packs is None and not by_tokens else tokens,
        more_batches=drawn.num_batches - steps * run.world_size if steps < run.steps else 0,
        packing=pack_plan,
    )  # fmt: skip


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
    more_KN: Float64Array = np.array([_shares(row) for row in shares_KN]) * more_K[:, None]
    return more_KN


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
                "actual_share": float(_shares(actual.sum(axis=0))[number]),
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
    shares: Float64Array = counts / (counts.sum() or 1)
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


def path_text(path: AnyPath) -> str:
    """Returns the path of data for people."""
    return "(a dict)" if isinstance(path, Mapping) else str(path)
