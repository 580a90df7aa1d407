from __future__ import annotations

import json
import logging
import stat
from pathlib import Path

import pytest
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError
from energon_lite.extras.prepare.split_text import compress, split_text
from energon_lite.formats import nvmeta
from energon_lite.formats.nvmeta import DatasetInfo, SplitFile, read_info
from energon_lite.formats.sqlite import IndexDatabase, sample_indices
from energon_lite.storage import files
from energon_lite.storage.braces import expand

from ..helpers import is_mapped

INFO = DatasetInfo({f"parts/data-{i:02d}.tar": 5 for i in range(4)}, "7.4.1")


@pytest.fixture
def root(tmp_path):
    (tmp_path / nvmeta.META).mkdir()
    nvmeta.write_info(tmp_path, INFO)
    return tmp_path


def write_meta(root, name, text):
    (root / nvmeta.META / name).write_text(text)


# Braces

number = st.integers(0, 12).map(str) | st.integers(95, 101).map("{:03d}".format)
names = st.tuples(st.sampled_from(["", "a", "{", "}\\", ",c"]), number, st.just("-") | number)


@given(st.lists(names.map("".join).map("{}.tar".format), max_size=12))
def test_compressed_names_expand_to_the_same_names_in_the_same_order(some):
    assert [name for pattern in compress(some) for name in expand(pattern)] == some


def test_only_one_number_that_grows_by_one_with_the_same_width_is_merged():
    assert compress(["a-8", "a-9", "a-10", "a-11"]) == ["a-{8..9}", "a-{10..11}"]
    assert compress([f"a1/s-{i:03d}.tar" for i in range(95, 120)]) == ["a1/s-{095..119}.tar"]
    assert compress(["a-1", "a-3"]) == ["a-1", "a-3"]
    assert compress(["a-2", "a-1"]) == ["a-2", "a-1"]
    assert compress(["0/1", "1/2"]) == ["0/1", "1/2"]
    assert compress(["0/1", "0/2", "1/2"]) == ["0/{1..2}", "1/2"]
    assert compress([]) == []


PIECES = ["{", "}", ",", "a", "b,", "0", "-", "{1..3}", "{05..1..2}", "{3..-2}", "{b..e..2}", "\\{"]


@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join))
def test_any_pattern_expands_as_energons_library_expands_it_or_is_refused(text):
    try:
        names = expand(text)
    except ValueError as error:
        assert "braces" in str(error)  # noqa: PT017
    else:
        assert names == list(braceexpand(text))


# .info.json


def test_info_keeps_the_order_of_shards_and_is_written_as_energon_writes_it(root):
    assert read_info(root) == INFO
    assert (root / ".nv-meta/.info.json").read_text() == json.dumps(
        {"energon_version": "7.4.1", "shard_counts": INFO.shard_counts}, indent=2
    )


def test_the_json_wins_over_an_old_yaml_which_is_kept_in_sync(root):
    write_meta(root, ".info.yaml", "shard_counts:\n  old.tar: 3\n")
    assert read_info(root) == INFO
    nvmeta.write_info(root, DatasetInfo({"new.tar": 1}, None))
    (root / ".nv-meta/.info.json").unlink()
    assert nvmeta.is_prepared(root)
    assert read_info(root) == DatasetInfo({"new.tar": 1}, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"shard_counts": {}, "x": 1}', "unknown key 'x'"),
        ('{"energon_version": "7"}', "key 'shard_counts' is missing"),
        ('{"shard_counts": {"a.tar": 0}}', r"shard_counts\.a\.tar: .* above 0, not 0"),
        ('{"shard_counts": {"a.tar": true}}', "not True"),
        ('{"shard_counts": []}', "must be a mapping"),
        ("[]", "must be a mapping"),
    ],
)
def test_a_wrong_info_file_is_refused_by_file_and_key(root, text, message):
    write_meta(root, ".info.json", text)
    with pytest.raises(DatasetFormatError, match=message) as caught:
        read_info(root)
    assert ".info.json" in str(caught.value)


