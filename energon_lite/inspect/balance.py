"""How long ranks wait for each other, foreseen from the lengths of all samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from energon_lite import packing as packers
from energon_lite.balance import CostModel, global_window, idle_share, imbalance, quantile_sync
from energon_lite.batching.lists import Lists
from energon_lite.core.arrays import Float64Array, Int64Array
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.inspect.plan_draws import StreamDraws
from energon_lite.metadataset.build import build_training
from energon_lite.metadataset.nodes import leaves
from energon_lite.metadataset.open import LeafOpener, open_node
from energon_lite.sources.order_only import order_only

# Linear work and attention cost the same for a sample of this many tokens; for most models it is
# some ten to forty thousand.
DEFAULT_COST = CostModel(token=1.0, token_squared=1 / 24_576)


@dataclasses.dataclass(frozen=True)
class BalanceRow:
    """One way to make steps of the same samples.

    Attributes:
        name: which way.
        full: the share of tokens that is no padding.
        imbalance: the mean over steps of 1 - mean / max of what the ranks' batches cost.
        idle: the share of all ranks' time in which they wait for the slowest.
        costs: what each step costs each rank, shape (steps, ranks); not in the JSON.
    """

    name: str
    full: float
    imbalance: float
    idle: float
    costs: Float64Array = dataclasses.field(repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as plain values."""
        return {name: value for name, value in vars(self).items() if name != "costs"}


