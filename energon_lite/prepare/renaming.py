"""Other names for the samples of a tar, `<tar>/<old name>`, so that keys are unique."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

from energon_lite.core.errors import DatasetFormatError
from energon_lite.prepare.choose_shards import Shard
from energon_lite.prepare.indexing import scan_shard
from energon_lite.storage.files import replacing
from energon_lite.storage.tar import split_name


def rename_samples(shard: Shard) -> int:
    """Writes a tar again with its own name before the names of its samples.

    The new tar replaces the old one when it is complete and has the same samples; a tar whose
    samples have such names is left as it is. Other members keep their names.

    Returns:
        The number of samples that were renamed.

    Raises:
        DatasetFormatError: The tar is unreadable, or its copy has other samples.
        OSError: There is no room for a copy of the tar.
    """
    old, _ = scan_shard(shard.path)
    prefix = f"{shard.name}/"
    if all(key.startswith(prefix) for _, key, _, _ in old.samples):
        return 0
    with replacing(shard.path) as copy:
        try:
            _copy(shard.path, copy, prefix)
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise DatasetFormatError(f"{shard.path}: cannot be written again ({error})") from None
        new, _ = scan_shard(copy)
        same_keys = [prefix + _plain_name(key) for _, key, _, _ in old.samples]
        sizes = [[(part, size) for _, part, _, size in rows.parts] for rows in (old, new)]
        if [key for _, key, _, _ in new.samples] != same_keys or sizes[0] != sizes[1]:
            raise DatasetFormatError(f"{shard.path}: its copy has other samples; it stays as it is")
    return len(old.samples)


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
