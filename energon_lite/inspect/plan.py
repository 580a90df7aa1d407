"""What a training run will give, before it is run: samples, epochs and bytes of each source.

The very tree of datasets that `get_train_dataset` builds is run, by the same cursors, over sources
that know their order and read nothing. So a plan is not an estimate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from os import PathLike
from typing import Any

from energon_lite.batching.rules import Packing
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import SavableDataset, SourceFacts
from energon_lite.core.topology import WorkerConfig
from energon_lite.core.user_function import UserFunction
from energon_lite.inspect.plan_draws import (
    Foreseen,
    Run,
    asked_shares,
    exact_draws,
    expected_draws,
    stretch_edges,
)
from energon_lite.inspect.plan_packs import PackPlan, exact_packs
from energon_lite.metadataset.build import build_training
from energon_lite.metadataset.open import Cook, LeafOpener, open_node
from energon_lite.sources.order_only import order_only
from energon_lite.stages.blend import TokenBlendDataset
from energon_lite.stages.measuring import MeasureDataset
from energon_lite.stages.packing.planned import PlannedPacks

# Longer runs are not drawn sample by sample, but worked out from the weights.
MAX_DRAWS = 5_000_000
# A source that is seen more often gets a warning: from there on, repeated text adds little.
# Source: N. Muennighoff et al., "Scaling data-constrained language models", NeurIPS 2023.
MANY_EPOCHS = 4


@dataclasses.dataclass(frozen=True)
class SourcePlan:
    """What one source will give.

    Attributes:
        name: the source's id.
        size: samples of an epoch.
        asked_share: the part of all samples (or tokens) that the weights ask of it.
        given_share: the part that it gives; None where that cannot be foreseen.
        samples: samples that it gives; None likewise.
        epochs: how often each of its samples comes, in the mean; None likewise.
        tokens: tokens that it gives; None where no blend counts them.
        read_bytes: bytes read for it, at the mean size of its samples; None likewise.
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
class Stretch:
    """Shares in a part of the run.

    Attributes:
        start: its first step.
        stop: the step after its last one.
        asked: share by source, as the weights ask for it.
        given: share by source; None where that cannot be foreseen.
    """

    start: int
    stop: int
    asked: dict[str, float]
    given: dict[str, float] | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will give.

    Attributes:
        path: what was planned.
        split_part: its split.
        kind: "exact", each draw was worked out; "expected", the run is so long that the weights
            were added up; "shares", samples depend on lengths that only the run will know.
        unit: what shares are of, "samples" or "tokens".
        steps_asked: steps as asked for.
        steps: steps that there are; fewer where the data end.
        more_batches: batches that some ranks still have after the last step of all.
        batch_size: samples of a micro-batch.
        world_size: ranks.
        num_streams: streams of the run.
        sources: what each source gives.
        stretches: shares over time.
        warnings: what one may not want.
        packing: what packs there are, if it was planned with packs.
    """

    path: str
    split_part: str
    kind: str
    unit: str
    steps_asked: int
    steps: int
    more_batches: int
    batch_size: int
    world_size: int
    num_streams: int
    sources: tuple[SourcePlan, ...]
    stretches: tuple[Stretch, ...]
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
        """Returns the plan as plain values."""
        return {**dataclasses.asdict(self), "samples": self.samples, "read_bytes": self.read_bytes}


def plan(
    path: str | PathLike[str] | Mapping[str, Any],
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
    """Foresees a training run without reading: not what hooks leave out, multiply or group.

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
        ValueError: An argument, or a file of the dataset, is wrong; or the run is too long.
        FileNotFoundError: A folder is missing, or not prepared.
    """
    config = WorkerConfig(
        rank=0, world_size=world_size, num_workers=0,
        num_streams=num_streams, seed_offset=seed_offset,
    )  # fmt: skip
    run = Run(steps, batch_size, world_size, config.default_num_streams)
    settings, cook = {"trust": trust, **kwargs}, order_only if packing is None else _as_it_is
    dataset = _opened(path, split_part, batch_size, repeat, config, settings, cook)
    lengths = _lengths(dataset)
    foreseen, packs = (
        (_foreseen(dataset, run, lengths), None)
        if packing is None
        else _foreseen_packs(dataset, run, packing, seed_offset)
    )
    sources = tuple(_source_plans(dataset.sources(), foreseen))
    return Plan(
        path="(a dict)" if isinstance(path, Mapping) else str(path),
        split_part=split_part,
        kind=foreseen.kind,
        unit="tokens" if lengths is None or foreseen.by_tokens else "samples",
        steps_asked=steps, steps=foreseen.steps, more_batches=foreseen.more_batches,
        batch_size=batch_size, world_size=world_size, num_streams=run.num_streams,
        sources=sources,
        stretches=tuple(_stretches([source.name for source in sources], foreseen)),
        warnings=tuple(_warnings(sources, foreseen, run, dataset.endless)),
        packing=packs,
    )  # fmt: skip


def _opened(
    path: str | PathLike[str] | Mapping[str, Any],
    split_part: str,
    batch_size: int,
    repeat: bool,
    config: WorkerConfig,
    settings: dict[str, Any],
    cook: Cook = order_only,
) -> SavableDataset[Any]:
    """Builds what `get_train_dataset` does, up to the hooks, of what `cook` makes of sources."""
    window = settings.pop("shuffle_buffer_size", None)
    multiplier = settings.pop("shuffle_over_epochs_multiplier", 1)
    slice_length = settings.pop("max_samples_per_sequence", None)
    opener = LeafOpener(
        node=open_node(path, split_part, settings),
        cook=cook,
        shuffle_buffer_size=window,
        block=batch_size,
        settings={"max_samples_per_sequence": slice_length, **settings},
        training=True,
        worker_config=config,
        multiplier=multiplier,
    )
    return build_training(opener, repeat)


def _as_it_is(source: SavableDataset[Any], _factory: object) -> SavableDataset[Any]:
    return source


def _tokens(sample: Any) -> int:
    raise AssertionError(f"a plan reads nothing, but there is {sample!r:.80}")


def _foreseen_packs(
    dataset: SavableDataset[Any], run: Run, packing: Packing, seed: int
) -> tuple[Foreseen, PackPlan]:
    if packing.lengths is None:
        raise ValueError("a plan of packs needs a length index; name it: Packing(lengths=...)")
    measured = MeasureDataset(dataset, UserFunction(_tokens, name="sample_length"), packing)
    packs = PlannedPacks(measured, packing, seed)
    num_samples = run.steps * run.step_samples * packs.samples_per_list
    if packs.endless and num_samples > MAX_DRAWS:
        most = int(MAX_DRAWS / packs.samples_per_list) // run.step_samples
        raise ValueError(
            f"steps={run.steps:,} are about {num_samples:,.0f} samples in packs, each of which "
            f"must be planned to know the next; plan at most {most:,} steps (the fill settles "
            "long before)"
        )
    return exact_packs(packs, run)


def _lengths(dataset: SavableDataset[Any]) -> dict[str, Int64Array] | None:
    """Returns the stored lengths by source; None if a blend by tokens has none."""
    found: dict[str, Int64Array] = {}
    if isinstance(dataset, TokenBlendDataset):
        if dataset.lengths is None:
            return None
        # A folder that is used twice has one index.
        found.update(dataset.lengths_by_source())
    for child in dataset.children:
        below = _lengths(child)
        if below is None:
            return None
        found.update(below)
    return found


def _foreseen(
    dataset: SavableDataset[Any], run: Run, lengths: Mapping[str, Int64Array] | None
) -> Foreseen:
    """Chooses how far the run can be foreseen."""
    if lengths is None:
        return asked_shares(dataset, run)
    num_draws = run.num_draws(dataset)
    if num_draws <= MAX_DRAWS:
        return exact_draws(dataset, run, lengths)
    if lengths:
        raise ValueError(
            f"steps={run.steps:,} are {num_draws:,} samples of a blend by tokens, each of which "
            f"must be drawn to know the next; plan at most {MAX_DRAWS // run.step_samples:,} steps "
            "(shares settle long before)"
        )
    return expected_draws(dataset, run)


# ------------------------------------------------------------------------------------- the report


def _source_plans(facts: list[SourceFacts], foreseen: Foreseen) -> Iterator[SourcePlan]:
    asked, given = _shares(foreseen.asked.sum(axis=0)), None
    if foreseen.given is not None:
        given = _shares(foreseen.given.sum(axis=0))
    for number, source in enumerate(facts):
        plan_of = SourcePlan(source.name, source.num_samples, float(asked[number]))
        if foreseen.samples is None or given is None:
            yield plan_of
            continue
        samples = round(float(foreseen.samples[:, number].sum()))
        yield dataclasses.replace(
            plan_of,
            given_share=float(given[number]),
            samples=samples,
            epochs=samples / source.num_samples,
            tokens=None if foreseen.tokens is None else int(foreseen.tokens[:, number].sum()),
            read_bytes=samples * source.num_bytes // source.num_samples,
        )


def _stretches(names: list[str], foreseen: Foreseen) -> Iterator[Stretch]:
    edges = stretch_edges(foreseen.steps)
    for k, (start, stop) in enumerate(pairwise(edges)):
        given = None if foreseen.given is None else foreseen.given[k]
        yield Stretch(
            start,
            stop,
            dict(zip(names, _shares(foreseen.asked[k]).tolist(), strict=True)),
            None if given is None else dict(zip(names, _shares(given).tolist(), strict=True)),
        )


def _shares(counts: Float64Array) -> Float64Array:
    total = counts.sum()
    shares: Float64Array = counts / total if total else counts
    return shares


def _warnings(
    sources: tuple[SourcePlan, ...], foreseen: Foreseen, run: Run, is_endless: bool
) -> Iterator[str]:
    if foreseen.samples is None:
        yield (
            "a blend has `unit: tokens` and no index of lengths, so that its samples depend on "
            "what the run will measure: only the shares asked for are known. Name a stored index "
            "with `lengths` in the blend to plan samples"
        )
        if not is_endless:
            yield "the data are finite; when their pass ends is not known either"
    if foreseen.steps < run.steps:
        more = f"; batches that only some ranks have then: {foreseen.more_batches:,}"
        yield (
            f"the pass ends after {foreseen.steps:,} of {run.steps:,} steps"
            f"{more if foreseen.more_batches else ''}. Repeat the data, or plan fewer steps"
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
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total
