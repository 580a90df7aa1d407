"""A damaged or planted `index.sqlite` gives values, or one error with file and remedy."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import prepare_dataset
from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.prepare.choose_shards import Shard
from energon_lite.extras.prepare.index_writer import has_whole_sample, new_index, read_offsets
from energon_lite.extras.prepare.indexing import index_shard, rows_path
from energon_lite.formats.nvmeta import META, SplitFile, read_info
from energon_lite.formats.sqlite import INDEX_SQLITE, IndexDatabase
from energon_lite.sources.dataset_config import load_factory

from ..conftest import examples
from ..helpers import text_set
from .hostile_sets import ENDLESS, PLANTED, run_script


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("sqlite") / "data", 60, num_shards=2)


@pytest.fixture
def root(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data")


def use(root: Path) -> list[Any]:
    """Calls all that reads `index.sqlite`."""
    with IndexDatabase(root) as index:
        found: list[Any] = [index.sample_indices(["00003", "00040", "no such"])]
        found += [index.shard_counts(), index.has_unique_keys(), index.part_sizes()]
        found.append(index.shard_rows(1))
    found.append(has_whole_sample(root / META / INDEX_SQLITE, [["txt"], ["txt", "jpg"]]))
    return found


def test_without_damage_all_is_read(root: Path) -> None:
    assert use(root)[1] == {0: 30, 1: 30}


@examples(60)
@given(data=st.data())
def test_any_corruption_returns_values_or_an_error_with_file_and_remedy(
    prepared: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("damaged")
    (root / META).mkdir()
    raw = bytearray((prepared / META / INDEX_SQLITE).read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    stop = data.draw(st.none() | st.integers(0, len(raw)))
    path = root / META / INDEX_SQLITE
    path.write_bytes(raw[:stop])
    text = "prepare"
    try:
        use(root)
    except DatasetFormatError as error:
        text = str(error) if str(path) in str(error) else f"no path: {error}"
    assert "prepare" in text
    assert "no path" not in text


@pytest.mark.parametrize("script", PLANTED.values(), ids=PLANTED)
def test_planted_tables_are_refused(root: Path, script: str) -> None:
    path = root / META / INDEX_SQLITE
    run_script(path, script)
    with pytest.raises(DatasetFormatError, match=r"index\.sqlite: .*prepare"):
        use(root)
    for problem in lint_dataset(root, num_workers=0).errors:
        assert INDEX_SQLITE in problem.where + problem.message


def test_a_table_that_is_its_own_child_ends(root: Path) -> None:
    path = root / META / INDEX_SQLITE
    run_script(path, "DROP TABLE samples; CREATE TABLE samples (tar_file_id, sample_key, "
           "sample_index, byte_offset, byte_size); INSERT INTO samples " + ENDLESS
           + "0, i || '', i, 0, 1 FROM r LIMIT 5000")  # fmt: skip
    with sqlite3.connect(path) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'samples'"
        ((page,),) = connection.execute(query).fetchall()
        ((size,),) = connection.execute("PRAGMA page_size").fetchall()
    connection.close()
    raw = bytearray(path.read_bytes())
    start = (page - 1) * size
    assert raw[start] == 5  # an inner page of a table
    for child in range(int.from_bytes(raw[start + 3 : start + 5], "big")):
        cell = start + int.from_bytes(raw[start + 12 + 2 * child : start + 14 + 2 * child], "big")
        raw[cell : cell + 4] = page.to_bytes(4, "big")
    path.write_bytes(raw)
    with pytest.raises(DatasetFormatError, match=r"index\.sqlite: .*prepare"):
        use(root)


def test_a_query_without_an_end_is_stopped(root: Path) -> None:
    with (
        IndexDatabase(root) as index,
        pytest.raises(DatasetFormatError, match=r"index\.sqlite: holds a loop"),
    ):
        index.rows(ENDLESS + "count(*) FROM r", (), int)


def test_an_index_of_a_sample_beyond_its_shard_excludes_no_other(root: Path) -> None:
    run_script(
        root / META / INDEX_SQLITE,
        "UPDATE samples SET sample_index = 31 WHERE sample_key = '00003'",
    )
    split = root / META / "split.yaml"
    split.write_text(split.read_text().replace("exclude: []", "exclude: [shard-000.tar/00003]"))
    assert SplitFile(root, read_info(root)).excludes.samples
    with pytest.raises(DatasetFormatError, match=r"'00003' is number 31 of shard-000.tar, .* 30"):
        load_factory(root)


# ------------------------------------------------------------------------------ while preparing


def kept_rows(root: Path, folder: Path) -> tuple[Shard, Path]:
    shard = Shard("shard-000.tar", root / "shard-000.tar")
    index_shard((shard, folder))
    return shard, rows_path(folder, shard.name)


SCRIPTS = {
    "empty rows": "DELETE FROM shard_samples",
    "one row less": "DELETE FROM shard_samples WHERE sample_index = 4",
    "text": "UPDATE shard_samples SET byte_offset = 'x'",
    "beyond": "UPDATE shard_samples SET byte_size = 1 << 50",
    "no table": "DROP TABLE shard_parts",
}


@pytest.mark.parametrize("damage", [*SCRIPTS, "cut", "cut record", "no UTF-8 in the record"])
def test_corrupt_rows_of_an_earlier_run_are_written_again(
    root: Path, tmp_path: Path, damage: str
) -> None:
    shard, rows = kept_rows(root, tmp_path)
    right = read_offsets(rows)
    assert index_shard((shard, tmp_path)).is_resumed
    if damage in SCRIPTS:
        run_script(rows, SCRIPTS[damage])
    else:
        path = rows.with_suffix(".json") if "record" in damage else rows
        path.write_bytes(b"\xff" * ("UTF" in damage) + path.read_bytes()[:-40])
    result = index_shard((shard, tmp_path))
    assert not result.is_resumed
    assert result.samples == 30
    assert read_offsets(rows) == right


def test_a_full_disk_is_one_error_and_a_second_run_works(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def small(*arguments: Any, **more: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **more)
        connection.execute("PRAGMA max_page_count = 4")
        return connection

    shutil.rmtree(root / META)
    options: Any = {"split_parts": {"train": ".*"}, "num_workers": 0}
    monkeypatch.setattr("energon_lite.formats.sqlite.sqlite3.connect", small)
    with pytest.raises(OSError, match=r"free some space.*: '.*sqlite'") as caught:
        prepare_dataset(root, **options)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert prepare_dataset(root, **options).samples == 60
    assert not (root / META / "prepare.partial").exists()


def test_rows_that_are_corrupt_when_they_are_copied_are_named(root: Path, tmp_path: Path) -> None:
    _, rows = kept_rows(root, tmp_path)
    raw = bytearray(rows.read_bytes())
    raw[4096:] = b"\xff" * (len(raw) - 4096)
    rows.write_bytes(raw)
    index = tmp_path / "index.sqlite"
    with (
        pytest.raises(DatasetFormatError, match=f"{rows}: .*remove the folder"),
        new_index(index) as add,
    ):
        add(rows, 0)
    assert not index.exists()
