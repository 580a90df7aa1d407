"""Datasets are prepared, measured and joined where they lie: whole, or not at all."""

from __future__ import annotations

import json
import os
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.cli.commands import app
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.lengths.length_index import LengthFunction, measure_lengths
from energon_lite.extras.prepare import prepare_dataset, run
from energon_lite.storage.local_paths import local_path, with_meta_dir

from ..conftest import write_tar
from ..helpers import metadataset
from .server import Server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed"),
]

RAW = "s3://bucket/raw"
META = "bucket/raw/.nv-meta"
HOW: dict[str, Any] = {
    "split_parts": {"train": ".*0.tar", "val": ".*1.tar"},
    "sample_type": "TextSample", "field_map": {"text": "txt"}, "num_workers": 0,
}  # fmt: skip


def tars(folder: Path) -> dict[str, Path]:
    """Writes two tars; returns them by their names."""
    found = {f"sub/a-{shard}.tar": folder / "sub" / f"a-{shard}.tar" for shard in range(2)}
    for shard, path in enumerate(found.values()):
        write_tar(path, [(f"{shard}{n:03d}.txt", f"text {shard} {n}".encode()) for n in range(20)])
    return found


@pytest.fixture
def raw(server: Server, tmp_path: Path) -> Path:
    """The folder of tars that lie below `RAW`, too."""
    for name, path in tars(tmp_path / "raw").items():
        server.replace(f"bucket/raw/{name}", path)
    return tmp_path / "raw"


def texts_of(path: Any, where: Any = None, **options: Any) -> list[str]:
    config = WorkerConfig(rank=0, world_size=1, **{"num_workers": 0, **(where or {})})
    dataset = get_train_dataset(
        path, worker_config=config, batch_size=2, shuffle_buffer_size=5, repeat=False, **options
    )
    return [text for batch in get_savable_loader(dataset) for text in batch.text]


def told(*args: str) -> str:
    """Returns what a command prints."""
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return result.output


def order_of(server: Server, method: str = "PUT") -> list[str]:
    own = [entry for entry in server.log() if entry.method == method and entry.status < 400]
    return list(dict.fromkeys(entry.path.removeprefix("bucket/raw/") for entry in own))


def test_prepared_dataset_is_that_of_the_local_folder(server: Server, raw: Path) -> None:
    report = prepare_dataset(RAW, **HOW)
    local = prepare_dataset(raw, **HOW)
    assert (report.samples, report.splits, report.parts) == (40, local.splits, local.parts)
    for name in (".info.json", "split.yaml", "dataset.yaml"):
        assert server.read(f"{META}/{name}") == (raw / ".nv-meta" / name).read_bytes()
    for name in ("sub/a-0.tar.idx", "sub/a-1.tar.idx"):
        assert server.read(f"bucket/raw/{name}") == (raw / name).read_bytes()
    assert texts_of(RAW) == texts_of(raw)
    assert lint_dataset(RAW, num_workers=0).is_ok


def test_files_come_in_an_order_without_half_datasets(server: Server, raw: Path) -> None:
    prepare_dataset(RAW, **HOW)
    first = order_of(server)
    assert first[0] == ".nv-meta/prepare.lock"
    assert first[-1] == ".nv-meta/.info.json"
    assert len(first) == 9
    tar_bytes = sum(
        entry.num_bytes for entry in server.log()
        if entry.method == "GET" and entry.path.endswith(".tar")
    )  # fmt: skip
    assert tar_bytes == sum(path.stat().st_size for path in raw.rglob("*.tar"))  # each read once
    server.clear_log()
    prepare_dataset(RAW, **HOW, force_overwrite=True)
    log = [(entry.method, entry.path.removeprefix("bucket/raw/")) for entry in server.log()]
    gone = next(place for place, entry in enumerate(log) if entry[0] in ("DELETE", "POST"))
    written = [place for place, entry in enumerate(log) if entry[0] == "PUT"]
    assert [log[place][1] for place in written if place < gone] == [".nv-meta/prepare.lock"]
    assert log[written[-1]][1] == ".nv-meta/.info.json"
    assert server.read(f"{META}/prepare.lock") is None


