"""The examples run as their first lines say, and go on with the samples of the unbroken run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ..conftest import REPO

pytestmark = pytest.mark.processes


def run(folder: Path, *command: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "package", "options", "claim"),
    [
        (
            "trainers/accelerate_loop", "accelerate", [],
            "steps after the resume have the samples of the unbroken run",
        ),
        (
            "sft_hf", "transformers", ["--steps", "32"],
            "resumed at step 16 without workers: all weights are bit-equal",
        ),
        (
            "vlm", "transformers", ["--steps", "12"],
            "resumed at step 6 without workers: all losses are bit-equal",
        ),
        (
            "lightning_vlm", "lightning", ["--epochs", "2"],
            "resumed at step 20, in the second epoch, without workers: all weights are bit-equal",
        ),
    ],
    ids=["accelerate_loop", "sft_hf", "vlm", "lightning_vlm"],
)  # fmt: skip
def test_example_resumes(name: str, package: str, options: list[str], claim: str, tmp_path: Path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; make trainers has it")
    assert claim in run(tmp_path, str(REPO / "examples" / f"{name}.py"), *options)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="make trainers has it")
def test_packs_of_a_processor_train_in_the_trainer(tmp_path: Path) -> None:
    assert "\nloss: " in run(tmp_path, str(REPO / "examples/vlm_hf.py"), "--steps", "8")


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="make trainers runs it; slow elsewhere"
)
@pytest.mark.parametrize(("name", "ranks"), [("dcp", (4, 2)), ("megatron_style", (4, 4))])
def test_example_under_torchrun_resumes(name: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    outputs = []
    for number in ranks:
        script = str(REPO / "examples" / "trainers" / f"{name}.py")
        options = ["--standalone", "--nproc-per-node", str(number)]
        outputs.append(run(tmp_path, "-m", "torch.distributed.run", *options, script))
    for output, number in zip(outputs, ranks, strict=True):
        assert output.count("...") >= number, output
    assert outputs[0] != outputs[1]


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="make trainers runs it; slow elsewhere"
)
def test_pretraining_runs_under_torchrun_with_the_data_that_it_wrote(tmp_path: Path) -> None:
    script = [str(REPO / "examples" / "pretrain_blend.py"), "--steps", "6"]
    alone = run(tmp_path, *script)
    options = ["--standalone", "--nproc-per-node", "2"]
    under_torchrun = run(tmp_path, "-m", "torch.distributed.run", *options, *script)
    assert under_torchrun.splitlines()[0] == alone.splitlines()[0]
    assert under_torchrun.startswith("2 ranks: loss")


def test_llava_of_the_example_keeps_the_samples_of_a_pack_apart(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(REPO / "examples")
    import vlm  # type: ignore[import-not-found]

    tokenizer = vlm.train_tokenizer(vlm.prepare_captions_and_texts(vlm.FOLDER, 80))
    (vlm.FOLDER / "blend.yaml").write_text(vlm.BLEND)
    model = vlm.make_llava(tokenizer).eval()
    batch = next(iter(vlm.make_loader(tokenizer, num_workers=0)))
    with torch.no_grad():
        packed = vlm.loss_of(model, batch)
        total = weights = torch.zeros(())
        image = 0
        for row, bounds in enumerate(batch.cu_seqlens.tolist()):
            for start, stop in pairwise(sorted(set(bounds))):
                ids = batch.input_ids[row : row + 1, start:stop]
                has_image = bool((ids == model.config.image_token_id).any())
                pixels = batch.images[image][None] if has_image else None
                image += has_image
                logits = model(input_ids=ids, pixel_values=pixels).logits[0, :-1]
                losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
                own = batch.loss_weights[row, start + 1 : stop]
                total, weights = total + (losses * own).sum(), weights + own.sum()
    assert image == len(batch.images) > 3
    torch.testing.assert_close(packed, total / weights)
