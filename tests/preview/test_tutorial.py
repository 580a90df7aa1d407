"""The commands of docs/quickstart.md on the data of its blocks, and the pictures that it shows.

`PREVIEW_IMAGES=docs/images pytest tests/preview -k tutorial` writes the pictures.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the extra [preview]")
pytest.importorskip("jinja2", reason="needs the extra [preview]")

from starlette.testclient import TestClient
from typer.testing import CliRunner

from energon_lite.extras.cli import app
from energon_lite.extras.preview.server import Pages

from ..architecture.doc_blocks import find_blocks, run_blocks
from ..conftest import REPO
from .screen import CHROMIUM, FLAGS, IMAGES, MAX_IMAGE_BYTES

PAGE = REPO / "docs" / "quickstart.md"


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory):
    """The folder after all blocks of the page; its `encoder.py` can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("tutorial"))
        patch.syspath_prepend(Path.cwd())
        assert run_blocks(PAGE, "doc_tutorial") > 5
        yield Path.cwd()
        sys.modules.pop("encoder", None)


@pytest.fixture(scope="module")
def pages(tutorial):
    from encoder import Encoder  # type: ignore[import-not-found]

    return {
        "samples": Pages(str(tutorial / "shapes")),
        "model": Pages(str(tutorial / "blend.yaml"), encoder=Encoder(), batch_size=2),
    }


def commands():
    blocks = [
        block for block in find_blocks(PAGE.read_text(encoding="utf-8")) if not block.language
    ]
    lines = "\n".join(block.code for block in blocks).splitlines()
    return [line.split()[1:] for line in lines if line.startswith("energon-lite")]


def test_commands_of_the_tutorial_do_what_it_shows(tutorial, pages):
    look, as_model, report = commands()
    assert look == ["preview", "shapes"]
    assert as_model[:4] == ["preview", "blend.yaml", "--with", "encoder:Encoder"]
    assert CliRunner().invoke(app, look, input="q\n").exit_code == 0
    printed = CliRunner().invoke(app, report[:2])
    assert printed.exit_code == 0
    assert "shapes/train" in printed.stdout

    def read(name, view):
        host = "http://127.0.0.1:80"
        client = TestClient(pages[name].app("token"), base_url=host)
        while (found := client.get(f"/token/{view}")).status_code == 202:
            pass
        return found.text

    assert "a red circle" in read("samples", "browse")
    model = read("model", "model")
    assert "PackedBatch" in model
    assert "sums" in model


@pytest.mark.skipif(not IMAGES, reason="set PREVIEW_IMAGES to write the pictures of the docs")
def test_pictures_of_the_tutorial_are_written(tutorial, pages):
    import uvicorn
    from PIL import Image
    from playwright.sync_api import sync_playwright

    report = commands()[-1]
    assert CliRunner().invoke(app, report).exit_code == 0
    addresses = {"report": ((tutorial / report[-1]).as_uri(), 660)}
    servers = []
    for name, height in (("samples", 640), ("model", 860)):
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(pages[name].app("token"), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        servers.append((server, thread, listening))
        view = {"samples": "browse", "model": "model?slot=1"}[name]
        port = listening.getsockname()[1]
        addresses[name] = (f"http://127.0.0.1:{port}/token/{view}", height)
    with (
        sync_playwright() as play,
        play.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as browser,
    ):
        for name, (address, height) in addresses.items():
            page = browser.new_page(viewport={"width": 1100, "height": height})
            page.goto(address)
            page.wait_for_load_state("networkidle")
            path = Path(IMAGES) / f"tutorial_{name}.png"
            path = path if path.is_absolute() else REPO / path
            page.screenshot(path=path)
            image = Image.open(path).convert("RGB")
            image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
            assert path.stat().st_size <= MAX_IMAGE_BYTES
    for server, thread, listening in servers:
        server.should_exit = True
        thread.join()
        listening.close()
