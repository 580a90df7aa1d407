"""Tables as text: columns of equal width."""

from __future__ import annotations

from collections.abc import Sequence


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row of cells; all columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = (f"{{:{'>' if i else '<'}{width}}}" for i, width in enumerate(widths))
    form = "  ".join(cells)
    return [form.format(*row) for row in rows]
