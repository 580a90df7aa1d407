"""Laws of every stage that makes lists of samples: each collector, streamed and planned."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    DefaultTaskEncoder,
    FatalSampleError,
    SavableDataset,
    StateError,
    WorkerConfig,
    get_savable_loader,
)
from energon_lite.core.state import Snapshot
from energon_lite.core.topology import Stream
from energon_lite.loader.resume import decompressed
from energon_lite.stages import planned_packs
from energon_lite.stages.collect import CollectCursor, CollectDataset
from energon_lite.stages.planned import PlannedDataset
from energon_lite.stages.token_lengths import MeasuredLists, pieces_of

from ..helpers import Ranks, assert_same
from .list_laws import (
    CASES,
    NUM_SAMPLES,
    Case,
    blend_of,
    corrupt_states,
    keys_in,
    length_of,
    state_of,
    stream_run,
    texts,
)

STREAMED = [case for case in CASES if not case.is_planned]
PLANNED = [case for case in CASES if case.is_planned]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("lists") / "texts")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("lists") / "other", 20)


@pytest.fixture(scope="session")
def third(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("lists") / "third", 21)


@pytest.fixture(autouse=True)
def plans_by_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets few streams plan together where a case is about many."""
    if "by parts" in request.node.name:
        monkeypatch.setattr(planned_packs, "_MOST_TOGETHER", 2)


def counts_of(lists: list[Any]) -> Counter[int]:
    return Counter(number for made in lists for number in made["numbers"])


def is_of_one_group(made: Any) -> bool:
    return len({number % 4 == 1 for number in made["numbers"]}) == 1


# ---------------------------------------------------------------------------------- conservation


@pytest.mark.parametrize(
    ("case", "num_streams", "noisy"),
    [
        *((case, 3, True) for case in CASES),
        # What is skipped is left out where nothing is; `make soak` has all.
        *(
            pytest.param(case, 1, False, marks=pytest.mark.soak if i % 4 else ())
            for i, case in enumerate(CASES)
        ),
    ],
    ids=str,
)
def test_each_sample_comes_once_or_is_counted(root, case: Case, num_streams, noisy) -> None:
    lists, loader = case.one_pass(root, case.made(noisy=noisy), num_streams)
    counts = counts_of(lists)
    (stats,) = loader.stats().values()
    assert len(counts) + stats.skipped == NUM_SAMPLES
    assert stats.samples == len(counts)
    if not noisy and case.settings.get("end") != "drop":
        assert stats.skipped == 0
    if noisy:
        assert not any(number % 11 == 4 or number % 17 == 5 for number in counts)
    if case.settings.get("end") != "pad" and case.settings.get("overlong") != "split":
        assert max(counts.values()) == 1
    if case.settings.get("group_by") or case.name == "groups":
        assert all(map(is_of_one_group, lists))
    if "batch_size" in case.arguments:  # short lists come at the end of each stream and group only
        assert sum(len(made["numbers"]) < 3 for made in lists) <= num_streams * 8
    capacity = case.settings.get("capacity", 16)
    for made in lists:
        lengths = [min(length_of(number), capacity) for number in made["numbers"]]
        assert "batch_size" not in case.arguments or len(lengths) <= 3
        if hasattr(case.made(), "packing") and case.made().packing:
            assert sum(lengths) <= max(16, capacity) or case.settings.get("overlong") == "split"
        if case.name == "buckets":
            assert len(lengths) * max(lengths) <= 32


@pytest.mark.parametrize("case", [case for case in CASES if case.in_step], ids=str)
def test_all_streams_have_lists_of_one_group_in_each_cycle(root, case: Case) -> None:
    runs = [stream_run(case.dataset(root), index, 4) for index in range(4)]
    for _ in range(60):
        step = [next(run) for run in runs]
        assert len({number % 4 == 1 for made in step for number in made["numbers"]}) == 1


@pytest.mark.parametrize("algorithm", ["streaming", "best", "first_fit", "sequential"])
def test_planned_packs_of_an_order_are_the_streamed_ones(root, algorithm) -> None:
    packs = [case for case in CASES if case.name in ("packs", "planned packs")]
    found = [
        case.one_pass(root, case.made(algorithm=algorithm, buffer_size=99, **window))[0]
        for case, window in zip(packs, ({}, {"plan_window": 99}), strict=True)
    ]
    streamed, planned = ([sorted(made["numbers"]) for made in lists] for lists in found)
    assert len(streamed) > 20
    assert sorted(streamed) == sorted(planned)


