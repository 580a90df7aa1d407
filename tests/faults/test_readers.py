"""No exception of another library reaches the user: any file of a dataset, corrupt in any way."""

from __future__ import annotations

from pathlib import Path

import pytest

from .hostile_sets import CASES
from .test_hostile import base as base
from .test_hostile import faults_of
from .test_hostile import folder as folder


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(", damage 0")])
def test_a_corrupt_file_yields_a_result_or_an_error_with_place_and_remedy(
    name: str,
    base: Path,
    folder: Path,
) -> None:
    assert faults_of(CASES[name], base, folder) == []
