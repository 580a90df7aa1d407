"""Warns of a pass without a batch."""

from __future__ import annotations

import logging
from typing import Any

from energon_lite.core.topology import Stream, WorkerConfig

logger = logging.getLogger(__name__)


def warn_of_empty_pass(
    dataset: Any, config: WorkerConfig, num_streams: int, pass_index: int, end: str
) -> None:
    """Logs why a rank has no batch; where all ranks end together, on the first.

    Args:
        dataset: the pipeline.
        config: the position of the rank.
        num_streams: streams of the run.
        pass_index: number of the pass.
        end: how ranks end it.
    """
    if end != "uneven" and config.rank:
        return
    streams = (Stream(index, num_streams, pass_index) for index in range(num_streams))
    settings = dataset.config()
    while isinstance(settings, dict) and "batch_size" not in settings:
        settings = settings.get("of")
    logger.warning(
        "Rank %d has no batch in this pass: %d samples, batch_size=%s, %d ranks, %d streams, "
        "end=%r. A batch is of one stream. Use a smaller batch_size, fewer streams (num_streams), "
        "batch_drop_last=False or end='pad'. Or all samples were skipped.",
        config.rank, sum(map(dataset.num_samples, streams)),
        settings["batch_size"] if isinstance(settings, dict) else None,
        config.world_size, num_streams, end,
    )  # fmt: skip
