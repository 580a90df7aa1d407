"""A state that an earlier commit saved is still read, and resumes with the same batches.

A commit that changes a state or an order writes the file again, with a new version, and has the
label CHECKPOINT or ITERATION ORDER in CHANGELOG.md. States of earlier versions are refused.

    UPDATE_GOLDEN=1 pytest tests/loader/test_golden_state.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from energon_lite.core.state import VERSION

from ..helpers import ENCODERS, Ranks, keys_of, through_json, train

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def made_now(path: Path) -> dict[str, Any]:
    """For each encoder the states of two ranks of four streams, and what comes next."""
    found: dict[str, Any] = {}
    for encoder in ENCODERS:
        run = Ranks(train(path, encoder), 2, num_streams=4)
        run.steps(7)
        states = [through_json(loader.save_state_rank()) for loader in run.loaders]
        found[encoder] = {"states": states, "next": list(map(keys_of, run.slots(12).values()))}
    return found


def test_there_is_a_state_of_this_version(texts) -> None:
    file = GOLDEN / f"state-v{VERSION}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(json.dumps(made_now(texts), indent=1) + "\n")
    assert set(json.loads(file.read_text())) == set(ENCODERS)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_state_of_an_earlier_commit_resumes_with_the_same_batches(
    texts, encoder, world_size
) -> None:
    saved = json.loads((GOLDEN / f"state-v{VERSION}.json").read_text())[encoder]
    run = Ranks(train(texts, encoder), world_size, states=saved["states"])
    assert list(map(keys_of, run.slots(12).values())) == saved["next"]
