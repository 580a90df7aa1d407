"""The examples run, and the demo finds its batches identical."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import energon_lite

from .conftest import REPO, write_captions

pytestmark = pytest.mark.skipif(
    not hasattr(energon_lite, "prepare_dataset"), reason="nothing to prepare the data with yet"
)


def run_example(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(REPO / "examples" / name), *arguments]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Returns what runs an example in this process, which has imported torch."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(REPO / "examples")
        monkeypatch.setattr("sys.argv", [name, *arguments])
        monkeypatch.setattr("torch.set_num_threads", lambda number: None)
        monkeypatch.setenv("DEMO_DATA", "")  # set by the demo, and restored after the test
        runpy.run_path(str(REPO / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.processes
@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_demo_resumes_with_identical_batches(
    start_method: str, tmp_path: Path, run_here: Callable[..., str]
) -> None:
    arguments = ["--num-samples", "80", "--steps", "8", "--start-method", start_method]
    is_fork = start_method == "fork"  # spawned processes import the script again
    run = run_here if is_fork else partial(run_example, cwd=tmp_path)
    output = run("train_resume.py", *arguments)
    assert "The remaining 8 batches are identical" in output
    # 16 steps of 4 packs: target and actual shares of pictures and texts.
    shares = {row[0]: row[1:4] for row in map(str.split, output.splitlines()) if len(row) == 6}
    asked = {name: float(row[0].rstrip("%")) for name, row in shares.items() if name != "source"}
    given = {name: float(shares[name][1].rstrip("%")) for name in asked}
    assert list(asked) == ["pictures", "texts"]
    # The buffers of four streams choose from what the schedule brings later, more pictures.
    assert given == pytest.approx(asked, abs=5)
    assert sum(int(shares[name][2].replace(",", "")) for name in asked) > 200
    (packed, padded) = re.findall(r"([0-9.]+)%", next(filter(_is_fill, output.splitlines())))
    assert float(packed) > 99 > 70 > float(padded)
    assert (tmp_path / "demo_data" / "captions" / ".nv-meta" / ".info.json").is_file()

    if is_fork:  # a second run finds the data
        output = run_here("train_resume.py", *arguments, "--steps", "4", "--num-workers", "0")
        assert "Data: found" in output
        assert "The remaining 4 batches are identical" in output


def _is_fill(line: str) -> bool:
    return line.startswith("Packs are")


def test_minimal_example_prints_batches(run_here: Callable[..., str], tmp_path: Path) -> None:
    write_captions(tmp_path / "captions", num_shards=10, samples_per_shard=4)
    assert run_here("minimal.py", "captions").count("torch.Size([4, 3, 16, 24])") == 5


@pytest.mark.parametrize(
    ("name", "script", "limit"),
    [
        ("blending", "draw_blend.py", 150_000),
        ("packing", "draw_packing.py", 50_000),
        ("resume", "draw_resume.py", 20_000),
        ("speed", "draw_speed.py", 10_000),
    ],
)
def test_picture_is_what_the_example_draws(
    run_here: Callable[..., str], tmp_path: Path, name: str, script: str, limit: int
) -> None:
    run_here(script, "picture.svg")
    assert_committed(tmp_path, name, limit)


def assert_committed(folder: Path, name: str, limit: int) -> None:
    committed = REPO / "docs" / "images" / f"{name}.svg"
    assert committed.read_bytes() == (folder / "picture.svg").read_bytes()
    assert committed.stat().st_size < limit


def test_epoch_of_packs_is_balanced(run_here: Callable[..., str]) -> None:
    _, _, *rows = run_here("epoch_of_packs.py").splitlines()
    assert len(rows) == 9
    for row in rows:
        *_, unsorted, balanced = (float(share.rstrip("%")) for share in row.split()[3:])
        assert balanced < 1 < unsorted


def test_map_style_example_resumes_in_mid_epoch(run_here: Callable[..., str]) -> None:
    output = run_here("map_style.py", "--texts", "300")
    assert "resumed in epoch 1: the other" in output
    assert float(re.findall(r"([0-9.]+)% full", output)[0]) > 90
    first, last = re.findall(r"loss ([0-9.]+) [.]+ ([0-9.]+)", output)[0]
    assert float(last) < float(first) / 2


def test_example_of_energons_blending_keeps_its_shares(run_here: Callable[..., str]) -> None:
    output = run_here("energon_blending.py")
    tags = output.partition("tags of 500 samples: ")[2].partition("\n")[0]
    assert set(ast.literal_eval(tags)) == {
        ("prose",), ("dialogue", "web"), ("repositories", "dialogue"),
    }  # fmt: skip
    assert "{'wiki/train': 2.0, 'chat/train': 4.0, 'code/train': 1.0}" in output


@pytest.mark.processes
def test_pretraining_goes_on_with_three_ranks(run_here: Callable[..., str]) -> None:
    output = run_here("pretrain_blend.py", "--steps", "12")
    assert "3 ranks trained on the 12 batches that 2 ranks had after the checkpoint" in output


@pytest.mark.processes
def test_video_clips_example_has_equal_clips_after_a_resume(run_here: Callable[..., str]) -> None:
    pytest.importorskip("av", reason="pip install 'energon_lite[av]'")
    output = run_here("video_clips.py", "--videos", "40", "--steps", "6")
    assert "a resumed loader without workers has the same random clips" in output
    assert "unseen videos are right" in output
