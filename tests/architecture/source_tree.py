"""Reads the package's own source: modules, what they import, and where."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGE = "energon_lite"

_NOT_OURS = {"build", "demo_data", "dist", "node_modules", "__pycache__"}


@dataclass(frozen=True)
class Import:
    """One imported module, as absolute name."""

    target: str
    line: int
    inside_function: bool
    for_types_only: bool


@dataclass(frozen=True)
class Module:
    """One file of the package; `name` is dotted, a folder's `__init__` has the folder's name."""

    name: str
    path: Path

    @property
    def relative_path(self) -> str:
        return self.path.relative_to(REPO).as_posix()

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.relative_path)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def imports(self, known: frozenset[str]) -> Iterator[Import]:
        """All imports, also those under TYPE_CHECKING. `known` are the names of all modules."""
        inside = {id(n) for f in self.functions() for n in ast.walk(f)}
        ifs = [n for n in ast.walk(self.tree) if isinstance(n, ast.If)]
        type_ifs = [n for n in ifs if "TYPE_CHECKING" in ast.unparse(n.test)]
        for_types = {id(n) for type_if in type_ifs for n in ast.walk(type_if)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                # `from a import b` imports the module a.b where there is one, and else a.
                names = [f"{base}.{alias.name}" for alias in node.names]
                targets = sorted({name if name in known else base for name in names})
            else:
                continue
            for target in targets:
                yield Import(target, node.lineno, id(node) in inside, id(node) in for_types)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = self.name.split(".")
        # In a/b.py, level 1 is a. In a/__init__.py, level 1 is a, too.
        up = node.level - 1 if self.is_package else node.level
        return ".".join([*parts[: len(parts) - up], *filter(None, [node.module])])


def package_modules(root: Path = REPO / PACKAGE) -> list[Module]:
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        modules.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return modules


def repository_files() -> Iterator[Path]:
    """All files a clone would have: no hidden folders (but .ci), nothing that is built."""
    for path in sorted(REPO.rglob("*")):
        folders = path.relative_to(REPO).parts[:-1]
        hidden = any(f.startswith(".") and f != ".ci" for f in folders)
        built = any(f in _NOT_OURS or f.endswith(".egg-info") for f in folders)
        # Of a worktree `.git` is a file.
        if path.is_file() and path.name != ".git" and not hidden and not built:
            yield path
