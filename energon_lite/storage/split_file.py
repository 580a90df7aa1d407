"""`split.yaml`: which shards belong to which split part, and what is excluded from them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError, did_you_mean
from energon_lite.storage.braces import check_num_names, compress, expand
from energon_lite.storage.files import is_there, warn_once
from energon_lite.storage.nvmeta import (
    DEFAULT_SPLIT,
    INFO_JSON,
    META,
    DatasetInfo,
    config_path,
    load_config,
    shown,
)
from energon_lite.storage.yaml import YamlMap, dump_yaml

logger = logging.getLogger(__name__)

# Each part is opened on its own, which takes time in proportion to the whole file.
MAX_PARTS = 1000
_LONGEST_PATH = 4096


@dataclass(frozen=True)
class SplitPart:
    """The shards of one split part, in order, with what is excluded from them.

    Attributes:
        name: `train`, `val`, ...
        shards: paths relative to the dataset; a shard that is listed twice is there twice.
        counts: samples of each shard in its tar, excluded ones included.
        excluded: keys of the excluded samples, by shard.
    """

    name: str
    shards: tuple[str, ...]
    counts: tuple[int, ...]
    excluded: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Excludes(NamedTuple):
    """What a split config excludes: shards, samples by shard, and entries that fit neither."""

    shards: set[str]
    samples: dict[str, tuple[str, ...]]
    unknown: list[str]


class SplitFile:
    """A split config, read once.

    Args:
        root: the dataset's folder.
        info: what `read_info` returned.
        config: file name inside `.nv-meta`; by default `split.yaml`, else `split.json`.

    Raises:
        FileNotFoundError: There is no such split config.
        DatasetFormatError: The file is invalid.
    """

    def __init__(self, root: Path, info: DatasetInfo, config: str | None = None) -> None:
        self.root = root
        self.info = info
        self._split = _load_split(root, config)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all split parts, also of those without shards."""
        return tuple(self._split["split_parts"])

    @cached_property
    def excludes(self) -> Excludes:
        """What the split config excludes.

        Raises:
            DatasetFormatError: The list is invalid.
        """
        return _excludes(self._split, self.info)

    def part(self, part: str) -> SplitPart:
        """Returns which shards belong to a split part.

        Raises:
            EmptyDatasetError: No shard is left in the part.
            DatasetFormatError: There is no such part, a shard is not in `.info.json`, or the file
                is invalid; names file and key.
        """
        split, parts = self._split, self._split["split_parts"]
        if part not in parts:
            hint = did_you_mean(part, parts) if parts else " It has no split part at all."
            raise DatasetFormatError(f"{split.place()}: there is no split part {part!r}.{hint}")
        place = parts.place(part, "split_parts")
        names = _expanded(parts[part], place)
        excludes = self.excludes
        if excludes.unknown:
            warn_once(
                f"{split.place('exclude')}: {excludes.unknown[0]!r} fits no shard and excludes "
                f"nothing ({len(excludes.unknown)} such entries)"
            )
        shards = tuple(name for name in names if name not in excludes.shards)
        counts = self.info.shard_counts
        unknown = next((shard for shard in shards if shard not in counts), None)
        if unknown is not None:
            hint = did_you_mean(unknown, counts)
            hint = hint if hint.startswith(" Did you mean") else ""
            raise DatasetFormatError(
                f"{place}: shard {unknown!r} is not in {META}/{INFO_JSON}.{hint} Run `energon-lite "
                f"prepare {self.root} --force-overwrite` after adding shards"
            )
        if not shards:
            why = "all of its shards are excluded" if names else "its list is empty"
            raise EmptyDatasetError(f"{place}: no shards in split part {part!r} ({why})")
        inside = set(shards)
        excluded = {s: keys for s, keys in excludes.samples.items() if s in inside}
        return SplitPart(part, shards, tuple(counts[shard] for shard in shards), excluded)


def read_split_part(
    root: Path, info: DatasetInfo, part: str, config: str | None = None
) -> SplitPart:
    """Reads which shards belong to a split part; see `SplitFile`."""
    return SplitFile(root, info, config).part(part)


def split_part_names(root: Path, config: str | None = None) -> tuple[str, ...]:
    """Reads the names of all split parts; see `SplitFile`."""
    return tuple(_load_split(root, config)["split_parts"])


def _load_split(root: Path, config: str | None) -> YamlMap:
    path = config_path(root, config or DEFAULT_SPLIT)
    if config is None and not is_there(path):
        other = path.with_suffix(".json")
        path = other if is_there(other) else path
    remedy = (
        "write it (split_parts: {train: [SHARDS]}), "
        f"or run `energon-lite prepare {root} --force-overwrite --split-ratio 8,1,1`"
    )
    split = load_config(root, path, remedy, "split_parts", "exclude")
    if len(split["split_parts"]) > MAX_PARTS:
        raise DatasetFormatError(
            f"{split.place('split_parts')}: {len(split['split_parts']):,} split parts, where "
            f"{MAX_PARTS:,} are the most; write several split files, and choose one with "
            "split_config"
        )
    return split


def _expanded(value: Any, place: str) -> list[str]:
    """Returns the names that a list of brace patterns expands to."""
    if not isinstance(value, list):
        raise DatasetFormatError(f"{place}: must be a list of names, not {shown(value)}")
    names: list[str] = []
    characters = 0
    for index, entry in enumerate(value):
        try:
            if not isinstance(entry, str):
                raise ValueError(f"must be a name, not {shown(entry)}; put it in quotes")
            expanded = expand(entry)
            names += expanded
            # Names that are written out are bounded by the file.
            characters += sum(map(len, expanded)) if len(expanded) > 1 else 0
            check_num_names(len(names), characters, "up to here the list expands to")
        except ValueError as error:
            raise DatasetFormatError(f"{place}[{index}]: {error}") from None
    return names


def _excludes(split: YamlMap, info: DatasetInfo) -> Excludes:
    shards: set[str] = set()
    samples: dict[str, dict[str, None]] = {}
    unknown: list[str] = []
    for entry in _expanded(split.get("exclude", []), split.place("exclude")):
        if entry in info.shard_counts:
            shards.add(entry)
            continue
        # A shard name may hold slashes, and so may a key: "a/b.tar/c/001" is shard "a/b.tar".
        ends = (at for at in range(min(len(entry), _LONGEST_PATH)) if entry[at] == "/")
        shard = next((entry[:at] for at in ends if entry[:at] in info.shard_counts), None)
        if shard is None:
            unknown.append(entry)
            continue
        samples.setdefault(shard, {})[entry[len(shard) + 1 :]] = None
    return Excludes(shards, {shard: tuple(keys) for shard, keys in samples.items()}, unknown)


def split_text(
    parts: Mapping[str, Sequence[str]], exclude: Sequence[str] = (), config: str | None = None
) -> str:
    """Returns the content of a split config, with numbered names merged into brace patterns."""
    content = {
        "split_parts": {name: compress(shards) for name, shards in parts.items()},
        "exclude": compress(exclude),
    }
    if (config or DEFAULT_SPLIT).endswith(".json"):
        return json.dumps(content, indent=2, ensure_ascii=False)
    return dump_yaml(content)
