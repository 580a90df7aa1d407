"""Answers to questions: typed at a terminal, or lines of a stdin that a script feeds."""

from __future__ import annotations

import io
import os
import select
import sys

import typer

# A script that gives no answer for so long gives none at all.
LIMIT_SEC = 60


class NoAnswerError(Exception):
    """Nobody answers: stdin has ended, or asking is forbidden."""


class Answers:
    """Asks questions.

    Args:
        can_ask: whether questions are allowed at all.
        on_stderr: whether questions go to stderr, because stdout has a report to read by programs.
    """

    def __init__(self, can_ask: bool, on_stderr: bool = False) -> None:
        # A closed stdin is None.
        self._is_open = can_ask and sys.stdin is not None
        self._on_stderr = on_stderr
        self._left = b""

    @property
    def are_typed(self) -> bool:
        """Whether somebody sits at a terminal, and can be asked again."""
        return self._is_open and sys.stdin.isatty()

    def say(self, text: str) -> None:
        """Prints what belongs to a question."""
        if self._is_open:
            typer.echo(text, err=self._on_stderr)

    def text(self, question: str) -> str:
        """Asks, and returns the answer; "" for Enter alone.

        Raises:
            NoAnswerError: Nobody answers.
        """
        if not self._is_open:
            raise NoAnswerError
        if sys.stdin.isatty():
            return str(
                typer.prompt(
                    question, default="", show_default=False, prompt_suffix="", err=self._on_stderr
                )
            ).strip()
        typer.echo(question, nl=False, err=self._on_stderr)
        line = self._line()
        typer.echo(line.rstrip("\n"), err=self._on_stderr)
        if not line:
            self._is_open = False
            raise NoAnswerError
        return line.strip()

    def yes(self, question: str, default: bool) -> bool:
        """Asks for a yes or a no, until one of them comes.

        Raises:
            NoAnswerError: Nobody answers.
        """
        while True:
            answer = self.text(f"{question} [{'Y/n' if default else 'y/N'}]: ").lower()
            if answer in ("", "y", "yes", "n", "no"):
                return default if not answer else answer.startswith("y")
            self.say("Please answer y or n")

    def _line(self) -> str:
        """Reads a line of a stdin that is no terminal, for a minute at most; "" at its end."""
        try:
            descriptor = sys.stdin.fileno()
        except io.UnsupportedOperation:  # no real file
            return sys.stdin.readline()
        while b"\n" not in self._left:
            if not select.select([descriptor], [], [], LIMIT_SEC)[0]:
                break
            more = os.read(descriptor, 65536)
            if not more:
                break
            self._left += more
        line, newline, self._left = self._left.partition(b"\n")
        return (line + newline).decode("utf-8", "replace")
