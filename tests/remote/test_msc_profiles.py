"""Addresses `msc://profile/path` mean what the files of multi-storage-client say."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.remote import fetcher_client, msc_profiles
from energon_lite.extras.remote.msc_profiles import profile_named
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

from ..helpers import metadataset
from .server import Server
from .test_remote_writes import texts_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed"),
]

Configure = Callable[..., Path]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    monkeypatch.setattr(fetcher_client, "_PROFILES_SEC", 0.0)  # a file is changed, and used at once

    def write(profiles: Any, name: str = "msc.json", **others: Any) -> Path:
        file = tmp_path / name
        file.write_text(json.dumps({"profiles": profiles, **others}))
        monkeypatch.setenv("MSC_CONFIG", str(file))
        return file

    return write


@pytest.fixture(scope="module")
def other(texts: Path) -> Iterator[Server]:
    """A server of the same objects, with credentials of its own."""
    with Server(root=texts, credentials=("other-key", "other-secret")) as running:
        yield running


def s3(server: Server, base: str = "bucket", **options: Any) -> dict[str, Any]:
    key, secret = server.credentials or ("", "")
    return {
        "storage_provider": {
            "type": "s3",
            "options": {"base_path": base, "endpoint_url": server.url, **options},
        },
        "credentials_provider": {
            "type": "S3Credentials",
            "options": {"access_key": key, "secret_key": secret},
        },
    }


def issued(kind: str, **options: str) -> dict[str, Any]:
    return {"credentials_provider": {"type": kind, "options": options}}


def read(address: str) -> bytes:
    return files.read_file(local_path(address))


def test_profiles_with_different_credentials_work_side_by_side(
    server: Server, other: Server, texts: Path, configure: Configure, tmp_path: Path
) -> None:
    configure({
        "one": s3(server, region_name="eu-west-1"), "two": s3(other, "bucket/texts"),
        "disk": {"storage_provider": {"type": "file", "options": {"base_path": str(texts)}}},
    })  # fmt: skip
    expected = texts_of(texts / "texts")
    for address in ("msc://one/texts", "msc://two", "msc://disk/texts", "s3://bucket/texts"):
        assert sorted(texts_of(address)) == sorted(expected), address
    blend = [{"path": f"msc://{name}", "repetitions": 1} for name in ("one/texts", "two/")]
    path = tmp_path / "both.yaml"
    path.write_text(json.dumps(metadataset({"blend_epochized": blend})))
    assert sorted(texts_of(path)) == sorted(expected * 2)
    configure(
        {
            "one": s3(server),
            "two": {**s3(other), "credentials_provider": s3(server)["credentials_provider"]},
        }
    )
    with pytest.raises(OSError, match=r"refuses access.*msc://two/texts"):
        read("msc://two/texts/.nv-meta/.info.json")
    assert read("msc://one/texts/.nv-meta/.info.json")


def test_what_is_written_is_there(server: Server, configure: Configure, tmp_path: Path) -> None:
    disk = {"storage_provider": {"type": "file", "options": {"base_path": str(tmp_path)}}}
    configure({"one": s3(server, "bucket/deep"), "disk": disk})
    files.write_atomically(local_path("msc://one/a/b"), b"there")
    files.write_atomically(local_path("msc://disk/a/b"), b"here")
    assert server.read("bucket/deep/a/b") == b"there"
    assert (tmp_path / "a" / "b").read_bytes() == b"here"
    assert files.entries(local_path("msc://one/a")) == ["b"]
    assert files.entries(local_path("msc://disk/a")) == ["b"]


@pytest.mark.parametrize("kind", ["s8k", "gcs_s3", "ais_s3"])
def test_other_servers_speak_the_protocol_of_s3(
    server: Server, configure: Configure, kind: str
) -> None:
    profile = s3(server)
    profile["storage_provider"]["type"] = kind
    configure({"one": profile})
    assert read("msc://one/texts/.nv-meta/split.yaml")


def test_credentials_come_from_files_and_variables(
    server: Server, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, secret = server.credentials or ("", "")
    monkeypatch.setenv("MY_SECRET", secret)
    monkeypatch.setenv("MY_KEY", "wrong")
    given = {"access_key": "${MY_KEY}", "secret_key": "${MY_SECRET}"}
    from_file = {"credential_file_path": str(tmp_path / "key.json")}
    configure({
        "variables": {**s3(server), **issued("S3Credentials", **given)},
        "file": {**s3(server), **issued("FileBasedCredentials", **from_file)},
    })  # fmt: skip
    (tmp_path / "key.json").write_text(json.dumps({"AccessKeyId": key, "SecretAccessKey": secret}))
    assert read("msc://file/texts/.nv-meta/split.yaml")
    with pytest.raises(OSError, match="refuses access"):
        read("msc://variables/texts/.nv-meta/split.yaml")
    monkeypatch.setenv("MY_KEY", key)  # another fetcher
    assert read("msc://variables/texts/.nv-meta/split.yaml")


def test_public_data_need_no_credentials(texts: Path, server: Server, configure: Configure) -> None:
    with Server(root=texts) as public:
        profile = s3(public, signature_version="UNSIGNED")
        del profile["credentials_provider"]
        configure({"public": profile})
        assert read("msc://public/texts/.nv-meta/split.yaml")


def test_stores_of_azure_and_google_are_mapped(
    server: Server, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = f"AccountName=account;AccountKey=a2V5;BlobEndpoint={server.url}"
    configure({
        "azure": {
            "storage_provider": {"type": "azure", "options": {"base_path": "bucket"}},
            **issued("AzureCredentials", connection=connection),
        },
    })  # fmt: skip
    with pytest.raises(OSError, match="refuses access"):  # the server knows one key
        read("msc://azure/texts/.nv-meta/split.yaml")
    assert any("bucket/texts" in entry.path for entry in server.log())


REFUSED = {
    "oci": ({"storage_provider": {"type": "oci"}}, r"storage_provider.type 'oci' is not known"),
    "rdma": (
        {"storage_provider": {"type": "s3", "options": {"rdma": True}}},
        r"storage_provider.options.rdma is not known here. Install multi-storage-client",
    ),
    "bundle": ({"provider_bundle": {"type": "my.Bundle"}}, r"provider_bundle is not known"),
    "manifest": (
        {"storage_provider": {"type": "file"}, "metadata_provider": {"type": "manifest"}},
        r"metadata_provider is not known",
    ),
    "issuer": (
        {"storage_provider": {"type": "s3"}, "credentials_provider": {"type": "my.Own"}},
        r"credentials_provider.type 'my.Own' is not known",
    ),
    "empty": ({}, r"storage_provider: \{type: s3, options: ...\} is missing"),
    "list": ([], r"storage_provider must be a mapping"),
    "variable": (
        {"storage_provider": {"type": "${NOT_SET_ANYWHERE}"}},
        r"environment variable 'NOT_SET_ANYWHERE' is not set",
    ),
    "half": (
        {"storage_provider": {"type": "s3"},
         "credentials_provider": {"type": "S3Credentials", "options": {"access_key": "a"}}},
        r"write access_key and secret_key",
    ),
    "no_file": (
        {"storage_provider": {"type": "s3"},
         "credentials_provider": {"type": "FileBasedCredentials",
                                  "options": {"credential_file_path": "/nothing"}}},
        r"credential_file_path must be of a file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(server: Server, configure: Configure, name: str) -> None:
    profile, match = REFUSED[name]
    file = configure({name: profile})
    with pytest.raises(OSError, match=match) as caught:
        read(f"msc://{name}/texts/split.yaml")
    assert f"{file}, profile {name!r}" in str(caught.value)
    with pytest.raises(OSError, match=r"msc://nome: .* has no such profile"):
        read("msc://nome/texts")


def test_files_are_found_where_multi_storage_client_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MSC_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "xdg"))
    seen = [msc_profiles.fingerprint()]
    names = ["xdg/msc/config.json", ".config/msc/config.yaml", ".msc_config.json",
             ".msc_config.yaml", "own/msc/config.yaml"]  # fmt: skip
    for number, name in enumerate(names):  # each comes before the one before
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        provider = {"type": "file", "options": {"base_path": f"/{number}"}}
        file.write_text(json.dumps({"profiles": {"one": {"storage_provider": provider}}}))
        assert profile_named("one").options["base_path"] == f"/{number}"
        seen.append(msc_profiles.fingerprint())
    assert len({repr(one) for one in seen}) == len(seen)
    assert profile_named("default").kind == "file"


def test_included_files_belong_to_it(configure: Configure, tmp_path: Path) -> None:
    disk = {"storage_provider": {"type": "file"}}
    configure({"two": disk}, "inner.json", path_mapping={"/data/": "msc://two/"})
    file = configure({"one": disk}, include=["inner.json"])
    assert profile_named("one").kind == profile_named("two").kind == "file"
    folder = fetcher_client.folder_of_fetcher()
    configure({"two": disk, "three": disk}, "inner.json")
    configure({"one": disk}, include=["inner.json"])
    assert fetcher_client.folder_of_fetcher() != folder
    configure({"two": {"storage_provider": {"type": "s3"}}}, include=["inner.json"])
    with pytest.raises(DatasetFormatError, match=f"profile 'two': is another one in {file}"):
        profile_named("one")
    (tmp_path / "msc.json").write_text("{")
    fetcher_client.folder_of_fetcher()  # other addresses work


# multi-storage-client as far as it is used, over a folder of this machine.
CLIENT = """
import json, os
from pathlib import Path
from types import SimpleNamespace

