r"""Finds and runs the Python blocks of a Markdown file.

The blocks of one file run in order and share their names, in a folder that has the prepared sets
`data/captions` (image, caption) and `data/text` (text). HTML comments, which a reader of the page
does not see, stand right above a block:

    <!-- skip: needs two GPUs -->          the block does not run
    <!-- file: blend.yaml -->              the block, of any language, is written into that file
    <!-- setup: import os; x = 3 -->       code that runs before the block; may have several lines
"""

from __future__ import annotations

import re
import sys
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path

_COMMENT = re.compile(r"^\s*<!--\s*(skip|file|setup):\s*(.*?)\s*-->\s*$", re.DOTALL)
_FENCE = re.compile(r"^(\s*)(```+|~~~+)\s*([\w+-]*)\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is the number of its first line of code."""

    language: str
    code: str
    line: int
    skip: str = ""
    file: str = ""
    setup: str = ""


def find_blocks(markdown: str) -> list[Block]:
    """All fenced blocks, each with the comments right above it."""
    blocks: list[Block] = []
    lines = markdown.splitlines()
    notes: dict[str, str] = {}
    i = 0
    while i < len(lines):
        if lines[i].lstrip().startswith("<!--"):
            end = next((j for j in range(i, len(lines)) if "-->" in lines[j]), i)
            comment = _COMMENT.match("\n".join(lines[i : end + 1]))
            if comment:
                notes[comment[1]] = textwrap.dedent(comment[2])
            i = end + 1
            continue
        fence = _FENCE.match(lines[i])
        if fence:
            closing = re.compile(rf"\s*{fence[2]}\s*$")
            end = next((j for j in range(i + 1, len(lines)) if closing.match(lines[j])), len(lines))
            code = textwrap.dedent("\n".join(lines[i + 1 : end])) + "\n"
            blocks.append(Block(fence[3].lower(), code, line=i + 2, **notes))
            i = end
        if lines[i : i + 1] and lines[i].strip():
            notes = {}
        i += 1
    return blocks


def run_blocks(path: Path, name: str) -> int:
    """Runs the blocks of `path` in the current folder; returns how many were Python."""
    module = types.ModuleType(name)
    sys.modules[name] = module  # so that classes of the blocks can be pickled
    num_run = 0
    try:
        for block in find_blocks(path.read_text(encoding="utf-8")):
            if block.skip:
                continue
            if block.file:
                Path(block.file).parent.mkdir(parents=True, exist_ok=True)
                Path(block.file).write_text(block.code, encoding="utf-8")
            if block.language not in ("python", "py"):
                continue
            exec(compile(block.setup, f"{path} (setup)", "exec"), module.__dict__)
            # Empty lines before the code: a traceback names the line of the page.
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(path), "exec"), module.__dict__)
            num_run += 1
    finally:
        del sys.modules[name]
    return num_run
