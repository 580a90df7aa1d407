"""States that several files of this folder change and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..helpers import Ranks, train


@pytest.fixture(scope="module")
def states(texts: Path) -> list[dict[str, Any]]:
    """The states of two ranks of four streams, after three steps."""
    run = Ranks(train(texts, "skipping"), 2, num_streams=4)
    run.steps(3)
    return run.save()
