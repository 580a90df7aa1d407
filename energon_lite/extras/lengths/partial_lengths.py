"""The part of a length index that was measured so far, whatever becomes of the process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np

from energon_lite.core.arrays import Int64Array
from energon_lite.extras.stores.owned_folders import work_folder
from energon_lite.formats.length_files import check_place, lengths_path, write_lengths
from energon_lite.storage import files

_UNKNOWN = -1


class PartialLengths:
    """Lengths of N samples in R resources, in a file that is mapped into memory.

    It resumes from what an interrupted process left, if that was of the same data and encoder.

    Args:
        root: folder of the dataset.
        part: the split part.
        name: of the index.
        num_samples: N.
        resources: names of the R resources.
        data: hash of the data.
        encoder: names what measures.

    Raises:
        PermissionError: The place of the index cannot be written to.
    """

    def __init__(
        self,
        root: PurePath,
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
        own = work_folder(path.parent)
        self._path = own / f"{path.name}.partial"
        self._facts_path = own / f"{path.name}.partial.json"
        check_place(root, name)
        try:
            files.make_folder(path.parent)
            files.write_atomically(path.with_suffix(".try"), b"")
            files.remove(path.with_suffix(".try"))
        except OSError as error:
            raise PermissionError(
                f"{path.parent} cannot be written to ({error.strerror}): no place for the length "
                f"index {name!r} of {root}. Write it elsewhere with --meta-dir DIR "
                f"(meta_dir=...), and read it as lengths='DIR/{name.rpartition('/')[2]}'"
            ) from None
        shape = (num_samples, len(self._resources))
        num_bytes = 8 * shape[0] * shape[1]
        facts = {"data": data, "encoder": encoder, "resources": list(resources), "shape": shape}
        text = json.dumps(facts).encode()
        try:
            is_left = files.read_file(self._facts_path, len(text)) == text
            is_left &= files.size_of(self._path) == num_bytes
        except (OSError, ValueError):
            is_left = False
        if not is_left:
            self._remove()
        self._lengths = files.mapped_array(self._path, shape)
        if not is_left:
            self._lengths[:] = _UNKNOWN
            self._lengths.flush()
            # Written last: with it the lengths count.
            files.write_atomically(self._facts_path, text)

    def _remove(self) -> None:
        files.remove(self._facts_path)
        files.remove(self._path)

    def missing(self) -> Int64Array:
        """Returns the numbers of samples that are not measured yet, rising."""
        return np.flatnonzero(self._lengths[:, 0] == _UNKNOWN)

    def put(self, samples: Int64Array, lengths: Int64Array) -> None:
        """Records what was measured.

        Args:
            samples: shape (n,); their numbers in the part.
            lengths: shape (n, R), each at least 0.
        """
        self._lengths[samples] = lengths

    def finish(self) -> PurePath:
        """Writes the index, and removes the partial one."""
        columns = np.ascontiguousarray(self._lengths.T)
        arrays = dict(zip(self._resources, columns, strict=True))
        path = write_lengths(*self._target, arrays, self._data, self._encoder)
        self._remove()
        return path
