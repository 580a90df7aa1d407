"""All offsets of a dataset in one file: used while they are those of the tars, and never after."""

from __future__ import annotations

import json
import shutil
from pathlib import Path, PurePath
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.formats import known, nvmeta
from energon_lite.formats.stored_offsets import STORED_OFFSETS
from energon_lite.storage.byte_file import Address, register

from ..conftest import write_tar
from ..doors.memory_folder import MemoryFolder
from ..helpers import prepared

NUM_SHARDS, NUM = 20, 7


def write_shards(root: Path, extra: int = 0, number: int | None = None, text: str = "t") -> None:
    """Writes all tars, or one, with texts that are longer by `extra` characters in each sample."""
    for shard in range(NUM_SHARDS) if number is None else [number]:
        members = []
        for i in range(NUM):
            content = f"{shard} {i} {text}" + "x" * (300 * i + extra)
            members += [(f"{shard:02d}-{i}.txt", content.encode()), (f"{shard:02d}-{i}.json", b"1")]
        write_tar(root / f"{shard:02d}.tar", members)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("offsets") / "set"
    write_shards(root)
    return prepared(root, "TextSample", {"text": "txt"})


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "set"))


def opened(root: PurePath) -> Any:
    return known.format_of(root).open(root).reader


def texts_of(reader: Any) -> list[str]:
    """The text of each sample; what cannot be read is its error."""
    found = []
    for block in reader.blocks(np.arange(reader.num_samples)):
        for own in block.members:
            if isinstance(own, Exception):
                found.append(str(own))
                continue
            assert [name.split(".")[0] for name, *_ in own] == [own[0][0].split(".")[0]] * 2
            found.append(bytes(block.data[own[0][1] : own[0][2]]).decode().rstrip("x"))
    return found


EXPECTED = [f"{shard} {i} t" for shard in range(NUM_SHARDS) for i in range(NUM)]


def test_no_other_index_is_opened(root: Path) -> None:
    for path in [*root.glob("*.tar.idx"), root / nvmeta.META / "index.sqlite"]:
        path.unlink()
    assert texts_of(opened(root)) == EXPECTED


def new_uuid(root: Path) -> None:
    (root / nvmeta.META / "index.uuid").write_text(str(uuid4()))


def other_counts(root: Path) -> None:
    path = root / nvmeta.META / ".info.json"
    info = json.loads(path.read_text())
    counts = {
        f"a{name}" if name == "19.tar" else name: n for name, n in info["shard_counts"].items()
    }
    (root / "19.tar").rename(root / "a19.tar")
    (root / "19.tar.idx").rename(root / "a19.tar.idx")
    path.write_text(json.dumps({**info, "shard_counts": counts}))
    split = root / nvmeta.META / "split.yaml"
    split.write_text(json.dumps({"split_parts": {"train": list(counts)}, "exclude": []}))


def cut(root: Path) -> None:
    path = root / nvmeta.META / STORED_OFFSETS
    path.write_bytes(path.read_bytes()[:-8])


def other_layout(root: Path) -> None:
    path = root / nvmeta.META / STORED_OFFSETS
    path.write_bytes(b"12345678" + path.read_bytes()[8:])


def larger_tar(root: Path) -> None:
    write_shards(root, extra=3000, number=5)


@pytest.mark.parametrize("change", [new_uuid, other_counts, cut, other_layout, larger_tar])
def test_file_of_other_data_is_not_used(root: Path, change: Any) -> None:
    """As after another program has prepared the folder, whose `.tar.idx` are right."""
    write_shards(root, extra=600)
    other = root.with_name("other")
    write_shards(other, extra=600)
    sizes = {path.name: path.stat().st_size for path in root.glob("*.tar")}
    change(root)
    if change is larger_tar:
        write_shards(other, extra=3000, number=5)
        assert (root / "05.tar").stat().st_size != sizes["05.tar"]
    prepared(other, "TextSample", {"text": "txt"})
    for path in root.glob("*.tar"):
        source = other / path.name.removeprefix("a")
        shutil.copy(source.with_suffix(".tar.idx"), path.with_suffix(".tar.idx"))
    (root / nvmeta.META / "index.sqlite").unlink()
    assert texts_of(opened(root)) == EXPECTED


def test_run_that_goes_on_while_the_folder_is_prepared_again_takes_no_old_place(root: Path) -> None:
    reader = opened(root)
    assert texts_of(reader)[:NUM] == EXPECTED[:NUM]
    reader = opened(root)
    write_tar(root / "000.tar", [("first.txt", b"first"), ("first.json", b"1")])
    prepare_dataset(root, split_parts={"train": ".*"}, force_overwrite=True, num_workers=0)
    (root / nvmeta.META / "index.sqlite").unlink()
    assert texts_of(reader) == EXPECTED


def test_tars_that_are_prepared_again_have_new_offsets(root: Path) -> None:
    write_shards(root, extra=600, text="new")
    prepare_dataset(root, tar_index_only=True, num_workers=0)
    for path in root.glob("*.tar.idx"):
        path.unlink()
    assert texts_of(opened(root)) == [text[:-1] + "new" for text in EXPECTED]


def test_another_tar_of_the_same_size_is_noticed(root: Path) -> None:
    data = (root / "03.tar").read_bytes()
    (root / "04.tar").write_bytes(data)
    found = texts_of(opened(root))
    assert found[: 4 * NUM] == EXPECTED[: 4 * NUM]
    assert found[5 * NUM :] == EXPECTED[5 * NUM :]
    words = "sample 0 has the key '03-0', where offsets.bin has another"
    assert all(words in text for text in found[4 * NUM : 5 * NUM])


def test_lint_compares_it_with_the_tars(root: Path) -> None:
    assert lint_dataset(root, num_workers=0, decode=False).is_ok
    path = root / nvmeta.META / STORED_OFFSETS
    data = np.fromfile(path, dtype="<i8")
    data[-2] += 512
    data.tofile(path)
    (problem,) = lint_dataset(root, num_workers=0, decode=False).errors
    assert "offsets.bin has sample 6 at byte" in str(problem)


class Asked(MemoryFolder):
    """Notes which files were asked for before they were opened."""

    def __init__(self, copied: Path) -> None:
        super().__init__(copied)
        self.asked: list[PurePath] = []
        self.late: list[PurePath] = []

    def prefetch(self, names: Any, stop: int) -> None:
        assert stop > 0
        self.asked += names

    def status(self, name: PurePath) -> Any:
        late, found = [*self.late], super().status(name)  # which opens the file
        self.late = late
        return found

    def open(self, name: PurePath) -> Any:
        if name.suffix in (".idx", ".tar") and name not in self.asked:
            self.late.append(name)
        return super().open(name)


@pytest.mark.parametrize("has_offsets", [False, True])
def test_indexes_elsewhere_are_asked_for_before_the_first_is_opened(
    made: Path, has_offsets: bool
) -> None:
    folder = Asked(made.parent)
    register("asked", folder)
    if not has_offsets:
        del folder.contents[PurePath("set", nvmeta.META, STORED_OFFSETS)]
    reader = opened(Address("asked:/set"))
    reader.advise(np.arange(0, NUM_SHARDS * NUM, 5))
    assert len(folder.asked) == NUM_SHARDS * (1 if has_offsets else 2)
    assert texts_of(reader) == EXPECTED
    assert folder.late == []
