"""Worker processes, as the training loop has them: started, received from, asked, and ended."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import os
import pickle
import platform
import signal
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from energon_lite.core.topology import WorkerConfig
from energon_lite.loader.workers import channel, worker_main
from energon_lite.loader.workers.channel import Channel, Closed, Inlet
from energon_lite.loader.workers.codec import WAYS, WorkerJob
from energon_lite.loader.workers.executor import (
    Executor,
    Limits,
    Pass,
    Wait,
    WorkerDied,
    WorkerSettings,
    end_workers,
)  # fmt: skip

# How long a worker may take to report what it does.
_ANSWER_SEC = 1.0
# After a kill; a process in an uninterruptible wait for a storage outlives it.
_KILL_SEC = 2.0
# Between two looks at a process that closed its files and has not ended.
_PAUSE_SEC = 0.005
# How long no thread of a forked process may be able to run.
_LOCKED_SEC = 5.0
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_CLOCK, _PRIVATE_WAITS = 256, (128, 137)
_LOCKED = (
    "It waits for a lock that a thread of the training process, as one that logs or prints, had "
    "when the process was forked, and that is never released. Start the loader before such "
    'threads, or use WorkerConfig(start_method="forkserver") or worker_type="thread".'
)
_STATES = {
    "D": "it waits for the kernel, often for a storage that does not answer",
    "R": "it runs native code that keeps Python's lock",
    "S": "it sleeps in native code that keeps Python's lock",
    "T": "it was stopped by a signal",
}
_NOT_STARTED = (
    "It had sent nothing, so no other was started; its own error is above. Under 'spawn' and "
    "'forkserver' it imports the program again: the program is a file, and starts below "
    f"`if __name__ == '__main__':`. {WAYS}"
)


class ProcessExecutor(Executor):
    """One worker process.

    It has two sockets with this process: one for deliveries, and one that a thread of it listens
    at, for orders and questions at any moment.
    """

    process: Any = None

    def __init__(self, settings: WorkerSettings, config: WorkerConfig) -> None:
        super().__init__(settings, config)
        self._has_sent = self._is_killed = self._is_locked = False
        self._num_requests = 0

    def start(self, job: Pass) -> None:
        """Begins a pass, the first one in a new process."""
        if self.process is not None:
            with suppress(Closed):  # which the next wait for it reports
                self._control.send(channel.PASS, body=pickle.dumps(job))
                self._data.send(channel.PASS)
            return
        # Kept: forks that go through a thousand sources for it would copy what they have of them.
        _ = self.settings.info.dataset.drawing  # type: ignore[attr-defined]
        try:
            self._begin(job)
        except (OSError, MemoryError) as error:
            channel.add_remedy(error)
            raise

    def _begin(self, job: Pass) -> None:
        if multiprocessing.current_process().daemon:
            raise RuntimeError(
                "A daemonic process, such as one of multiprocessing.Pool, may not start worker "
                "processes: use WorkerConfig(num_workers=0, ...) or worker_type='thread'"
            )
        pairs = [socket.socketpair() for _ in range(2)]
        (data, _), (control, _) = pairs
        self._data, self._control = Channel(data), Channel(control)
        self._data.wait_for(control)
        self._inlet = Inlet(self._data)
        start_method = self.config.start_method or self.config.default_start_method
        context: Any = multiprocessing.get_context(start_method)
        # The kernel reports the end of the thread that starts a process, not of its process.
        is_main = threading.current_thread() is threading.main_thread()
        others = tuple(other for _, other in pairs)
        args = (*others, WorkerJob(self.settings, job), is_main, worker_main.__file__)
        self.process = context.Process(target=worker_main.work, args=args, daemon=True)
        _processes.add(self)
        method = context.get_start_method()
        self.is_forked = method == "fork"
        if method == "forkserver":
            _preload()
        if not self.is_forked:
            multiprocessing.resource_tracker.ensure_running()  # which would unblock the signal
        # Until it ignores them, the process would print a traceback of an interrupt.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        except BaseException:
            self.leave()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for other in others:
                other.close()
        self.name = f"process {self.process.pid}"

    def is_ready(self, for_sec: float = 0) -> bool:
        """Whether there is a delivery, or something else to know; waits for it up to a time."""
        return self._data.is_ready(for_sec)

    def take(self, number: int, for_sec: float) -> Any:
        """Returns its next delivery, or the error that it met; None also where it has reported."""
        if (delivery := self._inlet.take(number)) is None:
            self.is_ready(for_sec)
        return delivery

    def receive(self, number: int, limits: Limits) -> Any:
        """Returns its next delivery, or the error that it met.

        Raises:
            WorkerDied: It ended, or is stuck.
            RuntimeError: The wait was too long, or it failed and reported why.
        """
        self._answer_due, self._free_at, self._is_locked = 0.0, time.monotonic(), False
        try:
            delivery = super().receive(number, limits)
        except Closed:
            with suppress(Closed):
                self._take_reports(None)
            raise self._death() from None
        except (OSError, MemoryError) as error:
            channel.add_remedy(error)
            raise
        self._has_sent = True
        return delivery

    def look(self, wait: Wait) -> None:
        """Takes reports, and asks for one where a limit is due.

        Raises:
            Closed: Nothing will come.
            WorkerDied: The process is stuck.
            RuntimeError: The wait was too long.
        """
        if self.is_ready():
            self._take_reports(wait)
            return
        # A process that it started may have its end of the socket.
        if not self.process.is_alive() and not self.is_ready():
            raise Closed
        now = time.monotonic()
        if not (self.is_forked and _is_locked(self.process.pid)):
            self._free_at = now
        is_locked = now > self._free_at + _LOCKED_SEC
        if wait.is_due() or (is_locked and not self._is_locked):
            self._is_locked = is_locked
            self._answer_due = now + _ANSWER_SEC
            self._num_requests += 1
            with suppress(Closed):
                self._control.send(channel.ASK, self._num_requests)
        if self._answer_due and now > self._answer_due:
            self._on_report(wait, f"It does not answer: {_state_of(self.process.pid)}.")

    def _take_reports(self, wait: Wait | None) -> None:
        while (report := self._control.receive()) is not None:
            self._has_sent = True
            text = report.body.decode()
            if report.kind == channel.FAILED:
                end_workers([self])
                raise RuntimeError(f"Worker {self.name} failed: {text}")
            if wait is not None and report.number == self._num_requests:
                self._on_report(wait, text)

    def _on_report(self, wait: Wait, text: str) -> None:
        self._answer_due = 0.0
        if self._is_locked:
            raise WorkerDied(f"{self.name} (waits for a lock)", f"{_LOCKED} {text}")
        wait.on_report(text)

    def _death(self) -> WorkerDied:
        """Waits for the end of the process; returns how it ended."""
        end_workers([self])
        code, why = self.process.exitcode, ""
        how = "has not ended" if code is None else f"exit code {code}"
        if self._is_killed:
            how = "it closed its socket, and was ended"
        elif code is not None and code < 0:
            how = f"signal {-code}"
            why = "A kill by signal 9 is often a lack of memory." if code == -signal.SIGKILL else ""
        has_ended = self._is_killed or (code is not None and code >= 0)  # by itself
        if has_ended and not self._has_sent:
            return WorkerDied(f"{self.name} ({how})", _NOT_STARTED, may_restart=False)
        return WorkerDied(f"{self.name} ({how})", why)

    def memory_bytes(self) -> int:
        """Returns the resident memory of the process, without memory that it shares."""
        with suppress(*_NOT_THERE):
            pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()
            return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def leave(self) -> None:
        """Closes the sockets, upon which the process ends by itself."""
        if self.process is not None:
            self._data.sock.close()
            self._control.sock.close()

    def end(self, for_sec: float) -> None:
        """Waits for the end of the process, then ends it by a kill."""
        if self.process is None or self.process.pid is None:
            return
        self._join(for_sec)
        self._is_killed = self._is_killed or self.process.is_alive()
        self.process.kill()
        self._join(_KILL_SEC)

    def _join(self, for_sec: float) -> None:
        """Waits for the end; a process that closes its files looks to `Process.join` as ended."""
        deadline = time.monotonic() + for_sec
        wait([self.process.sentinel], for_sec)
        while self.process.is_alive() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SEC)


def _preload() -> None:
    """Lets a fork server import once what each worker would import: torch, and this library.

    Beside the modules that the program names; a server that runs already stays as it is.
    """
    own = [name for name in sys.modules if name.startswith("energon_lite.")]
    server: Any = forkserver._forkserver
    server.set_forkserver_preload([*dict.fromkeys([*server._preload_modules, *own])])


# Files of a process that has ended, of another user's, or of a system without /proc; not what else
# is an OSError: a signal's handler may raise TimeoutError meanwhile.
_NOT_THERE = FileNotFoundError, PermissionError, ProcessLookupError, NotADirectoryError


def _is_locked(pid: int) -> bool:
    """Whether no thread of a process can run again, as all wait for locks in its memory.

    All but one, which listens; without a limit of time, and so that no other process could end the
    wait. Other waits, for a network, a time or a process, are none for locks.
    """
    num_others = 0
    with suppress(*_NOT_THERE):
        for task in Path(f"/proc/{pid}/task").iterdir():
            words = (task / "syscall").read_text().split()[:5]
            if len(words) < 5:
                return False  # it runs
            call, _, kind, _, limit = (int(word, 0) for word in words)
            is_lock = call == _FUTEX and kind & ~_CLOCK in _PRIVATE_WAITS and not limit
            if int(task.name) == pid and not is_lock:
                return False
            num_others += not is_lock
        return num_others <= 1
    return False


def _state_of(pid: int) -> str:
    """Returns the state of a process as the kernel knows it."""
    with suppress(*_NOT_THERE):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return f"its state is {state}, so {_STATES.get(state, 'it has ended')}"
    return "nothing is known of it"


_processes: weakref.WeakSet[ProcessExecutor] = weakref.WeakSet()


def _forget_processes() -> None:
    """Closes the sockets in a fork, which would hide the end of its parent from the workers."""
    for worker in list(_processes):
        worker.leave()
        multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget_processes)
