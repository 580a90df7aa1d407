"""`EPath` behaves as Energon's on local paths."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from energon_lite.epathlib import EPath


def test_paths_are_absolute_and_normalised(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert str(EPath("rel/a.tar")) == f"{tmp_path}/rel/a.tar"
    path = EPath("/a/b/../c.tar.gz")
    assert (path.url, path.name, str(path.parent)) == ("/a/c.tar.gz", "c.tar.gz", "/a")
    assert str(path.with_suffix(".x")) == "/a/c.tar.x"
    assert str(path / "x") == "/a/c.tar.gz/x"
    assert str(path / "/abs") == str(path / EPath("/abs")) == "/abs"
    assert path.relative_to(EPath("/a")) == "c.tar.gz"
    assert repr(path) == "EPath('/a/c.tar.gz')"
    assert (path / "gs://b/c").url == "gs://b/c"
    with pytest.raises(ValueError, match="of no storage that is known"):
        EPath("dss://b/c")


def test_paths_compare_hash_and_pickle():
    assert EPath("/a") == EPath(Path("/b/../a")) == EPath(EPath("/a"))
    assert EPath("/a") < EPath("/b") >= EPath("/b")
    assert EPath("/a") == "/a" != EPath("/b")
    assert {"/a": 1}[EPath("/a")] == 1
    assert EPath("/a") != 5
    assert len({EPath("/a"), EPath("/a")}) == 1
    assert pickle.loads(pickle.dumps(EPath("/a"))) == EPath("/a")
    assert os.fspath(EPath("/a")) == "/a"


def test_patterns_follow_links_but_not_in_circles(tmp_path):
    root = EPath(tmp_path)
    for name in ("d/e/x.tar", "d/f.txt", "d/.hidden.txt", "a.txt", ".meta/f.txt"):
        (root / name).write_text("")
    (tmp_path / "l").symlink_to("d")
    (tmp_path / "d/up").symlink_to("..")
    (tmp_path / "d/e/up").symlink_to("../..")
    found = {
        "**/*.txt": ["a.txt", "d/f.txt", "l/f.txt"],
        "d/**/*.tar": ["d/e/x.tar"],
        "**/e/*.tar": ["d/e/x.tar", "l/e/x.tar"],
        "**/.*.txt": ["d/.hidden.txt", "l/.hidden.txt"],
        "*/*.txt": ["d/f.txt", "l/f.txt"],
        "*.txt": ["a.txt"],
        "nothing/**/*": [],
    }
    for pattern, names in found.items():
        assert [path.relative_to(root) for path in root.glob(pattern)] == names, pattern
    assert [path.relative_to(root) for path in root.walk()] == [
        ".meta/f.txt", "a.txt", "d/.hidden.txt", "d/e/x.tar", "d/f.txt", "l/.hidden.txt",
        "l/e/x.tar", "l/f.txt",
    ]  # fmt: skip