def test_an_unprepared_folder_is_an_error_that_names_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="run `energon-lite prepare"):
        read_info(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_info(tmp_path / "none")
    assert not nvmeta.is_prepared(tmp_path)


# split.yaml


def split(root, text, part="train", config=None):
    write_meta(root, config or "split.yaml", text)
    return SplitFile(root, read_info(root), config).part(part)


def test_a_split_part_is_expanded_in_order_with_its_counts(root):
    part = split(root, "split_parts: {train: ['parts/data-{02..01}.tar', parts/data-02.tar]}")
    assert part.shards == ("parts/data-02.tar", "parts/data-01.tar", "parts/data-02.tar")
    assert part.counts == (5, 5, 5)  # a shard that is listed twice is there twice, as in Energon
    assert part.excluded == {}


def test_excludes_drop_shards_and_single_samples(root):
    part = split(
        root,
        "split_parts:\n  train: ['parts/data-{00..02}.tar']\n"
        "exclude:\n- parts/data-01.tar\n- parts/data-00.tar/a/b/0{1..2}\n"
        "- parts/data-00.tar/k\n- parts/data-00.tar/a/b/02\n- parts/data-03.tar/x\n"
        "- parts/data-01.tar/y\n",
    )
    assert part.shards == ("parts/data-00.tar", "parts/data-02.tar")
    assert part.excluded == {"parts/data-00.tar": ("a/b/01", "a/b/02", "k")}


def test_an_exclude_that_fits_nothing_is_only_warned_about(root, caplog):
    with caplog.at_level(logging.WARNING):
        part = split(root, "split_parts: {train: [parts/data-00.tar]}\nexclude: [part/data-00.tar]")
    assert part.shards == ("parts/data-00.tar",)
    assert "'part/data-00.tar' fits no shard" in caplog.text


def test_split_json_is_used_without_split_yaml_and_any_name_is_possible(root):
    text = json.dumps({"split_parts": {"train": ["parts/data-03.tar"]}})
    assert split(root, text, config="split.json").shards == ("parts/data-03.tar",)
    assert SplitFile(root, INFO).part("train").shards == ("parts/data-03.tar",)
    assert split(root, text.replace("3", "2"), config="mine.yaml").shards == ("parts/data-02.tar",)
    assert SplitFile(root, INFO, "mine.yaml").names == ("train",)
    assert SplitFile(root, INFO).part("train").shards == ("parts/data-03.tar",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("split_parts: {train: [a]}\nexclud: []", r"split\.yaml:2: unknown key 'exclud'"),
        ("exclude: []", "key 'split_parts' is missing"),
        ("split_parts: {trian: []}", "no split part 'train'. Did you mean 'trian'"),
        ("split_parts: {}", "no split part 'train'. It has no split part at all"),
        ("split_parts:\n  train: a.tar", r"split\.yaml:2, split_parts\.train: must be a list"),
        ("split_parts:\n  train: [5]", r"train\[0\]: must be a name, not 5"),
        ("split_parts:\n  train: ['a{b']", r"train\[0\]: Unbalanced braces"),
        ("split_parts: {train: [parts/data-0.tar]}", "shard 'parts/data-0.tar' is not in .* mean"),
        ("split_parts: {train: [parts/data-00.tar]}\nexclude: null", "exclude: must be a list"),
        ("split_parts: []", "split_parts: must be a mapping"),
        ("5", "must be a mapping"),
    ],
)
def test_a_wrong_split_file_is_refused_by_file_line_and_key(root, text, message):
    with pytest.raises(DatasetFormatError, match=message):
        split(root, text)


def test_a_split_part_without_shards_is_an_empty_dataset(root):
    with pytest.raises(EmptyDatasetError, match=r"no shards .* 'train' .its list is empty"):
        split(root, "split_parts: {train: []}")
    with pytest.raises(EmptyDatasetError, match="all of its shards are excluded"):
        split(root, "split_parts: {train: [parts/data-00.tar]}\nexclude: [parts/data-00.tar]")


def test_a_missing_split_file_and_a_wrong_suffix_are_named(root):
    info = read_info(root)
    with pytest.raises(FileNotFoundError, match=r"split\.yaml is missing; write it"):
        SplitFile(root, info).part("train")
    with pytest.raises(DatasetFormatError, match=r"'split\.txt'.*\.yaml or \.json"):
        SplitFile(root, info, "split.txt").part("train")


@pytest.mark.parametrize("config", [None, "other.yaml", "other.json"])
def test_a_written_split_is_read_back(root, config):
    parts = {"train": list(INFO.shard_counts)[:3], "val": [], "test": ["parts/data-03.tar"]}
    text = split_text(parts, ["parts/data-00.tar/k"], config)
    nvmeta.config_path(root, config or "split.yaml").write_text(text)
    split = SplitFile(root, read_info(root), config)
    assert split.names == ("train", "val", "test")
    part = split.part("train")
    assert part.shards == tuple(parts["train"])
    assert part.excluded == {"parts/data-00.tar": ("k",)}


# dataset.yaml


def test_dataset_yaml_keeps_lines_and_a_missing_one_names_how_to_make_it(root):
    with pytest.raises(FileNotFoundError, match=r"dataset\.yaml is missing.*--sample-type"):
        nvmeta.read_dataset_config(root)
    write_meta(root, "dataset.yaml", "__module__: a\n__class__: B\n")
    assert nvmeta.read_dataset_config(root).lines == {"__module__": 1, "__class__": 2}
    write_meta(root, "dataset.yaml", "- a\n")
    with pytest.raises(DatasetFormatError, match="must be a mapping"):
        nvmeta.read_dataset_config(root)


# .tar.idx


@pytest.fixture
def shard(root):
    path = root / "parts" / "data-00.tar"
    path.parent.mkdir()
    path.write_bytes(b"")
    path.chmod(0o440)
    return path


