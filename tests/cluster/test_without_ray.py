"""Settings of workers on a cluster, where Ray is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from energon_lite import DefaultTaskEncoder, RayWorkers

from ..loader.workers import loader_of

WITHOUT_RAY = pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
INSTALL = r"Loading on a cluster needs Ray: pip install 'energon_lite\[ray\]'"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_workers": -1}, "num_workers=-1 must be at least 0"),
        ({"max_bytes": 0}, "max_bytes=0 must be at least 1"),
        ({"spares": 0.5}, "spares=0.5 must be an integer"),
    ],
)
def test_numbers_that_cannot_be_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        RayWorkers(**settings)


@WITHOUT_RAY
@pytest.mark.parametrize("settings", [{"workers": RayWorkers(1)}, {"kind": "ray"}])
def test_loader_names_what_to_install(texts: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ImportError, match=INSTALL):
        next(iter(loader_of(texts, DefaultTaskEncoder(), **settings)))
