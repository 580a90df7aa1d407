"""Decides and checks what to read and what to write before a single tar is read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple
from uuid import uuid4

from energon_lite.core.errors import DatasetFormatError, did_you_mean
from energon_lite.core.samples import SAMPLE_TYPES, Sample
from energon_lite.extras.media.media_headers import MediaFilterConfig
from energon_lite.extras.prepare import choose_shards
from energon_lite.extras.prepare.choose_shards import Ratio, Shard, find_shards, parse_ratio
from energon_lite.extras.prepare.index_writer import counts_of_groups, has_whole_sample
from energon_lite.extras.prepare.odd_parts import FIRST_DOT
from energon_lite.extras.prepare.split_text import split_text
from energon_lite.formats import nvmeta
from energon_lite.formats.field_access import (
    FieldMap,
    FieldSpec,
    check_fields,
    listing,
    mappable_fields,
    spelled,
)
from energon_lite.storage.files import is_there, read_file, sizes_of
from energon_lite.storage.yaml import dump_config

CRUDE = "CrudeWebdataset"
SAMPLE_LOADER = "sample_loader.py"
_MODULE = "megatron.energon"
# Energon has this class, but not at its top level.
_MODULES = {"VQAOCRSample": "megatron.energon.flavors.vqa_and_ocr"}

SplitParts = Mapping[str, str | Sequence[str]] | Iterable[tuple[str, str]]
Watch = Callable[[Iterator[Any], int], Iterator[Any]]


# ----------------------------------------------------------------------------- dataset.yaml


def sample_type_names() -> tuple[str, ...]:
    """Returns the names that `sample_type` may have."""
    return (*sorted(SAMPLE_TYPES), CRUDE)


def sample_type_of(name: str) -> type[Sample] | None:
    """Finds a sample type by name; None for crude samples.

    Raises:
        ValueError: There is none of this name.
    """
    if name == CRUDE:
        return None
    if name not in SAMPLE_TYPES:
        raise ValueError(
            f"unknown sample type {name!r}.{did_you_mean(name, sample_type_names())} "
            "For a class of your own, write dataset.yaml by hand"
        )
    return SAMPLE_TYPES[name]


def fields_of(name: str) -> list[FieldSpec]:
    """Returns the fields of a sample type that a field map may name, none for crude samples.

    Raises:
        ValueError: There is no sample type of this name.
    """
    kind = sample_type_of(name)
    return [] if kind is None else list(mappable_fields(kind).values())


def check_config(
    sample_type: str | None, field_map: Mapping[str, str | list[str]] | None
) -> FieldMap | None:
    """Checks that a field map fits its sample type.

    Returns:
        The field map, or None where there is none to write.

    Raises:
        ValueError: The type is unknown, or type and map do not go together.
        DatasetFormatError: A field is unknown, missing, or its access string is malformed.
    """
    if sample_type is None:
        if field_map is not None:
            raise ValueError("a field map needs a sample type (sample_type, --sample-type)")
        return None
    kind = sample_type_of(sample_type)
    if kind is None:
        if field_map:
            raise ValueError(f"{CRUDE} has no field map: a cooker makes its samples")
        return None
    if not field_map:
        names = ", ".join(spec.name for spec in fields_of(sample_type))
        raise ValueError(f"{sample_type} needs a field map (field_map, --field-map) for: {names}")
    parsed = FieldMap(field_map, "field map")
    check_fields(parsed, kind, "field map")
    return parsed


def check_samples(
    field_map: FieldMap, index: PurePath, parts: Collection[str], num_samples: int, root: PurePath
) -> None:
    """Checks that the data has a sample that can be made: one with a part for each field.

    Args:
        field_map: the fields and their parts.
        index: the index database of the data.
        parts: all parts of the data.
        num_samples: samples in it.
        root: the dataset, for the error text.

    Raises:
        DatasetFormatError: Names a field without any part, and the parts that are there; or counts
            the samples that have the parts of each field.
    """
    groups = {name: [path.part for path in paths] for name, paths in field_map.paths.items()}
    names = [spelled(group, parts) for group in groups.values()]
    if has_whole_sample(index, names):
        return
    counts = counts_of_groups(index, names)
    if 0 in counts:
        name, wanted = list(groups.items())[counts.index(0)]
        raise DatasetFormatError(
            f"{root}: field {name!r} is mapped to {','.join(map(str, field_map.paths[name]))!r}, "
            f"but no sample has a part {' or '.join(map(repr, wanted))}."
            f"{_instead(wanted, parts)}"
        )
    found = "; ".join(
        f"{name!r} ({' or '.join(wanted)}) is in {count:,}"
        for (name, wanted), count in zip(groups.items(), counts, strict=True)
    )
    raise DatasetFormatError(
        f"{root}: none of {num_samples:,} samples has the parts of all fields: {found}. Files of "
        "a sample have the same path up to the first dot of their name, and follow each other"
    )


def _instead(wanted: Sequence[str], parts: Collection[str]) -> str:
    """Describes the parts that are there in the place of those that no sample has."""
    ends = tuple(f".{part}" for part in wanted)
    dotted = [part for part in parts if part.endswith(ends)]
    if len(dotted) > 1 or re.search(r"\d", "".join(dotted)):
        return (
            f" There {'is' if len(dotted) == 1 else 'are'} {listing(sorted(dotted))}. {FIRST_DOT}: "
            "where the first dot belongs to the key, write the tars again with '_' in its place"
        )
    few = parts if len(parts) <= 10 else ()
    return did_you_mean(wanted[0], few) or f" The parts are {listing(sorted(parts))}"


def _config(sample_type: str, field_map: FieldMap | None, by_loader: bool) -> dict[str, Any]:
    """Returns the content of `dataset.yaml`: a field map, a sample loader, or a dataset class."""
    if field_map is None and not by_loader:
        return {"__module__": _MODULE, "__class__": sample_type}
    reference = {"__module__": _MODULES.get(sample_type, _MODULE), "__class__": sample_type}
    if field_map is not None:
        return {"sample_type": reference, "field_map": field_map.mapping}
    functions = {name: f"{SAMPLE_LOADER}:{name}" for name in ("sample_loader", "part_filter")}
    return {"sample_type": reference, **functions}


def loader_text(sample_type: str, parts: Iterable[str]) -> str:
    """Returns a `sample_loader.py` for the user to edit."""
    lines = [
        f'        "{spec.name}": parts["TODO"],  # {spec.type_name}'
        f"{'' if spec.is_required else ', or leave it out'}\n"
        for spec in fields_of(sample_type)
    ]
    return f'''"""Makes the fields of {sample_type}. TODO: name the parts that they come from."""


def sample_loader(parts):
    return {{  # parts are decoded
{"".join(lines)}    }}


def part_filter(part):
    return part in {tuple(parts)!r}  # others are not read
'''


# --------------------------------------------------------------------------------- all of a run


class Plan(NamedTuple):
    """All decisions: what is read, and what is written when that went well.

    `splits` is None where those that are there stay, or where only indexes are made.
    """

    root: PurePath
    request: Request
    shards: list[Shard]
    splits: dict[str, list[str]] | None
    field_map: FieldMap | None
    texts: dict[str, str]  # files of .nv-meta that the tars do not change
    old_counts: dict[str, int] | None  # of the info file that stays (tar_index_only)

    @property
    def folders(self) -> set[PurePath]:
        """The folders of the tars."""
        return {shard.path.parent for shard in self.shards}

    def writes_info(self, counts: dict[str, int]) -> bool:
        """Returns whether the info file is written: it is new, or its counts are other ones."""
        return self.splits is not None or self.old_counts not in (None, counts)


class Progress(NamedTuple):
    """The progress of a run, in whole shards."""

    shards: int
    num_shards: int
    samples: int
    size_bytes: int
    total_bytes: int


def unwatched(shards: Iterator[Any], _num_shards: int) -> Iterator[Any]:
    """Returns the iterator."""
    return shards


class Request(NamedTuple):
    """The arguments of `prepare_dataset`, and of the commands around it.

    `on_odd` is called with the description of an odd split: it raises, or warns. With
    `loader_parts`, parts of the data, a `sample_loader.py` that the user edits replaces the field
    map. `watch` wraps the iterator over the shards; its second argument is their number.
    """

    split_ratio: Ratio | None = None
    split_parts: SplitParts | None = None
    sample_type: str | None = None
    field_map: Mapping[str, str | list[str]] | None = None
    split_config: str = nvmeta.DEFAULT_SPLIT
    dataset_config: str = nvmeta.DEFAULT_DATASET
    exclude: str | None = None
    shuffle_seed: int | None = None
    force_overwrite: bool = False
    paths: Iterable[str | os.PathLike[str]] | None = None
    on_odd: Callable[[str], None] = choose_shards.refuse
    loader_parts: Sequence[str] | None = None
    follow_links: bool = False
    num_workers: int | None = None
    tar_index_only: bool = False
    fix_duplicates: bool = False
    progress: Callable[[Progress], None] | None = None
    watch: Watch = unwatched
    media_filter: MediaFilterConfig | None = None


def decide_splits(names: Sequence[str], request: Request) -> dict[str, list[str]]:
    """Returns the shards of each split part.

    Raises:
        ValueError: There is no split, or it does not fit the shards.
    """
    if request.split_parts is not None:
        patterns = choose_shards.patterns_of(request.split_parts)
        return choose_shards.split_by_patterns(names, patterns, request.on_odd)
    if request.split_ratio is None:
        raise ValueError(
            "give a split: split_ratio (--split-ratio 8,1,1) or split_parts (--split-parts)"
        )
    shares = parse_ratio(request.split_ratio)
    return choose_shards.split_by_ratio(names, shares, request.shuffle_seed)


def empty_parts(request: Request, splits: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a warning for each part whose share of the split ratio is too small for a shard."""
    shares = {} if request.split_ratio is None else parse_ratio(request.split_ratio)
    ratio, num_shards = ",".join(map(str, shares.values())), sum(map(len, splits.values()))
    return [
        f"split ratio {ratio} leaves {part!r} empty: there are only {num_shards} shards. Set its "
        "share to 0, make it larger, or write more shards"
        for part, share in shares.items()
        if share and not splits[part]
    ]


