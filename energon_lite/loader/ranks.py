"""States on their way between the ranks of a run, by `torch.distributed`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from energon_lite.core.topology import WorkerConfig


def gathered(state: Any, global_dst_rank: int, config: WorkerConfig) -> list[Any] | None:
    """Gathers what all ranks have on one; None on the others."""
    if config.world_size == 1 or not dist.is_initialized():
        return [state]
    is_target = config.global_rank() == global_dst_rank
    found: list[Any] | None = [None] * config.world_size if is_target else None
    dist.gather_object(state, found, global_dst_rank, group=config.data_parallel_group)
    return found


def handed_out(states: Any, src_rank: int, config: WorkerConfig) -> Any:
    """Gives to all ranks what `src_rank`, inside the data-parallel group, has."""
    if config.world_size == 1 or not dist.is_initialized():
        return states
    group = config.data_parallel_group
    source = dist.get_global_rank(group, src_rank) if group is not None else src_rank
    box: list[Any] = [states]
    dist.broadcast_object_list(box, source, group=group)
    return box[0]
