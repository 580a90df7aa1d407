"""The worker processes of a loader: torch's, started, ended and asked what became of them."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import DataLoader

from energon_lite.core.seeds import key_of
from energon_lite.core.topology import WorkerConfig
from energon_lite.loader.turns import Delivery, Turns


def as_delivered(delivery: Any) -> Any:
    """Collates nothing: torch's default would turn restore keys into lists."""
    return delivery


def torch_settings(
    num_workers: int, config: WorkerConfig, prefetch_factor: int, timeout_sec: float
) -> dict[str, Any]:
    """Returns the arguments of a `torch.utils.data.DataLoader` that runs worker processes.

    Args:
        num_workers: how many there are.
        config: start method.
        prefetch_factor: batches that each computes ahead.
        timeout_sec: longest wait for a batch; 0 for any.
    """
    if num_workers == 0:
        return {"num_workers": 0}
    return {
        "num_workers": num_workers,
        "prefetch_factor": prefetch_factor,
        "persistent_workers": True,
        "pin_memory": torch.cuda.is_available(),
        "multiprocessing_context": config.start_method,
        "timeout": timeout_sec,
    }


def worker_loader(
    turns: Turns, num_workers: int, config: WorkerConfig, prefetch_factor: int, timeout_sec: float
) -> DataLoader[Delivery]:
    """Makes torch's loader of deliveries; its processes live over all passes.

    Args:
        turns: what the workers compute.
        num_workers: how many there are, at least one.
        config: start method and seed.
        prefetch_factor: batches that each computes ahead.
        timeout_sec: longest wait for a batch; 0 for any.
    """
    generator = torch.Generator()  # its own: the user's global one is left alone
    generator.manual_seed(key_of("workers", config.seed_offset, config.rank) & (2**63 - 1))
    return DataLoader(
        turns,
        batch_size=None,
        collate_fn=as_delivered,
        generator=generator,
        **torch_settings(num_workers, config, prefetch_factor, timeout_sec),
    )


def end_workers(deliveries: Any, pid: int) -> None:
    """Ends worker processes; left to the garbage collector, torch may wait 5 s for each."""
    if os.getpid() == pid:  # not in a fork, which has a copy of the loader
        deliveries._shutdown_workers()


def dead_workers(deliveries: Any) -> str:
    """Names the worker processes that ended by themselves; empty if there are none."""
    workers = getattr(deliveries, "_workers", ())
    codes = [(w.pid, w.exitcode) for w in workers if w.exitcode not in (None, 0)]
    return ", ".join(
        f"{pid} ({f'signal {-code}' if code < 0 else f'exit code {code}'})" for pid, code in codes
    )
