"""What a prepared folder has, from its `.nv-meta` alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError
from energon_lite.storage.files import is_there
from energon_lite.storage.jsonl import LineReader, is_jsonl, line_index_path
from energon_lite.storage.local_paths import local_path
from energon_lite.storage.nvmeta import DatasetInfo, SplitFile, read_dataset_config, read_info
from energon_lite.storage.sqlite import IndexDatabase


def dataset_info(
    path: str | os.PathLike[str],
    *,
    split_config: str | None = None,
    dataset_config: str | None = None,
) -> dict[str, Any]:
    """Describes a prepared folder, or a JSONL file, in plain values, ready for JSON.

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
    if is_jsonl(root):
        return lines_info(root)
    info = read_info(root)
    return {
        "name": root.resolve().name,
        "path": str(root),
        "energon_version": info.energon_version,
        "samples": sum(info.shard_counts.values()),
        "shards": len(info.shard_counts),
        "size_bytes": _size(root, info),
        "dataset": _dataset(root, dataset_config),
        "parts": _part_table(root),
        "splits": _splits(root, info, split_config),
    }


def lines_info(path: Path) -> dict[str, Any]:
    """Describes a JSONL file, as `dataset_info`; without an index it is read once.

    Raises:
        FileNotFoundError: There is no such file.
        DatasetFormatError: Its index is of another content.
    """
    reader = LineReader(path, max_open=0)
    samples, size = reader.num_samples, reader.size_bytes
    dataset = dict.fromkeys(("field_map", "sample_loader", "subflavors"))
    return {
        "name": path.resolve().name,
        "path": str(path),
        "energon_version": None,
        "samples": samples,
        "shards": 1,
        "size_bytes": size,
        "dataset": {
            "kind": "class", "module": "megatron.energon",
            "class": "DefaultCrudeJsonlDatasetFactory", **dataset,
        },
        "parts": {"json": {"count": samples, "size_bytes": size}},
        "splits": {},
        "is_indexed": is_there(line_index_path(path)),
    }  # fmt: skip


def _size(root: Path, info: DatasetInfo) -> int | None:
    try:
        return sum((root / shard).stat().st_size for shard in info.shard_counts)
    except FileNotFoundError:
        return None


def _dataset(root: Path, config: str | None) -> dict[str, Any] | None:
    try:
        value = read_dataset_config(root, config)
    except FileNotFoundError:
        if config is not None:
            raise
        return None
    sample_type = value.get("sample_type")
    reference = sample_type if isinstance(sample_type, dict) else value
    return {
        "kind": "samples" if isinstance(sample_type, dict) else "class",
        "module": reference.get("__module__"),
        "class": reference.get("__class__"),
        "field_map": value.get("field_map"),
        "sample_loader": value.get("sample_loader"),
        "subflavors": value.get("subflavors"),
    }


def _part_table(root: Path) -> dict[str, dict[str, int]] | None:
    try:
        with IndexDatabase(root) as index:
            sizes = index.part_sizes()
    except FileNotFoundError:
        return None
    if sizes is None:
        return None
    return {name: {"count": count, "size_bytes": size} for name, (count, size) in sizes.items()}


def _splits(root: Path, info: DatasetInfo, config: str | None) -> dict[str, dict[str, Any]]:
    total = sum(info.shard_counts.values())
    splits: dict[str, dict[str, Any]] = {}
    try:
        file = SplitFile(root, info, config)
    except FileNotFoundError:
        if config is not None:
            raise
        return splits
    for name in file.names:
        try:
            part = file.part(name)
        except EmptyDatasetError:
            splits[name] = {"shards": 0, "samples": 0, "excluded_samples": 0, "share": 0.0}
            continue
        except DatasetFormatError as error:
            splits[name] = {"error": str(error)}
            continue
        samples = sum(part.counts)
        splits[name] = {
            "shards": len(part.shards),
            "samples": samples,
            "excluded_samples": sum(len(keys) for keys in part.excluded.values()),
            "share": samples / total if total else 0.0,
        }
    return splits
