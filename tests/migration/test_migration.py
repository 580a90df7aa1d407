"""A blend that is edited in mid-run: unchanged sources go on where they were, all else is said."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    SampleDecoder,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    sample_rng,
    stateless,
)
from energon_lite.balance import CostModel
from energon_lite.core.errors import StateError
from energon_lite.core.keys import leaves
from energon_lite.core.state import as_key
from energon_lite.core.topology import Stream
from energon_lite.sources.source import WebdatasetSource

from ..helpers import (
    Ranks,
    assert_same,
    blend_maker,
    caption_set,
    metadataset,
    number_of,
    opened,
    signed,
    text_set,
    through_json,
)

SIZES = {"a": 12, "b": 7, "c": 5, "d": 9}
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=4)

Edits = dict[tuple[str, int], list[tuple[int, int]]]


class Measuring(DefaultTaskEncoder):
    def sample_length(self, sample: TextSample) -> int:
        return 10 + 7 * (number_of(sample) % 5)


class Expanding(DefaultTaskEncoder):
    """Three samples of each, so that batches of two end inside of one."""

    @stateless
    def encode_sample(self, sample: TextSample) -> Iterator[TextSample]:
        for i in range(3):
            yield TextSample.derive_from(sample, text=f"{i} {sample_rng().random():.6f}")


class Grouping(DefaultTaskEncoder):
    """Batches of one remainder mod 3, so that samples are held back most of the time."""

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"{sample.text} {sample_rng().random():.6f}")

    @stateless
    def batch_group_criterion(self, sample: TextSample) -> tuple[int, None]:
        return number_of(sample) % 3, None


class Packed(DefaultTaskEncoder):
    """Packs of 40 letters."""

    packing = Packing(40, buffer_size=10)

    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> TextSample:
        return TextSample.derive_from(samples[0], text="".join(s.text for s in samples))


class PackedInWindows(Packed):
    packing = Packing(40, buffer_size=10, algorithm="first_fit_decreasing")


class Balanced(Packed):
    packing = Packing(
        40, buffer_size=4, balance="quantile_sync", balance_window=3, cost=CostModel(1, 0.1)
    )


class Chosen(DefaultTaskEncoder):
    def select_samples_to_pack(self, samples: list[TextSample]) -> list[list[TextSample]]:
        return [samples[i : i + 2] for i in range(0, len(samples), 2)]

    pack_selected_samples = Packed.pack_selected_samples


class Skipping(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        if number_of(sample) % 4 == 1:
            raise SkipSample
        return sample


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("migration")
    for name, size in SIZES.items():
        text_set(root / name, size)
    return root


def blend_of(root: Path, split: str, encoder: Any = DefaultTaskEncoder, **settings: Any) -> Any:
    """A maker of the dataset of `split`, which is written to a file as the training split."""
    settings = {"shuffle_buffer_size": 4, "max_samples_per_sequence": 3, **settings}
    return blend_maker(root, split, encoder, **settings)


def migrated(make: Any, states: Any, world_size: int = 1, num_workers: int = 0):
    """A run that goes on from `states`, and the report of what was edited."""
    run = Ranks(make, world_size, num_workers)
    reports = [
        loader.restore_state_global(through_json(states), migrate=True) for loader in run.loaders
    ]
    assert all(report == reports[0] for report in reports)
    run.iterators = [iter(loader) for loader in run.loaders]
    return run, reports[0]


def drawn(batches: Any, num_streams: int = 4) -> Edits:
    """The samples, as (epoch, index), of each source in each stream, in the order of draws."""
    found: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}
    for batch in batches:
        for name, epoch, index, number in leaves(batch.__restore_key__):
            draw, stream = divmod(number, num_streams)
            of_stream = found.setdefault((name, stream), {})
            assert of_stream.setdefault(draw, (epoch, index)) == (epoch, index)
    return {place: [of[draw] for draw in sorted(of)] for place, of in found.items()}


def unbroken(dataset: Any, place: tuple[str, int], count: int, num_streams: int = 4) -> Any:
    """The first samples of a source in a stream, as the source alone gives them."""
    if isinstance(dataset, WebdatasetSource):
        if dataset.name != place[0]:
            return None
        order = dataset.order.stream(Stream(place[1], num_streams))
        columns = order.block(0, count)
        return list(zip(*(column.tolist() for column in columns), strict=True))
    found = (unbroken(child, place, count, num_streams) for child in dataset.children)
    return next((rows for rows in found if rows is not None), None)


def assert_goes_on(make, *parts, sources, min_draws=20, wanted=lambda index: True):
    """Fails unless the parts of a run have all samples of each source in their order."""
    found = drawn(batch for part in parts for batch in part.values())
    dataset = make(ONE)
    counted = dict.fromkeys(sources, 0)
    for place, samples in found.items():
        if place[0] not in counted:
            continue
        counted[place[0]] += len(samples)
        expected = unbroken(dataset, place, 4 * len(samples) + 8)
        expected = [row for row in expected if wanted(row[1])][: len(samples)]
        assert samples == expected, place
    assert min(counted.values()) >= min_draws, counted


BEFORE = """
    blend:
    - {weight: 2, path: a}
    - {weight: 1, path: b}
    - {weight: 1, path: c}
