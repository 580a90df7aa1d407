"""All laws for every nesting of blend, mix, concat, repeat, epochize, limit, batch and map.

A tree is drawn as plain tuples, so that a failing one can be read, and built anew for each rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import assume, event, given
from hypothesis import strategies as st

from energon_lite import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    EpochizeDataset,
    LimitDataset,
    MapDataset,
    MixBatchDataset,
    RepeatDataset,
    SavableDataset,
    SkipSample,
    WorkerConfig,
    sample_rng,
    stateless,
)
from energon_lite.core.activity import Activity
from energon_lite.core.dataset import StreamRun
from energon_lite.core.errors import EmptyDatasetError
from energon_lite.core.topology import Stream
from energon_lite.order.schedules import Schedule
from energon_lite.sources.dataset_config import load_factory
from energon_lite.testing import check_dataset

from ..conftest import examples
from ..helpers import Ranks, assert_same, ignore, text_set

SIZES = (1, 2, 5, 13, 25)
MAX_ITEMS = 12  # of a stream
MOST_DRAWS, MOST_DRAWS_OF_PASS = 100, 600
# Nested limits count ranks of the config they are built with: one, on any topology.
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)
OTHERS = [2, 1, 8, 3]

Tree = tuple[Any, ...]


@cache
def texts(size: int) -> Path:
    # Not a fixture: strategies have none. Removed with the object, at exit.
    folder = tempfile.TemporaryDirectory()
    FOLDERS.append(folder)
    return text_set(Path(folder.name) / f"texts-{size}", size)


FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


# ------------------------------------------------------------------------------------ functions


def number(item: Any) -> int:
    """The number of a sample, or of the first one of a batch."""
    while isinstance(item, dict):
        item = item["items"][0]
    return int(item.__key__)


@stateless
def noisy(item: Any) -> Any:
    return {"items": [item], "noise": sample_rng().random(), "__restore_key__": ()}


@stateless
def expanding(item: Any) -> Iterator[Any]:
    for i in range((1, 2, 0)[number(item) % 7 % 3]):
        yield {"items": [item], "part": i, "noise": sample_rng().random(), "__restore_key__": ()}


@stateless
def skipping(item: Any) -> Any:
    if number(item) % 5 == 3:
        raise SkipSample
    if number(item) % 7 == 4:
        raise ValueError("cannot be used")
    return item


@stateless
def listed(items: list[Any]) -> dict[str, Any]:
    return {"items": items, "__restore_key__": ()}


FUNCTIONS = {"noisy": noisy, "expanding": expanding, "skipping": skipping}


# ---------------------------------------------------------------------------------------- trees


def build(tree: Tree, config: WorkerConfig = ONE) -> SavableDataset[Any]:
    """Makes the dataset of a tree, for a place in the run."""
    dataset = _built(tree)
    dataset.worker_config = config
    return dataset


def _built(tree: Tree) -> SavableDataset[Any]:
    kind, *rest = tree
    if kind == "source":
        size, repeat, order, block = rest
        order = dict(order)
        built = {"shuffle_buffer_size": order.pop("shuffle_buffer_size"), "block": block}
        factory = load_factory(texts(size), training=True, worker_config=ONE, **order)
        return factory.build(repeat=repeat, **built)
    *settings_of, below = rest
    if kind in ("blend", "mix"):
        until, mode, *size = settings_of
        pairs = [(_built(child), _weight(weight)) for weight, child in below]
        if kind == "blend":
            return BlendDataset(*pairs, until=until, blend_mode=mode)
        return MixBatchDataset(
            *pairs, until=until, blend_mode=mode, batch_size=size[0], batch_mix_fn=listed
        )
    if kind == "concat":
        return ConcatDataset(*map(_built, below))
    dataset = _built(below)
    (value,) = settings_of
    if kind == "repeat":
        return RepeatDataset(dataset, repeats=value)
    if kind == "batch":
        size, drop_last = value
        return BatchDataset(dataset, size, listed, drop_last=drop_last)
    if kind == "map":
        return MapDataset(dataset, FUNCTIONS[value])
    made = {"epochize": EpochizeDataset, "limit": LimitDataset}[kind]
    return made(dataset, value, worker_config=ONE)


def _weight(weight: Any) -> Any:
    return Schedule(*weight) if isinstance(weight, tuple) else weight


def is_endless(tree: Tree) -> bool:
    return _built(tree).endless


def has(tree: Any, *words: Any) -> bool:
    """Whether a word occurs in a tree."""
    return (
        tree in words
        if not isinstance(tree, (tuple, list))
        else any(has(part, *words) for part in tree)
    )


orders = st.fixed_dictionaries(
    {
        "shuffle_buffer_size": st.sampled_from([0, 3, 8, 100]),
        "shuffle_over_epochs": st.sampled_from([1, 1, 2, 3, -1, None]),
        "max_samples_per_sequence": st.sampled_from([None, 1, 2, 4]),
        "parallel_shard_iters": st.sampled_from([None, 1, 2]),
    }
).map(lambda order: tuple(order.items()))
weights = st.one_of(
    st.sampled_from([1.0, 1.0, 2.5, 0.3, 0.01]),
    st.sampled_from(
        [
            ("linear", ((0, 1.0), (40, 0.1))),
            ("step", ((0, 0.0), (9, 1.0))),
            ("cosine", ((3, 0.2), (30, 2.0))),
        ]
    ),
)
modes = st.sampled_from(["exact", "exact", "random"])


@st.composite
def trees(draw: st.DrawFn, depth: int = 3, kinds: str = "any") -> Tree:
    """Any tree; of `kinds` "finite" only those that end, "plain" without skips and expansion."""
    finite = kinds != "any"
    leaf = depth == 0 or draw(st.integers(0, 4)) == 0
    if leaf:
        repeat = not finite and draw(st.booleans())
        return ("source", draw(st.sampled_from(SIZES)), repeat, draw(orders),
                draw(st.sampled_from([1, 2])))  # fmt: skip
    names = ["blend", "mix", "concat", "repeat", "epochize", "limit", "batch", "map"]
    kind = draw(st.sampled_from(names))
    below = partial(trees, depth - 1)
    if kind in ("blend", "mix"):
        untils = [None, "first", "all_once"] if finite else [None, "first", "all_once", "forever"]
        until = draw(st.sampled_from(untils))
        inner = kinds if finite or until != "all_once" else "finite"
        # An endless child beside finite ones, which end, is the most that "first" may have.
        number = draw(st.integers(1, 3))
        pairs = [(draw(weights), draw(below(inner))) for _ in range(number)]
        if all(isinstance(weight, tuple) for weight, _ in pairs):
            pairs[0] = (1.0, pairs[0][1])
        size = (draw(st.integers(1, 3)),) if kind == "mix" else ()
        return (kind, until, draw(modes), *size, tuple(pairs))
    if kind == "concat":
        first = "finite" if kinds == "any" else kinds
        heads = draw(st.lists(below(first), min_size=0, max_size=2))
        return ("concat", (*heads, draw(below(kinds))))
    if kind == "repeat":
        shares = [1, 2, 0.5, 1.3, 2.75] + ([] if finite else [None])
        inner = "finite" if kinds == "any" else kinds
        return ("repeat", draw(st.sampled_from(shares)), draw(below(inner)))
    if kind in ("epochize", "limit"):
        inner = draw(below("any" if kinds == "any" else kinds))
        if _built(inner).pass_length is not None:
            return inner
        return (kind, draw(st.integers(1, 12)), inner)
    if kind == "batch":
        drop_last = draw(st.sampled_from([False, False, True]))
        return ("batch", (draw(st.integers(1, 3)), drop_last), draw(below(kinds)))
    names = ["noisy"] if kinds == "plain" else sorted(FUNCTIONS)
    return ("map", draw(st.sampled_from(names)), draw(below(kinds)))


def begins_anew(tree: Tree, is_repeated: bool = False) -> bool:
    """Whether something endless is cut off and repeated: how far it came is not known then."""
    kind, *rest = tree
    if kind == "source":
        return False
    if kind == "concat":
        return any(begins_anew(child, is_repeated) for child in rest[0])
    if kind in ("blend", "mix"):
        children = [child for _, child in rest[-1]]
        if is_repeated and rest[0] == "first" and any(map(is_endless, children)):
            return True
        is_repeated = is_repeated or rest[0] in ("forever", "all_once")
        return any(begins_anew(child, is_repeated) for child in children)
    return begins_anew(rest[-1], is_repeated or kind == "repeat")


class Costly(BaseException):
    """More draws than a tree is worth; no stage takes it for an error of its own."""


class Limited(Activity):
    """An activity that ends after `most` draws, also in the middle of an item."""

    most = MOST_DRAWS

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "sample_index" and self.num_draws > self.most:
            raise Costly


def is_worth_it(tree: Tree, num_streams: Sequence[int]) -> bool:
    """Whether a tree gives something, and soon.

    Not so: a part repeated for ever that gives nothing, in none of the streams; repeats of repeats
    with tens of thousands of items; nested `all_once` with a hundredth of the weight for each last
    child, or batches of batches of what is mostly left out, with as many draws for an item.
    """
    dataset = build(tree)
    try:
        for n in num_streams:
            given = 0
            for index in range(n):
                run = StreamRun(dataset, Stream(index, n), max_skip_rate=1.0)
                run.activity = Limited(run.stream, 1.0)
                num_first = sum(1 for _ in islice(run, MAX_ITEMS))
                given += num_first
                if num_first == MAX_ITEMS and not dataset.endless:
                    run.activity.most = MOST_DRAWS_OF_PASS
                    sum(1 for _ in run)
            if given == 0:
                return False
    except (Costly, EmptyDatasetError):
        return False
    except ValueError as error:
        if "too deep" in str(error):
            return False
        raise
    return True


@examples(25)
@given(trees())
def test_any_tree_keeps_all_laws(tree: Tree) -> None:
    assume(not begins_anew(tree) and is_worth_it(tree, (1, 3)))
    event(tree[0])
    check_dataset(build(tree), num_streams=(1, 3), max_items=MAX_ITEMS)


@examples(25)
@given(trees(depth=2), st.integers(0, 6), st.integers(0, 3))
def test_any_tree_goes_on_equally_on_other_ranks(tree: Tree, steps: int, ahead: int) -> None:
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
    for rank, number_given in enumerate((steps, steps + ahead)):
        for _ in range(number_given):
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
