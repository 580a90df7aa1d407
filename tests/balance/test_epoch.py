"""An epoch in one call; for each defect of OmniBal's sampler that was found, a test that it is not
here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite.balance import CostModel, balance_epoch, imbalance
from energon_lite.batching.best import lower_bound

DATA = Path(__file__).parents[2].parent / "shared" / "data"
OMNIBAL = DATA / "omnibal_lengths"

needs_omnibal = pytest.mark.skipif(
    not OMNIBAL.is_dir(), reason="the folder shared/data/omnibal_lengths is not here"
)


def image_samples(num: int) -> Any:
    """Tiles and tokens, as of images that are cut into one to five tiles."""
    random = np.random.Generator(np.random.Philox(11))
    tiles = random.choice([1, 3, 4, 5], num, p=[0.1, 0.34, 0.01, 0.55])
    return tiles, tiles * 256 + random.integers(20, 400, num)


@pytest.fixture(scope="module")
def omnibal() -> Any:
    rows = [
        (sample["vit_num"], sample["token_num"])
        for path in sorted(OMNIBAL.glob("*_token_lengths.json"))
        for sample in json.loads(path.read_bytes())
    ]
    return np.array(rows).T


SETTINGS: Any = {"max_tiles": 18, "max_tokens": 6016, "num_ranks": 8}


@needs_omnibal
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("max_tiles", "max_tokens", "share", "tiles", "tokens"),
    [
        (18, 6016, 1.001, 0.001, 0.004),
        (9, 4096, 1.0005, 0.006, 0.0125),
        (15, 4096, 1.001, 0.005, 0.005),
        (30, 8192, 1.001, 0.0026, 0.0003),
    ],
)
def test_few_packs_and_equal_ranks(
    omnibal: Any,
    seed: int,
    max_tiles: int,
    max_tokens: int,
    share: float,
    tiles: float,
    tokens: float,
) -> None:
    vit_num, token_num = omnibal
    balanced = balance_epoch(
        vit_num, token_num, max_tiles=max_tiles, max_tokens=max_tokens, num_ranks=8, seed=seed
    )
    rows = np.stack([token_num, vit_num], axis=1)
    assert len(balanced.packs) <= share * lower_bound(rows, (max_tokens, max_tiles))
    assert imbalance(balanced.plan.costs(balanced.tiles)) <= tiles
    assert imbalance(balanced.plan.costs(balanced.tokens)) <= tokens


# Samples above a limit: there, skipped in silence; and if such a sample comes last, the samples
# gathered before it are lost.


def test_oversize_samples_are_an_error_that_names_the_first() -> None:
    tiles, tokens = image_samples(100)
    tiles[40], tokens[60] = 19, 7000
    with pytest.raises(
        ValueError, match=r"Sample 40 has .* tokens and 19 tiles, .*as have 1 after"
    ):
        balance_epoch(tiles, tokens, **SETTINGS)


# Limits that do not suit the data: there, more iterations give more packs.


@pytest.mark.parametrize("max_tiles", [5, 6, 7, 9, 10, 14, 18])
def test_limits_that_do_not_suit_the_data_cost_few_packs(max_tiles: int) -> None:
    tiles, tokens = image_samples(5000)
    balanced = balance_epoch(tiles, tokens, max_tiles=max_tiles, max_tokens=4096, num_ranks=8)
    bound = lower_bound(np.stack([tokens, tiles], axis=1), (4096, max_tiles))
    assert len(balanced.packs) <= 1.02 * bound


# The global generator: there, reseeded.


def test_generators_of_others_are_left_alone_and_do_not_matter() -> None:
    tiles, tokens = image_samples(500)
    np.random.seed(4)
    before = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    first = balance_epoch(tiles, tokens, **SETTINGS)
    after = np.random.get_state()[1]  # type: ignore[index]
    assert np.array_equal(before, after)
    np.random.random(7)
    again = balance_epoch(tiles, tokens, **SETTINGS)
    assert (first.packs, first.plan) == (again.packs, again.plan)


# The order of the epoch: there, from short to long.


@pytest.mark.parametrize(("max_tiles", "max_tokens"), [(18, 6016), (9, 4096)])
def test_cost_does_not_drift_over_the_epoch(max_tiles: int, max_tokens: int) -> None:
    tiles, tokens = image_samples(40_000)
    # As in the files: one data set after the other, short samples first.
    order = np.argsort(tokens)
    balanced = balance_epoch(
        tiles[order], tokens[order], max_tiles=max_tiles, max_tokens=max_tokens, num_ranks=8
    )
    lengths = np.stack([tokens[order], tiles[order]], axis=1)
    for model in (CostModel(), CostModel(token=0, token_squared=1), CostModel(token=0, tile=1)):
        costs = balanced.plan.costs(model.costs(balanced.packs, lengths)).mean(axis=1)
        quarters = [part.mean() for part in np.array_split(costs, 4)]
        assert max(quarters) <= 1.02 * min(quarters)
    # Mean length of a sample, for packs that are equally full.
    counts = np.diff(balanced.packs.offsets)[balanced.plan.steps]
    quarters = [part.mean() for part in np.array_split(counts.mean(axis=1), 4)]
    assert max(quarters) <= 1.05 * min(quarters)


def test_the_last_packs_of_an_epoch_are_as_the_others() -> None:
    tiles, tokens = image_samples(4000)
    balanced = balance_epoch(tiles, tokens, max_tiles=9, max_tokens=4096, num_ranks=1)
    lightest = np.argsort(balanced.tokens)[:100]
    assert 0.4 < lightest.mean() / len(balanced.packs) < 0.6


# What makes no whole step: there, dropped.


def test_epochs_and_seeds_make_other_packs() -> None:
    tiles, tokens = image_samples(300)
    packs = [
        balance_epoch(tiles, tokens, **SETTINGS, seed=seed, epoch=epoch).packs
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert packs[0] != packs[1] != packs[2] != packs[0]


def test_texts_without_tiles_and_nothing_at_all() -> None:
    balanced = balance_epoch([0, 0, 5], [6000, 16, 900], **SETTINGS)
    assert sorted(balanced.tokens.tolist()) in ([900, 6016], [916, 6000])
    empty = balance_epoch([], [], **SETTINGS)
    assert (len(empty.packs), len(empty.plan), len(empty.oversize)) == (0, 0, 0)


def test_a_model_determines_which_packs_are_similar() -> None:
    tiles, tokens = image_samples(8000)
    limits: Any = {"max_tiles": 9, "max_tokens": 4096, "num_ranks": 8}
    by_tokens = balance_epoch(tiles, tokens, **limits, model=CostModel(token=1))
    by_tiles = balance_epoch(tiles, tokens, **limits)
    of = [
        (imbalance(b.plan.costs(b.tokens)), imbalance(b.plan.costs(b.tiles)))
        for b in (by_tokens, by_tiles)
    ]
    assert of[0][0] < of[1][0]
    assert of[0][1] > of[1][1]


@pytest.mark.parametrize(
    ("vit_num", "token_num", "message"),
    [
        ([1, 2], [10], r"token_num has shape \(1,\), vit_num \(2,\); give both of every sample"),
        ([1, 0], [10, 0], r"Sample 1 has length \[0, 0\], below 1. Drop empty samples"),
        ([1, -1], [10, 10], r"Sample 1 has length \[10, -1\], negative"),
        ([[1]], [[10]], r"token_num has shape \(1, 1\), .* in shape \(N,\)"),
    ],
)
def test_samples_that_make_no_sense_are_refused(vit_num: Any, token_num: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_epoch(vit_num, token_num, **SETTINGS)


def test_counts_must_be_integers() -> None:
    with pytest.raises(TypeError, match="vit_num must be integers"):
        balance_epoch([1.0], [10], **SETTINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tiles": 0}, "max_tiles=0 must be at least"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least"),
        ({"num_ranks": 0}, "num_ranks=0 must be at least"),
        ({"oversize": "skip"}, "oversize='skip' is not one of error, drop"),
        ({"remainder": "skip"}, "remainder='skip' is not one of"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_epoch([1], [10], **{**SETTINGS, **change})
