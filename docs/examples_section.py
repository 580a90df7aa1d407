"""Shows the section `Example:` of docstrings as one of examples; mkdocstrings loads it."""

from __future__ import annotations

from typing import Any

import griffe


class ExamplesSection(griffe.Extension):
    """Renames the section, which griffe knows in the plural only."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of a class or function that was read."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
