"""What a metadataset has: the sources of each split, and their sizes."""

from __future__ import annotations

import os
from typing import Any

from energon_lite.core.errors import DatasetFormatError
from energon_lite.formats.known import format_of
from energon_lite.formats.nvmeta import SplitFile, read_info
from energon_lite.metadataset.nodes import Leaf, leaves
from energon_lite.metadataset.read import read_metadataset, split_names
from energon_lite.storage.local_paths import local_path


def metadataset_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describes a metadataset in plain values, ready for JSON.

    Returns:
        `name`, `path`, and `metadataset`: by split a list of its sources, each with `name`, `path`,
        `split_part`, and `shards` and `samples` of that part, or an `error`.

    Raises:
        FileNotFoundError: A metadataset is missing.
        DatasetFormatError: A file is wrong; names file, line and key.
    """
    file = local_path(path)
    splits = {
        split: [
            _source(folder)
            for leaf in leaves(read_metadataset(file, split))
            for folder in leaf.folders
        ]
        for split in split_names(file)
    }
    return {"name": file.name, "path": str(file), "metadataset": splits}


def _source(leaf: Leaf) -> dict[str, Any]:
    found = {"name": leaf.source_id, "path": str(leaf.path), "split_part": leaf.split_part}
    try:
        known = format_of(leaf.path)
        if known.only_part is not None:
            return {**found, "shards": 1, "samples": known.info(leaf.path)["samples"]}
        file = SplitFile(leaf.path, read_info(leaf.path), leaf.split_config)
        part = file.part(leaf.split_part)
    except (OSError, DatasetFormatError) as error:
        return {**found, "error": str(error)}
    return {**found, "shards": len(part.shards), "samples": sum(part.counts)}
