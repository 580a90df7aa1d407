"""The page in a browser: no error, no violation of accessibility, keys work; on real pictures.

`PREVIEW_IMAGES=docs/images pytest tests/preview -k browser` writes the pictures of docs/preview.md.
"""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the extra [preview]")
pytest.importorskip("jinja2", reason="needs the extra [preview]")
pytest.importorskip("uvicorn", reason="needs the extra [preview]")
pytest.importorskip("playwright", reason="needs playwright")
pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python")

import torch
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

from energon_lite import DefaultTaskEncoder, Packing, prepare_dataset, stateless
from energon_lite.extras.preview.server import Pages

from ..conftest import REPO, write_tar
from .screen import CHROMIUM, FLAGS, IMAGES, MAX_IMAGE_BYTES

DATA = next((p / "shared/data" for p in REPO.parents if (p / "shared/data").is_dir()), None)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
    pytest.mark.skipif(DATA is None, reason="needs the real data (shared/data)"),
]

# Pictures under CC BY 2.0; docs/preview.md names their authors.
PICTURES = (285, 785, 885, 2473, 6012, 7281, 7991, 8762, 11149, 20247, 30213, 62554)


class Words:
    """GPT-2's vocabulary, each word cut into the longest tokens that there are."""

    def __init__(self):
        self.ids = json.loads((DATA / "gpt2_bpe" / "encoder.json").read_text())
        self.texts = {
            number: text.replace("Ġ", " ").replace("Ċ", "\n") for text, number in self.ids.items()
        }

        self.texts[50256] = "<image>"  # <|endoftext|>, which no text has

    def encode(self, text):
        text, found = text.replace(" ", "Ġ").replace("\n", "Ċ"), []
        while text:
            stop = next((n for n in range(min(20, len(text)), 1, -1) if text[:n] in self.ids), 1)
            found += [self.ids[text[:stop]]] if text[:stop] in self.ids else []
            text = text[stop:]
        return found

    def decode(self, ids):
        return "".join(self.texts[number] for number in ids)


class Tutor(DefaultTaskEncoder):
    """Pictures and exercises in packs; the loss is on the answers."""

    packing = Packing(capacity=512, overlong="truncate")
    image_token_id = 50256

    def __init__(self):
        super().__init__()
        self.tokenizer = Words()

    @stateless
    def encode_sample(self, sample):
        image = getattr(sample, "image", None)
        if image is None:
            question, _, answer = sample.text.partition("\n")
            prompt = self.tokenizer.encode(f"User: {question}\nAssistant:")
        else:
            answer = sample.caption
            prompt = [
                *self.tokenizer.encode("User: "), *[self.image_token_id] * 24,
                *self.tokenizer.encode(" What do you see?\nAssistant:"),
            ]  # fmt: skip
        own = self.tokenizer.encode(f" {answer}")
        return {
            "__key__": sample.__key__, "__restore_key__": sample.__restore_key__,
            "__loss_weight__": sample.__loss_weight__,
            "input_ids": torch.tensor(prompt + own),
            "loss_mask": torch.tensor([0] * len(prompt) + [1] * len(own)),
            "images": [] if image is None else [image],
        }  # fmt: skip

    def sample_length(self, sample):
        return len(sample["input_ids"])