@pytest.mark.parametrize("name", ["sub/a-1.tar.idx", "index.sqlite", "split.yaml", ".info.json"])
def test_run_that_fails_leaves_no_dataset_and_continues(
    server: Server, raw: Path, name: str
) -> None:
    server.fail("status", status=403, method="PUT", path=name)
    with pytest.raises(OSError, match=r"refuses access.*bucket/raw"):
        prepare_dataset(RAW, **HOW)
    assert server.read(f"{META}/.info.json") is None
    assert server.read(f"{META}/prepare.lock") is None
    report = prepare_dataset(RAW, **HOW)
    assert report.resumed_shards == 2
    assert sorted(texts_of(RAW)) == sorted(f"text 0 {n}" for n in range(20))


def test_two_programs_do_not_prepare_at_once(
    server: Server, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replace(f"{META}/prepare.lock", b'{"host": "other"}')
    with pytest.raises(RuntimeError, match=r'another run is preparing.*"other".*prepare.lock'):
        prepare_dataset(RAW, **HOW)
    server.delete(f"{META}/prepare.lock")
    read_shards = run.read_shards

    def meanwhile(*args: Any) -> Any:
        server.replace(f"{META}/.info.json", b'{"shard_counts": {}}')
        return read_shards(*args)

    monkeypatch.setattr(run, "read_shards", meanwhile)
    prepare_dataset(RAW, **HOW, force_overwrite=True)  # it removes what it then replaces
    write_index = run._write_index

    def late(*args: Any) -> Any:
        server.replace(f"{META}/.info.json", b'{"shard_counts": {}}')
        return write_index(*args)

    monkeypatch.setattr(run, "_write_index", late)
    with pytest.raises(FileExistsError, match=r"another program has written it.*info.json"):
        prepare_dataset(RAW, **HOW, force_overwrite=True)


def test_write_whose_answer_is_lost_is_no_error(server: Server, raw: Path) -> None:
    server.fail("lost", method="PUT", path=r"(lock|info.json)$", times=2)
    prepare_dataset(RAW, **HOW)
    assert texts_of(RAW)


def test_commands_take_addresses(server: Server, raw: Path) -> None:
    options = ["--sample-type", "TextSample", "--field-map", "text=txt", "--num-workers", "0"]
    parts = ["--split-parts", "train:.*0.tar", "--split-parts", "val:.*1.tar"]
    assert "40" in told("prepare", RAW, "sub/*.tar", "--non-interactive", *parts, *options)
    assert "TextSample" in told("info", RAW)
    told("lint", RAW, "--num-workers", "0")
    assert "text 0 0" in told("preview", RAW, "--terminal")
    told("plan", RAW, "--steps", "3", "--json")
    told("prepare", RAW, "--tar-index-only", "--num-workers", "0")
    with_length = ["--with", "tests.remote.test_remote_writes:length", "--num-workers", "0"]
    told("lengths", RAW, *with_length)
    told("lengths", RAW, "--meta-dir", "s3://bucket/elsewhere", *with_length)
    assert server.read(f"{META}/energon_lite/lengths/default/train.npy")


def length(sample: Any) -> int:
    return len(sample.text)


def test_lengths_are_written_beside_the_data(server: Server, raw: Path) -> None:
    prepare_dataset(RAW, **HOW)
    prepare_dataset(raw, **HOW)
    (train, _), (local, _) = (
        measure_lengths(path, LengthFunction(length), num_workers=0) for path in (RAW, raw)
    )
    assert (train.totals, train.measured) == (local.totals, 20)
    (again, _) = measure_lengths(RAW, LengthFunction(length), num_workers=0)
    assert again.measured == 0


def test_what_cannot_be_done_there_is_refused(server: Server, raw: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fix_duplicates .*writes tars again"):
        prepare_dataset(RAW, **HOW, fix_duplicates=True)
    prepare_dataset(RAW, **HOW)
    with pytest.raises(FileExistsError, match="is already prepared"):
        prepare_dataset(RAW, **HOW)
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/nothing does not exist"):
        prepare_dataset("s3://bucket/nothing", **HOW)


@pytest.mark.parametrize("where", ["disk", "s3://bucket/mine"])
def test_metadata_may_lie_elsewhere(
    server: Server, raw: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of data that may only be read; of data on a disk, too."""
    meta = str(tmp_path / "mine") if where == "disk" else where
    server.fail("status", status=403, method="PUT", path="bucket/raw", times=10**6)
    with pytest.raises(OSError, match=r"cannot be written to .*--meta-dir DIR"):
        prepare_dataset(RAW, **HOW)
    data = with_meta_dir(RAW, meta)
    assert prepare_dataset(data, **HOW).samples == 40
    assert server.read(f"{META}/.info.json") is None
    prepare_dataset(with_meta_dir(raw, tmp_path / "two"), **HOW)
    assert not list(raw.rglob("*.idx"))
    expected = sorted(f"text 0 {n}" for n in range(20))
    assert sorted(texts_of(RAW, meta_dir=meta)) == expected
    assert texts_of(raw, meta_dir=tmp_path / "two") == texts_of(RAW, meta_dir=meta)
    assert texts_of(RAW, meta_dir=tmp_path / "two") == texts_of(RAW, meta_dir=meta)
    assert sorted(texts_of(RAW, {"num_workers": 2}, meta_dir=meta)) == expected
    assert lint_dataset(data, num_workers=0).is_ok
    (train, _) = measure_lengths(data, LengthFunction(length), num_workers=0)
    assert str(train.file) == f"{meta}/.nv-meta/energon_lite/lengths/default/train.npy"
    monkeypatch.chdir(tmp_path)
    one = {"path": RAW, "meta_dir": where if where != "disk" else "./mine"}
    two = {"path": "./raw", "meta_dir": "two", "split_part": "val"}
    blend = [{**entry, "repetitions": 1} for entry in (one, two)]
    Path("both.yaml").write_text(json.dumps(metadataset({"blend_epochized": blend})))
    assert len(texts_of("both.yaml")) == 40


def test_commands_take_the_folder_of_the_metadata(raw: Path, tmp_path: Path) -> None:
    at = [str(raw), "--meta-dir", str(tmp_path / "mine")]
    split = ["--split-parts", "train:.*", "--num-workers", "0", "--non-interactive"]
    told("prepare", *at, *split, "--sample-type", "TextSample", "--field-map", "text=txt")
    assert "TextSample" in told("info", *at)
    told("lint", *at, "--num-workers", "0")
    assert "text 0 0" in told("preview", *at, "--terminal")
    told("plan", *at, "--steps", "3")
    assert not list(raw.rglob("*.idx"))
    result = CliRunner().invoke(app, ["info", "blend.yaml", "--meta-dir", "x"])
    assert "is for a folder of tars" in result.output


def test_errors_of_metadata_elsewhere_name_the_file_itself(raw: Path, tmp_path: Path) -> None:
    prepare_dataset(with_meta_dir(raw, tmp_path / "mine"), **HOW)
    (tmp_path / "mine" / "sub" / "a-0.tar.idx").unlink()
    with pytest.raises(FileNotFoundError, match=f"^{tmp_path}/mine/sub/a-0.tar.idx is missing"):
        texts_of(raw, meta_dir=tmp_path / "mine")
    (tmp_path / "mine" / ".nv-meta" / "split.yaml").unlink()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/mine/.nv-meta/split.yaml is missing"):
        texts_of(raw, meta_dir=tmp_path / "mine")


def test_paths_of_two_places_stay_apart() -> None:
    one, two = (with_meta_dir("/data/x", meta) for meta in ("/a", "/b"))
    assert len({one, two, local_path("/data/x"), pickle.loads(pickle.dumps(one))}) == 3
    assert (one.name, str(one)) == ("x", "/data/x")
    assert local_path(os.fspath(one)) == one == (one / "sub" / "a.tar").parent.parent
    assert str(one / "sub" / "a.tar.idx") == "/a/sub/a.tar.idx"


def test_files_that_grow_stay_local(server: Server, raw: Path) -> None:
    prepare_dataset(raw, **HOW)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(raw, worker_config=config, batch_size=2, shuffle_buffer_size=5)
    with pytest.raises(ValueError, match=r"^s3://bucket/log.jsonl: this file grows line by line"):
        get_savable_loader(dataset, skip_log="s3://bucket/log.jsonl")
    loader = get_savable_loader(dataset)
    next(iter(loader))
    with pytest.raises(ValueError, match=r"^s3://bucket/0.jsonl: this file grows line by line"):
        loader.stats().write_to("s3://bucket/{rank}.jsonl", 1)
