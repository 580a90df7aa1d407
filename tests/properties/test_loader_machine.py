"""A run that is saved, resumed elsewhere, broken off and gone on with at random, against a model.

The model is the list of all slots, made once by one rank. Whatever happens, each slot is given once
and has the model's batch.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ..conftest import examples
from ..helpers import ENCODERS, Ranks, assert_same, last_slot, text_set, train

NUM_SLOTS = 400
world_sizes = st.sampled_from([1, 2, 3, 4, 5])


@cache
def texts() -> Path:
    # Not a fixture: state machines have none. Removed with the object, at exit.
    texts.folder = tempfile.TemporaryDirectory()  # type: ignore[attr-defined]
    return text_set(Path(texts.folder.name) / "texts", 29)  # type: ignore[attr-defined]


@cache
def endless_model(encoder: str, num_streams: int) -> dict[int, Any]:
    return Ranks(train(texts(), encoder), 1, num_streams=num_streams).slots(NUM_SLOTS)


@cache
def finite_model(encoder: str, num_streams: int) -> list[dict[int, Any]]:
    make = train(texts(), encoder, repeat=False, batch_size=2)
    run = Ranks(make, 1, num_streams=num_streams)
    passes = []
    for _ in range(12):
        passes.append(run.rest())
        run.iterators = [iter(run.loaders[0])]
    return passes


class EndlessRun(RuleBasedStateMachine):
    """All ranks take each step together, as in training."""

    @initialize(
        encoder=st.sampled_from(sorted(ENCODERS)),
        num_streams=st.sampled_from([1, 2, 6]),
        world_size=world_sizes,
    )
    def start(self, encoder: str, num_streams: int, world_size: int) -> None:
        self.make = train(texts(), encoder)
        self.model = endless_model(encoder, num_streams)
        self.run = Ranks(self.make, world_size, num_streams=num_streams)
        self.next_slot = 0

    def has_room(self) -> bool:
        return self.next_slot < NUM_SLOTS - 30

    @precondition(has_room)
    @rule(steps=st.integers(1, 5))
    def steps(self, steps: int) -> None:
        found = self.run.steps(steps)
        stop = self.next_slot + steps * len(self.run.loaders)
        expected = {m: self.model[m] for m in range(self.next_slot, stop)}
        assert_same(dict(sorted(found.items())), expected)
        self.next_slot = stop

    @rule(world_size=world_sizes)
    def resume(self, world_size: int) -> None:
        self.run = Ranks(self.make, world_size, states=self.run.save())

    @rule()
    def resume_each_rank_from_its_own_state(self) -> None:
        states = self.run.save()
        self.run = Ranks(self.make, len(states))
        for loader, state in zip(self.run.loaders, states, strict=True):
            loader.restore_state_rank(state)
        self.run.iterators = [iter(loader) for loader in self.run.loaders]

    @rule()
    def leave_the_loop_and_begin_it_again(self) -> None:
        self.run.iterators = [iter(loader) for loader in self.run.loaders]

    @rule(steps=st.integers(1, 3), world_size=world_sizes)
    def go_on_and_then_back_to_a_checkpoint(self, steps: int, world_size: int) -> None:
        states = self.run.save()
        self.run.steps(steps)
        self.run = Ranks(self.make, world_size, states=states)


class FiniteRun(RuleBasedStateMachine):
    """Ranks go through passes at their own pace; all begin the next one together."""

    @initialize(
        encoder=st.sampled_from(["skipping", "expanding", "grouping"]),
        num_streams=st.sampled_from([1, 3, 6]),
        world_size=world_sizes,
    )
    def start(self, encoder: str, num_streams: int, world_size: int) -> None:
        self.make = train(texts(), encoder, repeat=False, batch_size=2)
        self.passes = finite_model(encoder, num_streams)
        self.number = 0
        self.given: set[int] = set()
        self.run = Ranks(self.make, world_size, num_streams=num_streams)
        self.ended = [False] * world_size

    @property
    def model(self) -> dict[int, Any]:
        return self.passes[self.number]

    @rule(data=st.data(), steps=st.integers(1, 4))
    def some_rank_goes_on(self, data: st.DataObject, steps: int) -> None:
        running = [rank for rank, ended in enumerate(self.ended) if not ended]
        if not running:
            return
        self._steps(data.draw(st.sampled_from(running)), steps)

    def _steps(self, rank: int, steps: int) -> None:
        for _ in range(steps):
            item = next(self.run.iterators[rank], None)
            if item is None:
                self.ended[rank] = True
                return
            slot = last_slot(self.run.loaders[rank])
            assert slot not in self.given, f"slot {slot} came twice"
            assert_same(item, self.model[slot])
            self.given.add(slot)

    @precondition(lambda self: not all(self.ended) and self.number < 10)
    @rule(world_size=world_sizes)
    def resume(self, world_size: int) -> None:
        # On the same ranks an ended one would begin the next pass alone, as in the unbroken run.
        if world_size == len(self.ended) and any(self.ended):
            return
        self.run = Ranks(self.make, world_size, states=self.run.save())
        self.ended = [False] * world_size
        if self.given == set(self.model):  # nobody saw the end: the next `for` is the next pass
            self.given = set()
            self.number += 1
            # A rank that has not stepped yet cannot know that this pass is over: its state would be
            # refused together with those of ranks that do.
            for rank in range(world_size):
                self._steps(rank, 1)

    @precondition(lambda self: self.number < 10)
    @rule(world_size=world_sizes, resumes=st.booleans())
    def end_this_pass_and_begin_the_next(self, world_size: int, resumes: bool) -> None:
        for rank, ended in enumerate(self.ended):
            while not ended:
                item = next(self.run.iterators[rank], None)
                ended = item is None
                if item is not None:
                    slot = last_slot(self.run.loaders[rank])
                    assert slot not in self.given, f"slot {slot} came twice"
                    assert_same(item, self.model[slot])
                    self.given.add(slot)
        assert self.given == set(self.model)
        if resumes:
            self.run = Ranks(self.make, world_size, states=self.run.save())
        self.run.iterators = [iter(loader) for loader in self.run.loaders]
        self.ended = [False] * len(self.run.loaders)
        self.given = set()
        self.number += 1

    @invariant()
    def nothing_comes_that_the_pass_does_not_have(self) -> None:
        if hasattr(self, "given"):
            assert self.given <= set(self.model)


TestEndlessRun = EndlessRun.TestCase
TestEndlessRun.settings = examples(4, stateful_step_count=15)
TestFiniteRun = FiniteRun.TestCase
TestFiniteRun.settings = examples(4, stateful_step_count=15)
