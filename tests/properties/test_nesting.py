"""All laws for every nesting of datasets; and finite and endless trees on other ranks."""

from __future__ import annotations

from functools import partial

from hypothesis import assume, event, given
from hypothesis import strategies as st

from energon_lite.testing import check_dataset

from ..conftest import examples
from ..helpers import Ranks, assert_same
from .trees import MAX_ITEMS, Tree, begins_again, build, is_worth_it, trees

OTHERS = [2, 1, 8, 3]


@examples(4)
@given(trees())
def test_any_tree_keeps_all_laws(tree: Tree) -> None:
    assume(not begins_again(tree) and is_worth_it(tree, (1, 3)))
    event(tree[0])
    check_dataset(build(tree), num_streams=(1, 3), max_items=MAX_ITEMS)


@examples(8)
@given(trees(depth=2), st.integers(0, 6), st.integers(0, 3))
def test_any_tree_resumes_equally_on_other_ranks(tree: Tree, steps: int, ahead: int) -> None:
    dataset = build(tree)
    assume(dataset.pass_length is None and is_worth_it(tree, (4,)))
    make = partial(build, tree)
    first = Ranks(make, 2, num_streams=4)
    if dataset.endless:
        before = first.steps(steps)
        states = first.save()
        expected = first.slots(24)
        for world_size in OTHERS:
            assert_same(Ranks(make, world_size, states=states).slots(24), expected)
        return
    # Ranks of a finite pass may stand apart; what any of them gave is not given again.
    before = {}
    for rank, number_returned in enumerate((steps, steps + ahead)):
        for _ in range(number_returned):
            try:
                slot, item = first.next(rank)
            except StopIteration:
                assume(False)  # an ended rank begins the next pass
            before[slot] = item
    states = first.save()
    rest = first.rest()
    assert not before.keys() & rest.keys()
    assume(rest)
    for world_size in OTHERS:
        assert_same(Ranks(make, world_size, states=states).rest(), rest)
