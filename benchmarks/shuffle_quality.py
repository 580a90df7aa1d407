"""How well node groups shuffle: `python -m benchmarks.shuffle_quality [samples]`; nothing is read.

A data set in shards of 1,000 samples, 8 machines with 8 streams each, global batches of 256: in the
plain order, with `node_groups=8`, and as MosaicML's documentation describes its algorithms with 8
canonical nodes: shards are dealt to nodes once; in each epoch a node's shards are shuffled, and
the samples within a shard (`py1s`), or they move by up to half of a block as well (`py1e`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.topology import NO_GROUPS, NodeGroups, Stream
from energon_lite.order.source_order import SourceOrder

SHARD, NODES, STREAMS, BATCH, EPOCHS = 1000, 8, 64, 4, 4


def ours(num_samples: int, nodes: NodeGroups, window: int) -> Iterator[Int64Array]:
    """Yields each epoch: global batches, (B, 256), the samples of a machine side by side."""
    order = SourceOrder(
        "s", num_samples, 0, endless=True, max_slice=SHARD, interleave=16, window=window,
        nodes=nodes,
    )  # fmt: skip
    own = num_samples // STREAMS
    streams = [order.stream(Stream(index, STREAMS)) for index in range(STREAMS)]
    for epoch in range(EPOCHS):
        columns = [stream.block(epoch * own, own)[1] for stream in streams]
        yield batches(np.array(columns).reshape(NODES, -1, own))


def batches(samples: Int64Array) -> Int64Array:
    """Returns global batches of the samples of machines and their streams, (8, S / 8, n)."""
    num = samples.shape[2] // BATCH
    found = samples[:, :, : num * BATCH].reshape(*samples.shape[:2], num, BATCH)
    return found.transpose(2, 0, 1, 3).reshape(num, -1)


def canonical(num_samples: int, block: int) -> Iterator[Int64Array]:
    """Yields epochs of canonical nodes; with a block of 0 samples stay in their shards' runs."""
    rng, own = np.random.default_rng(0), num_samples // NODES
    shards = rng.permutation(num_samples // SHARD)
    line = (shards[:, None] * SHARD + np.arange(SHARD)).reshape(NODES, -1, SHARD)
    for _ in range(EPOCHS):
        nodes = []
        for parts in line:
            run = np.concatenate([rng.permutation(part) for part in rng.permutation(parts)])
            if block:
                run = run[np.argsort(np.arange(own) + rng.uniform(-block / 2, block / 2, own))]
            nodes.append(run[: own // 32 * 32].reshape(-1, 8, BATCH).transpose(1, 0, 2))
        yield batches(np.array(nodes).reshape(NODES, 8, -1))


def figures(epochs: list[Int64Array], num_samples: int) -> list[float]:
    """Measures epochs; each figure is 1 where samples are drawn completely at random.

    Returns:
        Chi-square of the shards in a global batch over its degrees of freedom; pairs of one shard
        in a global batch, and in the batch of a machine, over those expected; and pairs of samples
        in one global batch that share one in the next epoch again, over those expected.
    """
    chi, pairs, again = [], [[], []], []
    num_shards = num_samples // SHARD
    for before, now in pairwise(epochs):
        size = now.shape[1]
        expected = size / num_shards
        for batch in now[:: max(1, len(now) // 200)]:
            counts = np.bincount(batch // SHARD, minlength=num_shards)
            chi.append(((counts - expected) ** 2 / expected).sum() / (num_shards - 1))
            for found, part in zip(pairs, (batch, batch[: size // NODES]), strict=True):
                counts = np.bincount(part // SHARD)
                share = (counts * (counts - 1)).sum() / (len(part) * (len(part) - 1))
                found.append(share * (num_samples - 1) / (SHARD - 1))
        place = np.full(num_samples, -1)
        place[before] = np.arange(len(before))[:, None]
        for batch in now:
            old = place[batch]
            counts = np.unique(old[old >= 0], return_counts=True)[1]
            again.append((counts * (counts - 1)).sum() / (size * (size - 1) / len(now)))
    return [float(np.mean(found)) for found in (chi, *pairs, again)]


def main(num_samples: int) -> None:
    """Prints a line for each order."""
    groups = NodeGroups(NODES, 1)
    orders = {
        "plain, window 1,000": ours(num_samples, NO_GROUPS, 1000),
        "plain, window 10,000": ours(num_samples, NO_GROUPS, 10_000),
        "node_groups=8, window 1,000": ours(num_samples, groups, 1000),
        "node_groups=8, window 10,000": ours(num_samples, groups, 10_000),
        "canonical nodes, py1s": canonical(num_samples, 0),
        "canonical nodes, py1e, blocks of 16,000": canonical(num_samples, 16_000),
        "canonical nodes, py1e, blocks of 262,144": canonical(num_samples, 1 << 18),
    }
    print(f"{'':42}chi2/dof  pairs of a shard: batch, machine  pairs again")
    for name, epochs in orders.items():
        print(f"{name:42}", *(f"{value:10.3f}" for value in figures([*epochs], num_samples)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512_000)
