"""Tables as text: columns of equal width."""

from __future__ import annotations

from collections.abc import Sequence


def table_lines(rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Returns a line for each row of cells; all columns but the first are aligned to the right.

    Args:
        rows: the heading, and the rows below it.
        num_left: how many columns are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = (f"{{:{'<' if i < num_left else '>'}{width}}}" for i, width in enumerate(widths))
    form = "  ".join(cells)
    return [form.format(*row) for row in rows]
