"""What `import energon_lite` gives, and what it costs."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys

import pytest

import energon_lite

from .source_tree import REPO

HEAVY = ("typer", "rich", "starlette", "uvicorn", "jinja2", "plotly", "obstore", "av", "dask")

try:
    from tests.laws.test_laws import CASES
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("tests"):
        raise
    CASES = None


def public_names() -> list[str]:
    names = getattr(energon_lite, "__all__", None)
    if names is None:
        pytest.skip("energon_lite has no __all__ yet")
    return list(names)


def test_public_names_exist_and_are_listed_once() -> None:
    names = public_names()
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(energon_lite, name)] == []


def test_every_public_class_and_function_has_a_docstring() -> None:
    without = []
    for name in public_names():
        value = getattr(energon_lite, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue  # type aliases, __version__
        # __doc__ of the object itself: inspect.getdoc would take the base class's.
        doc = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
        # A dataclass without a docstring gets its signature as one.
        if not doc or doc.startswith(f"{value.__name__}("):
            without.append(name)
    assert without == []


def test_import_leaves_heavy_packages_alone() -> None:
    # jinja2 and others may come with torch: only what our import adds counts.
    code = (
        "import json, sys, torch; before = set(sys.modules); import energon_lite;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, check=True, capture_output=True, text=True
    ).stdout
    added = {name.split(".")[0] for name in json.loads(output)}
    assert "energon_lite" in added
    assert added.intersection(HEAVY) == set()


# Stages that choose nothing by themselves.
BASES = ("ListDataset", "CollectDataset", "MeasuredLists", "BatcherDataset", "GivenDataset")


def dataset_classes() -> set[type]:
    """All concrete dataset classes of the package, wherever they are defined."""
    for module in pkgutil.walk_packages(energon_lite.__path__, "energon_lite."):
        if ".extras.cluster." in module.name:
            continue  # they import Ray, and have no dataset
        importlib.import_module(module.name)
    base = importlib.import_module("energon_lite.core.dataset").SavableDataset
    found: set[type] = set()
    remaining = [base]
    while remaining:
        new = [c for c in remaining.pop().__subclasses__() if c not in found]
        found.update(new)
        remaining += new
    ours = {c for c in found if c.__module__.startswith("energon_lite.")}
    # A private class with subclasses is a base only, and so are the classes of core.
    bases = {c for c in ours if c.__name__.startswith("_") and c.__subclasses__()}
    bases |= {c for c in ours if ".core." in c.__module__ or c.__name__ in BASES}
    return {c for c in ours - bases if not inspect.isabstract(c)}


@pytest.mark.skipif(CASES is None, reason="tests/laws does not exist yet")
def test_every_dataset_class_has_a_case_in_the_laws() -> None:
    classes = dataset_classes()
    assert classes
    assert {c.__qualname__ for c in classes} - {c.__qualname__ for c in CASES} == set()
