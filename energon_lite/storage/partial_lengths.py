"""A length index on its way: what is measured stays, whatever becomes of the process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from energon_lite.storage.files import read_file, write_atomically
from energon_lite.storage.lengths import Int64Array, lengths_path, write_lengths

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
            self._lengths = np.lib.format.open_memmap(
                self._path, mode="w+", dtype=np.int64, shape=shape
            )
            self._lengths[:] = _UNKNOWN
            self._lengths.flush()
            # Written last: with it the lengths count.
            write_atomically(self._facts_path, text)

    def _is_left(self, facts: bytes, shape: tuple[int, int]) -> bool:
        try:
            if read_file(self._facts_path) != facts:
                return False
            self._lengths = np.lib.format.open_memmap(self._path, mode="r+")
        except (OSError, ValueError):
            return False
        return self._lengths.shape == shape and self._lengths.dtype == np.int64

    def missing(self) -> Int64Array:
        """Gives the numbers of samples that are not measured yet, rising."""
        found: Int64Array = np.flatnonzero(self._lengths[:, 0] == _UNKNOWN)
        return found

    def put(self, samples: Int64Array, lengths: Int64Array) -> None:
        """Notes what was measured.

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


def _make_writable(folder: Path, root: Path, name: str) -> None:
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
