"""Addresses `msc://profile/path` mean what the files of multi-storage-client say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.remote import msc_profiles
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
    numbers = count()

    def write(profiles: Any, name: str = "", **others: Any) -> Path:
        file = tmp_path / (name or f"msc-{next(numbers)}.json")  # a fetcher has read the last one
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
    files.remove(local_path("msc://one/a/b"))
    assert server.read("bucket/deep/a/b") is None


def test_other_servers_speak_the_protocol_of_s3(server: Server, configure: Configure) -> None:
    profiles = {kind: s3(server) for kind in ("s8k", "gcs-s3", "ais-s3")}
    for kind, profile in profiles.items():
        profile["storage_provider"]["type"] = kind.replace("-", "_")
    configure(profiles)
    for kind in profiles:
        assert read(f"msc://{kind}/texts/.nv-meta/split.yaml")


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


BASE = {"base_path": "bucket"}
REFUSED = {
    "oci": (
        {"storage_provider": {"type": "oci", "options": BASE}},
        r"storage_provider.type 'oci' is not known here, and multi-storage-client cannot read it: ",
    ),
    "option": (
        {"storage_provider": {"type": "s3", "options": {**BASE, "own": 1}}},
        r"storage_provider.options.own is not known here, and multi-storage-client cannot",
    ),
    "bundle": ({"provider_bundle": {"type": "my.Bundle"}}, r"provider_bundle is not known"),
    "manifest": (
        {"storage_provider": {"type": "s3", "options": BASE},
         "metadata_provider": {"type": "manifest", "options": {"manifest_path": "none"}}},
        r"metadata_provider is not known",
    ),
    "issuer": (
        {"storage_provider": {"type": "s3", "options": BASE},
         "credentials_provider": {"type": "my.Own"}},
        r"credentials_provider.type 'my.Own' is not known",
    ),
    "variable": (
        {"storage_provider": {"type": "s3", "options": {"base_path": "${NOT_SET_ANYWHERE}"}}},
        r"environment variable \$\{NOT_SET_ANYWHERE\} is not set",
    ),
    "half": (
        {"storage_provider": {"type": "s3", "options": BASE},
         "credentials_provider": {"type": "S3Credentials", "options": {"access_key": "a"}}},
        r"write access_key and secret_key",
    ),
    "no_file": (
        {"storage_provider": {"type": "s3", "options": BASE},
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
    names = ["xdg/msc/config.json", ".config/msc/config.yaml", ".msc_config.json",
             ".msc_config.yaml", "own/msc/config.yaml"]  # fmt: skip
    for number, name in enumerate(names):  # each comes before the one before
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        provider = {"type": "file", "options": {"base_path": f"/{number}"}}
        file.write_text(json.dumps({"profiles": {"one": {"storage_provider": provider}}}))
        assert profile_named("one").options["base_path"] == f"/{number}"
    assert profile_named("default").kind == "file"


def test_configuration_may_have_several_files(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"storage_provider": {"type": "file", "options": {"base_path": "/"}}}
    configure({"two": disk}, "inner.json")
    configure({"one": disk}, include=[str(tmp_path / "inner.json")])
    assert profile_named("one").kind == profile_named("two").kind == "file"
    file = configure({"one": disk, "three": disk})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "rclone").mkdir()
    (tmp_path / "rclone" / "rclone.conf").write_text("[one]\ntype = s3\n")
    match = f"rclone.conf, profile 'one': is another one in {file}"
    with pytest.raises(OSError, match=match):
        read("msc://three/texts")


@pytest.mark.parametrize("text", ["{", '{"profiles": {"one": ["the-secret"]}}'])
def test_malformed_configuration_is_an_error_without_its_values(
    server: Server, texts: Path, configure: Configure, tmp_path: Path, text: str
) -> None:
    configure({}).write_text(text)
    with pytest.raises(OSError, match=r"multi-storage-client is malformed .*msc-0.json") as caught:
        read("msc://one/texts")
    assert "the-secret" not in str(caught.value)
    assert texts_of("s3://bucket/texts")


@pytest.mark.parametrize(
    "place", [pytest.param(".rclone.conf", marks=pytest.mark.soak), ".config/rclone/rclone.conf"]
)
def test_profiles_of_rclone_are_read(
    server: Server, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for name in ("MSC_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    key, secret = server.credentials or ("", "")
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"[store]\ntype = s3\nprovider = Minio\nenv_auth = false\naccess_key_id = {key}\n"
        f"secret_access_key = {secret}\nregion = us-east-1\nendpoint = {server.url}\n"
    )
    assert sorted(texts_of("msc://store/bucket/texts")) == sorted(texts_of(texts / "texts"))
    with pytest.raises(OSError, match=r"rclone.conf has no such profile. Did you mean 'store'"):
        read("msc://stoer/bucket/texts")


def test_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msc_profiles, "PACKAGE", "not_installed")
    with pytest.raises(DatasetFormatError, match=r"pip install 'energon_lite\[msc\]'"):
        profile_named("one")


def test_installed_client_reads_what_only_it_understands(
    configure: Configure, texts: Path, tmp_path: Path, server: Server
) -> None:
    shutil.copytree(texts / "texts", tmp_path / "data" / "texts")
    options = {"base_path": str(tmp_path / "data"), "of_another": True}
    configure({"one": {"storage_provider": {"type": "file", "options": options}}})
    assert sorted(texts_of("msc://one/texts")) == sorted(texts_of(texts / "texts"))
    assert "shard-000.tar" in files.entries(local_path("msc://one/texts"))
    files.write_atomically(local_path("msc://one/new/a"), b"first")
    file = files.open_bytes(local_path("msc://one/new/a"))
    files.write_atomically(local_path("msc://one/new/a"), b"other")
    with pytest.raises(OSError, match="replaced after it was opened"):
        file.read(0, 5)
    files.remove(local_path("msc://one/new/a"))
    assert files.status_of(local_path("msc://one/new/a")) is None
