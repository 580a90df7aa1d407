"""Blocks of the pages that need optional packages, run as they are written."""

from __future__ import annotations

import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from energon_lite import SampleDecoder

from .architecture.doc_blocks import find_blocks, run_blocks
from .conftest import REPO

SKIP = "see tests/test_optional_blocks.py -->"


def test_augmentation_of_the_page_on_task_encoders_runs(data_folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchvision", reason="needs torchvision")
    page = (REPO / "docs/task_encoder.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if not line.endswith(SKIP)]
    assert len(page.splitlines()) == len(lines) + 1
    lines += ["```python", "image = next(iter(make_loader(Augmented()))).image"]
    lines += ["assert image.shape == (4, 3, 224, 224)", "```"]
    Path("page.md").write_text("\n".join(lines), encoding="utf-8")
    assert run_blocks(Path("page.md"), "doc_with_torchvision") > 5


def test_cooker_of_the_page_on_media_cuts_clips(tmp_path: Path, capsys) -> None:
    av = pytest.importorskip("av", reason="needs PyAV")
    clip = tmp_path / "clip.mp4"
    with av.open(str(clip), "w") as container:
        video = container.add_stream("mpeg4", rate=10)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        video.codec_context.time_base = Fraction(1, 10)
        audio = container.add_stream("aac", rate=48_000, layout="mono")
        for number in range(70):
            pixels = np.full((48, 64, 3), 3 * number, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 10)
            container.mux(video.encode(frame))
        sound = np.sin(np.arange(7 * 48_000) / 30)[None].astype(np.float32)
        heard = av.AudioFrame.from_ndarray(sound, format="fltp", layout="mono")
        heard.sample_rate, heard.pts = 48_000, 0
        for part in av.AudioResampler(audio.format, "mono", 48_000, 1024).resample(heard):
            container.mux(audio.encode(part))
        container.mux([*video.encode(None), *audio.encode(None)])
    page = (REPO / "docs/media.md").read_text(encoding="utf-8")
    (block,) = [block for block in find_blocks(page) if "test_optional_blocks" in block.skip]
    names = {"__name__": __name__}
    exec(block.code, names)
    video = SampleDecoder().decode("mp4", clip.read_bytes())
    parts = {"__key__": "a", "__restore_key__": (), "mp4": video, "txt": "seven seconds"}
    assert names["cook"](parts).text == "seven seconds"
    assert capsys.readouterr().out == "[torch.Size([21, 3, 48, 64]), torch.Size([21, 3, 48, 64])]\n"
