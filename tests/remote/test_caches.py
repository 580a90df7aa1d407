"""What is fetched stays over runs, where it may; a full disk, and a run that does not fit."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

import pytest

from energon_lite import WorkerConfig, get_savable_loader
from energon_lite.extras.remote import fetcher_client
from energon_lite.extras.remote.remote_folder import RemoteFolder
from energon_lite.extras.remote.staging import ahead_bytes, staged
from energon_lite.storage import files
from energon_lite.storage.byte_file import ExpectedReads, set_cache
from energon_lite.storage.local_paths import local_path
from tests.helpers import text_set
from tests.remote.server import Server
from tests.remote.test_remote_datasets import LONG, making, texts_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed"),
]
MIB = 1 << 20


def config_with(cache: Any) -> WorkerConfig:
    return WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2, cache=cache)


def texts_with(cache: Any) -> list[list[str]]:
    batches = iter(get_savable_loader(making(LONG)(config_with(cache))))
    return [list(next(batches).text) for _ in range(60)]


def end_of_fetchers(place: Path) -> None:
    fetcher_client.forget()
    end = time.monotonic() + 60
    while list(place.rglob("socket")) and time.monotonic() < end:
        time.sleep(0.05)


def data_requests(server: Server) -> int:
    return sum(entry.path.endswith(".tar") and entry.method == "GET" for entry in server.log())


def test_second_run_fetches_nothing(server: Server, texts: Path, place: Path) -> None:
    cache = {"path": place / "of" / "all", "max_bytes": 50 * MIB}
    expected = texts_of(texts / "long", 60)
    assert texts_with(cache) == expected
    end_of_fetchers(place)
    num_requests = data_requests(server)
    assert num_requests > 30
    assert texts_with(cache) == expected
    assert data_requests(server) == num_requests
    end_of_fetchers(place)
    num_copies = len(list(place.rglob("*.data")))
    for shard in texts.glob("long/*.tar"):  # they have other ETags then
        server.replace(f"bucket/long/{shard.name}", shard.read_bytes())
    assert texts_with(cache) == expected
    assert data_requests(server) > num_requests + 30
    for suffix in ("data", "map", "json"):  # the copies of the old objects are gone
        assert len(list(place.rglob(f"copies/*.{suffix}"))) == num_copies


@pytest.mark.parametrize("groups", [1, 4])
def test_what_node_groups_would_save_is_logged(
    server: Server, place: Path, monkeypatch: Any, caplog: Any, groups: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    caplog.set_level(logging.INFO)
    config = WorkerConfig(
        rank=0, world_size=8, num_workers=0, num_streams=8, node_groups=groups,
        cache={"path": place / "cache", "max_bytes": 1_200_000},
    )  # fmt: skip
    get_savable_loader(making(LONG)(config))
    found = [own.getMessage() for own in caplog.records if "node_groups=4" in own.getMessage()]
    assert len(found) == (groups == 1)
    assert not found or "its cache holds 100 %; without it, 49 %" in found[0]


def test_stats_have_what_was_fetched(server: Server) -> None:
    loader = get_savable_loader(making(LONG)(config_with(None)))
    batches = iter(loader)
    for _ in range(60):
        next(batches)
    (found,) = loader.stats().fetched.values()
    assert found["requests"] >= data_requests(server) > 30
    assert found["bytes"] >= 60 * 40_000
    assert found["waits"] > 0
    assert loader.stats().scalars()["data/long/train/fetched_retries"] == 0


@pytest.mark.parametrize(
    ("cache", "match"),
    [
        ({"path": "/tmp/x"}, "must be {'path': folder, 'max_bytes': number}"),
        ({"path": "/tmp/x", "max_bytes": 5}, "max_bytes=5 must be"),
        ({"path": "/tmp/x", "max_bytes": "1GB"}, "max_bytes='1GB' must be"),
        ("/tmp/x", "cache='/tmp/x' must be"),
    ],
)
def test_settings_of_a_cache_are_checked(cache: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        config_with(cache)


def test_cache_on_another_machine_is_refused(server: Server, place: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(fetcher_client, "_file_system_of", lambda _: "nfs4")
    with pytest.raises(OSError, match=r"is on nfs4: bytes of other machines.*set TMPDIR"):
        texts_with({"path": place / "other", "max_bytes": 50 * MIB})


def reads(**changes: Any) -> ExpectedReads:
    settings = {
        "name": PurePath("bucket/texts"), "num_samples": 10_000_000, "num_bytes": 15_000_000_000,
        "share": 1.0, "num_streams": 16, "window": 10_000, "slice_length": 10_000, "interleave": 16,
    }  # fmt: skip
    return ExpectedReads(**{**settings, **changes})


def test_bytes_that_are_needed_at_a_time() -> None:
    assert staged(reads()).live_bytes == 16 * (2 * 10_000 * 1500 + 16 * MIB)
    assert staged(reads(slice_length=100)).live_bytes == 16 * (20_000 * 1500 + 16 * 150_000)
    assert staged(reads(num_bytes=15_000_000, num_samples=10_000)).live_bytes == 15_000_000
    assert staged(reads(num_bytes=400_000_000_000)) == (0, 0, False)  # of 40 KB, one by one
    assert staged(reads(slice_length=1)) == (0, 0, True)


def test_run_that_does_not_fit_is_refused_with_the_arithmetic(
    server: Server, monkeypatch: Any
) -> None:
    folder = RemoteFolder("s3")
    assert folder.expect([reads()]) == [(10_000, 16 * MIB)]
    monkeypatch.setenv("ENERGON_LITE_CACHE", "")
    match = (
        r"s3://bucket/texts: shuffle_buffer_size=100,000 x 16 streams, with samples of 1,500 bytes "
        r"and 16 slices side by side, needs 4,834 MiB .* there are 4,096. Give .*cache=.*"
        r"of at most 75,\d\d\d"
    )
    with pytest.raises(ValueError, match=match):
        folder.expect([reads(window=100_000)])
    assert folder.expect([reads(window=50_000)])[0][0] == 10_000


def test_what_is_read_ahead_leaves_the_cache_to_the_next_epoch(
    server: Server, texts: Path, place: Path
) -> None:
    """Of two epochs through a cache of a half, at most one and a half are fetched, and a little."""
    total = sum(shard.stat().st_size for shard in texts.glob("long/*.tar"))
    texts_with({"path": place / "cache", "max_bytes": total // 2})
    fetched = sum(own.num_bytes for own in server.log() if own.path.endswith(".tar"))
    assert 1.5 * total < fetched < 1.75 * total


def test_bytes_that_are_read_ahead_are_a_part_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def ahead(own: ExpectedReads, cache_bytes: int) -> tuple[int, int]:
        monkeypatch.setenv("ENERGON_LITE_CACHE", json.dumps({"max_bytes": cache_bytes}))
        return ahead_bytes([own])

    pictures = reads(num_bytes=400_000_000_000)  # of 40 KB
    assert ahead_bytes([pictures]) == (16 * MIB, 16 * 24 * MIB)
    assert ahead(pictures, 24 << 30) == (16 * MIB, 16 * 24 * MIB)
    assert ahead(pictures, 24 * 16 * MIB) == (MIB // 4, 16 * MIB)
    ranks = reads(num_bytes=400_000_000_000, num_ranks=2)
    assert ahead(ranks, 24 * 32 * MIB) == (MIB // 4, 16 * MIB)
    assert ahead(pictures, 16 * MIB) == (40_000, 16 * 4 * 40_000)
    assert ahead(reads(num_bytes=30_000, num_samples=20), 1 << 62)[1] == 30_000


@pytest.mark.parametrize("is_full", ["at once", "soon"])
def test_full_disk_is_a_warning(
    server: Server, texts: Path, place: Path, caplog: Any, is_full: str
) -> None:
    """The disk of this fetcher has room for no byte, or for some."""
    script = f"""
