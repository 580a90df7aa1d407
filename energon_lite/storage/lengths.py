"""The length index: the tokens of every sample of a split part, as one memory-mapped array.

It lies beside the metadata, as `.nv-meta/energon_lite/lengths/NAME/PART.npy`, with `PART.json`,
which says of which data it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage.nvmeta import META

Int64Array = npt.NDArray[np.int64]


def lengths_path(root: Path, part: str, name: str) -> Path:
    """Gives where the index `name` of a split part lies."""
    return root / META / "energon_lite" / "lengths" / name / f"{part}.npy"


def write_lengths(root: Path, part: str, name: str, lengths: Int64Array, data: str) -> Path:
    """Writes an index; complete, or not at all.

    Args:
        root: folder of the dataset.
        part: the split part.
        name: of the index, for example that of a tokenizer.
        lengths: tokens of each sample that is not excluded, shape (N,), in the order of the part.
        data: hash of the data, to notice that they changed.
    """
    path = lengths_path(root, part, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({"data": data, "samples": len(lengths)}))
    temporary = path.with_suffix(".tmp.npy")
    np.save(temporary, np.asarray(lengths, dtype=np.int64), allow_pickle=False)
    temporary.replace(path)
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
        facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        lengths: Int64Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: there is no length index {name!r} for split part {part!r}; write it, or "
            "leave `lengths` out to have lengths measured"
        ) from None
    except (ValueError, OSError) as error:
        raise DatasetFormatError(f"{path}: no readable length index ({error})") from None
    if facts != {"data": data, "samples": num_samples} or lengths.shape != (num_samples,):
        raise DatasetFormatError(
            f"{path}: the length index is of {facts.get('samples')} samples of other data; the "
            f"split part has {num_samples} now. Write it anew"
        )
    if lengths.dtype != np.int64:
        raise DatasetFormatError(f"{path}: lengths are {lengths.dtype}, not int64")
    return lengths
