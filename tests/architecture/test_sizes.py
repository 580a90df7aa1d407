"""A limit for functions, no private helper defined twice, and how code lines are counted."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from .code_size import code_lines
from .source_tree import package_modules

MAX_FUNCTION_LINES = 60
MODULES = package_modules()


def test_functions_are_small() -> None:
    too_long = [
        f"{module.relative_path}:{function.name}"
        for module in MODULES
        for function in module.functions()
        if (function.end_lineno or 0) - function.lineno >= MAX_FUNCTION_LINES
    ]
    assert too_long == [], f"functions of more than {MAX_FUNCTION_LINES} lines: {too_long}"


def test_no_private_helper_is_defined_in_two_modules() -> None:
    """Put it where both can import it, or give each a name that says what is particular to it."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith("_"):
                places[node.name].append(module.relative_path)
    del places["__getattr__"]
    twice = {name: paths for name, paths in places.items() if len(set(paths)) > 1}
    assert twice == {}


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ('"""A module."""\n\n# a comment\nx = 1\n', 1),
        ("def f():\n    '''Two\n    lines.'''\n    return (\n        1\n    )\n", 4),
        ('x = """a\nb"""\n', 2),
    ],
)
def test_code_lines_are_counted_without_docstrings_and_comments(text, num) -> None:
    assert code_lines(text) == num