import errno, os, sys
from pathlib import Path
from energon_lite.extras.remote import copies, fetcher
pwrite, room = os.pwrite, [{0 if is_full == "at once" else 700_000}]

def full(descriptor, data, at):
    if "shm" not in os.readlink(f"/proc/self/fd/{{descriptor}}"):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
    return pwrite(descriptor, data, at)

os.pwrite = full
fetcher.main(Path(sys.argv[1]), {1 << 30}, False)
"""
    folder = fetcher_client.folder_of_fetcher()
    with subprocess.Popen([sys.executable, "-c", script, str(folder)]) as process:
        end = time.monotonic() + 60
        while not list(place.rglob("socket")) and time.monotonic() < end:
            time.sleep(0.05)
        assert texts_of(LONG, 60) == texts_of(texts / "long", 60)
        assert process.poll() is None
        opened = [file.readlink() for file in Path(f"/proc/{process.pid}/fd").iterdir()]
        # Fetchers of other tests may have folders beside it.
        below = [path for path in opened if "/dev/shm/energon-lite" in str(path)]
        in_memory = {path.parent for path in below if path.parent.name != "copies"}
        assert in_memory
        fetcher_client.forget()
    warnings = [record for record in caplog.records if "is full" in record.getMessage()]
    assert len(warnings) == 1
    assert not any(folder.exists() for folder in in_memory)


def disk_bytes(place: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in place.rglob("*") if path.is_file())


def fetched_again(server: Server, cache: Any, place: Path) -> int:
    """Returns the number of requests for data of one more run, whose fetcher ends."""
    before = data_requests(server)
    texts_with(cache)
    end_of_fetchers(place)
    return data_requests(server) - before


def test_cache_does_not_depend_on_what_changes_from_run_to_run(
    server: Server, texts: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = {"path": place / "cache", "max_bytes": 50 * MIB}
    assert fetched_again(server, cache, place) > 30
    size = disk_bytes(place)
    for name, value in {
        "AWS_SESSION_TOKEN": "second", "AWS_BATCH_JOB_ID": "job-2",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": "new", "AWS_ROLE_SESSION_NAME": "other",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert fetched_again(server, cache, place) == 0
    assert disk_bytes(place) < size + 100_000
    assert [path.name.partition("-")[0] for path in place.glob("cache/*/*")] == ["copies"]
    with Server(root=texts) as other:  # another store has other bytes
        monkeypatch.setenv("AWS_ENDPOINT_URL", other.url)
        assert fetched_again(other, cache, place) > 30
    small = {**cache, "max_bytes": size + 200_000}
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert fetched_again(server, small, place) == 0  # the bytes of the other store went for it
    assert disk_bytes(place) < size + 100_000


def test_programs_with_other_credentials_at_once_have_other_bytes(
    server: Server, texts: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = {"path": place / "cache", "max_bytes": 50 * MIB}
    batches = iter(get_savable_loader(making(LONG)(config_with(cache))))
    first = [list(next(batches).text) for _ in range(5)]
    monkeypatch.setenv("AWS_ROLE_SESSION_NAME", "other")
    expected = texts_of(texts / "long", 60)
    assert texts_with(cache) == expected
    assert len(list(place.glob("cache/*/copies-*"))) == 2
    first += [list(next(batches).text) for _ in range(55)]
    assert first == expected


def test_disk_is_bounded_whatever_the_size_of_samples(server: Server, place: Path) -> None:
    """Of each range that is taken away nothing stays, though it ends within a block."""
    limit, size = 1 << 20, 3 * MIB + 77
    server.replace("bucket/odd", bytes(range(256)) * (size // 256 + 1))
    set_cache({"path": place / "cache", "max_bytes": limit})
    file = files.open_bytes(local_path("s3://bucket/odd"))
    for start in range(0, size, 9_001):
        assert file.read(start, min(start + 4_700, size))
    assert limit // 2 < disk_bytes(place) <= 1.02 * limit + 100_000


@pytest.mark.parametrize("damage", ["zeros", "hole", "map", "json", "boot"])
def test_damaged_cache_heals(server: Server, texts: Path, place: Path, damage: str) -> None:
    cache = {"path": place / "cache", "max_bytes": 50 * MIB}
    expected = texts_with(cache)
    end_of_fetchers(place)
    (base,) = place.glob("cache/*/copies-*")
    for path in base.glob("copies/*.data"):
        size = path.stat().st_size
        if damage == "hole":
            os.truncate(path, size // 3)
            os.truncate(path, size)
        if damage == "zeros":
            path.write_bytes(bytes(size))
        if damage == "map":
            path.with_suffix(".map").write_bytes(b"\1" * 20)
        if damage == "json":
            path.with_suffix(".json").write_text("{}")
    if damage == "boot":
        marker = base / "boot"
        marker.write_text(marker.read_text().replace("-", "1 "))
    assert texts_with(cache) == expected == texts_of(texts / "long", 60)


def test_cache_that_is_cut_during_a_run_heals(server: Server, texts: Path, place: Path) -> None:
    cache = {"path": place / "cache", "max_bytes": 50 * MIB}
    texts_with(cache)
    set_cache(cache)
    file = files.open_bytes(local_path(f"{LONG}/shard-0.tar"))
    expected = (texts / "long" / "shard-0.tar").read_bytes()
    assert file.read(0, 50_000) == expected[:50_000]
    for path in place.rglob("*.data"):
        os.truncate(path, 0)
    assert file.read(500_000, 700_000) == expected[500_000:700_000]


def test_program_with_another_limit_is_told(server: Server, place: Path, caplog: Any) -> None:
    cache = {"path": place / "cache", "max_bytes": 50 * MIB}
    batches = iter(get_savable_loader(making(LONG)(config_with(cache))))
    next(batches)
    assert "has no effect" not in caplog.text
    texts_with({**cache, "max_bytes": 5 * MIB})
    assert "max_bytes=5,242,880 has no effect" in caplog.text
    assert "has given 52,428,800" in caplog.text


def test_index_that_is_not_read_is_not_fetched(server: Server, tmp_path: Path) -> None:
    for path in text_set(tmp_path / "many", 40, 20).rglob("*"):
        if path.is_file():
            server.replace(f"bucket/{path.relative_to(tmp_path)}", path)
    texts_of("s3://bucket/many", 5)
    paths = {own.path.rpartition("/")[2] for own in server.log()}
    assert "offsets.bin" in paths
    assert "index.sqlite" not in paths


def test_what_is_waited_for_comes_before_what_is_for_later(server: Server) -> None:
    """On a slow link the last of 60 pieces would come after all others."""
    server.replace("bucket/large", bytes(6 * MIB))
    server.replace("bucket/small", b"text")
    server.set_bandwidth(1e6)
    file = files.open_bytes(local_path("s3://bucket/large"))
    for start in range(0, 60 * 100_000, 100_000):
        file.advise(start, start + 100_000)
    file.read(0, 100_000)
    for start in range(20):
        file.read(6 * MIB - 20_000 + 1000 * start, 6 * MIB - 19_000 + 1000 * start)
    sent = sum(own.num_bytes for own in server.log())
    assert sent < 3 * MIB
