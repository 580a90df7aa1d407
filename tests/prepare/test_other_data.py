"""Data that are no tars: `prepare` and a run name what they are, and how to convert them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_train_dataset,
)
from energon_lite.core.errors import DatasetFormatError, FatalSampleError
from energon_lite.extras.prepare import prepare_dataset

from ..conftest import write_tar

ALL_TRAIN: dict[str, Any] = {"split_ratio": "1,0,0", "num_workers": 0}
TEXT: dict[str, Any] = {**ALL_TRAIN, "sample_type": "TextSample", "field_map": {"text": "txt"}}
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)
SHARDS = "write its samples into tars"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["c4.parquet"], "It is Parquet: `pandas.read_parquet('"),
        (["state.json", "dataset_info.json", "data-00000-of-00001.arrow"], "load_from_disk('"),
        (["dataset_dict.json", "train/state.json", "train/data-0.arrow"], "['train'].to_json("),
        (["train/data-00000.arrow"], "It is Arrow"),
        (["table.csv", "README.md"], "pandas.read_csv("),
        (["index.json", "shard.00000.mds.zstd"], f"MDS, litData, TFRecord, LMDB or HDF5: {SHARDS}"),
        (["index.json", "chunk-0-0.bin"], SHARDS),
        (["train.tfrecord-00000-of-00001"], SHARDS),
        (["my_text_document.bin", "my_text_document.idx"], "KEY.npy into tars"),
        (["chat.jsonl.gz"], "compressed JSON: decompress it"),
        (["a.jsonl", "pictures/0.jpg"], "JSONL: pass the path of a file"),
        (["000.JPG", "000.txt"], "tar --sort=name -cf shards/0.tar -C "),
        (["cat/0.png", "dog/1.png"], "tar --sort=name -cf"),
        (["000.jpg", "000.json"], "tar --sort=name -cf"),
        (["array.json"], "one object into each line"),
        (["all.zip"], "unpack it"),
    ],
)
def test_other_formats_get_the_way_to_convert_them(tmp_path: Path, names, words) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"PAR1")
    single = [tmp_path / names[0]] if len(names) == 1 and "/" not in names[0] else []
    for path in (tmp_path, *single):
        for call in (prepare_dataset, lambda path, **_: get_train_dataset(path, batch_size=1)):
            with pytest.raises(OSError, match="It is ") as caught:
                call(path, **ALL_TRAIN)
            text = str(caught.value).replace(str(tmp_path), "data")
            assert words in text
            assert "energon-lite prepare data`" not in text  # no circle
            assert len(text) < 350


KINDS = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n", "git lfs pull"),
    "html": (b"\n<!DOCTYPE html><html>caf\xc3\xa9" + b" " * 40_000, "a web page or an XML error"),
    "xml": (b"<Error><Code>AccessDenied</Code></Error>", "AccessDenied"),
    "json": (b'{"error": "not found"}', "perhaps the error of a server"),
    "words": ("404: Nicht gefunden, é".encode()[:-1], "404: Nicht gefunden"),
    "gzip": (gzip.compress(bytes(9999), 0), "gunzip"),
    "zip": (b"PK\3\4" + bytes(9999), "a zip archive; unpack it"),
    "parquet": (b"PAR1" + bytes(9999), "a Parquet file"),
}


def test_an_empty_folder_gets_no_wrong_answer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.tar file in this folder or below it\.$"):
        prepare_dataset(tmp_path, **ALL_TRAIN)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_no_tar_is_named_by_prepare_and_by_a_run(tmp_path: Path, kind) -> None:
    content, words = KINDS[kind]
    write_tar(tmp_path / "0.tar", [(f"{i}.txt", bytes(999)) for i in range(4)])
    prepare_dataset(tmp_path, **TEXT)
    (tmp_path / "0.tar").write_bytes(content)
    with pytest.raises(DatasetFormatError, match=words) as caught:
        prepare_dataset(tmp_path, **TEXT, force_overwrite=True)
    assert "write the tar again" not in str(caught.value)
    with pytest.raises(FatalSampleError, match=words):
        list(get_loader(get_train_dataset(tmp_path, batch_size=1, worker_config=CONFIG)))


@pytest.mark.parametrize("kind", ["lfs", "html", "xml", "gzip", "zip", "parquet"])
def test_a_file_that_is_no_jsonl_is_named(tmp_path: Path, kind) -> None:
    (tmp_path / "a.jsonl").write_bytes(KINDS[kind][0])
    for call in (prepare_dataset, lambda path: get_train_dataset(path, batch_size=1)):
        with pytest.raises(DatasetFormatError, match=KINDS[kind][1]):
            call(tmp_path / "a.jsonl")


class Encoder(DefaultTaskEncoder):
    cookers = (Cooker(lambda sample: TextSample(**basic_sample_keys(sample), text="x")),)


def test_names_of_files_may_be_in_capitals(tmp_path: Path) -> None:
    write_tar(tmp_path / "d/0.TAR", [(f"{i}.txt", b"x") for i in range(4)])
    assert prepare_dataset(tmp_path / "d", **TEXT).samples == 4
    (tmp_path / "a.JSONL").write_text('{"txt": "x"}\n' * 4)
    (tmp_path / "blend.YAML").write_text(
        "__module__: energon_lite\n__class__: MetadatasetV2\nsplits: {train: {path: d}}\n"
    )
    for name in ("d", "a.JSONL", "blend.YAML"):
        dataset = get_train_dataset(
            tmp_path / name,
            batch_size=2,
            repeat=False,
            task_encoder=Encoder(),
            worker_config=CONFIG,
        )
        assert len(list(get_loader(dataset))) == 2
    (tmp_path / "d/1.TGZ").touch()
    with pytest.raises(DatasetFormatError, match="a compressed tar has no random access"):
        prepare_dataset(tmp_path / "d", **ALL_TRAIN, force_overwrite=True)
