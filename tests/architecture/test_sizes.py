"""A ceiling of code lines, a limit for functions, no name used twice."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict

import pytest

from .source_tree import PACKAGE, package_modules

MAX_FUNCTION_LINES = 60
# Code lines (no docstrings, comments, blank lines) of the core, and of what is around it. They only
# fall: a new feature pays by simplifying what it touches, and a commit that makes one of them
# smaller lowers its ceiling. To raise one takes a decision record that names what was removed.
MAX_CODE_LINES = {"core": 22_850, "around": 15_340}

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


def test_core_and_what_is_around_it_keep_to_their_ceilings() -> None:
    found = Counter[str]()
    for module in MODULES:
        is_core = f"{PACKAGE}.extras" not in module.name
        found["core" if is_core else "around"] += code_lines(module.text)
    over = {part: num for part, num in found.items() if num > MAX_CODE_LINES[part]}
    assert over == {}, "simplify what the change touches"


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
