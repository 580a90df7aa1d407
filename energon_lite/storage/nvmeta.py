"""The `.nv-meta` folder and the tar indexes: what a prepared dataset says about itself.

The files are Energon's. It refuses keys that it does not know, so nothing of ours goes into them.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError, did_you_mean
from energon_lite.storage.braces import MAX_CHARACTERS, MAX_NAMES, compress, expand
from energon_lite.storage.files import is_there
from energon_lite.storage.files import write_atomically as write_atomically
from energon_lite.storage.tar_index import META as META
from energon_lite.storage.tar_index import check_index_size as check_index_size
from energon_lite.storage.tar_index import index_path as index_path
from energon_lite.storage.tar_index import read_index as read_index
from energon_lite.storage.tar_index import write_index as write_index
from energon_lite.storage.yaml import YamlMap, check_keys, dump_yaml, load_yaml

logger = logging.getLogger(__name__)

INFO_JSON = ".info.json"
INFO_YAML = ".info.yaml"
INDEX_UUID = "index.uuid"
DEFAULT_SPLIT = "split.yaml"
DEFAULT_DATASET = "dataset.yaml"
# 2 ** 40 samples take 512 TiB of tar headers; sums of them must not overflow.
_MAX_SAMPLES = 1 << 40
_LONGEST_PATH = 4096


@dataclass(frozen=True)
class DatasetInfo:
    """What `.info.json` holds.

    Attributes:
        shard_counts: number of samples of each shard, by its path relative to the dataset. The
            position of a shard is its `tar_file_id` in `index.sqlite`.
        energon_version: version of the program that wrote it, as written; None in old datasets.
    """

    shard_counts: dict[str, int]
    energon_version: str | None = None


@dataclass(frozen=True)
class SplitPart:
    """The shards of one split part, in order, with what is left out of them.

    Attributes:
        name: `train`, `val`, ...
        shards: paths relative to the dataset; a shard that is listed twice is there twice.
        counts: samples of each shard in its tar, excluded ones included.
        excluded: keys of the samples to leave out, by shard.
    """

    name: str
    shards: tuple[str, ...]
    counts: tuple[int, ...]
    excluded: dict[str, tuple[str, ...]] = field(default_factory=dict)


# ---------------------------------------------------------------------------------- .info.json


def is_prepared(root: Path) -> bool:
    """Tells whether `root` is a folder with a written `.info.json` or `.info.yaml`."""
    return is_there(root / META / INFO_JSON) or is_there(root / META / INFO_YAML)


@functools.lru_cache(maxsize=1000)
def warn_double(message: str) -> None:
    """Logs, once, that a file of `.nv-meta` has a key twice: as in Energon the last one counts."""
    logger.warning("%s; the last one counts", message)


def _mapping(value: Any, place: str, what: str) -> YamlMap:
    if not isinstance(value, YamlMap):
        raise DatasetFormatError(f"{place}: {what} must be a mapping, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    try:
        text = ascii(value)
    except ValueError:  # an integer of thousands of digits
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def read_info(root: Path) -> DatasetInfo:
    """Reads `.info.json`, or the `.info.yaml` of an old dataset.

    Raises:
        FileNotFoundError: The folder is not prepared.
        DatasetFormatError: The file is not as it must be; names file and key.
    """
    path = root / META / INFO_JSON
    if not is_there(path):
        path = root / META / INFO_YAML
    try:
        value = load_yaml(path, warn_double)
    except FileNotFoundError:
        raise FileNotFoundError(_unprepared(root)) from None
    info = _mapping(value, str(path), "the file")
    check_keys(info, ("energon_version", "shard_counts"), "")
    if "shard_counts" not in info:
        raise DatasetFormatError(f"{path}: key 'shard_counts' is missing; prepare {root} again")
    counts = _mapping(info["shard_counts"], info.place("shard_counts"), "it")
    for shard, count in counts.items():
        if type(count) is not int or not 0 < count <= _MAX_SAMPLES:
            place = counts.place(shard, "shard_counts")
            raise DatasetFormatError(
                f"{place}: a shard has a number of samples above 0, not {_shown(count)}; "
                f"run `energon-lite prepare {root} --force-overwrite`"
            )
        _check_shard_name(shard, path, root)
    version = info.get("energon_version")
    return DatasetInfo(dict(counts), None if version is None else str(version))


def _check_shard_name(name: str, path: Path, root: Path) -> None:
    """Refuses the name of a shard that lies outside of the dataset, or that no file can have."""
    if name.startswith("/") or (".." in name and ".." in name.split("/")):
        raise DatasetFormatError(
            f"{path}: shard {_shown(name)} lies outside of the dataset. Move the tar into {root}, "
            f"or link it there (`ln -s`), and run `energon-lite prepare {root} --force-overwrite`"
        )
    if "\0" in name or not (name.isascii() or is_utf8(name)):
        raise DatasetFormatError(
            f"{path}: {_shown(name)} can be the name of no file; rename the tar, and run "
            f"`energon-lite prepare {root} --force-overwrite`"
        )


def is_utf8(name: str) -> bool:
    """Returns whether a name is text: without bytes that are no UTF-8, and half surrogates."""
    return name.encode("utf-8", "replace") == name.encode("utf-8", "surrogatepass")


def _unprepared(root: Path) -> str:
    if not root.exists():
        return f"{root} does not exist"
    if not root.is_dir():
        return f"{root} is a file; a dataset is a folder of .tar files"
    return (
        f"{root} is not a prepared dataset (no {META}/{INFO_JSON}); "
        f"run `energon-lite prepare {root}`"
    )


def write_info(root: Path, info: DatasetInfo, also_yaml: bool = False) -> None:
    """Writes `.info.json`.

    Args:
        root: the dataset's folder.
        info: what to write.
        also_yaml: whether to write `.info.yaml` too; done anyway where one is there already.
    """
    content: dict[str, Any] = {"shard_counts": info.shard_counts}
    if info.energon_version is not None:
        content = {"energon_version": info.energon_version, **content}
    text = json.dumps(content, indent=2, ensure_ascii=False)
    write_atomically(root / META / INFO_JSON, text.encode())
    old = root / META / INFO_YAML
    if also_yaml or is_there(old):
        write_atomically(old, dump_yaml(content).encode())


# ---------------------------------------------------------------------------------- split.yaml


def config_path(root: Path, name: str) -> Path:
    """Gives the path of a split or dataset config, which must be a .yaml or .json file."""
    if not isinstance(name, str) or not name.endswith((".yaml", ".json")):
        raise DatasetFormatError(
            f"{name!r:.80}: a split or dataset config is a .yaml or .json file; name one"
        )
    return root / META / name


def _load_config(root: Path, path: Path, way_out: str) -> YamlMap:
    """Reads a config that a prepared folder should have."""
    try:
        value = load_yaml(path, warn_double)
    except FileNotFoundError:
        if not is_prepared(root):
            raise FileNotFoundError(_unprepared(root)) from None
        raise FileNotFoundError(f"{path} is missing; {way_out}") from None
    return _mapping(value, str(path), "the file")


def _load_split(root: Path, config: str | None) -> YamlMap:
    path = config_path(root, config or DEFAULT_SPLIT)
    if config is None and not is_there(path):
        other = path.with_suffix(".json")
        path = other if is_there(other) else path
    split = _load_config(
        root,
        path,
        "write it (split_parts: {train: [SHARDS]}), "
        f"or run `energon-lite prepare {root} --force-overwrite --split-ratio 8,1,1`",
    )
    check_keys(split, ("split_parts", "exclude"), "")
    if "split_parts" not in split:
        raise DatasetFormatError(f"{split.place()}: key 'split_parts' is missing")
    _mapping(split["split_parts"], split.place("split_parts"), "it")
    return split


def _expanded(value: Any, place: str) -> list[str]:
    """Gives the names that a list of brace patterns stands for."""
    if not isinstance(value, list):
        raise DatasetFormatError(f"{place}: must be a list of names, not {_shown(value)}")
    names: list[str] = []
    characters = 0
    for index, entry in enumerate(value):
        if not isinstance(entry, str):
            raise DatasetFormatError(
                f"{place}[{index}]: must be a name, not {_shown(entry)}; put it in quotes"
            )
        try:
            expanded = expand(entry)
        except ValueError as error:
            raise DatasetFormatError(
                f"{place}[{index}]: {error}; a brace that is part of a name is written \\{{ or \\}}"
            ) from None
        names += expanded
        # Names that are written out are bounded by the file.
        characters += sum(map(len, expanded)) if len(expanded) > 1 else 0
        if len(names) > MAX_NAMES or characters > MAX_CHARACTERS:
            raise DatasetFormatError(
                f"{place}[{index}]: up to here the list stands for {len(names):,} names, where "
                f"{MAX_NAMES:,} names and {MAX_CHARACTERS:,} characters are the most; write "
                "smaller ranges"
            )
    return names


def split_part_names(root: Path, config: str | None = None) -> tuple[str, ...]:
    """Gives the names of all split parts, also of those without shards.

    Args:
        root: the dataset's folder.
        config: file name inside `.nv-meta`; by default `split.yaml`, else `split.json`.

    Raises:
        FileNotFoundError: There is no such split config.
        DatasetFormatError: The file is not as it must be.
    """
    return tuple(_load_split(root, config)["split_parts"])


class Excludes(NamedTuple):
    """What a split config leaves out: shards, samples by shard, and entries that fit neither."""

    shards: set[str]
    samples: dict[str, list[str]]
    unknown: list[str]


def read_excludes(root: Path, info: DatasetInfo, config: str | None = None) -> Excludes:
    """Reads what a split config leaves out.

    Raises:
        FileNotFoundError: There is no such split config.
        DatasetFormatError: The file is not as it must be.
    """
    return _excludes(_load_split(root, config), info)


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
    return Excludes(shards, {shard: list(keys) for shard, keys in samples.items()}, unknown)


@functools.lru_cache(maxsize=1000)
def _warn_once(place: str, entry: str, num_entries: int) -> None:
    logger.warning(
        "%s: %r fits no shard and excludes nothing (%d such entries)", place, entry, num_entries
    )


def read_split_part(
    root: Path, info: DatasetInfo, part: str, config: str | None = None
) -> SplitPart:
    """Reads which shards belong to a split part.

    Args:
        root: the dataset's folder.
        info: what `read_info` gave.
        part: name of the split part.
        config: file name inside `.nv-meta`; by default `split.yaml`, else `split.json`.

    Raises:
        FileNotFoundError: There is no such split config.
        EmptyDatasetError: No shard is left in the part.
        DatasetFormatError: There is no such part, a shard is not in `.info.json`, or the file is
            not as it must be; names file and key.
    """
    split = _load_split(root, config)
    parts: YamlMap = split["split_parts"]
    if part not in parts:
        hint = did_you_mean(part, parts) if parts else " It has no split part at all."
        raise DatasetFormatError(f"{split.place()}: there is no split part {part!r}.{hint}")
    place = parts.place(part, "split_parts")
    names = _expanded(parts[part], place)
    excludes = _excludes(split, info)
    if excludes.unknown:
        _warn_once(split.place("exclude"), excludes.unknown[0], len(excludes.unknown))
    shards = tuple(name for name in names if name not in excludes.shards)
    for shard in shards:
        if shard not in info.shard_counts:
            hint = did_you_mean(shard, info.shard_counts)
            hint = hint if hint.startswith(" Did you mean") else ""
            raise DatasetFormatError(
                f"{place}: shard {shard!r} is not in {META}/{INFO_JSON}."
                f"{hint} Run `energon-lite prepare {root} --force-overwrite` after adding shards"
            )
    if not shards:
        why = "all of its shards are excluded" if names else "its list is empty"
        raise EmptyDatasetError(f"{place}: no shards in split part {part!r} ({why})")
    counts = tuple(info.shard_counts[shard] for shard in shards)
    inside = set(shards)
    kept = {s: tuple(keys) for s, keys in excludes.samples.items() if s in inside}
    return SplitPart(part, shards, counts, kept)


def split_text(
    parts: Mapping[str, Sequence[str]], exclude: Sequence[str] = (), config: str | None = None
) -> str:
    """Gives the content of a split config, with numbered names merged into brace patterns."""
    content = {
        "split_parts": {name: compress(shards) for name, shards in parts.items()},
        "exclude": compress(exclude),
    }
    if (config or DEFAULT_SPLIT).endswith(".json"):
        return json.dumps(content, indent=2, ensure_ascii=False)
    return dump_yaml(content)


def write_split(
    root: Path,
    parts: Mapping[str, Sequence[str]],
    exclude: Sequence[str] = (),
    config: str | None = None,
) -> None:
    """Writes a split config.

    Args:
        root: the dataset's folder.
        parts: shard names by split part.
        exclude: shard names, or `<shard name>/<sample key>`.
        config: file name inside `.nv-meta`, by default `split.yaml`.
    """
    path = config_path(root, config or DEFAULT_SPLIT)
    write_atomically(path, split_text(parts, exclude, config).encode())


# -------------------------------------------------------------------------------- dataset.yaml


def read_dataset_config(root: Path, name: str | None = None) -> YamlMap:
    """Reads `dataset.yaml`, which says how to make samples.

    Args:
        root: the dataset's folder.
        name: file name inside `.nv-meta`, by default `dataset.yaml`.

    Raises:
        FileNotFoundError: There is none; says how to make it.
        DatasetFormatError: The file is not a mapping.
    """
    path = config_path(root, name or DEFAULT_DATASET)
    return _load_config(
        root,
        path,
        "it says how to make samples. Write it (sample_type and field_map), "
        f"or run `energon-lite prepare {root} --force-overwrite` with --sample-type",
    )
