"""Keeps what was measured in a JSON file, over several runs, and writes it as tables."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import REPO
from benchmarks.peers.loaders import LOADERS
from benchmarks.peers.rows import ROWS

README = REPO / "benchmarks" / "README.md"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
KEYS = {
    "cpu_us": "CPU time per sample, µs",
    "wall_us": "Wall time per sample, µs",
    "first_batch_s": "Wall time from opening to the first batch, s",
}


@dataclass
class Figures:
    """All measurements.

    Attributes:
        times: by row and loader, one entry with `KEYS` per round.
        versions: of each loader's packages, as installed when it was measured last.
        titles: what loaders are called.
        failed: loaders that could not be installed, and why.
        reasons: by row and loader, why there is no figure.
        machine: what it was measured on.
    """

    times: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Figures:
        """Reads the file, if there is one."""
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def add(self, row: str, loader: str, found: dict[str, Any]) -> None:
        """Records one measurement."""
        self.versions[loader] = found["versions"]
        times = {key: found[key] for key in KEYS}
        self.times.setdefault(row, {}).setdefault(loader, []).append(times)

    def forget(self, row: str, loader: str) -> None:
        self.times.get(row, {}).pop(loader, None)

    def as_markdown(self) -> str:
        """Makes the tables: CPU time, wall time, and what has no figure."""
        lines = [", ".join(f"{k} {v}" for k, v in self.machine.items()) + ".", ""]
        for key, title in KEYS.items():
            lines += [f"### {title}: median (least – most)", ""]
            lines += [*self._table(key), ""]
        lines += ["| | versions |", "| --- | --- |"]
        lines += [
            _bar([self.titles[name], ", ".join(f"{k} {v}" for k, v in versions.items())])
            for name, versions in self.versions.items()
        ]
        lines.append("")
        lines += [f"- {self.titles[name]} {reason}" for name, reason in self.failed.items()]
        rows: dict[tuple[str, str], list[str]] = {}
        for row, reasons in self.reasons.items():
            for name, reason in reasons.items():
                rows.setdefault((name, reason), []).append(row)
        lines += [
            f"- {self.titles[n]} has no {', '.join(r)}: {why}" for (n, why), r in rows.items()
        ]
        return "\n".join(lines)

    def _table(self, key: str) -> list[str]:
        loaders = [name for name in LOADERS if name in self.titles and name not in self.failed]
        lines = [_bar(["", "goal", *(self.titles[n] for n in loaders)])]
        lines.append(_bar(["---"] * (len(loaders) + 2)))
        for name, row in ROWS.items():
            if name not in self.times:
                continue
            found = {n: [t[key] for t in times] for n, times in self.times[name].items()}
            others = [median(t) for n, t in found.items() if n != "by_hand"]
            cells = [
                cell(
                    found.get(n, []),
                    is_best=n in found and median(found[n]) == min(others, default=0),
                )
                for n in loaders
            ]
            goal = row.goal if key == "cpu_us" else ""
            lines.append(_bar([row.title, goal, *cells]))
        return lines

    def write_readme(self) -> None:
        """Puts the tables between the marks of the README."""
        text = README.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        README.write_text(
            f"{before}{BEGIN}\n\n{self.as_markdown()}\n{END}{after}", encoding="utf-8"
        )


def cell(times: list[float], *, is_best: bool) -> str:
    """Writes the median and the spread, the best of a line in bold.

    >>> cell([4.04, 3.0, 5.0], is_best=True)
    '**4** (3 – 5)'
    """
    if not times:
        return "–"
    middle = shown(median(times))
    spread = f" ({shown(min(times))} – {shown(max(times))})" if len(times) > 1 else ""
    return (f"**{middle}**" if is_best else middle) + spread


def shown(value: float) -> str:
    """Writes two digits, or all before the point."""
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _bar(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
