"""`EPath` of an address does what one of a local path does."""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from energon_lite.extras.energon.epath import EPath

from .server import Server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed"),
]


def found_at(root: EPath) -> list[Any]:
    """Uses all methods that both kinds of paths have; returns what they return, below `root`."""
    (root / "a" / "one.txt").write_text("größe")
    (root / "a/two.bin").write_bytes(bytes(range(256)))
    with (root / "a/.hidden").open("w") as file:
        file.write("first\n")
        file.write("second\n")
    (root / "a/one.txt").copy(root / "b/c/copy.txt")
    (root / "b/c/copy.txt").copy(root / "b/moved.txt")
    (root / "b/moved.txt").move(root / "b/d/moved.txt")
    (root / "a/gone.txt").write_text("")
    (root / "a/gone.txt").unlink()
    with (root / "a/.hidden").open() as file:
        lines = list(file)
    paths = [root, root / "a", root / "a/one.txt", root / "none", root / "a/gone.txt"]
    return [
        lines,
        (root / "a/one.txt").read_text(), (root / "a/two.bin").read_bytes(),
        [path.relative_to(root) for path in root.walk()],
        [path.relative_to(root) for path in root.glob("**/*.txt")],
        [path.relative_to(root) for path in root.glob("a/[!o]*.bin")],
        [(path.is_file(), path.is_dir()) for path in paths],
        (root / "a/two.bin").size(),
        [path.name for path in paths[1:]],
        [path.parent == root for path in paths[1:]],
        (root / "a/../b").relative_to(root), (root / "a.x.tar").with_suffix(".idx").name,
        (root / "x").parent / "/abs", (root / "x") / "s3://other/y",
        pickle.loads(pickle.dumps(root)) == root, sorted([root / "b", root / "a"])[0].name,
    ]  # fmt: skip


def test_methods_of_both_kinds_agree(server: Server, tmp_path: Path) -> None:
    remote = EPath("s3://bucket/epath")
    local = EPath(tmp_path / "epath")
    expected = found_at(local)
    assert expected[3] == ["a/.hidden", "a/one.txt", "a/two.bin", "b/c/copy.txt", "b/d/moved.txt"]
    assert found_at(remote) == expected
    assert not remote.is_local()
    (remote / "a/one.txt").copy(local / "down.txt")
    (local / "down.txt").move(remote / "up.txt")
    assert (remote / "up.txt").read_text() == "größe"
    assert not (local / "down.txt").is_file()
    assert server.read("bucket/epath/up.txt") == "größe".encode()


def test_texts_are_addresses() -> None:
    path = EPath("s3://bucket/a/../b")
    assert (str(path), path.url, repr(path)) == ("s3://bucket/b",) * 2 + ("EPath('s3://bucket/b')",)
    assert path.parent.parent == path.parent == "s3://bucket"
    assert EPath("msc://profile/x") / "y" == "msc://profile/x/y"
    for refused in (path.local_path, path.stat):
        with pytest.raises(ValueError, match=r"s3://bucket/b is an address, not a local path"):
            refused()
    with pytest.raises(ValueError, match="remote"):
        EPath("dss://name@1/x")


def test_bucket_that_does_not_exist_has_no_file(server: Server) -> None:
    assert not EPath("s3://no-such-bucket/a").is_file()
