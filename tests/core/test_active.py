"""What `WorkerConfig` says of the sample being processed; values of Energon 7.4.1."""

from __future__ import annotations

import json

import pytest

from energon_lite import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset, stateless
from energon_lite.core import topology


def test_seeds_of_workers_are_those_of_energon():
    config = WorkerConfig(rank=1, world_size=2, num_workers=3, seed_offset=5)
    assert [config.worker_seed(i) for i in range(3)] == [4151408952, 2539445275, 2373645847]
    single = WorkerConfig(rank=0, world_size=1, num_workers=0)
    assert single.worker_seed() == 273211461
    assert single.config() == {
        "rank": 0, "world_size": 1, "num_workers": 0, "data_parallel_group": None
    }  # fmt: skip


def test_indices_are_known_while_a_worker_is_activated(monkeypatch):
    config = WorkerConfig(rank=1, world_size=2, num_workers=3)
    with pytest.raises(RuntimeError, match="No sample is being processed"):
        config.assert_worker()
    config.worker_activate(7)
    try:
        assert WorkerConfig.active_worker_config is config
        assert (config.active_worker_sample_index, config.active_worker_batch_index) == (21, 21)
        config.worker_push_sample_index(9)
        assert (config.active_worker_sample_index, config.active_worker_batch_index) == (27, 21)
        assert config.worker_pop_sample_index() == 9
        monkeypatch.setattr(topology.current, "worker_id", 2)
        assert config.active_worker_sample_index == 23
        with pytest.raises(RuntimeError, match="active already"):
            config.worker_activate(1)
    finally:
        config.worker_deactivate()
    assert WorkerConfig.active_worker_config is None
    with pytest.raises(RuntimeError, match="No sample is being processed"):
        config.active_worker_sample_index  # noqa: B018


def test_hooks_see_the_config_and_the_indices_of_the_loader(small_data):
    seen = []

    class Encoder(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, sample):
            active = WorkerConfig.active_worker_config
            assert active.active_worker_sample_index == self.current_sample_index
            assert active.active_worker_batch_index == self.current_batch_index
            seen.append((active, active.active_worker_batch_index))
            return sample

    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(
        small_data / "text", batch_size=2, worker_config=config, task_encoder=Encoder()
    )
    for _, _batch in zip(range(2), get_loader(dataset), strict=False):
        pass
    assert [active is config for active, _ in seen[:4]] == [True] * 4
    assert [index for _, index in seen[:4]] == [0, 0, 1, 1]
    assert WorkerConfig.active_worker_config is None


def test_log_lines_go_to_the_file_of_the_process(tmp_path):
    path = tmp_path / "logs/{worker_id}.txt"
    config = WorkerConfig(
        rank=1, world_size=2, num_workers=3, worker_debug_path=str(path), worker_log_level=1
    )
    assert (config.should_log(1), config.should_log(2)) == (True, False)
    config.worker_log({"a": 1})
    config.worker_log({"b": [2]})
    lines = (tmp_path / "logs/4.txt").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"a": 1}, {"b": [2]}]
