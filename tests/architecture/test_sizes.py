"""A budget of code lines for each package, a limit for functions, no name used twice."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict

import pytest

from .source_tree import Module, package_modules

MAX_FUNCTION_LINES = 60
# Code lines (no docstrings, comments, blank lines) that each package may have. A new feature pays
# by simplifying what it touches; a commit that makes a package smaller lowers its budget.
BUDGET = {
    "batching": 3202,
    "cli": 697,
    "core": 2998,
    "decoding": 1784,
    "inspect": 1683,
    "loader": 3835,
    "loss": 207,
    "metadataset": 1607,
    "names": 174,
    "order": 719,
    "prepare": 1514,
    "samplers": 1012,
    "sources": 2311,
    "stages": 3908,
    "storage": 3259,
    "stores": 801,
    "task_encoder": 752,
    "testing": 402,
    "transforms": 438,
    "": 392,
}

MODULES = package_modules()
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Counts the lines of a source file that are no docstring, comment or blank line."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            code.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(code)


def package_of(module: Module) -> str:
    """The folder below energon_lite, "" for a module of the root."""
    parts = module.relative_path.split("/")
    return parts[1] if len(parts) > 2 else ""


def test_packages_keep_to_their_budgets() -> None:
    lines: dict[str, int] = defaultdict(int)
    for module in MODULES:
        lines[package_of(module)] += code_lines(module.text)
    assert set(lines) == set(BUDGET)
    over = {name: (num, BUDGET[name]) for name, num in lines.items() if num > BUDGET[name]}
    assert over == {}, f"code lines and budget: {over}; simplify what the change touches"


def test_functions_are_small() -> None:
    too_long = [
        f"{module.relative_path}:{function.name}"
        for module in MODULES
        for function in module.functions()
        if (function.end_lineno or 0) - function.lineno >= MAX_FUNCTION_LINES
    ]
    assert too_long == [], f"functions of more than {MAX_FUNCTION_LINES} lines: {too_long}"


def test_no_file_name_is_used_twice() -> None:
    names = Counter(m.path.stem for m in MODULES if m.path.stem not in ("__init__", "__main__"))
    assert {name for name, num in names.items() if num > 1} == set()


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
