"""Reads each tar once, in parallel, and keeps what it found in a file per shard.

A shard's file is the record from which a later run resumes. Only `rename_samples` changes a tar.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from zlib import crc32

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.media.media_headers import (
    MediaFile,
    MediaFilterConfig,
    MediaRows,
    has_pyav,
    media_rows,
)
from energon_lite.extras.prepare.choose_shards import Shard
from energon_lite.extras.prepare.index_writer import ShardRows
from energon_lite.extras.prepare.odd_parts import dotted_keys, numbered_parts
from energon_lite.formats.nvmeta import is_utf8
from energon_lite.formats.tar import NO_LINKS, TarError, iter_tar, split_name
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

# Appended to the name of a tar that `rename_samples` has replaced.
ORIGINAL = ".orig"
# Parts of a tar whose first bytes are hashed, to notice others under the same keys. With these and
# all keys, reading a tar of 20,000 samples takes 6 us of CPU for each instead of 5.
_NUM_PROBED, _PROBED_BYTES = 16, 1024


class ShardResult(NamedTuple):
    """The findings in a shard.

    Attributes:
        shard: the tar.
        rows: file with the rows of its samples and parts.
        size_bytes: size of the tar.
        is_resumed: whether an earlier run had read it.
        samples: number of samples.
        parts: number of members by part name.
        warning: what is odd about it, or "".
        content: a digest of its samples.
        media: files with media metadata, those that are unreadable, those that need PyAV; and the
            first error.
    """

    shard: Shard
    rows: Path
    size_bytes: int
    is_resumed: bool
    samples: int
    parts: dict[str, int]
    warning: str
    content: int
    media: tuple[int, int, int, str]


def _record_file(rows: Path) -> Path:
    return rows.with_suffix(".json")


def rows_path(folder: Path, name: str) -> Path:
    """Returns the file in `folder` for the rows of the shard `name`."""
    return folder / f"{hashlib.sha1(name.encode('utf-8', 'surrogateescape')).hexdigest()}.sqlite"


def kept_or_made(
    rows: Path, made_from: list[Any], make: Callable[[], tuple[ShardRows, dict[str, Any]]]
) -> tuple[dict[str, Any], bool]:
    """Takes what an earlier run found from its file, or finds it and writes the file.

    Args:
        rows: the file; beside it lies its record, with a checksum of both.
        made_from: what the rows must have been made from.
        make: returns the rows, and the record of them.

    Returns:
        The record, and whether an earlier run made it.
    """
    record_file = _record_file(rows)
    head = json.dumps([6, *made_from])  # the first number is the format of the files

    def with_sum(record: str) -> bytes:
        text = f"{head}\n{record}\n".encode()
        return text + b"%x" % crc32(files.map_file(rows), crc32(text))

    with suppress(FileNotFoundError, ValueError):
        stored = files.read_file(record_file)
        _, record, _ = stored.decode().split("\n")
        if stored == with_sum(record):
            return json.loads(record), True
    found, made = make()
    rows.parent.mkdir(parents=True, exist_ok=True)  # on another node of a cluster
    found.write(rows)
    files.write_atomically(record_file, with_sum(json.dumps(made)))
    return made, False


def index_shard(
    task: tuple[Shard, Path], media_filter: MediaFilterConfig | None = None
) -> ShardResult:
    """Reads a tar and writes its rows, or takes those of an earlier run.

    Args:
        task: the tar, and the folder that the rows go to.
        media_filter: which of its files get media metadata; by default none.

    Raises:
        DatasetFormatError: The tar is unreadable, empty, or its members are not in the order of
            samples; names file, key and members.
        OSError: The tar cannot be read, also after several tries.
    """
    shard, folder = task
    rows, make = rows_path(folder, shard.name), partial(_find_rows, shard.path, media_filter)

    def indexed() -> ShardResult:
        size_bytes, identity = seen(shard.path)
        made_from = [shard.name, size_bytes, identity, *made_by(media_filter)]
        record, is_resumed = kept_or_made(rows, made_from, make)
        return ShardResult(shard, rows, size_bytes, is_resumed, **record)

    return files.retried(indexed, shard.path)


def seen(path: PurePath) -> tuple[int, Any]:
    """Returns the size of a file, and what differs where it is another one.

    Raises:
        FileNotFoundError: There is no such file.
    """
    status = files.status_of(path)
    if status is None:
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return status.size_bytes, status.identity


def _find_rows(
    path: PurePath, media_filter: MediaFilterConfig | None
) -> tuple[ShardRows, dict[str, Any]]:
    """Finds the rows of a tar, and the fields of a `ShardResult` about them."""
    before = seen(path)
    found, end, warning = scan_shard(path)
    members = (
        MediaFile(f"{found.samples[index][1]}.{part}", path, offset, size)
        for index, part, offset, size in found.parts
    )
    media = MediaRows([], 0, 0, "") if media_filter is None else media_rows(members, media_filter)
    if seen(path) != before:
        raise DatasetFormatError(f"{path}: changed while it was read; prepare again")
    if end == before[0]:
        uncut = f"{path}: has no end-of-archive mark; it may have been cut off"
        warning = "; ".join(filter(None, [warning, uncut]))
    return found._replace(media=media.rows), {
        "samples": len(found.samples),
        "parts": Counter(part for _, part, _, _ in found.parts),
        "warning": warning,
        "content": _shard_digest(path, found),
        "media": [len(media.rows), *media[1:]],
    }


def _shard_digest(path: PurePath, rows: ShardRows) -> int:
    """Hashes the samples of a tar: their keys, parts and offsets, and some of the bytes.

    A tar that was written again with other samples, or in another order, has another hash, even if
    its size is the same.
    """
    found = blake2b(json.dumps(rows[:2]).encode(), digest_size=8)
    file = files.open_bytes(path)
    for _, _, start, size in rows.parts[:: len(rows.parts) // _NUM_PROBED + 1]:
        found.update(file.read(start, start + min(size, _PROBED_BYTES)))
    return int.from_bytes(found.digest(), "little", signed=True)


def made_by(media_filter: MediaFilterConfig | None) -> list[Any]:
    """Returns what the media metadata of a file of rows depend on."""
    return [] if media_filter is None else [*media_filter.row(), has_pyav()]


def scan_shard(path: PurePath) -> tuple[ShardRows, int, str]:
    """Finds the samples of a tar, the byte after its last member, and what is odd about its links.

    Raises:
        DatasetFormatError: As `index_shard`.
    """
    parts: list[tuple[int, str, int, int]] = []
    starts: list[int] = []
    keys: dict[str, int] = {}
    current: str | None = None
    index, end, skipped = -1, 0, 0
    links: list[str] = []
    try:
        for header in iter_tar(path):
            name, is_file, start, data, size, end, is_link = header
            found = split_name(name) if is_file or is_link else None
            if found is None:
                skipped += is_file
                continue
            if is_link:
                links.append(name)
                continue
            key, part = found
            if not is_utf8(name):  # SQLite cannot hold it
                text = f"the name of member {name!a} is not UTF-8; rename it"
                raise DatasetFormatError(f"{path}: {text}")
            if key != current:
                index += 1
                if keys.setdefault(key, index) != index:
                    raise _twice(path, parts, keys[key], key, name)
                current = key
                starts.append(start)
                names = {part.lower()}
            elif part.lower() in names:
                raise DatasetFormatError(
                    f"{path}: member {name!r} is there twice in a row (byte {start}; capitals do "
                    "not count); write the tar again with one of them"
                )
            else:
                names.add(part.lower())
            parts.append((index, part, data, size))
    except TarError as error:
        raise DatasetFormatError(str(error)) from None
    if end > files.size_of(path):
        raise DatasetFormatError(
            f"{path}: truncated: the file ends in the padding after member {name!r}; "
            "write the tar again"
        )
    linked = f"{path}: {len(links):,} links, as {links[0]!r}; {NO_LINKS}" if links else ""
    if not keys:
        raise DatasetFormatError(
            linked
            or f"{path}: holds no sample; a sample is a file with a name like 'folder/0001.jpg' "
            f"({skipped} other files were skipped). Remove the tar or exclude it (--exclude)"
        )
    sizes = [stop - start for start, stop in pairwise([*starts, end])]
    samples = list(zip(range(len(keys)), keys, starts, sizes, strict=True))
    return ShardRows(samples, parts), end, linked


def first_parts(path: PurePath) -> tuple[str, ...]:
    """Returns the part names of the first hundred samples of a tar, none where it has no sample.

    Raises:
        TarError: The tar is unreadable before these samples end.
    """
    samples = islice(iter_dataset_content(path), 100)
    return tuple(dict.fromkeys(part.lower() for sample in samples for part in sample))


def iter_dataset_content(
    path: str | os.PathLike[str], extract_keys: Container[str] = ()
) -> Iterator[dict[str, bytes | None]]:
    """Yields the samples of a tar: for each part its bytes if it is in `extract_keys`, else None.

    Raises:
        DatasetFormatError: The tar is unreadable.
    """
    tar = local_path(path)
    file = files.open_bytes(tar)
    members = (
        (*found, header.data, header.data + header.size)
        for header in iter_tar(tar)
        if (found := header.key_and_part()) is not None
    )
    for _, sample in groupby(members, itemgetter(0)):
        yield {
            part: file.read(start, stop) if part in extract_keys else None
            for _, part, start, stop in sample
        }


def _twice(
    path: PurePath, parts: list[tuple[int, str, int, int]], index: int, key: str, name: str
) -> DatasetFormatError:
    earlier = [part for sample, part, _, _ in parts if sample == index]
    again = name[len(key) + 1 :]
    counts = Counter([again, *(part for _, part, _, _ in parts)])
    suspects = [part for part in (*earlier, again) if part in numbered_parts(counts)]
    if suspects:
        return DatasetFormatError(f"{path}: {dotted_keys(key, suspects)}")
    members = ", ".join(repr(f"{key}.{part}") for part in earlier)
    if again in earlier:
        return DatasetFormatError(
            f"{path}: sample key {key!r} is there twice: member {name!r} comes again after other "
            "samples. Rename one of them, a key must be unique in the dataset"
        )
    return DatasetFormatError(
        f"{path}: the parts of sample {key!r} are apart: {members}, then other samples, then "
        f"{name!r}. Write the tar so that they follow each other (`tar --sort=name`)"
    )


# -------------------------------------------------------------------------- other sample keys


def rename_samples(shard: Shard) -> int:
    """Writes a new tar with its own name before the names of its samples.

    The new tar takes the name of the old one when it is complete and has the same samples. The old
    one, whose content is never changed, gets the name `<tar>.orig`; a link to a tar is replaced by
    the new one. A tar whose samples have such names already stays. Other members keep their names.

    Returns:
        The number of samples that were renamed.

    Raises:
        DatasetFormatError: The tar is unreadable, its copy has other samples, or another file has
            the name `<tar>.orig`.
        OSError: There is no room for a copy of the tar.
    """
    old, *_ = scan_shard(shard.path)
    prefix = f"{shard.name}/"
    if all(key.startswith(prefix) for _, key, _, _ in old.samples):
        return 0
    with files.new_file(shard.path) as file:
        copy = Path(file.name)
        try:
            _copy(Path(shard.path), copy, prefix)
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise DatasetFormatError(f"{shard.path}: cannot be written again ({error})") from None
        new, *_ = scan_shard(copy)
        same_keys = [prefix + _plain_name(key) for _, key, _, _ in old.samples]
        sizes = [[(part, size) for _, part, _, size in rows.parts] for rows in (old, new)]
        if [key for _, key, _, _ in new.samples] != same_keys or sizes[0] != sizes[1]:
            raise DatasetFormatError(f"{shard.path}: its copy has other samples; it stays as it is")
        _keep_original(Path(shard.path))
    return len(old.samples)


def _keep_original(path: Path) -> None:
    """Lets a tar have the name `<tar>.orig`, too."""
    kept = path.with_name(path.name + ORIGINAL)
    if path.is_symlink():
        return
    with files.errors_of(kept):
        if files.is_there(kept):
            if kept.samefile(path):  # a run ended between the two steps
                return
            raise DatasetFormatError(
                f"{kept} is there already, and would be the place of the present {path.name}; move "
                "it away, or remove it if it is not needed any more"
            )
        try:
            os.link(path, kept)
        except OSError:  # a file system without hard links
            path.rename(kept)


def _copy(path: Path, target: Path, prefix: str) -> None:
    with (
        tarfile.open(path, "r:", errorlevel=2) as old,
        target.open("wb") as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        while (member := old.next()) is not None:
            if member.isfile() and split_name(member.name) is not None:
                member.name = prefix + _plain_name(member.name)
                headers = member.pax_headers.items()  # a path there would win over the name
                member.pax_headers = {name: text for name, text in headers if name != "path"}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
            for tar in (old, new):  # they keep all that they have seen
                vars(tar)["members"] = []
        new.close()
        file.flush()
        os.fsync(file.fileno())
    shutil.copystat(path, target)
    os.utime(target)


def _plain_name(name: str) -> str:
    return name.removeprefix("./")
