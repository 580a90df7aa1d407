"""A storage in one file: the files of a local folder, kept in memory."""

from __future__ import annotations

from pathlib import Path, PurePath

from energon_lite.storage.byte_file import ByteFile, Folder, Status


class MemoryFile(ByteFile):
    """A file in memory."""

    def __init__(self, path: PurePath, data: bytes) -> None:
        self.path, self._data = path, data
        self.size_bytes, self.identity = len(data), hash(data)

    def read_into(self, target: memoryview, start: int) -> int:
        data = self._data[start : start + len(target)]
        target[: len(data)] = data
        return len(data)


class MemoryFolder(Folder):
    """Files in memory by name; what is written stays in this process.

    Args:
        copied: the local folder whose files are loaded.
    """

    def __init__(self, copied: Path) -> None:
        self.contents = {
            PurePath(path.relative_to(copied)): path.read_bytes()
            for path in copied.rglob("*")
            if path.is_file()
        }

    def status(self, name: PurePath) -> Status | None:
        if name in self.contents:
            file = self.open(name)
            return Status(True, False, file.size_bytes, file.identity)
        return Status(False, True) if self._below(name) else None

    def open(self, name: PurePath) -> ByteFile:
        if name not in self.contents:
            raise FileNotFoundError(2, "No such file", str(name))
        return MemoryFile(name, self.contents[name])

    def entries(self, name: PurePath) -> list[str]:
        return [*{part + "/" * is_deep for part, is_deep in self._below(name)}]

    def write(self, name: PurePath, data: bytes) -> None:
        self.contents[name] = data

    def _below(self, name: PurePath) -> set[tuple[str, bool]]:
        paths = [path.relative_to(name) for path in self.contents if name in path.parents]
        return {(path.parts[0], len(path.parts) > 1) for path in paths}
