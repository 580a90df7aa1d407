"""Facts about objects: few requests, however many are asked for."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from energon_lite import get_savable_loader
from energon_lite.extras.remote.fetcher_client import _Connection
from tests.helpers import text_set
from tests.remote.server import Server
from tests.remote.test_remote_datasets import ONE, making

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed"),
]


def test_opening_asks_for_all_shards_at_once(
    server: Server, tmp_path: Path, monkeypatch: Any
) -> None:
    text_set(tmp_path / "many", 200, 100)
    asked, send = Counter[str](), _Connection.send

    def counted(self: _Connection, request: dict[str, Any], data: bytes = b"") -> None:
        asked[request["kind"]] += 1
        send(self, request, data)

    monkeypatch.setattr(_Connection, "send", counted)
    with Server(root=tmp_path) as other:
        monkeypatch.setenv("AWS_ENDPOINT_URL", other.url)
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        dataset = making("s3://bucket/many")(ONE)
        at_opening, num_requests = dict(asked), len(other.log())
        batch = next(iter(get_savable_loader(dataset)))
    assert len(batch.text) == 2
    assert 1 <= at_opening["statuses"] < 10
    assert sum(at_opening.values()) < 20
    assert num_requests < 100 + 20
    assert asked["ensure"] < 10
