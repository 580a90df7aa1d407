"""A length index on its way: what is measured stays, whatever becomes of the process."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.storage.files import errors_of, open_own, read_file, write_atomically
from energon_lite.storage.lengths import check_lengths_place, lengths_path, write_lengths

_UNKNOWN = -1


class PartialLengths:
    """Lengths of N samples in R resources, in a file that is mapped into memory.

    It resumes what an interrupted process left, if that was of the same data and encoder.

    Args:
        root: folder of the dataset.
        part: the split part.
        name: of the index.
        num_samples: N.
        resources: names of the R resources.
        data: hash of the data.
        encoder: says who measures.

    Raises:
        PermissionError: The place of the index cannot be written to.
    """

    def __init__(
        self,
        root: Path,
        part: str,
        name: str,
        num_samples: int,
        resources: Sequence[str],
        data: str,
        encoder: str,
    ) -> None:
        self._target = (root, part, name)
        self._resources = tuple(resources)
        self._data = data
        self._encoder = encoder
        path = lengths_path(root, part, name)
        self._path = path.with_name(path.name + ".partial")
        self._facts_path = path.with_name(path.name + ".partial.json")
        _make_writable(path.parent, root, name)
        shape = (num_samples, len(self._resources))
        facts = {"data": data, "encoder": encoder, "resources": list(resources), "shape": shape}
        text = json.dumps(facts).encode()
        if not self._is_left(text, shape):
            self._facts_path.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            self._lengths = _mapped(self._path, shape)
            self._lengths[:] = _UNKNOWN
            self._lengths.flush()
            # Written last: with it the lengths count.
            write_atomically(self._facts_path, text)

    def _is_left(self, facts: bytes, shape: tuple[int, int]) -> bool:
        try:
            if read_file(self._facts_path, len(facts)) != facts:
                return False
            if self._path.stat().st_size != 8 * shape[0] * shape[1]:
                return False
            self._lengths = _mapped(self._path, shape)
        except (OSError, ValueError):
            return False
        return True

    def missing(self) -> Int64Array:
        """Returns the numbers of samples that are not measured yet, rising."""
        found: Int64Array = np.flatnonzero(self._lengths[:, 0] == _UNKNOWN)
        return found

    def put(self, samples: Int64Array, lengths: Int64Array) -> None:
        """Records what was measured.

        Args:
            samples: shape (n,); their numbers in the part.
            lengths: shape (n, R), each at least 0.
        """
        self._lengths[samples] = lengths

    def finish(self) -> Path:
        """Writes the index, and removes what was on its way to it."""
        arrays = {
            name: np.ascontiguousarray(self._lengths[:, i])
            for i, name in enumerate(self._resources)
        }
        path = write_lengths(*self._target, arrays, self._data, self._encoder)
        self._facts_path.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        return path


def _mapped(path: Path, shape: tuple[int, int]) -> np.memmap[Any, np.dtype[np.int64]]:
    """Maps a file into memory, for which there is room on the disk."""
    with errors_of(path), os.fdopen(open_own(path), "r+b") as file:
        # Where a disk is full, writing to a page without a place on it kills the process.
        os.posix_fallocate(file.fileno(), 0, max(1, 8 * shape[0] * shape[1]))
        return np.memmap(file, dtype=np.int64, mode="r+", shape=shape)


def _make_writable(folder: Path, root: Path, name: str) -> None:
    check_lengths_place(root, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PermissionError(
            f"{folder} cannot be written to ({error.strerror}): no place for the length index "
            f"{name!r} of {root}. Write it elsewhere with --meta-dir DIR (meta_dir=...), and "
            f"read it as lengths='DIR/{name.rpartition('/')[2]}'"
        ) from None
