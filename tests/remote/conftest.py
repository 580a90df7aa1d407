"""A server of objects for all tests of remote data, and fetchers of their own for each test."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from energon_lite.extras.remote import fetcher_client
from tests.conftest import write_tar
from tests.helpers import prepared, text_set
from tests.remote.server import Server

KEY, SECRET = "the-access-key", "the-secret-of-all"
NUM_SAMPLES = 60


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two prepared datasets: `texts`, and `long` with texts of 40 KB."""
    root = tmp_path_factory.mktemp("bucket")
    text_set(root / "texts", NUM_SAMPLES)
    for shard in range(2):
        own = range(shard * NUM_SAMPLES // 2, (shard + 1) * NUM_SAMPLES // 2)
        texts = [(f"{n:05d}.txt", f"text {n} ".encode() * 5000) for n in own]
        write_tar(root / "long" / f"shard-{shard}.tar", texts)
    prepared(root / "long", "TextSample", {"text": "txt"})
    return root


@pytest.fixture(scope="session")
def running(texts: Path) -> Iterator[Server]:
    with Server(root=texts, credentials=(KEY, SECRET)) as server:
        yield server


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for the fetchers of a test, with a short path: Python's fork server needs one."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def server(running: Server, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server as it was at its start, with the settings of a user of S3 for it."""
    settings = {
        "TMPDIR": str(place), "AWS_ENDPOINT_URL": running.url, "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "ENERGON_LITE_CACHE": "",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)
    # `multiprocessing` keeps the first folder it made, which would be gone for all later tests.
    config: Any = multiprocessing.current_process()
    monkeypatch.setitem(config._config, "tempdir", str(place))
    running.restore()
    running.clear_log()
    fetcher_client.forget()
    yield running
    fetcher_client.forget()


@pytest.fixture
def fetchers(place: Path) -> Callable[[], list[int]]:
    """Returns the processes that fetch for this test."""
    return lambda: fetchers_of(place)


def fetchers_of(folder: Path) -> list[int]:
    """Returns the processes that fetch into a folder."""
    words = f"extras.remote.fetcher\0{folder}/".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if words in file.read_bytes():
                found.append(int(file.parent.name))
    return found
