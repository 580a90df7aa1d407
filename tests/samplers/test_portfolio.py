from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite.batching.fit import first_fit_decreasing
from energon_lite.extras.samplers.best import lower_bound, pack_best

DATA = Path(__file__).parents[2].parent / "shared" / "data"
OMNIBAL = DATA / "omnibal_lengths"
GPT2 = DATA / "gpt2_token_lengths.json"

needs_omnibal = pytest.mark.skipif(
    not OMNIBAL.is_dir(), reason="the folder shared/data/omnibal_lengths is not here"
)


@pytest.fixture(scope="module")
def omnibal() -> Any:
    """(tokens, tiles) of 70,706 samples with images."""
    rows = [
        (sample["token_num"], sample["vit_num"])
        for path in sorted(OMNIBAL.glob("*_token_lengths.json"))
        for sample in json.loads(path.read_bytes())
    ]
    assert len(rows) == 70_706
    return np.array(rows)


def check(lengths: Any, capacity: Any, share: float, **limits: Any) -> None:
    """Packs have at most 1 / `share` of the bound, and hold what they should."""
    packs = pack_best(lengths, capacity, **limits)
    assert sorted(packs.indices.tolist()) == list(range(len(lengths)))
    assert (packs.sizes(lengths) <= capacity).all()
    assert lower_bound(lengths, capacity, **limits) / len(packs) >= share


@needs_omnibal
@pytest.mark.parametrize("capacity", [4096, 8192, 32_768])
def test_image_lengths_are_packed_to_the_bound(omnibal: Any, capacity: int) -> None:
    # First-fit decreasing reaches 96.96 % at 4,096.
    check(omnibal[:, 0], capacity, 0.99994)


@needs_omnibal
def test_where_two_samples_fill_a_pack_the_bound_knows(omnibal: Any) -> None:
    lengths = omnibal[omnibal[:, 0] <= 2048, 0]
    check(lengths, 2048, 1.0)


@needs_omnibal
@pytest.mark.parametrize(
    ("tokens", "tiles", "share"),
    [(6016, 18, 0.9995), (4096, 9, 1.0), (4096, 15, 0.999), (8192, 30, 0.999)],
)
def test_tokens_and_tiles_are_packed_to_the_bound(
    omnibal: Any, tokens: int, tiles: int, share: float
) -> None:
    check(omnibal, (tokens, tiles), share)


@pytest.mark.skipif(not GPT2.is_file(), reason="the folder shared/data is not here")
@pytest.mark.parametrize("capacity", [1024, 2048, 8192])
def test_token_counts_of_texts_are_packed_to_the_bound(capacity: int) -> None:
    by_file = json.loads(GPT2.read_bytes())
    by_file.pop("_comment")
    lengths = np.array([n for values in by_file.values() for n in values])
    assert len(lengths) > 15_000
    check(lengths[lengths <= capacity], capacity, 1.0)


def question_lengths(num: int, capacity: int) -> np.ndarray:
    """Questions with a passage: two or three fill a pack, as with SQuAD."""
    drawn = np.random.Generator(np.random.Philox(1)).gamma(6, 28, num)
    return np.clip(np.rint(drawn), 30, capacity).astype(np.int64)


@pytest.mark.parametrize(("capacity", "share"), [(384, 0.995), (512, 0.999)])
def test_few_samples_in_a_pack(capacity: int, share: float) -> None:
    check(question_lengths(88_641, capacity), capacity, share)


def test_few_lengths_and_few_samples_in_a_pack() -> None:
    # The streaming packer reaches 99.2 %.
    check(question_lengths(20_000, 512), 512, 0.996, max_samples=3)


@pytest.mark.parametrize(("capacity", "limit", "share"), [(8192, 16, 0.995), (8192, 32, 0.999)])
def test_tight_limit_on_samples_in_a_pack(capacity: int, limit: int, share: float) -> None:
    # First-fit decreasing reaches 81 % and 95 %: its last packs are 16 short samples each.
    drawn = np.random.Generator(np.random.Philox(2)).lognormal(np.log(400), 1.0, 50_000)
    lengths = np.clip(np.rint(drawn), 1, capacity).astype(np.int64)
    check(lengths, capacity, share, max_samples=limit)


def test_tolerance_takes_the_first_packs_that_are_good_enough() -> None:
    lengths = question_lengths(5000, 512)
    fitted = first_fit_decreasing(lengths, 512)
    assert pack_best(lengths, 512, tolerance=0.05) == fitted
    assert len(pack_best(lengths, 512)) < len(fitted)


@pytest.mark.parametrize(
    "arguments", [{"max_steps": 0}, {"tolerance": -0.1}, {"tolerance": float("nan")}]
)
def test_impossible_settings_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be at least 1 and 0"):
        pack_best([1], 8, **arguments)
