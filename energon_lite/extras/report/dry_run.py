"""Runs a pipeline without a model: what its parts take, and how many workers would do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import torch

from energon_lite.core.errors import EmptyDatasetError
from energon_lite.core.samples import field_of
from energon_lite.core.topology import WorkerConfig, num_cores
from energon_lite.extras.report.advice import MARGIN, without_steps
from energon_lite.extras.report.hook_clock import HookClock
from energon_lite.extras.report.run_report import Report, made_report
from energon_lite.extras.report.stats_file import Record, read_stats, total
from energon_lite.extras.view.words import counted
from energon_lite.loader.loader import SavableDataLoader
from energon_lite.loader.workers.codec import packed_delivery, unpacked
from energon_lite.loader.workers.rank_feed import Delivery
from energon_lite.pipeline import get_train_dataset
from energon_lite.storage import files
from energon_lite.task_encoder.base import AnyTaskEncoder, checked_encoder

_NOTICED = 1.3  # times as long as alone
_PARTS = 1 / 3  # of the time: the parts are measured in this process, then workers run
_NUM_LINES = 30
_OF_BATCHES = {
    f"hook {name}"
    for name in ("postencode_sample", "pack_selected_samples", "batch", "encode_batch")
}
_NUMBERS_OF_WORKERS = (1, 2, 4, 8, 16)

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

    def loader(
        encoder: AnyTaskEncoder, num_workers: int, log: Path | None = None
    ) -> SavableDataLoader[Any]:
        streams = max(1, workers)
        config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, num_streams=streams)
        dataset = get_train_dataset(
            path, split_part=split_part, batch_size=batch_size, worker_config=config,
            task_encoder=encoder, trust=trust,
        )  # fmt: skip
        return SavableDataLoader(dataset, max_skip_rate=1, skip_log=log)

    encoder, clock, show = checked_encoder(encoder), HookClock(), progress or (lambda *_: None)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # as in a worker
        own = stack.enter_context(loader(clock.on(encoder), 0))
        parts, fill, alone_sec = _parts_of_a_batch(
            own, clock, seconds * _PARTS, show, sends=workers > 0
        )
    with TemporaryDirectory() as folder:
        stats, log = Path(folder, "stats"), Path(folder, "skips")
        with loader(encoder, workers, log) as own:
            _run(own, stats, seconds * (1 - _PARTS), step_sec, show)
        records, skips, _ = read_stats([stats, log] if files.is_file(log) else [stats])
    slower = _sec_of_a_sample(records[0], records[-1], alone_sec) / alone_sec
    parts = {name: sec * slower for name, sec in parts.items()}
    return _dry_report(os.fspath(path), records, parts, slower, step_sec, skips=skips, fill=fill)


def _dry_report(
    path: str, records: list[Record], parts: dict[str, float], slower: float, step_sec: float,
    **more: Any,
) -> Report:  # fmt: skip
    first, last, workers = records[0], records[-1], records[-1].num_workers or 0
    number = max(1, last.step - first.step)
    steps = f"{number:,} steps that take no time"
    if step_sec:
        steps = f"{number:,} steps of {step_sec * 1000:g} ms"
    else:
        batch_sec = ((last.time or 0.0) - (first.time or 0.0)) / number
        more["headline"] = without_steps(parts, workers, batch_sec)
    notes = [f"of one rank, on a machine of {num_cores()} cores"]
    if slower > _NOTICED:
        notes.append(
            f"{counted(workers, 'worker')} at once took {slower:.1f} times as long for the same "
            "work as this process alone: cores, memory or storage are short"
        )
    return made_report(
        f"dry run of {path}, {steps}", records, warnings=notes, num_cores=num_cores(),
        times={name: sec * number for name, sec in parts.items()},
        workers={n: MARGIN * sum(parts.values()) / n for n in _NUMBERS_OF_WORKERS}, **more,
    )  # fmt: skip


def _sec_of_a_sample(first: Record, last: Record, otherwise: float) -> float:
    """Returns the seconds that workers read and encoded, for a sample that they drew."""
    before, after = (total(record.sources.values()) for record in (first, last))
    spent = {name: after[name] - before[name] for name in before}
    return (
        (spent["read_sec"] + spent["encode_sec"]) / spent["draws"] if spent["draws"] else otherwise
    )


def _parts_of_a_batch(
    loader: Any, clock: HookClock, seconds: float, show: Progress, *, sends: bool
) -> tuple[dict[str, float], float | None, float]:
    """Returns the seconds of each part of a batch, the fill, and seconds as the loader counts them.

    The last are those of reading and of hooks, for a sample.

    The first batch opens files, imports and compiles. It does not count, unless it filled a buffer
    from which the later ones are packed: then the work on samples is that of all batches.
    """
    batches = _batches_for(loader, seconds, 1, "Measuring the parts", show)
    next(batches)
    since = _spent(loader, clock)
    number, samples, cells, full, sent_sec = 0, 0, 0, 0, 0.0
    for batch in batches:
        number += 1
        keys = field_of(batch, "__key__")
        samples += len(keys) if isinstance(keys, (list, tuple)) else 0
        size, filled = _tokens_of(batch)
        cells, full = cells + size, full + filled
        sent_sec += _transport_sec(batch) if sends else 0.0
    whole = _spent(loader, clock)
    own = {name: sec - since.get(name, 0.0) for name, sec in whole.items()}
    by_sample = own if 2 * own["draws"] > whole["draws"] else whole
    # Batches without keys hold as many samples as were drawn for them.
    each = (samples or own["draws"]) / max(1, number) / max(1, by_sample["draws"])
    hooks = [name for name, _ in clock.seconds.most_common() if name != "decode"]
    inner_sec = sum(own[name] for name in hooks) + own["decode"] - own["outer decode"]
    of_batches = {name: own[name] for name in hooks if name in _OF_BATCHES}
    of_batches["pack and batch"] = own["wait_sec"] - own["read_sec"] - inner_sec
    of_batches |= {"transport": sent_sec} if sends else {}
    parts = {
        "read": (by_sample["read_sec"] - by_sample["outer decode"]) * each,
        **{name: by_sample[name] * each for name in ("decode", *hooks)},
        **{name: sec / max(1, number) for name, sec in of_batches.items()},
    }
    full = full or int(own["tokens"])  # without a mask, by the lengths that the encoder measures
    fill = min(1.0, full / cells) if full and cells else None
    sec = max(1e-9, by_sample["read_sec"] + by_sample["encode_sec"]) / max(1, by_sample["draws"])
    return {name: max(0.0, part) for name, part in parts.items()}, fill, sec


def _spent(loader: Any, clock: HookClock) -> dict[str, float]:
    """Returns the counts of the loader and the seconds of the clock up to here."""
    counts = total(map(vars, loader.stats().values()))
    return {**counts, "decode": 0.0, **clock.seconds, "outer decode": clock.decode_sec}


def _batches_for(
    loader: Any, seconds: float, num_first: int, what: str, show: Progress
) -> Iterator[Any]:
    """Yields batches, pass after pass, for some seconds after the first ones; at least one more."""
    began, has_any, number = None, True, 0
    while has_any:
        has_any = False
        for batch in loader:
            has_any, number = True, number + 1
            yield batch
            if number < num_first:
                continue
            began = began or perf_counter()
            done = perf_counter() - began
            show(what, min(int(done), int(seconds)), int(seconds))
            if number > num_first and done >= seconds:
                return
    raise EmptyDatasetError("a pass has no batch: there are no samples, or all were skipped")


def _run(loader: Any, file: Path, seconds: float, step_sec: float, show: Progress) -> None:
    """Runs steps that only wait, and writes the counts now and then.

    Not before each worker had a batch to give: the first ones wait for its start.
    """
    workers = loader.worker_config.num_workers
    num_first, due, step = max(1, workers), 0.0, 0
    name = f"Running with {workers} worker{'' if workers == 1 else 's'}"
    for _ in _batches_for(loader, seconds, num_first, name, show):
        step += 1
        sleep(step_sec)
        if step >= num_first and perf_counter() >= due:
            loader.stats().write_to(file, step)
            due = perf_counter() + seconds / _NUM_LINES
    loader.stats().write_to(file, step)


def _tokens_of(batch: Any) -> tuple[int, int]:
    """Returns the places for tokens in a batch, and how many a mask marks as filled, else 0."""
    ids = field_of(batch, "input_ids")
    masks = field_of(batch, "segment_ids"), field_of(batch, "attention_mask")
    cells = ids.numel() if isinstance(ids, torch.Tensor) else 0
    filled = (
        int((mask > 0).sum())
        for mask in masks
        if isinstance(mask, torch.Tensor) and mask.numel() == cells
    )
    return cells, next(filled, 0)


def _transport_sec(batch: Any) -> float:
    """Returns how long a batch takes to be pickled, copied to the other process and unpickled."""
    since = perf_counter()
    body, buffers = packed_delivery(Delivery(batch, 0, 0, None, [], []), "in a dry run")
    unpacked(b"".join(body), [bytearray(buffer) for buffer in buffers])
    return perf_counter() - since
