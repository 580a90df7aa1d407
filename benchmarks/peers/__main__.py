"""Measures loaders in turn, each measurement in a fresh process: `make bench-peers`.

    make bench-peers                                          everything, 5 rounds
    make bench-peers ARGS="--loaders ours,litdata --rows text-0,text-2 --rounds 3"
    make bench-peers ARGS="--table-only --update-readme"      the table of what is there

Figures are kept in a file and new ones are added to it, so that rows can be measured in several
runs; `--fresh` begins again for the rows and loaders that are measured.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import REPO, machine
from benchmarks.peers.environments import ENVIRONMENTS, answer_of, install
from benchmarks.peers.figures import Figures
from benchmarks.peers.loaders import LOADERS
from benchmarks.peers.rows import ROWS, Row


def main() -> None:
    options = parse()
    figures = Figures.load(options.figures)
    if not options.table_only:
        run(options, figures)
        figures.save(options.figures)
    print(figures.as_markdown())
    if options.update_readme:
        figures.write_readme()


def run(options: argparse.Namespace, figures: Figures) -> None:
    """Installs, prepares and checks what is not yet, then measures in turn."""
    rows = [ROWS[name] for name in options.rows]
    figures.machine = machine()
    pythons: dict[str, Path] = {}
    for name in options.loaders:
        loader = loader_of(name)
        figures.titles[name] = loader.TITLE
        folder = getattr(loader, "ENVIRONMENT_OF", name)
        python, error = install(options.environments, folder, loader.PACKAGES)
        if python is None:
            figures.failed[name] = f"could not be installed: {error}"
        else:
            pythons[name] = python
            figures.failed.pop(name, None)
    pairs = []
    if options.again:
        for name, folder in itertools.product(pythons, ("whole", "check")):
            shutil.rmtree(options.data / folder / name, ignore_errors=True)
            for checked in (options.data / folder).glob(f"{name}-*.json"):
                checked.unlink()
    for row in rows:
        for name, python in pythons.items():
            reason = loader_of(name).lacks(row) or make_ready(options, name, python, row, pythons)
            if reason:
                figures.reasons.setdefault(row.name, {})[name] = reason
                print(f"{row.name} {name}: {reason}", file=sys.stderr)
                continue
            figures.reasons.get(row.name, {}).pop(name, None)
            pairs.append((row, name))
            if options.fresh:
                figures.forget(row.name, name)
    end = time.monotonic() + 60 * options.minutes
    for number in range(options.rounds):
        # Every second round goes backwards, so that no loader always follows the same one.
        for row, name in pairs if number % 2 == 0 else pairs[::-1]:
            if time.monotonic() > end:
                print("The time is up; another run adds to the figures", file=sys.stderr)
                return
            read_files(options.data / "whole" / writer_of(name) / f"{row.kind}-{row.num_sources}")
            found = probe(pythons[name], "measure", name, row, options)
            if "error" in found:
                figures.reasons.setdefault(row.name, {})[name] = found["error"]
            else:
                figures.add(row.name, name, found)
            print(f"round {number + 1} {row.name} {name}: {found}", file=sys.stderr)
            figures.save(options.figures)


def loader_of(name: str) -> Any:
    return importlib.import_module(f"benchmarks.peers.loaders.{name}")


def writer_of(name: str) -> str:
    """Returns which loader's files a loader reads."""
    return str(getattr(loader_of(name), "DATA_OF", name))


def read_files(folder: Path) -> None:
    """Reads files into the page cache, which others may have left since the last measurement."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 20):
                    pass


def make_ready(
    options: argparse.Namespace, name: str, python: Path, row: Row, pythons: dict[str, Path]
) -> str:
    """Writes the samples and checks that the loader returns them, once; returns what is wrong."""
    writer = writer_of(name)
    few = ROWS["blend-10"] if row.group == "blends" else row  # enough sources for a check
    for what, folder, of in (("prepare", "whole", row), ("prepare-check", "check", few)):
        done = options.data / folder / writer / f"{of.kind}-{of.num_sources}" / "written"
        if not done.exists():
            found = probe(pythons.get(writer, python), what, writer, of, options)
            if "error" in found:
                return str(found["error"])
            done.touch()
    checked = options.data / "check" / f"{name}-{few.name}.json"
    sends_one_batch = row.workers and hasattr(loader_of(name), "IS_TRANSPORT_ALONE")
    if not checked.exists() and not sends_one_batch:
        found = probe(python, "check", name, few, options)
        if "error" in found:
            return str(found["error"])
        checked.write_text(json.dumps(found))
    return ""


def probe(
    python: Path, what: str, name: str, row: Row, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs `probe.py`."""
    words = "benchmarks.peers.probe", what, name, row.name, options.data, options.seconds
    # Writing a thousand sources takes its time.
    limit = options.timeout * (10 if what.startswith("prepare") else 1)
    return answer_of(python, words, limit)


def parse() -> argparse.Namespace:
    """Reads the options."""
    root = REPO / ".benchmarks" / "peers"
    parser = argparse.ArgumentParser(prog="make bench-peers", description=__doc__.splitlines()[0])
    parser.add_argument("--loaders", default=",".join(LOADERS), help="names, with commas")
    parser.add_argument("--rows", default=",".join(ROWS), help="names, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="wall time of a measurement")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="begin no measurement after that"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="of one process, in seconds")
    parser.add_argument("--fresh", action="store_true", help="forget older figures of the same")
    parser.add_argument("--again", action="store_true", help="write and check the samples again")
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument("--update-readme", action="store_true")
    parser.add_argument("--data", type=Path, default=root / "data")
    parser.add_argument("--figures", type=Path, default=root / "figures.json")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    options = parser.parse_args()
    options.loaders, options.rows = options.loaders.split(","), options.rows.split(",")
    unknown = [n for n in options.loaders if n not in LOADERS] + [
        n for n in options.rows if n not in ROWS
    ]
    if unknown:
        parser.error(
            f"unknown: {', '.join(unknown)}; loaders: {', '.join(LOADERS)}; rows: {', '.join(ROWS)}"
        )
    return options


if __name__ == "__main__":
    main()
