"""Joined datasets as one source: a sample of each dataset under the same key becomes one sample."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import (
    DatasetFormatError,
    EmptyDatasetError,
    FatalSampleError,
    add_note,
)
from energon_lite.core.samples import Sample, field_of, make_crude, tags_of_source
from energon_lite.core.seeds import key_of
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.core.stream_context import current_context
from energon_lite.core.user_function import UserFunction
from energon_lite.extras.joins.join_index import JoinIndexReader, JoinSide
from energon_lite.extras.joins.join_keys import JoinReport, build_index, find_index, why_unmatched
from energon_lite.extras.stores.owned_folders import private_folder
from energon_lite.formats.field_access import mappable_fields
from energon_lite.formats.format import Opened
from energon_lite.formats.prepared_folder import open_part
from energon_lite.formats.shards import (
    MAX_BLOCK_BYTES,
    MAX_OPEN,
    Block,
    BlockReader,
    ShardReader,
)
from energon_lite.formats.tar import key_of_members
from energon_lite.sources.sample_loader import FieldMapMaker, SampleLoader
from energon_lite.sources.source_factory import SourceFactory, Subset
from energon_lite.sources.webdataset import BaseWebdatasetFactory
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

logger = logging.getLogger(__name__)
T_sample = TypeVar("T_sample")
AnyPath = str | PathLike[str]
_NOTHING = Block(memoryview(b""), [], [], [])
_UNLIMITED = 1 << 62


def open_side(
    path: PurePath,
    split_part: str,
    split_config: str | None = None,
    subset: Subset = None,
    nonmatch: str = "error",
    max_open: int = MAX_OPEN,
) -> JoinSide:
    """Opens a dataset of a join.

    Args:
        path: the folder.
        split_part: which part of it.
        split_config: name of the split file in `.nv-meta`.
        subset: as in `BaseWebdatasetFactory`.
        nonmatch: as in `JoinSide`.
        max_open: shards that stay open between two reads.
    """
    split, part, ids, excluded = open_part(path, split_part, split_config)
    total = sum(part.counts)
    start, stop = (subset(total) if callable(subset) else subset) or (0, total)
    first, last = (edge - int(np.searchsorted(excluded, edge)) for edge in (start, stop))
    samples = split.excludes.samples
    entries = [f"{shard}/{key}" for shard, keys in samples.items() for key in keys]
    return JoinSide(
        ShardReader(path, part.shards, part.counts, ids, (), max_open),
        tuple(split.listed(split_part)), (*entries, *split.excludes.unknown), tuple(excluded),
        (first, last), nonmatch,
    )  # fmt: skip


def prepared_index(
    folder: PurePath, sides: Sequence[JoinSide], num_workers: int | None = 0
) -> tuple[PurePath, JoinReport | None]:
    """Returns the index of a join, which is made where it is missing.

    Args:
        folder: where indexes are.
        sides: the datasets.
        num_workers: processes that make it; 0: this process.

    Returns:
        The file, and what was counted if it was made now.

    Raises:
        FileNotFoundError: It is missing, and the folder cannot be written to.
        DatasetFormatError: The keys do not match as `nonmatch` asks for.
    """
    path = find_index(folder, sides)
    if path is not None:
        return path, None
    try:
        report = build_index(folder, sides, num_workers)
    except PermissionError as error:
        raise FileNotFoundError(
            f"{folder}: there is no join index of {', '.join(str(side.root) for side in sides)}, "
            f"and the folder cannot be written to ({error.strerror}). Run `energon-lite prepare` "
            "on the metadataset where it can"
        ) from None
    return report.path, report


class JoinColumn(NamedTuple):
    """The samples of one dataset in a block; a missing match is None in `members`."""

    data: memoryview
    members: list[Any]
    shards: list[str]
    places: list[int]
    positions: list[int]


class JoinReader(BlockReader):
    """Reads rows of a join: the samples of all datasets of a block of rows.

    Its blocks have a column for each dataset in `data`. The other lists are those of the primary,
    but `places` has the numbers of the rows in the block. (An object for each row would keep the
    garbage collector busy for longer than reading takes.)

    Args:
        index: the rows.
        sides: the datasets, the primary first.

    Attributes:
        root: folder of the primary.
        num_samples: the number of rows.
    """

    def __init__(self, index: JoinIndexReader, sides: Sequence[JoinSide]) -> None:
        self.index = index
        self.sides = tuple(sides)
        self.root = sides[0].root
        self.num_samples = len(index)

    @property
    def is_slow(self) -> bool:
        """Whether reading waited for storage lately."""
        return any(side.reader.is_slow for side in self.sides)

    def advise(self, indices: Int64Array) -> None:
        """Asks the kernel to read rows into its page cache."""
        rows = self.index.rows(indices)
        for number, side in enumerate(self.sides):
            positions, _ = side.positions_of(rows[:, number])
            side.reader.advise(positions[positions >= 0])

    def read(self, indices: Int64Array, max_bytes: int = MAX_BLOCK_BYTES) -> Block:
        """Reads the rows at `indices`, shape (N,), or the first with up to `max_bytes` together."""
        rows = self.index.rows(indices)
        ends = np.cumsum(np.clip(rows[:, :, 2], 0, max_bytes).sum(axis=1))
        rows = rows[: max(1, int(np.searchsorted(ends, max_bytes, side="right")))]
        data = [_column(side, rows[:, number]) for number, side in enumerate(self.sides)]
        places = list(range(len(rows)))
        return Block(data, data[0].members, data[0].shards, places)  # type: ignore[arg-type]


def _column(side: JoinSide, rows: Int64Array) -> JoinColumn:
    """Reads the samples of one dataset in some rows, whose places have the shape (N, 3)."""
    positions, lost = side.positions_of(rows)
    present = np.flatnonzero(positions >= 0)
    block = side.reader.read(positions[present], _UNLIMITED) if len(present) else _NOTHING
    if len(present) == len(rows):
        return JoinColumn(*block, positions.tolist())  # type: ignore[arg-type]
    is_none = side.nonmatch == "none"
    missing = None if is_none else side.misfit("a row has no sample of this dataset")
    members: list[Any] = [lost.get(row, missing) for row in range(len(rows))]
    shards, places = [""] * len(rows), [-1] * len(rows)
    for row, *found in zip(present.tolist(), *block[1:], strict=True):
        members[row], shards[row], places[row] = found
    return JoinColumn(block.data, members, shards, places, positions.tolist())


class JoinLoader:
    """Makes samples of rows: loads the sample of each dataset, and calls the joiner.

    Args:
        loaders: make the samples of each dataset.
        names: keyword argument of each dataset; None to pass them in their order.
        joiner: a class of samples, whose `from_joined` is called, or a function.
        may_lack: for each dataset, whether a row may have no sample of it.
        root: folder of the primary.
        seed: of the run.
        loss_weight: factor for the loss of all samples.

    Raises:
        DatasetFormatError: The class has not the fields that it takes of the datasets.
    """

    # As in a `SampleLoader`: blocks are not decoded together.
    kind: tuple[Any, ...] | None = None

    def __init__(
        self,
        loaders: Sequence[SampleLoader],
        names: Sequence[str] | None,
        joiner: Callable[..., Any],
        may_lack: Sequence[bool],
        root: PurePath,
        seed: int,
        loss_weight: float = 1.0,
    ) -> None:
        self.loaders = tuple(loaders)
        self.names = names
        self.root = root
        self.loss_weight = loss_weight
        method = joiner.from_joined if isinstance(joiner, type) else joiner  # type: ignore[attr-defined]
        self.function = UserFunction(method, name="joiner", seed=seed)
        self._is_ours = getattr(method, "__func__", None) is Sample.from_joined.__func__  # type: ignore[attr-defined]
        self._sample_type: Any = joiner
        makers = [load.maker for load in loaders]
        if self._is_ours and make_crude in makers:
            raise DatasetFormatError(
                f"joiner: {self._sample_type.__qualname__} takes the fields of samples, and crude "
                "samples have none. Override from_joined, or write a sample_type into dataset.yaml"
            )
        if self._is_ours and all(isinstance(maker, FieldMapMaker) for maker in makers):
            self._check_fields([maker.sample_type for maker in makers], may_lack)  # type: ignore[attr-defined]

    def text_share(self, block: Block) -> float:
        """Returns NaN: the share is unknown for joined samples."""
        del block
        return math.nan

    def _check_fields(self, types: Sequence[type[Any]], may_lack: Sequence[bool]) -> None:
        """Checks that the joined class takes the fields of the datasets, and gets what it needs."""
        own, fields = mappable_fields(self._sample_type), list(map(mappable_fields, types))
        name = self._sample_type.__qualname__
        unknown = sorted(set().union(*fields) - own.keys())
        if unknown:
            raise DatasetFormatError(
                f"joiner: {name} has no field for {', '.join(unknown)} of the joined samples. Add "
                "the fields, or override from_joined"
            )
        sure = set().union(*(f for f, lacks in zip(fields, may_lack, strict=True) if not lacks))
        missing = [spec.name for spec in own.values() if spec.is_required and spec.name not in sure]
        if missing:
            raise DatasetFormatError(
                f"joiner: {name} needs {', '.join(missing)}, which no dataset without `nonmatch: "
                "none` has. Write a default for the field, or override from_joined"
            )

    @property
    def may_draw(self) -> bool:
        """Whether a function of the user, not marked `@stateless`, makes the samples."""
        is_random = not self._is_ours and self.function.may_draw
        return is_random or any(loader.may_draw for loader in self.loaders)

    def together(self, block: Block) -> None:
        """Returns None: rows are made one by one."""

    def __call__(self, data: Any, members: Any, shard: str, place: int, key: RestoreKey) -> Any:
        """Makes one sample of a block; see `JoinReader`.

        Raises:
            Exception: What reading, decoding or the joiner raised, with shard and sample named in
                its notes.
        """
        name, epoch, _, number = key
        samples: list[Any] = []
        for load, column in zip(self.loaders, data, strict=True):
            raw, rows, shards, places, positions = column
            sample = rows[place]
            if sample is not None:
                own_key = (name, epoch, positions[place], number)
                sample = load(raw, sample, shards[place], places[place], own_key)
            samples.append(sample)
        try:
            return self._join_samples(samples, data, place, key)
        except Exception as error:
            add_note(error, f"joiner of {self.root / shard}, sample {key_of_members(members)!r}")
            raise

    def _join_samples(self, samples: list[Any], data: Any, place: int, key: RestoreKey) -> Any:
        """Joins by the joiner, and sets the service fields that it does not."""
        sample_key = field_of(samples[0], "__key__")
        sources = own_sources = field_of(samples[0], "__sources__") or ()
        for other in samples[1:]:
            if other is not None:
                sources += field_of(other, "__sources__") or ()
                if field_of(other, "__key__") != sample_key:
                    _check_keys(data, place)
        self.function.enter(current_context(), key)
        make, names = self.function.function, self.names
        joined = make(**dict(zip(names, samples, strict=True))) if names else make(*samples)
        if not isinstance(joined, Sample):
            kind = type(joined).__name__
            raise FatalSampleError.from_sample_key(
                sample_key, f"the joiner returned a {kind}; return a Sample"
            )
        joined.__restore_key__ = key
        joined.__loss_weight__ = self.loss_weight
        if joined.__subflavors__ is None:
            joined.__subflavors__ = field_of(samples[0], "__subflavors__")
        if joined.__sources__ is None or joined.__sources__ == own_sources:
            joined.__sources__ = sources
        return joined


def _check_keys(data: Sequence[JoinColumn], place: int) -> None:
    """Checks that all samples of a row have the same key in their files.

    Raises:
        DatasetFormatError: They have not: the join index is of other data.
    """
    row = [column.members[place] for column in data]
    keys = [key_of_members(members) for members in row if members is not None]
    for key in keys:
        if key != keys[0]:
            raise DatasetFormatError(
                f"the join index pairs sample {keys[0]!r} with {key!r}: it was made of other data. "
                "Run `energon-lite prepare` on the metadataset again"
            )


class JoinedWebdatasetFactory(SourceFactory[T_sample]):
    """Datasets joined by the keys of their samples, in the order of the first one, the primary.

    Args:
        inner_datasets: the datasets; a mapping passes their samples as keyword arguments.
        join_index: the join index, or the folder of join indexes, in which it is made if missing;
            None for a folder of this user's in the folder for temporary files.
        joiner: a class of samples, whose `from_joined` is called, or a function; the datasets'
            samples are its arguments.
        nonmatch: for each dataset what happens to a sample of the primary without a match there:
            `error`, `skip`, or `none` (the joiner gets None).
        name: id of the source in states and keys; by default the names of the datasets.
        subflavors: tags that go over those of the datasets.
        kwargs: as in `SourceFactory`, for the rows; `max_samples_per_sequence` is by default the
            mean number of rows of a shard.

    Raises:
        FileNotFoundError: There is no index, and none can be written.
        DatasetFormatError: The index does not fit the datasets, or the keys do not match.
        EmptyDatasetError: There is no row.
    """

    def __init__(
        self,
        inner_datasets: Sequence[BaseWebdatasetFactory[Any]]
        | Mapping[str, BaseWebdatasetFactory[Any]],
        *,
        join_index: AnyPath | None,
        joiner: Callable[..., Any],
        nonmatch: Sequence[str] = (),
        name: str | None = None,
        subflavors: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        is_map = isinstance(inner_datasets, Mapping)
        self._names: Any = tuple(inner_datasets) if is_map else None
        inner = tuple(inner_datasets.values() if is_map else inner_datasets)  # type: ignore[union-attr]
        self.inner_datasets = inner
        self.joiner = joiner
        self._own_tags = dict(subflavors or {})
        super().__init__(
            inner[0].path, split_part=inner[0].split_part, part_filter=None,
            subflavors={**inner[0].subflavors, **self._own_tags},
            name=name or "+".join(one.name for one in inner), **kwargs,
        )  # fmt: skip
        self.paths = [one.path for one in inner]
        modes = (*nonmatch, *["error"] * len(inner))
        max_open = max(1, self.max_open // len(inner))
        sides = [
            open_side(one.path, one.split_part, one.split_config, one.subset, mode, max_open)
            for one, mode in zip(inner, modes, strict=False)
        ]
        path = (
            private_folder("joins")
            if join_index is None
            else files.absolute(local_path(join_index))
        )
        if path.suffix != ".bin":
            path, report = prepared_index(path, sides)
            if report is not None:
                logger.warning(
                    "%s: the join index was missing and was made (%d rows); `energon-lite prepare` "
                    "on the metadataset makes it before a run", path, report.rows,
                )  # fmt: skip
        index = JoinIndexReader(path)
        self._check(index, sides)
        self._sides = sides
        digest = key_of("join", tuple(one.data for one in inner), index.crc()) & (2**64 - 1)
        size = sum(one.opened.size_bytes for one in inner)
        mean_shard = -(-len(index) // len(sides[0].reader.shards))
        contents = [one.opened.content for one in inner]
        content = "-".join(contents) if all(contents) else ""
        reader = JoinReader(index, sides)
        self._read_from(Opened(reader, f"{digest:016x}", size, mean_shard, content=content))
        # The length index of a join lies beside those of the primary.
        self.split_part = f"{self.split_part}.join-{self.data[:8]}"

    def _check(self, index: JoinIndexReader, sides: Sequence[JoinSide]) -> None:
        if index.num_columns != len(self.inner_datasets):
            raise DatasetFormatError(
                f"{index.path}: {index.num_columns} columns, where {len(self.inner_datasets)} "
                "datasets are joined; name the index that was made for them"
            )
        if not len(index):
            names = " and ".join(str(path) for path in self.paths)
            keys = sides[0].keys(sides[0].kept()[:1])
            text = f"{index.path}: no sample of {names} has the same key"
            causes = [why_unmatched(side, keys) for side in sides[1:]]
            raise EmptyDatasetError(". ".join(filter(None, [text, *causes])))

    def sample_loader(self) -> Any:
        """Makes what turns rows into samples."""
        loaders = [one.sample_loader() for one in self.inner_datasets]
        for loader in loaders:
            loader.subflavors = tags_of_source({**loader.subflavors, **self._own_tags})
        may_lack = [side.nonmatch == "none" for side in self._sides]
        return JoinLoader(loaders, self._names, self.joiner, may_lack, self.path, self.seed)

    def sample_settings(self) -> dict[str, JSON]:
        """Returns the joiner, and the settings of the datasets."""
        return {
            "joiner": getattr(self.joiner, "__qualname__", type(self.joiner).__qualname__),
            "joined": [one.sample_settings() for one in self.inner_datasets],
        }