@dataclasses.dataclass(frozen=True)
class BalanceReport:
    """What ranks would wait for each other.

    Attributes:
        path: of the data.
        ranks: data-parallel ranks, one stream each.
        steps: steps that were looked at.
        samples: samples in them.
        capacity: tokens of a pack.
        overlong: samples longer than a pack, counted as long as one.
        skipped: samples of length 0, which are in no pack.
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
        """Returns the report as plain values."""
        return {**vars(self), "rows": [row.to_json() for row in self.rows]}


def balance_report(
    path: str | PathLike[str] | Mapping[str, Any],
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
) -> BalanceReport:
    """Lists what each rank would draw, by a stored length index, and compares orders of the packs.

    Args:
        path: a folder, a metadataset file, or what such a file holds as a dict.
        lengths: name of the length index; every dataset needs it.
        capacity: tokens of a pack.
        ranks: data-parallel ranks.
        steps: steps to look at, in each of which every rank takes a pack.
        split_part: which part of the folder, or split of the metadataset.
        window: packs in a window of either order.
        buffer_size: samples that packs are chosen from.
        cost: what a pack costs.
        trust: whether code that the dataset names may be run.
        seed_offset: as in `WorkerConfig`.

    Raises:
        FileNotFoundError: A folder, or its length index, is missing.
        ValueError: An argument, or a file of the dataset, is wrong; or it has no sample.
    """
    for name, value in (("capacity", capacity), ("ranks", ranks), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not any(dataclasses.astuple(cost)[:2]):
        raise ValueError("the cost of a token and that of a pair are both 0; give one above 0")
    shown = "(a dict)" if isinstance(path, Mapping) else str(path)
    config = WorkerConfig(
        rank=0, world_size=ranks, num_workers=0, num_streams=ranks, seed_offset=seed_offset
    )
    dataset, by_source = _opened(path, split_part, lengths, config, trust)
    streams = [_Stream(dataset, index, by_source, config) for index in range(ranks)]
    try:
        packed = [stream.packed(steps, capacity, buffer_size) for stream in streams]
    except ValueError as error:
        raise ValueError(f"{shown}, length index {lengths!r}: {error}") from error
    return BalanceReport(
        path=shown,
        ranks=ranks,
        steps=steps,
        samples=sum(int(packs.offsets[steps]) for packs, _ in packed),
        capacity=capacity,
        overlong=sum(stream.overlong for stream in streams),
        skipped=sum(stream.skipped for stream in streams),
        rows=_rows(packed, steps, capacity, window, cost),
    )


def _rows(
    packed: list[tuple[Lists, Int64Array]], steps: int, capacity: int, window: int, cost: CostModel
) -> tuple[BalanceRow, ...]:
    num_packs = steps * len(packed)
    costs = np.stack([cost.costs(packs, tokens)[:steps] for packs, tokens in packed], axis=1)
    given = [tokens[packs.indices[: packs.offsets[steps]]] for packs, tokens in packed]
    full = sum(int(tokens.sum()) for tokens in given) / (num_packs * capacity)
    in_pack = max(1, round(sum(map(len, given)) / num_packs))
    orders = {
        f"batches of {in_pack}, padded": _padded(packed, in_pack, steps, cost),
        "packs, as they come": (full, costs),
        f"packs, quantile sync of {window}": (full, _synced(costs, window)),
        f"packs, shared plan of {window} step{'' if window == 1 else 's'}": (
            full,
            _planned(costs, window),
        ),
    }
    return tuple(
        # Rounding may leave a little less than nothing.
        BalanceRow(name, share, max(0.0, imbalance(table)), max(0.0, idle_share(table)), table)
        for name, (share, table) in orders.items()
    )


def _opened(
    path: Any, split_part: str, name: str, config: WorkerConfig, trust: bool | None
) -> tuple[SavableDataset[Any], list[Int64Array]]:
    """Returns the run over sources that read nothing, and the lengths of each source."""
    node = open_node(path, split_part, {"trust": trust})
    opener = LeafOpener(
        node=node,
        cook=order_only,
        shuffle_buffer_size=1000,
        settings={"trust": trust},
        training=True,
        worker_config=config,
    )
    dataset = build_training(opener, repeat=True)
    # The second use of source "a" has the id "a#2", and the same lengths.
    stored = {leaf.source_id: opener.lengths(leaf, name) for leaf in leaves(node)}
    names = [facts.name for facts in dataset.sources()]
    return dataset, [stored.get(n, stored.get(n.rpartition("#")[0])) for n in names]  # type: ignore[misc]


class _Stream:
    """The samples of one rank.

    Attributes:
        overlong: samples cut to a pack, of those in the packs that were asked for.
        skipped: samples of length 0 before the last of these.
    """

    def __init__(
        self, dataset: SavableDataset[Any], index: int, lengths: list[Int64Array], config: Any
    ) -> None:
        names = [facts.name for facts in dataset.sources()]
        stream = Stream(index, config.default_num_streams)
        self._draws = StreamDraws(dataset, stream, names, lengths)
        self.overlong = self.skipped = 0

    def packed(self, num_packs: int, capacity: int, buffer_size: int) -> tuple[Lists, Int64Array]:
        """Returns at least so many packs, and the tokens of the samples in them."""
        wanted = 2 * buffer_size
        while True:
            self._draws.draw_up_to(wanted)
            drawn = self._draws.tokens
            tokens = np.minimum(drawn[drawn > 0], capacity)
            if len(tokens):
                packs: Lists = packers.pack_stream(tokens, capacity, buffer_size=buffer_size)
                # The last ones are made of what is left in the buffer.
                if len(packs) >= num_packs + buffer_size or self._draws.has_ended:
                    break
            elif wanted > 1 << 20:
                raise ValueError("all samples have length 0; measure them anew")
            wanted *= 2
        if len(packs) < num_packs:
            raise ValueError(
                f"steps={num_packs}, but a pass of the data has {len(packs)} packs for a rank; "
                "look at fewer"
            )
        used = np.flatnonzero(drawn)[packs.indices[: packs.offsets[num_packs]]]
        self.overlong = int((drawn[used] > capacity).sum())
        self.skipped = int((drawn[: used.max() + 1] == 0).sum())
        return packs, tokens


def _padded(
    packed: list[tuple[Lists, Int64Array]], batch_size: int, steps: int, cost: CostModel
) -> tuple[float, Float64Array]:
    """Returns the share of tokens and the costs (steps, ranks) of batches padded to the longest."""
    used = size = 0
    columns = []
    for _, own in packed:
        batches = own[: len(own) // batch_size * batch_size].reshape(-1, batch_size)[:steps]
        longest = batches.max(axis=1)
        used += int(batches.sum())
        size += int(longest.sum()) * batch_size
        columns.append([cost.combine(batch_size * n, batch_size * n * n) for n in longest.tolist()])
    num_steps = min(map(len, columns))
    return used / size if size else 1.0, np.array([column[:num_steps] for column in columns]).T


def _synced(costs: Float64Array, window: int) -> Float64Array:
    """Returns the costs in the order in which each rank gives its packs by itself."""
    parts = []
    for number, start in enumerate(range(0, len(costs), window)):
        part = costs[start : start + window]
        orders = [quantile_sync(column, window, 0, number) for column in part.T]
        parts.append(np.take_along_axis(part, np.stack(orders, axis=1), axis=0))
    return np.concatenate(parts)


def _planned(costs: Float64Array, window: int) -> Float64Array:
    """Returns the costs of steps that all ranks plan together."""
    plan = global_window(costs.ravel(), costs.shape[1], window, seed=0)
    return plan.costs(costs.ravel())
