"""Makes the page of the API for `make docs`: every public name, by the part that it is from."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Any

STUB = Path(__file__).resolve().parents[1] / "energon_lite" / "__init__.pyi"
TITLES = {
    "pipeline": "Opening datasets",
    "loader": "Loaders",
    "core": "Samples, datasets, states and errors",
    "task_encoder": "Task encoders",
    "batching": "Packs and batches by length",
    "stages": "Datasets over datasets",
    "order": "Blends and schedules",
    "loss": "Loss",
    "decoding": "Decoding",
    "sources": "Sources",
    "formats": "Formats",
    "storage": "Storages",
}
AROUND = "Around the core"
MADE_LATER = "energon_lite.extras.energon.legacy"  # its classes have no text that can be read


def public_names() -> dict[str, list[str]]:
    """Returns the full names of what is public, by the title of their part."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module != MADE_LATER:
            title = TITLES.get(node.module.split(".")[1], AROUND)
            found[title] += [f"{node.module}.{name.name}" for name in node.names]
    return found


def page() -> str:
    """Returns the page, with a line for mkdocstrings for each name."""
    found = public_names()
    lines = ["# API", "", "What `import energon_lite` offers; each name is `energon_lite.<name>`."]
    for title in (*TITLES.values(), AROUND):
        if title in found:
            lines += ["", f"## {title}", *(f"\n::: {name}" for name in sorted(found[title]))]
    return "\n".join(lines) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Adds the page to those of the site; mkdocs calls it."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "docs/reference/api.md", content=page()))
    return files
