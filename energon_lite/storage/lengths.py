"""The length index: the tokens of every sample of a split part, as one memory-mapped array.

It lies beside the metadata, as `.nv-meta/energon_lite/lengths/NAME/PART.npy`, with `PART.json`,
which says of which data it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.nvmeta import META
from energon_lite.storage.tar_index import write_atomically

Int64Array = npt.NDArray[np.int64]


def lengths_path(root: Path, part: str, name: str) -> Path:
    """Gives where the index `name` of a split part lies.

    Raises:
        ValueError: The name is none of a folder.
    """
    if not name or name in (".", "..") or set("/\\") & set(name):
        raise ValueError(f"{name!r} is no name of a length index; it names a folder, as 'qwen2'")
    return root / META / "energon_lite" / "lengths" / name / f"{part}.npy"


def _facts_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".npy") + ".json")


def write_lengths(root: Path, part: str, name: str, lengths: Int64Array, data: str) -> Path:
    """Writes an index; complete, or not at all.

    Args:
        root: folder of the dataset.
        part: the split part.
        name: of the index, for example that of a tokenizer.
        lengths: tokens of each sample that is not excluded, shape (N,), in the order of the part.
        data: hash of the data, to notice that they changed.

    Returns:
        The file of the lengths.

    Raises:
        ValueError: `lengths` are no integers of at least 0, or have another shape.
    """
    path = lengths_path(root, part, name)
    checked = np.asarray(lengths)
    if checked.ndim != 1 or not (np.issubdtype(checked.dtype, np.integer) or not len(checked)):
        raise ValueError(
            f"lengths have shape {checked.shape} and type {checked.dtype}; give integers, (N,)"
        )
    if len(checked) and checked.min() < 0:
        index = int(np.argmin(checked))
        raise ValueError(f"the length of sample {index} is {checked[index]}; it must be at least 0")
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = _facts_path(path)
    # Until all is written there is no index: lengths without their facts are none.
    facts.unlink(missing_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        np.save(file, checked.astype(np.int64), allow_pickle=False)
    temporary.replace(path)
    write_atomically(facts, json.dumps({"data": data, "samples": len(checked)}).encode())
    return path


def read_lengths(root: Path, part: str, name: str, num_samples: int, data: str) -> Int64Array:
    """Opens an index.

    Args:
        root: folder of the dataset.
        part: the split part.
        name: of the index.
        num_samples: samples that it must have.
        data: hash of the data that it must be of.

    Returns:
        Tokens of each sample, shape (N,), memory-mapped.

    Raises:
        FileNotFoundError: There is no such index.
        DatasetFormatError: It is of other data, or damaged.
    """
    path = lengths_path(root, part, name)
    try:
        facts: Any = json.loads(_facts_path(path).read_text(encoding="utf-8"))
        lengths: Int64Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: there is no length index {name!r} for split part {part!r}; write it, or "
            "leave `lengths` out to have lengths measured"
        ) from None
    except (ValueError, OSError, EOFError) as error:
        raise DatasetFormatError(
            f"{path}: no readable length index ({error}); write it anew"
        ) from None
    if not isinstance(facts, dict) or lengths.ndim != 1 or lengths.dtype != np.int64:
        raise DatasetFormatError(
            f"{path}: no length index, but {lengths.dtype} of shape {lengths.shape}; write it anew"
        )
    counts = {facts.get("samples"), len(lengths)}
    if counts != {num_samples}:
        raise DatasetFormatError(
            f"{path}: the length index is of {' and '.join(map(str, counts - {num_samples}))} "
            f"samples, the split part has {num_samples} now; write it anew"
        )
    if facts.get("data") != data:
        raise DatasetFormatError(
            f"{path}: the length index is of other data with as many samples (their hash was "
            f"{facts.get('data')!r} and is {data!r} now); write it anew"
        )
    return lengths
