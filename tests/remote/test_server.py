"""The test server of object stores, read and written with obstore.

A store that was used in a process hangs in every process that is forked from it later, and other
tests of this process fork. So obstore runs in a process started by exec (`ObstoreClient`), which
gets scripts, and must not be imported here.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.remote.dialects import byte_range
from tests.remote.object_table import ObjectTable
from tests.remote.obstore_client import ObstoreClient
from tests.remote.server import Server

pytestmark = pytest.mark.processes
KINDS = ("s3", "gcs", "azure", "http")
DATA = bytes(range(256)) * 8
NAMES = ["data/00/a", "data/00/b", "data/01/a", "data/02 &/a", "data/top", "other"]
BODY = 'bytes(obstore.get(store, key("data/top"), options={"range": (100, 1100)}).bytes())'
READ = f"return {BODY}"
ERROR = f"return error_of(lambda: {BODY})"
PART = DATA[100:1100].decode("latin-1")


@pytest.fixture(scope="module")
def client() -> Iterator[ObstoreClient]:
    if importlib.util.find_spec("obstore") is None:  # not imported, see above
        pytest.skip("obstore is not installed")
    with ObstoreClient() as client:
        yield client


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with Server({f"bucket/{name}": DATA for name in NAMES}, page_size=2) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.restore()
    return shared_server


class Store:
    """A store of one kind, whose scripts name an object by `key("data/top")`."""

    def __init__(self, client: ObstoreClient, server: Server, kind: str) -> None:
        self.client, self.server, self.kind = client, server, kind
        self.head = "bucket/" if kind == "http" else ""

    def run(self, script: str, /, timeout_sec: float = 5.0, **values: Any) -> Any:
        bucket = "" if self.head else "bucket"
        store = self.server.store(self.kind, bucket, timeout_sec=timeout_sec)
        script = f"key = lambda name: {self.head!r} + name\n{textwrap.dedent(script)}"
        return self.client.run(script, store=store, **values)

    def statuses(self) -> list[int]:
        return [entry.status for entry in self.server.log()]


@pytest.fixture(params=KINDS)
def store(client: ObstoreClient, server: Server, request: pytest.FixtureRequest) -> Store:
    return Store(client, server, request.param)


@pytest.fixture
def s3(client: ObstoreClient, server: Server) -> Store:
    return Store(client, server, "s3")


# ------------------------------------------------------------------------------ reads and lists


def test_ranges_are_those_of_http() -> None:
    found = {text: byte_range(text, 10) for text in ("bytes=2-3", "bytes=2-", "bytes=-3")}
    assert found == {"bytes=2-3": (2, 4), "bytes=2-": (2, 10), "bytes=-3": (7, 10)}
    assert byte_range("bytes=8-99", 10) == (8, 10)
    assert byte_range("bytes=-99", 10) == (0, 10)
    for ignored in ("bytes=1-2,4-5", "bytes=3-2", "bytes=-", "lines=1-2", "bytes=x-"):
        assert byte_range(ignored, 10) is None
    for outside in ("bytes=10-12", "bytes=-0", "bytes=10-"):
        with pytest.raises(IndexError):
            byte_range(outside, 10)


def test_reads_whole_objects_and_ranges(store: Store) -> None:
    script = """
        name = key("data/02 &/a")
        whole = obstore.get(store, name).bytes()
        part = obstore.get_range(store, name, start=2040, end=9999)
        meta = obstore.get(store, name, options={"range": {"offset": 2040}}).meta
        return [whole, part, meta["size"], obstore.head(store, name)["size"]]
    """
    whole, part, *sizes = store.run(script)
    assert whole == DATA.decode("latin-1")
    assert part == DATA[2040:].decode("latin-1")
    assert sizes == [2048, 2048]
    assert [(e.method, e.path, e.range, e.status, e.num_bytes) for e in store.server.log()] == [
        ("GET", "bucket/data/02 &/a", "", 200, 2048),
        ("GET", "bucket/data/02 &/a", "bytes=2040-9998", 206, 8),
        ("GET", "bucket/data/02 &/a", "bytes=2040-", 206, 8),
        ("HEAD", "bucket/data/02 &/a", "", 200, 0),
    ]


def test_conditions_of_reads_hold_after_a_replacement(store: Store) -> None:
    script = """
        etag = tag or obstore.head(store, key("other"))["e_tag"]
        def read(**options):
            return error_of(lambda: obstore.get(store, key("other"), options=options).bytes())
        return [read(if_match=etag, range=(0, 3)), read(if_none_match=etag), etag]
    """
    same, none, etag = store.run(script, tag="")
    assert (same, none) == ("", "NotModifiedError")
    assert store.server.replace("bucket/other", b"new") != etag
    assert store.run(script, tag=etag) == ["PreconditionError", "", etag]
    assert store.statuses() == [200, 206, 304, 412, 200]


def test_missing_objects_and_bytes_are_errors(store: Store) -> None:
    script = """
        outside = lambda: obstore.get_range(store, key("other"), start=3000, end=4000)
        return [error_of(lambda: obstore.get(store, key("none"))), error_of(outside)]
    """
    assert store.run(script) == ["FileNotFoundError", "GenericError"]
    assert store.statuses() == [404, 416]


def test_lists_are_complete_over_pages(store: Store) -> None:
    script = """
        def keys(prefix, **more):
            return [m["path"] for m in obstore.list(store, key(prefix), **more).collect()]
        level = obstore.list_with_delimiter(store, key("data"))
        level = [level["common_prefixes"], [m["path"] for m in level["objects"]]]
        return [keys(""), keys("data/00"), keys("data", offset=key("data/01/a")), level]
    """
    everything, folder, rest, level = store.run(script)
    h = store.head
    assert everything == [h + name for name in NAMES]
    assert folder == [h + "data/00/a", h + "data/00/b"]
    assert rest == [h + "data/02 &/a", h + "data/top"]
    assert level == [[h + "data/00", h + "data/01", h + "data/02 &"], [h + "data/top"]]
    pages = len(store.server.log())
    assert pages == 4 if store.kind == "http" else pages >= 3 + 1 + 1 + 2


def test_pages_after_a_common_prefix_do_not_repeat_it() -> None:
    table = ObjectTable()
    for name in ("a/1", "a/2", "b", "c/1"):
        table.put(f"bucket/{name}", b"")
    after, found = "", []
    for _ in range(3):
        page = table.page("bucket", "", "/", after, 1)
        found.append(page.prefixes or [o.name for o in page.objects])
        after = page.next_name
    assert found == [["a/"], ["bucket/b"], ["c/"]]
    assert after == ""


def test_files_of_a_folder_are_served_and_never_written(
    client: ObstoreClient, tmp_path: Path
) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/shard.tar").write_bytes(DATA)
    with Server(root=tmp_path) as server:
        found = client.run(
            """
            read = lambda: obstore.get_range(store, "train/shard.tar", start=5, end=9)
            before = bytes(read())
            names = [m["path"] for m in obstore.list(store).collect()]
            obstore.put(store, "train/shard.tar", b"123456789")
            after = bytes(read())
            obstore.delete(store, "train/shard.tar")
            return [before, names, after, error_of(read)]
            """,
            store=server.store("s3", "bucket"),
        )
    assert found == ["\5\6\7\10", ["train/shard.tar"], "6789", "FileNotFoundError"]
    assert (tmp_path / "train/shard.tar").read_bytes() == DATA


# ------------------------------------------------------------------------------------- writes


def test_conditional_writes_are_done_once(store: Store) -> None:
    script = """
        def put(data, mode):
            return error_of(lambda: obstore.put(store, key("new"), data, mode=mode))
        created = [put(b"1", "create"), put(b"2", "create")]
        meta = obstore.head(store, key("new"))
        mode = {"e_tag": meta["e_tag"], "version": meta["version"] or "none"}
        return [*created, put(b"3", mode), put(b"4", mode)]
    """
    if store.kind == "http":
        assert store.run('return obstore.put(store, key("new"), b"3")')["version"] is None
    else:
        done = ["", "AlreadyExistsError", "", "PreconditionError"]
        assert store.run(script) == done
    assert store.server.read("bucket/new") == b"3"


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_large_objects_are_written_in_parts_and_deleted(
    client: ObstoreClient, server: Server, kind: str
) -> None:
    store = Store(client, server, kind)
    store.run('obstore.put(store, "large", b"0123456789abcdef" * 400_000)')
    assert store.server.read("bucket/large") == b"0123456789abcdef" * 400_000
    assert [e.method for e in store.server.log()] == ["POST", "PUT", "PUT", "POST"]
    store.run('obstore.delete(store, ["large", "other"])')
    assert store.server.read("bucket/large") is None
    assert store.server.read("bucket/other") is None


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_requests_without_the_access_key_are_refused(client: ObstoreClient, kind: str) -> None:
    with Server({"bucket/a": b"1"}, credentials=("name", "secret")) as server:
        known = server.store(kind, "bucket")
        for settings, error in ((known, ""), ({**known, "key": None}, "PermissionDeniedError")):
            script = 'return error_of(lambda: obstore.get(store, "a"))'
            assert client.run(script, store=settings) == error
        assert [entry.status for entry in server.log()] == [200, 403]


# ------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("kind", KINDS)
def test_faults_that_pass_are_read_again(client: ObstoreClient, server: Server, kind: str) -> None:
    store = Store(client, server, kind)
    half, rest = (206, 500), (206, 500)
    passing: list[tuple[str, dict[str, Any], list[tuple[int, int]]]] = [
        *(("status", {"status": s}, [(s, -1), (206, 1000)]) for s in (429, 408, 500, 503)),
        ("reset", {}, [(0, 0), (206, 1000)]),
        ("reset", {"after_bytes": 300}, [(206, 300), (206, 700)]),
        ("lost", {}, [(0, 0), (206, 1000)]),
        ("cut", {}, [half, rest]),
        ("cut", {"after_bytes": 0}, [(206, 0), (206, 1000)]),
        ("slow", {"bytes_per_sec": 50_000}, [(206, 1000)]),
        ("hang", {"seconds": 0.02, "after_bytes": 10}, [(206, 1000)]),
    ]
    for fault, settings, expected in passing:
        server.clear_log()
        server.fail(fault, path=r"data/top$", method="GET", **settings)
        assert store.run(READ) == PART, fault
        log = server.log()
        found = [(e.status, -1 if e.status >= 400 else e.num_bytes) for e in log]
        assert found == expected, fault
        assert [e.fault for e in log] == [fault] + [""] * (len(log) - 1)
    assert server.heal() == 0


def test_refusals_and_wrong_ranges_are_errors_at_once(store: Store) -> None:
    lasting: list[tuple[str, dict[str, Any], str]] = [
        ("status", {"status": 403}, "PermissionDeniedError"),
        ("status", {"status": 401}, "UnauthenticatedError"),
        ("status", {"status": 404}, "FileNotFoundError"),
        ("whole", {}, "NotSupportedError" if store.kind == "http" else "GenericError"),
        ("wrong_range", {}, "GenericError"),
        ("short_range", {}, "GenericError"),
    ]
    for fault, settings, error in lasting:
        store.server.fail(fault, **settings)
        assert store.run(ERROR) == error, fault
    assert len(store.server.log()) == len(lasting)


def test_a_short_body_of_a_right_range_is_not_seen_by_obstore(store: Store) -> None:
    # So a client has to compare the length with that of the range.
    store.server.fail("short_body")
    assert store.run(READ) == PART[:500]


@pytest.mark.parametrize("after_bytes", [None, 300])
def test_a_hang_ends_with_the_timeout_of_the_client(s3: Store, after_bytes: int | None) -> None:
    s3.server.fail("hang", seconds=30, after_bytes=after_bytes)
    assert s3.run(READ, timeout_sec=0.2) == PART
    assert [e.num_bytes for e in s3.server.log()] == [after_bytes or 0, 1000 - (after_bytes or 0)]


def test_versions_are_never_mixed(store: Store) -> None:
    store.server.fail("cut", replacement=("bucket/data/top", b"z" * 2048))
    assert store.run(ERROR) == "GenericError"
    assert store.server.read("bucket/data/top") == b"z" * 2048
    store.server.fail("none", replacement=("bucket/data/top", DATA))
    assert store.run(READ) == "z" * 1000  # the version in which the answer began
    assert store.run(READ) == PART


def test_writes_whose_answer_is_lost_are_done(s3: Store) -> None:
    script = """
        put = lambda mode: error_of(lambda: obstore.put(store, "new", b"1", mode=mode))
        return [put("create"), put("overwrite")]
    """
    s3.server.fail("lost", method="PUT", times=2)
    assert s3.run(script) == ["GenericError", ""]  # only the second is safe to be sent again
    assert s3.server.read("bucket/new") == b"1"
    assert s3.statuses() == [0, 0, 200]


def test_retries_end_and_faults_keep_to_their_place(s3: Store) -> None:
    s3.server.fail("status", status=503, times=10, skip=1, path="other", method="GET")
    script = """
        names = ("other", "data/top", "other")
        errors = [error_of(lambda: obstore.get(store, name)) for name in names]
        return [*errors, error_of(lambda: obstore.head(store, "other"))]
    """
    assert s3.run(script) == ["", "", "GenericError", ""]
    assert s3.statuses() == [200, 200, 503, 503, 503, 503, 200]
    assert s3.server.heal() == 6
    assert s3.run('return error_of(lambda: obstore.get(store, "other"))') == ""


def test_an_unknown_fault_is_refused(server: Server) -> None:
    with pytest.raises(
        ValueError, match="unknown kind of fault 'resett': use one of status, reset"
    ):
        server.fail("resett")


# -------------------------------------------------------------------------- speed and the log


def test_requests_are_counted_and_latency_is_kept(s3: Store) -> None:
    s3.server.set_latency(20)
    start = time.monotonic()
    s3.run('for _ in range(20):\n    obstore.get_range(store, "other", start=0, end=10)')
    assert time.monotonic() - start >= 0.4
    counts = s3.server.counts()
    assert counts["requests"] == 20
    assert counts["bytes"] == 200
    assert counts["max_in_flight"] == 1
    times = [entry.time_sec for entry in s3.server.log()]
    assert len(times) == 20
    assert times == sorted(times)
    s3.server.clear_log()
    assert s3.server.log() == []
    assert s3.server.counts()["requests"] == 0


def test_latency_of_concurrent_requests_is_not_added(s3: Store) -> None:
    s3.server.set_latency(200)
    script = """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: obstore.get_range(store, "other", start=0, end=10), range(16)))
    """
    s3.run(script)
    assert s3.server.counts()["max_in_flight"] > 4


def test_bandwidth_is_shared_by_connections(s3: Store) -> None:
    s3.server.replace("bucket/large", bytes(1_000_000))
    s3.server.set_bandwidth(4_000_000)
    script = """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(lambda _: obstore.get(store, "large").bytes(), range(2))
            return sum(map(len, found))
    """
    start = time.monotonic()
    assert s3.run(script) == 2_000_000
    assert time.monotonic() - start >= 0.4


# ------------------------------------------------------------------------------- the processes


def test_the_server_speaks_plain_http_to_any_client(server: Server) -> None:
    found = []
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        for method, path, headers in (
            ("GET", "/bucket/data/02%20%26/a", {"Range": "bytes=-2"}),
            ("GET", "/bucket/other", {"Range": "bytes=9999-"}),
            ("HEAD", "/bucket/other", {}),
            ("PATCH", "/bucket/other", {}),
        ):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
            found.append((answer.status, answer.getheader("Content-Range"), len(content)))
    assert found[0] == (206, "bytes 2046-2047/2048", 2)
    assert found[1][:2] == (416, "bytes */2048")
    assert found[2] == (200, None, 0)
    assert found[3][0] == 405
    assert server.counts()["connections"] == 1


def test_a_restored_server_has_no_requests_that_hang(server: Server) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        server.fail("hang", seconds=60, times=2)
        server.replace("bucket/new", b"1")
        connection.request("GET", "/bucket/other")
        while not server.log():
            time.sleep(0.001)
        server.restore()
        with pytest.raises(http.client.RemoteDisconnected):
            connection.getresponse()
        connection.close()
        connection.request("GET", "/bucket/other")
        assert connection.getresponse().read() == DATA
    assert server.read("bucket/new") is None
    assert server.counts()["max_in_flight"] == 1


def test_errors_of_the_server_itself_fail_the_test() -> None:
    server = Server().__enter__()
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request("GET", "/bucket?list-type=2&max-keys=many")
        with pytest.raises(http.client.RemoteDisconnected):
            connection.getresponse()
    with pytest.raises(AssertionError, match="the test server failed"):
        server.__exit__(None, None, None)


def test_the_server_ends_with_its_block(server: Server) -> None:
    with Server() as other:
        process = other._process
        assert process is not None
        os.kill(process.pid, 0)
    assert process.returncode is not None
    with pytest.raises(AssertionError, match="only within"):
        other.log()
    assert server.log() == []


def test_a_script_that_hangs_is_ended(server: Server) -> None:
    with ObstoreClient(limit_sec=0.3) as client:
        with pytest.raises(TimeoutError, match=r"0\.3 s"):
            client.run("import time; time.sleep(60)")
        client.limit_sec = 30
        assert client.run("return number + 1", number=1) == 2
