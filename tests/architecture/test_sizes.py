"""A module has at most 400 lines, a function at most 60, docstrings included."""

from __future__ import annotations

import pytest

from .source_tree import Module, package_modules

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

# "energon_lite/x.py" or "energon_lite/x.py:function" -> (lines, reason). A commit that adds one
# says why; a commit that makes one unnecessary removes it.
EXCEPTIONS: dict[str, tuple[int, str]] = {}

MODULES = package_modules()


def sizes(module: Module) -> dict[str, tuple[int, int]]:
    """Lines and limit of the module and of each of its functions."""
    found = {module.relative_path: (len(module.text.splitlines()), MAX_MODULE_LINES)}
    for function in module.functions():
        assert function.end_lineno is not None
        name = f"{module.relative_path}:{function.name}"
        lines = function.end_lineno - function.lineno + 1
        found[name] = max(found.get(name, (0, 0)), (lines, MAX_FUNCTION_LINES))
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.name)
def test_module_and_its_functions_are_small(module: Module) -> None:
    too_long = [
        f"{name} has {lines} lines, allowed are {EXCEPTIONS.get(name, (limit, ''))[0]}"
        for name, (lines, limit) in sizes(module).items()
        if lines > EXCEPTIONS.get(name, (limit, ""))[0]
    ]
    assert too_long == []


def test_every_exception_is_needed_and_has_a_reason() -> None:
    all_sizes = {name: size for module in MODULES for name, size in sizes(module).items()}
    for name, (_, reason) in EXCEPTIONS.items():
        lines, limit = all_sizes[name]
        assert lines > limit, f"{name} is small enough now; remove its exception"
        assert reason, f"{name} has no reason"
