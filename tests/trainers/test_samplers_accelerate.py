"""The batch samplers under accelerate and the Trainer of transformers, in two processes."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from .batch_samplers import NUM, run_cases
from .ranks import run_ranks


def run_two(cases: list[dict[str, Any]]) -> list[list[Any]]:
    """What each case gives on each of two ranks, as [case][rank]."""
    return [list(pair) for pair in zip(*run_ranks(2, run_cases, cases), strict=True)]


def check_epoch(ranks: list[list[list[int]]], *, at_most: int = 1) -> None:
    """Asserts as many steps on both ranks, and every sample once in them."""
    assert len(ranks[0]) == len(ranks[1]) > 5
    counts = Counter(index for batches in ranks for batch in batches for index in batch)
    assert sorted(counts) == list(range(NUM))
    assert max(counts.values()) <= at_most


PLAIN: dict[str, dict[str, Any]] = {
    name: {"name": name, "skip": 3}
    for name in (
        "multipack", "multipack_drop_last", "modality", "modality_indices", "tokens", "of_seven",
        "axolotl_sequential", "axolotl_seeded",
    )
} | {
    "workers": {"name": "multipack", "num_workers": 2, "skip": 3},
    "made before": {"name": "multipack", "early": True},
    "tokens made before": {"name": "tokens", "early": True},
    "split": {"name": "multipack_drop_last", "split_batches": True},
    "split modality": {"name": "modality_alone", "split_batches": True},
    "dispatched": {"name": "multipack", "dispatch_batches": True},
    "uneven": {"name": "tokens", "even_batches": False},
    "seedable": {"name": "axolotl_random", "use_seedable_sampler": True},
    "gathered": {"name": "multipack", "gather": True},
    "not prepared": {"name": "multipack", "prepared": False},
}  # fmt: skip
if find_spec("torchdata"):
    PLAIN["stateful"] = {"name": "multipack", "use_stateful_dataloader": True, "skip": 3}
    PLAIN["stateful workers"] = PLAIN["stateful"] | {"num_workers": 2, "stop": 4}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "random": ({"name": "axolotl_random"}, "Each of 2 processes would draw another order"),
    "placed": ({"name": "placed"}, "accelerate shards the batches of MultipackBatchSampler to 2"),
    "alone": ({"name": "modality_alone"}, "the sampler was made for 1"),
}


@pytest.fixture(scope="module")
def accelerated() -> dict[str, Any]:
    cases = PLAIN | {name: case for name, (case, _) in REFUSED.items()}
    found = run_two([{"kind": "accelerate", **case} for case in cases.values()])
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("name", PLAIN)
def test_accelerate_yields_every_sample_once_an_epoch(name: str, accelerated: Any) -> None:
    ranks = accelerated[name]
    assert not any("error" in rank for rank in ranks), ranks
    for epoch in range(2):
        check_epoch([rank["epochs"][epoch] for rank in ranks])
    for rank in ranks:
        assert rank["len"] == len(rank["epochs"][0])
        if "sequential" not in name and name != "not prepared":
            assert rank["epochs"][0] != rank["epochs"][1], "accelerate sets the epoch"
        if "gathered" in rank:
            assert sorted(rank["gathered"]) == list(range(NUM))
        if "skipped" in rank:
            assert rank["skipped"] == rank["epochs"][1][3:]
        if "resumed" in rank:
            assert rank["before_stop"] == rank["epochs"][0][:4]
            assert rank["resumed"] == rank["epochs"][0][4:]


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_lose_samples_is_refused(name: str, accelerated: Any) -> None:
    for rank in accelerated[name]:
        assert REFUSED[name][1] in rank.get("error", "")


def test_each_process_gets_what_its_rank_gets_without_accelerate(accelerated: Any) -> None:
    for rank, place in zip(accelerated["tokens"], accelerated["uneven"], strict=True):
        assert rank["epochs"] == place["epochs"]
    for rank in accelerated["tokens"]:
        assert rank["before"] == rank["len"]


@pytest.mark.parametrize(
    "name", ["multipack", "modality", "modality_indices", "tokens", "axolotl_random"]
)
def test_trainer_yields_every_sample_once_an_epoch_and_resumes(name: str, tmp_path: Path) -> None:
    case = {"kind": "trainer", "name": name, "out": str(tmp_path / "run")}
    whole, resumed = run_two([case, case | {"resume": True}])
    assert not any("error" in rank for rank in (*whole, *resumed)), (whole, resumed)
    num_steps = len(whole[0]["steps"]) // 2
    for epoch in range(2):
        part = slice(epoch * num_steps, (epoch + 1) * num_steps)
        check_epoch([rank["steps"][part] for rank in whole])
    for rank, again in zip(whole, resumed, strict=True):
        assert rank["global_step"] == again["global_step"] == 2 * num_steps
        assert again["steps"] == rank["steps"][7:]
