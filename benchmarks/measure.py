"""Takes times, ours and the reference's in turn, and shows them as a table."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

REPO = Path(__file__).resolve().parent.parent
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
HEADINGS = ("", "ours: median", "best", "reference", "its median", "best", "ratio", "goal", "")


@dataclass
class Figure:
    """One measured thing.

    Attributes:
        group: heading that it stands under.
        name: what was done.
        unit: "/s" to show a rate; else "s", "ms" or "µs".
        ours_sec: time of one unit of work, by round.
        reference: what it is compared with.
        reference_sec: the reference's time for the same work, by round.
        goal_ratio: our time should be at most this many times the reference's.
        goal_sec: our time should be at most this.
    """

    group: str
    name: str
    unit: str
    ours_sec: list[float]
    reference: str = ""
    reference_sec: list[float] = field(default_factory=list)
    goal_ratio: float | None = None
    goal_sec: float | None = None

    @property
    def ratio(self) -> float | None:
        """Our time over the reference's: the median over rounds, since those lie side by side."""
        if not self.reference_sec:
            return None
        return median(a / b for a, b in zip(self.ours_sec, self.reference_sec, strict=True))

    def verdict(self) -> tuple[str, str]:
        """Returns the goal, and whether it is met."""
        goals, is_met = [], True
        if self.goal_ratio is not None and self.ratio is not None:
            goals.append(f"≤ {self.goal_ratio:g}×")
            is_met &= self.ratio <= self.goal_ratio
        if self.goal_sec is not None:
            goals.append(f"≤ {shown(self.goal_sec, self.unit)}")
            is_met &= median(self.ours_sec) <= self.goal_sec
        return " and ".join(goals), ("met" if is_met else "NOT met") if goals else ""

    def row(self) -> tuple[str, ...]:
        """Returns the cells of the table."""

        def times(seconds: list[float]) -> tuple[str, str]:
            if not seconds:
                return "", ""
            return shown(median(seconds), self.unit), shown(min(seconds), self.unit)

        ratio = "" if self.ratio is None else f"{self.ratio:.3g}×"
        # A cost of a few per cent needs its digits.
        if self.ratio is not None and 0.9 < self.ratio < 1.1:
            ratio = f"{self.ratio:.4f}×"
        return (
            self.name, *times(self.ours_sec), self.reference, *times(self.reference_sec), ratio,
            *self.verdict(),
        )  # fmt: skip


@dataclass
class Count:
    """One counted thing: exact, and asserted where it is counted if the goal is met."""

    group: str
    name: str
    text: str
    goal: str
    is_met: bool = True

    def row(self) -> tuple[str, ...]:
        """Returns the cells of the table."""
        verdict = "met" if self.is_met else "NOT met"
        return (self.name, self.text, "", "", "", "", "", self.goal, verdict)


Entry = Figure | Count


def shown(seconds: float, unit: str) -> str:
    """Writes a time with three digits, or the rate that it stands for."""
    if unit == "/s":
        return f"{float(f'{1 / seconds:.3g}'):,.0f}/s"
    value = float(f"{seconds * {'s': 1, 'ms': 1e3, 'µs': 1e6}[unit]:.3g}")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:g} {unit}"


def stopwatch(function: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes, without the garbage of the call before."""
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turn(
    benchmark: Any, functions: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
    """Calls functions in turn (A B A B ...), after one round that does not count.

    `benchmark` is pytest-benchmark's fixture: it drives the rounds and keeps the times of the
    first function, so that its own storage and comparison of runs work too.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    (first, target), *others = functions.items()

    def measure_others() -> None:
        for name, function in others:
            seconds[name].append(stopwatch(function))
        gc.collect()

    def measure_first() -> None:
        start = time.perf_counter()
        target()
        seconds[first].append(time.perf_counter() - start)

    measure_others()
    measure_first()
    for times in seconds.values():
        times.clear()
    gc.freeze()  # what the test itself holds is no garbage to look through
    try:
        benchmark.pedantic(measure_first, setup=measure_others, rounds=rounds)
    finally:
        gc.unfreeze()
    benchmark.extra_info.update({f"{name}_median_sec": median(seconds[name]) for name in seconds})
    return seconds


def probe(what: str, *arguments: object, python: str = sys.executable) -> dict[str, float]:
    """Measures in a fresh process; see `probes.py`."""
    script = Path(__file__).with_name("probes.py")
    # With bytecode, as an installed package has it.
    own = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": ""}
    environment = own if python == sys.executable else None
    done = subprocess.run(
        [python, str(script), what, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"probe {what} failed:\n{done.stderr}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def machine() -> dict[str, str]:
    """Describes where the figures come from."""
    cpu = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": cpu or platform.machine(),
        "system": platform.system(),
        "Python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Names the packages that decide the figures most."""
    return {name: importlib.metadata.version(name) for name in ("torch", "numpy", "pillow")}


def origin() -> dict[str, str]:
    """Describes what was measured, and where."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=README.parent, capture_output=True, text=True, check=False)
    return {"commit": done.stdout.strip() or "unknown", **machine(), **versions()}


def grouped(entries: list[Entry]) -> list[Entry]:
    """Puts the entries of a group together, in the order in which groups come first."""
    groups = list(dict.fromkeys(entry.group for entry in entries))
    return sorted(entries, key=lambda entry: groups.index(entry.group))


def as_markdown(entries: list[Entry]) -> str:
    """Makes the tables of the README."""
    lines = [
        "",
        ", ".join(f"{name} {value}" for name, value in origin().items()) + ".",
        "",
    ]
    group = None
    for entry in grouped(entries):
        if entry.group != group:
            group = entry.group
            lines += ["", f"### {group}", "", _bar(HEADINGS), _bar(["---"] * len(HEADINGS))]
        lines.append(_bar(entry.row()))
    return "\n".join(lines) + "\n\n"


def _bar(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def as_text(entries: list[Entry]) -> list[str]:
    """Makes the table for a terminal."""
    entries = grouped(entries)
    rows = [HEADINGS, *(entry.row() for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    group = None
    for entry, row in zip([None, *entries], rows, strict=True):
        if entry is not None and entry.group != group:
            group = entry.group
            lines.append(f"{group}:")
        cells = [row[0].ljust(widths[0])]
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            if index:
                cells.append(cell.ljust(width) if index in (3, 8) else cell.rjust(width))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def write_readme(entries: list[Entry]) -> None:
    """Puts the tables between the marks of the README."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{as_markdown(entries)}{END}{after}", encoding="utf-8")


def write_json(entries: list[Entry], path: Path) -> None:
    """Writes all times of all rounds."""
    values = [{**asdict(entry), "ratio": getattr(entry, "ratio", None)} for entry in entries]
    text = json.dumps({"machine": origin(), "figures": values}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
