"""Where the time of a run goes, and the line that says what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MARGIN = 1.15  # of workers above what the work needs: samples take unequal times
_LITTLE = 0.03  # a part of the time that is not worth a change

# What else helps, by the beginning of a row's name.
_INSTEAD = {
    "read and decode": "`energon-lite bench` tells reading from decoding",
    "read": "or bring the data nearer: a local disk, fewer and larger shards",
    "decode": "or decode less: SampleDecoder(image_size=...), or smaller pictures in the tars",
    "hooks": "`energon-lite bench --with` tells which hook",
    "hook ": "or make the hook cheaper: store in the tars what does not change",
    "pack": "or a smaller buffer of samples to pack from",
    "transport": "or send less: uint8 pictures, no fields that are not used",
}


@dataclass(frozen=True)
class TimeRow:
    """Seconds that a part of the work took, of all workers together; None if not measured."""

    name: str
    sec: float | None


def timed_together(counts: Mapping[str, float]) -> list[TimeRow]:
    """Returns the times that a run itself counts."""
    return [
        TimeRow("read and decode", counts["read_sec"]),
        TimeRow("hooks", counts["encode_sec"]),
        *(TimeRow(name, None) for name in ("each hook", "pack and batch", "transport")),
    ]


def slowest(times: Sequence[TimeRow]) -> tuple[TimeRow, float]:
    """Returns the row that takes longest, and its part of the work."""
    work = sum(row.sec or 0.0 for row in times)
    most = max(times, key=lambda row: row.sec or 0.0)
    return most, (most.sec or 0.0) / work if work else 0.0


def needed_workers(work_sec: float, busy_sec: float) -> int:
    """Returns the workers of a rank that do some work while its training loop is busy."""
    return max(1, math.ceil(MARGIN * work_sec / max(busy_sec, 1e-9)))


def headline(
    times: Sequence[TimeRow],
    wait_sec: float,
    sec: float | None,
    num_ranks: int,
    num_workers: int | None,
    num_cores: int | None = None,
) -> str:
    """Returns the line that names the bottleneck and what to change.

    Args:
        times: of all ranks.
        wait_sec: that all training loops waited.
        sec: of the run; None if it is not known.
        num_ranks: training loops.
        num_workers: of each rank; None if it is not known.
        num_cores: that a rank has; None if it is not known.
    """
    most, part = slowest(times)
    instead = next((text for name, text in _INSTEAD.items() if most.name.startswith(name)), "")
    biggest = f"{most.name} is {part:.0%} of the loader's work"
    if sec is None:
        return (
            f"Waited {wait_sec:,.1f} s for batches, and {biggest}; how long steps take is not known"
        )
    work_sec = sum(row.sec or 0.0 for row in times)
    busy_sec = num_ranks * sec - wait_sec
    share, needed = wait_sec / num_ranks / sec, needed_workers(work_sec, busy_sec)
    workers = f"{needed} worker{'s' if needed > 1 else ''}"
    if share < _LITTLE:
        text = f"Waits for data {share:.1%} of the time: the training step is the limit"
        is_less = num_workers is not None and needed < num_workers
        return f"{text}; {workers} of {num_workers} would do" if is_less else text
    text = f"Waits for {most.name} {share:.0%} of the time ({biggest})"
    if num_workers is not None and needed <= num_workers:
        return (
            f"{text}, though {workers} would do and there are {num_workers}: are there as many "
            "free cores? A higher prefetch_factor evens out single slow batches"
        )
    now = "" if num_workers is None else f" in place of {num_workers}"
    if num_cores is not None and needed > num_cores:
        now += f", on as many cores (there are {num_cores})"
    return f"{text}; {workers} would do{now}, {instead}"


def without_steps(parts: Mapping[str, float], num_workers: int, batch_sec: float) -> str:
    """Returns the line of a dry run whose steps take no time.

    Args:
        parts: seconds that each part takes for a batch.
        num_workers: of the run.
        batch_sec: seconds between two of its batches.
    """
    most, part = slowest([TimeRow(name, sec) for name, sec in parts.items()])
    # Packs come in bursts, from a buffer that takes long to fill.
    batch_sec = max(batch_sec, sum(parts.values()) / max(1, num_workers))
    makers = f"{num_workers or 'no'} worker{'' if num_workers == 1 else 's'}"
    return (
        f"{most.name.capitalize()} takes longest ({part:.0%} of the loader's work). With {makers}, "
        f"training steps of {batch_sec * 1000:,.3g} ms or more do not wait"
    )
