"""The command `energon-lite`: reads arguments, calls what does the work, prints."""

import io
import sys

from energon_lite.extras.cli.commands import app


def main() -> None:
    """Runs the command line; the entry point of the script `energon-lite`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that its encoding does not have
    app()
