"""Padded batches: how much of them is padding, against the samplers that are known for it.

The references are our own code, from descriptions of what theirs does.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.measure import REPO, Count, Entry, Figure, in_turn
from energon_lite.samplers import SplitModalityBatchSampler, TokenBudgetBatchSampler

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


def wikitext_lengths() -> Any:
    """Pieces of lines, modelled by their words as BERT's tokenizer has them; mean 100."""
    texts = [(DATA / "wikitext2" / name).read_text("utf-8") for name in ("valid.txt", "test.txt")]
    words = [len(line.split()) for text in texts for line in text.splitlines() if line.strip()]
    pieces = np.minimum(np.rint(1.157 * np.array(words) + 2), 512).astype(np.int64)
    return np.random.Generator(np.random.Philox(103)).choice(pieces, NUM_LINES)


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
        held = sorted(order[first : first + window], key=lengths.__getitem__, reverse=True)
        found, start = [], 0
        while start < len(held):
            size = max_tokens // lengths[held[start]] if max_tokens else batch_size
            found.append(held[start : start + max(1, size)])
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
    given = lengths[np.fromiter((i for batch in batches for i in batch), np.int64)]
    starts = np.cumsum(sizes) - sizes
    return np.maximum.reduceat(given, starts) * sizes, np.add.reduceat(given, starts)


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
        assert share <= goal
        text += f"; {(areas > BUDGET).sum()} of {len(ours):,} batches over it"
    wanted = f"≤ {goal:.1%} padding, no batch over the budget" if goal else ""
    entries.append(Count(LINES, name, text, wanted))


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
    batches, others = ([b for step in given for b in step] for given in (steps, theirs))
    text = (
        f"{share:.1%} useful, {padding(batches, lengths):.1%} padding, {pure:.0%} of steps pure; "
        f"prismatic's {useful(theirs, lengths):.1%}, {padding(others, lengths):.1%}"
    )
    wanted = f"≥ {goal:.0%} useful, 100 % pure" if goal else ""
    entries.append(Count(MODALITIES, f"window {window}", text, wanted))


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
