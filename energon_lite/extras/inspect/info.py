"""The contents of a prepared folder, from its `.nv-meta` alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError
from energon_lite.formats.known import format_of
from energon_lite.formats.nvmeta import (
    DatasetInfo,
    SplitFile,
    SplitPart,
    read_dataset_config,
    read_info,
)
from energon_lite.formats.sqlite import IndexDatabase
from energon_lite.storage import files
from energon_lite.storage.byte_file import NotLocalError
from energon_lite.storage.local_paths import local_path


def dataset_info(
    path: str | os.PathLike[str],
    *,
    split_config: str | None = None,
    dataset_config: str | None = None,
) -> dict[str, Any]:
    """Describes a prepared folder, or a file of samples, in plain values, ready for JSON.

    Args:
        path: the folder or file.
        split_config: file name in `.nv-meta`, by default `split.yaml`.
        dataset_config: file name in `.nv-meta`, by default `dataset.yaml`.

    Returns:
        `name`, `path`, `energon_version`, `samples`, `shards`, `size_bytes` (of the tars; None
        where one is missing), `dataset` (class, module and fields of the samples, or None without
        a config), `parts` (members and bytes by part name, or None without an index of them),
        and `splits` (shards, samples, excluded samples and share of all samples by split part).

    Raises:
        FileNotFoundError: The folder is not prepared.
        DatasetFormatError: A file of `.nv-meta` is not as it must be.
    """
    root = local_path(path)
    info: dict[str, Any] = format_of(root).info(
        root, split_config=split_config, dataset_config=dataset_config
    )
    return info


def folder_info(
    root: PurePath, *, split_config: str | None = None, dataset_config: str | None = None
) -> dict[str, Any]:
    """Describes a prepared folder; see `dataset_info`."""
    info = read_info(root)
    return {
        "name": files.resolved(root).name,
        "path": str(root),
        "energon_version": info.energon_version,
        "samples": sum(info.shard_counts.values()),
        "shards": len(info.shard_counts),
        "size_bytes": _size(root, info),
        "dataset": _dataset(root, dataset_config),
        "parts": _part_table(root),
        "splits": _splits(root, info, split_config),
    }


def file_info(path: PurePath, **_: Any) -> dict[str, Any]:
    """Describes a file of samples, as `dataset_info`; without an index it is read once.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: Its index is of another content.
    """
    known = format_of(path)
    opened = known.open(path, max_open=0)
    samples, size = opened.reader.num_samples, opened.size_bytes
    return {
        "name": files.resolved(path).name,
        "path": str(path),
        "energon_version": None,
        "samples": samples,
        "shards": 1,
        "size_bytes": size,
        "dataset": _facts(
            {"__module__": "megatron.energon", "__class__": known.class_home.partition(":")[2]}
        ),
        "parts": {known.part: {"count": samples, "size_bytes": size}} if known.part else None,
        "splits": {},
        "is_indexed": known.is_indexed(path),
    }


def _size(root: PurePath, info: DatasetInfo) -> int | None:
    sizes = files.sizes_of(root, info.shard_counts)
    return None if -1 in sizes else sum(sizes)


def _dataset(root: PurePath, config: str | None) -> dict[str, Any] | None:
    with suppress(*_if_default(config)):
        return _facts(read_dataset_config(root, config))
    return None


def _if_default(config: str | None) -> Sequence[type[Exception]]:
    """Returns the error of a missing file; a file that the user named must be there."""
    return [FileNotFoundError] if config is None else []


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    sample_type: Any = config.get("sample_type")
    is_typed = isinstance(sample_type, dict)
    reference = sample_type if is_typed else config
    return {
        "kind": "samples" if is_typed else "class",
        "module": reference.get("__module__"),
        "class": reference.get("__class__"),
        **{name: config.get(name) for name in ("field_map", "sample_loader", "subflavors")},
    }


def _part_table(root: PurePath) -> dict[str, dict[str, int]] | None:
    with suppress(FileNotFoundError, NotLocalError), IndexDatabase(root) as index:
        sizes = index.part_sizes()
        if sizes is not None:
            return {name: {"count": n, "size_bytes": size} for name, (n, size) in sizes.items()}
    return None


def _splits(root: PurePath, info: DatasetInfo, config: str | None) -> dict[str, dict[str, Any]]:
    total = max(1, sum(info.shard_counts.values()))
    splits: dict[str, dict[str, Any]] = {}
    with suppress(*_if_default(config)):
        file = SplitFile(root, info, config)
        for name in file.names:
            try:
                part = file.part(name)
            except EmptyDatasetError:
                part = SplitPart(name, (), ())
            except DatasetFormatError as error:
                splits[name] = {"error": str(error)}
                continue
            splits[name] = {
                "shards": len(part.shards),
                "samples": sum(part.counts),
                "excluded_samples": sum(map(len, part.excluded.values())),
                "share": sum(part.counts) / total,
            }
    return splits
