"""Builders that a task encoder overrides, and task encoders over others."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    AugmentTaskEncoder,
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    Cooker,
    DefaultTaskEncoder,
    EpochizeDataset,
    LogSampleDataset,
    MapDataset,
    MixBatchDataset,
    Packing,
    RepeatDataset,
    SavableDataset,
    ShuffleBufferDataset,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
    stateless,
)
from energon_lite.metadataset.loaded import DatasetBlendMode

from ..helpers import Ranks, assert_same, crude_set, ignore, keys_of, number_of, text_set

BLEND = "blend: [{weight: 3, path: a}, {weight: 1, path: b}]"
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `a` (12 texts), `b` (8 texts), `raw` (6 crude ones), and blends of them."""
    root = tmp_path_factory.mktemp("builders")
    text_set(root / "a", 12)
    text_set(root / "b", 8)
    crude_set(root / "raw", 6)
    blends = {
        "blend": BLEND,
        "nested": "blend: [{weight: 1, path: a}, {weight: 2, blend: [{weight: 1, path: b}]}]",
        "epochs": "blend_epochized: [{repetitions: 1, path: a}, {repetitions: 0.5, path: b}]",
        "concat": "concat: [{path: a}, {path: b}]",
        "tokens": f"{BLEND}\n    unit: tokens",
        "until": f"{BLEND}\n    until: all_once",
        "mixed": "blend: [{weight: 3, path: a}, {weight: 1, concat: [{path: b}]}]",
        "crude": "blend: [{weight: 1, path: a}, {weight: 1, path: raw}]",
    }
    for name, text in blends.items():
        (root / f"{name}.yaml").write_text(
            "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
            f"  train:\n    {text}\n"
        )
    return root


def dataset_of(path: Path, encoder: Any, config: WorkerConfig = ONE, **settings: Any) -> Any:
    settings = {"batch_size": 2, "shuffle_buffer_size": 5, **settings}
    return get_train_dataset(path, worker_config=config, task_encoder=encoder, **settings)


def batches_of(dataset: Any, number: int = 24) -> list[Any]:
    loader = get_savable_loader(dataset, watchdog_timeout_seconds=None)
    return list(islice(loader, number))


def source_of(batch: Any) -> set[str]:
    return {key[0] for key in batch.__restore_key__[2:]}


Encoder = DefaultTaskEncoder[Any, Any, Any, Any]


