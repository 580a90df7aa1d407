"""The metadata of a prepared dataset: the `.nv-meta` folder, and the tar indexes.

The files are Energon's. Energon refuses keys that it does not know, so nothing of ours goes into
them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError, did_you_mean
from energon_lite.core.seeds import key_of
from energon_lite.formats.tar import BLOCK
from energon_lite.names.energon_modules import import_name
from energon_lite.storage import files
from energon_lite.storage.braces import check_num_names, expand
from energon_lite.storage.files import is_there, map_file, warn_once, write_atomically
from energon_lite.storage.yaml import YamlMap, check_keys, dump_config, load_yaml

META = ".nv-meta"
INFO_JSON = ".info.json"
INFO_YAML = ".info.yaml"
INDEX_UUID = "index.uuid"
INDEX_SQLITE = "index.sqlite"
DEFAULT_SPLIT = "split.yaml"
DEFAULT_DATASET = "dataset.yaml"
# 2 ** 40 samples take 512 TiB of tar headers; sums of them must not overflow.
_MAX_SAMPLES = 1 << 40
# Each part is opened on its own, which takes time in proportion to the whole file.
MAX_PARTS = 1000
_LONGEST_PATH = 4096
_CONVERT = "energon_lite.extras.prepare.other_data:how_to_convert"


# ------------------------------------------------------------------------------------ .tar.idx


def index_path(shard: PurePath) -> PurePath:
    """Returns the path of a shard's index: `x.tar` has `x.tar.idx`."""
    return shard.with_suffix(".tar.idx")


def fingerprint(
    root: PurePath, shards: tuple[str, ...], counts: tuple[int, ...], rest: object
) -> tuple[str, list[int]]:
    """Hashes what the data is: shard names, sample counts, sizes in bytes.

    Args:
        root: the folder of the dataset.
        shards: the names of the shards.
        counts: the samples of each.
        rest: what else is hashed.

    Returns:
        The hash, and the bytes of each shard.

    Raises:
        FileNotFoundError: A shard is missing.
    """
    sizes = files.sizes_of(root, shards)
    if -1 in sizes:
        raise FileNotFoundError(
            f"{root / shards[sizes.index(-1)]}: listed in {root / META} but not there; restore "
            "the file, or prepare the dataset again"
        )
    digest = key_of("data", shards, counts, tuple(sizes), rest) & (2**64 - 1)
    return f"{digest:016x}", sizes


def check_indexes(root: PurePath, shards: tuple[str, ...], counts: tuple[int, ...]) -> None:
    """Checks that each shard has an index of the right size.

    Raises:
        FileNotFoundError: An index is missing.
        DatasetFormatError: An index has not the size that the sample count asks for.
    """
    sizes = files.sizes_of(root, (index_path(PurePath(shard)) for shard in shards))
    for shard, count, size in zip(shards, counts, sizes, strict=True):
        if size != 8 * (count + 1):
            read_index(root / shard, count)  # raises


def read_index(shard: PurePath, count: int) -> Int64Array:
    """Reads where the samples of a shard begin.

    Args:
        shard: path of the tar.
        count: number of samples that it must have.

    Returns:
        Shape (count + 1,): sample i is at bytes [i] to [i + 1]. The first value is always 0: a
        folder entry before the first sample belongs to it.

    Raises:
        FileNotFoundError: There is no index.
        DatasetFormatError: The index does not fit `count`, or its values do not increase, or are
            no multiples of 512.
    """
    path = index_path(shard)
    try:
        raw = map_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; {reindex(shard)}") from None
    if len(raw) != 8 * (count + 1):
        entries = f"{len(raw) // 8 - 1} samples" if len(raw) % 8 == 0 else "a broken number"
        raise DatasetFormatError(
            f"{path}: {len(raw)} bytes are the index of {entries}, where {META}/.info.json has "
            f"{count} samples; {reindex(shard)}"
        )
    return checked_offsets(np.frombuffer(raw, dtype="<i8"), path, shard)


