"""The first of several ranks of one place loads, and the others receive its batches."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from energon_lite import (
    DefaultTaskEncoder,
    FatalSampleError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from ..helpers import Ranks, assert_same, train, validation
from ..rank_processes import in_ranks
from .workers import ORDER, loader_from

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peers": 2, "peer": 2}, r"peer=2 does not lie in 0..peers-1 \(peers=2\)"),
        ({"peers": 4, "peer": 1}, r"peers=4 needs peer_group.*larger num_streams"),
        ({"peers": 2, "worker_type": "ray"}, r"peers=2 needs peer_group.*larger num_streams"),
    ],
)
def test_places_that_cannot_be_are_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        WorkerConfig(rank=0, world_size=1, num_workers=2, **config)


class Counted(DefaultTaskEncoder):
    """Counts what it computes."""

    num_computed = 0

    def __init__(self, resource: Any = None) -> None:
        super().__init__()
        self.resource = resource

    @stateless
    def encode_batch(self, batch: Any) -> Any:
        Counted.num_computed += 1
        if batch.__key__[0] == "00020":
            raise FatalSampleError("not this one")
        large = torch.full((20_000,), int(batch.__key__[0]))
        return {"keys": batch.__key__, "large": large, "same": large}


def run(rank: int, texts: Path, num_workers: int) -> Any:
    """Two places of two peers each: what each got, its state, and what it computed."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    place, peer = divmod(rank, 2)
    config = WorkerConfig(
        rank=place, world_size=2, num_workers=num_workers, num_streams=4, peers=2, peer=peer,
        peer_group=pairs[place],
    )  # fmt: skip
    train_loader = get_savable_loader(train(texts, "skipping")(config), max_skip_rate=1)
    iterator = iter(train_loader)
    found = [next(iterator) for _ in range(8)]
    state = train_loader.save_state_rank()
    made = validation(texts, "skipping")(config)
    val_loader = get_savable_loader(made, end="uneven", max_skip_rate=1)
    return found, state, [[*val_loader] for _ in range(2)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_peers_have_the_batches_and_states_of_their_place(
    texts: Path, tmp_path: Path, num_workers: int
) -> None:
    expected = Ranks(train(texts, "skipping"), 2, num_streams=4)
    slots = expected.slots(16)
    ranks = in_ranks(run, 4, tmp_path, texts, num_workers)
    for rank, (found, state, passes) in enumerate(ranks):
        place = rank // 2
        assert_same(found, [slots[2 * step + place] for step in range(8)])
        assert state["count"] == expected.loaders[place].save_state_rank()["count"]
        assert_same(passes, ranks[2 * place][2])
        assert_same(*passes)
    after = expected.slots(4)
    for peer in range(2):  # the state of either is that of the place
        states = [ranks[peer][1], ranks[2 + peer][1]]
        assert_same(Ranks(train(texts, "skipping"), 1, states=states).slots(4), after)


def fail(rank: int, texts: Path) -> Any:
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=0, peers=2, peer=rank,
        peer_group=dist.new_group([0, 1]),
    )  # fmt: skip
    loader = loader_of_counted(texts, config)
    found = []
    with pytest.raises(FatalSampleError, match="not this one") as caught:
        found.extend(loader)
    for batch in found:
        assert batch["large"] is batch["same"] or rank
        batch["large"][0] = -1
    return [batch["keys"] for batch in found], Counted.num_computed, str(caught.value)


def loader_of_counted(texts: Path, config: WorkerConfig, encoder: Any = None) -> Any:
    dataset: Any = get_train_dataset(
        texts, batch_size=2, worker_config=config, task_encoder=encoder or Counted(), **ORDER
    )
    return get_savable_loader(dataset)


def test_error_of_the_first_reaches_all_and_others_compute_nothing(
    texts: Path, tmp_path: Path
) -> None:
    first, second = in_ranks(fail, 2, tmp_path, texts)
    assert first[0] == second[0]
    assert len(first[0]) == 10
    assert first[1] == 11
    assert second[1] == 0
    assert "in the first peer" in second[2]


def spawn(rank: int, texts: Path) -> list[Any]:
    group = dist.new_group([0])
    config = WorkerConfig(
        rank=rank, world_size=1, num_workers=1, start_method="spawn", data_parallel_group=group,
        peer_group=group,
    )  # fmt: skip
    with pytest.raises(TypeError, match="is a lock, which cannot be sent"):
        next(iter(loader_of_counted(texts, config, Counted(threading.Lock()))))
    loader = iter(get_savable_loader(train(texts)(config)))
    return [next(loader) for _ in range(3)]


def test_groups_stay_with_the_rank_if_workers_are_spawned(texts: Path, tmp_path: Path) -> None:
    (found,) = in_ranks(spawn, 1, tmp_path, texts)
    assert_same(found, [*Ranks(train(texts), 1, 1).slots(3).values()])


def refuse(rank: int, texts: Path) -> None:
    config: dict[str, Any] = {"peer_group": dist.new_group([0, 1])}
    with pytest.raises(ValueError, match=r"of 3 is rank \d of 2 in peer_group"):
        next(iter(loader_from(train(texts), peers=3, peer=rank, **config)))


def test_group_of_others_is_refused(texts: Path, tmp_path: Path) -> None:
    in_ranks(refuse, 2, tmp_path, texts)
