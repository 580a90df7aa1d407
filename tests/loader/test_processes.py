"""What only real processes show: dead parents, errors that travel, ranks that talk."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import socket
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    DefaultTaskEncoder,
    stateless,
)
from energon_lite.loader.workers import channel
from energon_lite.loader.workers.channel import Channel
from energon_lite.loader.workers.codec import WorkerJob
from energon_lite.loader.workers.worker_main import work

from ..helpers import Ranks, train
from ..programs import run_program
from .workers import loader_of

pytestmark = pytest.mark.processes


def test_loader_of_which_no_batch_is_read_starts_no_process(texts) -> None:
    before = set(multiprocessing.active_children())
    run = Ranks(train(texts), 2, 3)
    run.save()
    assert set(multiprocessing.active_children()) == before


def test_braces_in_the_path_of_a_skip_log_stay(texts, tmp_path) -> None:
    Ranks(train(texts, "skipping"), 1, skip_log=tmp_path / "{a}-{rank}").slots(8)
    assert (tmp_path / "{a}-0").exists()


def program(*arguments: Any) -> Any:
    """Runs a program that fails."""
    done = run_program(*arguments)
    assert done.returncode == 1, done.stderr
    return done


SCRIPT = """
from energon_lite import WorkerConfig, get_loader, get_train_dataset
config = WorkerConfig(rank=0, world_size=1, num_workers=1, start_method="spawn")
dataset = get_train_dataset({path!r}, batch_size=2, worker_config=config)
print(next(iter(get_loader(dataset))))
"""


def test_script_that_spawns_while_it_is_imported_gets_a_remedy(texts, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=str(texts)))
    done = program(script)
    (line,) = [line for line in done.stderr.splitlines() if "died" in line]
    assert "before the first batch" in line
    assert "`if __name__ == '__main__':`" in line


BELOW = """
import sys
from energon_lite import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
if __name__ == "__main__":
    class Local(DefaultTaskEncoder):
        pass
    config = WorkerConfig(rank=0, world_size=1, num_workers=1, start_method=sys.argv[1])
    dataset = get_train_dataset(
        sys.argv[2], batch_size=2, worker_config=config, task_encoder=Local()
    )
    next(iter(get_loader(dataset)))
"""


@pytest.mark.parametrize(
    ("method", "is_file"),
    [("spawn", True), pytest.param("forkserver", False, marks=pytest.mark.soak)],
)
def test_class_that_worker_processes_cannot_import_is_one_error(
    texts, tmp_path, method, is_file
) -> None:
    """In a script below the guard, and where the program is no file, as in a notebook."""
    script = tmp_path / "script.py"
    script.write_text(BELOW)
    start = [script] if is_file else ["-c", BELOW]
    done = program(*start, method, texts)
    *_, line = done.stderr.splitlines()
    assert line.startswith("RuntimeError: Worker process ")
    assert "Can't get attribute 'Local'" in line
    for remedy in ("top level of a module", 'start_method="fork"', 'worker_type="thread"'):
        assert remedy in line
    assert done.stderr.count("Traceback") == 1
    for wrong in ("lack of memory", "Another one", "signal"):
        assert wrong not in done.stderr


def test_fork_server_imports_torch_and_the_library_for_all_of_its_workers(texts) -> None:
    server: Any = forkserver._forkserver
    server._stop()  # of an earlier test, which may have named other modules
    with loader_of(texts, DefaultTaskEncoder(), kind="forkserver") as loader:
        next(iter(loader))
        maps = Path(f"/proc/{server._forkserver_pid}/maps").read_text()
    assert "libtorch" in maps
    preloaded = server._preload_modules
    assert preloaded[0] == "__main__"
    assert work.__module__ in preloaded
    assert len(preloaded) == len(set(preloaded))


def test_worker_refuses_another_copy_of_the_library_than_that_of_the_program() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    data, control = (pair[1] for pair in pairs)
    with pytest.raises(SystemExit):
        work(data, control, WorkerJob(), dies_with_parent=False, home="/elsewhere/worker_main.py")
    report: Any = Channel(pairs[1][0]).receive()
    assert report.kind == channel.FAILED
    for words in ("the program /elsewhere/worker_main.py", "PYTHONPATH"):
        assert words in report.body.decode()
    for end in itertools.chain(*pairs):
        end.close()


class WithFunction(DefaultTaskEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.functions = {"a": [print, lambda text: text]}

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return sample


def local_encoder() -> DefaultTaskEncoder:
    class Local(WithFunction):
        def __init__(self) -> None:
            DefaultTaskEncoder.__init__(self)

    return Local()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (WithFunction, r"WithFunction\.functions\['a'\]\[1\] is a function .*<lambda>, which"),
        (local_encoder, r"is a local_encoder.<locals>.Local, which cannot be sent to a worker"),
    ],
)
def test_encoder_that_cannot_be_sent_is_an_error_that_names_the_part(texts, make, words) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(TypeError, match=words) as caught:
        next(iter(loader_of(texts, make(), 1, kind="spawn")))
    for remedy in ("task encoder", "module", 'start_method="fork"', 'worker_type="thread"'):
        assert remedy in str(caught.value)
    assert set(multiprocessing.active_children()) == before


class Closing(DefaultTaskEncoder):
    """Closes all that its process has, and stays."""

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        sys.setswitchinterval(600)
        libc = ctypes.PyDLL(None)  # which keeps Python's lock, so that no thread notices
        for file in range(3, 1_000):
            libc.close(file)
        libc.sleep(600)


def test_worker_that_the_loader_ended_is_not_reported_as_killed_by_the_system(
    texts, caplog
) -> None:
    with pytest.raises(RuntimeError, match="closed its socket, and was ended") as caught:
        next(iter(loader_of(texts, Closing(), 1)))
    assert "It had sent nothing, so no other was started" in str(caught.value)
    assert "signal 9" not in str(caught.value)
    assert "memory" not in str(caught.value)
    assert not caplog.records


LIMITED = """
import os, resource, sys
from pathlib import Path
import numpy as np
from energon_lite import *
class Large(DefaultTaskEncoder):
    @stateless
    def encode_batch(self, batch):
        return {"x": np.ones(300_000)}
