"""Statistics count what the batches contain, whatever buffers, ranks and workers are between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    Buckets,
    DefaultTaskEncoder,
    ModalitySplit,
    Packing,
    Sample,
    SkipSample,
    TextSample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    stateless,
)
from energon_lite.balance import CostModel
from energon_lite.core.keys import leaves
from energon_lite.extras.lengths.length_index import measure_lengths

from ..helpers import Ranks, blend_maker, number_of, text_set

SIZES = {"a": 61, "b": 23, "c": 9}
BLEND = "blend: [{path: a, weight: 2}, {path: b}, {path: c}]"
CAPACITY = 40
BALANCED = {"balance": "quantile_sync", "balance_window": 4}
COST = CostModel(token=1, token_squared=0.01)


def length_of(number: int) -> int:
    """Some of the lengths are above the capacity of a pack."""
    return 3 + 7 * number % 23 + (57 if number % 8 == 5 else 0)


@edataclass
class Tokens(Sample):
    input_ids: torch.Tensor


class Measured(DefaultTaskEncoder):
    def sample_length(self, sample: Any) -> int:
        return length_of(number_of(sample))

    @stateless
    def encode_sample(self, sample: TextSample) -> Any:
        return sample


class Expanding(Measured):
    """Makes 0..2 samples of each."""

    @stateless
    def encode_sample(self, sample: TextSample) -> Iterator[TextSample]:
        for _ in range(number_of(sample) % 3):
            yield sample


class FailingInTheMiddle(Measured):
    """Makes a sample of each; fails at a second one of every fifth."""

    @stateless
    def encode_sample(self, sample: TextSample) -> Iterator[TextSample]:
        yield sample
        if number_of(sample) % 5 == 2:
            raise ValueError("no second one")


class Skipping(Measured):
    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        if number_of(sample) % 5 == 2:
            raise SkipSample
        return sample


class Grouping(Measured):
    @stateless
    def batch_group_criterion(self, sample: TextSample) -> tuple[int, None]:
        return number_of(sample) % 3, None


class Bucketed(Measured):
    batching = Buckets(max_tokens=150, window=20)


class ByModality(Measured):
    batching = ModalitySplit("source", window=3)


class Selecting(Measured):
    """Packs two samples each, and drops a sample of each buffer."""

    @stateless
    def select_samples_to_pack(self, samples: list[TextSample]) -> list[list[TextSample]]:
        return [samples[i : i + 2] for i in range(0, len(samples) - 1, 2)]

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> TextSample:
        return TextSample.derive_from(samples[0], text="")


class SkippingBatches(Grouping):
    @stateless
    def encode_batch(self, batch: Any) -> Any:
        if sum(map(int, batch.__key__)) % 3 == 1:
            raise SkipSample
        return batch


class ExpandingBatches(Measured):
    """Makes 0..2 batches of each."""

    @stateless
    def encode_batch(self, batch: Any) -> Iterator[Any]:
        for _ in range(int(batch.__key__[0]) % 3):
            yield batch


def packs(**settings: Any) -> type[Measured]:
    class Packed(Measured):
        packing = Packing(**{"capacity": CAPACITY, "buffer_size": 16, **settings})

        @stateless
        def encode_sample(self, sample: TextSample) -> Any:
            tokens = torch.ones(length_of(number_of(sample)), dtype=torch.int64)
            return Tokens.derive_from(sample, input_ids=tokens)

    return Packed


class HalfFailing(packs(overlong="split")):  # type: ignore[misc]
    """Samples that fail once they are chosen are missing in their packs."""

    @stateless
    def postencode_sample(self, sample: Any) -> Any:
        if number_of(sample) % 4 == 1:
            raise ValueError("cannot be encoded")
        return sample


PIPELINES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "batches": (Measured, BLEND, {}),
    "samples": (Measured, BLEND, {"batch_size": None}),
    "shuffle": (Skipping, BLEND, {"shuffle_buffer_size": 10}),
    "groups": (Grouping, BLEND, {}),
    "skipped batches": (SkippingBatches, BLEND, {}),
    "expanded": (Expanding, BLEND, {"shuffle_buffer_size": 10}),
    "expanded batches": (ExpandingBatches, BLEND, {}),
    "failing in the middle": (FailingInTheMiddle, BLEND, {}),
    "buckets": (Bucketed, BLEND, {}),
    "modality": (ByModality, BLEND, {}),
    "modality, planned": (
        type("Planned", (Measured,), {"batching": ModalitySplit("source", lengths="index")}),
        BLEND,
        {},
    ),
    "selected": (Selecting, BLEND, {"packing_buffer_size": 9}),
    "split": (packs(overlong="split"), BLEND, {}),
    "cut": (packs(overlong="truncate", algorithm="streaming"), BLEND, {}),
    "dropped": (packs(overlong="drop", layout="thd"), BLEND, {}),
    "alone": (packs(overlong="alone", group_by="source"), BLEND, {}),
    "balanced": (packs(overlong="truncate", cost=COST, **BALANCED), BLEND, {}),
    "planned": (packs(overlong="split", lengths="index"), BLEND, {}),
    "planned together": (
        packs(overlong="drop", lengths="index", balance="global_window", cost=COST), BLEND, {},
    ),
    "failing in packs": (HalfFailing, BLEND, {}),
    "blend of tokens": (packs(overlong="split"), f"unit: tokens\n{BLEND}", {}),
    "blend of stored tokens": (
        DefaultTaskEncoder, f"unit: tokens\nlengths: index\n{BLEND}", {"shuffle_buffer_size": 10},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("contents")
    for name, size in SIZES.items():
        measure_lengths(text_set(root / name, size), Measured(), name="index", num_workers=0)
    return root


def maker(sets: Path, kind: str, **settings: Any) -> Any:
    encoder, split, own = PIPELINES[kind]
    return blend_maker(sets, split, encoder, **{"batch_size": 3, **own, **settings})


def samples_in(key: Any) -> Iterator[tuple[str, int, bool]]:
    """Source and tokens of each entry of a restore key, and whether it begins its sample."""
    if key[0] == "encode_batch" and key[1] > 0:
        return  # the first of the batches has all samples
    if key[0] in ("batch", "pack", "encode_batch"):
        for entry in key[1:]:
            yield from samples_in(entry) if isinstance(entry, tuple) else ()
        return
    ((source, _, index, _),) = leaves(key)
    tokens = key[2] - key[1] if key[0] == "piece" else length_of(index)
    yield source, tokens, key[0] == source or (key[1] == 0 and key[0] != "repeated")


def contents(keys: Iterable[Any]) -> dict[str, Counter[str]]:
    found = {f"{name}/train": Counter[str](samples=0, tokens=0) for name in SIZES}
    for key in keys:
        for source, tokens, is_first in samples_in(key):
            found[source].update(samples=int(is_first), tokens=tokens)
    return found


def counted(loaders: Any) -> dict[str, Counter[str]]:
    first, *others = (loader.stats() for loader in loaders)
    merged = first.merged(others)
    for name, s in merged.items():
        assert s.epochs == pytest.approx((s.draws - s.read_ahead) / SIZES[name[0]])
    share = f"{merged.unit}"
    total = sum(getattr(s, share) for s in merged.values())
    for s in merged.values():
        assert s.actual_share == pytest.approx(getattr(s, share) / max(1, total))
    return {name: Counter(samples=s.samples, tokens=s.tokens) for name, s in merged.items()}


def key_of(batch: Any) -> Any:
    return batch["__restore_key__"] if isinstance(batch, dict) else batch.__restore_key__


@pytest.mark.parametrize("kind", PIPELINES)
def test_counts_are_the_contents_of_the_batches(sets: Path, kind: str) -> None:
    """On one and several ranks, and across two resumes on other ranks."""
    keys: list[Any] = []
    run = Ranks(maker(sets, kind), 2, num_streams=4)
    for world_size, steps in ((2, 4), (1, 8), (4, 3)):
        if keys:
            run = Ranks(maker(sets, kind), world_size, states=run.save())
        for batch in run.steps(steps).values():
            keys.append(key_of(batch))
            if hasattr(batch, "cu_seqlens"):
                (found,) = [contents(keys[-1:])]
                tokens = sum(counts["tokens"] for counts in found.values())
                assert tokens == batch.cu_seqlens[:, -1].sum()
        assert counted(run.loaders) == contents(keys)
    assert sum(counts["samples"] for counts in contents(keys).values()) > 20


@pytest.mark.parametrize("kind", ["batches", "expanded", "split"])
def test_restored_state_is_the_saved_state(sets: Path, kind: str) -> None:
    """With counts and targets, also of ranks that resumed the states of others."""
    two = Ranks(maker(sets, kind), 2, num_streams=12)
    two.steps(3)
    three = Ranks(maker(sets, kind), 3, states=two.save())
    three.steps(3)
    states = three.save()
    again = Ranks(maker(sets, kind), 3, states=states)
    assert again.save() == states
    for old, new in zip(three.loaders, again.loaders, strict=True):
        assert new.stats().target == pytest.approx(old.stats().target, abs=1e-5)


@pytest.mark.parametrize("kind", PIPELINES)
def test_nothing_is_read_ahead_at_the_end_of_a_pass(sets: Path, kind: str) -> None:
    encoder, split, settings = PIPELINES[kind]
    split = split.replace("blend:", "blend_epochized:").replace(", weight: 2", "")
    split = split.replace("unit: tokens\n", "").replace("lengths: index\n", "")
    if "modality" in kind:
        encoder = type("Shares", (encoder,), {"batching": ModalitySplit(
            "source", shares={"a/train": 4, "b/train": 2, "c/train": 1}, window=3,
            max_surplus=0.9,
        )})  # fmt: skip
    settings = {
        "batch_size": 3,
        **settings,
        "repeat": False,
        "batch_drop_last": "alone" not in kind,
    }
    loader = get_savable_loader(
        blend_maker(sets, split, encoder, **settings)(
            WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
        ),
        max_skip_rate=1,
    )
    keys = [key_of(batch) for batch in loader]
    stats = loader.stats()
    found = {name: Counter(samples=s.samples, tokens=s.tokens) for name, s in stats.items()}
    expected = contents(keys)
    if encoder is DefaultTaskEncoder:  # it measures nothing where there is no blend
        expected = {name: Counter({**own, "tokens": 0}) for name, own in expected.items()}
    assert found == expected
    assert {name: s.read_ahead for name, s in stats.items()} == dict.fromkeys(stats, 0)
    assert {name: s.draws for name, s in stats.items()} == {
        f"{name}/train": size for name, size in SIZES.items()
    }
    assert {name: s.epochs for name, s in stats.items()} == dict.fromkeys(stats, 1.0)
