from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from energon_lite.balance import CostModel, search_capacities


def image_samples(num: int) -> Any:
    random = np.random.Generator(np.random.Philox(11))
    tiles = random.choice([1, 3, 4, 5], num, p=[0.1, 0.34, 0.01, 0.55])
    return tiles, tiles * 256 + random.integers(20, 400, num)


SETTINGS: Any = {"num_ranks": 8, "model": CostModel(token=1, tile=300)}


def test_pairs_come_in_order_of_what_they_waste() -> None:
    table = search_capacities(*image_samples(2000), tiles=30, tokens=8192, **SETTINGS)
    assert len(table) == 100
    wasted = [pair.wasted for pair in table]
    assert wasted == sorted(wasted)
    assert wasted[0] < 0.5 * wasted[-1]
    limits = {(pair.max_tiles, pair.max_tokens) for pair in table}
    assert len(limits) == 100
    assert max(limits) == (30, 8192)
    assert min(limits)[0] == 5


def test_every_pair_is_described() -> None:
    tiles, tokens = image_samples(2000)
    for pair in search_capacities(tiles, tokens, tiles=[6, 18], tokens=[3000, 6016], **SETTINGS):
        assert pair.tiles_filled == pytest.approx(tiles.sum() / pair.num_packs / pair.max_tiles)
        assert pair.tokens_filled == pytest.approx(tokens.sum() / pair.num_packs / pair.max_tokens)
        assert 0 <= pair.wasted <= pair.idle_unsorted < 1


def test_limits_that_five_tiles_fill_badly_rank_last() -> None:
    # 5 and 5 do not fit into 9 tiles, nor 3 and 3 and 5 beside each other.
    table = search_capacities(
        *image_samples(4000), tiles=[9, 18], tokens=[6016], window_steps=1, **SETTINGS
    )
    assert [pair.max_tiles for pair in table] == [18, 9]


def test_a_cost_of_the_step_favours_large_packs() -> None:
    samples = image_samples(2000)
    limits: Any = {"tiles": [5, 10, 30], "tokens": [2600, 20_000]}
    table = search_capacities(*samples, **limits, step_cost=1000, **SETTINGS)
    assert (table[0].max_tiles, table[0].max_tokens) == (30, 20_000)
    assert table[0].wasted < table[-1].wasted


def test_waiting_in_random_order_is_the_mean_over_orders() -> None:
    tiles, tokens = image_samples(6000)
    (pair,) = search_capacities(tiles, tokens, tiles=[9], tokens=[4096], window_steps=1, **SETTINGS)
    tries = [
        search_capacities(
            tiles, tokens, tiles=[9], tokens=[4096], window_steps=1, seed=seed, **SETTINGS
        )[0].wasted
        for seed in range(5)
    ]
    assert np.mean(tries) == pytest.approx(pair.idle_unsorted, abs=0.005)


def test_fewer_packs_than_ranks_waste_the_other_ranks() -> None:
    (pair,) = search_capacities([1], [100], tiles=[2], tokens=[200], **SETTINGS)
    assert pair.wasted == 7 / 8


def test_the_table_has_a_line_for_each_pair() -> None:
    table = search_capacities([1, 2], [50, 60], tiles=[2, 3], tokens=[100], **SETTINGS)
    head, titles, *lines = str(table).splitlines()
    assert head == "2 samples, 8 ranks"
    assert len(lines) == len(list(table)) == 2
    assert {len(line) for line in [titles, *lines]} == {len(titles)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiles": [1, 4]}, "tiles has 1, but sample 1 needs 2"),
        ({"tokens": 59}, "tokens has 59, but sample 1 needs 60"),
        ({"tokens": []}, "tokens is empty"),
        ({"tiles": 0}, "tiles=0 must be at least"),
        ({"step_cost": -1}, "step_cost is -1"),
        ({"num_ranks": 0}, "num_ranks=0 must be at least"),
        ({"vit_num": [], "token_num": []}, "no samples to pack"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], message: str) -> None:
    settings: Any = {
        "vit_num": [1, 2], "token_num": [50, 60], "tiles": [3], "tokens": [100], **SETTINGS
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        search_capacities(**{**settings, **change})
