"""Folders as trainers leave them, what is said of their checkpoints, and of two that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from typer.testing import CliRunner

from energon_lite import StateError, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.cli import app
from energon_lite.extras.inspect.checkpoints import (
    checkpoint_info,
    states_at,
)

STEPS = (5, 10, 15)


@pytest.fixture(scope="module")
def states(texts: Path) -> dict[int, list[dict[str, Any]]]:
    """The states of two ranks after some steps."""
    found: dict[int, list[dict[str, Any]]] = {step: [] for step in STEPS}
    for rank in range(2):
        config = WorkerConfig(rank=rank, world_size=2, num_workers=0)
        loader = get_savable_loader(get_train_dataset(texts, batch_size=2, worker_config=config))
        for step, _ in enumerate(loader, 1):
            if step in found:
                found[step].append(loader.save_state_rank())
            if step == max(STEPS):
                break
    return found


def hugging_face(folder: Path, step: int, states: list[dict[str, Any]]) -> Path:
    own = folder / f"checkpoint-{step}"
    own.mkdir(parents=True)
    together = {"log": "[]", "loader": {"loader_state": json.dumps(states)}}
    (own / "loader_state.json").write_text(json.dumps(together))
    (own / "model.safetensors").write_bytes(b"energon_lite.loader, as it were")
    torch.save({"w": torch.zeros(3)}, own / "optimizer.pt")
    return own


def lightning(folder: Path, step: int, states: list[dict[str, Any]]) -> Path:
    own = folder / "lightning_logs/version_0/checkpoints" / f"epoch=0-step={step}.ckpt"
    own.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"loops": {"fit_loop": [{"loader_state": json.dumps(states)}]}}, own)
    return own


def torchtitan(folder: Path, step: int, states: list[dict[str, Any]]) -> Path:
    content = {"model": torch.zeros(9), "loader": {"loader_state": json.dumps(states)}}
    dcp.save(content, checkpoint_id=folder / f"step-{step}")
    return folder / f"step-{step}"


def rank_by_rank(folder: Path, step: int, states: list[dict[str, Any]]) -> Path:
    own = folder / "states" / str(step)
    for rank, state in enumerate(states):
        (own / f"rank{rank}").mkdir(parents=True)
        (own / f"rank{rank}/state.json").write_text(json.dumps(state))
    return own


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", [hugging_face, lightning, torchtitan, rank_by_rank])
def test_the_furthest_checkpoint_is_described_and_the_others_are_listed(states, tmp_path, save):
    # Copied in any order: how far a run is decides, and not the age of a file.
    paths = {step: save(tmp_path, step, states[step]) for step in (15, 5, 10)}
    (tmp_path / "train.py").write_text("import energon_lite.loader  # no state\n")
    report = json.loads(json.dumps(checkpoint_info([tmp_path])))
    assert report["path"] == str(paths[15])
    assert [state["count"] for state in report["states"]] == [15, 15]
    assert report["warnings"] == []
    assert report["others"] == [
        {"path": str(paths[step]), "pass": 0, "slots": 2 * step, "ranks": 2} for step in (10, 5)
    ]
    assert [state["count"] for state in states_at([tmp_path])] == [15, 15]
    shown = CliRunner().invoke(app, ["checkpoint", "info", str(tmp_path)])
    assert shown.exit_code == 0
    assert f"{paths[15]}, the furthest of 3 checkpoints" in shown.stdout
    assert f"  {paths[5]}: pass 0, 10 batches of all ranks, 2 states" in shown.stdout
    assert "remove" not in shown.output
    alone = checkpoint_info([paths[5]])
    assert (alone["path"], alone["others"]) == (str(paths[5]), [])


def test_a_damaged_file_in_a_folder_is_named_and_the_others_are_read(states, tmp_path) -> None:
    hugging_face(tmp_path, 5, states[5])
    cut = hugging_face(tmp_path, 10, states[10]) / "loader_state.json"
    cut.write_bytes(cut.read_bytes()[:-20])
    report = checkpoint_info([tmp_path])
    assert [state["count"] for state in report["states"]] == [5, 5]
    (warning,) = report["warnings"]
    assert f"not read: {cut}: no valid JSON" in warning
    with pytest.raises(StateError, match=r"no valid JSON .*is the file cut"):
        checkpoint_info([cut.parent])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b'{"format": "energon_lite.loader", "ver', "is the file cut"),
        (b"PK\x03\x04 energon_lite.loader", "If the file is cut, use another copy"),
        (b"no state at all", "neither JSON nor a torch file"),
        (None, "does not exist. Give a file with a state"),
    ],
)
def test_what_is_no_state_is_an_error_that_says_what_to_do(tmp_path, content, words) -> None:
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_bytes(content)
    refused = CliRunner().invoke(app, ["checkpoint", "info", str(bad)])
    assert refused.exit_code == 1
    assert words in refused.stderr
    assert "bad.json" in refused.stderr
    assert "Errno" not in refused.output
    assert "weights_only" not in refused.output