def test_an_index_has_the_bytes_of_the_reference(shard):
    nvmeta.write_index(shard, [512, 2048, 4096])  # the first value is always read as 0
    assert nvmeta.read_index(shard, 2).tolist() == [0, 2048, 4096]
    nvmeta.write_index(shard, [0, 3584, 7168, 10752, 14336, 17920])
    raw = nvmeta.index_path(shard).read_bytes()
    assert raw == bytes.fromhex(
        "0000000000000000 000e000000000000 001c000000000000"
        "002a000000000000 0038000000000000 0046000000000000"
    )
    assert nvmeta.index_path(shard).name == "data-00.tar.idx"
    assert stat.S_IMODE(nvmeta.index_path(shard).stat().st_mode) == 0o640
    assert {path.name for path in shard.parent.iterdir()} == {"data-00.tar", "data-00.tar.idx"}


@pytest.mark.parametrize("first", [0, 512])
def test_processes_share_the_memory_of_a_long_index_and_read_the_same(shard, monkeypatch, first):
    offsets = [first, *range(1024, 512 * 40, 512)]
    nvmeta.write_index(shard, offsets)
    copied = nvmeta.read_index(shard, len(offsets) - 1)
    monkeypatch.setattr("energon_lite.storage.local.MAPPED_BYTES", 8 * len(offsets) - 1)
    mapped = nvmeta.read_index(shard, len(offsets) - 1)
    assert mapped.tolist() == copied.tolist() == [0, *offsets[1:]]
    assert not is_mapped(copied)
    assert is_mapped(mapped) == (first == 0)
    nvmeta.write_index(shard, [0, 512])  # another file, to which the mapped one owes nothing
    assert mapped.tolist() == copied.tolist()
    with pytest.raises(DatasetFormatError, match="index of 1 samples"):
        nvmeta.read_index(shard, 2)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_a_mapped_index_keeps_no_file_open_and_is_unmapped_with_its_last_view(shard, monkeypatch):
    def counts() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return maps.count(str(nvmeta.index_path(shard))), len(list(Path("/proc/self/fd").iterdir()))

    monkeypatch.setattr("energon_lite.storage.local.MAPPED_BYTES", 8)
    nvmeta.write_index(shard, [*range(0, 512 * 40, 512)])
    before, num_files = counts()
    views = [nvmeta.read_index(shard, 39)[5:] for _ in range(20)]
    assert counts() == (before + 20, num_files)
    assert [int(view[0]) for view in views] == [5 * 512] * 20
    del views[1:]
    assert counts() == (before + 1, num_files)


def test_a_wrong_index_names_the_file_and_the_command_that_mends_it(root, shard):
    mend = f"run `energon-lite prepare {root} --tar-index-only`"
    with pytest.raises(FileNotFoundError) as missing:
        nvmeta.read_index(shard, 2)
    nvmeta.write_index(shard, [0, 512, 1024])
    with pytest.raises(DatasetFormatError, match=r"index of 2 samples, where .* 3 samples") as size:
        nvmeta.read_index(shard, 3)
    with pytest.raises(DatasetFormatError, match="index of 2 samples"):
        nvmeta.read_index(shard, 1)
    nvmeta.index_path(shard).write_bytes(b"12345")
    with pytest.raises(DatasetFormatError, match="5 bytes are") as broken:
        nvmeta.read_index(shard, 1)
    nvmeta.write_index(shard, [0, 1024, 1024])
    with pytest.raises(DatasetFormatError, match="sample 1 would end at byte 1024") as order:
        nvmeta.read_index(shard, 2)
    for caught in (missing, size, broken, order):
        assert mend in str(caught.value)
        assert "data-00.tar.idx" in str(caught.value)


# index.sqlite, as far as it needs no tars


def test_a_missing_index_is_none_and_a_broken_one_an_error(root):
    assert sample_indices(root, ["a"]) is None
    write_meta(root, "index.sqlite", "this is no database, and long enough to be looked at " * 9)
    with pytest.raises(DatasetFormatError, match=r"index\.sqlite.*--tar-index-only"):
        sample_indices(root, ["a"])
    write_meta(root, "index.sqlite", "")
    assert sample_indices(root, ["a"]) is None
    with IndexDatabase(root) as index:
        assert index.part_sizes() is None


# Keys that are there twice


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("split.yaml", "split_parts: {train: [parts/data-01.tar]}\nsplit_parts: {train: [%s]}\n"),
        ("split.json", '{"split_parts": {"train": ["x"], "train": ["%s"]}}'),
    ],
)
def test_the_last_of_two_keys_counts_with_one_warning_as_in_energon(root, name, text, caplog):
    files.warn_once.cache_clear()
    write_meta(root, name, text % "parts/data-03.tar")
    for _ in range(2):
        assert SplitFile(root, INFO).part("train").shards == ("parts/data-03.tar",)
    assert caplog.text.count("is there twice") == 1
    assert name in caplog.text
    write_meta(root, ".info.json", '{"shard_counts": {"a.tar": 1, "a.tar": 2}}')
    assert read_info(root).shard_counts == {"a.tar": 2}
