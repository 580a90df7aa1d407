"""Any tree on a chain of topologies gives, skips and counts what one undisturbed run does."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from energon_lite.core.errors import EmptyDatasetError, FatalSampleError

from ..conftest import examples
from .chains import Chain, Model, workers_here
from .trees import Tree, begins_again, build, is_worth_it, trees

NUM_RESUMES = 3
MOST_PASSES = 4
MOST_STEPS = 12  # of all ranks of an endless run, between two resumes
NUM_SLOTS = (NUM_RESUMES + 2) * (MOST_STEPS + 4)  # of an endless model


def chained(
    tree: Tree, num_streams: int, data: st.DataObject, worker_type: str | None = None
) -> None:
    """Runs a tree on four topologies, one after the other, and compares all of it."""
    dataset = build(tree)
    model = Model(dataset, num_streams, NUM_SLOTS)
    with tempfile.TemporaryDirectory() as folder:
        chain = Chain(partial(build, tree), model, Path(folder), worker_type)
        for _ in range(NUM_RESUMES + 1):
            world_size = data.draw(st.integers(1, 4), "ranks")
            num_workers = data.draw(st.integers(0, 3), "workers")
            own = chain.can_resume_alone(world_size) and data.draw(st.booleans(), "own states")
            chain.begin(world_size, num_workers, own)
            if dataset.endless:
                run_some_steps(chain, data)
            else:
                run_some_passes(chain, data)
            chain.save()
            if dataset.endless and data.draw(st.booleans(), "lost steps"):
                chain.ranks.steps(1)
            for loader in chain.ranks.loaders:
                loader.shutdown()


def run_some_steps(chain: Chain, data: st.DataObject) -> None:
    """All ranks of an endless run give equally many batches."""
    ranks = range(len(chain.ranks.loaders))
    for _ in range(data.draw(st.integers(0, MOST_STEPS // len(ranks)), "steps")):
        for rank in ranks:
            assert chain.next(rank)
        kill_some_workers(chain, data)
    if data.draw(st.booleans(), "leave"):
        for rank in ranks:
            chain.leave(rank)


def run_some_passes(chain: Chain, data: st.DataObject) -> None:
    """Ranks of finite passes end each together, and stand anywhere in the last one."""
    ranks = range(len(chain.ranks.loaders))
    if not chain.left() and not all(chain.ended):
        end_pass_of_which_nothing_is_left(chain)
    while True:
        if all(chain.ended):
            chain.begin_pass()
        running = [rank for rank in ranks if not chain.ended[rank]]
        if chain.number >= MOST_PASSES or data.draw(st.booleans(), "partial pass"):
            break
        for rank in running:
            chain.end(rank)
        assert not any(map(chain.is_ahead, ranks))
    is_training = chain.model.dataset.training
    is_new = not chain.given.get(chain.number)
    for rank in running:
        # The state of a rank that has not begun a validation pass is that of the end of the last.
        fewest = int(is_new and not is_training)
        for _ in range(data.draw(st.integers(fewest, 1 + len(chain.left(rank))), "batches")):
            if not chain.next(rank):
                break
            kill_some_workers(chain, data)
            # A validation that is left begins from its start.
            if is_training and chain.left(rank) and data.draw(st.integers(0, 5), "leave") == 0:
                chain.leave(rank)
        assert not chain.is_ahead(rank)


def kill_some_workers(chain: Chain, data: st.DataObject) -> None:
    """Ends a worker, mostly none; without workers there is nothing to draw."""
    if chain.worker_type and data.draw(st.integers(0, 5), "kill") == 0:
        rank = data.draw(st.integers(0, len(chain.ranks.loaders) - 1), "of rank")
        chain.kill_worker(rank, data.draw(st.integers(0, 2), "worker"))


def end_pass_of_which_nothing_is_left(chain: Chain) -> None:
    """A rank need not know that: its `for` is empty, or already that of the next pass."""
    ranks = range(len(chain.ranks.loaders))
    for rank in ranks:
        if not chain.ended[rank]:
            chain.end(rank)
    if any(map(chain.is_ahead, ranks)):
        behind = [rank for rank in ranks if not chain.is_ahead(rank)]
        chain.begin_pass()
        for rank in ranks:
            chain.ended[rank] = rank not in behind
        for rank in behind:
            chain.end(rank)


any_tree = st.one_of(trees(2), trees(3, kinds="finite"), trees(2, kinds="validation"))


def check(
    tree: Tree, num_streams: int, data: st.DataObject, worker_type: str | None = None
) -> None:
    assume(not begins_again(tree) and build(tree).pass_length is None)
    num_items = -(-NUM_SLOTS // num_streams)  # else a stream might give nothing more, for ever
    assume(is_worth_it(tree, (num_streams,), MOST_PASSES, num_items))
    event("endless" if build(tree).endless else "finite")
    try:
        chained(tree, num_streams, data, worker_type)
    except (EmptyDatasetError, FatalSampleError):
        # Something that is repeated gives nothing in a later pass; or a validation of few samples
        # lost more than any limit allows, as batches that a hook expands may fail again and again.
        assume(False)


@examples(5, soak=1334)
@given(any_tree, st.integers(1, 6), st.data())
def test_any_tree_on_a_chain_of_topologies(
    tree: Tree, num_streams: int, data: st.DataObject
) -> None:
    with workers_here():
        check(tree, num_streams, data)


@pytest.mark.processes
@examples(2, soak=666)
@given(any_tree, st.integers(1, 6), st.data())
def test_any_tree_on_a_chain_of_topologies_with_worker_processes(
    tree: Tree, num_streams: int, data: st.DataObject
) -> None:
    check(tree, num_streams, data, worker_type="process")


@examples(4, soak=666)
@given(any_tree, st.integers(1, 6), st.data())
def test_any_tree_on_a_chain_of_topologies_with_worker_threads(
    tree: Tree, num_streams: int, data: st.DataObject
) -> None:
    check(tree, num_streams, data, worker_type="thread")


def test_tokens_of_packs_that_a_generator_halves_count_once_also_after_a_resume(tmp_path) -> None:
    settings = {"shuffle_buffer_size": 100, "shuffle_over_epochs": 2}
    settings |= {"max_samples_per_sequence": None, "parallel_shard_iters": None}
    source = ("source", "tar", 128, False, (*settings.items(),), 1)
    tree = ("bucket", "listed", 3, False, ("pack", "halved", 1, False, source))
    model = Model(build(tree), 1, NUM_SLOTS)
    for position in range(1, 8):
        chain = Chain(partial(build, tree), model, tmp_path / str(position))
        for num_items in (position, 9):
            chain.begin(1, 0)
            for _ in range(num_items):
                assert chain.next(0)
            chain.save()
        assert chain.ranks.loaders[0].stats()["texts-128/train"].tokens > 0
