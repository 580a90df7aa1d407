"""Only `storage/` touches disks: no other module uses descriptors, maps, or methods of `Path`."""

from __future__ import annotations

import ast

import pytest

from .source_tree import PACKAGE, Module, package_modules

# Calls that touch a disk, whatever they are called on, and names of `os` that take a path or a
# descriptor. `files.is_file(path)` and its like are the door.
METHODS = frozenset({
    "absolute", "exists", "glob", "is_dir", "is_file", "is_symlink", "iterdir", "lstat", "mkdir",
    "read_bytes", "read_text", "rename", "resolve", "rglob", "rmdir", "samefile", "stat",
    "symlink_to", "touch", "unlink", "write_bytes", "write_text",
})  # fmt: skip
OF_OS = frozenset({
    "close", "dup", "fchmod", "fdopen", "fstat", "ftruncate", "link", "listdir", "lseek", "lstat",
    "makedirs", "mkdir", "open", "posix_fadvise", "posix_fallocate", "pread", "preadv", "pwrite",
    "pwritev", "read", "readlink", "remove", "rename", "replace", "rmdir", "scandir", "stat",
    "symlink", "unlink", "write",
})  # fmt: skip
OF_OS_PATH = frozenset({"exists", "getsize", "isdir", "isfile", "islink", "realpath", "samefile"})
DOOR = frozenset({"files", "format_", "found"})

# What each of these touches is no data.
OWN_FILES: dict[str, str] = {
    "as_energon.py": "the program that it runs",
    "core/errors.py": "the log of skipped samples, and the folder of this package",
    "extras/energon/alias.py": "the command and the modules that it stands for",
    "extras/energon/epath.py": "paths of the user's program",
    "extras/inspect/mounting.py": "the folder that is mounted on",
    "extras/prepare/choose_shards.py": "patterns of shards in a local folder",
    "extras/prepare/indexing.py": "links to local tars, and their times",
    "extras/prepare/run.py": "the lock and the partial files of a run of prepare",
    "extras/remote/copies.py": "copies of objects",
    "extras/remote/fetcher.py": "the folder of copies, its lock and its socket",
    "extras/remote/fetcher_client.py": "the same",
    "extras/remote/transfers.py": "copies of objects",
    "extras/remote/msc_stores.py": "files of credentials, and those to be uploaded",
    "extras/stores/file_cache_pool.py": "files of the cache",
    "extras/stores/owned_folders.py": "folders of caches, and their locks",
    "extras/trainers/loader_callback.py": "checkpoints of a trainer",
    "loader/loader.py": "the log of skipped samples",
    "loader/workers/arena.py": "memory that processes share",
    "loader/workers/process_executor.py": "processes and their channels",
    "loader/workers/worker_main.py": "channels of processes",
}


def touches(module: Module) -> list[str]:
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names.append(getattr(node, "module", None) or "")
            found += [f"{module.relative_path}:{node.lineno} imports mmap"] * ("mmap" in names)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        if called == "open" or (owner == "os" and name in OF_OS):
            is_touch = True
        elif owner == "os.path":
            is_touch = name in OF_OS_PATH
        else:
            is_touch = bool(owner) and name in METHODS and owner not in DOOR
        if is_touch:
            found.append(f"{module.relative_path}:{node.lineno} calls {called}")
    return found


OUTSIDE = [module for module in package_modules() if f"{PACKAGE}.storage" not in module.name]


def test_no_module_outside_storage_touches_a_disk() -> None:
    found = [
        place
        for module in OUTSIDE
        if module.relative_path.removeprefix(f"{PACKAGE}/") not in OWN_FILES
        for place in touches(module)
    ]
    assert found == [], "read data through energon_lite.storage.files"


@pytest.mark.parametrize("path", OWN_FILES)
def test_each_exception_is_needed(path: str) -> None:
    (module,) = [m for m in OUTSIDE if m.relative_path == f"{PACKAGE}/{path}"]
    assert touches(module), "take it out of the table"
