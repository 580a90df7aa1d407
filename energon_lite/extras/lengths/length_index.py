"""Measures every sample of a dataset once, and stores its lengths beside the data."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import PurePath
from typing import Any, ClassVar, NamedTuple

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError
from energon_lite.core.file_store import FileStore
from energon_lite.core.keys import leaves
from energon_lite.core.stream_context import SkipRecord, StreamContext, context_of
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import stateless
from energon_lite.extras.lengths import stored_metadata
from energon_lite.extras.lengths.partial_lengths import PartialLengths
from energon_lite.extras.prepare.pool import ordered_results
from energon_lite.formats.known import format_of
from energon_lite.formats.length_files import (
    TOKENS,
    lengths_path,
    read_facts,
    read_lengths,
)
from energon_lite.metadataset.nodes import Leaf
from energon_lite.metadataset.nodes import leaves as leaves_of
from energon_lite.metadataset.open import LeafOpener, open_node
from energon_lite.metadataset.read import is_metadataset, split_names
from energon_lite.stages.token_lengths import MeasureCursor, MeasureDataset
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path
from energon_lite.task_encoder.base import AnyTaskEncoder, DefaultTaskEncoder
from energon_lite.task_encoder.cooking import Cooker
from energon_lite.task_encoder.hooks import Hooks, fingerprint

__all__ = ["DEFAULT_NAME", "LengthFunction", "LengthReport", "measure_lengths"]

DEFAULT_NAME = "default"
logger = logging.getLogger(__name__)
_SAMPLES_PER_TASK = 1024
_LISTED = 20


@dataclass
class LengthReport:
    """The measurements of one split part.

    Attributes:
        path: the dataset's folder.
        split_part: the part.
        file: the lengths, as .npy.
        samples: samples of the part.
        measured: samples that were measured now; the others had been measured before.
        totals: the lengths of all samples together, by resource.
        longest: the longest sample, by resource.
        skipped: samples that the task encoder skipped now; their length is 0.
        failed: samples that raised an error now; their length is 0.
        problems: the first of the failed samples, as (sample, error).
    """

    path: PurePath
    split_part: str
    file: PurePath | None = None
    samples: int = 0
    measured: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    failed: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)

    def add(self, found: _Measured) -> None:
        """Counts samples that were measured."""
        self.measured += len(found.samples)
        for record in found.records:
            self.skipped += record.on_purpose
            self.failed += not record.on_purpose
            if not record.on_purpose and len(self.problems) < _LISTED:
                self.problems.append((record.sample_key, record.error))

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON-serialisable values."""
        return {**self.__dict__, "path": str(self.path), "file": str(self.file)}


@stateless
def _as_stored(sample: Any) -> Any:
    return sample


class LengthFunction(DefaultTaskEncoder[Any, Any, Any, Any]):
    """A task encoder that has only a function for the length of a stored sample.

    A crude sample is passed to it as it is.

    Args:
        function: returns the tokens of a sample, or a dict of resources.
    """

    cookers: ClassVar[Sequence[Cooker[Any]]] = (Cooker(_as_stored),)

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._length_function = function

    def sample_length(self, sample: Any) -> Any:
        """Calls the function."""
        return self._length_function(sample)


