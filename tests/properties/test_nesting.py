"""All laws for every nesting of datasets; and finite and endless trees on other ranks."""

from __future__ import annotations

from hypothesis import assume, event, given

from energon_lite.testing import check_dataset

from ..conftest import examples
from .trees import MAX_ITEMS, Tree, begins_again, build, is_worth_it, trees


@examples(3)
@given(trees())
def test_any_tree_keeps_all_laws(tree: Tree) -> None:
    assume(not begins_again(tree) and is_worth_it(tree, (1, 3)))
    event(tree[0])
    check_dataset(build(tree), num_streams=(1, 3), max_items=MAX_ITEMS)