class Delegating(Encoder):
    """Overrides every builder, and does nothing but call that of its base."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=sample.text.upper())

    @stateless
    def postencode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"<{sample.text}>")


def _delegating(name: str) -> Any:
    def build(self: Any, *datasets: Any, **settings: Any) -> SavableDataset[Any]:
        self.called[name] += 1
        if name == "build_cook_crude_sample":
            assert set(settings) == {"worker_config", "subflavors", "get_primary_aux", "aux"}
        built: SavableDataset[Any] = getattr(super(Delegating, self), name)(*datasets, **settings)
        return built

    build.__qualname__ = f"Delegating.{name}"
    return build


for _name in ("train_datasets", "val_datasets", "cook_crude_sample", "encode_sample", "batch"):
    setattr(Delegating, f"build_{_name}", _delegating(f"build_{_name}"))


class Plain(Encoder):
    """The same hooks, and no builder."""

    encode_sample = Delegating.encode_sample
    postencode_sample = Delegating.postencode_sample


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("a", {"virtual_epoch_length": 5}),
        ("blend.yaml", {}),
        ("epochs.yaml", {}),
        ("concat.yaml", {"repeat": False, "batch_drop_last": True}),
    ],
)
def test_builders_of_the_base_build_the_pipeline_without_overrides(root, path, settings) -> None:
    encoder = Delegating()
    found = dataset_of(root / path, encoder, **settings)
    expected = dataset_of(root / path, Plain(), **settings)
    if path != "blend.yaml":  # of which the weights are shares here
        assert found.config() == expected.config()
    assert_same(batches_of(found), batches_of(expected))
    names = ("build_train_datasets", "build_encode_sample", "build_batch")
    assert encoder.called == dict.fromkeys(names, 1)


def test_builders_of_the_base_make_the_validation_dataset_too(root) -> None:
    for path in ("a", "blend.yaml"):
        encoder = Delegating()
        settings: dict[str, Any] = {"split_part": "train", "batch_size": 3, "limit": 4}
        settings["worker_config"] = ONE
        found = get_val_dataset(root / path, task_encoder=encoder, **settings)
        expected = get_val_dataset(root / path, task_encoder=Plain(), **settings)
        assert_same(batches_of(found), batches_of(expected))
        assert encoder.called["build_val_datasets"] == 1
        several = get_val_datasets(root / path, task_encoder=encoder, **settings)
        assert encoder.called["build_val_datasets"] == 1 + len(several)
        assert [len(factory) for _, factory in several] == [12, 8][: len(several)]


class Cooking(Delegating):
    cookers = (Cooker(lambda crude: TextSample(**basic_sample_keys(crude), text=crude["txt"])),)


def test_cooking_is_built_for_crude_datasets_only(root) -> None:
    encoder = Cooking()
    batches = batches_of(dataset_of(root / "crude.yaml", encoder))
    assert encoder.called["build_cook_crude_sample"] == 1
    assert set.union(*map(source_of, batches)) == {"a/train", "raw/train"}


# ---------------------------------------------------------------------------- blends of their own


class WholeBatches(Encoder):
    """Batches of one dataset each, then a blend of the batches, as of Energon 7."""

    def build_train_datasets(
        self, *, datasets, worker_config, batch_size, batch_drop_last=False,
        packing_buffer_size=None, virtual_epoch_length=0, shuffle_buffer_size=None,
        blend_mode=DatasetBlendMode.NONE, repeat=True,
    ) -> Any:  # fmt: skip
        assert (blend_mode, repeat) == (DatasetBlendMode.DATASET_WEIGHT, True)
        own, pairs = {"worker_config": worker_config}, []
        for loaded in datasets:
            dataset: Any = RepeatDataset(loaded.dataset.build(), **own)
            dataset = ShuffleBufferDataset(dataset, size=shuffle_buffer_size or 1, **own)
            dataset = self.build_encode_sample(dataset, **own)
            batching = {"batch_size": batch_size, "batch_drop_last": batch_drop_last}
            batching["packing_buffer_size"] = packing_buffer_size
            pairs.append((self.build_batch(dataset, **batching, **own), loaded.weight))
        dataset = BlendDataset(*pairs, **own)
        dataset = EpochizeDataset(dataset, length=virtual_epoch_length, **own)
        return LogSampleDataset(dataset, mode="train", **own)


def test_batches_of_one_dataset_are_blended_by_weight_and_resume(root) -> None:
    def make(config: WorkerConfig) -> Any:
        return dataset_of(root / "nested.yaml", WholeBatches(), config, virtual_epoch_length=40)

    batches = batches_of(make(ONE), 30)
    assert {len(source_of(batch)) for batch in batches} == {1}
    counts = Counter(name for batch in batches for name in source_of(batch))
    assert set(counts) == {"a/train", "b/train"}
    assert abs(counts["b/train"] - 20) <= 5
    assert all(batch.loss_weight.tolist() == [1, 1] for batch in batches)
    whole = Ranks(make, 1, num_streams=2)
    expected = whole.slots(24)
    run = Ranks(make, 1, num_streams=2)
    found = run.slots(7)
    resumed = Ranks(make, 1, num_streams=2, states=run.save())
    found.update(resumed.slots(17))
    assert_same(found, expected)


class AsOnThePage(Encoder):
    """Of an earlier Energon, as its page on custom blending still shows it: pairs, no modes."""

    def build_train_datasets(
        self, *, datasets, worker_config, batch_size, batch_drop_last=False,
        packing_buffer_size=None, virtual_epoch_length=0, shuffle_buffer_size=None,
    ) -> Any:  # fmt: skip
        own = {"worker_config": worker_config}
        batching = {"batch_size": batch_size, "batch_drop_last": batch_drop_last}
        return self.build_batch(BlendDataset(*datasets, **own), **batching, **own)


def test_builder_of_an_earlier_energon_gets_pairs(root) -> None:
    batches = batches_of(dataset_of(root / "blend.yaml", AsOnThePage()), 40)
    counts = Counter(key[0] for batch in batches for key in batch.__restore_key__[2:])
    assert set(counts) == {"a/train", "b/train"}
    assert abs(counts["a/train"] - 60) <= 5


class Mixing(Encoder):
    """Batches that mix datasets, put together by a function of its own."""

    def build_train_datasets(self, *, datasets: Any, worker_config: Any, **more: Any) -> Any:
        assert more["batch_size"] == 2
        pairs = [
            (RepeatDataset(loaded.dataset.build(), worker_config=worker_config), loaded.weight)
            for loaded in datasets
        ]
        mix: Any = {"batch_mix_fn": lambda samples: {"keys": [s.__key__ for s in samples]}}
        return MixBatchDataset(*pairs, batch_size=4, worker_config=worker_config, **mix)


class Filtered(Encoder):
    """Puts a stage of its own below the encoding, and one above the batches."""

    def build_encode_sample(self, dataset: Any, *, worker_config: Any) -> Any:
        dataset = MapDataset(dataset, lambda sample: [sample], worker_config=worker_config)
        return super().build_encode_sample(dataset, worker_config=worker_config)

    def build_batch(self, dataset: Any, *, worker_config: Any, **settings: Any) -> Any:
        del settings
        return BatchDataset(dataset, 5, lambda samples: samples, worker_config=worker_config)


def test_single_builders_are_called_also_for_mixed_batches(root) -> None:
    batches = batches_of(dataset_of(root / "blend.yaml", Mixing()), 5)
    assert [len(keys_of(batch)) for batch in batches] == [4] * 5
    (batch, *_) = batches_of(dataset_of(root / "a", Filtered()))
    assert [[type(sample) for sample in one] for one in batch] == [[TextSample]] * 5


class Forgetful(Encoder):
    def build_train_datasets(self, **settings: Any) -> Any:
        return None


LIST = "build_train_datasets gets a list"
REFUSED: list[tuple[Any, str, Any, type[Exception], str]] = [
    (Delegating, "tokens.yaml", {}, ValueError, rf"{LIST} .*tokens.yaml:\d+, .*unit: tokens"),
    (Delegating, "until.yaml", {}, ValueError, rf"{LIST} .*until.yaml:\d+, .*until: all_once"),
    (Delegating, "mixed.yaml", {}, ValueError, rf"{LIST} .*mixed.yaml:\d+, .*concat inside blend"),
    (Delegating, "blend.yaml", {"repeat": False}, ValueError, "a blend by weights is endless"),
    (AsOnThePage, "a", {"repeat": False}, TypeError, "repeat=False, but AsOnThePage"),
    (Forgetful, "a", {}, TypeError, "build_train_datasets returned None; return the dataset"),
    (lambda: AugmentTaskEncoder(Delegating()), "a", {}, TypeError,
     "Delegating overrides build_batch"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "path", "settings", "error", "words"), REFUSED)
def test_builders_that_cannot_build_are_refused(root, make, path, settings, error, words) -> None:
    with pytest.raises(error, match=words):
        dataset_of(root / path, make(), **settings)


def test_own_validation_may_concatenate_any_datasets(root) -> None:
    class Twice(Encoder):
        def build_val_datasets(self, *, datasets: Any, worker_config: Any, **settings: Any) -> Any:
            parts = [loaded.dataset.build() for loaded in [*datasets, *datasets]]
            return ConcatDataset(*parts, worker_config=worker_config)

    dataset = get_val_dataset(
        root / "b", split_part="train", batch_size=2, worker_config=ONE, task_encoder=Twice()
    )
    assert [number_of(sample) for sample in batches_of(dataset)] == [*range(8)] * 2


# --------------------------------------------------------------------------- over another encoder


class Inner(Encoder):
    packing = Packing(capacity=40, buffer_size=4)

    @stateless
    def preencode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=sample.text.strip())

    @stateless
    def postencode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=f"<{sample.text}>")

    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> TextSample:
        return TextSample.derive_from(samples[0], text="|".join(s.text for s in samples))


class Louder(AugmentTaskEncoder):
    @stateless
    def preencode_sample(self, sample: TextSample) -> TextSample:
        done = super().preencode_sample(sample)
        return TextSample.derive_from(done, text=done.text.upper())


def test_wrapper_changes_one_hook_and_has_all_others(root) -> None:
    plain, same, louder = (
        dataset_of(root / "a", encoder)
        for encoder in (Inner(), AugmentTaskEncoder(Inner()), Louder(Inner()))
    )
    expected = batches_of(plain)
    assert_same(batches_of(same), expected)
    assert [b.text for b in batches_of(louder)] == [[t.upper() for t in b.text] for b in expected]
    assert get_savable_loader(louder).can_restore_sample()


def test_wrapper_keeps_what_the_wrapped_encoder_does_not_override(root) -> None:
    encoder = AugmentTaskEncoder(DefaultTaskEncoder())
    expected = dataset_of(root / "a", DefaultTaskEncoder()).config()
    assert dataset_of(root / "a", encoder).config() == expected
    assert not encoder.overrides("encode_sample")
    assert AugmentTaskEncoder(Louder(Inner())).overrides("postencode_sample")


def test_failures_in_hooks_of_the_wrapped_encoder_are_counted_by_its_tolerance(root) -> None:
    class Fails(Encoder):
        __default_failure_tolerance__ = 3

        def encode_sample(self, sample: Any) -> Any:
            raise ValueError("never works")

    config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)
    with pytest.raises(ValueError, match="failed 3 times in a row"):
        batches_of(dataset_of(root / "a", AugmentTaskEncoder(Fails()), config))