# --------------------------------------------------------------------------------------- resumes


@each_case
@pytest.mark.parametrize("num_streams", [pytest.param(1, marks=pytest.mark.soak), 4])
def test_resumed_run_is_the_unbroken_one_bit_by_bit(root, case: Case, num_streams) -> None:
    def make(config: WorkerConfig) -> SavableDataset[Any]:
        return case.dataset(root, case.made(noisy=True), config)

    expected = Ranks(make, 1, num_streams=num_streams).slots(40)
    found: dict[int, Any] = {}
    run = Ranks(make, 1, num_streams=num_streams)
    for world_size, number in ((1, 0), (2, 1), (1, 5), (4, 9)):
        # Where ranks must be in one cycle, runs stop after whole cycles and on ranks that divide S.
        whole = num_streams if case.in_step else len(run.loaders)
        part = run.slots(number - number % whole)
        assert not part.keys() & found.keys()
        found.update(part)
        run = Ranks(make, 1 if case.in_step and num_streams == 1 else world_size, states=run.save())
    found.update(run.slots(12))
    assert len(found) > 20
    assert_same(found, {slot: expected[slot] for slot in found})


@each_case
def test_finite_pass_resumed_anywhere_yields_the_rest(root, case: Case) -> None:
    dataset = case.dataset(root, case.made(noisy=True), repeat=False)
    run, expected, states = stream_run(dataset, 1, 2), [], []
    for made in run:
        expected.append(made)
        states.append(state_of(run))
    states.append(state_of(run))  # after the end
    for place, state in enumerate(states, start=1):
        again = stream_run(dataset, 1, 2)
        again.restore(Snapshot.from_json(state))
        assert json.dumps(state_of(again)) == json.dumps(state)
        rest = list(again)
        assert len(rest) == max(0, len(expected) - place)
        assert not rest or not assert_same(rest, expected[place:])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "start_method"),
    [
        # Processes know no kind of list; `make soak` has all.
        pytest.param(case, method, marks=() if method == "fork" and not i % 8 else pytest.mark.soak)
        for method in ("fork", "spawn")
        for i, case in enumerate(CASES)
    ],
    ids=str,
)
def test_worker_processes_yield_the_same_lists(root, case: Case, start_method) -> None:
    def make(config: WorkerConfig) -> SavableDataset[Any]:
        return case.dataset(root, case.made(noisy=True), config)

    expected = Ranks(make, 1, num_streams=4).slots(40)
    run = Ranks(make, 1, 2, num_streams=4, start_method=start_method)
    found = run.slots(12)
    again = Ranks(make, 2, 1, states=run.save(), start_method=start_method)
    found.update(again.slots(24))
    assert_same(found, {slot: expected[slot] for slot in found})


@each_case
def test_restoring_reads_nothing_and_then_only_what_leaves(root, case: Case) -> None:
    loader = get_savable_loader(case.dataset(root))
    assert len(list(islice(loader, 5))) == 5
    state = json.loads(json.dumps(loader.save_state_rank()))
    encoder = case.made()
    again = get_savable_loader(case.dataset(root, encoder))
    again.restore_state_rank(state)
    batches = iter(again)
    assert encoder.calls == []
    made = next(batches)
    assert set(encoder.calls) >= set(made["numbers"])
    if not case.is_planned:  # plans read in blocks
        streams = decompressed(state["streams"], "streams")
        assert len(set(keys_in(streams, {"texts/train"}))) >= 3 or not streams
        assert len(encoder.calls) <= 3 * len(made["numbers"]) + 8


@each_case
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_corrupt_state_is_refused_and_changes_nothing(root, case: Case, step: int) -> None:
    dataset = case.dataset(root)
    run = stream_run(dataset)
    first = next(run)
    for _ in range(6):
        next(run)
    state = state_of(run)
    num_refused = 0
    # A quarter of them, other ones for each case; `make soak` has all.
    start = CASES.index(case) % step
    for where, broken in islice(corrupt_states(state["inner"]), start, None, step):
        again = stream_run(dataset)
        try:
            again.restore(Snapshot.from_json({**state, "inner": broken}))
        except StateError:
            num_refused += 1
            assert_same(next(again), first)
            continue
        try:
            made = [next(again) for _ in range(2)]
        except (StateError, FatalSampleError):
            num_refused += 1
            continue
        except StopIteration:
            assert "ended" in where
            continue
        # What stands in no relation to the rest of a state cannot be told from what was saved.
        assert made or where
    assert num_refused >= 3