def checked_offsets(raw: Int64Array, path: PurePath, shard: PurePath) -> Int64Array:
    """Returns the offsets of a shard, from 0, if they can be right.

    Args:
        raw: shape (count + 1,); as they are stored.
        path: the file that has them.
        shard: path of the tar.

    Raises:
        DatasetFormatError: The values do not increase, or are no multiples of 512.
    """
    offsets: Int64Array = raw.astype(np.int64, copy=False)
    if offsets[0]:
        offsets = offsets.copy()
        offsets[0] = 0
    for is_wrong, what in (
        (offsets[1:] <= offsets[:-1], "before its first byte {}"),
        (offsets[1:] % BLOCK > 0, f"which is no multiple of {BLOCK}"),
    ):
        if is_wrong.any():
            at = int(is_wrong.argmax())
            raise DatasetFormatError(
                f"{path}: sample {at} would end at byte {offsets[at + 1]}, "
                f"{what.format(offsets[at])}; {reindex(shard)}"
            )
    return offsets


def reindex(shard: PurePath) -> str:
    """Returns what to do about a shard whose index is wrong."""
    root = next((folder for folder in shard.parents if files.is_folder(folder / META)), "PATH")
    return f"run `energon-lite prepare {root} --tar-index-only`"


def write_index(shard: PurePath, offsets: Sequence[int] | Int64Array) -> None:
    """Writes the index of a shard at once.

    Args:
        shard: path of the tar; its permissions, plus read and write for the owner, are taken.
        offsets: first byte of each sample, then the byte after the last member.
    """
    write_atomically(index_path(shard), np.asarray(offsets, dtype="<u8").tobytes(), like=shard)


# ----------------------------------------------------------------------------- config files


def is_prepared(root: PurePath) -> bool:
    """Returns whether `root` is a folder with a written `.info.json` or `.info.yaml`."""
    return is_there(root / META / INFO_JSON) or is_there(root / META / INFO_YAML)


def not_prepared(root: PurePath) -> FileNotFoundError | DatasetFormatError:
    """Returns the error of a path that is no prepared dataset."""
    text, prepare = f"{root} is not a prepared dataset", f"run `energon-lite prepare {root}`"
    if not is_there(root):
        return FileNotFoundError(f"{text}: it does not exist; check the path")
    if not files.is_folder(root):
        return FileNotFoundError(no_folder(root))
    if is_there(root / META / INDEX_SQLITE):
        return DatasetFormatError(
            f"{root} is a filesystem dataset: files without samples. Let a cooker read them, by "
            f"`aux: {{name: filesystem://{root}}}`; if it has tars, {prepare}"
        )
    below = [name.rstrip("/") for name in files.entries(root) if is_prepared(root / name)]
    if below:
        more = f" and {len(below) - 10} more" if len(below) > 10 else ""
        names = ", ".join(below[:10]) + more
        prepare = f"of its folders {names} are: give the path of one, or of a metadataset"
    answer = "" if below else import_name(_CONVERT)(root)
    remedy = f".{answer}" if answer else f"; {prepare}"
    return FileNotFoundError(f"{text} (no {META}/{INFO_JSON}){remedy}")


def no_folder(path: PurePath) -> str:
    """Describes a file in the place of a dataset's folder."""
    return (
        f"{path} is a file; give the path of a folder of .tar files, or of a .jsonl file."
        f"{import_name(_CONVERT)(path)}"
    )


