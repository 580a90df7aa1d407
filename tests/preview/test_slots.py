"""The batch of a slot is the one that the run has there, also from a state of any rank."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch

from energon_lite import Packing, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.core.errors import StateError
from energon_lite.extras.preview.slots import SlotReader, saved_settings
from energon_lite.loader.resume import states_of

from ..helpers import text_set
from .sets import PackedBytes

SETTINGS = {"batch_size": 2, "shuffle_buffer_size": 10}


def loader_of(root, rank=0, world_size=1, nodes=None, **settings):
    config = WorkerConfig(
        rank=rank, world_size=world_size, num_workers=0, num_streams=4, seed_offset=3,
        **(nodes or {}),
    )  # fmt: skip
    dataset = get_train_dataset(
        root, task_encoder=PackedBytes(), worker_config=config, **{**SETTINGS, **settings}
    )
    return get_savable_loader(dataset)


def same(slot, batch):
    return slot.batch.__key__ == batch.__key__ and torch.equal(
        slot.batch.input_ids, batch.input_ids
    )


def test_slots_are_the_batches_of_the_run_in_any_order(tmp_path):
    root = text_set(tmp_path, 90)
    batches = list(islice(loader_of(root), 12))
    reader = SlotReader(root, "train", PackedBytes(), num_streams=4, seed_offset=3, **SETTINGS)
    for slot in (0, 1, 11, 10, 5, 5, 2, 9):
        assert same(reader.read(slot), batches[slot]), slot
        assert reader.read(slot).restore_key == batches[slot].__restore_key__


@pytest.mark.parametrize(
    ("num_before", "nodes"),
    [(0, {}), (5, {}), (8, {"node_groups": 2, "ranks_per_node": 2})],
)
def test_a_state_shows_the_very_batches_of_its_run(tmp_path, num_before, nodes):
    root = text_set(tmp_path, 90)
    loader = loader_of(root, nodes=nodes)
    batches = iter(loader)
    before = list(islice(batches, num_before))
    states = json.loads(json.dumps([loader.save_state_rank()]))
    after = list(islice(batches, 6))
    settings = saved_settings(states)
    assert settings == {
        "num_streams": 4, "seed_offset": 3, "repeat": True,
        "max_samples_per_sequence": 30, "parallel_shard_iters": 16, "batch_drop_last": False,
        **SETTINGS, **nodes,
    }  # fmt: skip
    reader = SlotReader(root, "train", PackedBytes(), states, **settings)
    assert reader.first == num_before
    for slot, batch in enumerate([*before, *after]):
        assert same(reader.read(slot), batch), slot


def test_the_state_of_one_rank_is_enough_for_its_slots(tmp_path):
    root = text_set(tmp_path, 90)
    loaders = [loader_of(root, rank, 2) for rank in range(2)]
    runs = [iter(loader) for loader in loaders]
    for _ in range(4):
        for run in runs:
            next(run)
    states = [loader.save_state_rank() for loader in loaders]
    expected = [next(run) for run in runs]
    for given in (states[1:], states, states_of(states)):
        reader = SlotReader(root, "train", PackedBytes(), given, **saved_settings(given or states))
        assert same(reader.read(9), expected[1])
        assert same(reader.read(8), expected[0])


def test_a_state_of_another_run_is_refused(tmp_path):
    root = text_set(tmp_path, 90)
    loader = loader_of(root)
    next(iter(loader))
    states = [loader.save_state_rank()]
    with pytest.raises(StateError, match="batch_size"):
        SlotReader(root, "train", PackedBytes(), states, num_streams=4, batch_size=3)


def test_a_run_ends(tmp_path):
    root = text_set(tmp_path, 20)
    encoder = PackedBytes()
    encoder.packing = Packing(capacity=64)
    reader = SlotReader(root, "train", encoder, batch_size=2, repeat=False)
    assert reader.read(0) is not None
    assert reader.read(50) is None
    assert saved_settings([]) == {}
