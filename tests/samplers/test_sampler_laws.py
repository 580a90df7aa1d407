"""All batch samplers obey the laws, with any settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler

import energon_lite
from energon_lite.balance import CostModel
from energon_lite.batching.rules import Algorithm

from ..conftest import examples
from .laws import Case, check_padding, indices_of, is_empty, sampler_laws
from .shared import EpochOrder, Squares, distributed, steps_of, text_lengths

# Arguments by name, of any type.
MultipackBatchSampler: Any = energon_lite.MultipackBatchSampler
SplitModalityBatchSampler: Any = energon_lite.SplitModalityBatchSampler
TokenBudgetBatchSampler: Any = energon_lite.TokenBudgetBatchSampler

Lists = list[list[int]]
PLACES = st.lists(st.integers(0, 99), min_size=1, max_size=3)
BUDGET = 40


def packs(batch: Any) -> Lists:
    return list(batch)


def one(batch: Any) -> Lists:
    return [batch]


def samples(batch: Any) -> Lists:
    return [[index] for index in batch]


def of(kind: Any, name: str = "world_size", **settings: Any) -> Callable[[int, int], Any]:
    return lambda rank, world_size: kind(**settings, rank=rank, **{name: world_size})


def case_of(kind: Any, changes: list[tuple[dict[str, Any], str]], **settings: Any) -> Case:
    """A case with settings of which a state is refused, each with its message."""
    return Case(
        of(kind, **settings), 100, packs if kind is MultipackBatchSampler else one, world_size=2,
        makes=[(of(kind, **settings | change), message) for change, message in changes],
    )  # fmt: skip


def multipack_case(draw: Any) -> tuple[Case, dict[str, Any]]:
    """Any settings of packs, of one resource or two."""
    num = draw(st.integers(1, 50))
    capacity, align = draw(st.integers(8, 60)), draw(st.sampled_from([1, 1, 4]))
    overlong = draw(st.sampled_from(["error", "drop", "alone"]))
    most = capacity // align * align if overlong == "error" else 2 * capacity
    lengths = draw(st.lists(st.integers(1, most), min_size=num, max_size=num))
    algorithms = get_args(Algorithm)
    settings: dict[str, Any] = {
        "lengths": [*lengths, 1], "capacity": capacity, "align": align, "overlong": overlong,
        "algorithm": draw(st.sampled_from(algorithms)),
        "max_samples": draw(st.sampled_from([None, 1, 3])), "batch_size": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 3)), "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()), "end": draw(st.sampled_from(["split", "pad", "drop"])),
    }  # fmt: skip
    is_long = np.array(settings["lengths"]) > capacity // align * align
    if draw(st.booleans()):
        most_tiles = 4 if overlong == "error" else 6
        tiles = draw(st.lists(st.integers(0, most_tiles), min_size=num, max_size=num))
        is_long |= np.array([*tiles, 0]) > 4
        settings["lengths"] = {"tiles": [*tiles, 0], "tokens": settings["lengths"]}
        settings["capacity"] = {"tiles": 4, "tokens": capacity}
        settings["align"] = {"tokens": align}
    if draw(st.booleans()):
        cost = CostModel(token=1, token_squared=0.1)
        window = draw(st.integers(1, 4))
        settings |= {"balance": "global_window", "balance_window": window, "cost": cost}
    num_samples = num + 1 - (int(is_long.sum()) if overlong == "drop" else 0)
    case = Case(of(MultipackBatchSampler, **settings), num_samples, packs, draw(st.integers(1, 4)))
    assert is_empty(case) or case.ranks()[0].num_overlong == is_long.sum()
    return case, settings


def rising_sizes(length: int) -> int:
    """A function of the length that falls and rises again, and refuses what is above the budget."""
    return 0 if length > BUDGET else 1 + (length * 7) % 5


def token_settings(draw: Any) -> dict[str, Any]:
    overlong = draw(st.sampled_from(["error", "drop", "alone"]))
    most = BUDGET if overlong == "error" else 2 * BUDGET
    lengths = [*draw(st.lists(st.integers(1, most), max_size=60)), 1]
    limit: dict[str, Any] = draw(
        st.sampled_from(
            [{"max_tokens": BUDGET}, {"batch_size": 3}, {"batch_size_fn": rising_sizes}]
        )
    )
    # A part of a batch has a shorter longest, for which this function may allow less.
    ends = ["split", "pad", "drop"]["batch_size_fn" in limit :]
    keys = st.lists(st.sampled_from(["a", "b", 3]), min_size=len(lengths), max_size=len(lengths))
    return limit | {
        "lengths": lengths, "overlong": overlong, "align": draw(st.sampled_from([1, 1, 8])),
        "window": draw(st.integers(1, 80)), "boundary_key": draw(st.none() | keys),
        "shuffle": draw(st.booleans()), "seed": draw(st.integers(0, 3)),
        "drop_last": draw(st.booleans()), "end": draw(st.sampled_from(ends)),
    }  # fmt: skip


def limit_of(settings: dict[str, Any], length: int) -> int:
    length = -(-length // settings["align"]) * settings["align"]
    if "max_tokens" in settings:
        return BUDGET // length
    return int(settings["batch_size"]) if "batch_size" in settings else rising_sizes(length)


def token_case(settings: dict[str, Any], world_size: int) -> Case:
    num_long = sum(limit_of(settings, length) < 1 for length in settings["lengths"])
    num = len(settings["lengths"]) - (num_long if settings["overlong"] == "drop" else 0)
    return Case(of(TokenBudgetBatchSampler, **settings), num, one, world_size)


def modality_case(draw: Any) -> Case:
    groups = st.sampled_from([True, False, "video", ("a", 1)])
    pairs = draw(st.lists(st.tuples(groups, st.integers(0, 30)), min_size=1, max_size=60))
    world_size, batch_size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_batches = draw(st.integers(1, 2))
    step_size = world_size * batch_size * num_batches
    settings = {
        "modality_lengths": pairs, "global_batch_size": step_size,
        "window": draw(st.integers(1, 8)), "longest_first": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)), "end": draw(st.sampled_from(["pad", "drop"])),
    }  # fmt: skip

    def make(rank: int, num_replicas: int) -> Any:
        size = batch_size if num_replicas == world_size else None
        return of(SplitModalityBatchSampler, "num_replicas", **settings, batch_size=size)(
            rank, num_replicas
        )

    others = [n for n in range(1, 9) if step_size % n == 0]
    return Case(make, len(pairs), samples, world_size, others, step_batches=num_batches)


@examples(8)
@given(st.data(), st.integers(0, 5), PLACES)
def test_packs_obey_the_laws(data: st.DataObject, epoch: int, places: list[int]) -> None:
    case, settings = multipack_case(data.draw)
    if is_empty(case, epoch):
        return
    sampler_laws(case, epoch, places)
    packing = case.make(0, 1).settings
    columns, align = settings["lengths"], settings["align"]
    columns = columns if isinstance(columns, dict) else {"tokens": columns}
    align = align if isinstance(align, dict) else {"tokens": align}
    samplers = case.ranks(epoch=epoch)
    sizes = []
    for pack in [pack for sampler in samplers for batch in sampler for pack in batch]:
        assert 1 <= len(pack) <= (settings["max_samples"] or len(columns["tokens"]))
        for name, capacity in zip(packing.resources, packing.capacities, strict=True):
            step = align.get(name, 1)
            size = sum(-(-columns[name][i] // step) * step for i in pack)
            assert size <= capacity or (len(pack) == 1 and settings["overlong"] == "alone")
        sizes.append(sum(columns["tokens"][i] for i in pack))
    room = sum(max(size, packing.tokens) for size in sizes)
    assert all(s.efficiency() == pytest.approx(sum(sizes) / room) for s in samplers)


@given(st.data(), st.integers(1, 4), st.integers(0, 5), PLACES)
def test_batches_of_a_budget_obey_the_laws(
    data: st.DataObject, world_size: int, epoch: int, places: list[int]
) -> None:
    settings = token_settings(data.draw)
    case = token_case(settings, world_size)
    if is_empty(case, epoch):
        return
    sampler_laws(case, epoch, places)
    check_padding(case.ranks(epoch=epoch), settings["lengths"], settings["align"])
    keys = settings["boundary_key"] or [0] * len(settings["lengths"])
    for batch in [batch for sampler in case.ranks(epoch=epoch) for batch in sampler]:
        assert len({keys[i] for i in batch}) == 1
        limit = limit_of(settings, max(settings["lengths"][i] for i in batch))
        assert len(batch) <= limit or (len(batch) == 1 and settings["overlong"] == "alone")


@given(st.data(), st.integers(0, 5), PLACES)
def test_steps_of_one_group_obey_the_laws(
    data: st.DataObject, epoch: int, places: list[int]
) -> None:
    case = modality_case(data.draw)
    if is_empty(case, epoch):
        return
    sampler_laws(case, epoch, places)
    samplers = case.ranks(epoch=epoch)
    first, steps = samplers[0], steps_of(samplers)
    lengths, groups, size = first.lengths, first.groups, first.settings.global_batch_size
    assert {len(batch) for step in steps for batch in step} == {first.batch_size}
    for start in range(0, len(steps), case.step_batches):
        assert len({groups[i] for i in indices_of(steps[start : start + case.step_batches])}) == 1
    if first.settings.longest_first:
        in_first = lengths[indices_of(steps[: case.step_batches])]
        assert max(in_first) == max(lengths[indices_of(steps)])
    counts = np.bincount(indices_of(steps), minlength=len(lengths))
    for group in set(groups.tolist()):
        times, num = counts[groups == group], int((groups == group).sum())
        assert times.max() - times.min() <= 1, "each is repeated about as often as the others"
        assert times.sum() == num + (-num % size if first.end == "pad" else -(num % size))
    check_padding(samplers, lengths)


LENGTHS = text_lengths(100)
PAIRS = [(n % 3 > 0, int(length)) for n, length in enumerate(LENGTHS)]
SETTINGS: dict[str, Case] = {
    "multipack": case_of(
        MultipackBatchSampler,
        [
            ({"capacity": 5000}, "capacity=4096 where this pipeline has 5000"),
            (
                {"capacity": {"tokens": 4096, "tiles": 9}, "lengths": [[n, 1] for n in LENGTHS]},
                "capacity=4096",
            ),
            ({"seed": 1}, "seed=0 where this pipeline has 1"),
            ({"algorithm": "first_fit"}, "algorithm='best'"),
            ({"max_samples": 5}, "max_samples=None"),
            ({"align": 8}, "align=1 where this pipeline has 8"),
            ({"overlong": "drop"}, "overlong='error'"),
            ({"shuffle": False}, "shuffle=True"),
            ({"balance": "global_window", "cost": CostModel()}, "balance=None where"),
            ({"sampler": EpochOrder(100)}, "has_sampler=False"),
            ({"lengths": LENGTHS[::-1]}, "lengths="),
            ({"lengths": LENGTHS[:99]}, "num_samples=100 where this pipeline has 99"),
        ],
        lengths=LENGTHS, capacity=4096, batch_size=2,
    ),
    "in the order of a sampler": case_of(
        MultipackBatchSampler, [], lengths=LENGTHS, capacity=4096, sampler=EpochOrder(100),
        drop_last=False,
    ),
    "balanced": case_of(
        MultipackBatchSampler,
        [
            ({"balance_window": 5}, "balance"),
            ({"cost": CostModel(token=2)}, "cost='CostModel"),
            ({"balance": None}, "balance"),
        ],
        lengths=LENGTHS, capacity=4096, balance="global_window", cost=CostModel(), balance_window=2,
    ),
    "tokens": case_of(
        TokenBudgetBatchSampler,
        [
            ({"window": 3}, "window=10000 where this pipeline has 3"),
            ({"seed": 1}, "seed=0 where this pipeline has 1"),
            ({"max_tokens": 9000}, "max_tokens=8192 where this pipeline has 9000"),
            ({"align": 8}, "align=1 where this pipeline has 8"),
            ({"max_tokens": None, "batch_size": np.int64(2)}, "batch_size=None where .* has 2"),
            ({"max_tokens": None, "batch_size_fn": lambda length: 2}, "limits="),
            ({"shuffle": False}, "shuffle=True"),
            ({"drop_last": True}, "drop_last=False"),
            ({"overlong": "alone"}, "overlong='error'"),
            ({"boundary_key": range(100)}, "boundary_key=None"),
            ({"lengths": LENGTHS[::-1]}, "lengths="),
            ({"lengths": LENGTHS[:99]}, "num_samples=100 where this pipeline has 99"),
        ],
        lengths=LENGTHS, max_tokens=8192,
    ),
    "modality": case_of(
        SplitModalityBatchSampler,
        [
            ({"window": 3}, "window=64 where this pipeline has 3"),
            ({"seed": 1}, "seed=0 where this pipeline has 1"),
            ({"global_batch_size": 4}, "global_batch_size=8 where this pipeline has 4"),
            ({"end": "drop"}, "end='pad'"),
            ({"longest_first": True}, "longest_first=False"),
            ({"modality_lengths": PAIRS[::-1]}, "lengths="),
            ({"modality_lengths": [(0, length) for _, length in PAIRS]}, "groups="),
            ({"modality_lengths": PAIRS[:99]}, "num_samples=100 where this pipeline has 99"),
        ],
        modality_lengths=PAIRS, global_batch_size=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_each_sampler_obeys_the_laws_at_every_place(name: str) -> None:
    case = SETTINGS[name]
    if name == "modality":
        case = Case(case.make, 100, samples, 2, (1, 2, 4), makes=case.makes)
    sampler_laws(case, 3)


def test_state_of_another_order_is_refused() -> None:
    def made(seed: int) -> Any:
        order = np.random.default_rng(seed).permutation(100).tolist()
        return MultipackBatchSampler(sampler=order, lengths=LENGTHS, batch_max_len=4096)

    state, other = made(1).state_dict(batches_given=2), made(2)
    other.load_state_dict(state)
    with pytest.raises(energon_lite.StateError, match="another order in epoch 0"):
        len(other)


# What all have in common besides.

CLASSES = {
    "multipack": MultipackBatchSampler, "tokens": TokenBudgetBatchSampler,
    "modality": SplitModalityBatchSampler,
}  # fmt: skip
KINDS: dict[str, Callable[..., Any]] = {
    "multipack": lambda lengths, **more: MultipackBatchSampler(lengths, 4096, **more),
    "tokens": lambda lengths, **more: TokenBudgetBatchSampler(lengths, max_tokens=8192, **more),
    "modality": lambda lengths, **more: SplitModalityBatchSampler(
        lengths, 8, groups=[int(n) % 2 for n in lengths], **more
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_and_seeds_have_other_batches(kind: str) -> None:
    lengths = text_lengths(2000) // 100 * 100 + 1  # few have a length that is unique
    first, other = KINDS[kind](lengths), KINDS[kind](lengths, seed=1)
    epochs = [indices_of(first), indices_of(other)]
    first.set_epoch(1)
    epochs.append(indices_of(first))
    assert all(epochs[i] != epochs[j] for i, j in ((0, 1), (0, 2), (1, 2)))
    sets = []
    for epoch in (0, 1):
        first.set_epoch(epoch)
        sets.append({frozenset(indices_of([batch])) for batch in first})
    assert len(sets[0] & sets[1]) < len(sets[0]) / 10, "samples meet others"


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_may_be_a_tensor_or_a_list_or_small_integers(kind: str) -> None:
    expected = list(KINDS[kind](LENGTHS))
    for lengths in (LENGTHS.tolist(), torch.tensor(LENGTHS), LENGTHS.astype(np.uint16)):
        assert list(KINDS[kind](lengths)) == expected


INTEGERS: dict[str, dict[str, Any]] = {
    "multipack": {"batch_size": 2, "max_samples": 3, "align": 2, "capacity": 4096},
    "tokens": {"max_tokens": 8192, "window": 30, "align": 2},
    "modality": {"global_batch_size": 8, "batch_size": 4, "window": 3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("integer", [np.int64, np.int16])
def test_integers_of_numpy_are_integers(kind: str, integer: Any) -> None:
    first = {"modality_lengths": PAIRS} if kind == "modality" else {"lengths": LENGTHS}
    settings = INTEGERS[kind] | {"seed": 5, "rank": 0, "world_size": 2}
    numpy = {name: integer(value) for name, value in settings.items()}
    samplers = [CLASSES[kind](**first, **numbers) for numbers in (settings, numpy)]
    for epoch, sampler in zip((3, integer(3)), samplers, strict=True):
        sampler.set_epoch(epoch)
    assert list(samplers[0]) == list(samplers[1])
    assert len({json.dumps(sampler.state_dict()) for sampler in samplers}) == 1
    for epoch in ("1", 1.0, None, True):
        with pytest.raises(TypeError, match=f"epoch={epoch!r} must be an integer"):
            samplers[0].set_epoch(epoch)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_comes_from_torch_distributed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed(monkeypatch, rank=1, world_size=4)
    sampler = KINDS[kind](LENGTHS)
    assert (sampler.rank, sampler.world_size) == (1, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_global_randomness_has_no_effect(kind: str) -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        found.append(list(KINDS[kind](LENGTHS)))
        assert torch.initial_seed() == seed
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        *((kind, 0) for kind in (*KINDS, "random order")),
        pytest.param("random order", 2, marks=pytest.mark.processes),
    ],
)
def test_loader_has_the_batches_of_each_epoch_and_resumes(kind: str, num_workers: int) -> None:
    lengths = text_lengths(200)
    if kind == "random order":  # torch's would have to be seeded to resume in another process
        order = RandomSampler(range(200))
        sampler = MultipackBatchSampler(lengths=lengths, capacity=4096, sampler=order)
    else:
        sampler = KINDS[kind](lengths)
    squares: Any = Squares(200)
    loader: Any = DataLoader(
        squares, batch_sampler=sampler, num_workers=num_workers, collate_fn=list
    )  # type: ignore[arg-type]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        num_batches, batches = len(loader), list(loader)
        assert len(batches) == num_batches > 5
        assert batches == [[squares[i] for i in batch] for batch in sampler]
    for position, _ in enumerate(loader):
        if position == 2:
            state = sampler.state_dict(batches_given=position + 1)
            break
    sampler.load_state_dict(state)
    if kind != "random order":
        assert list(loader) == batches[3:]


ALL = (*KINDS,)
WRONG: list[tuple[tuple[str, ...], dict[str, Any], type[Exception], str]] = [
    (ALL, {"lengths": []}, ValueError, "lengths is empty"),
    (ALL, {"lengths": [1.5, 2.5]}, TypeError, "must be integers, not float64"),
    (ALL, {"lengths": np.ones((2, 3), int), "groups": [1, 1]}, ValueError, r"shape \(N,\)"),
    (ALL, {"lengths": [1, -1]}, ValueError, "Sample 1 has length -1, below"),
    (ALL, {"seed": "x"}, TypeError, "seed='x' must be an integer"),
    (ALL, {"seed": 1.0}, TypeError, "seed=1.0 must be an integer"),
    (ALL, {"rank": "0"}, TypeError, "rank='0' must be an integer"),
    (ALL, {"rank": 0.0}, TypeError, "rank=0.0 must be an integer"),
    (ALL, {"world_size": 1.0}, TypeError, "world_size=1.0 must be an integer"),
    (("multipack",), {"bin_size": 2.5}, TypeError, "bin_size=2.5 must be an integer"),
    (ALL, {"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
    (ALL, {"end": "cut"}, ValueError, "end='cut' is not one of"),
    (ALL, {"rank": None}, TypeError, "rank=None and .*=1: pass both"),
    (ALL, {"rank": 1}, ValueError, "rank=1"),
    (("multipack", "tokens"), {"lengths": [1, 0]}, ValueError, "Sample 1 has length 0, below 1"),
    (("multipack", "tokens"), {"overlong": "split"}, ValueError, "overlong='split' is not one of"),
    (("multipack",), {"capacity": None}, TypeError, "capacity is missing"),
    (("multipack",), {"batch_max_len": 5}, TypeError, "mean the same"),
    (("multipack",), {"capacity": {"tokens": 5, "tiles": 2}}, ValueError, r"shape \(N, 2\)"),
    (
        ("multipack",), {"capacity": {"tokens": 5, "tiles": 2}, "lengths": {"tokens": [1]}},
        ValueError, "lengths has tokens, but capacity tokens, tiles",
    ),
    (
        ("multipack",), {"capacity": {"tokens": 5, "tiles": 2}, "lengths": [[1, 1], [5, 3]]},
        ValueError, "Sample 1: .*'tiles': 3.*takes .*'tiles': 2",
    ),
    (("multipack",), {"algin": 8}, TypeError, "Did you mean 'align'"),
    (("multipack",), {"sequential": True, "algorithm": "best"}, ValueError, "contradicts"),
    (("multipack",), {"balance": "quantile_sync"}, ValueError, "balance='quantile_sync' is not"),
    (
        ("multipack",), {"lengths": RandomSampler(range(3))}, TypeError,
        "lengths is a RandomSampler. With a sampler, pass the arguments",
    ),
    (("tokens",), {"max_tokens": None}, TypeError, "pass one of max_tokens.*not none"),
    (("tokens",), {"batch_size": 2}, TypeError, "pass one of max_tokens.*not several"),
    (
        ("tokens",), {"max_tokens": None, "batch_size_fn": lambda length: length / 2}, TypeError,
        r"batch_size_fn\(1\).* 0.5",
    ),
    (("tokens",), {"boundary_key": [1]}, ValueError, "boundary_key has 1 entries, but lengths 2"),
    (("tokens",), {"boundary_key": [[], []]}, TypeError, "unhashable"),
    (("modality",), {"groups": None}, TypeError, "must be pairs"),
    (("modality",), {"groups": None, "lengths": [(True, 1, 2)]}, TypeError, "must be pairs"),
    (("modality",), {"groups": None, "lengths": [([], 1)]}, TypeError, "unhashable"),
    (("modality",), {"groups": [1]}, ValueError, "groups has 1 entries"),
    (("modality",), {"dataset": range(3)}, ValueError, "dataset has 3 samples, but .* 2"),
    (("modality",), {"global_batch_size": 0}, ValueError, "global_batch_size=0 must be at least"),
    (("modality",), {"global_batch_size": 2.0}, TypeError, "global_batch_size=2.0 must be an int"),
    (("modality",), {"end": "pad", "drop_last": True}, ValueError, "contradicts"),
    (("modality",), {"num_replicas": 1}, TypeError, "mean the same"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [(kind, *row) for kinds, *row in WRONG for kind in kinds],
)
def test_wrong_arguments_are_refused_at_once(
    kind: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings: dict[str, Any] = {"lengths": [1, 2], "rank": 0, "world_size": 1}
    if kind == "multipack":
        settings |= {"capacity": 5}
    elif kind == "tokens":
        settings |= {} if change == {"batch_size": 0} else {"max_tokens": 5}
    else:
        settings |= {"groups": [0, 0], "global_batch_size": 2}
    settings |= change
    if kind == "modality":
        settings["modality_lengths"] = settings.pop("lengths")
    else:
        settings.pop("groups", None)
    with pytest.raises(error, match=message):
        CLASSES[kind](**settings)