def prepared_already(root: PurePath) -> FileExistsError:
    """Returns the error for a folder that is prepared, where `force_overwrite` is not set."""
    return FileExistsError(
        f"{root} is already prepared; use force_overwrite (--force-overwrite) to do it again, "
        "or tar_index_only (--tar-index-only) to make the indexes only"
    )


def make_plan(root: PurePath, request: Request) -> Plan:
    """Decides about a new dataset; errors are those of `prepare_dataset`."""
    by_loader = request.loader_parts is not None
    field_map = None if by_loader else check_config(request.sample_type, request.field_map)
    if request.split_ratio is not None:
        parse_ratio(request.split_ratio)
    shards = find_shards(root, request.exclude, request.paths)
    if nvmeta.is_prepared(root) and not request.force_overwrite:
        raise prepared_already(root)
    splits = decide_splits([shard.name for shard in shards], request)
    texts = {request.split_config: split_text(splits, (), request.split_config)}
    if request.sample_type is not None:
        config = _config(request.sample_type, field_map, by_loader)
        texts[request.dataset_config] = dump_config(config, request.dataset_config)
    for name, text in texts.items():
        file = nvmeta.config_path(root, name)
        if request.force_overwrite or not is_there(file) or read_file(file) == text.encode():
            continue
        raise FileExistsError(
            f"{file} exists and would be changed; use force_overwrite (--force-overwrite), "
            "another file name, or drop the options that write it"
        )
    if request.loader_parts is not None and not is_there(root / nvmeta.META / SAMPLE_LOADER):
        texts[SAMPLE_LOADER] = loader_text(str(request.sample_type), request.loader_parts)
    texts = {nvmeta.INDEX_UUID: str(uuid4()), **texts}
    return Plan(root, request, shards, splits, field_map, texts, None)


def plan_again(root: PurePath, request: Request) -> Plan:
    """Decides about making the indexes of a prepared dataset again."""
    if any(request[:4]) or request.exclude:
        raise ValueError("tar_index_only keeps split and sample type; do not pass them")
    texts = {nvmeta.INDEX_UUID: str(uuid4())}
    if request.paths is not None and not nvmeta.is_prepared(root):
        return Plan(root, request, find_shards(root, None, request.paths), None, None, texts, None)
    counts = nvmeta.read_info(root).shard_counts
    sizes = zip(counts, sizes_of(root, counts), strict=True)
    missing = [name for name, size in sizes if size < 0]
    if missing:
        raise FileNotFoundError(
            f"{root / missing[0]} is listed in {nvmeta.META}/{nvmeta.INFO_JSON} but does not exist "
            f"({len(missing)} such shards); prepare the dataset again with --force-overwrite"
        )
    shards = [Shard(name, root / name) for name in counts]
    return Plan(root, request, shards, None, None, texts, counts)