texts, *limits = sys.argv[1:]
config = WorkerConfig(rank=0, world_size=1, num_workers=2, start_method="fork")
dataset = get_train_dataset(texts, batch_size=2, worker_config=config, task_encoder=Large())
loader = get_savable_loader(dataset)
for limit in limits:  # each in a process of its own
    name, more = limit.split("=")
    if os.fork():
        print(f"{name} ends with {os.waitstatus_to_exitcode(os.wait()[1])}", file=sys.stderr)
        continue
    pages = Path("/proc/self/statm").read_text().split()[0]
    used = {"RLIMIT_AS": int(pages) * resource.getpagesize()}.get(name, 0)
    kind = getattr(resource, name)
    resource.setrlimit(kind, (used + int(more), resource.getrlimit(kind)[1]))
    sys.exit(len([batch for batch, _ in zip(loader, range(9))]))
sys.exit(1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_limits_of_the_system_are_errors_that_name_the_limit(texts) -> None:
    limits = {
        f"RLIMIT_FSIZE={1 << 20}": ("File too large", "ulimit -f"),
        f"RLIMIT_AS={16 << 20}": ("emory", "fewer workers", "ulimit -v"),
    }
    lines = program("-c", LIMITED, texts, *limits).stderr.splitlines()
    for limit, words in limits.items():
        place = lines.index(f"{limit.partition('=')[0]} ends with 1")
        end = "\n".join(lines[max(0, place - 2) : place])
        for word in words:
            assert word in end
        names = {"ulimit -f", "ulimit -v", "ulimit -n"}
        assert [name for name in names if name in end] == [word for word in words if word in names]
        assert "signal 9" not in end


class OddThird(DefaultTaskEncoder):
    """Puts something into the third batch that cannot be sent."""

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        odd = {"odd": lambda: 0} if self.current_batch_index == 2 else {}
        return {"__key__": batch.__key__, **odd}


def test_batch_that_cannot_be_sent_is_an_error_and_leaves_an_exact_state(texts) -> None:
    keys = [batch["__key__"] for batch in itertools.islice(loader_of(texts, OddThird(), 0), 4)]
    loader = loader_of(texts, OddThird(), 2)
    iterator = iter(loader)
    assert [next(iterator)["__key__"] for _ in range(2)] == keys[:2]
    for batches in (iterator, iter(loader)):  # and again, however often it is tried
        with pytest.raises(TypeError, match=r"batch\['odd'\] is a function .*<lambda>") as caught:
            next(batches)
        assert str(keys[2][0]) in str(caught.value)
    alone = loader_of(texts, OddThird(), 0)
    alone.load_state_dict(loader.state_dict())
    assert [batch["__key__"] for batch in itertools.islice(alone, 2)] == keys[2:]
