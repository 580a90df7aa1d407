"""Padded batches: how much of them is padding, against the samplers that are known for it.

The references are our own code, from descriptions of what theirs does.
"""

from __future__ import annotations

import functools
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.data import write_texts
from benchmarks.gpt2 import TokenCounter
from benchmarks.measure import REPO, Count, Entry, Figure, in_turn
from energon_lite import (
    BucketBatchDataset,
    Buckets,
    DefaultTaskEncoder,
    ModalitySplit,
    SavableDataset,
    SplitModalityBatchDataset,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.batching.stream import pack_stream
from energon_lite.core.dataset import Cursor, SourceFacts, StreamRun
from energon_lite.core.state import Snapshot
from energon_lite.core.stream_context import StreamContext, context_of
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import UserFunction
from energon_lite.extras.samplers import SplitModalityBatchSampler, TokenBudgetBatchSampler
from energon_lite.formats.length_files import write_lengths
from energon_lite.sources.dataset_config import load_factory
from energon_lite.stages.modality_batches import PlannedBatches
from energon_lite.stages.token_lengths import MeasureDataset

DATA = REPO.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the folder shared/data is not here")

NUM_LINES, BUDGET = 300_000, 16_384
LINES = f"Padded batches of {NUM_LINES:,} lines of WikiText, one rank"
INFINIBATCH = "infinibatch's algorithm, rebuilt"

NUM_SAMPLES, NUM_TEXTS, NUM_RANKS, STEP_SIZE = 66_500, 4_056, 8, 128
MODALITIES = (
    f"Padded batches of one modality: {NUM_SAMPLES:,} samples (OmniBal with 576 patches; "
    f"{NUM_TEXTS / NUM_SAMPLES:.1%} text only), {NUM_RANKS} ranks, global batch {STEP_SIZE}"
)
INSTRUCTIONS = (
    "gsm8k_train.jsonl", "gsm8k_test.jsonl", "alpaca_en_demo.json", "code_alpaca_2k.json",
    "llms_from_scratch_instruction_data.json", "glaive_toolcall_en_demo.json",
    "xtuner_mllm_sft_text.jsonl", "stanford_alpaca_seed_tasks.jsonl",
)  # fmt: skip
PRISMATIC = "prismatic's algorithm, rebuilt"
NUM_MANY = 1_000_000
IN_A_RUN = f"Padded batches of {NUM_LINES:,} lines of WikiText in a run, one stream"
STAGE = "Batches of like lengths in the pipeline (WikiText's lengths, 20,000 texts, 0 workers)"


@functools.cache
def wikitext_lengths() -> Any:
    """GPT-2 tokens of lines, 567 at most, drawn from 5,352; mean 102."""
    count = TokenCounter(DATA / "gpt2_bpe" / "vocab.bpe")
    texts = [(DATA / "wikitext2" / name).read_text("utf-8") for name in ("valid.txt", "test.txt")]
    tokens = [count(line) for text in texts for line in text.splitlines() if line.strip()]
    return np.random.Generator(np.random.Philox(103)).choice(np.array(tokens), NUM_LINES)


def modality_lengths() -> tuple[Any, Any]:
    """Whether each sample has an image, and its tokens; texts are instructions, cut at 2,048."""
    rows = [
        row["token_num"] - 256 * row["vit_num"]
        for path in sorted((DATA / "omnibal_lengths").glob("*_token_lengths.json"))
        for row in json.loads(path.read_bytes())
    ]
    lists = json.loads((DATA / "gpt2_token_lengths.json").read_bytes())
    texts = [length for name in INSTRUCTIONS for length in lists[name]]
    random = np.random.Generator(np.random.Philox(2023))
    with_image = random.permutation(rows)[: NUM_SAMPLES - NUM_TEXTS] + 576
    lengths = np.concatenate([with_image, np.minimum(random.permutation(texts)[:NUM_TEXTS], 2048)])
    order = random.permutation(NUM_SAMPLES)
    return order < len(with_image), lengths[order]


def read_ahead(
    lengths: list[int], window: int, max_tokens: int | None, batch_size: int
) -> list[list[int]]:
    """Bucketed read-ahead: windows sorted from long to short, cut, shuffled, and flushed."""
    random = np.random.Generator(np.random.Philox(1))
    order = random.permutation(len(lengths)).tolist()
    batches: list[list[int]] = []
    for first in range(0, len(order), window):
        chosen = sorted(order[first : first + window], key=lengths.__getitem__, reverse=True)
        found, start = [], 0
        while start < len(chosen):
            size = max_tokens // lengths[chosen[start]] if max_tokens else batch_size
            found.append(chosen[start : start + max(1, size)])
            start += max(1, size)
        batches += [found[i] for i in random.permutation(len(found))]
    return batches


def split_by_sums(is_image: list[bool], lengths: list[int]) -> list[list[list[int]]]:
    """Prismatic's way: sorted within one global batch, dealt to the rank with the least sum."""
    random = np.random.Generator(np.random.Philox(2))
    steps = []
    per_rank = STEP_SIZE // NUM_RANKS
    for modality in (True, False):
        members = [i for i, image in enumerate(is_image) if image == modality]
        order = [members[i] for i in random.permutation(len(members))]
        order += order[: -len(order) % STEP_SIZE]
        for first in range(0, len(order), STEP_SIZE):
            ranks: list[list[int]] = [[] for _ in range(NUM_RANKS)]
            sums: list[float] = [0] * NUM_RANKS
            batch = order[first : first + STEP_SIZE]
            for index in sorted(batch, key=lengths.__getitem__, reverse=True):
                rank = sums.index(min(sums))
                ranks[rank].append(index)
                sums[rank] += lengths[index]
                if len(ranks[rank]) == per_rank:
                    sums[rank] = float("inf")
            steps.append(ranks)
    return [steps[i] for i in random.permutation(len(steps))]


def areas_and_tokens(batches: list[list[int]], lengths: Any) -> tuple[Any, Any]:
    """Padded tokens and real ones, of each batch; shape (B,)."""
    sizes = np.fromiter(map(len, batches), np.int64)
    emitted = lengths[np.fromiter((i for batch in batches for i in batch), np.int64)]
    starts = np.cumsum(sizes) - sizes
    return np.maximum.reduceat(emitted, starts) * sizes, np.add.reduceat(emitted, starts)


def padding(batches: list[list[int]], lengths: Any) -> float:
    areas, tokens = areas_and_tokens(batches, lengths)
    return float(1 - tokens.sum() / areas.sum())


def useful(steps: list[list[list[int]]], lengths: Any) -> float:
    """Real tokens, by ranks times the padded tokens of each step's slowest rank."""
    areas, tokens = areas_and_tokens([batch for step in steps for batch in step], lengths)
    return float(tokens.sum() / (areas.reshape(-1, NUM_RANKS).max(1).sum() * NUM_RANKS))


@needs_data
@pytest.mark.parametrize(
    ("name", "window", "settings", "goal"),
    [
        ("32 samples, unsorted", 32, {"batch_size": 32}, None),
        ("32 samples, window 320", 320, {"batch_size": 32}, None),
        ("16,384 tokens, window 1,000", 1000, {"max_tokens": BUDGET}, None),
        ("16,384 tokens, window 10,000", 10_000, {"max_tokens": BUDGET}, 0.032),
        ("16,384 tokens, window 100,000", 100_000, {"max_tokens": BUDGET}, None),
    ],
)
def test_padding_of_lines(
    entries: list[Entry], name: str, window: int, settings: dict[str, int], goal: float | None
) -> None:
    lengths = wikitext_lengths()
    sampler = TokenBudgetBatchSampler(lengths, window=window, rank=0, world_size=1, **settings)
    ours = list(sampler)
    theirs = read_ahead(
        lengths.tolist(), window, settings.get("max_tokens"), settings.get("batch_size", 0)
    )
    assert sorted(i for batch in ours for i in batch) == list(range(NUM_LINES))
    areas, _ = areas_and_tokens(ours, lengths)
    share = padding(ours, lengths)
    assert share == pytest.approx(sampler.padding())
    text = f"{share:.2%} padding; infinibatch's {padding(theirs, lengths):.2%}"
    if "max_tokens" in settings:
        assert areas.max() <= BUDGET
        used, by_them = (lengths.sum() / (BUDGET * len(batches)) for batches in (ours, theirs))
        text += f"; {used:.1%} of the budget are tokens; infinibatch's {by_them:.1%}"
    if goal:
        shares = [share]
        for epoch in (1, 2, 3):
            sampler.set_epoch(epoch)
            shares.append(sampler.padding())
        assert np.mean(shares) <= goal
        text += f"; {(areas > BUDGET).sum()} of {len(ours):,} batches over it"
        text += f"; {np.mean(shares):.2%} padding in the mean of four epochs"
    wanted = f"≤ {goal:.1%} padding, no batch over the budget" if goal else ""
    entries.append(Count(LINES, name, text, wanted))


@needs_data
@pytest.mark.parametrize("capacity", [1024, BUDGET])
def test_packing_of_lines(entries: list[Entry], capacity: int) -> None:
    """Instead of padded batches."""
    lengths = wikitext_lengths()
    share = 1 - pack_stream(lengths, capacity, buffer_size=1000).efficiency(lengths, capacity)
    assert share <= 0.0005
    name = f"packs of {capacity:,} from 1,000 samples instead"
    entries.append(Count(LINES, name, f"{share:.4%} padding", "≤ 0.05 %"))


@needs_data
@pytest.mark.parametrize(("window", "goal"), [(1, None), (8, 0.89), (64, 0.98)])
def test_useful_share_of_modality_batches(
    entries: list[Entry], window: int, goal: float | None
) -> None:
    is_image, lengths = modality_lengths()
    samplers = [
        SplitModalityBatchSampler(
            lengths, STEP_SIZE, groups=is_image, window=window, rank=rank, num_replicas=NUM_RANKS
        )
        for rank in range(NUM_RANKS)
    ]
    steps = [list(step) for step in zip(*samplers, strict=True)]
    theirs = split_by_sums(is_image.tolist(), lengths.tolist())
    assert {i for step in steps for batch in step for i in batch} == set(range(NUM_SAMPLES))
    pure = np.mean([len({is_image[i] for b in step for i in b}) == 1 for step in steps])
    share = useful(steps, lengths)
    assert share == pytest.approx(samplers[0].efficiency())
    assert pure == 1
    assert share >= (goal or 0)
    batches, others = ([b for step in planned for b in step] for planned in (steps, theirs))
    text = (
        f"{share:.1%} useful, {padding(batches, lengths):.1%} padding, {pure:.0%} of steps pure; "
        f"prismatic's {useful(theirs, lengths):.1%}, {padding(others, lengths):.1%}"
    )
    wanted = f"≥ {goal:.0%} useful, 100 % pure" if goal else ""
    entries.append(Count(MODALITIES, f"window {window}", text, wanted))


@needs_data
@pytest.mark.parametrize("window", [1, 8, 16, 64, 128])
def test_useful_share_of_modality_batches_in_a_run(entries: list[Entry], window: int) -> None:
    is_image, lengths = modality_lengths()
    groups, as_list = is_image.tolist(), lengths.tolist()
    split = ModalitySplit(
        groups.__getitem__,
        shares={True: NUM_SAMPLES - NUM_TEXTS, False: NUM_TEXTS},
        window=window,
        end="drop",
    )
    order = np.random.Generator(np.random.Philox(7)).permutation(NUM_SAMPLES).tolist()
    dataset = SplitModalityBatchDataset(
        Lines(order), split, STEP_SIZE // NUM_RANKS, listed, sample_length=as_list.__getitem__
    )
    streams = [list(StreamRun(dataset, Stream(rank, NUM_RANKS))) for rank in range(NUM_RANKS)]
    num_returned = sum(len(batch) for batches in streams for batch in batches)
    # Streams end one by one; what is left when the first has ended is for no whole step.
    steps = [list(step) for step in zip(*streams, strict=False)]
    pure = np.mean([len({groups[i] for b in step for i in b}) == 1 for step in steps])
    batches = [batch for step in steps for batch in step]
    assert pure == 1
    text = (
        f"{useful(steps, lengths):.1%} useful, {padding(batches, lengths):.1%} padding, "
        f"{pure:.0%} of steps pure; {1 - num_returned / NUM_SAMPLES:.1%} dropped at the end"
    )
    entries.append(Count(MODALITIES, f"in a run, window {window}", text, "100 % pure"))


@pytest.fixture(scope="module")
def modality_texts(folder: Path) -> Path:
    """As many samples, and a length index with what each has."""
    root = folder / "modality_texts"
    write_texts(root, num_samples=NUM_SAMPLES, num_shards=8, mean_bytes=20)
    factory = load_factory(root)
    is_image, lengths = modality_lengths()
    stored = {"tokens": lengths, "images": is_image.astype(np.int64)}
    write_lengths(root, factory.split_part, "index", stored, factory.data)
    return root


@needs_data
@pytest.mark.parametrize(("window", "goal"), [(1, None), (8, 0.89), (16, None), (64, 0.98)])
def test_useful_share_of_planned_modality_batches(
    modality_texts: Path, entries: list[Entry], window: int, goal: float | None
) -> None:
    """The whole plan, without reading a sample."""
    is_image, lengths = modality_lengths()
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=NUM_RANKS)
    factory = load_factory(
        modality_texts, training=True, worker_config=config, max_samples_per_sequence=1
    )
    source = factory.build()
    measured = MeasureDataset(source, UserFunction(len, name="sample_length"))
    split = ModalitySplit("modality", window=window, lengths="index", end="drop")
    dataset = PlannedBatches(measured, split, STEP_SIZE // NUM_RANKS)
    streams = []
    for rank in range(NUM_RANKS):
        stream = Stream(rank, NUM_RANKS)
        with context_of(StreamContext(stream)):
            streams.append(
                [
                    window.units.indices[units].tolist()
                    for window in dataset.windows(stream)
                    for units in window.packs
                ]
            )
    steps = [list(step) for step in zip(*streams, strict=True)]
    batches = [batch for step in steps for batch in step]
    pure = np.mean([len({bool(is_image[i]) for b in step for i in b}) == 1 for step in steps])
    share = useful(steps, lengths)
    assert pure == 1
    assert share >= (goal or 0)
    omitted = 1 - len({i for batch in batches for i in batch}) / NUM_SAMPLES
    text = (
        f"{share:.1%} useful, {padding(batches, lengths):.1%} padding, {pure:.0%} of steps pure; "
        f"{omitted:.1%} dropped at the end"
    )
    wanted = f"≥ {goal:.0%} useful, 100 % pure" if goal else ""
    entries.append(Count(MODALITIES, f"in a run, planned, window {window}", text, wanted))


def test_planning(benchmark: Any, entries: list[Entry]) -> None:
    random = np.random.Generator(np.random.Philox(4))
    lengths = np.clip(np.rint(random.lognormal(np.log(400), 1.0, NUM_MANY)), 1, 4096).astype(int)
    is_image = random.random(NUM_MANY) < 0.9
    place = {"rank": 0, "world_size": NUM_RANKS}
    samplers = {
        "budget": TokenBudgetBatchSampler(lengths, max_tokens=BUDGET, **place),
        "modality": SplitModalityBatchSampler(lengths, STEP_SIZE, groups=is_image, **place),
    }
    as_list, images = lengths.tolist(), is_image.tolist()

    def plan(name: str) -> int:
        samplers[name].set_epoch(samplers[name].epoch + 1)
        return len(samplers[name])

    def iterate(name: str) -> None:
        num_planned = plan(name)
        assert sum(1 for _ in samplers[name]) == num_planned

    found = in_turn(
        benchmark,
        {
            "budget": lambda: plan("budget"),
            "budget, iterated": lambda: iterate("budget"),
            "read ahead": lambda: read_ahead(as_list, 10_000, BUDGET, 0),
            "modality": lambda: plan("modality"),
            "modality, iterated": lambda: iterate("modality"),
            "sums": lambda: split_by_sums(images, as_list),
        },
        rounds=3,
    )
    group = f"An epoch of padded batches from {NUM_MANY:,} lengths, rank 0 of {NUM_RANKS}"
    for title, key, reference, theirs, goal in (
        (f"budget of {BUDGET:,} tokens, window 10,000", "budget", INFINIBATCH, "read ahead", 0.5),
        (f"modality, global batch {STEP_SIZE}, window 64", "modality", PRISMATIC, "sums", 0.25),
    ):
        for what, name in (("planned", key), ("planned and iterated", f"{key}, iterated")):
            entries.append(
                Figure(
                    group, f"{title}: {what}", "ms", found[name], reference, found[theirs],
                    goal_ratio=goal,
                )
            )  # fmt: skip


class Lines(SavableDataset[int]):
    """Numbers of lines in any order, without anything to read."""

    training, endless = True, False

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def cursor(self, stream: Any) -> Cursor[int]:
        return LinesCursor(self.order[stream.index :: stream.num_streams])

    def config(self) -> dict[str, Any]:
        return {"stage": "lines"}

    def restore_sample(self, restore_key: Any) -> int:
        return int(restore_key[2])

    def num_items(self, stream: Any) -> int:
        return len(self.order[stream.index :: stream.num_streams])

    def sources(self) -> list[SourceFacts]:
        return [SourceFacts("lines", len(self.order))]


class LinesCursor(Cursor[int]):
    def __init__(self, order: list[int]) -> None:
        self.order, self.place = order, 0

    def __next__(self) -> int:
        if self.place == len(self.order):
            raise StopIteration
        number = self.order[self.place]
        self.key = ("lines", 0, number, self.place)
        self.place += 1
        return number

    def snapshot(self) -> Snapshot:
        return Snapshot("lines", {"place": self.place})

    def restore(self, snapshot: Snapshot) -> None:
        self.place = snapshot.count("place")


@stateless
def listed(samples: list[Any]) -> list[Any]:
    return samples


@needs_data
@pytest.mark.parametrize(
    ("name", "buckets", "batch_size", "goal"),
    [
        ("16,384 tokens, window 1,000", Buckets(max_tokens=BUDGET, window=1000), None, None),
        ("16,384 tokens, window 2,000", Buckets(max_tokens=BUDGET), None, None),
        ("16,384 tokens, window 5,000", Buckets(max_tokens=BUDGET, window=5000), None, None),
        ("16,384 tokens, window 10,000", Buckets(max_tokens=BUDGET, window=10_000), None, 0.032),
        ("32 samples, window 2,000", Buckets(), 32, None),
    ],
)
def test_padding_in_a_run(
    entries: list[Entry], name: str, buckets: Buckets, batch_size: int | None, goal: float | None
) -> None:
    lengths = wikitext_lengths()
    order = np.random.Generator(np.random.Philox(5)).permutation(NUM_LINES).tolist()
    dataset = BucketBatchDataset(
        Lines(order), buckets, listed, sample_length=lengths.tolist().__getitem__,
        batch_size=batch_size,
    )  # fmt: skip
    batches = list(dataset)
    assert sorted(i for batch in batches for i in batch) == list(range(NUM_LINES))
    areas, _ = areas_and_tokens(batches, lengths)
    share = padding(batches, lengths)
    assert buckets.max_tokens is None or areas.max() <= buckets.max_tokens
    assert share <= (goal or 1)
    wanted = f"≤ {goal:.1%} padding, no batch over the budget" if goal else ""
    over = f"; {(areas > BUDGET).sum()} of {len(batches):,} batches over the budget" if goal else ""
    entries.append(Count(IN_A_RUN, name, f"{share:.2%} padding{over}", wanted))


class Texts(DefaultTaskEncoder):
    """Texts that have the lengths of a list, by number; batches are lists of keys."""

    def __init__(self, lengths: list[int], buckets: Buckets | None) -> None:
        super().__init__()
        self.lengths, self.batching = lengths, buckets

    def sample_length(self, sample: Any) -> int:
        return self.lengths[int(sample.__key__)]

    @stateless
    def batch(self, samples: list[Any]) -> dict[str, Any]:
        return {"keys": [sample.__key__ for sample in samples]}


def running(root: Path, encoder: Texts, batch_size: int | None) -> Any:
    """A loader in the middle of its run."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(
        root, batch_size=batch_size, shuffle_buffer_size=1000, task_encoder=encoder,
        worker_config=config,
    )  # fmt: skip
    iterator = iter(get_savable_loader(dataset))
    next(iterator)
    return iterator


@needs_data
def test_cost_of_like_lengths(benchmark: Any, entries: list[Entry], tmp_path: Path) -> None:
    root = tmp_path / "texts"
    write_texts(root, num_samples=20_000, num_shards=4, mean_bytes=400)
    lengths = wikitext_lengths()[:20_000].tolist()
    settings = {
        f"{BUDGET:,} tokens, window 2,000": (Buckets(max_tokens=BUDGET), None),
        f"{BUDGET:,} tokens, window 10,000": (Buckets(max_tokens=BUDGET, window=10_000), None),
        "157 samples, window 2,000": (Buckets(), 157),
        "as they come": (None, 157),
        "32 samples, window 2,000": (Buckets(), 32),
        "32 as they come": (None, 32),
    }
    loaders = {
        name: running(root, Texts(lengths, buckets), size)
        for name, (buckets, size) in settings.items()
    }

    def taking(name: str) -> int:
        batches = 500 if name.startswith("32") else 100
        return sum(len(batch["keys"]) for batch in islice(loaders[name], batches))

    counts = {name: [taking(name)] for name in loaders}  # nothing that is done once is measured
    for taken in counts.values():
        taken.clear()
    found = in_turn(
        benchmark,
        {name: lambda name=name: counts[name].append(taking(name)) for name in loaders},
        rounds=5,
    )
    per_sample = {
        name: [sec / num for sec, num in zip(times, counts[name][-len(times) :], strict=True)]
        for name, times in found.items()
    }
    for name in per_sample:
        if not name.endswith("as they come"):
            reference = "32 as they come" if name.startswith("32") else "as they come"
            entries.append(
                Figure(
                    STAGE, f"{name}, per sample", "µs", per_sample[name],
                    f"{settings[reference][1]} samples as they come", per_sample[reference],
                )
            )  # fmt: skip
    # Both read the same samples in the same order, shuffled by the same buffer; they call
    # `sample_length` on each and `batch` on as many in the mean: the rest is the choice by length.
    for name in ("2,000", "10,000"):
        pairs = zip(
            per_sample[f"{BUDGET:,} tokens, window {name}"], per_sample["as they come"], strict=True
        )
        above = [ours - plain for ours, plain in pairs]
        title = f"window {name}, above 157 samples as they come (same samples and hooks)"
        entries.append(Figure(STAGE, title, "µs", above, goal_sec=1e-6))
