"""Runs a pipeline without a model: what its parts take, and how many workers would do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import torch

from energon_lite.core.errors import EmptyDatasetError
from energon_lite.core.samples import field_of
from energon_lite.core.topology import WorkerConfig, num_cores
from energon_lite.extras.report.advice import without_steps
from energon_lite.extras.report.hook_clock import DECODE, HookClock
from energon_lite.extras.report.run_report import Report, interval, made_report
from energon_lite.extras.report.stats_file import Counts, Record, read_stats, total
from energon_lite.extras.view.words import counted
from energon_lite.loader.loader import SavableDataLoader
from energon_lite.loader.workers.codec import packed_delivery, unpacked
from energon_lite.loader.workers.rank_feed import Delivery
from energon_lite.pipeline import get_train_dataset
from energon_lite.task_encoder.base import AnyTaskEncoder, checked_encoder

_NOTICED = 1.3  # times as long as alone
_PARTS = 1 / 3  # of the time: the parts are measured in this process, then workers run
_NUM_LINES = 30
_OF_BATCHES = {
    f"hook {name}"
    for name in ("postencode_sample", "pack_selected_samples", "batch", "encode_batch")
}

Progress = Callable[[str, int, int], None]


def dry_run(
    path: str | os.PathLike[str],
    encoder: AnyTaskEncoder | None = None,
    *,
    batch_size: int = 8,
    num_workers: int | None = None,
    seconds: float = 60.0,
    step_sec: float = 0.0,
    split_part: str = "train",
    trust: bool | None = None,
    progress: Progress | None = None,
) -> Report:
    """Reports what a training run on this machine would wait for, as one rank without a model.

    Args:
        path: a prepared folder, a file of samples or a metadataset.
        encoder: the task encoder; by default one that changes nothing.
        batch_size: samples, or packs, of a batch.
        num_workers: worker processes; by default 4, or the cores of this machine if it has fewer.
        seconds: how long it measures; starting takes time besides.
        step_sec: how long a training step takes; by default batches are taken as fast as they come.
        split_part: the split.
        trust: whether code that the dataset names may be run.
        progress: gets the name of a task, the seconds done, and all of them.

    Raises:
        ValueError: An argument or a file of the dataset is invalid.
        FileNotFoundError: The path does not exist.
    """
    if seconds <= 0 or step_sec < 0:
        raise ValueError(f"seconds={seconds} must be above 0, and step_sec={step_sec} not below")
    workers = min(4, num_cores()) if num_workers is None else num_workers

    def loader(encoder: AnyTaskEncoder, num_workers: int, log: Path) -> SavableDataLoader[Any]:
        config = WorkerConfig(
            rank=0, world_size=1, num_workers=num_workers, num_streams=max(1, workers)
        )
        dataset = get_train_dataset(
            path, split_part=split_part, batch_size=batch_size, worker_config=config,
            task_encoder=encoder, trust=trust,
        )  # fmt: skip
        return SavableDataLoader(dataset, max_skip_rate=1, skip_log=log)

    encoder, clock, show = checked_encoder(encoder), HookClock(), progress or (lambda *_: None)
    with TemporaryDirectory() as folder, ExitStack() as alone:
        alone.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # as in a worker
        with loader(clock.on(encoder), 0, Path(folder, "alone")) as own:
            parts, fill, alone_sec = _parts_of_a_batch(own, clock, seconds * _PARTS, show, workers)
        alone.close()
        file = Path(folder, "run")
        with loader(encoder, workers, file) as own:
            _run(own, file, seconds * (1 - _PARTS), step_sec, show)
        records, skips, _ = read_stats([file])
    return _dry_report(path, records, parts, alone_sec, step_sec, skips=skips, fill=fill)


def _dry_report(
    path: Any, records: Sequence[Record], parts: dict[str, float], alone_sec: float,
    step_sec: float, **more: Any,
) -> Report:  # fmt: skip
    run = interval(records[0], records[-1])
    number, slower = run.stop - run.start + 1, 1.0
    if run.counts["draws"]:
        slower = _sec_of_a_sample(run.counts) / alone_sec
    parts = {name: sec * slower for name, sec in parts.items()}
    steps, workers = f"{number:,} steps of {step_sec * 1000:g} ms", records[-1].num_workers or 0
    if not step_sec:
        steps = f"{number:,} steps that take no time"
        more["headline"] = without_steps(parts, workers, (run.sec or 0.0) / number)
    notes = [f"of one rank, on a machine of {counted(num_cores(), 'core')}"]
    if slower > _NOTICED:
        notes.append(
            f"{counted(workers, 'worker')} at once took {slower:.1f} times as long for the same "
            "work as this process alone: cores, memory or storage are short"
        )
    title, times = f"dry run of {path}, {steps}", {n: sec * number for n, sec in parts.items()}
    return made_report(title, records, times, warnings=notes, **more)


def _sec_of_a_sample(counts: Counts) -> float:
    """Returns the seconds of reading and of hooks for a sample that was drawn."""
    return max(1e-9, counts["read_sec"] + counts["encode_sec"]) / max(1, counts["draws"])


def _parts_of_a_batch(
    loader: Any, clock: HookClock, seconds: float, show: Progress, workers: int
) -> tuple[dict[str, float], float | None, float]:
    """Returns the seconds of each part of a batch, the fill, and those of a sample that was drawn.

    The first batch opens files, imports and compiles. It does not count, unless it filled a buffer
    from which the later ones are packed: then the work on samples is that of all batches.
    """
    batches = _batches_for(loader, seconds, 1, "Measuring the parts", show)
    next(batches)
    since = _spent(loader, clock)
    number, sent_sec, fills = 0, 0.0, []
    for batch in batches:
        number += 1
        fills += _fills_of(batch)
        sent_sec += _transport_sec(batch) if workers else 0.0
    whole = _spent(loader, clock)
    own = {name: sec - since.get(name, 0.0) for name, sec in whole.items()}
    by_sample = own if 2 * own["draws"] > whole["draws"] else whole
    each = own["samples"] / number / max(1, by_sample["draws"])
    hooks = [name for name, _ in clock.seconds.most_common() if name != DECODE]
    parts = {"read": (by_sample["read_sec"] - by_sample[DECODE]) * each}
    for name in (DECODE, *hooks):
        parts[name] = own[name] / number if name in _OF_BATCHES else by_sample[name] * each
    rest_sec = own["wait_sec"] - own["read_sec"] - sum(own[name] for name in hooks)
    parts["pack and batch"] = rest_sec / number
    if workers:
        parts["transport"] = sent_sec / number
    fill = sum(fills) / len(fills) if fills else None
    return {name: max(0.0, sec) for name, sec in parts.items()}, fill, _sec_of_a_sample(by_sample)


def _spent(loader: Any, clock: HookClock) -> dict[str, float]:
    """Returns the counts of the loader and the seconds of the clock up to here."""
    return {**total(map(vars, loader.stats().values())), DECODE: 0.0, **clock.seconds}


def _batches_for(
    loader: Any, seconds: float, num_first: int, what: str, show: Progress
) -> Iterator[Any]:
    """Yields batches, pass after pass, for some seconds after the first ones; at least one more."""
    began, number, before = 0.0, 0, -1
    while number > before:
        before = number
        for batch in loader:
            yield batch
            number += 1
            if number <= num_first:
                began = perf_counter()
                continue
            done = perf_counter() - began
            show(what, min(int(done), int(seconds)), int(seconds))
            if done >= seconds:
                return
    raise EmptyDatasetError("a pass has no batch: there are no samples, or all were skipped")


def _run(loader: Any, file: Path, seconds: float, step_sec: float, show: Progress) -> None:
    """Runs steps that only wait, and writes the counts now and then.

    Not before each worker had a batch to give: the first ones wait for its start.
    """
    workers = loader.worker_config.num_workers
    num_first, due = max(1, workers), 0.0
    batches = _batches_for(loader, seconds, num_first, f"Running with {workers} workers", show)
    for step, _ in enumerate(batches, start=1):
        sleep(step_sec)
        if step >= num_first and perf_counter() >= due:
            loader.stats().write_to(file, step)
            due = perf_counter() + seconds / _NUM_LINES
    loader.stats().write_to(file, step)


def _fills_of(batch: Any) -> list[float]:
    """Returns the part of the places of a batch that hold a token, by its mask."""
    masks = (field_of(batch, name) for name in ("segment_ids", "attention_mask"))
    return [float((m > 0).float().mean()) for m in masks if isinstance(m, torch.Tensor)][:1]


def _transport_sec(batch: Any) -> float:
    """Returns how long a batch takes to be pickled, copied to the other process and unpickled."""
    since = perf_counter()
    body, buffers = packed_delivery(Delivery(batch, 0, 0, None, [], []), "in a dry run")
    unpacked(b"".join(body), [bytearray(buffer) for buffer in buffers])
    return perf_counter() - since
