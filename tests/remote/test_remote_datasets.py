"""Datasets in object stores: the batches of local ones, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.core.errors import DatasetFormatError, FatalSampleError
from energon_lite.extras.remote import fetcher_client
from energon_lite.metadataset.read import read_metadataset
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path
from energon_lite.storage.yaml import dump_yaml
from energon_lite.testing import check_dataset

from ..helpers import Ranks, is_true_in_fork, metadataset, text_of, validation
from ..programs import run_program
from .conftest import KEY, NUM_SAMPLES, SECRET
from .server import Server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed"),
]

S3, LONG = "s3://bucket/texts", "s3://bucket/long"
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0)


def making(path: Any, **options: Any) -> Callable[[WorkerConfig], Any]:
    def make(config: WorkerConfig) -> Any:
        settings = {"batch_size": 2, "shuffle_buffer_size": 10, **options}
        return get_train_dataset(path, worker_config=config, **settings)

    return make


def texts_of(path: Any, num_batches: int, num_workers: int = 0, **config: Any) -> list[list[str]]:
    place = {"rank": 0, "world_size": 1, "num_workers": num_workers, "num_streams": 2, **config}
    loader = get_savable_loader(making(path)(WorkerConfig(**place)))
    return [list(batch.text) for batch in islice(loader, num_batches)]


@pytest.mark.usefixtures("server")
def test_samples_obey_the_laws() -> None:
    dataset = validation(S3)(WorkerConfig(rank=0, world_size=1, num_workers=0))
    check_dataset(dataset, max_items=8)


@pytest.mark.usefixtures("server")
def test_plain_web_servers_are_read(texts: Path) -> None:
    with Server(root=texts) as web:
        found = texts_of(f"{web.url}/bucket/texts", 40)
    assert found == texts_of(texts / "texts", 40)


@pytest.mark.parametrize(
    ("num_workers", "settings"),
    [
        (0, {}), (2, {"start_method": "fork"}), (1, {"start_method": "spawn"}),
        pytest.param(1, {"start_method": "forkserver"}, marks=pytest.mark.soak),
        (2, {"worker_type": "thread"}),
    ],
)  # fmt: skip
def test_batches_are_those_of_the_local_folder(
    server: Server, texts: Path, num_workers: int, settings: dict[str, Any]
) -> None:
    expected = texts_of(texts / "texts", 40)
    assert texts_of(S3, 40, num_workers, **settings) == expected


def test_run_resumes_on_other_ranks(server: Server, texts: Path) -> None:
    expected = Ranks(making(texts / "texts"), 1, num_streams=4).slots(60)
    run = Ranks(making(S3), 2, num_streams=4)
    found = run.slots(20)
    found.update(Ranks(making(S3), 1, states=run.save()).slots(30))
    assert len(found) == 50
    assert all(found[slot].text == expected[slot].text for slot in found)


def test_metadatasets_name_what_is_beside_them(server: Server) -> None:
    blend = [{"path": "./texts", "weight": 1}, {"path": S3, "weight": 1, "name": "again"}]
    server.replace("bucket/meta/inner.yaml", json.dumps(metadataset({"blend": blend})).encode())
    server.replace(
        "bucket/outer.yaml", json.dumps(metadataset({"path": "./meta/inner.yaml"})).encode()
    )
    blend[0]["path"] = "../texts"
    server.replace("bucket/meta/inner.yaml", json.dumps(metadataset({"blend": blend})).encode())
    found = {text for batch in texts_of("s3://bucket/outer.yaml", 60) for text in batch}
    assert found == {text_of(number) for number in range(NUM_SAMPLES)}


@pytest.mark.parametrize(
    "node",
    [
        {"path": "/private/texts"},
        {"path": "file:///private/texts"},
        {"path": "./texts", "aux": {"images": "filesystem:///private"}},
        {"path": "./texts", "meta_dir": "/private"},
        {"blend": [{"path": "./texts"}], "unit": "tokens", "lengths": "/private/lengths"},
        {"blend": [{"path": "/private/blend.yaml"}]},
    ],
)
def test_metadataset_at_an_address_names_addresses_only(server: Server, node: Any) -> None:
    server.replace("bucket/outer.yaml", json.dumps(metadataset(node)).encode())
    with pytest.raises(DatasetFormatError, match=r"this machine, .* addresses only.* trust=True"):
        read_metadataset("s3://bucket/outer.yaml", "train")
    with suppress(FileNotFoundError):  # there is no /private
        read_metadataset("s3://bucket/outer.yaml", "train", trust=True)


def test_fetcher_that_is_stuck_is_replaced(
    server: Server, texts: Path, fetchers: Callable[[], list[int]], monkeypatch: Any
) -> None:
    monkeypatch.setattr(fetcher_client, "_SILENT_SEC", 3.0)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
    batches = iter(get_savable_loader(making(LONG)(config)))
    server.set_bandwidth(3e5)  # so that not everything is fetched before the fetcher is stuck
    found = [list(next(batches).text)]
    (stuck,) = fetchers()
    os.kill(stuck, signal.SIGSTOP)
    server.set_bandwidth(None)
    found += [list(batch.text) for batch in islice(batches, 29)]
    assert found == texts_of(texts / "long", 30)
    assert stuck not in fetchers()


def test_fetcher_that_is_stuck_before_it_listens_is_replaced(
    server: Server, texts: Path, monkeypatch: Any
) -> None:
    """It has the lock of the folder, so that another one ends at once."""
    monkeypatch.setattr(fetcher_client, "_SILENT_SEC", 3.0)
    script = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX); print('locked', flush=True); time.sleep(600)"
    )
    lock = str(fetcher_client.folder_of_fetcher() / "lock")
    with subprocess.Popen([sys.executable, "-c", script, lock], stdout=subprocess.PIPE) as stuck:
        assert stuck.stdout
        assert stuck.stdout.readline()
        assert texts_of(S3, 10) == texts_of(texts / "texts", 10)
        assert stuck.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("seed", range(2))
def test_faults_that_pass_cost_nothing(server: Server, texts: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        kind = rng.choice(["status", "reset", "cut", "short_body", "lost", "slow"])
        server.fail(
            kind, times=rng.randint(1, 2), skip=rng.randint(0, 6), after_bytes=rng.randint(0, 9999),
            status=rng.choice([429, 500, 503, 408]), bytes_per_sec=1e6,
        )  # fmt: skip
    loader = get_savable_loader(making(LONG)(ONE))
    assert [list(batch.text) for batch in islice(loader, 40)] == texts_of(
        texts / "long", 40, num_streams=1
    )
    assert sum(source.skipped for source in loader.stats().values()) == 0


def test_object_that_was_replaced_is_an_error_with_its_name(server: Server, texts: Path) -> None:
    file = files.open_bytes(local_path(f"{LONG}/shard-0.tar"))
    before = (texts / "long" / "shard-0.tar").read_bytes()
    assert file.read(0, 50_000) == before[:50_000]
    server.replace("bucket/long/shard-0.tar", bytes(len(before)))
    with pytest.raises(OSError, match=r"replaced after it was opened.*s3://bucket/long/shard-0"):
        file.read(600_000, 700_000)
    assert file.read(0, 50_000) == before[:50_000]
    assert not any(files.open_bytes(local_path(f"{LONG}/shard-0.tar")).read(0, 50_000))


def test_program_that_starts_sees_what_is_there_now(server: Server) -> None:
    """Though the process that fetches has listed the folder for another program."""
    for name in ("shard-0.tar", "shard-1.tar", "shard-0.tar"):
        file = files.open_bytes(local_path(f"{LONG}/{name}"))
    assert any(file.read(0, 5000))
    server.replace("bucket/long/shard-0.tar", bytes(file.size_bytes))
    time.sleep(1.1)
    script = (
        "from energon_lite.storage import files\n"
        "from energon_lite.storage.local_paths import local_path\n"
        f"print(any(files.open_bytes(local_path('{LONG}/shard-0.tar')).read(0, 5000)))\n"
    )
    assert run_program("-c", script).stdout == "False\n"


def test_run_ends_where_a_shard_is_replaced_by_one_of_the_same_layout(
    server: Server, texts: Path
) -> None:
    server.set_bandwidth(5e5)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
    batches = iter(get_savable_loader(making(LONG)(config)))
    next(batches)
    for name in ("shard-0.tar", "shard-1.tar"):
        other = (texts / "long" / name).read_bytes().replace(b"text ", b"TEXT ")
        server.replace(f"bucket/long/{name}", other)
    server.set_bandwidth(1e9)
    found: list[str] = []
    with pytest.raises(
        FatalSampleError, match=r"s3://bucket/long/shard-\d.tar was replaced"
    ) as end:
        found.extend(text for batch in islice(batches, 60) for text in batch.text)
    assert not any("TEXT" in text for text in found)
    assert "resume from the last state" in str(end.value)


def test_errors_say_what_to_do_and_no_secret(
    server: Server, place: Path, monkeypatch: Any, caplog: Any
) -> None:
    found = []
    with pytest.raises(OSError, match="s3://bucket/none is not a prepared dataset") as caught:
        making("s3://bucket/none")(ONE)
    found.append(str(caught.value))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "expired")
    with pytest.raises(OSError, match="check the credentials of this process") as caught:
        making(S3)(ONE)
    texts = [
        *found,
        str(caught.value),
        caplog.text,
        *(path.read_text() for path in place.rglob("log")),
    ]
    assert not any(SECRET in text or KEY in text for text in texts)


@pytest.mark.parametrize(
    "address", ["s3://user:SECRET@bucket/texts", "https://host/texts?sig=SECRET"]
)
def test_addresses_with_secrets_are_refused_without_them(address: str) -> None:
    with pytest.raises(DatasetFormatError, match="credentials by the environment") as caught:
        making(address)(ONE)
    assert "SECRET" not in str(caught.value)


def test_children_ask_by_themselves(server: Server) -> None:
    """A store that was used before a fork would hang in the child."""
    file = files.open_bytes(local_path(f"{LONG}/shard-0.tar"))
    start = file.read(0, 1000)

    def in_child() -> bool:
        return file.read(0, 1000) == start and len(file.read(300_000, 400_000)) == 100_000

    assert is_true_in_fork(in_child)
    assert in_child()


def test_folder_of_the_fetcher_may_have_a_long_path(
    server: Server, place: Path, monkeypatch: Any
) -> None:
    longer = place / ("a-long-name-" * 12)  # than the address of a socket may be
    longer.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(longer))
    assert texts_of(S3, 5)


def test_fetcher_ends_with_its_last_client(
    server: Server, place: Path, fetchers: Callable[[], list[int]]
) -> None:
    script = (
        "from energon_lite.storage import files\n"
        "from energon_lite.storage.local_paths import local_path\n"
        f"file = files.open_bytes(local_path('{LONG}/shard-0.tar'))\n"
        "file.read(0, 100)\n"
        "import sys; assert 'obstore' not in sys.modules\n"
    )
    for _ in range(2):
        run_program("-c", script).check_returncode()
    end = time.monotonic() + 60
    while fetchers() and time.monotonic() < end:
        time.sleep(0.1)
    assert fetchers() == []
    assert [path.name for path in place.rglob("*.data")] == []


def test_errors_name_the_line_that_led_to_the_object(server: Server, tmp_path: Path) -> None:
    server.fail("status", status=403, path=r"texts/.nv-meta/.info.json", times=99)
    server.fail("status", status=400, path=r"long/.nv-meta/.info.json", times=99)
    for number, (address, what) in enumerate({S3: "refuses access", LONG: "answers 400"}.items()):
        path = tmp_path / f"{number}.yaml"
        blend = [{"path": address, "weight": 1}]
        path.write_text(dump_yaml(metadataset({"blend": blend})))
        with pytest.raises(OSError, match=what) as caught:
            making(path)(ONE)
        line = path.read_text().splitlines().index(f"    - path: {address}") + 1
        for word in (f"{path}:{line}, splits.train.blend[0]", f"{address}/.nv-meta/.info.json"):
            assert word in str(caught.value)