@each_case
def test_checkpoint_of_other_settings_is_refused(root, case: Case) -> None:
    loader = get_savable_loader(case.dataset(root))
    assert list(islice(loader, 3))
    state = loader.save_state_rank()
    for changed in case.others:
        again = get_savable_loader(case.dataset(root, case.made(**changed)))
        with pytest.raises(StateError, match=r"Checkpoint has .* where this pipeline has"):
            again.restore_state_rank(state)


# -------------------------------------------------------------------------------- edited blends


@pytest.mark.parametrize("case", STREAMED, ids=str)
def test_edited_blend_drops_buffered_samples_of_a_removed_source(
    root, other, third, case: Case
) -> None:
    loader = get_savable_loader(case.dataset(blend_of(root, other)))
    assert len(list(islice(loader, 7))) == 7
    state = json.loads(json.dumps(loader.save_state_rank()))
    streams = decompressed(state["streams"], "streams")
    buffered = set(keys_in(streams, {"texts", "other"}))
    assert {key[0] for key in buffered} == {"texts", "other"}
    again = get_savable_loader(case.dataset(blend_of(root, third)))
    again.restore_state_rank(state, migrate=True)
    found = [key for made in islice(again, 100) for key in keys_in(made["keys"], _NAMES)]
    assert {key[0] for key in found} == {"texts", "third"}
    assert {key for key in buffered if key[0] == "texts"} <= set(found)
    if case.settings.get("overlong") != "split":
        assert len(set(found)) == len(found)


_NAMES = {"texts", "other", "third"}


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_edited_blend_is_refused_where_lists_are_planned(root, other, case: Case) -> None:
    loader = get_savable_loader(case.dataset(blend_of(root, other)))
    next(iter(loader))
    state = json.loads(json.dumps(loader.save_state_rank()))
    again = get_savable_loader(case.dataset(blend_of(root, other, weight=2)))
    with pytest.raises(StateError, match="planned from `lengths`"):
        again.restore_state_rank(state, migrate=True)


@each_case
def test_samples_keep_the_loss_weight_of_their_source(root, other, case: Case) -> None:
    loader = get_savable_loader(case.dataset(blend_of(root, other, loss_weight=0.25)))
    found = set()
    for made in islice(loader, 30):
        names = [key[0] for key in keys_in(made["keys"], _NAMES)]
        assert made["weights"] == [0.25 if name == "other" else 1.0 for name in names]
        found.update(names)
    assert found == {"texts", "other"}


# --------------------------------------------------------------------------------------- lengths


def long(number: int) -> int:
    """Of each five samples one is longer than all limits."""
    return 40 if number % 5 == 3 else length_of(number)


@pytest.fixture(scope="session")
def long_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("lists") / "texts", length=long)


WITH_POLICIES = [case for case in CASES if case.policies]


@pytest.mark.parametrize("case", WITH_POLICIES, ids=str)
def test_overlong_sample_is_an_error_that_names_it_and_the_remedies(long_root, case: Case) -> None:
    with pytest.raises(FatalSampleError) as caught:
        case.one_pass(long_root, case.made(length=long))
    text = str(caught.value)
    assert "sample '" in text
    assert "40" in text
    assert all(f'"{policy}"' in text for policy in case.policies)


@pytest.mark.parametrize(
    ("case", "policy"),
    [(case, policy) for case in WITH_POLICIES for policy in case.policies],
    ids=str,
)
def test_overlong_samples_follow_their_policy_and_are_counted(
    long_root, case: Case, policy
) -> None:
    lists, loader = case.one_pass(long_root, case.made(length=long, overlong=policy))
    counts = counts_of(lists)
    (stats,) = loader.stats().values()
    num_long = NUM_SAMPLES // 5
    assert stats.skipped == (num_long if policy == "drop" else 0)
    assert stats.overlong == (0 if policy == "drop" else num_long)
    assert len(counts) == stats.samples == NUM_SAMPLES - stats.skipped
    kept = {"drop": 0, "truncate": 16, "split": 40, "alone": 40}[policy]
    short = sum(length_of(number) for number in range(NUM_SAMPLES) if number % 5 != 3)
    assert stats.tokens == short + num_long * kept
    for made in lists:
        if policy == "alone" and any(number % 5 == 3 for number in made["numbers"]):
            assert len(made["numbers"]) == 1
    assert all(
        n == 3 if number % 5 == 3 and policy == "split" else n == 1 for number, n in counts.items()
    )


