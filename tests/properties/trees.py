"""Random trees of datasets: blends in blends, batches, packs, buckets, shuffles, hooks that fail.

A tree is drawn as plain tuples, so that a failing one can be read, and is built for each rank.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from energon_lite import (
    BatchDataset,
    BlendDataset,
    BucketBatchDataset,
    Buckets,
    ConcatDataset,
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    EpochizeDataset,
    FilterDataset,
    GroupBatchDataset,
    IterMapDataset,
    JoinedWebdatasetFactory,
    LimitDataset,
    MapDataset,
    MixBatchDataset,
    Packing,
    PackingDataset,
    RepeatDataset,
    SavableDataset,
    ShuffleBufferDataset,
    SkipSample,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    sample_rng,
    stateless,
)
from energon_lite.core.dataset import StreamRun
from energon_lite.core.errors import EmptyDatasetError
from energon_lite.core.stream_context import StreamContext
from energon_lite.core.topology import Stream
from energon_lite.extras.stores.file_stores import WebdatasetFileStore
from energon_lite.order.schedules import Schedule
from energon_lite.sources.dataset_config import load_factory
from energon_lite.stages.blend import TokenBlendDataset
from energon_lite.stages.map import as_user_function
from energon_lite.stages.token_lengths import MeasureDataset

from ..conftest import write_tar
from ..helpers import ignore, prepared, text_of, text_set

SIZES = (1, 2, 5, 16, 25, 128)
MAX_ITEMS = 12  # of a stream
MOST_DRAWS, MOST_DRAWS_OF_PASS = 100, 600
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)

Tree = tuple[Any, ...]


# ------------------------------------------------------------------------------------------ data


FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def new_folder() -> Path:
    # Not a fixture: strategies have none. Removed with the object, at exit.
    FOLDERS.append(tempfile.TemporaryDirectory())
    return Path(FOLDERS[-1].name)


@cache
def texts(size: int) -> Path:
    return text_set(new_folder() / f"texts-{size}", size)


@cache
def notes(size: int) -> Path:
    """A note for each text, in another order, but for some."""
    keys = [f"{i:05d}.txt" for i in reversed(range(size)) if i % 6 != 4]
    folder = new_folder() / f"notes-{size}"
    for shard in range(min(2, len(keys))):
        write_tar(
            folder / f"{shard}.tar", [(key, b"note " + key.encode()) for key in keys[shard::2]]
        )
    return prepared(folder, "TextSample", {"text": "txt"})


@cache
def lines(size: int) -> Path:
    """Texts as a JSONL file, with broken lines and blank ones."""
    path = new_folder() / f"lines-{size}.jsonl"
    rows = [json.dumps({"text": text_of(i)}) for i in range(size)]
    cut = [row[: len(row) - 3 * (i % 9 == 5)] for i, row in enumerate(rows)]
    path.write_text("".join(f"{row}\n{' ' * (i % 2)}\n" for i, row in enumerate(cut)))
    return path


@cache
def crude(size: int) -> Path:
    folder = new_folder() / f"crude-{size}"
    rows = [(f"{i:05d}.json", json.dumps({"text": text_of(i)}).encode()) for i in range(size)]
    write_tar(folder / "0.tar", rows)
    return prepared(folder, "CrudeWebdataset")


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
def breaking(item: Any) -> Iterator[Any]:
    """Fails before, between and after its items."""
    for i in range(3):
        if number(item) % 4 == i:
            raise ValueError(f"breaks at {i}") if number(item) % 3 else SkipSample
        yield {"items": [item], "part": i, "__restore_key__": ()}


@stateless
def listed(items: list[Any]) -> dict[str, Any]:
    return {"items": items, "__restore_key__": ()}


@stateless
def picky(items: list[Any]) -> dict[str, Any]:
    """Skips some batches, and fails on others."""
    if (total := sum(map(number, items))) % 5 == 3:
        raise SkipSample
    if total % 7 == 4:
        raise ValueError("no such batch")
    return {"items": items, "__restore_key__": ()}


@stateless
def halved(items: list[Any]) -> Iterator[dict[str, Any]]:
    """Makes a batch of each half of one, and fails on some second halves."""
    middle = len(items) // 2
    yield {"items": items[: middle + 1], "__restore_key__": ()}
    if number(items[0]) % 3 == 1:
        raise ValueError("no second half")
    yield {"items": items[middle:], "__restore_key__": ()}


def some_twice(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        if number(item) % 6 == 5:
            raise SkipSample
        if number(item) % 3:
            yield item
        if number(item) % 5 == 0:
            yield {"items": [item], "__restore_key__": ()}


@stateless
def length(item: Any) -> int:
    if number(item) % 11 == 6:
        raise ValueError("cannot be measured")
    return 1 + number(item) % 5


@stateless
def parity(item: Any) -> tuple[int, None]:
    return number(item) % 2, None


@stateless
def is_small(item: Any) -> bool:
    return number(item) % 4 != 2


@stateless
def with_note(text: TextSample, note: TextSample | None) -> TextSample:
    """Joins a text and its note, and fails on some."""
    if number(text) % 8 == 6:
        raise ValueError("cannot be joined")
    return TextSample.derive_from(text, text=f"{text.text} {note and note.text}")


@stateless
def cook_line(sample: CrudeSample) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"])


@stateless
def cook_with_note(sample: CrudeSample, notes: Any) -> TextSample:
    """Looks up the note of a text, which some lack."""
    note = notes.get(f"{sample['__key__']}.txt", sample)
    return TextSample(**basic_sample_keys(sample), text=f"{sample['json']['text']} {note!r}")


class LineEncoder(DefaultTaskEncoder[Any, Any, Any, Any]):
    cookers = (Cooker(cook_line),)


class NoteEncoder(DefaultTaskEncoder[Any, Any, Any, Any]):
    cookers = (Cooker(cook_with_note),)


FUNCTIONS = {"noisy": noisy, "expanding": expanding, "skipping": skipping, "breaking": breaking}
BATCHERS = {"listed": listed, "picky": picky, "halved": halved}


# ---------------------------------------------------------------------------------------- trees


def build(tree: Tree, config: WorkerConfig = ONE) -> SavableDataset[Any]:
    """Makes the dataset of a tree, for a place in the run."""
    dataset = _built(tree)
    dataset.worker_config = config
    return dataset


def _built(tree: Tree) -> SavableDataset[Any]:
    kind, *rest = tree
    if kind == "source":
        form, size, repeat, order, block = rest
        order = dict(order)
        window = order.pop("shuffle_buffer_size")
        factory = _factory(form, size, training=True, worker_config=ONE, **order)
        built = factory.build(repeat=repeat, shuffle_buffer_size=window, block=block)
        return _cooked(built, factory, form, size)
    if kind == "validation":
        form, size, block = rest
        factory = _factory(form, size, training=False, worker_config=ONE)
        return _cooked(factory.build(block=block), factory, form, size)
    *settings, below = rest
    if kind in ("blend", "tokens", "mix"):
        return _blended(
            kind, [(_built(child), _weight(weight)) for weight, child in below], *settings
        )
    if kind == "concat":
        return ConcatDataset(*map(_built, below))
    dataset = _built(below)
    if kind in ("batch", "group", "pack", "bucket"):
        return _batched(kind, dataset, *settings)
    (value,) = settings
    if kind == "map":
        return MapDataset(dataset, FUNCTIONS[value])
    if kind == "filter":
        return FilterDataset(dataset, filter_fn=is_small)
    if kind == "iter":
        return IterMapDataset(dataset, some_twice, stateless_iter_fn=value)
    if kind == "repeat":
        return RepeatDataset(dataset, repeats=value)
    if kind == "shuffle":
        return ShuffleBufferDataset(dataset, value)
    made = {"epochize": EpochizeDataset, "limit": LimitDataset}[kind]
    return made(dataset, value, worker_config=ONE)


def _factory(form: str, size: int, **settings: Any) -> Any:
    if form in ("joined", "inner"):
        return JoinedWebdatasetFactory(
            [load_factory(path(size), training=False) for path in (texts, notes)],
            join_index=notes(size).parent,
            joiner=with_note,
            nonmatch=("error", "none" if form == "joined" else "skip"),
            **settings,
        )
    return load_factory({"tar": texts, "lines": lines, "cooked": crude}[form](size), **settings)


def _cooked(source: Any, factory: Any, form: str, size: int) -> SavableDataset[Any]:
    if form not in ("lines", "cooked"):
        return source
    encoder = LineEncoder() if form == "lines" else NoteEncoder()
    return encoder.build_cook_crude_sample(
        source,
        worker_config=ONE,
        subflavors={},
        get_primary_aux=factory.as_file_store,
        aux={"notes": WebdatasetFileStore(notes(size))} if form == "cooked" else {},
    )


def _blended(kind: str, pairs: Any, until: Any, mode: str, size: int = 0) -> SavableDataset[Any]:
    if kind == "tokens":
        blend = TokenBlendDataset(*pairs, until=until)
        return MeasureDataset(blend, as_user_function(length, "sample_length", ONE))
    if kind == "blend":
        return BlendDataset(*pairs, until=until, blend_mode=mode)
    return MixBatchDataset(
        *pairs, until=until, blend_mode=mode, batch_size=size, batch_mix_fn=listed
    )


def _batched(kind: str, dataset: Any, batcher: str, size: int, option: bool) -> SavableDataset[Any]:
    function = BATCHERS[batcher]
    if kind == "batch":
        return BatchDataset(dataset, size, function, drop_last=option)
    if kind == "group":
        return GroupBatchDataset(dataset, size, parity, function, drop_last=option)
    if kind == "bucket":
        buckets = Buckets(window=3 * size, max_tokens=9 if option else None)
        return BucketBatchDataset(
            dataset, buckets, function, sample_length=length, batch_size=None if option else size
        )
    packing = Packing(capacity=4 + size, buffer_size=2 * size, drop_last=option)
    return PackingDataset(dataset, None, packing, function, sample_length=length)


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


# What a leaf reads: tars, lines of a JSONL file, tars with a cooker that reads a file store, and
# joins that keep samples without a match or drop them.
forms = st.sampled_from(["tar", "tar", "lines", "cooked", "joined", "inner"])
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


KINDS = (
    "blend", "tokens", "mix", "concat", "repeat", "epochize", "limit", "batch", "group", "bucket",
    "pack", "shuffle", "iter", "filter", "map", "map",
)  # fmt: skip


@st.composite
def trees(draw: st.DrawFn, depth: int = 3, kinds: str = "any", is_top: bool = True) -> Tree:
    """Any tree, with an end of passes at the top only.

    Of `kinds` "finite" only those that end, "validation" those of such sources.
    """
    finite = kinds != "any"
    leaf = depth == 0 or draw(st.integers(0, 4)) == 0
    if leaf and kinds == "validation":
        return ("validation", draw(forms), draw(st.sampled_from(SIZES)),
                draw(st.sampled_from([1, 2])))  # fmt: skip
    if leaf:
        repeat = not finite and draw(st.booleans())
        return ("source", draw(forms), draw(st.sampled_from(SIZES)), repeat, draw(orders),
                draw(st.sampled_from([1, 2])))  # fmt: skip
    kind = draw(st.sampled_from(KINDS))
    below = partial(trees, depth - 1, is_top=False)
    if kind in ("blend", "tokens", "mix"):
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
        inner = draw(below(kinds))
        return (kind, draw(st.integers(1, 12)), inner) if is_top else inner
    if kind in ("batch", "group", "bucket", "pack"):
        # Batches of a group must not be expanded.
        batcher = draw(st.sampled_from(["listed", "picky", "halved"][: 3 - (kind == "group")]))
        option = draw(st.sampled_from([False, False, True]))
        return (kind, batcher, draw(st.integers(1, 3)), option, draw(below(kinds)))
    values = {
        "filter": [None],
        "iter": [True],
        "map": sorted(FUNCTIONS),
        "shuffle": [2, 3, 9],
    }[kind]
    return (kind, draw(st.sampled_from(values)), draw(below(kinds)))


def begins_again(tree: Tree, is_repeated: bool = False) -> bool:
    """Whether something endless is cut off and repeated: how far it came is not known then."""
    kind, *rest = tree
    if kind in ("source", "validation"):
        return False
    if kind == "concat":
        return any(begins_again(child, is_repeated) for child in rest[0])
    if kind in ("blend", "tokens", "mix"):
        children = [child for _, child in rest[-1]]
        if is_repeated and rest[0] == "first" and any(map(is_endless, children)):
            return True
        is_repeated = is_repeated or rest[0] in ("forever", "all_once")
        return any(begins_again(child, is_repeated) for child in children)
    return begins_again(rest[-1], is_repeated or kind == "repeat")


class Costly(BaseException):
    """More draws than a tree is worth; no stage takes it for an error of its own."""


class Limited(StreamContext):
    """An context that ends after `most` draws, also in the middle of an item."""

    most = MOST_DRAWS

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "sample_index" and self.num_draws > self.most:
            raise Costly


def is_worth_it(
    tree: Tree, num_streams: Sequence[int], last_pass: int = 0, num_items: int = MAX_ITEMS
) -> bool:
    """Whether a tree gives something, and soon; also the last of `num_items` of each stream.

    Not so: a part repeated for ever that gives nothing, in none of the streams; repeats of repeats
    with tens of thousands of items; nested `all_once` with a hundredth of the weight for each last
    child, or batches of batches of what is mostly left out, with as many draws for an item.
    """
    dataset = build(tree)
    try:
        for n, number in product(num_streams, {0, last_pass}):
            given = 0
            for index in range(n):
                run = StreamRun(dataset, Stream(index, n, number), max_skip_rate=1.0)
                run.context = Limited(run.stream, 1.0)
                run.context.most = MOST_DRAWS * -(-num_items // MAX_ITEMS)
                num_first = sum(1 for _ in islice(run, num_items))
                given += num_first
                if num_first == num_items and not dataset.endless:
                    run.context.most = MOST_DRAWS_OF_PASS
                    sum(1 for _ in run)
            if given == 0:
                return False
    except (Costly, EmptyDatasetError):
        return False
    return True
