"""Prints how costs grow with the size of a run, as one table: `python -m benchmarks.scale`.

Other ranks are simulated, one at a time. Each part runs in a process for itself, since it measures
memory. A part is a module beside this one that prints rows `name, size, value, unit`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

PARTS = ("exchange", "elastic", "states", "sources", "packing")


def rows_of(part: str, *arguments: str) -> list[list[str]]:
    """Runs the part of a module; returns its rows."""
    command = [sys.executable, "-m", part, *arguments]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [line.split(", ") for line in printed.splitlines()]
    return [row for row in rows if len(row) == 4]


def print_parts(package: str, description: str, parts: tuple[str, ...]) -> None:
    """Runs the parts of a package that the command line names, by default all."""
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=description)
    parser.add_argument("parts", nargs="*", default=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--folder", help="keeps the datasets that parts write for the next time")
    parser.add_argument("--large", action="store_true", help="also the larger sizes: far slower")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        print("| part | what | size | value | unit |\n|---|---|---|---|---|")
        for part in arguments.parts:
            sizes = ["--large"] * arguments.large
            folder = arguments.folder or temporary
            for row in rows_of(f"{package}.{part}", folder, *sizes):
                print(f"| {' | '.join([part, *row])} |", flush=True)


if __name__ == "__main__":
    print_parts("benchmarks.scale", __doc__, PARTS)
