"""Reports the code lines of core, extras and tests, and those of the parent commit beside them.

`make check` prints it; it enforces nothing.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter

from .source_tree import PACKAGE, REPO

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


def _part_of(path: str) -> str:
    if path.startswith("tests/"):
        return "tests"
    return "extras" if path.startswith(f"{PACKAGE}/extras/") else "core"


def _lines_now() -> Counter[str]:
    lines = Counter[str]()
    for folder in (PACKAGE, "tests"):
        for path in (REPO / folder).rglob("*.py"):
            name = path.relative_to(REPO).as_posix()
            lines[_part_of(name)] += code_lines(path.read_text(encoding="utf-8"))
    return lines


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=REPO, capture_output=True, check=True).stdout


def _lines_of_parent() -> Counter[str]:
    """Of HEAD if the working tree differs from it, else of its parent; empty if git has neither."""
    lines = Counter[str]()
    try:
        parent = "HEAD" if _git("status", "--porcelain", PACKAGE, "tests") else "HEAD^"
        archive = _git("archive", "--format=tar", parent, PACKAGE, "tests")
    except (OSError, subprocess.CalledProcessError):
        return lines
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None and member.name.endswith(".py"):
                lines[_part_of(member.name)] += code_lines(file.read().decode())
    return lines


if __name__ == "__main__":
    now, before = _lines_now(), _lines_of_parent()
    for part in ("core", "extras", "tests"):
        change = f" ({now[part] - before[part]:+,} since the parent commit)" if before else ""
        print(f"code lines of {part}: {now[part]:,}{change}")
