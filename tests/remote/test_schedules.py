"""Runs that are disturbed at random: the batches of an undisturbed one, or one clear error."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset

from ..faults.figures import Figures
from ..faults.jobs import Job, Jobs, shared_memory, wait_until
from .conftest import KEY, SECRET, fetchers_of
from .server import KINDS, Server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("obstore") is None, reason="obstore is not installed"),
]

SCENE = "tests.remote.remote_jobs:read"
LIMIT_SEC = 120.0
NUM_BATCHES = 40
NAMES = "texts", "long"
Act = Callable[[], Any]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with tempfile.TemporaryDirectory() as folder:  # a short path: Python's fork server needs one
        yield Jobs(Path(folder))


@pytest.fixture(scope="module")
def expected(texts: Path) -> dict[str, list[list[str]]]:
    """The keys of the batches of local runs."""
    found = {}
    for name in NAMES:
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
        settings: dict[str, Any] = {"batch_size": 2, "shuffle_buffer_size": 10}
        made = get_savable_loader(get_train_dataset(texts / name, worker_config=config, **settings))
        found[name] = [list(batch.__key__) for batch in islice(made, NUM_BATCHES)]
    return found


def environment_of(server: Server) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server.url, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip


class Schedule:
    """What happens in one run, all of it decided by a seed.

    Attributes:
        name: of the dataset.
        config: of the loader.
        disk_bytes: of the disk for copies; 0 is without a limit.
        acts: the batch after which each happens, ascending, its name and settings.
    """

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.name = rng.choice(NAMES)
        self.config: dict[str, Any] = {"num_workers": rng.choice([0, 0, 1, 2])}
        if self.config["num_workers"] == 2 and seed % 2:
            self.config["worker_type"] = "thread"
        self.disk_bytes = rng.choice([0, 0, 0, 0, 600_000, 1_500_000])
        self.network = {
            "latency_ms": rng.choice([0, 2, 10]), "bytes_per_sec": rng.choice([5e5, 1e6, 3e6]),
        }  # fmt: skip
        kinds = rng.choices(
            ["fault", "kill", "stop", "outage", "replace", "refuse", "shard", "heal"],
            [8, 4, 1, 1, 1, 0.5, 3, 2], k=rng.randint(1, 6),
        )  # fmt: skip
        ats = sorted(rng.choice([-1, rng.randrange(NUM_BATCHES)]) for _ in kinds)
        self.acts = [(at, kind, self._settings(kind)) for at, kind in zip(ats, kinds, strict=True)]

    def _settings(self, kind: str) -> dict[str, Any]:
        rng = self.rng
        if kind == "fault":
            return {
                "kind": rng.choice(KINDS), "times": rng.choice([1, 2, 5]),
                "skip": rng.randint(0, 5), "path": rng.choice(["", r"tar$", "shard-0", "nv-meta"]),
                "status": rng.choice([408, 429, 500, 503]), "seconds": rng.uniform(0, 3),
                "after_bytes": rng.choice([None, 0, rng.randrange(30_000)]), "bytes_per_sec": 2e5,
            }  # fmt: skip
        if kind == "refuse":
            return {"kind": "status", "status": rng.choice([401, 403, 404, 503]), "times": 1 << 30}
        if kind == "shard":  # while others can be read, until a time or for ever
            return {
                "kind": "status", "status": rng.choice([400, 401, 403, 404, 429, 503]),
                "times": rng.choice([5, 50, 1 << 30]), "path": f"shard-0*{rng.randrange(3)}.tar$",
            }  # fmt: skip
        return {"seconds": rng.uniform(0, 3)} if kind == "outage" else {}

    def __str__(self) -> str:
        acts = "; ".join(f"{at}: {kind} {settings or ''}" for at, kind, settings in self.acts)
        disk = f" on {self.disk_bytes:,} bytes" if self.disk_bytes else ""
        return f"{self.name}{disk}, {self.config}, {self.network}: {acts}"


def act(kind: str, settings: dict[str, Any], job: Job, server: Server, shard: Path) -> None:
    """Disturbs a run."""
    if kind in ("fault", "refuse", "shard"):
        server.fail(**settings)
    elif kind == "heal":
        server.heal()
    elif kind == "replace":
        data = shard.read_bytes().replace(b"text ", b"TEXT ")
        server.replace(f"bucket/{shard.parent.name}/{shard.name}", data)
    elif kind == "outage":
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(settings["seconds"])
        os.kill(server.pid, signal.SIGCONT)
    else:
        signal_fetchers(job, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def signal_fetchers(job: Job, number: signal.Signals) -> None:
    for process in fetchers_of(job.folder):
        with suppress(ProcessLookupError):
            os.kill(process, number)


def outcome(seed: int, jobs: Jobs, texts: Path, keys: dict[str, list[list[str]]]) -> str:
    """Runs a schedule; returns how the run ended, or fails."""
    schedule = Schedule(seed)
    shards = sorted((texts / schedule.name).glob("*.tar"))
    with Server(root=texts, credentials=(KEY, SECRET), **schedule.network) as server, jobs.job(
        SCENE, address=f"s3://bucket/{schedule.name}", environment=environment_of(server),
        num_batches=NUM_BATCHES, disk_bytes=schedule.disk_bytes, **schedule.config,
    ) as job:  # fmt: skip
        for at, kind, settings in schedule.acts:
            wait_until(
                lambda at=at: len(job.reports()) > at + 1 or job.exit_code() is not None,
                f"batch {at} of {job!r}: {job.stderr()}", LIMIT_SEC,
            )  # fmt: skip
            act(kind, settings, job, server, schedule.rng.choice(shards))
        code, _ = job.end(LIMIT_SEC)
        signal_fetchers(job, signal.SIGCONT)
        wait_until(lambda: not fetchers_of(job.folder), "end of the fetcher")
        wait_until(lambda: not job.workers(), "end of the workers")
        text, (own, *reports) = job.stderr(), job.reports()
    assert not [name for name in shared_memory() if own in name]
    assert SECRET not in text
    assert KEY not in text
    batches = [report for report in reports if isinstance(report, list)]
    versions = Counter(version for batch in batches for _, version in batch)
    kinds = {kind for _, kind, _ in schedule.acts}
    assert set(versions) <= ({"old", "new"} if "replace" in kinds else {"old"}), versions
    found = [[key for key, _ in batch] for batch in batches]
    assert found == keys[schedule.name][: len(found)], text  # no sample was skipped
    if code:
        last = [line for line in text.splitlines() if "Error: " in line][-1:]
        assert any(f"s3://bucket/{schedule.name}" in line for line in last), text
        return "error"
    assert len(found) == NUM_BATCHES, text
    assert reports[-1] == {"skipped": {}}, text
    return "the same"


def assert_undisturbed(seeds: Iterable[int], *rest: Any) -> None:
    outcomes, figures = Counter[str](), Figures("runs on remote data with random faults")

    def trial(seed: int) -> None:
        with figures.trial(f"seed {seed}: {Schedule(seed)}"):
            outcomes[outcome(seed, *rest)] += 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(trial, seeds))
    figures.note(", ".join(f"{name} {number}" for name, number in outcomes.most_common()))
    figures.check()


@pytest.mark.parametrize(
    "seeds",
    # Of the few, each kind of worker and of act is one's, and one has a small disk.
    [(139, 140, 141, 143, 145), pytest.param(range(1000), marks=pytest.mark.soak)],
    ids=["few", "many"],
)
def test_disturbed_runs_have_the_batches_of_others_or_end_with_an_error(
    jobs: Jobs, texts: Path, expected: dict[str, list[list[str]]], seeds: Iterable[int]
) -> None:
    assert_undisturbed(seeds, jobs, texts, expected)


WAYS: list[dict[str, Any]] = [
    {"num_workers": 1, "start_method": "fork"}, {"num_workers": 2, "worker_type": "thread"},
    {"num_workers": 1, "start_method": "spawn"}, {"num_workers": 1, "start_method": "forkserver"},
    {"num_workers": 2, "start_method": "fork"},
]  # fmt: skip


@pytest.mark.parametrize("number", [2, pytest.param(500, marks=pytest.mark.soak)])
def test_programs_start_a_fetcher_and_end_with_it(
    jobs: Jobs, texts: Path, expected: dict[str, list[list[str]]], number: int
) -> None:
    """The program reads metadata before it starts workers, where a used store would hang."""
    figures = Figures("starts and ends of programs that read remote data, s of a program")

    def trial(number: int) -> None:
        config, num_batches = WAYS[number % len(WAYS)], number % 7
        store = {"address": "s3://bucket/texts", "environment": environment_of(server)}
        with (
            figures.trial(config),
            jobs.job(SCENE, **store, **config, num_batches=num_batches) as job,
        ):
            code, waited = job.end(LIMIT_SEC)
            assert code == 0, job.stderr()
            found = [[key for key, _ in batch] for batch in job.reports()[1:-1]]
            assert found == expected["texts"][:num_batches]
            wait_until(lambda: not fetchers_of(job.folder), "end of the fetcher")
            wait_until(lambda: not job.workers(), "end of the workers")
            assert not [*job.folder.rglob("*.data")]
            figures.add(waited)

    with Server(root=texts, credentials=(KEY, SECRET)) as server, ThreadPoolExecutor(4) as pool:
        list(pool.map(trial, range(number)))
    figures.check()
