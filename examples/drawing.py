"""What the examples draw with: lines of text, lines and boxes, as elements of an SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
COLOURS = ("#2563a8", "#d9822b", "#3b8f5a", "#a23b72", "#7a6a53")
FONT = "font-family='Helvetica, Arial, sans-serif'"


def text(x: float, y: float, content: str, *, anchor: str = "start", **style: str) -> str:
    """Writes a line of text."""
    colour, weight = style.get("colour", "#333"), style.get("weight", "normal")
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}' "
        f"font-weight='{weight}'>{content}</text>"
    )


def line(places: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    """Draws a line through pixels."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='{width}'/>"


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Fills a rectangle."""
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{colour}'/>"
    )


def write_picture(path: Path, width: int, height: int, parts: Iterable[str]) -> None:
    """Writes elements into a file, on white."""
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' font-size='12' "
        f"{FONT}>",
        f"<rect width='{width}' height='{height}' fill='#fff'/>",
        *parts,
        "</svg>\n",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
