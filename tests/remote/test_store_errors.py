"""What a store refuses for a while costs no sample, and what it refuses for good is one error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import WorkerConfig, get_savable_loader
from energon_lite.core.errors import FatalSampleError
from energon_lite.extras.stores.file_stores import SystemFileStore
from energon_lite.storage import files, patience
from energon_lite.storage.local_paths import local_path

from .server import Server
from .test_remote_datasets import LONG, S3, making, texts_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed"),
]
# The fetcher repeats the last three for ten seconds by itself.
LONG_ONES = [pytest.param(own, marks=pytest.mark.soak) for own in (400, 401, 410, 429, 500, 503)]
STATUSES = [403, 404, *LONG_ONES]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "BRIEF_SEC", 0.1)
    monkeypatch.setattr(patience, "OUTAGE_SEC", 1.0)


def refuse_a_shard(server: Server, status: int, name: str = "shard-1.tar") -> None:
    server.fail("status", status=status, times=1 << 30, path=f"{name}$", method="GET")


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_shard_that_stays_away_ends_the_run(
    server: Server, short: None, status: int, num_workers: int
) -> None:
    refuse_a_shard(server, status)
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, num_streams=2)
    loader = get_savable_loader(making(LONG)(config))
    with pytest.raises(FatalSampleError, match=r"s3://bucket/long/shard-1.tar.*an outage") as end:
        list(islice(loader, 60))
    assert "No sample was skipped" in str(end.value)
    assert loader.num_skipped == {}


@pytest.mark.parametrize("status", STATUSES)
def test_shard_that_comes_back_costs_nothing(
    server: Server, texts: Path, monkeypatch: Any, status: int
) -> None:
    monkeypatch.setattr(patience, "BRIEF_SEC", 0.1)
    monkeypatch.setattr(patience, "sleep", time.sleep)
    refuse_a_shard(server, status)
    timer = threading.Timer(1.0 if status < 429 else 15.0, server.heal)
    timer.start()
    assert texts_of(LONG, 60) == texts_of(texts / "long", 60)
    timer.join()


@pytest.mark.parametrize("status", [403, 404])
def test_file_that_stays_away_is_not_a_missing_one(
    server: Server, short: None, status: int
) -> None:
    """Of a folder that a cooker reads from: other files of it can be read."""
    store = SystemFileStore(LONG)
    assert store["shard-0.tar"]
    files.open_bytes(local_path(f"{LONG}/shard-1.tar"))
    refuse_a_shard(server, status)
    with pytest.raises(FatalSampleError, match=r"s3://bucket/long/shard-1.tar.*an outage"):
        store["shard-1.tar"]


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "RequestTimeout"), (403, "RequestTimeTooSkewed"), (409, "OperationAborted")],
)
@pytest.mark.parametrize("method", ["HEAD", ""])
def test_refusals_that_pass_are_tried_again(
    server: Server, texts: Path, status: int, code: str, method: str
) -> None:
    server.fail("status", status=status, code=code, times=3, method=method)
    files.write_atomically(local_path("s3://bucket/new"), b"text")
    assert server.read("bucket/new") == b"text"
    assert texts_of(LONG, 5) == texts_of(texts / "long", 5)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "SignatureDoesNotMatch"), (403, "InvalidAccessKeyId"), (401, "Unauthorized"),
        (400, "ExpiredToken"), (403, "AccessDenied"),
    ],
)  # fmt: skip
def test_errors_have_the_code_of_the_store(server: Server, status: int, code: str) -> None:
    server.fail("status", status=status, code=code, times=1 << 30)
    path = local_path(f"{S3}/new")
    uses: list[Callable[[], Any]] = [
        lambda: texts_of(S3, 1), lambda: files.entries(path), lambda: files.open_bytes(path),
        lambda: files.write_atomically(path, b""), lambda: files.remove(path),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(OSError, match=rf"\({code}\).*s3://bucket"):
            use()


def test_bucket_that_is_missing_is_named(server: Server) -> None:
    server.fail("status", status=404, code="NoSuchBucket", times=1 << 30)
    with pytest.raises(FileNotFoundError, match=r"no such bucket; check its name.*s3://bucket"):
        texts_of(S3, 1)


@pytest.mark.parametrize("method", ["HEAD", ""])
def test_web_page_in_place_of_an_answer_is_not_believed(
    server: Server, texts: Path, method: str
) -> None:
    server.fail("page", times=4, method=method)
    files.write_atomically(local_path("s3://bucket/new"), b"text")
    assert server.read("bucket/new") == b"text"
    assert texts_of(S3, 5) == texts_of(texts / "texts", 5)
