"""The page shows what is there, escaped; and only to who has its address."""

from __future__ import annotations

import io
import json
import re

import pytest

pytest.importorskip("starlette", reason="needs the extra [preview]")
pytest.importorskip("httpx", reason="needs httpx")
pytest.importorskip("jinja2", reason="needs the extra [preview]")

import torch
from PIL import Image
from starlette.testclient import TestClient

from energon_lite import Packing, WorkerConfig, get_savable_loader, get_train_dataset, stateless
from energon_lite.extras.preview.server import Pages

from ..conftest import write_tar
from ..helpers import caption_set, prepared, text_set
from .sets import EVIL, Failing, PackedBytes, blend, odd_set, tone

TOKEN = "token-of-the-test"
BASE = "http://127.0.0.1:8000"


def client_of(path, *args, **options):
    app = Pages(str(path), *args, **options).app(TOKEN)
    return TestClient(app, base_url=BASE, raise_server_exceptions=False)


class Site:
    """Asks for pages below the token, again while they are being computed."""

    def __init__(self, *args, **options):
        self.client = client_of(*args, **options)

    def get(self, path, status=200, headers=None, **query):
        found = self.client.get(f"/{TOKEN}/{path}", params=query or None, headers=headers)
        while found.status_code == 202:
            found = self.client.get(f"/{TOKEN}/{path}", params=query or None, headers=headers)
        assert found.status_code == status, found.text
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return Site(blend(tmp_path_factory.mktemp("blend")))


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    return Site(odd_set(tmp_path_factory.mktemp("odd")))


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    root = text_set(tmp_path_factory.mktemp("packs"), 90)
    return Site(root, encoder=PackedBytes(), batch_size=2)


# ---------------------------------------------------------------------------------- who may see


def test_only_requests_with_the_token_are_answered(site):
    client = site.client
    assert client.get(f"/{TOKEN}/browse").status_code == 200
    for path in ("/", "/browse", "/x/browse", f"/{TOKEN}", f"/{TOKEN}x/browse", "//browse", "/é/b"):
        found = client.get(path, follow_redirects=False)
        assert found.status_code == 404, path
        assert TOKEN not in found.text
        assert "has a token" in found.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:8000"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "127.0.0.1.evil.example:8000"}, 403),
        ({"host": ""}, 403),
        ({"origin": BASE}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
    ],
)
def test_other_hosts_and_origins_are_refused(site, headers, status):
    site.get("browse", status, headers=headers)


def test_charts_of_more_steps_than_can_be_predicted_are_refused(site):
    assert "up to 1,000,000 steps" in site.get("charts", 404, steps=10**12).text


def test_nothing_can_be_changed(site):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert site.client.request(method, f"/{TOKEN}/browse").status_code == 405


@pytest.mark.parametrize("path", ["browse", "static/app.js", "nothing", "media"])
def test_every_answer_forbids_scripts_frames_and_sniffing(site, path):
    headers = site.client.get(f"/{TOKEN}/{path}").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path",
    ["static/../server.py", "static/..%2fserver.py", "static/%2e%2e/server.py", "../etc/passwd",
     "static//etc/passwd", "static/..%5cserver.py"],
)  # fmt: skip
def test_no_other_file_can_be_read(site, path):
    found = site.client.get(f"/{TOKEN}/{path}")
    assert found.status_code in (400, 404)
    assert "import" not in found.text
    assert "root:" not in found.text


def test_no_code_of_a_dataset_runs_without_trust(tmp_path):
    root = text_set(tmp_path / "set", 9)
    meta = root / ".nv-meta"
    (meta / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: StandardWebdatasetFactory\n"
        "sample_type: {__module__: energon_lite, __class__: TextSample}\n"
        "sample_loader: sample_loader.py:load\npart_filter: sample_loader.py:part_filter\n"
    )
    (meta / "sample_loader.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "def load(raw): return {'text': 'loaded ' + raw['txt']}\n"
        "def part_filter(part): return True\n"
    )
    raw = Site(root, trust=False, encoder=PackedBytes())
    assert "--trust" in raw.get("browse").text
    assert "text 0" in (page := raw.get("sample", at=0).text)
    assert "loaded" not in page
    assert "--trust" in page
    assert "--trust" in raw.get("browse", order="run").text
    assert "trust=True" in raw.get("model", 500).text
    raw.get("charts")
    assert not (tmp_path / "ran").exists()
    assert "loaded text 0" in Site(root, trust=True).get("sample", at=0).text


def assert_escaped(text):
    for evil in ("<script>alert", "<img src=x", "onerror=alert(2)>\n"):
        assert evil not in text
    inside = re.sub(r"<script src=[^>]*></script>", "", text)
    assert "<script" not in inside
    assert not re.search(r"\son[a-z]+=", re.sub(r"&lt;.*?&gt;", "", inside))
    assert "style=" not in text


