"""The words of docstrings, comments, messages and docs are those of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from .source_tree import REPO, package_modules

# Phrases that a reader has to translate, and what stands for them in this field.
BETTER = {
    "go on": "resume, continue",
    "goes on": "resumes, continues",
    "went on": "resumed, continued",
    "left out": "skipped, dropped, omitted",
    "leaves out": "skips, drops, omits",
    "leave out": "skip, drop, omit",
    "anew": "again, from scratch",
    "afresh": "again, from scratch",
    "alike": "similar, equal",
    "told": "reported, passed; or name who knows",
    "tell": "report, return",
    "tells": "reports, returns",
    "says": "reports, returns, states",
    "held back": "buffered",
    "hold back": "buffer",
    "holds back": "buffers",
    "made again": "re-created, replayed",
    "make again": "re-create, replay",
    "makes again": "re-creates, replays",
    "gives": "returns, yields, emits",
    "gave": "returned, emitted",
    "given back": "returned",
    "foresee": "predict",
    "foreseen": "predicted",
    "foresees": "predicts",
    "damaged": "corrupt, invalid",
    "whoever": "name the actor",
    "nobody": "name the actor",
    "way out": "remedy",
    "ways out": "remedies",
    "so many": "the number",
    "of its own": "its",
}
MODULES = package_modules()
_WORDS = "|".join(BETTER).replace(" ", r"\s+(?:#\s*)?")
_PHRASES = re.compile(rf"(?<!\.)\b(?:{_WORDS})\b", re.IGNORECASE)


def phrases(paths: Iterable[Path]) -> list[str]:
    """Where one of the phrases stands, also broken over two lines of a text or comment."""
    found = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for match in _PHRASES.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            phrase = " ".join(match[0].replace("#", " ").lower().split())
            better = BETTER[phrase]
            found.append(f"{path.relative_to(REPO)}:{line}: '{phrase}' ({better})")
    return found


def test_docstrings_begin_with_a_verb_or_a_noun_of_the_field() -> None:
    other = {"Gives", "Tells", "Says", "What", "Which", "Where", "How", "Of", "As", "From", "To"}
    wrong = []
    for module in MODULES:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or " ").split(maxsplit=1)[:1]
                if other.intersection(first):
                    wrong.append(f"{module.relative_path}:{getattr(node, 'lineno', 1)}: {first[0]}")
    assert wrong == [], "Returns, Yields, Reports, Records, ...; The number of, The place of, ..."


def test_no_phrase_of_a_dialect_is_used() -> None:
    pages = [page for page in sorted((REPO / "docs").rglob("*.md")) if page.name != "modules.md"]
    scripts = [*(REPO / "benchmarks").glob("*.py"), *(REPO / "examples").rglob("*.py")]
    paths = [*(module.path for module in MODULES), REPO / "README.md", *pages, *scripts]
    assert phrases(paths) == []


def test_phrases_are_found_in_texts_and_comments(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tests.architecture.test_words.REPO", tmp_path)
    (tmp_path / "page.md").write_text("Training goes\non. # What is left\n# out here, nobody sees.")
    assert [place.split(" (")[0] for place in phrases([tmp_path / "page.md"])] == [
        "page.md:1: 'goes on'",
        "page.md:2: 'left out'",
        "page.md:3: 'nobody'",
    ]
