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

from ..helpers import Ranks, assert_same, ignore, keys_of, number_of, text_set

ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `a` (12 texts), `b` (8 texts), `raw` (6 crude ones), and blends of them."""
    root = tmp_path_factory.mktemp("builders")
    text_set(root / "a", 12)
    text_set(root / "b", 8)
    text_set(root / "raw", 6)
    (root / "raw" / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )
    blends = {
        "blend": "blend: [{weight: 3, path: a}, {weight: 1, path: b}]",
        "nested": "blend: [{weight: 1, path: a}, {weight: 2, blend: [{weight: 1, path: b}]}]",
        "epochs": "blend_epochized: [{repetitions: 1, path: a}, {repetitions: 0.5, path: b}]",
        "concat": "concat: [{path: a}, {path: b}]",
        "tokens": "blend: [{weight: 3, path: a}, {weight: 1, path: b}]\n    unit: tokens",
        "until": "blend: [{weight: 3, path: a}, {weight: 1, path: b}]\n    until: all_once",
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


class Delegating(DefaultTaskEncoder[Any, Any, Any, Any]):
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


class Plain(DefaultTaskEncoder[Any, Any, Any, Any]):
    """The same hooks, and no builder."""

    encode_sample = Delegating.encode_sample
    postencode_sample = Delegating.postencode_sample


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("a", {}),
        ("a", {"repeat": False}),
        ("a", {"virtual_epoch_length": 5}),
        ("blend.yaml", {}),
        ("epochs.yaml", {}),
        ("epochs.yaml", {"repeat": False, "batch_drop_last": True}),
        ("concat.yaml", {}),
        ("concat.yaml", {"repeat": False}),
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


class WholeBatches(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Batches of one dataset each, then a blend of the batches, as of Energon 7."""

    def build_train_datasets(
        self,
        *,
        datasets: list[Any],
        worker_config: WorkerConfig,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        virtual_epoch_length: int = 0,
        shuffle_buffer_size: int | None = None,
        blend_mode: DatasetBlendMode = DatasetBlendMode.NONE,
        repeat: bool = True,
    ) -> SavableDataset[Any]:
        assert blend_mode is DatasetBlendMode.DATASET_WEIGHT
        assert repeat
        pairs = []
        for loaded in datasets:
            dataset: Any = RepeatDataset(loaded.dataset.build(), worker_config=worker_config)
            dataset = ShuffleBufferDataset(
                dataset, size=shuffle_buffer_size or 1, worker_config=worker_config
            )
            dataset = self.build_encode_sample(dataset, worker_config=worker_config)
            dataset = self.build_batch(
                dataset,
                batch_size=batch_size,
                batch_drop_last=batch_drop_last,
                packing_buffer_size=packing_buffer_size,
                worker_config=worker_config,
            )
            pairs.append((dataset, loaded.weight))
        dataset = BlendDataset(*pairs, worker_config=worker_config)
        if virtual_epoch_length > 0:
            dataset = EpochizeDataset(
                dataset, length=virtual_epoch_length, worker_config=worker_config
            )
        return LogSampleDataset(dataset, mode="train", worker_config=worker_config)


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


