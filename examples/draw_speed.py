"""Draws docs/images/speed.svg: CPU time of a sample that goes through a hook, by loader.

    python examples/draw_speed.py [FILE]

The figures are those of the table in benchmarks/README.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from drawing import COLOURS, IMAGES, box, text, write_picture

TABLE = Path(__file__).resolve().parents[1] / "benchmarks" / "README.md"
ROWS = {
    "texts of 500 B through a hook, 0 workers": "in the training process",
    "texts of 500 B through a hook, 2 workers": "with 2 worker processes",
}
LEFT, WIDTH, HEIGHT, BAR = 150.0, 250.0, 24.0, 15.0
APART = WIDTH + 70.0
OTHERS = "#b9c2cc"


def cells(line: str) -> list[str]:
    """Cuts a line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def times(name: str) -> dict[str, float]:
    """Returns the median CPU time in µs of each loader that has the row."""
    lines = TABLE.read_text(encoding="utf-8").partition("### Texts through a hook")[2].splitlines()
    table = [cells(line) for line in lines if line.startswith("|")]
    titles = table[0][2:]
    values = next(row[2:] for row in table if row[0] == name)
    found = {}
    for title, value in zip(titles, values, strict=True):
        median = re.match(r"\**([\d.,]+)", value)
        if median and title != "by hand":
            found[title] = float(median[1].replace(",", ""))
    return found


def main(path: Path) -> None:
    by_row = {title: times(name) for name, title in ROWS.items()}
    names = [*dict.fromkeys(name for found in by_row.values() for name in found)]
    longest = max(max(found.values()) for found in by_row.values())
    parts = [
        text(
            LEFT, 22, "µs of CPU time per text, read, decoded and encoded by a hook", weight="bold"
        )
    ]
    for column, (title, found) in enumerate(by_row.items()):
        left = LEFT + column * APART
        parts.append(text(left, 48, title, colour="#555"))
        for place, name in enumerate(names):
            y = 60 + place * HEIGHT
            if column == 0:
                parts.append(text(LEFT - 8, y + 12, name, anchor="end"))
            if name not in found:
                parts.append(text(left, y + 12, "–", colour="#777"))
                continue
            colour = COLOURS[0] if name.startswith("energon_lite") else OTHERS
            length = WIDTH * found[name] / longest
            parts.append(box(left, y, length, BAR, colour))
            parts.append(text(left + length + 6, y + 12, f"{found[name]:.3g}"))
    write_picture(path, round(LEFT + 2 * APART), round(60 + len(names) * HEIGHT + 10), parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES / "speed.svg")