def write_sets(folder):
    """COCO captions and exercises of GSM8K, blended: what is asked changes over the run."""
    captions = json.loads((DATA / "coco_captions" / "captions.json").read_text())["annotations"]
    by_image = {own["image_id"]: own["caption"].strip() for own in reversed(captions)}
    members = []
    for number in PICTURES:
        picture = DATA / "coco_captions" / "permissive" / f"{number:012d}.jpg"
        members += [
            (f"{number:012d}.jpg", picture.read_bytes()),
            (f"{number:012d}.txt", by_image[number].encode()),
        ]
    write_tar(folder / "coco" / "a.tar", members)
    lines = (DATA / "instruct_text" / "gsm8k_test.jsonl").read_text().splitlines()[:300]
    exercises = [json.loads(line) for line in lines]
    texts = [f"{row['question']}\n{row['answer']}" for row in exercises]
    write_tar(
        folder / "maths" / "a.tar",
        [(f"exercise-{n:03d}.txt", text.encode()) for n, text in enumerate(texts)],
    )
    for name, kind, field_map in (
        ("coco", "CaptioningSample", {"image": "jpg", "caption": "txt"}),
        ("maths", "TextSample", {"text": "txt"}),
    ):
        prepare_dataset(
            folder / name, split_parts={"train": ".*"}, sample_type=kind, field_map=field_map,
            num_workers=0,
        )  # fmt: skip
    (folder / "vlm.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        "    - {path: ./coco, name: pictures, subflavors: {kind: picture}, weight: {schedule: "
        "linear, points: {0: 3, 2000: 1}}}\n"
        "    - {path: ./maths, name: exercises, loss_weight: 0.5}\n"
    )
    return folder / "vlm.yaml"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    pages = Pages(str(write_sets(tmp_path_factory.mktemp("sets"))), encoder=Tutor(), batch_size=2)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(pages.app("token"), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/token"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser():
    with (
        sync_playwright() as play,
        play.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as running,
    ):
        yield running


@pytest.fixture
def open_page(browser):
    """Opens pages; at the end none of them may have logged an error."""
    errors, contexts = [], []

    def open_(address, scheme="light", width=1280, height=900):
        contexts.append(browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme,
        ))  # fmt: skip
        page = contexts[-1].new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_load_state("networkidle")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert errors == []


VIEWS = ("browse", "browse?order=run&q=the", "sample?at=2", "sample?at=20", "model", "charts",
         "browse?split=no")  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_nobody_is_left_out(address, browser, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    for view in VIEWS:
        page.goto(f"{address}/{view}")
        page.wait_for_load_state("networkidle")
        found = Axe().run(page)
        assert found.violations_count == 0, f"{view}: {found.generate_report()}"
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
    context.close()


def test_pages_load_without_an_error_and_pictures_are_there(address, open_page):
    page = open_page(f"{address}/browse?source=0")
    pictures = page.locator(".thumb")
    expect(pictures).to_have_count(len(PICTURES))
    for view in ("sample?at=1", "model", "charts", "browse?order=run"):
        page.goto(f"{address}/{view}")
        page.wait_for_load_state("networkidle")
        widths = page.eval_on_selector_all(
            "img:not([loading=lazy])", "all => all.map(own => own.naturalWidth)"
        )
        assert all(widths), view
    assert page.locator("style, script:not([src]), [style], [onclick]").count() == 0


def test_keys_go_where_they_say(address, open_page):
    page = open_page(f"{address}/browse")
    page.keyboard.press("/")
    expect(page.get_by_label("Search in keys and text")).to_be_focused()
    page.keyboard.type("jr")  # these are letters here
    expect(page.get_by_label("Search in keys and text")).to_have_value("jr")
    page.keyboard.press("Escape")
    page.goto(f"{address}/browse")
    page.keyboard.press("j")
    page.wait_for_url("**/browse?at=24")
    page.keyboard.press("k")
    page.wait_for_url("**/browse?at=0")
    page.goto(f"{address}/sample?at=3")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**/sample?at=4")
    page.keyboard.press("k")
    page.wait_for_url("**/sample?at=3")
    page.keyboard.press("r")
    expect(page).not_to_have_url(f"{address}/sample?at=3")
    page.goto(f"{address}/model")
    page.keyboard.press("j")
    page.wait_for_url("**/model?slot=1")


def test_what_is_focused_can_be_seen_and_opened_without_a_mouse(address, open_page):
    page = open_page(f"{address}/browse")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_in_viewport()
    page.locator(".card a").nth(2).focus()
    width = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert width != "0px"
    page.keyboard.press("Enter")
    page.wait_for_url("**/sample?at=2")


def test_a_choice_takes_effect_at_once(address, open_page):
    page = open_page(f"{address}/browse")
    page.locator("select[name=source]").select_option("exercises")
    page.wait_for_url("**source=1**")
    expect(page.locator(".thumb")).to_have_count(0)


def test_tokens_tell_what_they_are(address, open_page):
    page = open_page(f"{address}/model")
    token = page.locator(".t.w0").nth(5)
    token.scroll_into_view_if_needed()
    token.hover()
    expect(page.locator("#about-token")).to_contain_text("label -100")
    assert page.locator("img.here").count() > 0


@pytest.mark.skipif(not IMAGES, reason="set PREVIEW_IMAGES to write the pictures of the docs")
@pytest.mark.parametrize(
    ("name", "view", "scheme", "height"),
    [
        ("browse", "browse?order=run", "light", 860),
        ("model", "model?slot=1", "light", 980),
        ("charts", "charts?steps=1000", "dark", 860),
    ],
)
def test_pictures_of_the_docs_are_written(address, open_page, name, view, scheme, height):
    from PIL import Image

    page = open_page(f"{address}/{view}", scheme, 1200, height)
    path = Path(IMAGES) / f"preview_{name}.png"
    page.screenshot(path=path)
    image = Image.open(path).convert("RGB")
    for colours in (256, 128, 64, 32):
        image.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size <= MAX_IMAGE_BYTES:
            break
    assert path.stat().st_size <= MAX_IMAGE_BYTES
