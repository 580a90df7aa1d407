"""Packing through the whole pipeline: nothing lost, nothing overfull, resumed bit by bit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    FatalSampleError,
    PackedBatch,
    PackedSample,
    PackedSamplesOutput,
    Packing,
    SavableDataset,
    SkipSample,
    TextSample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    sample_rng,
    stateless,
)
from energon_lite.balance import CostModel, imbalance
from energon_lite.core.keys import leaves

from ..helpers import (
    Ranks,
    assert_same,
    ignore,
    metadataset,
    number_of,
    text_set,
)

NUM_SAMPLES = 60
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("packing") / "texts", NUM_SAMPLES)


class Settings(DefaultTaskEncoder):
    """Has settings of packing, and lengths of samples by number."""

    def __init__(self, lengths: Any = None, **packing: Any) -> None:
        super().__init__()
        self.lengths = lengths or [1 + (7 * i) % 13 for i in range(NUM_SAMPLES)]
        self.packing = Packing(**{"capacity": 16, "buffer_size": 8, **packing})


class Packs(Settings):
    """Samples whose lengths a list gives, by number; their tokens say which sample it is."""

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        number = number_of(sample)
        length = self.lengths[number % len(self.lengths)]
        return {
            "__key__": sample.__key__,
            "__restore_key__": sample.__restore_key__,
            "__sources__": sample.__sources__,
            "input_ids": torch.full((length,), number + 1),
        }

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])


def training(root: Path, encoder: Any, config: WorkerConfig = ONE, **arguments: Any) -> Any:
    arguments = {"batch_size": 1, "shuffle_buffer_size": 16, **arguments}
    return get_train_dataset(root, worker_config=config, task_encoder=encoder, **arguments)


def one_pass(root: Path, encoder: Any, **arguments: Any) -> tuple[list[Any], Any]:
    """All batches of a pass over the data, and the loader that gave them."""
    loader = get_savable_loader(
        training(root, encoder, repeat=False, **arguments),
        max_skip_rate=1,
        watchdog_timeout_seconds=None,
    )
    return list(loader), loader


def tokens_of(batches: list[PackedBatch]) -> Counter[int]:
    """How many tokens of each sample the batches have."""
    found: Counter[int] = Counter()
    for batch in batches:
        found.update((batch.input_ids[batch.segment_ids > 0] - 1).tolist())
    return found


# --------------------------------------------------------------------------------- conservation


def test_packs_are_full_from_the_first_to_the_last_without_half_empty_ones(root) -> None:
    loader = get_savable_loader(training(root, Packs(capacity=64, buffer_size=32)))
    fills = [batch.efficiency for batch in islice(loader, 300)]
    assert sum(fills) / len(fills) > 0.995
    assert min(fills) > 0.9


@pytest.mark.parametrize("algorithm", ["streaming", "best", "first_fit"])
def test_order_of_packs_does_not_go_by_length(root, algorithm) -> None:
    encoder = Packs(capacity=64, buffer_size=40, algorithm=algorithm)
    batches = list(islice(get_savable_loader(training(root, encoder)), 400))
    means = torch.tensor([64 * b.efficiency / len(b.__key__) for b in batches])
    means -= means.mean()
    correlation = (means[1:] * means[:-1]).mean() / means.var(correction=0)
    assert abs(correlation) < (0.15 if algorithm == "streaming" else 0.4)


def test_sequential_keeps_the_order_of_the_samples(root) -> None:
    batches, _ = one_pass(
        root,
        Packs(algorithm="sequential"),
        shuffle_buffer_size=0,
        shuffle_over_epochs_multiplier=None,
    )
    assert [int(key) for batch in batches for key in batch.__key__] == list(range(NUM_SAMPLES))


def test_dict_of_resources_limits_each(root) -> None:
    class Tiles(Packs):
        def sample_length(self, sample: Any) -> dict[str, int]:
            return {"tiles": int(sample["__key__"]) % 3, "tokens": len(sample["input_ids"])}

    batches, _ = one_pass(root, Tiles(capacity={"tokens": 40, "tiles": 3}, buffer_size=16))
    assert sum(tokens_of(batches).values()) == sum(Packs().lengths)
    tiles = [sum(int(key) % 3 for key in batch.__key__) for batch in batches]
    assert max(tiles) == 3
    assert all(batch.cu_seqlens.max() <= 40 for batch in batches)


# -------------------------------------------------------------------------- samples that are long


LONG = [5, 40, 3, 17, 8]


def test_longest_sample_that_fits_when_aligned_is_not_overlong(root) -> None:
    batches, loader = one_pass(root, Packs([16, 12], capacity=19, align=8, overlong="drop"))
    assert loader.stats()["texts/train"].skipped == 0
    assert len(tokens_of(batches)) == NUM_SAMPLES
    assert all(batch.input_ids.shape == (1, 19) for batch in batches)
    _, loader = one_pass(root, Packs([17, 12], capacity=19, align=8, overlong="drop"))
    assert loader.stats()["texts/train"].skipped == NUM_SAMPLES // 2


def test_pieces_of_a_split_sample_are_consecutive_and_whole(root) -> None:
    class Counting(Packs):
        @stateless
        def encode_sample(self, sample: TextSample) -> dict[str, Any]:
            encoded = super().encode_sample(sample)
            encoded["input_ids"] = torch.arange(37) + 100 * number_of(sample)
            return encoded

    batches, _ = one_pass(root, Counting(overlong="split"))
    found = torch.cat([batch.input_ids[batch.segment_ids > 0] for batch in batches])
    expected = torch.cat([torch.arange(37) + 100 * i for i in range(NUM_SAMPLES)])
    assert found.sort().values.tolist() == expected.tolist()


def test_sample_with_images_is_not_cut_without_the_users_word(root) -> None:
    class Pictures(Packs):
        @stateless
        def encode_sample(self, sample: TextSample) -> dict[str, Any]:
            return {**super().encode_sample(sample), "images": [torch.zeros(1, 2, 2)]}

    with pytest.raises(FatalSampleError, match="has images; which belong to the tokens"):
        one_pass(root, Pictures(LONG, overlong="truncate"))

    class Own(Pictures):
        def slice_sample(self, sample: Any, start: int, stop: int) -> Any:
            return {**sample, "input_ids": sample["input_ids"][start:stop], "images": []}

    batches, _ = one_pass(root, Own(LONG, overlong="truncate"))
    assert sum(len(batch.images) for batch in batches) == NUM_SAMPLES * 3 // 5


# -------------------------------------------------------------------------------------- groups


def test_sources_share_no_packs_with_group_by_source(root, tmp_path) -> None:
    other = text_set(tmp_path / "other", 20)
    blend = metadataset({"blend": [{"path": str(root)}, {"path": str(other), "weight": 2}]})
    for group_by, mixed in ((None, True), ("source", False)):
        loader = get_savable_loader(training(blend, Packs(group_by=group_by)))
        found = [
            {leaf[0] for leaf in leaves(batch.__restore_key__)} for batch in islice(loader, 100)
        ]
        assert any(len(sources) == 2 for sources in found) == mixed
        assert len(set().union(*found)) == 2


def test_blend_of_tokens_counts_what_comes_into_packs(root, tmp_path) -> None:
    other = text_set(tmp_path / "other", 50)
    blend = metadataset(
        {
            "unit": "tokens",
            "blend": [{"path": str(root), "name": "long"}, {"path": str(other)}],
        }
    )

    class Mixed(Packs):
        @stateless
        def encode_sample(self, sample: TextSample) -> dict[str, Any]:
            encoded = super().encode_sample(sample)
            if sample.__restore_key__[0] == "long" and number_of(sample) % 2:
                encoded["input_ids"] = torch.ones(100, dtype=torch.int64)
            return encoded

    for overlong in ("drop", "truncate", "split"):
        loader = get_savable_loader(training(blend, Mixed(overlong=overlong)), max_skip_rate=1)
        found: Counter[str] = Counter()
        for batch in islice(loader, 500):
            lengths = batch.cu_seqlens.diff()[0]
            for key, length in zip(members_of(batch), lengths[lengths > 0].tolist(), strict=True):
                found[next(leaves(key))[0]] += length
        assert found["long"] == pytest.approx(sum(found.values()) / 2, rel=0.04)
        for name, stats in loader.stats().items():
            assert stats.tokens == pytest.approx(found[name], rel=0.06)


def members_of(batch: PackedBatch) -> list[Any]:
    """The keys of the samples in the packs of a batch."""
    return [key for pack in batch.__restore_key__[2:] for key in pack[2:]]


def test_modalities_share_no_packs_with_group_by_modality(root) -> None:
    class Some(Packs):
        @stateless
        def encode_sample(self, sample: TextSample) -> dict[str, Any]:
            encoded = super().encode_sample(sample)
            if number_of(sample) % 2:
                encoded["image"] = torch.zeros(3, 2, 2)
            return encoded

    batches, _ = one_pass(root, Some(group_by="modality"))
    assert {len(b.images) for b in batches} > {0}
    for batch in batches:
        assert len(batch.images) in (0, len(batch.__key__))


# ------------------------------------------------------------------------------ end of the data


def test_last_pack_is_dropped_and_counted_with_drop_last(root) -> None:
    batches, _ = one_pass(root, Packs([9]))
    dropped, loader = one_pass(root, Packs([9], drop_last=True))
    assert len(dropped) == len(batches) - 1 == NUM_SAMPLES - 1
    stats = loader.stats()["texts/train"]
    assert (stats.samples, stats.skipped, stats.draws) == (NUM_SAMPLES - 1, 1, NUM_SAMPLES)


def test_buffered_samples_are_dropped_and_counted_at_the_end_with_drop_last(root) -> None:
    batches, loader = one_pass(root, Packs(end_of_data="drop"))
    stats = loader.stats()["texts/train"]
    assert len(tokens_of(batches)) == stats.samples == NUM_SAMPLES - stats.skipped
    assert 0 < stats.skipped < 16


# -------------------------------------------------------------------------------------- resumes


class Noisy(Settings):
    """Skips, fails, expands nothing, and draws random numbers, before and after the choice."""

    @stateless
    def preencode_sample(self, sample: TextSample) -> Any:
        number = number_of(sample)
        if number % 11 == 4:
            raise SkipSample
        if number % 17 == 5:
            raise ValueError(f"cannot read {number}")
        return Light.derive_from(sample, tokens=1 + int(sample_rng().integers(13)))

    def sample_length(self, sample: Any) -> int:
        return int(sample.tokens)

    @stateless(restore_seeds=True)
    def postencode_sample(self, sample: Any) -> dict[str, Any]:
        if number_of(sample) % 19 == 7:
            raise ValueError("cannot load")
        return {
            "__key__": sample.__key__,
            "__restore_key__": sample.__restore_key__,
            "input_ids": torch.randint(100, (sample.tokens,)),
        }


@edataclass
class Light(TextSample):
    """What is known of a sample before its text is looked at."""

    text: str = ""
    tokens: int


class Chosen(DefaultTaskEncoder):
    """Packs chosen by a function."""

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"{sample.text} {sample_rng().random()}")

    def select_samples_to_pack(self, samples: list[TextSample]) -> Any:
        longest = sorted(samples, key=lambda sample: (len(sample.text), sample.__key__))
        packs = [longest[i : i + 3] for i in range(0, len(longest) - 3, 3)]
        return PackedSamplesOutput(packs, longest[len(packs) * 3 :])

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> TextSample:
        return TextSample.derive_from(samples[0], text="|".join(s.text for s in samples))


class Popping(Chosen):
    """Packs chosen by a function that empties the list that it gets."""

    def select_samples_to_pack(self, samples: list[TextSample]) -> Any:
        samples.sort(key=lambda sample: (len(sample.text), sample.__key__))
        packs = []
        while len(samples) > 3:
            packs.append([samples.pop(), samples.pop(0)])
            del samples[0]
        return packs

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> TextSample:
        packed = super().pack_selected_samples(samples)
        samples.reverse()
        samples.pop()
        return packed

    @stateless
    def batch(self, samples: list[TextSample]) -> Any:
        texts = []
        while samples:
            texts.append(samples.pop().text)
        return {"texts": texts}


def test_heavy_part_is_done_for_samples_in_a_pack_only(root) -> None:
    calls: list[str] = []

    class Heavy(Noisy):
        @stateless
        def preencode_sample(self, sample: TextSample) -> Any:
            return Light.derive_from(sample, tokens=8)

        @stateless
        def postencode_sample(self, sample: Any) -> dict[str, Any]:
            calls.append(sample.__key__)
            return {"__key__": sample.__key__, "input_ids": torch.ones(8, dtype=torch.int64)}

    loader = get_savable_loader(training(root, Heavy(buffer_size=30)))
    batches = list(islice(loader, 4))
    assert calls == [key for batch in batches for key in batch.__key__]


def test_sample_that_fails_after_the_choice_leaves_a_short_pack_and_is_counted(root) -> None:
    class Failing(Packs):
        @stateless
        def postencode_sample(self, sample: dict[str, Any]) -> dict[str, Any]:
            if int(sample["__key__"]) % 10 == 3:
                raise ValueError("broken")
            return sample

    batches, loader = one_pass(root, Failing())
    assert len(tokens_of(batches)) == NUM_SAMPLES - 6
    stats = loader.stats()["texts/train"]
    assert (stats.skipped, stats.samples) == (6, NUM_SAMPLES - 6)
    key = batches[3].__restore_key__
    assert_same(training(root, Failing(), repeat=False).restore_sample(key), batches[3])


# ------------------------------------------------------------------------- the user's own function


class Pairs(Chosen):
    def select_samples_to_pack(self, samples: list[TextSample]) -> Any:
        return [samples[i : i + 2] for i in range(0, len(samples), 2)]

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> dict[str, Any]:
        return {"keys": [number_of(s) for s in samples], "__restore_key__": ()}


def test_buffer_is_refilled_by_what_left_before_the_next_choice(root) -> None:
    dataset = training(
        root, Pairs(), batch_size=None, packing_buffer_size=6, shuffle_over_epochs_multiplier=None,
        shuffle_buffer_size=0,
    )  # fmt: skip
    loader = get_savable_loader(dataset)
    found = [pack["keys"] for pack in islice(loader, 6)]
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_function_may_get_samples_without_a_place_for_keys(root) -> None:
    class Dicts(Pairs):
        @stateless
        def encode_sample(self, sample: TextSample) -> Any:
            return {"number": number_of(sample)}

        @stateless
        def pack_selected_samples(self, samples: list[Any]) -> dict[str, Any]:
            return {"keys": [sample["number"] for sample in samples]}

    batches, _ = one_pass(root, Dicts(), batch_size=None, packing_buffer_size=9)
    assert sorted(key for pack in batches for key in pack["keys"]) == list(range(NUM_SAMPLES))


def test_end_of_data_with_a_half_full_buffer_yields_all_samples(root) -> None:
    for size in (1, 7, 32, 1000):
        batches, _ = one_pass(root, Pairs(), batch_size=None, packing_buffer_size=size)
        assert sorted(key for pack in batches for key in pack["keys"]) == list(range(NUM_SAMPLES))


def test_function_that_changes_its_list_packs_the_samples_that_it_names(root) -> None:
    packs, loader = one_pass(root, Popping(), batch_size=1, packing_buffer_size=9)
    found = [text for pack in packs for text in pack["texts"][0].split("|")]
    taken = [text.split()[1] for text in found]
    assert len(set(taken)) == len(taken) == NUM_SAMPLES - loader.num_skipped["texts/train"]


class Picky(Pairs):
    """Takes nothing of most buffers."""

    def select_samples_to_pack(self, samples: list[TextSample]) -> Any:
        return [[s] for s in samples if number_of(s) % 20 == 0]


def test_samples_that_the_function_leaves_out_are_counted(root) -> None:
    batches, loader = one_pass(root, Picky(), batch_size=None, packing_buffer_size=4)
    assert sorted(key for pack in batches for key in pack["keys"]) == [0, 20, 40]
    stats = loader.stats()["texts/train"]
    assert (stats.samples, stats.skipped) == (3, NUM_SAMPLES - 3)


def _all_back(samples: list[Any]) -> Any:
    return PackedSamplesOutput([], samples)


def _twice(samples: list[Any]) -> Any:
    return [samples, samples]


def _foreign(samples: list[Any]) -> Any:
    return [[object()]]


def _flat(samples: list[Any]) -> Any:
    return samples


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_all_back, "pushed all 4 samples of a full buffer back"),
        (_twice, "returned it twice"),
        (_foreign, "returned it but did not get it"),
        (_flat, "return a list of lists of samples"),
    ],
)
def test_function_that_cannot_be_followed_is_an_error(root, function, text) -> None:
    encoder = Pairs()
    encoder.select_samples_to_pack = function  # type: ignore[method-assign]
    type(encoder).select_samples_to_pack  # noqa: B018
    with pytest.raises(FatalSampleError, match=text):
        one_pass(root, encoder, batch_size=None, packing_buffer_size=4)


class Bare(DefaultTaskEncoder):
    """Says nothing of packing."""


class NoPacking(Packs):
    packing = 64

    def __init__(self) -> None:
        pass


class NoLength(DefaultTaskEncoder):
    packing = Packing(capacity=8)


class Both(Packs):
    def select_samples_to_pack(self, samples: list[Any]) -> Any:
        return [samples]


class Expanding(Packs):
    def postencode_sample(self, sample: Any) -> Any:
        yield sample


@pytest.mark.parametrize(
    ("encoder", "size", "text"),
    [
        (Bare, 8, r"Bare has no select_samples_to_pack. Give it one, or `packing = Packing"),
        (NoLength, None, r"NoLength has `packing`, but does not say how long a sample is"),
        (Both, None, "has both `packing` and select_samples_to_pack"),
        (Expanding, None, "is a generator, but works on samples that were chosen"),
        (Pairs, 0, "packing_buffer_size=0 must be at least 1"),
    ],
)
def test_pipeline_that_cannot_pack_is_refused_when_it_is_built(root, encoder, size, text) -> None:
    with pytest.raises(ValueError, match=text):
        training(root, encoder(), packing_buffer_size=size)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"capacity": 0}, "capacity=0 must be at least 1"),
        ({"capacity": {"tiles": 4}}, 'lacks an entry "tokens"'),
        ({"algorithm": "bfd"}, "algorithm='bfd' is not one of streaming, best"),
        ({"overlong": None}, "overlong=None is not one of error, drop"),
        ({"group_by": "length"}, "group_by='length' is not one of source, modality"),
        ({"buffer_size": 0}, "buffer_size=0 must be at least 1"),
        ({"max_samples": 0}, "max_samples=0 must be at least 1"),
        ({"align": 9}, "align=9 is above capacity=8"),
        ({"align": {"tiles": 2}}, "align names tiles"),
        ({"loss": "mean"}, "loss='mean' is not one of token, sample, sqrt"),
        ({"layout": "flat"}, "layout='flat' is not one of padded, thd"),
    ],
)
def test_packing_refuses_what_it_cannot_do(settings, text) -> None:
    with pytest.raises(ValueError, match=text):
        Packing(**{"capacity": 8, **settings})
    with pytest.raises(TypeError, match=r"capacity=8\.5 must be an integer"):
        Packing(capacity=8.5)  # type: ignore[arg-type]


def test_packing_of_another_type_is_refused(root) -> None:
    with pytest.raises(TypeError, match=r"NoPacking.packing=64; make it Packing\(capacity"):
        training(root, NoPacking())


def test_buffer_size_of_the_pipeline_goes_before_that_of_the_packing(root) -> None:
    configs = [training(root, Packs(), packing_buffer_size=size).config() for size in (None, 33)]
    assert "'packing_buffer_size': 8" in str(configs[0])
    assert "'packing_buffer_size': 33" in str(configs[1])


# ----------------------------------------------------------------------------------- loss weights


class Point(NamedTuple):
    input_ids: torch.Tensor


@dataclasses.dataclass
class Plain:
    input_ids: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    input_ids: torch.Tensor


@edataclass
class Encoded(TextSample):
    text: str = ""
    input_ids: torch.Tensor


@pytest.mark.parametrize("kind", ["dict", "plain", "sample", "slots", "tuple"])
def test_loss_weight_of_the_source_is_in_each_token_or_its_absence_is_an_error(root, kind) -> None:
    class Kinds(Packs):
        @stateless
        def encode_sample(self, sample: TextSample) -> Any:
            ids = torch.full((5,), number_of(sample))
            if kind == "dict":
                return {"input_ids": ids}
            if kind == "sample":
                return Encoded.derive_from(sample, input_ids=ids)
            return {"plain": Plain, "slots": Slotted, "tuple": Point}[kind](ids)

        def sample_length(self, sample: Any) -> int:
            return 5

    arguments = {"loss_weight": 0.25}
    if kind in ("slots", "tuple"):
        with pytest.raises(FatalSampleError, match=r"has no place for its source's loss weight"):
            one_pass(root, Kinds(), **arguments)
        return
    batches, _ = one_pass(root, Kinds(), **arguments)
    assert all(isinstance(batch, PackedBatch) for batch in batches)
    for batch in batches:
        inner = (batch.segment_ids > 0) & (batch.position_ids > 0)
        assert set(batch.loss_weights[inner].tolist()) == {0.25}
        assert not batch.loss_weights[~inner].any()
    unweighted, _ = one_pass(root, Kinds())
    assert unweighted[0].loss_weights.max() == 1


def test_single_packs_come_without_a_batch_size(root) -> None:
    packs, _ = one_pass(root, Packs(), batch_size=None)
    assert all(isinstance(pack, PackedSample) for pack in packs)
    assert sum(len(pack.__keys__) for pack in packs) == NUM_SAMPLES
    assert all(len(pack.__sources__) == len(pack.__keys__) for pack in packs)


@pytest.mark.parametrize("world_size", [1, 3])
def test_target_share_of_a_schedule_is_that_of_the_samples_drawn(
    root, tmp_path, world_size
) -> None:
    other = text_set(tmp_path / "other", 20)
    schedule = {"schedule": "linear", "points": {0: 0, 2000: 9}}
    blend = metadataset({"blend": [{"path": str(root), "weight": schedule}, {"path": str(other)}]})

    def make(config: WorkerConfig) -> SavableDataset[Any]:
        return training(blend, Packs(), config, batch_size=2)

    run = Ranks(make, world_size, num_streams=3)
    run.slots(12)  # the buffer fills: more draws than later
    again = Ranks(make, world_size, states=run.save())
    again.slots(168)
    stats = again.loaders[0].stats()
    for other_rank in again.loaders[1:]:
        stats = stats.merged([other_rank.stats()])
    assert 400 < sum(source.samples for source in stats.values()) < 2000
    # The draws of one rank stand for those of the others.
    tolerance = 0.003 if world_size == 1 else 0.02
    for source in stats.values():
        assert source.actual_share == pytest.approx(source.target_share, abs=tolerance)


# ------------------------------------------------------------------------------------ balance


COST = CostModel(token=1, token_squared=0.05)


def imbalance_of(root: Path, world_size: int, **packing: Any) -> float:
    """The mean over steps of 1 - mean / max of what the ranks' packs cost."""
    # One long sample costs far more than many short ones of as many tokens.
    lengths = [2 + (7 * i) % 11 for i in range(50)] + [90 + i for i in range(10)]

    def make(config: WorkerConfig) -> SavableDataset[Any]:
        return training(root, Packs(lengths, capacity=100, buffer_size=32, **packing), config)

    costs = []
    for batch in Ranks(make, world_size, num_streams=world_size).steps(256).values():
        own = batch.cu_seqlens.diff()[0]
        costs.append(COST.combine(int(own.sum()), int((own * own).sum())))
    return imbalance(np.array(costs).reshape(-1, world_size))


