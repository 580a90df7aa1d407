from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..helpers import text_set
from .jobs import JobServer


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("faults") / "texts", 60)


@pytest.fixture(scope="session")
def many_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("faults") / "many-texts", 600)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    made = JobServer(tmp_path_factory.mktemp("jobs"))
    yield made
    made.close()