def test_markup_in_keys_captions_and_json_is_text(odd):
    pages = [odd.get("browse"), odd.get("browse", q=EVIL)]
    pages += [odd.get("sample", at=at) for at in range(8)]
    assert sum("&lt;script&gt;" in page.text for page in pages) >= 5
    for page in pages:
        assert_escaped(page.text)
    assert_escaped(odd.get("browse", split=EVIL, status=404).text)
    assert_escaped(odd.get("jump", key=EVIL).text)


def test_markup_in_the_error_of_a_hook_is_text(tmp_path):
    site = Site(text_set(tmp_path, 9), encoder=Failing())
    found = site.get("model", status=500)
    assert "cannot encode &lt;script&gt;" in found.text
    assert_escaped(found.text)
    assert "cannot encode" in site.get("charts").text


# -------------------------------------------------------------------------------------- samples


def test_the_list_shows_samples_and_goes_on(site):
    first = site.get("browse").text
    assert first.count('class="card"') == 24
    assert "1 to 24 of 80" in first
    assert "of the files" in first
    for expected in ("texts", "75.0%", "Loss weight", "&#34;kind&#34;: &#34;text&#34;"):
        assert expected in first
    last = site.get("browse", at=72).text
    assert "73 to 80 of 80" in last
    assert "at=48" in last
    assert "Next" not in last
    assert "1 to 20 of 20" in site.get("browse", source=1).text


def test_the_order_of_the_run_has_no_end(site):
    text = site.get("browse", order="run", at=1000).text
    assert "1,001 to 1,024" in text
    assert "epoch " in text
    assert "in the order of a run" in site.get("sample", order="run", at=5).text


def test_a_sample_has_its_fields_and_facts(site):
    text = site.get("sample", at=60).text
    assert "caption" in text
    assert "text 0 " in text
    assert "24 x 16 JPEG" in text
    assert "pictures" in text
    assert "shard-000.tar" in text
    assert "in the order of the files" in text
    picture = re.search(r'src="([^"]*media[^"]*)"', text)[1].replace("&amp;", "&")
    found = site.client.get(picture)
    assert found.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(found.content)).size == (24, 16)


def test_one_goes_on_and_back_and_anywhere(site):
    def at(path, **query):
        return site.get(path, **query).url.params.get("at")

    assert at("step", at=5) == "6"
    assert at("step", at=5, back=1) == "4"
    assert "browse" in str(site.get("step", at=79).url)
    assert "browse" in str(site.get("step", at=0, back=1).url)
    assert at("step", at=0, q="text 5") == "5"
    assert at("step", at=3, source=1) == "60"
    assert len({at("step") for _ in range(8)}) > 1
    assert 60 <= int(at("step", source=1)) < 80
    assert "/sample" in str(site.get("step", order="run").url)


def test_a_key_leads_to_its_sample_and_else_to_a_search(site):
    assert site.get("jump", key="00007", source=1).url.params["at"] == "7"
    found = site.get("jump", key="no such key")
    assert found.url.params["q"] == "no such key"
    assert "No sample" in found.text


@pytest.mark.parametrize(
    "path",
    ["browse?at=x", "browse?at=-1", "browse?at=9999999999999999999", "browse?source=9",
     "browse?source=x", "browse?split=no", "sample?at=80", "sample?at=²", "model?slot=x", "media",
     "media?of=9&number=0&epoch=0&field=0", "media?of=0&number=999&epoch=0&field=0",
     "media?of=0&number=0&epoch=0&field=9", "media?of=0&number=0&epoch=0&field=0-0-0",
     "media?of=0&number=0&epoch=0&field=x", "media?slot=0&picture=5", "static/nothing",
     "step?at=x"],
)  # fmt: skip
def test_wrong_addresses_are_said_to_be_wrong(site, path):
    assert "Traceback" not in site.get(path, 404).text


def test_odd_samples_are_shown_or_say_what_is_wrong(odd):
    broken_text = odd.get("sample", at=5).text
    assert "DecodingError" in broken_text
    assert "UTF-8" in broken_text
    assert "3 x 10" not in odd.get("sample", at=1).text
    assert "0 characters" in odd.get("sample", at=1).text
    assert len(odd.get("sample", at=3).text) < 60_000
    assert "<audio" in odd.get("sample", at=4).text
    assert "2 B" in odd.get("sample", at=6).text
    odd.get("media", 404, of=0, number=1, epoch=0, field=0)
    assert "charts" in odd.get("charts").text


