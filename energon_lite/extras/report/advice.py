"""Finds where the time of a run goes, and writes the line that names what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from energon_lite.extras.view.words import counted

_MARGIN = 1.15  # of workers above what the work needs: samples take unequal times
_MOST_WORKERS = 256  # that a rank may sensibly have
_LITTLE = 0.03  # a part of the time that is not worth a change
# What else helps, by the beginning of the name of a part.
_INSTEAD = {
    "read and decode": "`energon-lite bench` measures reading and decoding apart",
    "read": "or bring the data nearer: a local disk, fewer and larger shards",
    "decode": "or decode less: SampleDecoder(image_size=...), or smaller pictures in the tars",
    "hooks": "`energon-lite bench --with` measures each hook",
    "hook ": "or make the hook cheaper: store in the tars what does not change",
    "pack": "or a smaller buffer of samples to pack from",
    "transport": "or send less: uint8 pictures, no fields that are not used",
}
_MANY_SKIPS = 0.05  # of the samples drawn
# Draws of each stream by which a blend may be off; and the difference of a share that matters.
_ALLOWED_DRAWS, _NOTICED = 5, 0.02
_LEAST_GROWTH, _NOTICED_GROWTH = 2**27, 0.1  # bytes, and of the memory at half time
Times = Mapping[str, float]


def slowest(times: Times) -> tuple[str, float, float]:
    """Returns the part that takes longest, its share of the work, and the seconds of all parts."""
    name, work_sec = max(times, key=times.__getitem__), sum(times.values())
    return name, times[name] / work_sec if work_sec else 0.0, work_sec


def headline(
    times: Times, wait_sec: float, sec: float | None, num_ranks: int, num_workers: int | None
) -> str:
    """Returns the line that names the bottleneck and what to change.

    Args:
        times: of all ranks.
        wait_sec: that all training loops waited.
        sec: of the run; None if it is not known.
        num_ranks: training loops.
        num_workers: of each rank; None if it is not known.
    """
    most, part, work_sec = slowest(times)
    if sec is None:
        return (
            f"Waited {wait_sec:,.1f} s for batches; {part:.0%} of the loader's work: {most}; how "
            "long steps take is not known"
        )
    share = wait_sec / num_ranks / sec
    needed = max(1, math.ceil(_MARGIN * work_sec / max(num_ranks * sec - wait_sec, 1e-9)))
    workers = counted(needed, "worker")
    if share < _LITTLE:
        text = f"Waits for data {share:.1%} of the time: the training step is the limit"
        return text + f"; {workers} of {num_workers} would do" * (needed < (num_workers or 0))
    text = f"Waits for {most} {share:.0%} of the time ({part:.0%} of the loader's work)"
    if needed <= (num_workers or 0):
        return (
            f"{text}, though {workers} of {num_workers} should do: are there as many "
            "free cores? A higher prefetch_factor evens out single slow batches"
        )
    instead = next((text for name, text in _INSTEAD.items() if most.startswith(name)), "")
    if needed > _MOST_WORKERS:
        return f"{text}; steps are too short for any number of workers, {instead}"
    now = "" if num_workers is None else f" in place of {num_workers}"
    return f"{text}; {workers} would do{now}, {instead}"


def alerts(
    sources: Mapping[str, Mapping[str, Any]], unit: str, num_streams: int, memory: Sequence[float]
) -> Iterator[str]:
    """Yields what is wrong with the batches or the workers of a run, for its headline.

    Args:
        sources: the counts of each source, with its shares `asked` and `given`.
        unit: what shares are of, "samples" or "tokens".
        num_streams: of the run; 0 if it is not known.
        memory: bytes of all workers at each line of the file.
    """
    if not (rows := sources.values()):
        return
    draws, skipped = (sum(row[key] for row in rows) for key in ("draws", "skipped"))
    if skipped > _MANY_SKIPS * draws:
        most = max(sources, key=lambda name: float(sources[name]["skipped"]))
        yield (
            f"Skipped {skipped:,.0f} of {draws:,.0f} samples ({skipped / draws:.0%}), "
            f"{sources[most]['skipped']:,.0f} of them of {most}"
        )
    worst = max(sources, key=lambda name: abs(sources[name]["given"] - sources[name]["asked"]))
    asked, given = sources[worst]["asked"], sources[worst]["given"]
    amount, samples, ahead = (
        sum(row[key] for row in rows) for key in (unit, "samples", "read_ahead")
    )
    off, allowed = abs(given - asked), _ALLOWED_DRAWS * num_streams * amount / max(1, samples)
    if num_streams and off > _NOTICED and off * amount > allowed:
        text = f"; {ahead:,.0f} samples are read ahead into buffers" if ahead > 0 else ""
        yield f"The blend is off: {worst} has {given:.1%} of the {unit}, not {asked:.1%}{text}"
    half = memory[len(memory) // 2] if len(memory) > 3 else math.inf
    if memory and memory[-1] - half > max(_LEAST_GROWTH, _NOTICED_GROWTH * half):
        yield (
            f"The memory of the workers grows, in the second half from {half / 2**30:.2f} to "
            f"{memory[-1] / 2**30:.2f} GiB: does a hook keep what it made?"
        )


def without_steps(times: Times, num_workers: int, batch_sec: float) -> str:
    """Returns the line of a dry run whose steps take no time.

    Args:
        times: for a batch.
        num_workers: of the run.
        batch_sec: seconds between two of its batches.
    """
    most, part, work_sec = slowest(times)
    # Packs come in bursts, from a buffer that takes long to fill.
    least_ms = 1000 * max(batch_sec, work_sec / max(1, num_workers))
    return (
        f"{most.capitalize()} takes longest ({part:.0%} of the loader's work). With "
        f"{counted(num_workers, 'worker')}, steps of {least_ms:,.3g} ms or more do not wait"
    )