# Those that measure at all, and where no index stands in the way.
MEASURING = [case for case in STREAMED if case.encoder.__name__ not in ("Grouped", "Selected")]


@pytest.mark.parametrize("case", MEASURING, ids=str)
@pytest.mark.parametrize("length", [0, -3, "4", {"tiles": 3}])
def test_length_that_is_none_is_an_error(root, case: Case, length) -> None:
    class Odd(case.encoder):  # type: ignore[name-defined, misc]
        def sample_length(self, sample: Any) -> Any:
            return length

    if length == 0 and case.in_step:
        return  # padded to the longest of its batch, a sample of no tokens is no error
    with pytest.raises(FatalSampleError, match=r"sample_length|at least 1 token"):
        case.one_pass(root, Odd(**case.settings))


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_length_that_is_not_that_of_the_index_is_an_error(root, case: Case) -> None:
    encoder = case.made(length=lambda number: length_of(number) + (number == 7))
    with pytest.raises(FatalSampleError, match=r"index '\w+' "):
        case.one_pass(root, encoder)


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "case", [case for case in STREAMED if case.settings.get("group_by")], ids=str
)
def test_group_that_no_checkpoint_could_keep_is_refused(root, case: Case) -> None:
    with pytest.raises(FatalSampleError, match=r"group_by returned .* as a group"):
        case.one_pass(root, case.made(group_by=lambda sample: [0.5]))


@each_case
def test_hooks_that_no_list_can_be_made_over_are_refused_when_built(root, case: Case) -> None:
    class Expanding(case.encoder):  # type: ignore[name-defined, misc]
        def encode_sample(self, sample: Any) -> Any:
            yield sample

    class Unrepeatable(case.encoder):  # type: ignore[name-defined, misc]
        def encode_sample(self, sample: Any) -> Any:
            return sample

    class Unmeasured(DefaultTaskEncoder):
        packing = getattr(case.made(), "packing", None)
        batching = getattr(case.made(), "batching", None)

    if case.is_planned:
        with pytest.raises(ValueError, match="generator"):
            case.dataset(root, Expanding(**case.settings))
    else:
        with pytest.raises(ValueError, match=r"[Pp]ut @stateless on"):
            case.dataset(root, Unrepeatable(**case.settings))
    if case in MEASURING or case.is_planned:
        with pytest.raises(ValueError, match="does not say how long a sample is"):
            case.dataset(root, Unmeasured())


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_index_that_is_missing_is_refused(root, case: Case) -> None:
    with pytest.raises(FileNotFoundError, match="no length index 'none'"):
        case.dataset(root, case.made(lengths="none"))


class Streamed(CollectDataset[list[Any]]):
    """The collector of a planned dataset, over the samples themselves."""

    name, what, group_by = "streamed", "Streamed", None
    read: Any = MeasuredLists.read

    def __init__(self, planned: Any) -> None:
        super().__init__(planned.dataset)
        self.planned, self.kind, self.rules = planned, planned.kind, planned.rules
        self.num_lengths = len(planned.rules.resources)

    def collector(self, stream: Stream, cursor: CollectCursor) -> Any:
        return self.planned.collector(stream)

    def units(self, inner: Any) -> Any:
        def units(key: Any, sample: Any) -> Any:
            length = inner.length
            sizes = length if isinstance(length, dict) else {"tokens": length}
            pieces = pieces_of(self.planned.rules, self.kind, key, sample, length)
            # An index tells modalities by the other lengths.
            has_images = any(sizes[name] for name in sizes if name != "tokens")
            group = has_images if self.planned.rules.group_by == "modality" else None
            return [(part, group, own) for part, own in pieces]

        return units


def planned_in(dataset: SavableDataset[Any]) -> Any:
    found = dataset
    while not isinstance(found, PlannedDataset):
        (found,) = found.children
    return found


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_planned_lists_are_those_of_the_same_collector_over_the_samples(case: Case, root) -> None:
    planned = planned_in(case.dataset(root))
    of_plan, of_samples = stream_run(planned), stream_run(Streamed(planned))
    keys = []
    for _ in range(60):
        next(of_plan)
        next(of_samples)
        assert of_plan.key == of_samples.key
        keys.append(of_plan.key)
    assert len({key for found in keys for key in found[2:]}) > NUM_SAMPLES