def measure_lengths(
    path: str | PathLike[str],
    task_encoder: AnyTaskEncoder,
    *,
    name: str = DEFAULT_NAME,
    meta_dir: str | PathLike[str] | None = None,
    split_parts: Sequence[str] | None = None,
    num_workers: int | None = None,
    trust: bool | None = None,
    media_metadata: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[LengthReport]:
    """Runs a task encoder's `sample_length` over a prepared dataset, and stores what it returns.

    Lengths of an interrupted run are kept; nothing is measured if neither the data nor the code of
    the encoder changed. Blends and packs use the result (`lengths: NAME`).

    Args:
        path: a prepared folder, or a metadataset, of which every dataset is measured.
        task_encoder: has `sample_length`; its hooks up to that are run.
        name: of the index, for example that of a tokenizer.
        meta_dir: folder for the index, if the dataset is read-only; the index is then called by
            its absolute path: `lengths="META_DIR/NAME"`. By default it lies in the dataset.
        split_parts: of the folder, or splits of the metadataset; by default all that have shards.
        num_workers: processes; by default one per usable core, at most 16. 0 and 1: this process.
        trust: whether code that the dataset names may be run.
        media_metadata: whether hooks get `ImageMetadata` and `AVMetadata` in the place of images,
            video and audio, which are not decoded, and not read where the metadata are stored.
        progress: called with what is measured, how many samples are done, of how many.

    Raises:
        ValueError: The encoder has no `sample_length`, or returns something else than lengths.
        FileNotFoundError: The folder is missing, or not prepared.
        PermissionError: The folder of the index cannot be written to.
        RuntimeError: A worker process died.
    """
    encoder = fingerprint(task_encoder)
    if media_metadata:
        encoder, task_encoder = f"media metadata, {encoder}", copy.copy(task_encoder)
        task_encoder.decoder = stored_metadata.MetadataDecoder(inner=task_encoder.decoder)
    hooks = Hooks(task_encoder, WorkerConfig(rank=0, world_size=1, num_workers=0))
    if meta_dir is not None:
        name = f"{files.absolute(local_path(meta_dir))}/{name}"
    reports = []
    for leaf in _leaves_of(path, split_parts, trust):
        opener = _opener(leaf, hooks, trust, media_metadata)
        try:
            dataset = hooks.measured(opener(leaf, repeat=False))
        except EmptyDatasetError as error:
            if split_parts is not None:
                raise
            logger.info("%s", error)  # `test: []` is usual
            continue
        factory = opener.factories[0]
        reports.append(_measure_part(dataset, factory, name, encoder, num_workers, progress))
    if not reports:
        raise EmptyDatasetError(f"{path}: nothing to measure; list shards in split.yaml")
    return reports


def _opener(leaf: Leaf, hooks: Hooks, trust: bool | None, media_metadata: bool) -> LeafOpener:
    def cook(source: Any, factory: Any, aux: Mapping[str, FileStore[Any]]) -> Any:
        if media_metadata:
            source = stored_metadata.metadata_source(source)
            aux = {name: stored_metadata.MetadataFileStore(store) for name, store in aux.items()}
        return hooks.cooked(source, factory, aux)

    return LeafOpener(
        node=leaf, cook=cook, decoder=hooks.encoder.decoder, block=_SAMPLES_PER_TASK,
        settings={"trust": trust}, training=False, worker_config=hooks.config,
    )  # fmt: skip


def _leaves_of(path: Any, split_parts: Sequence[str] | None, trust: bool | None) -> Iterator[Leaf]:
    """Yields every split part to be measured, whole and once."""
    names: Sequence[str]
    if is_metadataset(path):
        names = split_names(path)
    else:
        root = local_path(path)
        names = format_of(root).split_parts(root)
    for part in split_parts or ():
        if part not in names:
            raise DatasetFormatError(f"{path}: no split part {part!r}; it has {', '.join(names)}")
    seen = set()
    for split in split_parts or names:
        for leaf in leaves_of(open_node(path, split, {"trust": trust})):
            part = format_of(leaf.path).only_part or leaf.split_part
            place = tuple(
                (files.resolved(one.path), part, one.split_config, one.dataset_config)
                for one in leaf.folders
            )
            if place not in seen:
                seen.add(place)
                yield replace(leaf, subset=(), source_id=f"{leaf.path.name}/{part}")


def _measure_part(
    dataset: MeasureDataset[Any],
    factory: Any,
    name: str,
    encoder: str,
    num_workers: int | None,
    progress: Callable[[str, int, int], None] | None,
) -> LengthReport:
    root, part, num_samples = factory.path, factory.split_part, factory.num_samples_of_part
    report = LengthReport(root, part, samples=num_samples)
    facts = read_facts(root, part, name) or {}
    if facts.get("data") != factory.data or facts.get("encoder") != encoder:
        with files.errors_of(root):
            num_tasks = -(-num_samples // _SAMPLES_PER_TASK)
            resources = _resources(dataset, root)
            partial = PartialLengths(
                root, part, name, num_samples, resources, factory.data, encoder
            )
            missing = partial.missing()
            tasks = np.unique(missing // _SAMPLES_PER_TASK).tolist()
            measure = functools.partial(_measured, dataset, num_tasks, resources)
            for found in ordered_results(measure, tasks, num_workers):
                partial.put(found.samples, found.lengths)
                report.add(found)
                if progress is not None:
                    done = num_samples - len(missing) + report.measured
                    progress(f"{root.name}/{part}", done, num_samples)
            partial.finish()
        facts = read_facts(root, part, name) or {}
    for resource in facts["resources"]:
        lengths = read_lengths(root, part, name, num_samples, factory.data, resource)
        report.totals[resource] = int(lengths.sum())
        report.longest[resource] = int(lengths.max(initial=0))
    report.file = lengths_path(root, part, name)
    return report


class _Measured(NamedTuple):
    """The lengths of some samples.

    Attributes:
        samples: (n,); their numbers in the part, rising.
        lengths: (n, R).
        records: skipped samples.
    """

    samples: Int64Array
    lengths: Int64Array
    records: list[SkipRecord]


def _resources(dataset: MeasureDataset[Any], root: PurePath) -> tuple[str, ...]:
    """Returns the names of the resources of the first sample that has a length, tokens first."""
    stream = Stream(0, 1)
    with context_of(StreamContext(stream, max_skip_rate=1.0)):
        cursor: MeasureCursor[Any] = dataset.cursor(stream)
        for _ in cursor:
            return (TOKENS, *sorted(_lengths_here(cursor).keys() - {TOKENS}))
    raise DatasetFormatError(
        f"{root}: no sample has a length: all were skipped, or failed. Correct what the log names"
    )


def _lengths_here(cursor: MeasureCursor[Any]) -> dict[str, Any]:
    length = cursor.length
    return length if isinstance(length, dict) else {TOKENS: length}


def _measured(
    dataset: MeasureDataset[Any], num_tasks: int, resources: tuple[str, ...], task: int
) -> _Measured:
    """Measures one block of file order: the samples of one of `num_tasks` streams."""
    stream = Stream(task, num_tasks)
    context = StreamContext(stream, max_skip_rate=1.0)
    first = task * _SAMPLES_PER_TASK
    num_samples = min(_SAMPLES_PER_TASK, dataset.num_items(Stream(0, 1)) - first)
    lengths = np.zeros((num_samples, len(resources)), dtype=np.int64)
    with context_of(context):
        cursor: MeasureCursor[Any] = dataset.cursor(stream)
        for _ in cursor:
            here, key = _lengths_here(cursor), next(leaves(cursor.key))
            if here.keys() != set(resources):
                raise DatasetFormatError(
                    f"sample_length returned {sorted(here)} for {key!r} and {sorted(resources)} "
                    "before; return the same resources for every sample"
                )
            # A generator hook makes several samples of one; they are measured together.
            lengths[key[2] - first] += [int(here[name]) for name in resources]
    return _Measured(np.arange(first, first + num_samples), lengths, context.take_records())
