"""Machines that read the same samples in all epochs, whatever ranks and workers compute them."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import StateError

from ..helpers import MakeDataset, Ranks, metadataset, text_of, text_sets, through_json, train

GROUPS, RANKS, STREAMS = 4, 2, 16


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One source of which all groups have the same number of samples, others, and a tiny one."""
    sizes = {"even": 80, "odd": 61, "tiny": 3}
    root = text_sets(tmp_path_factory.mktemp("sets"), **sizes)
    entries = [{"path": str(root / name), "weight": size} for name, size in sizes.items()]
    return metadataset({"blend": entries})


def grouped(path: Any, groups: int = GROUPS, ranks: int | None = RANKS) -> MakeDataset:
    make = train(path, batch_size=1)

    def made(config: WorkerConfig) -> SavableDataset[Any]:
        return make(dataclasses.replace(config, node_groups=groups, ranks_per_node=ranks))

    return made


def sources_of(batch: Any) -> list[tuple[str, int, int]]:
    """The source, epoch and index of each sample."""
    return [tuple(key[:3]) for key in batch.__restore_key__[2:]]


@pytest.mark.parametrize("num_machines", [4, 2, 8])
def test_machine_reads_the_same_samples_in_all_epochs(blend, num_machines) -> None:
    """Half as many machines have two groups each; of twice as many, two have the same group."""
    world_size = num_machines * RANKS
    read: dict[tuple[int, str, int], set[int]] = defaultdict(set)
    run = Ranks(grouped(blend), world_size, num_streams=STREAMS)
    for slot, batch in run.slots(4 * 144).items():
        machine = slot % world_size // RANKS % GROUPS
        for source, epoch, index in sources_of(batch):
            read[machine, source.split("/")[1], epoch].add(index)
    for machine in range(min(num_machines, GROUPS)):
        for name, most, size in (("even", 0, 80), ("odd", 2, 61)):
            own = [read[machine, name, epoch] for epoch in range(3)]
            assert all(len(a ^ b) <= most * 2 for a in own for b in own)
            part = size / min(num_machines, GROUPS)
            assert {len(samples) for samples in own} <= {int(part), -int(-part // 1)}
    for name, size in (("even", 80), ("odd", 61)):
        for epoch in range(3):
            machines = [read[machine, name, epoch] for machine in range(GROUPS)]
            assert set.union(*machines) == {*range(size)}


@pytest.fixture(scope="module")
def unbroken(blend) -> Callable[[int], list[Any]]:
    """Returns the texts of the first 144 slots of a run with a number of groups."""

    def texts(groups: int) -> list[Any]:
        run = Ranks(grouped(blend, groups), 8, num_streams=STREAMS)
        return [batch.text for batch in run.slots(144).values()]

    return functools.cache(texts)


@pytest.mark.parametrize(("machines", "ranks"), [(2, 2), (8, 2), (1, 1), (1, 3), (4, 4)])
def test_run_resumes_on_other_machines(blend, unbroken, machines, ranks) -> None:
    run = Ranks(grouped(blend), 8, num_streams=STREAMS)
    found = run.slots(48)
    resumed = Ranks(grouped(blend), machines * ranks, states=run.save())
    found.update(resumed.slots(96))
    assert sorted(found) == [*range(144)]
    assert [found[slot].text for slot in range(144)] == unbroken(GROUPS)
    assert unbroken(GROUPS) != unbroken(1)


@pytest.mark.parametrize(
    ("groups", "ranks", "words"),
    [
        (2, RANKS, "node_groups=4 where this pipeline has 2"),
        (GROUPS, 1, "ranks_per_node=2 where this pipeline has 1"),
        (1, None, "node_groups"),
    ],
)
def test_other_groups_are_refused_on_a_resume(blend, groups, ranks, words) -> None:
    run = Ranks(grouped(blend), 8, num_streams=STREAMS)
    run.steps(2)
    states = through_json(run.save())
    with pytest.raises(StateError, match=words):
        Ranks(grouped(blend, groups, ranks), 8, states=states)


def test_streams_that_cannot_be_dealt_evenly_are_refused(blend) -> None:
    words = r"num_streams=12 cannot be dealt evenly.*a multiple of 8, as 16"
    with pytest.raises(ValueError, match=words):
        WorkerConfig(
            rank=0, world_size=4, num_workers=0, num_streams=12, node_groups=4, ranks_per_node=2
        )
    with pytest.raises(ValueError, match=words):  # where the number is that of ranks and workers
        Ranks(grouped(blend), 12).steps(1)


@pytest.mark.parametrize("settings", [{"node_groups": 0}, {"node_groups": 2, "ranks_per_node": 0}])
def test_groups_out_of_range_are_refused(settings) -> None:
    with pytest.raises(ValueError, match=r"(node_groups|ranks_per_node)=0 must be at least 1"):
        WorkerConfig(rank=0, world_size=4, num_workers=0, **settings)


def test_samples_that_are_drawn_with_replacement_have_no_groups(texts: Path) -> None:
    make = train(texts, shuffle_over_epochs_multiplier=-1)
    config = WorkerConfig(rank=0, world_size=4, num_workers=0, node_groups=4)
    with pytest.raises(ValueError, match="shuffle_over_epochs_multiplier=-1 draws slices"):
        make(config)


def test_ranks_of_a_machine_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    config = WorkerConfig.default_worker_config(node_groups=4)
    assert config.nodes == (4, 8)
    # Data-parallel ranks of several processes each are not those of the launcher.
    config = WorkerConfig(rank=0, world_size=8, num_workers=0, node_groups=4)
    assert config.nodes == (4, 2)


def test_pass_over_finite_data_has_each_sample_once(tmp_path: Path) -> None:
    folder = text_sets(tmp_path, texts=37) / "texts"
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=0, num_streams=8, node_groups=4, ranks_per_node=2
    )
    dataset = get_train_dataset(folder, batch_size=1, repeat=False, worker_config=config)
    loader = get_savable_loader(dataset)
    assert len(loader) == 37
    for _ in range(2):
        assert sorted(text for batch in loader for text in batch.text) == sorted(
            map(text_of, range(37))
        )
