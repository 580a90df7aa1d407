"""Datasets in two places: the tars in one folder, `.nv-meta` and their indexes in another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import unquote

from energon_lite.formats.nvmeta import META, index_path
from energon_lite.storage.byte_file import Address, ExpectedReads, Folder, Status, registered
from energon_lite.storage.local import LOCAL
from energon_lite.storage.local_paths import is_absolute


def _path_of_text(text: str) -> PurePath:
    return Address(text) if is_absolute(text) else PurePath(f"/{text}")


def place_of(name: PurePath) -> PurePath:
    """Returns where a file lies: `.nv-meta` and the indexes of tars here, all others there.

    Args:
        name: of the file, as `storage.local_paths.with_meta_dir` wrote it.

    Example:
        >>> name = PurePath("2,%2Fmine%2Fmeta/data/x/sub/a.tar.idx")
        >>> str(place_of(name)), str(place_of(name.with_suffix("")))
        ('/mine/meta/sub/a.tar.idx', '/data/x/sub/a.tar')
    """
    mark, *parts = name.parts
    size, _, meta = mark.partition(",")
    inside = parts[int(size) :]
    if META in inside or (inside and index_path(name.with_suffix("")).name == name.name):
        return _path_of_text(unquote(meta).lstrip("/")).joinpath(*inside)
    return _path_of_text("/".join(parts))


def _folder_of(name: PurePath) -> tuple[Folder, PurePath]:
    place = place_of(name)
    return registered(place) or (LOCAL, place)


def _own_names(names: Sequence[PurePath]) -> dict[Folder, dict[PurePath, PurePath]]:
    """Returns for each folder in which files lie their names, and those that they have there."""
    found = defaultdict[Folder, dict[PurePath, PurePath]](dict)
    for name in names:
        folder, own = _folder_of(name)
        found[folder][name] = own
    return found


def _by_place(method: str) -> Any:
    """Returns a method of folders that asks the folder in which a file lies."""

    def call(_self: Folder, name: PurePath, *rest: Any) -> Any:
        folder, own = _folder_of(name)
        return getattr(folder, method)(own, *rest)

    return call


class MetaElsewhere(Folder):
    """The folder of all such datasets.

    Args:
        scheme: under which it is registered.
    """

    def __init__(self, scheme: str) -> None:
        del scheme

    status, open, entries = map(_by_place, ("status", "open", "entries"))
    is_well, real_path = map(_by_place, ("is_well", "real_path"))
    write, write_file = map(_by_place, ("write", "write_file"))
    write_over, remove = map(_by_place, ("write_over", "remove"))

    def prefetch(self, names: Sequence[PurePath], stop: int) -> None:
        """Asks for the first bytes of files, in their folders."""
        for folder, own in _own_names(names).items():
            folder.prefetch([*own.values()], stop)

    def statuses(self, names: Sequence[PurePath]) -> list[Status | None]:
        """Returns the facts about several names, of each folder at once."""
        found = dict[PurePath, Status | None]()
        for folder, own in _own_names(names).items():
            found.update(zip(own, folder.statuses([*own.values()]), strict=True))
        return [*map(found.__getitem__, names)]

    def expect(self, reads: Sequence[ExpectedReads]) -> list[tuple[int, int]]:
        """Announces what will be read to the folders of the data."""
        places = [(own, *_folder_of(own.name)) for own in reads]
        return [folder.expect([own._replace(name=name)])[0] for own, folder, name in places]

    def transfers(self, names: Sequence[PurePath]) -> dict[PurePath, dict[str, float]]:
        """Returns what was fetched of the data."""
        places = [(name, *_folder_of(name)) for name in names]
        found = {name: folder.transfers([own]) for name, folder, own in places}
        return {name: counts for name, own in found.items() for counts in own.values()}