class StorageClientConfig:
    @classmethod
    def from_file(cls, profile):
        config = json.loads(Path(os.environ["MSC_CONFIG"]).read_text())
        return config["profiles"][profile]["storage_provider"]["options"]["base_path"]

class StorageClient:
    def __init__(self, base):
        self.base = Path(base)

    def _facts(self, path):
        facts, is_file = path.stat(), path.is_file()
        return SimpleNamespace(
            key=path.relative_to(self.base).as_posix(), content_length=facts.st_size,
            type="file" if is_file else "directory", etag=None, last_modified=facts.st_mtime_ns,
        )

    def info(self, path):
        return self._facts(self.base / path)

    def read(self, path, byte_range=None):
        data = (self.base / path).read_bytes()
        return data[byte_range.offset:][:byte_range.size] if byte_range else data

    def list(self, path, include_directories=False):
        for found in sorted((self.base / path).iterdir()):
            if include_directories or found.is_file():
                yield self._facts(found)

    def write(self, path, body):
        (self.base / path).parent.mkdir(parents=True, exist_ok=True)
        (self.base / path).write_bytes(body)

    def delete(self, path):
        (self.base / path).unlink()

types = SimpleNamespace(Range=SimpleNamespace)
"""


def test_installed_client_reads_what_only_it_understands(
    configure: Configure, place: Path, texts: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, server: Server,
) -> None:  # fmt: skip
    shutil.copytree(texts / "texts", tmp_path / "data" / "texts")
    options = {"base_path": str(tmp_path / "data"), "of_another": True}
    configure({"one": {"storage_provider": {"type": "own", "options": options}}})
    with pytest.raises(OSError, match=r"type 'own' is not known here. Install multi-storage"):
        read("msc://one/texts/.nv-meta/split.yaml")
    (tmp_path / "multistorageclient.py").write_text(CLIENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(place / "again"))  # and so another fetcher
    (place / "again").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert sorted(texts_of("msc://one/texts")) == sorted(texts_of(texts / "texts"))
    assert "shard-000.tar" in files.entries(local_path("msc://one/texts"))
    files.write_atomically(local_path("msc://one/new/a"), b"first")
    file = files.open_bytes(local_path("msc://one/new/a"))
    files.write_atomically(local_path("msc://one/new/a"), b"other")
    with pytest.raises(OSError, match="replaced after it was opened"):
        file.read(0, 5)
    files.remove(local_path("msc://one/new/a"))
    assert files.status_of(local_path("msc://one/new/a")) is None
