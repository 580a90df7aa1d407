"""Servers of others speak the same protocols: moto for S3, azurite for Azure.

They are no dependencies: MOTO_PYTHON names a Python that has `moto[server,s3]`, AZURITE the program
`azurite-blob`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError

import pytest

from energon_lite.extras.prepare import prepare_dataset
from energon_lite.extras.remote import fetcher_client
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

from .test_remote_writes import HOW, tars, texts_of

MOTO_PYTHON = os.environ.get("MOTO_PYTHON") or (find_spec("moto") and sys.executable)
AZURITE = os.environ.get("AZURITE") or shutil.which("azurite-blob")
# The account and the key that azurite has from the start; they are public.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed"),
]


@contextmanager
def serving(command: list[str], **environ: str) -> Iterator[str]:
    """Starts a server, whose command ends with its port; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {**os.environ, **environ}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, str(port)], env=environ, **quiet) as process:
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture
def settings(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test have a fetcher of its own, with credentials that it sets."""
    del tmp_path  # is made where TMPDIR was
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    fetcher_client.forget()
    yield monkeypatch
    fetcher_client.forget()


@pytest.fixture
def moto(settings: pytest.MonkeyPatch) -> Iterator[str]:
    if not MOTO_PYTHON:
        pytest.skip("moto is not installed")
    with serving([MOTO_PYTHON, "-m", "moto.server", "-p"]) as url:
        request = urllib.request.Request(f"{url}/bucket", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        settings.setenv("AWS_ENDPOINT_URL", url)
        settings.setenv("AWS_ACCESS_KEY_ID", "key")
        settings.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield url


def check_folder(address: str, raw: Path) -> None:
    """Lists, prepares, reads and removes what lies at an address."""
    found = {name: path.read_bytes() for name, path in tars(raw).items()}
    for name, data in found.items():
        files.write_atomically(local_path(f"{address}/{name}"), data)
    assert files.entries(local_path(address)) == ["sub/"]
    assert prepare_dataset(address, **HOW).samples == 40
    assert len(texts_of(address)) == 20
    with pytest.raises(FileExistsError, match="is already prepared"):
        prepare_dataset(address, **HOW)
    info = local_path(f"{address}/.nv-meta/.info.json")
    status = files.status_of(info)
    assert status is not None
    files.write_over(info, b"{}", status.identity)
    for identity in (status.identity, None):
        with pytest.raises(FileExistsError, match="another program has written it"):
            files.write_over(info, b"[]", identity)
    files.remove(info)
    files.remove(info)
    assert files.status_of(info) is None
    assert files.status_of(local_path(f"{address}/none")) is None


def test_moto_stores_a_dataset(moto: str, tmp_path: Path) -> None:
    check_folder("s3://bucket/raw", tmp_path / "raw")


def test_lists_of_moto_have_several_pages(moto: str) -> None:
    names = [f"{number:04d}" for number in range(1030)]
    for name in names:
        request = urllib.request.Request(f"{moto}/bucket/many/{name}", b"x", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
    assert files.entries(local_path("s3://bucket/many")) == names


def test_moto_refuses_keys_that_it_does_not_know(settings: pytest.MonkeyPatch) -> None:
    if not MOTO_PYTHON:
        pytest.skip("moto is not installed")
    command = [MOTO_PYTHON, "-m", "moto.server", "-p"]
    with serving(command, INITIAL_NO_AUTH_ACTION_COUNT="0") as url:
        settings.setenv("AWS_ENDPOINT_URL", url)
        settings.setenv("AWS_ACCESS_KEY_ID", "unknown-key")
        settings.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with pytest.raises(PermissionError, match=r"refuses access; give .*s3://bucket/a") as found:
            files.read_file(local_path("s3://bucket/a"))
    assert "unknown-key" not in str(found.value)


def test_azurite_stores_a_dataset(settings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not AZURITE or not shutil.which("node"):
        pytest.skip("node or azurite is not installed")
    command = [AZURITE, "--skipApiVersionCheck", "--location", str(tmp_path / "a"), "--blobPort"]
    with serving(command) as url:
        settings.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        settings.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        settings.setenv("AZURE_STORAGE_ENDPOINT", f"{url}/{ACCOUNT}")
        make_container(url)
        check_folder("az://bucket/raw", tmp_path / "raw")


def make_container(url: str) -> None:
    """Makes the container `bucket` by a signed request."""
    date = formatdate(usegmt=True)
    head = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    text = f"PUT{chr(10) * 12}{head}/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
    mac = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date, "x-ms-version": "2021-08-06",
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}",
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/{ACCOUNT}/bucket?restype=container", method="PUT", headers=headers
    )
    try:
        urllib.request.urlopen(request, timeout=60).close()
    except HTTPError as error:
        raise AssertionError(error.read()) from None
