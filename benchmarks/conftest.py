"""Data and the table of all figures: `make bench`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from benchmarks import data
from benchmarks.measure import Entry, as_text, write_json, write_readme
from energon_lite.core.compiled import compile_all

ENTRIES = pytest.StashKey[list[Entry]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("figures")
    group.addoption("--figures-json", type=Path, help="write all times to this file")
    group.addoption(
        "--update-readme", action="store_true", help="put the figures into benchmarks/README.md"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[ENTRIES] = []
    # The table below has ours and the reference in one row; that of pytest-benchmark does not.
    config.option.benchmark_quiet = True


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    entries = config.stash[ENTRIES]
    if not entries:
        return
    terminalreporter.section("figures")
    for line in as_text(entries):
        terminalreporter.write_line(line)
    if path := config.getoption("--figures-json"):
        write_json(entries, path)
    if config.getoption("--update-readme"):
        write_readme(entries)


@pytest.fixture
def entries(request: pytest.FixtureRequest) -> list[Entry]:
    """What goes into the table."""
    return request.config.stash[ENTRIES]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compiles what packs and balances: it runs as plain Python until then."""
    compile_all()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A place for data, removed at the end: pytest would keep three of them."""
    path = tmp_path_factory.mktemp("benchmarks")
    yield path
    shutil.rmtree(path)


class TextData(NamedTuple):
    """A prepared folder and what is in it, by sample key."""

    root: Path
    texts: dict[str, str]


@pytest.fixture(scope="session")
def many_texts(folder: Path) -> TextData:
    """200,000 samples of about 500 bytes in 20 shards."""
    root = folder / "many_texts"
    return TextData(root, data.write_texts(root, num_samples=200_000, num_shards=20))


@pytest.fixture(scope="session")
def many_shards(folder: Path) -> TextData:
    """1,000 shards of 20 samples."""
    root = folder / "many_shards"
    return TextData(root, data.write_texts(root, num_samples=20_000, num_shards=1000))


@pytest.fixture(scope="session")
def few_texts(folder: Path) -> TextData:
    """3,000 samples in 6 shards."""
    root = folder / "few_texts"
    return TextData(root, data.write_texts(root, num_samples=3000, num_shards=6))
