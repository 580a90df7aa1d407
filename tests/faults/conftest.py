from __future__ import annotations

from collections.abc import Iterator

import pytest

from .jobs import JobServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    made = JobServer(tmp_path_factory.mktemp("jobs"))
    yield made
    made.close()