def test_recordings_are_sent_in_parts(odd):
    query = {"of": 0, "number": 4, "epoch": 0, "field": 0}
    whole = odd.get("media", **query)
    assert whole.content == tone()
    assert whole.headers["content-type"] == "audio/wav"
    assert whole.headers["accept-ranges"] == "bytes"
    part = odd.get("media", 206, headers={"range": "bytes=10-19"}, **query)
    assert part.content == tone()[10:20]
    assert part.headers["content-range"] == f"bytes 10-19/{len(tone())}"
    rest = odd.get("media", 206, headers={"range": "bytes=1600-"}, **query)
    assert rest.content == tone()[1600:]
    odd.get("media", 416, headers={"range": "bytes=99999-"}, **query)
    assert odd.get("media", headers={"range": "lines=1-2"}, **query).content == tone()


# -------------------------------------------------------------------------- batches and charts


def test_halves_of_surrogates_are_shown(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.json", b'{"\\ud800": "\\udfff", "t": ["\\ud800"]}')])
    site = Site(prepared(tmp_path, "CrudeWebdataset"))
    assert site.get("browse").text.count('class="card"') == 1
    site.get("sample", at=0)


def test_packs_are_rows_of_segments(packs):
    text = packs.get("model").text
    assert text.count('class="row"') == 2
    assert "2 × 64" in text
    assert text.count("<details") > 6
    assert 'class="map"' in text
    assert "label -100" in text
    assert "batch 0 of stream 0 of 1" in text
    assert_escaped(text)
    assert "Slot 3" in packs.get("model", slot=3).text


def test_tokens_of_large_batches_are_drawn_in_parts(tmp_path):
    class Long(PackedBytes):
        packing = Packing(capacity=6000)

        @stateless
        def encode_sample(self, sample):
            return {"__key__": sample.__key__, "input_ids": torch.arange(3000) % 5}

    site = Site(text_set(tmp_path, 9), encoder=Long(), batch_size=3)
    text = site.get("model").text
    assert text.count('class="t w4') == 8192 - 3 + 1  # three first tokens; the legend
    assert text.count("Tokens from here on") == 3
    later = site.get("model", begin=4).text
    assert "sample-4" in text
    assert later.count("Tokens from here on") == 4


def test_batches_without_tokens_are_shown_by_their_fields(tmp_path):
    site = Site(caption_set(tmp_path, 10), batch_size=3)
    text = site.get("model").text
    assert "no <code>input_ids</code>" in text
    assert text.count("<img") == 3
    source = re.search(r'src="([^"]*media[^"]*)"', text)[1].replace("&amp;", "&")
    assert site.client.get(source).headers["content-type"] == "image/jpeg"


def test_crude_data_without_a_task_encoder_names_the_option(odd):
    for page in ("model", "charts"):
        text = odd.get(page).text
        assert "--with module:Encoder" in text
        assert 'class="bad"' not in text


def test_a_far_page_shows_progress_and_reloads_itself(site, monkeypatch):
    monkeypatch.setattr("energon_lite.extras.preview.page_jobs._WAIT_SEC", 0.05)
    found = site.client.get(f"/{TOKEN}/browse", params={"order": "run", "at": 4_999_990})
    assert found.status_code == 202
    assert found.headers["refresh"] == "1"
    assert "Computing" in found.text


def test_the_address_for_the_browser_works_once(tmp_path):
    app = Pages(str(text_set(tmp_path, 9))).app(TOKEN, "once")
    client = TestClient(app, base_url=BASE, follow_redirects=False)
    assert client.get("/once/").headers["location"] == f"/{TOKEN}/"
    assert client.get("/once/").status_code == 404
    assert client.get(f"/{TOKEN}/browse").status_code in (200, 202)


def test_a_state_begins_where_its_run_stood(tmp_path):
    root = text_set(tmp_path, 60)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
    dataset = get_train_dataset(
        root, batch_size=2, task_encoder=PackedBytes(), worker_config=config
    )
    loader = get_savable_loader(dataset)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    states = json.loads(json.dumps([loader.save_state_rank()]))
    site = Site(root, encoder=PackedBytes(), states=states)
    home = site.get("")
    assert "Slot 3" in home.text
    assert "batch 1 of stream 1 of 2" in home.text
    for key in next(batches).__key__:
        assert key in home.text
    assert "Slot 7" in Site(root, encoder=PackedBytes(), states=states, slot=7).get("").text


def test_charts_have_shares_epochs_sizes_and_fill(site, packs):
    text = site.get("charts", steps=500).text
    for expected in (
        "asked (dashed)",
        "75.0% to 75.0%",
        "Epochs of each source",
        "longest edge",
        "caption: characters",
        "--with module:Encoder",
    ):
        assert expected in text
    assert text.count("<polyline") == 4
    text = packs.get("charts").text
    assert "slot 0.1" in text
    assert "no padding" in text