class AsOnThePage(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Of an earlier Energon, as its page on custom blending still shows it: pairs, no modes."""

    def build_train_datasets(
        self,
        *,
        datasets: list[Any],
        worker_config: WorkerConfig,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        virtual_epoch_length: int = 0,
        shuffle_buffer_size: int | None = None,
    ) -> SavableDataset[Any]:
        dataset: Any = BlendDataset(*datasets, worker_config=worker_config)
        dataset = self.build_batch(
            dataset,
            batch_size=batch_size,
            batch_drop_last=batch_drop_last,
            worker_config=worker_config,
        )
        if virtual_epoch_length > 0:
            dataset = EpochizeDataset(
                dataset, length=virtual_epoch_length, worker_config=worker_config
            )
        return dataset  # type: ignore[no-any-return]


def test_builder_of_an_earlier_energon_gets_pairs(root) -> None:
    batches = batches_of(dataset_of(root / "blend.yaml", AsOnThePage()), 40)
    counts = Counter(key[0] for batch in batches for key in batch.__restore_key__[2:])
    assert set(counts) == {"a/train", "b/train"}
    assert abs(counts["a/train"] - 60) <= 5
    with pytest.raises(TypeError, match="repeat=False, but AsOnThePage"):
        dataset_of(root / "a", AsOnThePage(), repeat=False)


class Mixing(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Batches that mix datasets, put together by a function of its own."""

    def build_train_datasets(self, *, datasets: Any, worker_config: Any, **more: Any) -> Any:
        assert more["batch_size"] == 2
        pairs = [
            (RepeatDataset(loaded.dataset.build(), worker_config=worker_config), loaded.weight)
            for loaded in datasets
        ]
        return MixBatchDataset(
            *pairs,
            batch_size=4,
            batch_mix_fn=lambda samples: {"keys": [s.__key__ for s in samples]},
            worker_config=worker_config,
        )


def test_mixed_batches_are_built(root) -> None:
    batches = batches_of(dataset_of(root / "blend.yaml", Mixing()), 5)
    assert [len(keys_of(batch)) for batch in batches] == [4] * 5


class Filtered(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Puts a stage of its own below the encoding, and one above the batches."""

    def build_encode_sample(self, dataset: Any, *, worker_config: Any) -> Any:
        dataset = MapDataset(dataset, _exclaim, worker_config=worker_config)
        return super().build_encode_sample(dataset, worker_config=worker_config)

    def build_batch(self, dataset: Any, *, worker_config: Any, **settings: Any) -> Any:
        del settings
        return BatchDataset(dataset, 5, lambda samples: samples, worker_config=worker_config)


def _exclaim(sample: TextSample) -> TextSample:
    return TextSample.derive_from(sample, text=f"{sample.text}!")


def test_single_builders_are_called_though_the_rest_is_not_overridden(root) -> None:
    (batch, *_) = batches_of(dataset_of(root / "a", Filtered()))
    assert isinstance(batch, list)
    assert len(batch) == 5
    assert all(sample.text.endswith("!") for sample in batch)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tokens", r"tokens.yaml:\d+, .*unit: tokens"),
        ("until", r"until.yaml:\d+, .*until: all_once"),
        ("mixed", r"mixed.yaml:\d+, .*concat inside blend"),
    ],
)
def test_metadataset_that_a_list_cannot_express_is_refused(root, path, text) -> None:
    with pytest.raises(ValueError, match=rf"build_train_datasets gets a list .*{text}"):
        dataset_of(root / f"{path}.yaml", Delegating())


def test_builder_that_returns_nothing_is_an_error(root) -> None:
    class Forgetful(DefaultTaskEncoder[Any, Any, Any, Any]):
        def build_train_datasets(self, **settings: Any) -> Any:
            return None

    with pytest.raises(TypeError, match="build_train_datasets returned None; return the dataset"):
        dataset_of(root / "a", Forgetful())


def test_weights_and_repeat_false_contradict_each_other(root) -> None:
    with pytest.raises(ValueError, match="a blend by weights is endless"):
        dataset_of(root / "blend.yaml", Delegating(), repeat=False)


def test_own_validation_may_concatenate_any_datasets(root) -> None:
    class Twice(DefaultTaskEncoder[Any, Any, Any, Any]):
        def build_val_datasets(self, *, datasets: Any, worker_config: Any, **settings: Any) -> Any:
            parts = [loaded.dataset.build() for loaded in [*datasets, *datasets]]
            return ConcatDataset(*parts, worker_config=worker_config)

    dataset = get_val_dataset(
        root / "b", split_part="train", batch_size=2, worker_config=ONE, task_encoder=Twice()
    )
    assert [number_of(sample) for sample in batches_of(dataset)] == [*range(8)] * 2


# --------------------------------------------------------------------------- over another encoder


class Inner(DefaultTaskEncoder[Any, Any, Any, Any]):
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
    def make(encoder: Any) -> Any:
        return dataset_of(root / "a", encoder)

    plain = batches_of(make(Inner()))
    same = batches_of(make(AugmentTaskEncoder(Inner())))
    assert_same(same, plain)
    found = batches_of(make(Louder(Inner())))
    assert [batch.text for batch in found] == [[t.upper() for t in b.text] for b in plain]
    assert get_savable_loader(make(Louder(Inner()))).can_restore_sample()


def test_wrapper_keeps_what_the_wrapped_encoder_does_not_override(root) -> None:
    encoder = AugmentTaskEncoder(DefaultTaskEncoder())
    assert make_config(root, encoder) == make_config(root, DefaultTaskEncoder())
    assert not encoder.overrides("encode_sample")
    assert AugmentTaskEncoder(Louder(Inner())).overrides("postencode_sample")


def make_config(root: Path, encoder: Any) -> Any:
    return dataset_of(root / "a", encoder).config()


def test_encoder_with_own_builders_cannot_be_augmented() -> None:
    with pytest.raises(TypeError, match="Delegating overrides build_batch"):
        AugmentTaskEncoder(Delegating())


def test_failures_in_hooks_of_the_wrapped_encoder_are_counted_by_its_tolerance(root) -> None:
    class Fails(DefaultTaskEncoder[Any, Any, Any, Any]):
        __default_failure_tolerance__ = 3

        def encode_sample(self, sample: Any) -> Any:
            raise ValueError("never works")

    config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)
    with pytest.raises(ValueError, match="failed 3 times in a row"):
        batches_of(dataset_of(root / "a", AugmentTaskEncoder(Fails()), config))
