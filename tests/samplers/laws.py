"""The laws that every batch sampler obeys."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest

from energon_lite.core.errors import StateError

from .shared import steps_of

Lists = list[list[int]]
# Each makes a state invalid.
CORRUPTIONS: list[dict[str, Any]] = [
    {"format": "x"}, {"version": 1}, {"epoch": -1}, {"epoch": None}, {"epoch": True},
    {"position": "1"}, {"position": -1}, {"position": 10**14}, {"position": 10**16},
    {"num_ranks": 0}, {"num_ranks": 10**9}, {"num_ranks": None}, {"multiple": "2"},
    {"multiple": 0}, {"config": None}, {"order": "x"},
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A sampler under test.

    Attributes:
        make: called with rank and world size.
        num_samples: samples of an epoch, overlong ones that are dropped not counted.
        lists: returns the lists that a batch has, in order.
        world_size: ranks of the run.
        others: numbers of ranks on which an epoch may be resumed.
        step_batches: batches of each rank between which the number of ranks may change.
        makes: as `make`, of other settings of which a state is refused, and the message.
    """

    make: Callable[[int, int], Any]
    num_samples: int
    lists: Callable[[Any], Lists]
    world_size: int = 1
    others: Sequence[int] = (1, 2, 3)
    step_batches: int = 1
    makes: Sequence[tuple[Callable[[int, int], Any], str]] = ()

    def ranks(self, world_size: int = 0, state: Any = None, epoch: int = 0) -> list[Any]:
        """The samplers of all ranks, in an epoch or resumed from a state."""
        world_size = world_size or self.world_size
        samplers = [self.make(rank, world_size) for rank in range(world_size)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
            if state is not None:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        return samplers

    def in_order(self, steps: list[list[Any]]) -> Lists:
        """The lists of all ranks' steps in the order of the plan."""
        return [
            each
            for step in steps
            for row in zip(*map(self.lists, step), strict=True)
            for each in row
        ]


def indices_of(steps: Any) -> list[int]:
    found = list(steps)
    while found and isinstance(found[0], list):
        found = [item for row in found for item in row]
    return found


def is_empty(case: Case, epoch: int = 0) -> bool:
    """Whether the epoch has no batch, which is an error with the remedies."""
    return has_no_batch(case.ranks(epoch=epoch)[0])


def has_no_batch(sampler: Any) -> bool:
    try:
        return not len(sampler)
    except ValueError as error:
        message = str(error)
    assert "yields no batch" in message
    assert "Use drop_last=False and end='pad'" in message
    return True


def sampler_laws(case: Case, epoch: int = 0, places: Iterable[int] | None = None) -> None:
    """Checks all laws, at some places of an epoch; or at all, and what is refused."""
    whole = check_epoch(case, epoch)
    if places is None:
        check_refusals(case)
    places = range(len(whole) + 1) if places is None else {n % (len(whole) + 1) for n in places}
    for place in places:
        check_resume(case, epoch, whole, place)
        if place % case.step_batches == 0:
            for other in case.others:
                check_other_ranks(case, epoch, whole, place, other)
    check_iterations(case, epoch)


def check_epoch(case: Case, epoch: int) -> list[list[Any]]:
    """Each rank has as many batches; each sample comes once, or is counted."""
    samplers = case.ranks(epoch=epoch)
    steps = steps_of(samplers)
    assert all(len({len(case.lists(batch)) for batch in step}) == 1 for step in steps)
    counts = Counter(indices_of(steps))
    repeated, dropped = samplers[0].num_repeated, samplers[0].num_dropped
    assert {(s.num_repeated, s.num_dropped) for s in samplers} == {(repeated, dropped)}
    assert len(counts) == case.num_samples - dropped
    assert counts.total() == len(counts) + repeated
    for sampler in samplers:
        sampler.set_epoch(epoch + 1)
        is_empty(case, epoch + 1) or len(sampler)
        sampler.set_epoch(epoch)
    assert steps_of(samplers) == steps, "an epoch is the same again"
    return steps


def check_resume(case: Case, epoch: int, whole: list[list[Any]], place: int) -> None:
    """A state is the same on all ranks, and resumes with exactly the rest, then the next epoch."""
    states = []
    for rank, sampler in enumerate(case.ranks(epoch=epoch)):
        assert list(islice(sampler, place)) == [step[rank] for step in whole[:place]]
        states.append(sampler.state_dict())
        assert sampler.state_dict(batches_given=place) == states[-1]
    assert all(state == states[0] for state in states)
    assert json.loads(json.dumps(states[0])) == states[0]
    assert len(json.dumps(states[0])) < 2000
    resumed = case.ranks(state=states[0])
    assert resumed[0].epoch == epoch
    for sampler in resumed:
        sampler.set_epoch(epoch)
    assert resumed[0].state_dict() == states[0]
    assert steps_of(resumed) == whole[place:]
    assert steps_of(resumed) == whole, "what was left is done; the epoch is whole again"
    if is_empty(case, epoch + 1):
        return
    resumed, fresh = case.ranks(state=states[0]), case.ranks(epoch=epoch + 1)
    for sampler in resumed:
        sampler.set_epoch(epoch + 1)
    assert resumed[0].state_dict() == fresh[0].state_dict()


def check_other_ranks(
    case: Case, epoch: int, whole: list[list[Any]], place: int, other: int
) -> None:
    """The rest of an epoch comes in order on another number of ranks; all is counted."""
    first = case.ranks(epoch=epoch)[0]
    state, plan = first.state_dict(place), first._planned().lists.tolist()
    assert case.in_order(whole)[: len(plan)] == plan[: len(case.in_order(whole))]
    samplers, left = case.ranks(other, state), plan[state["position"] :]
    if place == 0 and has_no_batch(samplers[0]):  # of a whole epoch that is an error
        return
    steps = steps_of(samplers)
    found = case.in_order(steps)
    assert found[: len(left)] == left[: len(found)]
    again = found[len(left) :]
    assert again == (plan * (1 + len(again) // len(plan)))[: len(again)]
    before = Counter(indices_of(plan[: state["position"]]))
    repeated = sum(n - (i not in before) for i, n in Counter(indices_of(left + again)).items())
    dropped = max(0, case.num_samples - len(indices_of(plan))) + len(indices_of(left[len(found) :]))
    sampler = case.ranks(other, state)[0]
    assert sampler.num_repeated == repeated
    assert sampler.num_dropped == dropped
    # A state that those ranks save resumes on one rank.
    later = samplers[0].state_dict(min(1, len(steps)))
    if case.step_batches == 1:
        alone = case.in_order(steps_of(case.ranks(1, later)))
        assert alone == plan[later["position"] :][: len(alone)]


def check_iterations(case: Case, epoch: int) -> None:
    """An abandoned iteration keeps to its epoch, and does not count."""
    sampler = case.ranks(epoch=epoch)[0]
    whole = list(sampler)
    old, new = iter(sampler), iter(sampler)
    for iterator in [old, new] + [old] * (len(whole) > 1):
        next(iterator)
    assert sampler.state_dict() == sampler.state_dict(batches_given=1)
    sampler.set_epoch(epoch + 1)
    assert list(old) == whole[2:]
    sampler.set_epoch(epoch)
    for wrong in (-1, len(whole) + 1):
        with pytest.raises(ValueError, match=rf"is not in 0\.\.{len(whole)}"):
            sampler.state_dict(batches_given=wrong)
    with pytest.raises(TypeError, match="batches_given='1' must be an integer"):
        sampler.state_dict(batches_given="1")
    with pytest.raises(ValueError, match="epoch=-1 must be at least 0"):
        sampler.set_epoch(-1)


def loaded(sampler: Any, state: Any) -> Any:
    sampler.load_state_dict(state)
    return sampler


def check_refusals(case: Case) -> None:
    """A corrupt state is refused, and one of other settings, with their names."""
    state = case.ranks()[0].state_dict()
    corrupt = [state | change for change in CORRUPTIONS]
    corrupt += [{k: v for k, v in state.items() if k != name} for name in state.keys() - {"order"}]
    for bad in [*corrupt, [], None, "state"]:
        with pytest.raises(StateError):  # at once, or when the epoch is planned
            len(loaded(case.ranks()[0], bad))
    for make, message in case.makes:
        with pytest.raises(StateError, match=message):
            make(0, case.world_size).load_state_dict(state)


def check_padding(samplers: Sequence[Any], lengths: Any, align: int = 1) -> None:
    """Efficiency and padding are those of the batches that come."""
    tokens = area = room = 0
    for step in steps_of(samplers):
        areas = [-(-max(lengths[i] for i in batch) // align) * align * len(batch) for batch in step]
        tokens += sum(lengths[i] for batch in step for i in batch)
        area += sum(areas)
        room += max(areas) * len(samplers)
    for sampler in samplers:
        assert sampler.efficiency() == pytest.approx(tokens / room if room else 1)
        assert sampler.padding() == pytest.approx(1 - tokens / area if area else 0)
