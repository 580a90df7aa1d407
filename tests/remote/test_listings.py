"""Facts about objects: few requests, however many are asked for."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from energon_lite import get_savable_loader
from energon_lite.extras.remote.fetcher_client import _Connection
from tests.helpers import text_set
from tests.programs import run_program
from tests.remote.server import Server
from tests.remote.test_remote_datasets import ONE, making

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed"),
]

# Objects of a folder, more than are listed; what each question leads to is printed.
_SCRIPT = """
import json
from energon_lite.extras.remote import listings, object_stores
objects = {f"s3://b/d/{i:05d}": object_stores.Facts(i, f"tag {i}", None) for i in range(5000)}
names, requests = list(objects), []

def facts_below(folder, most):
    requests.append(most)
    found = {name: objects[name] for name in names[:most]} if folder == "s3://b/d" else {}
    return found, set(), most >= len(objects)

def facts_of(address):
    requests.append(address)
    return objects.get(address)

def asked(question):
    requests.clear()
    found = question()
    assert [own["size"] for own in found] == [int(own["identity"][0][4:]) for own in found]
    print(json.dumps(requests))

object_stores.facts_below, object_stores.facts_of = facts_below, facts_of
listings._MOST_LISTED = 2000
own = listings.Listings()
asked(lambda: own.statuses(names[:1]))
asked(lambda: own.statuses(names[:400]))
asked(lambda: [own.status(name) for name in names[2500:2510]])
asked(lambda: own.statuses(names[:2000]))
"""


def test_list_is_as_long_as_what_is_asked_for_and_made_once() -> None:
    done = run_program("-c", _SCRIPT)
    first, some, beyond, many = map(json.loads, done.stdout.splitlines())
    assert first == [1000, "s3://b/d/00000"]
    assert some == [1600]
    assert beyond == [2000, *(f"s3://b/d/{i:05d}" for i in range(2500, 2510))]
    assert many == [8000]


@pytest.mark.parametrize("store", ["s3", "http"])
def test_opening_asks_for_all_shards_at_once(
    server: Server, tmp_path: Path, monkeypatch: Any, store: str
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
        address = "s3://bucket" if store == "s3" else f"{other.url}/bucket"
        dataset = making(f"{address}/many")(ONE)
        at_opening, num_requests = dict(asked), len(other.log())
        batch = next(iter(get_savable_loader(dataset)))
    assert len(batch.text) == 2
    assert 1 <= at_opening["statuses"] < 10
    assert sum(at_opening.values()) < 20
    assert num_requests < (15 if store == "s3" else 100 + 20)
    assert asked["ensure"] < 10
