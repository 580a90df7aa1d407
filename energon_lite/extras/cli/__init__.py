"""The command `energon-lite`: reads arguments, calls what does the work, prints."""

from energon_lite.extras.cli.commands import app


def main() -> None:
    """Runs the command line; the entry point of the script `energon-lite`."""
    app()
