"""`BaseWebdatasetFactory.prepare_dataset` as code that is written for Energon calls it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import webdataset

import energon_lite
from energon_lite import BaseWebdatasetFactory, prepare_dataset
from energon_lite.formats.nvmeta import SplitFile, is_prepared, read_info

from ..conftest import write_tar

prepare = BaseWebdatasetFactory.prepare_dataset


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with five shards of ten samples and one of five."""
    (tmp_path / "parts").mkdir()
    pattern = f"{tmp_path}/parts/data-%d.tar"
    with webdataset.ShardWriter(pattern, maxcount=10, verbose=0) as shards:
        for index in range(55):
            text = f"text {index}".encode()
            shards.write({"__key__": f"{index:06d}", "txt": text, "json": b"{}"})
        assert shards.shard == 6
    return tmp_path


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"parts/data-{number}.tar" for number in numbers)


def test_dataset_of_a_brace_pattern_is_read_with_a_dataset_yaml_written_by_hand(root):
    ratio = [("dev", 0), ("train", 1.0)]
    found = prepare(str(root), ["parts/data-{0..5}.tar"], split_parts_ratio=ratio)
    assert found == {"txt", "json"}
    # The default is the seed 42 of Energon.
    split = SplitFile(root, read_info(root))
    assert split.part("train").shards == names(3, 1, 2, 4, 0, 5)
    assert split.names == ("dev", "train")
    assert tuple(split.info.shard_counts) == names(0, 1, 2, 3, 4, 5)
    (root / ".nv-meta/dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: TextWebdataset\nfield_map:\n  text: txt\n"
    )
    dataset = energon_lite.get_train_dataset(
        root, worker_config=energon_lite.WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1, shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False,
    )  # fmt: skip
    texts = [batch.text[0] for batch in energon_lite.get_loader(dataset)]
    assert sorted(texts) == sorted(f"text {index}" for index in range(55))


@pytest.mark.parametrize(
    ("paths", "taken"),
    [
        (["parts/data-{3..1}.tar"], (3, 2, 1)),
        (["parts/data-4.tar", "parts/data-{4,0}.tar"], (4, 0)),
        (["parts/data-5.tar", "parts/*.tar"], (5, 0, 1, 2, 3, 4)),
        (["**/data-[12].tar"], (1, 2)),
        (["parts/data-{2,?}*"], (2, 0, 1, 3, 4, 5)),
        ("parts/data-{0..1}.tar", (0, 1)),
        ([Path("parts/data-1.tar")], (1,)),
    ],
)
def test_paths_are_expanded_in_order_and_each_tar_is_taken_once(root, paths, taken):
    options = {"split_parts_ratio": [("train", 1)], "shuffle_seed": None, "workers": 1}
    prepare(root, paths, **options)
    assert tuple(read_info(root).shard_counts) == names(*taken)
    whole = [root / path for path in ([paths] if isinstance(paths, str) else paths)]
    prepare(root, whole, **options)
    assert tuple(read_info(root).shard_counts) == names(*taken)


def test_name_with_braces_or_stars_is_no_pattern_where_there_is_such_a_file(root):
    for name in ("{0..1}.tar", "[ab].tar"):
        write_tar(root / name, [(f"{name}.txt", b"x")])
    options = {"split_ratio": {"train": 1}, "num_workers": 1}
    assert prepare_dataset(root, paths=["{0..1}.tar", "[ab].tar"], **options).shards == 2


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["parts/data-{0..9}.tar"], r"data-6.tar does not exist \(of path 'parts/data-\{0..9\}"),
        (["parts/data-7.tar"], "parts/data-7.tar does not exist$"),
        (["parts/*.tar", "other/*.tar"], r"other/\*.tar matches no .tar file"),
        (["parts/data-{0.tar"], "path 'parts/data-{0.tar': Unbalanced braces"),
        ([], "no tar was named"),
        (["/elsewhere/a.tar"], "/elsewhere/a.tar is not below the dataset"),
    ],
)
def test_pattern_that_matches_nothing_is_named(root, paths, message):
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        prepare(root, paths, split_parts_ratio=[("train", 1.0)])
    assert not is_prepared(root)


def test_parts_by_pattern_may_overlap_or_be_empty_with_a_warning(root, caplog):
    caplog.set_level(logging.WARNING)
    patterns = [
        ("train", "parts/data-[01].tar"), ("train", "parts/data-2"), ("val", "parts/data-{1,4}"),
        ("test", "none"),
    ]  # fmt: skip
    prepare(root, ["parts/data-{0..5}.tar"], split_parts_patterns=patterns, workers=1)
    split = SplitFile(root, read_info(root))
    assert split.part("train").shards == names(0, 1, 2)
    assert split.part("val").shards == names(1, 4)
    assert "'parts/data-1.tar' matches the patterns of both 'train' and 'val'" in caplog.text
    assert "split part 'test': pattern 'none' matches none" in caplog.text


def test_only_indexes_are_made_of_a_prepared_and_of_an_unprepared_folder(root):
    found = prepare(root, ["parts/data-{0..3}.tar"], tar_index_only=True, workers=1)
    assert found == {"txt", "json"}
    assert not is_prepared(root)
    assert len(list(root.glob("parts/*.idx"))) == 4
    prepare(root, ["parts/*.tar"], split_parts_ratio=[("train", 1.0)], workers=1)
    split = (root / ".nv-meta/split.yaml").read_text()
    (root / "parts/data-0.tar.idx").unlink()
    prepare(root, ["parts/*.tar"], split_parts_ratio=[("val", 1.0)], tar_index_only=True, workers=1)
    assert (root / ".nv-meta/split.yaml").read_text() == split
    assert (root / "parts/data-0.tar.idx").is_file()


def test_progress_function_wraps_the_shards_that_are_read(root):
    calls = []

    def watched(shards, total):
        for shard in shards:
            calls.append(total)
            yield shard

    ratio = [("train", 1.0)]
    prepare(root, ["parts/*.tar"], split_parts_ratio=ratio, progress_fn=watched, workers=1)
    assert calls == [6] * 6


def test_samples_of_a_tar_are_listed_with_the_bytes_of_wanted_parts(root):
    tar, content_of = root / "parts/data-5.tar", BaseWebdatasetFactory.iter_dataset_content
    assert list(content_of(tar)) == [{"txt": None, "json": None}] * 5
    samples = list(content_of(str(tar), ("txt",)))
    assert samples[0] == {"txt": b"text 50", "json": None}
    assert len(samples) == 5


def test_the_advice_for_compressed_tars_works_for_each_of_their_names(root):
    for suffix in (".tgz", ".tar.gz", ".tar.zst"):
        (root / f"parts/old{suffix}").write_bytes(b"x")
    with pytest.raises(ValueError, match="compressed tar") as caught:
        prepare_dataset(root, split_ratio={"train": 1}, num_workers=1)
    advice = str(caught.value).split("--exclude ")[1].strip("'")
    report = prepare_dataset(root, split_ratio={"train": 1}, num_workers=1, exclude=advice)
    assert report.shards == 6
