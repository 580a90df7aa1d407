"""What all tests share: hypothesis profiles, one thread per process, small data sets."""

from __future__ import annotations

import functools
import gc
import io
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Tests run side by side, one process per core. Set before anything imports numpy or torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# Some containers forbid it; then each program that a test starts would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch
from hypothesis import HealthCheck, settings
from PIL import Image

REPO = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)
sys.dont_write_bytecode = False
# `make test` runs few examples of each property, other ones each time; `make soak` runs thousands.
MAX_EXAMPLES = 10
settings.register_profile(
    "default",
    deadline=None,
    max_examples=MAX_EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("soak", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def examples(number: int, soak: int | None = None, **more: Any) -> settings:
    """Settings of a property with another number of examples; `make soak` runs `soak`, or 1,000."""
    is_soak = settings().max_examples > MAX_EXAMPLES
    number = soak or settings().max_examples if is_soak else min(number, MAX_EXAMPLES)
    return settings(max_examples=number, **more)


# Code is compiled while other processes run what needs none, and nobody waits for the longest test.
FIRST = ("tests/packing/test_compiled.py", "tests/remote/test_schedules.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of `FIRST` before all others."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_collection_finish() -> None:
    """Spares each garbage collection what lives as long as the process: modules and tests."""
    gc.freeze()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    """Writes one shard with the standard library, so that no code under test makes test data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))


def jpeg(shade: int, size: tuple[int, int] = (24, 16)) -> bytes:
    """A small grey JPEG; `size` is (width, height)."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade % 256,) * 3).save(buffer, "JPEG")
    return buffer.getvalue()


def write_captions(folder: Path, num_shards: int = 4, samples_per_shard: int = 10) -> None:
    for shard in range(num_shards):
        members: list[tuple[str, bytes]] = []
        for i in range(shard * samples_per_shard, (shard + 1) * samples_per_shard):
            members += [(f"{i:06d}.jpg", jpeg(i)), (f"{i:06d}.txt", f"grey number {i}".encode())]
        write_tar(folder / f"shard-{shard:04d}.tar", members)


def write_texts(folder: Path, num_shards: int = 4, samples_per_shard: int = 25) -> None:
    for shard in range(num_shards):
        numbers = range(shard * samples_per_shard, (shard + 1) * samples_per_shard)
        members = [(f"{i:06d}.txt", f"text number {i}".encode()) for i in numbers]
        write_tar(folder / f"shard-{shard:04d}.tar", members)


@pytest.fixture(autouse=True)
def _no_waiting_for_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for before it is read again; worker processes that are forked neither."""
    monkeypatch.setattr("energon_lite.storage.patience.sleep", lambda seconds: None)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `captions` (40 jpg + txt) and `text` (100 txt), both prepared as train and val.

    Shared by all tests of a process: read only. `data_folder` is a copy of one's own.
    """
    import energon_lite  # here, so that tests of parts run while the whole is broken

    root = tmp_path_factory.mktemp("small_data")
    write_captions(root / "captions")
    write_texts(root / "text")
    energon_lite.prepare_dataset(
        root / "captions",
        split_ratio="3,1",
        sample_type="CaptioningSample",
        field_map={"image": "jpg", "caption": "txt"},
    )
    energon_lite.prepare_dataset(
        root / "text", split_ratio="3,1", sample_type="TextSample", field_map={"text": "txt"}
    )
    return root


@pytest.fixture(scope="session")
def text_sets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Returns the set with a number of texts, which all tests of a process share: read only."""
    from tests.helpers import text_set  # here, so that tests of parts run while the whole is broken

    root = tmp_path_factory.mktemp("texts")
    return functools.cache(lambda number: text_set(root / str(number) / "texts", number))


@pytest.fixture(scope="module")
def texts(request: pytest.FixtureRequest, text_sets: Callable[[int], Path]) -> Path:
    """A set of 40 texts, or of the `NUM_TEXTS` of the module; read only."""
    return text_sets(getattr(request.module, "NUM_TEXTS", 40))


@pytest.fixture
def data_folder(small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Moves into an empty folder that has a copy of `small_data` as `data`; returns `data`."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(small_data, tmp_path / "data")
