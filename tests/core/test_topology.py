from __future__ import annotations

import copy
import pickle

import pytest
import torch.distributed as dist

from energon_lite import WorkerConfig
from energon_lite.core import topology
from energon_lite.core.errors import log_exception, reraise_exception


@pytest.fixture(autouse=True)
def first_warnings() -> None:
    topology._warn_once.cache_clear()


def config_of(**more: object) -> WorkerConfig:
    return WorkerConfig(**{"rank": 0, "world_size": 2, "num_workers": 3, **more})  # type: ignore[arg-type]


def test_worker_configs_are_equal_by_their_place_and_never_equal_to_others() -> None:
    assert config_of() == config_of(seed_offset=4)
    assert config_of() != config_of(rank=1)
    assert config_of() != config_of(num_workers=1)
    assert (config_of() == "config") is False
    assert (config_of() == None) is False  # noqa: E711
    assert config_of() != {"rank": 0}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 2}, "rank=2 does not lie in 0..world_size-1"),
        ({"rank": -1}, "rank=-1"),
        ({"world_size": 0}, "world_size=0"),
        ({"num_workers": -1}, "num_workers=-1 must be at least 0"),
        ({"num_streams": 0}, "num_streams=0 must be at least 1, or None"),
        ({"num_streams": 2**24 + 1}, "num_streams=16777217 must lie in 1..16,777,216"),
        (
            {"world_size": 1 << 22, "num_workers": 8},
            "num_streams=33554432, by default of 4194304 ranks and 8 workers each, must lie in "
            "1..16,777,216",
        ),
        ({"start_method": "thread"}, "start_method='thread' is not one of fork, forkserver, spawn"),
    ],
)
def test_place_that_cannot_be_is_refused(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**wrong)


def test_default_config_without_torch_distributed_is_the_only_rank() -> None:
    config = WorkerConfig.default_worker_config()
    assert (config.rank, config.world_size, config.num_workers) == (0, 1, 4)
    assert config.global_rank() == 0
    assert (config.global_error_handler, config.restore_error_handler) == (
        log_exception,
        reraise_exception,
    )


def test_default_config_and_states_come_from_torch_distributed(tmp_path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    try:
        config = WorkerConfig.default_worker_config(2)
        assert (config.rank, config.world_size, config.num_workers) == (0, 1, 2)
        assert WorkerConfig.default_worker_config(2, dist.group.WORLD).global_rank() == 0
    finally:
        dist.destroy_process_group()


def test_default_config_before_torch_distributed_takes_the_place_that_torchrun_set(
    monkeypatch, caplog
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    configs = [WorkerConfig.default_worker_config(1) for _ in range(3)]
    assert {(config.rank, config.world_size) for config in configs} == {(2, 4)}
    assert not caplog.text  # a process group may come; only reading without one is worth a word
    for config in configs:
        config.check_place()
    assert caplog.text.count("rank 2 of 4, by RANK and WORLD_SIZE of the environment") == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert WorkerConfig.default_worker_config(1).world_size == 1


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}],
)
def test_environment_that_is_no_place_is_refused(monkeypatch, environment) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="WORLD_SIZE to integers"):
        WorkerConfig.default_worker_config(1)


@pytest.mark.parametrize(
    ("environment", "passed", "is_worth_a_word"),
    [
        ((0, 2), {}, True),
        ((1, 2), {}, True),
        ((1, 2), {"world_size": 2}, True),
        ((1, 2), {"world_size": 2, "rank": 1}, False),
        ((0, 1), {}, False),
        ((3, 4), {"world_size": 2}, False),  # pairs of processes share a rank
        ((1, 2), {"data_parallel_group": object()}, False),
        ((1, None), {}, False),
        ((None, None), {}, False),
    ],
)
def test_own_place_that_differs_from_the_launcher_is_logged_once(
    monkeypatch, caplog, environment, passed, is_worth_a_word
) -> None:
    for name, value in zip(("RANK", "WORLD_SIZE"), environment, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    for _ in range(3):
        config_of(**{"world_size": 1, **passed}).check_place()
    assert len(caplog.records) == is_worth_a_word
    for part in ("rank 0 of", f"this process is rank {environment[0]} of 2",
                 "default_worker_config(num_workers)", "data_parallel_group"):  # fmt: skip
        assert not is_worth_a_word or part in caplog.text


def test_default_config_takes_the_other_settings_by_keyword() -> None:
    config = WorkerConfig.default_worker_config(2, num_streams=24, worker_type="thread")
    assert (config.default_num_streams, config.worker_type) == (24, "thread")
    with pytest.raises(ValueError, match="num_streams=0"):
        WorkerConfig.default_worker_config(2, num_streams=0)
    with pytest.raises(TypeError, match="num_stream'"):
        WorkerConfig.default_worker_config(2, num_stream=1)


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_default_workers_are_at_most_the_cores_and_the_streams_those_of_four(monkeypatch, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    default = WorkerConfig.default_worker_config()
    copies = (default, copy.deepcopy(default), pickle.loads(pickle.dumps(default)))
    for config in copies:
        assert (config.num_workers, config.most_workers) == (4, min(4, cores))
        assert config.default_num_streams == 4
    chosen = WorkerConfig.default_worker_config(4)
    assert (chosen.most_workers, chosen.default_num_streams) == (4, 4)
    assert default == chosen
