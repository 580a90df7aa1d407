"""Keys, regions and endpoints of S3 come from `~/.aws` as well, without the tools of AWS."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

from .server import Server

pytestmark = pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed")

NAME = "s3://bucket/texts/.nv-meta/split.yaml"
Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Write:
    """Writes the files, for a user without variables of AWS."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))

    def to_files(credentials: str = "", config: str = "", folder: str = ".aws") -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "credentials").write_text(credentials)
        (tmp_path / folder / "config").write_text(config)

    return to_files


def keys(server: Server) -> str:
    key, secret = server.credentials or ("", "")
    return f"aws_access_key_id = {key}\naws_secret_access_key = {secret}\n"


def place(server: Server) -> str:
    return f"region = us-east-1\nendpoint_url = {server.url}\ns3 =\n  addressing_style = path\n"


def read() -> bytes:
    return files.read_file(local_path(NAME))


def test_default_profile_is_read(server: Server, write: Write) -> None:
    write(f"[default]\n{keys(server)}", f"[default]\n{place(server)}")
    assert read()


@pytest.mark.parametrize("variable", ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"])
def test_profile_of_the_environment_is_read(
    server: Server, write: Write, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    other = "[default]\naws_access_key_id = no\naws_secret_access_key = no\n"
    write(f"{other}[mine]\n{keys(server)}", f"[profile mine]\n{place(server)}")
    monkeypatch.setenv(variable, "mine")
    assert read()


def test_files_may_lie_elsewhere(
    server: Server, write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write("[default]\n" + keys(server), "[default]\n" + place(server), "other")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "other" / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", "~/other/config")
    assert read()


def test_variables_come_before_the_files(
    server: Server, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("[default]\naws_access_key_id = no\naws_secret_access_key = no\n",
          "[default]\nendpoint_url = http://127.0.0.1:9\nregion = eu-west-9\n")  # fmt: skip
    key, secret = server.credentials or ("", "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert read()


REFUSED = {
    "nowhere": ("", "AWS profile 'nowhere' is in none of ~/.aws/config, ~/.aws/credentials"),
    "sso": ("sso_session = x", r"AWS profile 'sso' has sso_session.*export-credentials"),
    "role": ("role_arn = x\nsource_profile = y", "AWS profile 'role' has role_arn, which only"),
    "half": ("aws_access_key_id = x", "AWS profile 'half' has no aws_secret_access_key"),
    "odd": ("the-secret-line\n", r"config cannot be read: ParsingError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(
    server: Server, write: Write, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    text, match = REFUSED[name]
    write("", f"[profile {name}]\n{text}\n" if text else "")
    monkeypatch.setenv("AWS_PROFILE", name)
    with pytest.raises((OSError, DatasetFormatError), match=match) as caught:
        read()
    assert "the-secret" not in str(caught.value)
