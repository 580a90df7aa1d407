"""Writes docs/modules.md, the list of all modules, from their docstrings: `make docs-index`."""

from __future__ import annotations

import ast

from .source_tree import PACKAGE, REPO, Module, package_modules

PAGE = REPO / "docs/modules.md"

_HEAD = """# Modules

The first line of the docstring of each module, by folder. `make docs-index` writes this page, and a
test compares it with the code. How the parts work together: [architecture.md](architecture.md).
"""


def first_line(module: Module) -> str:
    """The summary of a module: its docstring up to the first empty line, on one line."""
    summary = (ast.get_docstring(module.tree) or "").split("\n\n")[0]
    return " ".join(summary.split()).replace("|", "\\|")


def page() -> str:
    """The whole page: folders and modules of the root in alphabetical order."""
    folders: dict[str, tuple[str, list[str]]] = {}
    for module in package_modules():
        names = module.name.split(".")[1:]
        if module.is_package:
            folders["/".join(names)] = (first_line(module), [])
        else:
            rows = folders["/".join(names[:-1])][1]
            rows.append(f"| `{names[-1]}` | {first_line(module)} |")
    lines = [_HEAD.rstrip()]
    for name, (summary, rows) in folders.items():
        if rows:
            title = f"{name}/" if name else f"{PACKAGE}/"
            lines += ["", f"## `{title}`", "", summary, "", "| module | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