"""


def said(report: str) -> list[str]:
    """The lines of a report: `-c` and `+c` of sources that went and came, else as they are."""
    ways = {"-": "removed; if it comes back, it starts at its beginning",
            "+": "added; it starts at its beginning"}  # fmt: skip
    rows = [row.strip() for row in report.split(" | ") if row]
    signs = [(f"source {row[1]}/train{row[2:]}: ", ways.get(row[0])) for row in rows]
    names = [re.sub(r"^([a-d]) ", r"source \1/train: ", row) for row in rows]
    return [head + way if way else row for (head, way), row in zip(signs, names, strict=True)]


NESTED = "blend: [{path: a}, {blend_mode: random, blend: [{path: b}, {path: c}]}]"
FLAT = "blend: [{path: a}, {weight: 2, blend: [{path: b}, {path: c}]}]"
SCHEDULED = "blend: [{weight: {schedule: linear, points: {0: 1, 100: 3}}, path: a}, {path: b}]"
A_AND_B = "blend: [{path: a}, {path: b}]"
ORDER = "sources stand in another order: "
# name -> (split before, split after, sources that go on, sources that start, report)
CASES: dict[str, tuple[str, str, str, str, str]] = {
    "removed": (BEFORE, "blend: [{weight: 2, path: a}, {weight: 1, path: b}]", "ab", "", "-c"),
    "added": (BEFORE, BEFORE + "    - {weight: 2, path: d}", "abc", "d", "+d"),
    "all at once": (
        BEFORE, "blend: [{weight: 1, path: a}, {weight: 1, path: b}, {weight: 1, path: d}]",
        "ab", "d", "a weight 2.0 is now 1.0 | -c | +d"),
    "in another order": (
        BEFORE, "blend: [{path: c}, {path: b}, {weight: 2, path: a}]", "abc", "",
        ORDER + "a/train, b/train, c/train is now c/train, b/train, a/train"),
    "another schedule": (
        SCHEDULED, SCHEDULED.replace("linear", "step").replace("100", "60"), "ab", "",
        "a weight {'kind': 'linear', 'points': [[0.0, 1.0], [100.0, 3.0]]} is "
        "now {'kind': 'step', 'points': [[0.0, 1.0], [60.0, 3.0]]}"),
    "loss weight": (BEFORE, BEFORE.replace("path: b", "path: b, loss_weight: 0.5"), "abc", "",
                    "b loss_weight 1.0 is now 0.5"),
    "nested and flattened": (
        FLAT, FLAT.replace("2", "3").replace("path: c", "path: d"), "ab", "d",
        "b weight [[1, 2.0], 1.0] is now [[1, 3.0], 1.0] | -c | +d"),
    "out of a flattened one": (
        FLAT, BEFORE, "abc", "", "a weight 1.0 is now 2.0 | b weight [[1, 2.0], 1.0] is now 1.0 | "
        "c weight [[1, 2.0], 1.0] is now 1.0"),
    "nested by itself": (
        "blend: [{path: a}, {weight: 2, blend_mode: random, blend: [{path: b}, {path: c}]}]",
        "blend: [{path: a}, {blend_mode: random, blend: [{path: b}, {path: d, weight: 2}]}]",
        "ab", "d", "source b/train+d/train: weight 2.0 is now 1.0 | -c | +d"),
    "out of a nested one": (
        NESTED,
        "blend: [{path: a}, {path: c}, {blend_mode: random, blend: [{path: b}, {path: d}]}]",
        "abc", "d", "c moved to another blend; it resumes there | +d"),
    "into a nested one": (A_AND_B, NESTED.replace("path: c", "path: d"), "ab", "d", "+d"),
    "from one source": ("path: a", A_AND_B, "a", "b", "+b"),
    "to none of them": (BEFORE, "path: d", "", "d", "-a | -b | -c | +d"),
    "one leaf twice": (
        "blend: [{path: a}, {path: a}, {path: b}]", "blend: [{path: a}, {path: b, weight: 2}]",
        "ab", "", "-a#2 | b weight 1.0 is now 2.0"),
    "by tokens": (
        "unit: tokens\nblend: [{path: a}, {path: b}, {path: c}]",
        "unit: tokens\nblend: [{path: b, weight: 3}, {path: a}, {path: d}]", "ab", "d",
        f"b weight 1.0 is now 3.0 | -c | +d | {ORDER}a/train, b/train is now b/train, a/train"),
    "one source to a blend by tokens": ("path: a", f"unit: tokens\n{A_AND_B}", "a", "b", "+b"),
}  # fmt: skip


def ids(letters: str) -> list[str]:
    return [f"{letter}/train" for letter in letters]


@pytest.mark.parametrize("case", CASES)
def test_sources_that_stay_resume_and_new_ones_start(sets, case) -> None:
    before, after, stay, start, report = CASES[case]
    old = blend_of(sets, before, Measuring)
    new = blend_of(sets, after, Measuring)
    run = Ranks(old, 2, num_streams=4)
    first = run.slots(26)
    states = run.save()
    later, edits = migrated(new, states, 2)
    assert sorted(edits) == sorted(said(report))
    second = later.slots(40)
    if stay:
        assert_goes_on(new, first, second, sources=ids(stay))
    if start:
        assert_goes_on(new, second, sources=ids(start), min_draws=10)
    assert set(drawn(second.values())) <= {
        (facts.name, stream) for facts in new(ONE).sources() for stream in range(4)
    }
    # The state that is saved then is one of the new pipeline: it needs no migration.
    again = Ranks(new, 1, states=later.save())
    assert_same(again.slots(8), Ranks(new, 2, states=later.save()).slots(8))


@pytest.mark.parametrize("case", ["all at once", "in another order", "into a nested one"])
def test_edited_blend_is_refused_without_migrate_and_changes_nothing(sets, case) -> None:
    before, after, _, _, report = CASES[case]
    run = Ranks(blend_of(sets, before, Measuring), 1, num_streams=4)
    run.steps(5)
    states = run.save()
    loader = get_savable_loader(blend_of(sets, after, Measuring)(ONE))
    expected = list(islice(get_savable_loader(blend_of(sets, after, Measuring)(ONE)), 6))
    iterator = iter(loader)
    assert_same(list(islice(iterator, 2)), expected[:2])
    saved = through_json(loader.save_state_rank())
    for restore in (loader.restore_state_global, loader.load_state_dict):
        with pytest.raises(StateError, match="migrate=True") as caught:
            restore(states)
        assert all(line in str(caught.value).splitlines() for line in said(report))
    with pytest.raises(StateError, match="migrate=True"):
        loader.restore_state_rank(states[0])
    assert through_json(loader.save_state_rank()) == saved
    assert_same(list(islice(iterator, 4)), expected[2:])


# ------------------------------------------------------------------ topologies, and what holds back


ALL_AT_ONCE = CASES["all at once"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 0), (3, 0)),
        ((1, 0), (4, 0)),
        pytest.param((4, 2), (2, 3), marks=pytest.mark.processes),
    ],
)
def test_edited_blend_resumes_on_another_topology(sets, before, after) -> None:
    old, new = blend_of(sets, ALL_AT_ONCE[0]), blend_of(sets, ALL_AT_ONCE[1])
    streams = 8 if before[1] else 4
    run = Ranks(old, before[0], before[1], num_streams=streams)
    first = run.slots(24)
    assert len(first) == 24
    later, _ = migrated(new, run.save(), *after)
    second = later.slots(36)
    expected, _ = migrated(new, run.save(), 1)
    assert_same(second, expected.slots(36))
    found = drawn([*first.values(), *second.values()], streams)
    dataset = new(ONE)
    checked = 0
    for place, samples in found.items():
        if place[0] in ids("ab"):
            assert samples == unbroken(dataset, place, 4 * len(samples), streams)[: len(samples)]
            checked += len(samples)
    assert checked >= 60


def test_edited_blend_may_be_edited_again(sets) -> None:
    splits = [
        BEFORE,
        "blend: [{path: b}, {path: a}]",
        "blend: [{path: b}, {path: d}, {path: a, weight: 3}]",
        "blend: [{path: c}, {path: d}, {path: a, weight: 3}]",
    ]
    run = Ranks(blend_of(sets, splits[0]), 2, num_streams=4)
    parts = [run.slots(14)]
    for number, split in enumerate(splits[1:]):
        run, edits = migrated(blend_of(sets, split), run.save(), 1 + number)
        assert edits
        parts.append(run.slots(12))
    assert_goes_on(blend_of(sets, splits[-1]), *parts, sources=ids("a"), min_draws=40)
    assert_goes_on(blend_of(sets, splits[-1]), *parts[2:], sources=ids("d"), min_draws=8)
    # c was away for a while, and starts again.
    assert_goes_on(blend_of(sets, splits[-1]), *parts[3:], sources=ids("c"), min_draws=2)


def test_edits_of_a_running_loader_take_effect_with_the_next_iter(sets) -> None:
    make, new = blend_of(sets, ALL_AT_ONCE[0]), blend_of(sets, ALL_AT_ONCE[1])
    run = Ranks(make, 1, num_streams=4)
    first = run.slots(9)
    loader = get_savable_loader(new(ONE))
    assert len(list(islice(loader, 5))) == 5
    loader.load_state_dict(through_json(run.save()[0]), migrate=True)
    second = dict(enumerate(islice(loader, 20)))
    assert_goes_on(new, first, second, sources=ids("ab"), min_draws=15)


def below(snapshot: Any) -> list[Any]:
    """The snapshots below one, by name or not."""
    inner = snapshot.get("inner", [])
    return list(inner.values()) if isinstance(inner, dict) else inner


def buffered_keys(snapshot: Any) -> list[Any]:
    """The keys of the samples that any stage of a snapshot buffers."""
    own = [key for entry in snapshot.get("keys", []) for key in leaves(as_key(entry))]
    return own + [key for inner in below(snapshot) for key in buffered_keys(inner)]


@pytest.mark.parametrize(
    ("encoder", "settings"),
    [
        (Grouping, {"batch_size": 4}),
        (Packed, {"batch_size": 2}),
        (PackedInWindows, {"batch_size": 2}),
        (Balanced, {"batch_size": 2}),
        (Chosen, {"batch_size": 2, "packing_buffer_size": 9}),
    ],
)
def test_buffered_samples_resume_but_for_those_of_removed_sources(sets, encoder, settings) -> None:
    old = blend_of(sets, ALL_AT_ONCE[0], encoder, **settings)
    new = blend_of(sets, ALL_AT_ONCE[1], encoder, **settings)
    run = Ranks(old, 1, num_streams=2)
    first = run.slots(13)
    states = run.save()

    def held(states: Any) -> set[tuple[Any, ...]]:
        found = set()
        for stream in states[0]["streams"].values():
            found |= set(buffered_keys(stream))
        return found

    before = held(states)
    gone = {key for key in before if key[0] == "c/train"}
    assert gone
    assert before - gone
    later, _ = migrated(new, states)
    second = later.slots(30)
    given = {leaf for batch in second.values() for leaf in leaves(batch.__restore_key__)}
    after = held(later.save())
    assert before - gone <= given | after
    assert not gone & (given | after)
    if encoder is Grouping:
        assert all(len({int(k) % 3 for k in batch.__key__}) == 1 for batch in second.values())
    # All that was drawn was given or is held.
    keys = {leaf for part in (first, second) for b in part.values() for leaf in leaves(
        b.__restore_key__)} | after | gone  # fmt: skip
    for place in ((name, stream) for name in ids("ab") for stream in range(2)):
        rows = sorted((k for k in keys if (k[0], k[3] % 2) == place), key=lambda k: k[3])
        assert len(rows) > 15
        expected = unbroken(new(ONE), place, len(rows), 2)
        assert [(key[1], key[2]) for key in rows] == expected


def test_skips_and_failures_before_an_edit_stay_where_they_were(sets) -> None:
    old = blend_of(sets, ALL_AT_ONCE[0], Skipping)
    new = blend_of(sets, ALL_AT_ONCE[1], Skipping)
    run = Ranks(old, 2, num_streams=4)
    first = run.slots(20)
    later, _ = migrated(new, run.save(), 2)
    assert_goes_on(
        new, first, later.slots(30), sources=ids("ab"), wanted=lambda index: index % 4 != 1
    )


class Unmarked(Expanding):
    """The same, by a hook that is not marked."""

    def encode_sample(self, sample: TextSample) -> Any:
        for i in range(3):
            yield TextSample.derive_from(sample, text=f"{i}")


class UnmarkedBelow(Expanding):
    """The input of the generator cannot be made again."""

    def preencode_sample(self, sample: TextSample) -> TextSample:
        return sample

    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        raise NotImplementedError

    def postencode_sample(self, sample: TextSample) -> Any:
        for i in range(3):
            yield TextSample.derive_from(sample, text=f"{i}")

    def overrides(self, hook: str) -> bool:
        return hook != "encode_sample" and super().overrides(hook)


def items_of(batches: Any, place: tuple[str, int]) -> list[tuple[int, int, int]]:
    """Epoch, index and number of the item, of all items of a source in a stream."""
    keys = [key for batch in batches for key in batch.__restore_key__[2:]]
    return [
        (epoch, index, item)
        for _, item, (name, epoch, index, number) in keys
        if (name, number % 2) == place
    ]


@pytest.mark.parametrize(
    ("steps", "encoder"), [(4, Expanding), (5, Expanding), (6, Expanding), (4, Unmarked)]
)
def test_sample_that_was_being_expanded_resumes_with_its_next_item(sets, steps, encoder) -> None:
    old = blend_of(sets, ALL_AT_ONCE[0], encoder)
    new = blend_of(sets, ALL_AT_ONCE[1], encoder)
    run = Ranks(old, 1, num_streams=2)
    first = run.slots(steps)
    states = run.save()
    inside = [
        s["inner"][0] for s in opened(states[0])["streams"].values() if s["inner"][0]["done"] % 3
    ]
    later, edits = migrated(new, states)
    assert not any("stood inside a sample" in edit for edit in edits)
    second = later.slots(80)
    for place in ((name, stream) for name in ids("ab") for stream in range(2)):
        found = items_of([*first.values(), *second.values()], place)
        wanted = unbroken(new(ONE), place, -(-len(found) // 3), 2)
        assert len(wanted) > 4
        assert found == [(*sample, i) for sample in wanted for i in range(3)][: len(found)]
    assert steps % 3 == 0 or inside


def test_sample_that_cannot_be_made_again_is_expanded_from_its_start(sets) -> None:
    old = blend_of(sets, ALL_AT_ONCE[0], UnmarkedBelow)
    new = blend_of(sets, ALL_AT_ONCE[1], UnmarkedBelow)
    run = Ranks(old, 1, num_streams=2)
    first = run.slots(4)
    later, edits = migrated(new, run.save())
    assert "2 streams of this rank stood inside a sample" in edits[-1]
    second = later.slots(80)
    for place in ((name, stream) for name in ids("ab") for stream in range(2)):
        found = items_of([*first.values(), *second.values()], place)
        samples = [sample[:2] for i, sample in enumerate(found) if sample[:2] != found[i - 1][:2]]
        assert len(samples) > 4
        assert samples == unbroken(new(ONE), place, len(samples), 2)


def test_another_loss_weight_alone_changes_no_draw(sets) -> None:
    before, after, *_ = CASES["loss weight"]
    old, new = blend_of(sets, before, Expanding), blend_of(sets, after, Expanding)
    run = Ranks(old, 1, num_streams=2)
    run.steps(7)
    states = run.save()
    later, edits = migrated(new, states)
    assert edits == said(CASES["loss weight"][-1])
    expected = run.slots(10)
    found = later.slots(10)
    assert [b.text for b in found.values()] == [b.text for b in expected.values()]
    weights = {w for batch in found.values() for w in batch.loss_weight.tolist()}
    assert weights == {0.5, 1.0}


EPOCHIZED = "blend_epochized: [{path: a}, {path: b, repetitions: 2}, {path: c}]"


@pytest.mark.parametrize(
    ("after", "stay"),
    [
        ("blend_epochized: [{path: a}, {path: b, repetitions: 2}]", "ab"),
        ("blend_epochized: [{path: a}, {path: d}, {path: b, repetitions: 2}]", "ab"),
        ("blend_epochized: [{path: c}, {path: a}]", "ac"),
    ],
)
@pytest.mark.parametrize("steps", [4, 13])
def test_edited_epochized_blend_yields_each_round_of_what_stays(sets, after, stay, steps) -> None:
    settings: dict[str, Any] = {"batch_size": 2}
    run = Ranks(blend_of(sets, EPOCHIZED, **settings), 1, num_streams=2)
    first = run.slots(steps * 2)
    new = blend_of(sets, after, **settings)
    later, edits = migrated(new, run.save())
    assert edits
    second = later.slots(100)
    rounds: dict[tuple[str, int], list[int]] = {}
    for batch in [*first.values(), *second.values()]:
        for name, epoch, index, _ in leaves(batch.__restore_key__):
            if name[0] in stay:
                rounds.setdefault((name, epoch), []).append(index)
    last = {n: max(epoch for name, epoch in rounds if name == n) for n in ids(stay)}
    whole = [(name, epoch) for name, epoch in rounds if epoch < last[name] - 3]
    assert {name for name, _ in whole} == set(ids(stay))
    for name, epoch in whole:  # b has two epochs in a round
        assert sorted(rounds[name, epoch]) == list(range(SIZES[name[0]])), (name, epoch)


def refusal(make: Any, states: Any) -> str:
    """The message of a refusal in spite of `migrate`, after seeing that nothing was changed."""
    loader = get_savable_loader(make(ONE))
    iterator = iter(loader)
    next(iterator)
    before = through_json(loader.save_state_rank())
    with pytest.raises(StateError) as caught:
        loader.restore_state_global(states, migrate=True)
    assert through_json(loader.save_state_rank()) == before
    next(iterator)
    return str(caught.value)


@pytest.fixture
def states(sets: Path) -> list[dict[str, Any]]:
    run = Ranks(blend_of(sets, BEFORE, Skipping), 1, num_streams=4)
    run.steps(9)
    return run.save()


BUFFER = "shuffle_buffer_size=4 where this pipeline has 9 (source {}/train)"


@pytest.mark.parametrize(
    ("change", "settings", "messages"),
    [
        (
            BEFORE, {"shuffle_buffer_size": 9, "batch_drop_last": True},
            [*map(BUFFER.format, "abc"), "batch_drop_last=False where this pipeline has True"],
        ),
        (
            CASES["all at once"][1], {"shuffle_buffer_size": 9, "batch_size": 3},
            ["batch_size=2 is now 3", *map(BUFFER.format, "ab"),
             *said(CASES["all at once"][-1])],
        ),
        (
            BEFORE.replace("path: b", "{path: b, subflavors: {x: 1}").replace(
                "- {weight: 1, {path: b", "- {weight: 1, path: b").replace("{x: 1}}", "{x: 1}}"),
            {}, ["(source b/train)"],
        ),
        ("unit: tokens\nblend: [{path: a}, {path: b}]", {}, ["unit", "lengths"]),
        ("blend_mode: random\nblend: [{path: a}, {path: b}]", {}, ["blend_mode='exact'"]),
        (EPOCHIZED, {}, ["Checkpoint has blend where this pipeline has repeat of blend"]),
        (
            "concat: [{path: a}, {path: b}]", {},
            ["Checkpoint has blend where this pipeline has repeat of concat"],
        ),
    ],
)  # fmt: skip
def test_all_other_differences_are_refused_and_listed(sets, states, change, settings, messages):
    if "unit" in change:
        settings = {**settings, "encoder": type("Both", (Skipping, Measuring), {})}
    text = refusal(blend_of(sets, change, **{"encoder": Skipping, **settings}), states)
    for message in messages:
        assert any(message in line for line in text.splitlines()), text
    assert "Build the pipeline with the settings that it was saved with." in text


@pytest.mark.parametrize(
    ("encoder", "case"),
    [
        (DefaultTaskEncoder, "all at once"),
        (Expanding, "from one source"),
        (Grouping, "nested and flattened"),
    ],
)
def test_another_stage_of_the_task_encoder_is_refused(sets, states, encoder, case) -> None:
    after = CASES[case][1]
    text = refusal(blend_of(sets, after, encoder), states)
    assert any(
        word in text
        for word in ("batch of encode_sample", "of blend where", "expands", "group_batch")
    ), text


def test_edited_data_are_refused(tmp_path) -> None:
    for name in ("a", "b"):
        text_set(tmp_path / name, 6)
    make = blend_of(tmp_path, "blend: [{path: a}, {path: b}]")
    run = Ranks(make, 1, num_streams=4)
    run.steps(3)
    states = run.save()
    shutil.rmtree(tmp_path / "b")
    text_set(tmp_path / "b", 8)
    text = refusal(blend_of(tmp_path, "blend: [{path: a, weight: 2}, {path: b}]"), states)
    lines = text.splitlines()
    assert lines[0].startswith(
        "Checkpoint has samples=6 where this pipeline has 8 (source b/train). If shards were added"
    )
    assert lines[1:] == ["source a/train: weight 1.0 is now 2.0"]


def test_swapped_ids_of_two_folders_are_refused_as_other_data(sets) -> None:
    run = Ranks(blend_of(sets, "blend: [{path: a, name: x}, {path: b, name: y}]"), 1)
    run.steps(3)
    other = blend_of(sets, "blend: [{path: b, name: x}, {path: a, name: y}]")
    assert "samples=12 where this pipeline has 7 (source x)" in refusal(other, run.save())
    moved = blend_of(sets, "blend: [{path: b, name: y}, {path: a, name: x}]")
    _, edits = migrated(moved, run.save())
    assert edits == ["sources stand in another order: x, y is now y, x"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state["config"]["of"]["of"]["of"]["of"][0].pop("name"),
        lambda state: state["config"]["of"]["of"]["of"].pop("of"),
        lambda state: state["config"].update({"of": None}),
        lambda state: state["streams"]["0"]["inner"][0].pop("draw"),
        lambda state: state["streams"]["0"]["inner"][0].update({"ahead": [1]}),
        lambda state: state["streams"]["0"]["inner"][0].update({"order": "0"}),
        lambda state: state["streams"]["0"]["inner"][0].update({"stream": [0]}),
        lambda state: state["streams"]["0"].update({"inner": []}),
    ],
)
def test_corrupt_state_is_refused_while_it_is_migrated(sets, states, damage) -> None:
    states[0] = opened(states[0])
    damage(states[0])
    states[0] = signed(states[0])
    assert refusal(blend_of(sets, ALL_AT_ONCE[1], Skipping), states)


class Keys(DefaultTaskEncoder):
    """Batches of keys, whatever the form of the pictures."""

    def __init__(self, image_decode: str) -> None:
        super().__init__()
        self.decoder = SampleDecoder(image_decode=image_decode)

    def batch(self, samples):
        return [sample.__key__ for sample in samples]

    def encode_batch(self, batch):
        return batch


@pytest.mark.parametrize("is_blend", [False, True])
def test_pictures_in_another_form_are_no_other_data(tmp_path, caplog, is_blend):
    for name, number in (("a", 20), ("b", 10)):
        caption_set(tmp_path / name, number)
    blend = metadataset({"blend": [{"path": str(tmp_path / name)} for name in "ab"]})
    settings = {"worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0), "batch_size": 2}

    def loader(image_decode):
        path = blend if is_blend else tmp_path / "a"
        return get_savable_loader(
            get_train_dataset(path, task_encoder=Keys(image_decode), **settings)
        )

    first = loader("pilrgb")
    list(islice(first, 3))
    state = first.save_state_rank()
    expected = list(islice(first, 12))
    other = loader("torchrgb")
    other.restore_state_rank(state)
    assert list(islice(other, 12)) == expected
    assert "pictures in another form" in caplog.text
    assert "decoder.image_decode='pilrgb' where this pipeline has 'torchrgb'" in caplog.text
    caplog.clear()
    loader("torchrgb").restore_state_rank(other.save_state_rank())
    assert caplog.text == ""
    for kept, now in (("pilrgb", "bytes"), ("bytes", "pilrgb")):
        saved = loader(kept)
        next(iter(saved))
        with pytest.raises(StateError, match=f"image_decode='{kept}' where this pipeline has"):
            loader(now).restore_state_rank(saved.save_state_rank())
