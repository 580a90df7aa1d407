"""Workers that are programs of their own: they get a pass by one pipe, and answer by another."""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import suppress
from typing import Any

from energon_lite.loader.workers.executor import Executor, Pass, WorkerDied, next_of
from tests.programs import Program


class ProgramExecutor(Executor):
    """One program, which computes one batch ahead."""

    program: Any = None

    def start(self, job: Pass) -> None:
        """Begins a pass, the first one in a new program."""
        if self.program is None:
            (stdin, orders), (answers, stdout) = os.pipe(), os.pipe()
            self.program = Program(__file__, stdin=stdin, stdout=stdout)
            os.close(stdin)
            os.close(stdout)
            self.orders, self.answers = os.fdopen(orders, "wb"), os.fdopen(answers, "rb")
            self._send(self.settings)
        self._send(job)

    def _send(self, order: Any) -> None:
        with suppress(BrokenPipeError):  # which the next answer reports
            pickle.dump(order, self.orders)
            self.orders.flush()

    def take(self, number: int, for_sec: float) -> Any:
        """Returns the next delivery, and asks for another one."""
        try:
            found, delivery = pickle.load(self.answers)
        except EOFError:
            raise WorkerDied(f"program {self.program.pid}") from None
        if found != number:
            return None
        self._send(None)
        return delivery

    def end(self, for_sec: float) -> None:
        """Ends the program."""
        self.program.kill()
        self.answers.close()
        with suppress(BrokenPipeError):
            self.orders.close()


if __name__ == "__main__":
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # where hooks print
    settings = pickle.load(orders)
    with suppress(EOFError, BrokenPipeError):
        while True:
            if (order := pickle.load(orders)) is not None:
                feed, number = settings.feed(order), order.number
            pickle.dump((number, next_of(feed, "in a program")), answers)
            answers.flush()