def mapping(value: Any, place: str) -> YamlMap:
    """Returns a value that must be a mapping; a DatasetFormatError shows what it is instead."""
    if not isinstance(value, YamlMap):
        raise DatasetFormatError(f"{place}: must be a mapping, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Returns a value as error texts show it: in ASCII, and short."""
    try:
        text = ascii(value)
    except ValueError:  # an integer of thousands of digits
        text = type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def config_path(root: PurePath, name: str) -> PurePath:
    """Returns the path of a split or dataset config, which must be a .yaml or .json file."""
    if not isinstance(name, str) or not name.endswith((".yaml", ".json")):
        raise DatasetFormatError(
            f"{name!r:.80}: a split or dataset config is a .yaml or .json file; name one"
        )
    return root / f"{META}/{name}"


def load_config(
    root: PurePath, path: PurePath, remedy: str, keys: Sequence[str] = (), other: str = ""
) -> YamlMap:
    """Reads a file that a prepared folder should have.

    Args:
        root: the dataset's folder.
        path: the file.
        remedy: what to do where it is missing, or lacks a key.
        keys: of a mapping that it must have, and further ones that it may have; by default any.
        other: the suffix that the file may have instead.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: It is no such mapping.
    """
    try:
        # As in Energon, the last of two keys counts.
        value = load_yaml(path, lambda text: warn_once(f"{text}; the last one counts"))
    except (FileNotFoundError, NotADirectoryError):
        if other and is_there(path.with_suffix(other)):
            return load_config(root, path.with_suffix(other), remedy, keys)
        if is_prepared(root):
            raise FileNotFoundError(f"{path} is missing; {remedy}") from None
        raise not_prepared(root) from None
    config = mapping(value, str(path))
    if keys:
        check_keys(config, keys, "")
        if keys[0] not in config:
            raise DatasetFormatError(f"{config.place()}: key {keys[0]!r} is missing; {remedy}")
        mapping(config[keys[0]], config.place(keys[0]))
    return config


# ---------------------------------------------------------------------------------- .info.json


@dataclass(frozen=True)
class DatasetInfo:
    """The contents of `.info.json`.

    Attributes:
        shard_counts: number of samples of each shard, by its path relative to the dataset. The
            position of a shard is its `tar_file_id` in `index.sqlite`.
        energon_version: version of the program that wrote it, as written; None in old datasets.
    """

    shard_counts: dict[str, int]
    energon_version: str | None = None


def read_info(root: PurePath) -> DatasetInfo:
    """Reads `.info.json`, or the `.info.yaml` of an old dataset.

    Raises:
        FileNotFoundError: The folder is not prepared.
        DatasetFormatError: The file is invalid; names file and key.
    """
    path = root / f"{META}/{INFO_JSON}"
    again = f"run `energon-lite prepare {root} --force-overwrite`"
    info = load_config(root, path, again, ("shard_counts", "energon_version"), ".yaml")
    path, counts = PurePath(info.file), info["shard_counts"]
    for shard, count in counts.items():
        if type(count) is not int or not 0 < count <= _MAX_SAMPLES:
            place = counts.place(shard, f"shard_counts.{shard}")
            raise DatasetFormatError(
                f"{place}: a shard has a number of samples above 0, not {shown(count)}; {again}"
            )
        if shard.startswith("/") or (".." in shard and ".." in shard.split("/")):
            raise DatasetFormatError(
                f"{path}: shard {shown(shard)} lies outside of the dataset. Move the tar into "
                f"{root}, or link it there (`ln -s`), and {again}"
            )
        if "\0" in shard or not is_utf8(shard):
            raise DatasetFormatError(
                f"{path}: {shown(shard)} can be the name of no file; rename the tar, and {again}"
            )
    version = info.get("energon_version")
    return DatasetInfo(dict(counts), None if version is None else str(version))


def is_utf8(name: str) -> bool:
    """Returns whether a name is text: without bytes that are no UTF-8, and half surrogates."""
    return name.isascii() or name == name.encode("utf-8", "replace").decode()


def write_info(
    root: PurePath, info: DatasetInfo, also_yaml: bool = False, over: Hashable = None
) -> None:
    """Writes `.info.json`.

    Args:
        root: the dataset's folder.
        info: what to write.
        also_yaml: whether to write `.info.yaml` too; done anyway where one is there already.
        over: identity of the `.info.json` that it replaces; see `files.write_over`.

    Raises:
        FileExistsError: Another program wrote it meanwhile, in an object store.
    """
    content: dict[str, Any] = {"shard_counts": info.shard_counts}
    if info.energon_version is not None:
        content = {"energon_version": info.energon_version, **content}
    files.write_over(root / META / INFO_JSON, dump_config(content, INFO_JSON).encode(), over)
    old = root / META / INFO_YAML
    if also_yaml or is_there(old):
        write_atomically(old, dump_config(content, INFO_YAML).encode())


# -------------------------------------------------------------------------------- dataset.yaml


def read_dataset_config(root: PurePath, name: str | None = None) -> YamlMap:
    """Reads `dataset.yaml`, which defines how samples are made.

    Args:
        root: the dataset's folder.
        name: file name inside `.nv-meta`, by default `dataset.yaml`.

    Raises:
        FileNotFoundError: There is none; names the remedy.
        DatasetFormatError: The file is not a mapping.
    """
    path = config_path(root, name or DEFAULT_DATASET)
    remedy = (
        "it defines how samples are made. Write it (sample_type and field_map), "
        f"or run `energon-lite prepare {root} --force-overwrite` with --sample-type"
    )
    return load_config(root, path, remedy)


# ---------------------------------------------------------------------------------- split.yaml


@dataclass(frozen=True, eq=False)
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
    """The exclusions of a split config: shards, samples by shard, entries that fit neither."""

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

    def __init__(self, root: PurePath, info: DatasetInfo, config: str | None = None) -> None:
        self.root = root
        self.info = info
        path = config_path(root, config or DEFAULT_SPLIT)
        remedy = (
            "write it (split_parts: {train: [SHARDS]}), "
            f"or run `energon-lite prepare {root} --force-overwrite --split-ratio 8,1,1`"
        )
        other = ".json" if config is None else ""
        self._split = load_config(root, path, remedy, ("split_parts", "exclude"), other)
        num_parts = len(self._split["split_parts"])
        if num_parts > MAX_PARTS:
            raise DatasetFormatError(
                f"{self._split.place('split_parts')}: {num_parts:,} split parts, where "
                f"{MAX_PARTS:,} are the most; write several split files, and choose one with "
                "split_config"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all split parts, also of those without shards."""
        return tuple(self._split["split_parts"])

    @cached_property
    def excludes(self) -> Excludes:
        """Returns the exclusions of the split config.

        Raises:
            DatasetFormatError: The list is invalid.
        """
        shards: set[str] = set()
        samples: dict[str, dict[str, None]] = {}
        unknown: list[str] = []
        for entry in _expanded(self._split.get("exclude", []), self._split.place("exclude")):
            if entry in self.info.shard_counts:
                shards.add(entry)
                continue
            # A shard name may hold slashes, and so may a key: "a/b.tar/c/001" is shard "a/b.tar".
            ends = (at for at in range(min(len(entry), _LONGEST_PATH)) if entry[at] == "/")
            shard = next((entry[:at] for at in ends if entry[:at] in self.info.shard_counts), None)
            if shard is None:
                unknown.append(entry)
                continue
            samples.setdefault(shard, {})[entry[len(shard) + 1 :]] = None
        return Excludes(shards, {shard: tuple(keys) for shard, keys in samples.items()}, unknown)

    def listed(self, part: str) -> list[str]:
        """Returns the shards of a split part, excluded ones included.

        Raises:
            DatasetFormatError: There is no such part, or its list is invalid.
        """
        split, parts = self._split, self._split["split_parts"]
        if part not in parts:
            hint = did_you_mean(part, parts) if parts else " It has no split part at all."
            raise DatasetFormatError(f"{split.place()}: there is no split part {part!r}.{hint}")
        return _expanded(parts[part], parts.place(part, f"split_parts.{part}"))

    def part(self, part: str) -> SplitPart:
        """Returns which shards belong to a split part.

        Raises:
            EmptyDatasetError: No shard is left in the part.
            DatasetFormatError: There is no such part, a shard is not in `.info.json`, or the file
                is invalid; names file and key.
        """
        split, names, excludes = self._split, self.listed(part), self.excludes
        place = split["split_parts"].place(part, f"split_parts.{part}")
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
