"""Folders of one process: removed with it or after it, and never while it lives."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from energon_lite.extras.stores import owned_folders
from energon_lite.extras.stores.owned_folders import OwnedFolder, remove_dead_folders

from ..programs import running_program

OWNER = """
import sys, time
from pathlib import Path
from energon_lite.extras.stores.owned_folders import OwnedFolder
folder = OwnedFolder(Path(sys.argv[1]))
(folder.path / "1").write_bytes(b"content")
(folder.path / "inner").mkdir()
(folder.path / "inner" / "2").write_bytes(b"content")
print(folder.path, flush=True)
time.sleep(600)
"""


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def killed_owner(parent: Path) -> Path:
    """The folder of a process that was killed."""
    with running_program("-c", OWNER, parent) as (_, lines):
        folder = Path(next(lines).strip())
        remove_dead_folders(parent)
        assert names(folder) == ["1", "inner"]
    return folder


def test_a_folder_is_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    folder = OwnedFolder(tmp_path / "a" / "b")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "x").write_text("x")
    folder.remove()
    folder.remove()
    assert names(tmp_path / "a" / "b") == []


def test_a_folder_of_a_killed_process_is_removed_and_those_of_living_ones_stay(
    tmp_path: Path,
) -> None:
    living = OwnedFolder(tmp_path)
    dead = killed_owner(tmp_path)
    remove_dead_folders(tmp_path)
    assert not dead.exists()
    assert names(tmp_path) == [living.path.name]
    living.remove()


def test_a_fork_does_not_keep_the_folder_of_its_parent_alive(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            kept = [OwnedFolder(tmp_path)]
            child = os.fork()
            if child == 0:
                time.sleep(30 * len(kept))  # a fork leaves all folders
            else:
                os.write(writing, str(child).encode())
        finally:
            os.write(writing, b" ")
            os._exit(0)
    child = int(os.read(reading, 100))
    try:
        os.waitpid(parent, 0)
        for _ in range(200):  # the fork may just have begun
            remove_dead_folders(tmp_path)
            if names(tmp_path):
                time.sleep(0.02)
        assert names(tmp_path) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_folders_of_other_hosts_and_other_programs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = killed_owner(tmp_path)
    own = dead.name[:14]
    for name in (
        "cache_0123456789abcdef",
        "cache_short",
        f"other_{own[6:]}abcdefgh",
        f"{own}012345678",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / f"{own}01234567").write_text("no folder")
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_text("")
    (tmp_path / f"{own}linklink").symlink_to(target)
    before = names(tmp_path)
    monkeypatch.setattr(owned_folders.socket, "gethostname", lambda: "another-host")
    remove_dead_folders(tmp_path)
    assert names(tmp_path) == before
    monkeypatch.undo()
    remove_dead_folders(tmp_path)
    assert names(tmp_path) == [name for name in before if name != dead.name]
    assert names(target) == ["file"]


def test_a_missing_parent_folder_is_no_error(tmp_path: Path) -> None:
    remove_dead_folders(tmp_path / "missing")
    assert names(tmp_path) == []


def test_folders_are_made_while_others_look_for_dead_ones(tmp_path: Path) -> None:
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            remove_dead_folders(tmp_path)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        folders = [OwnedFolder(tmp_path) for _ in range(200)]
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert names(tmp_path) == sorted(folder.path.name for folder in folders)
    for folder in folders:
        folder.remove()
    assert names(tmp_path) == []


def test_without_locks_a_folder_is_made_and_no_other_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = killed_owner(tmp_path)

    def refused(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(owned_folders.fcntl, "flock", refused)
    folder = OwnedFolder(tmp_path)
    remove_dead_folders(tmp_path)
    assert names(tmp_path) == sorted([dead.name, folder.path.name])
    folder.remove()
    assert names(tmp_path) == [dead.name]
