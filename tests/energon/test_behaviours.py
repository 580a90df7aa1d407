"""Wrappers, hooks, packs, groups and blends do what Energon 7.4.1 did, as a recorded run says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .energon_behaviours import CASES, result_of

TABLE = json.loads(Path(__file__).with_name("energon_behaviours.json").read_text())


def test_every_case_is_recorded():
    assert CASES.keys() == TABLE.keys()
    assert len(CASES) > 55


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_energon(name, tmp_path):
    assert result_of(name, tmp_path) == TABLE[name]
