"""Packing through the whole pipeline: what the laws of all lists do not see."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    FatalSampleError,
    PackedBatch,
    PackedSamplesOutput,
    Packing,
    TextSample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    sample_rng,
    stateless,
)
from energon_lite.core.keys import leaves

from ..helpers import assert_same, ignore, metadataset, number_of, text_set

NUM_SAMPLES = 60
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)


@pytest.fixture(scope="session")
def root(text_sets) -> Path:
    return text_sets(NUM_SAMPLES)


class Packs(DefaultTaskEncoder):
    """Samples whose lengths a list gives, by number; their tokens say which sample it is."""

    def __init__(self, lengths: Any = None, **packing: Any) -> None:
        super().__init__()
        self.lengths = lengths or [1 + (7 * i) % 13 for i in range(NUM_SAMPLES)]
        self.packing = Packing(**{"capacity": 16, "buffer_size": 8, **packing})

    def changed(self, sample: TextSample, encoded: dict[str, Any]) -> dict[str, Any]:
        return encoded

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        number = number_of(sample)
        encoded = {
            "__key__": sample.__key__,
            "__restore_key__": sample.__restore_key__,
            "__sources__": sample.__sources__,
            "input_ids": torch.full((self.lengths[number % len(self.lengths)],), number + 1),
        }
        return self.changed(sample, encoded)

    def sample_length(self, sample: dict[str, Any]) -> Any:
        return len(sample["input_ids"])


def training(root: Any, encoder: Any, config: WorkerConfig = ONE, **arguments: Any) -> Any:
    arguments = {"batch_size": 1, "shuffle_buffer_size": 16, **arguments}
    return get_train_dataset(root, worker_config=config, task_encoder=encoder, **arguments)


def one_pass(root: Path, encoder: Any, **arguments: Any) -> tuple[list[Any], Any]:
    """All batches of a pass over the data, and the loader that gave them."""
    dataset = training(root, encoder, repeat=False, **arguments)
    loader = get_savable_loader(dataset, max_skip_rate=1, watchdog_timeout_seconds=None)
    return list(loader), loader


def tokens_of(batches: list[PackedBatch]) -> Counter[int]:
    """How many tokens of each sample the batches have."""
    found: Counter[int] = Counter()
    for batch in batches:
        found.update((batch.input_ids[batch.segment_ids > 0] - 1).tolist())
    return found


FILE_ORDER = {"shuffle_buffer_size": 0, "shuffle_over_epochs_multiplier": None}


@pytest.mark.parametrize(("batch_size", "layout"), [(None, "padded"), (3, "padded"), (3, "thd")])
def test_service_fields_of_packs_have_an_entry_per_sample(root, batch_size, layout) -> None:
    class Tagged(Packs):
        def changed(self, sample: TextSample, encoded: dict[str, Any]) -> dict[str, Any]:
            return {**encoded, "__subflavors__": sample.__subflavors__}

    parts = [
        {"path": str(root), "name": name, "subflavors": {"of": name}, "subset": {"range": part}}
        for name, part in (("low", ["0%", "50%"]), ("high", ["50%", "100%"]))
    ]
    encoder = Tagged(layout=layout, overlong="split", capacity=10)
    dataset = training(metadataset({"blend": parts}), encoder, batch_size=batch_size)
    for batch in islice(get_savable_loader(dataset), 12):
        keys = batch.__keys__ if batch_size is None else batch.__key__
        names = ["low" if int(key) < NUM_SAMPLES // 2 else "high" for key in keys]
        assert batch.source_names == names
        assert batch.__subflavors__ == [{"of": name} for name in names]
        found = [info.file_names[0].partition(".")[0] for (info,) in batch.__sources__]
        assert found == [str(key) for key in keys]


def test_dict_of_resources_limits_each(root) -> None:
    class Tiles(Packs):
        def sample_length(self, sample: Any) -> dict[str, int]:
            return {"tiles": int(sample["__key__"]) % 3, "tokens": len(sample["input_ids"])}

    batches, _ = one_pass(root, Tiles(capacity={"tokens": 40, "tiles": 3}, buffer_size=16))
    assert sum(tokens_of(batches).values()) == sum(Packs().lengths)
    assert max(sum(int(key) % 3 for key in batch.__key__) for batch in batches) == 3
    assert all(batch.cu_seqlens.max() <= 40 for batch in batches)


@pytest.mark.parametrize(("longest", "num_skipped"), [(16, 0), (17, NUM_SAMPLES // 2)])
def test_longest_sample_that_fits_when_aligned_is_not_overlong(root, longest, num_skipped) -> None:
    batches, loader = one_pass(root, Packs([longest, 12], capacity=19, align=8, overlong="drop"))
    assert loader.stats()["texts/train"].skipped == num_skipped
    assert len(tokens_of(batches)) == NUM_SAMPLES - num_skipped
    assert all(batch.input_ids.shape == (1, 19) for batch in batches)


class Pictures(Packs):
    """Samples of which each second one has a picture."""

    def changed(self, sample: TextSample, encoded: dict[str, Any]) -> dict[str, Any]:
        return {**encoded, "images": [torch.zeros(1, 2, 2)] * (number_of(sample) % 2)}


def test_sample_with_images_is_not_cut_without_the_users_word(root) -> None:
    with pytest.raises(FatalSampleError, match="has images; which belong to the tokens"):
        one_pass(root, Pictures([5, 40], overlong="truncate"))

    class Own(Pictures):
        def slice_sample(self, sample: Any, start: int, stop: int) -> Any:
            return {**sample, "input_ids": sample["input_ids"][start:stop], "images": []}

    batches, _ = one_pass(root, Own([40, 5], overlong="truncate"))
    assert sum(len(batch.images) for batch in batches) == NUM_SAMPLES // 2


def test_groups_share_no_packs(root, tmp_path) -> None:
    other = text_set(tmp_path / "other", 20)
    blend = metadataset({"blend": [{"path": str(root)}, {"path": str(other), "weight": 2}]})
    for group_by, mixed in ((None, True), ("source", False)):
        loader = get_savable_loader(training(blend, Packs(group_by=group_by)))
        found = [
            {leaf[0] for leaf in leaves(batch.__restore_key__)} for batch in islice(loader, 100)
        ]
        assert any(len(sources) == 2 for sources in found) == mixed
        assert len(set().union(*found)) == 2
    batches, _ = one_pass(root, Pictures(group_by="modality"))
    assert {len(batch.images) for batch in batches} > {0}
    assert all(len(batch.images) in (0, len(batch.__key__)) for batch in batches)


def test_blend_of_tokens_counts_what_comes_into_packs(root, tmp_path) -> None:
    other = text_set(tmp_path / "other", 50)
    entries = [{"path": str(root), "name": "long"}, {"path": str(other)}]
    blend = metadataset({"unit": "tokens", "blend": entries})

    class Mixed(Packs):
        def changed(self, sample: TextSample, encoded: dict[str, Any]) -> dict[str, Any]:
            is_long = sample.__restore_key__[0] == "long" and number_of(sample) % 2
            ids = torch.ones(100, dtype=torch.int64)
            return {**encoded, "input_ids": ids} if is_long else encoded

    for overlong in ("drop", "split"):
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


@pytest.mark.parametrize("settings", [{"drop_last": True}, {"end_of_data": "drop"}])
def test_rest_at_the_end_is_dropped_and_counted(root, settings) -> None:
    batches, loader = one_pass(root, Packs([9] if "drop_last" in settings else None, **settings))
    stats = loader.stats()["texts/train"]
    assert len(tokens_of(batches)) == stats.samples == NUM_SAMPLES - stats.skipped
    assert 0 < stats.skipped < (2 if "drop_last" in settings else 16)
    assert stats.draws == NUM_SAMPLES


def test_heavy_part_is_done_for_samples_in_a_pack_only(root) -> None:
    calls: list[str] = []

    class Heavy(Packs):
        @stateless
        def postencode_sample(self, sample: Any) -> Any:
            calls.append(sample["__key__"])
            return sample

    batches = list(islice(get_savable_loader(training(root, Heavy(buffer_size=30))), 4))
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


class Chosen(DefaultTaskEncoder):
    """Packs chosen by a function, of samples without a place for keys."""

    def __init__(self, select: Any) -> None:
        super().__init__()
        self.select_samples_to_pack = select  # type: ignore[method-assign]

    @stateless
    def encode_sample(self, sample: TextSample) -> dict[str, Any]:
        return {"number": number_of(sample)}

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> dict[str, Any]:
        return {"numbers": [sample["number"] for sample in samples], "__restore_key__": ()}


def pairs(samples: list[Any]) -> Any:
    return [samples[i : i + 2] for i in range(0, len(samples), 2)]


def test_buffer_is_refilled_by_what_left_before_the_next_choice(root) -> None:
    dataset = training(root, Chosen(pairs), batch_size=None, packing_buffer_size=6, **FILE_ORDER)
    found = [pack["numbers"] for pack in islice(get_savable_loader(dataset), 6)]
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_samples_that_the_function_leaves_out_are_counted(root) -> None:
    def picky(samples: list[Any]) -> Any:
        return [[s] for s in samples if s["number"] % 20 == 0]

    packs, loader = one_pass(root, Chosen(picky), batch_size=None, packing_buffer_size=4)
    assert sorted(number for pack in packs for number in pack["numbers"]) == [0, 20, 40]
    stats = loader.stats()["texts/train"]
    assert (stats.samples, stats.skipped) == (3, NUM_SAMPLES - 3)


def test_samples_that_are_pushed_back_at_the_end_are_dropped_and_counted(root) -> None:
    def select(samples: list[Any]) -> Any:
        return pairs(samples) if len(samples) == 7 else PackedSamplesOutput([], samples)

    _, loader = one_pass(root, Chosen(select), batch_size=None, packing_buffer_size=7)
    stats = loader.stats()["texts/train"]
    assert (stats.samples, stats.skipped) == (56, 4)


class Popping(DefaultTaskEncoder):
    """Hooks that empty the lists that they get."""

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"{sample.text} {sample_rng().random()}")

    def select_samples_to_pack(self, samples: list[TextSample]) -> Any:
        samples.sort(key=lambda sample: (len(sample.text), sample.__key__))
        packs = []
        while len(samples) > 3:
            packs.append([samples.pop(), samples.pop(0)])
            del samples[0]
        return packs

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> TextSample:
        packed = TextSample.derive_from(samples[0], text="|".join(s.text for s in samples))
        samples.reverse()
        samples.pop()
        return packed

    @stateless
    def batch(self, samples: list[TextSample]) -> Any:
        texts = []
        while samples:
            texts.append(samples.pop().text)
        return {"texts": texts}


def test_function_that_changes_its_list_packs_the_samples_that_it_names(root) -> None:
    packs, loader = one_pass(root, Popping(), packing_buffer_size=9)
    taken = [text.split()[1] for pack in packs for text in pack["texts"][0].split("|")]
    assert len(set(taken)) == len(taken) == NUM_SAMPLES - loader.num_skipped["texts/train"]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda samples: PackedSamplesOutput([], samples),
            "pushed all 4 samples of a full buffer back",
        ),
        (lambda samples: [samples, samples], "returned it twice"),
        (lambda samples: [[object()]], "returned it but did not get it"),
        (lambda samples: samples, "return a list of lists of samples"),
    ],
)
def test_function_that_cannot_be_followed_is_an_error(root, function, text) -> None:
    with pytest.raises(FatalSampleError, match=text):
        one_pass(root, Chosen(function), batch_size=None, packing_buffer_size=4)


def test_buffer_size_of_the_pipeline_goes_before_that_of_the_packing(root) -> None:
    configs = [training(root, Packs(), packing_buffer_size=size).config() for size in (None, 33)]
    assert "'packing_buffer_size': 8" in str(configs[0])
    assert "'packing_buffer_size': 33" in str(configs[1])


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
    assert one_pass(root, Kinds())[0][0].loss_weights.max() == 1
