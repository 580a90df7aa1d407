"""A prepared folder as a tree of files: which there are, and where in a shard each of them lies."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

from energon_lite.extras.stores.open_tars import OpenTars
from energon_lite.formats.nvmeta import is_utf8, read_info
from energon_lite.formats.tar import sample_headers, split_name
from energon_lite.storage.files import absolute, real_path
from energon_lite.storage.local_paths import local_path

SAME_KEY = "WARNING_SAME_KEY_IN_MULTIPLE_TAR_FILES"
_KEYS_PER_QUERY = 5000
_AFTER_SLASH = chr(ord("/") + 1)  # "a/" <= key < "a0" is every key in the folder a
_LAST = "\U0010ffff"
_HIDDEN = ("", ".", "..")  # names that no folder can show


class FilePlace(NamedTuple):
    """The place of the content of a file.

    Attributes:
        shard: number of the tar; -1 for a file that lies in none.
        offset: first byte in the tar.
        size: number of bytes.
        text: content of a file that lies in no tar.
    """

    shard: int
    offset: int
    size: int
    text: bytes = b""


class DatasetFiles:
    """The files of a dataset: its parts, as `KEY.PART`, or as `KEY/PART` with a folder per sample.

    A key with slashes lies in folders. Where several samples have one key, which only datasets of
    old versions can have, the files are those of the first shard, and beside them lies a file whose
    name ends with `WARNING_SAME_KEY_IN_MULTIPLE_TAR_FILES`, and which lists the shards.

    Nothing but the list of shards is kept in memory; each method asks `index.sqlite`. Methods may
    be called from any thread, also after a fork.

    Args:
        path: the dataset's folder.
        sample_folders: whether each sample is a folder.
        allow_slow: whether a dataset whose index lacks the parts is accepted. The headers of each
            sample are then read from its tar, so samples must be folders.

    Raises:
        FileNotFoundError: The folder is not prepared, or has no index.
        ValueError: The index lacks the parts, and `allow_slow` or `sample_folders` is not set.
    """

    def __init__(
        self, path: str | os.PathLike[str], sample_folders: bool = False, allow_slow: bool = False
    ) -> None:
        self.root = real_path(absolute(local_path(path)))
        self.sample_folders = sample_folders
        self.shards = tuple(read_info(self.root).shard_counts)
        self._tars = OpenTars(self.root, self.shards)
        index = self._tars.index()
        if "samples" not in index.tables:
            raise index.error("has no table 'samples'")
        self._has_parts = "sample_parts" in index.tables
        if not self._has_parts and not (allow_slow and sample_folders):
            raise ValueError(
                f"{index.path} was made by an old version, and does not list the parts of samples. "
                f"Run `energon-lite prepare {self.root} --tar-index-only`, or use --allow-slow "
                "together with --sample-folders, which reads the tar for each folder"
            )
        # `tar cf x.tar ./` puts "./" before each name.
        is_dotted = not self._has_keys("", "./") and not self._has_keys("." + _AFTER_SLASH, _LAST)
        self._prefix = "./" if is_dotted else ""

    def names(self, folder: str) -> list[str]:
        """Returns the names in a folder, in the order of their keys.

        Args:
            folder: path below the root, such as "a/b"; the root is "".

        Raises:
            FileNotFoundError: There is no such folder.
        """
        start = self._prefix + (f"{folder}/" if folder else "")
        found = dict.fromkeys(self._names_below(start))
        if folder and self.sample_folders:
            found.update(dict.fromkeys(self._sample_files(self._prefix + folder)))
        if folder and not found:
            raise FileNotFoundError(errno.ENOENT, "no such folder", folder)
        return [name for name in found if name not in _HIDDEN and "\0" not in name]

    def is_folder(self, path: str) -> bool:
        """Returns whether there is a folder of this path."""
        if not is_utf8(path):
            return False
        path = self._prefix + path
        is_sample = self.sample_folders and self._has_keys(path, path + "\0")
        return path == self._prefix or is_sample or self._has_keys(f"{path}/", path + _AFTER_SLASH)

    def find(self, path: str) -> FilePlace | None:
        """Returns where a file lies; None where there is no file of this path."""
        if not is_utf8(path):
            return None
        if self.sample_folders:
            key, _, part = path.rpartition("/")
        else:
            end = path.find(".", path.rfind("/") + 1)
            key, part = path[:end], path[end + 1 :]
        if not part or not key:
            return None
        return self._sample_files(self._prefix + key).get(part)

    def read(self, place: FilePlace, size: int, offset: int) -> bytes:
        """Reads up to `size` bytes of a file, from byte `offset` of it on.

        Raises:
            OSError: The tar cannot be read.
            DatasetFormatError: It is shorter than the index states, or is not the one of the index.
        """
        if place.shard < 0:
            return place.text[offset : offset + size]
        size = max(0, min(size, place.size - offset))
        return self._tars.read(place.shard, place.offset + min(offset, place.size), size)

    def _has_keys(self, start: str, stop: str) -> bool:
        query = "SELECT 1 FROM samples WHERE sample_key >= ? AND sample_key < ? LIMIT 1"
        return bool(self._tars.index().rows(query, (start, stop), int))

    def _sample_files(self, key: str) -> dict[str, FilePlace]:
        """Returns the files of a sample by the names of their parts; none without the sample."""
        index = self._tars.index()
        samples = index.rows(
            "SELECT tar_file_id, sample_index, byte_offset, byte_size FROM samples "
            "WHERE sample_key = ? ORDER BY tar_file_id, sample_index", (key,), int, int, int, int,
        )  # fmt: skip
        lines = [f"{key!a} is the key of several samples. Shown is the first one:"]
        for number, *_ in samples:
            if not 0 <= number < len(self.shards):
                raise index.error(f"names a shard {number} of {len(self.shards)}")
            lines.append(self.shards[number])
        files = {
            part: FilePlace(sample[0], offset, size)
            for sample in samples[:1]
            for part, offset, size in self._parts(*sample)
        }
        if len(samples) > 1:
            text = "".join(f"{line}\n" for line in lines).encode()
            files[SAME_KEY] = FilePlace(-1, 0, len(text), text)
        return files

    def _parts(
        self, tar_file_id: int, sample_index: int, offset: int, size: int
    ) -> list[tuple[str, int, int]]:
        """Returns (part, offset, size) of the parts of a sample, in the order of the tar."""
        if self._has_parts:
            return self._tars.index().rows(
                "SELECT part_name, content_byte_offset, content_byte_size FROM sample_parts "
                "WHERE tar_file_id = ? AND sample_index = ? ORDER BY content_byte_offset",
                (tar_file_id, sample_index), str, int, int,
            )  # fmt: skip
        whole = self._tars.read(tar_file_id, offset, size)
        headers = sample_headers(whole, 0, len(whole), offset)
        named = ((split_name(header.name), header) for header in headers)
        return [(name[1], header.data, header.size) for name, header in named if name is not None]

    def _names_below(self, folder: str) -> Iterator[str]:
        """Yields the names in a folder: files of samples, and folders without what is in them.

        `folder` is the beginning of the keys: "" or "a/b/".
        """
        index = self._tars.index()
        columns, table = "''", "samples"
        if not self.sample_folders:
            columns = "group_concat(part_name, '/')"
            table = "samples CROSS JOIN sample_parts USING (tar_file_id, sample_index)"
        start, stop = folder, folder[:-1] + _AFTER_SLASH if folder else _LAST
        num_rows = _KEYS_PER_QUERY
        while start < stop and num_rows == _KEYS_PER_QUERY:
            rows = index.rows(
                f"SELECT sample_key, {columns}, count(DISTINCT samples.rowid) FROM {table} "
                "WHERE sample_key >= ? AND sample_key < ? GROUP BY sample_key ORDER BY sample_key "
                f"LIMIT {_KEYS_PER_QUERY}", (start, stop), str, str, int,
            )  # fmt: skip
            num_rows = len(rows)
            for key, parts, num_samples in rows:
                if key < start:  # in a folder that was named
                    continue
                name, slash, _ = key[len(folder) :].partition("/")
                start = folder + name + _AFTER_SLASH if slash else key + "\0"
                if slash or self.sample_folders:
                    yield name
                else:
                    twice = [SAME_KEY] if num_samples > 1 else []
                    yield from (f"{name}.{part}" for part in [*sorted(parts.split("/")), *twice])
