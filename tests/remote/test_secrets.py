"""No key, token, signature or password leaves the fetcher, whatever a store answers."""

from __future__ import annotations

import json
import os
import string
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ..programs import run_program
from .server import Server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed"),
]

# Prints all that a program may write: texts of errors, states, pickles, `repr`.
PROGRAM = """
import json, logging, pickle, sys, traceback

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.energon.epath import EPath

logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
config = WorkerConfig(rank=0, world_size=1, num_workers=0)

def read(address):
    dataset = get_train_dataset(
        address, batch_size=2, worker_config=config, shuffle_buffer_size=None
    )
    loader = get_savable_loader(dataset)
    print("READ", address, repr(dataset), pickle.dumps(dataset), next(iter(loader)))
    print(loader.save_state_rank())

def write(address):
    (EPath(address) / "new.txt").write_text("")

for address in json.loads(sys.argv[1]):
    for use in (read, write, lambda address: list(EPath(address).walk())):  # HEAD, PUT, GET
        try:
            use(address)
        except Exception as error:
            print("FAILED", repr(error), pickle.dumps(error))
            traceback.print_exc(file=sys.stdout)
"""


class _Echo(BaseHTTPRequestHandler):
    """Refuses all requests, with all that was sent in the answer, as some stores do."""

    def answer(self) -> None:
        status = self.server.status  # type: ignore[attr-defined]
        sent = "".join(f"<Sent>{value}</Sent>" for value in self.headers.values())
        body = f"<Error><Code>ExpiredToken</Code>{self.path}{sent}</Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture(scope="module")
def echo() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


SECRETS = ("key", "secret", "token", "sas", "password", "profile_key", "profile_secret")
quoted = partial(quote, safe="")
words = st.text(string.ascii_letters + string.digits, min_size=12, max_size=30)
some = st.fixed_dictionaries({name: words.map(f"{name}Q".__add__) for name in SECRETS})
odd = dict.fromkeys(SECRETS, "")


def profile(url: str, kind: str, issuer: str, **options: str) -> dict[str, Any]:
    return {
        "storage_provider": {"type": kind, "options": {"base_path": "b", "endpoint_url": url}},
        "credentials_provider": {"type": issuer, "options": options},
    }


@settings(
    max_examples=1, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(secrets=some, status=st.sampled_from([400, 401, 403, 409]))
@example(secrets={name: f"{name}/+= %\\x" for name in SECRETS}, status=400)
def test_no_secret_is_written_anywhere(
    running: Server, texts: Path, echo: ThreadingHTTPServer, secrets: dict[str, str], status: int
) -> None:
    echo.status = status  # type: ignore[attr-defined]
    url = f"http://127.0.0.1:{echo.server_port}"
    key, secret = running.credentials or ("", "")
    sas = f"sig={secrets['sas']}&se=2030"
    connection = f"AccountName=a;BlobEndpoint={url};"
    own = {"access_key": secrets["profile_key"], "secret_key": secrets["profile_secret"]}
    profiles = {
        "s3": profile(url, "s3", "S3Credentials", session_token=secrets["token"], **own),
        "odd": profile(secrets["password"], "s3", "S3Credentials", **own),
        "more": profile(url, "s3", "S3Credentials", **own, unknown=secrets["token"]),
        "azure": profile(
            url, "azure", "AzureCredentials", connection=connection + f"AccountKey={secrets['key']}"
        ),
        "sas": profile(
            url, "azure", "AzureCredentials", connection=connection + f"SharedAccessSignature={sas}"
        ),
        "well": profile(running.url, "s3", "S3Credentials", access_key=key, secret_key=secret),
    }
    profiles["well"]["storage_provider"]["options"]["base_path"] = "bucket"
    addresses = [
        "s3://b/x", "gs://b/x", "az://b/x", f"https://u:{quoted(secrets['password'])}@h/x",
        f"https://h/x?sig={secrets['sas']}", *(f"msc://{name}/texts" for name in profiles),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "msc.json")
        config.write_text(json.dumps({"profiles": profiles}))
        environ = {
            **os.environ, "TMPDIR": folder, "MSC_CONFIG": str(config),
            "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": secrets["key"],
            "AWS_SECRET_ACCESS_KEY": secrets["secret"], "AWS_SESSION_TOKEN": secrets["token"],
            "AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_SAS_TOKEN": sas,
            "AZURE_STORAGE_ENDPOINT": url, "GOOGLE_SERVICE_ACCOUNT_KEY": secrets["key"],
            "HTTPS_PROXY": f"http://u:{secrets['password']}@127.0.0.1:9",
        }  # fmt: skip
        found = run_program("-c", PROGRAM, json.dumps(addresses), env=environ)
        output = (found.stdout + found.stderr).encode()
        assert found.returncode == 0, output[-2000:]
        assert output.count(b"FAILED") == 3 * (len(addresses) - 1)
        assert b"READ msc://well" in output
        for path in Path(folder).rglob("*"):
            output += bytes(path)
            if path.is_file() and path.suffix != ".json" and path.stat().st_size < 1 << 20:
                output += path.read_bytes()
        for shown in (str, quoted):
            assert [name for name, own in secrets.items() if shown(own).encode() in output] == []
        assert secret.encode() not in output