def test_balanced_packs_of_all_ranks_have_similar_costs_at_each_step(root) -> None:
    balance = {"balance": "quantile_sync", "balance_window": 32, "cost": COST}
    assert imbalance_of(root, 4) > 0.15
    assert imbalance_of(root, 4, **balance) < 0.06


def test_balance_wants_to_know_what_packs_cost() -> None:
    with pytest.raises(ValueError, match=r"orders packs by their cost; say what it is: cost="):
        Packing(8, balance="quantile_sync")
    with pytest.raises(ValueError, match="balance_window=0 must be at least 1"):
        Packing(8, balance="quantile_sync", balance_window=0, cost=COST)


# --------------------------------------------------------------------------------------- prices


def priced(root: Path) -> Any:
    """A pipeline of samples of which two leave much of a pack free and three seldom fit."""
    lengths = [100 + (37 * i) % 83 for i in range(NUM_SAMPLES)]

    def make(config: WorkerConfig) -> SavableDataset[Any]:
        return training(root, Packs(lengths, capacity=384, buffer_size=32), config)

    return make


def group_counts(states: list[dict[str, Any]]) -> list[list[int]]:
    """What the states have of each group of each stream; changes to it change the states."""
    found: list[list[int]] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            counts = value.get("counts")
            if isinstance(counts, dict) and "groups" in counts:
                found.extend(counts["groups"])
            for inner in value.values():
                look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    look(states)
    return found


def test_packs_at_prices_resume_on_any_topology(root) -> None:
    run = Ranks(priced(root), 2, num_streams=4)
    run.steps(60)
    states = run.save()
    counts = group_counts(states)
    assert len(counts) == 4
    assert all(price > 0 for *_, price in counts)
    wanted = run.slots(120)
    for world_size, arguments in ((1, {}), (3, {}), (1, {"num_workers": 2})):
        again = Ranks(priced(root), world_size, worker_type="thread", states=states, **arguments)
        assert_same(again.slots(120), wanted)
