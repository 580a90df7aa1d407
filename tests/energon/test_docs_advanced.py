"""What Energon's documentation shows under "advanced": each as a user types it."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from megatron.energon import (
    BatchDataset,
    BlendDataset,
    CaptioningSample,
    Cooker,
    DefaultTaskEncoder,
    EpochizeDataset,
    FilterDataset,
    LimitDataset,
    LogSampleDataset,
    MapDataset,
    MixBatchDataset,
    RepeatDataset,
    SkipSample,
    TextSample,
    VQASample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    homogeneous_concat_mix,
    stateless,
)
from megatron.energon.errors import FatalSampleError
from megatron.energon.source_info import SourceInfo

from .energon_data import (
    caption,
    captions,
    class_of,
    crude,
    keys_of,
    metadataset,
    png,
    prepared,
    texts,
    write_shards,
)


def config(**settings):
    return WorkerConfig(**{"rank": 0, "world_size": 1, "num_workers": 0, **settings})


def train(path, encoder=None, **settings):
    return get_train_dataset(
        path,
        **{
            "batch_size": 2,
            "shuffle_buffer_size": 10,
            "max_samples_per_sequence": 10,
            "worker_config": config(),
            **({"task_encoder": encoder} if encoder else {}),
            **settings,
        },
    )


# ---------------------------------------------------------------------------------- crude data


def test_crude_data_is_cooked_by_subflavor(tmp_path):
    crude(tmp_path / "a", 10, soup_drink="soup")
    crude(tmp_path / "b", 10, soup_drink="drink")
    path = metadataset(
        tmp_path / "m.yaml",
        train={"blend": [{"weight": 1, "path": "a"}, {"weight": 1, "path": "b"}]},
    )

    @stateless
    def cook_captioning(sample: dict) -> CaptioningSample:
        return CaptioningSample(
            **basic_sample_keys(sample), image=sample["jpg"], caption=sample["json"]["caption"]
        )

    @stateless
    def cook_vqa(sample: dict) -> VQASample:
        return VQASample(
            **basic_sample_keys(sample), image=sample["jpg"], context=sample["txt"], answers=["a"]
        )

    class MyTaskEncoder(DefaultTaskEncoder):
        cookers = [  # noqa: RUF012 as users type it
            Cooker(cook_captioning, has_subflavors={"soup_drink": "soup"}),
            Cooker(cook_vqa, has_subflavors={"soup_drink": "drink"}),
        ]

        def batch(self, samples):
            return {"__key__": [s.__key__ for s in samples], "types": [type(s) for s in samples]}

    batches = list(itertools.islice(get_loader(train(path, MyTaskEncoder())), 10))
    kinds = [kind for batch in batches for kind in batch["types"]]
    assert set(kinds) == {CaptioningSample, VQASample}
    assert abs(kinds.count(VQASample) - 10) <= 5


def test_crude_data_with_a_cooker_that_nothing_matches(tmp_path):
    crude(tmp_path / "a", 4, kind="x")

    @stateless
    def cook(sample):
        return sample

    class MyTaskEncoder(DefaultTaskEncoder):
        cookers = [Cooker(cook, has_subflavors={"kind": "y"})]  # noqa: RUF012 as users type it

    with pytest.raises(ValueError, match="No cooker found for subflavors"):
        train(tmp_path / "a", MyTaskEncoder())


def test_crude_data_where_a_method_cooks(tmp_path):
    crude(tmp_path / "a", 4)

    @stateless
    @cooker
    def cook(sample):
        return TextSample(**basic_sample_keys(sample), text=sample["txt"])

    class MyTaskEncoder(DefaultTaskEncoder):
        cookers = (Cooker(cook=cook),)

    assert len(keys_of(get_loader(train(tmp_path / "a", MyTaskEncoder(), repeat=False)))) == 4


# --------------------------------------------------------------------------------------- packing


@dataclass
class Packed:
    """A pack, as Energon's packing page has it."""

    __key__: str
    __restore_key__: tuple
    __subflavors__: dict
    texts: list
    lengths: torch.Tensor


def packing_encoder():
    """The page's encoder: its selection sorts and pops the list that it is given."""

    class PackingEncoder(DefaultTaskEncoder):
        def __init__(self, max_length):
            super().__init__()
            self.max_length = max_length

        @stateless(restore_seeds=True)
        def encode_sample(self, sample: TextSample) -> TextSample:
            return TextSample.derive_from(sample, text=f"{sample.text}{random.random():.3f}")

        def select_samples_to_pack(self, samples):
            samples.sort(key=lambda sample: len(sample.text))
            groups = []
            while len(samples) > 0:
                batch = []
                length = 0
                while len(samples) > 0 and length + len(samples[0].text) < self.max_length:
                    sample = samples.pop(0)
                    batch.append(sample)
                    length += len(sample.text)
                groups.append(batch)
            return groups

        @stateless
        def pack_selected_samples(self, samples):
            return Packed(
                __key__=",".join(sample.__key__ for sample in samples),
                __restore_key__=(),
                __subflavors__={},
                texts=[sample.text for sample in samples],
                lengths=torch.tensor([len(sample.text) for sample in samples]),
            )

        def batch(self, samples):
            return {
                "__key__": [s.__key__ for s in samples],
                "texts": [s.texts for s in samples],
            }

    return PackingEncoder(60)


@pytest.mark.parametrize("workers", [0, 2])
def test_packing_with_a_selection_that_pops_is_resumed_exactly(tmp_path, workers):
    texts(tmp_path / "ds", 40)

    def loader():
        return get_savable_loader(
            train(
                tmp_path / "ds", packing_encoder(), packing_buffer_size=10, batch_size=1,
                worker_config=config(num_workers=workers),
            )
        )  # fmt: skip

    first = loader()
    batches = list(itertools.islice(first, 7))
    assert all(len(pack) >= 2 for batch in batches for pack in batch["texts"])
    state = first.save_state_rank()
    expected = list(itertools.islice(first, 12))
    resumed = loader()
    resumed.restore_state_rank(state)
    assert list(itertools.islice(resumed, 12)) == expected


def test_packing_emits_each_sample_once(tmp_path):
    texts(tmp_path / "ds", 40)
    ds = train(
        tmp_path / "ds", packing_encoder(), packing_buffer_size=10, batch_size=1, repeat=False
    )
    packs = keys_of(get_loader(ds))
    found = sorted(key for pack in packs for key in pack.split(","))
    assert found == [f"{i:06d}" for i in range(40)]


def test_packing_with_postencode(tmp_path):
    texts(tmp_path / "ds", 20)

    class Encoder(DefaultTaskEncoder):
        @stateless
        def preencode_sample(self, sample):
            return TextSample.derive_from(sample, text=sample.text.strip())

        def select_samples_to_pack(self, samples):
            return [samples[i : i + 3] for i in range(0, len(samples), 3)]

        @stateless
        def postencode_sample(self, sample):
            return TextSample.derive_from(sample, text=f"<{sample.text}>")

        @stateless
        def pack_selected_samples(self, samples):
            return TextSample.derive_from(samples[0], text="".join(s.text for s in samples))

    ds = train(tmp_path / "ds", Encoder(), packing_buffer_size=6, batch_size=2, repeat=False)
    found = [text for batch in get_loader(ds) for text in batch.text]
    assert sum(text.count("<") for text in found) == 20


# -------------------------------------------------------------------------------------- grouping


def image_size(number):
    return (12, 8) if number % 3 else (8, 12)


def shaped(tmp_path):
    write_shards(
        tmp_path / "ds", 30, lambda n: {**caption(n), "jpg": png(n, image_size(n))}
    )  # fmt: skip
    config = {
        "sample_type": class_of("CaptioningSample"),
        "field_map": {"image": "jpg", "caption": "txt"},
    }
    return prepared(tmp_path / "ds", config)


def test_grouping_by_aspect_ratio(tmp_path):
    path = shaped(tmp_path)

    class GroupingTaskEncoder(DefaultTaskEncoder):
        def batch_group_criterion(self, sample):
            aspect_ratio = sample.image.shape[1] / sample.image.shape[2]
            return "large" if aspect_ratio > 1 else "small", None

    ds = train(path, GroupingTaskEncoder(), batch_size=4, repeat=False)
    batches = list(get_loader(ds))
    assert all(batch.image.shape[1:] in {(3, 8, 12), (3, 12, 8)} for batch in batches)
    assert len(keys_of(batches)) == 30


def test_grouping_with_a_batch_size_for_each_group(tmp_path):
    path = shaped(tmp_path)

    class GroupingTaskEncoder(DefaultTaskEncoder):
        @stateless
        def batch_group_criterion(self, sample):
            return ("tall", 2) if sample.image.shape[1] > sample.image.shape[2] else ("wide", 5)

    ds = train(path, GroupingTaskEncoder(), batch_size=None, repeat=False)
    sizes = {(batch.image.shape[2], len(batch.image)) for batch in get_loader(ds)}
    assert sizes == {(12, 2), (8, 5)}


# ----------------------------------------------------------------------- epochs, splits, subsets


def test_epochized_blend_repeats_each_dataset(tmp_path):
    texts(tmp_path / "a", 10)
    texts(tmp_path / "b", 20)
    path = metadataset(
        tmp_path / "m.yaml",
        train={"blend_epochized": [
            {"repetitions": 3, "path": "a", "subflavors": {"from": "a"}},
            {"path": "b", "subflavors": {"from": "b"}},
        ]},
    )  # fmt: skip
    loader = get_loader(train(path, batch_size=5, repeat=False))
    for _ in range(2):
        flavors = [flavor["from"] for batch in loader for flavor in batch.__subflavors__]
        assert (flavors.count("a"), flavors.count("b")) == (30, 20)


def test_an_epoch_of_exactly_len_batches_is_followed_by_a_full_one(tmp_path):
    texts(tmp_path / "a", 30)
    loader = get_loader(train(tmp_path / "a", batch_size=2, repeat=False))
    epochs = [keys_of(itertools.islice(loader, len(loader))) for _ in range(3)]
    assert [len(set(epoch)) for epoch in epochs] == [30, 30, 30]


def test_virtual_epochs(tmp_path):
    texts(tmp_path / "a", 10)
    loader = get_loader(train(tmp_path / "a", batch_size=2, virtual_epoch_length=3))
    assert len(loader) == 3
    assert [len(list(loader)) for _ in range(4)] == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (["0%", "50%"], None, range(10)),
        ([5, 15], None, range(5, 15)),
        ([15, "end"], None, range(15, 20)),
        (["25%", "75%"], ["0%", "50%"], range(5, 10)),
        ([4, 14], ["50%", "100%"], range(9, 14)),
    ],
)
def test_subsets(tmp_path, inner, outer, expected):
    texts(tmp_path / "a", 20)
    leaf = {"path": "a", "subset": {"range": inner}}
    node = {"blend": [leaf], "subset": {"range": outer}} if outer else leaf
    path = metadataset(tmp_path / "m.yaml", val=node)
    (tmp_path / "a/.nv-meta/split.yaml").write_text(
        "split_parts:\n  val: ['parts/data-{0..1}.tar']\n"
    )
    ds = get_val_dataset(path, batch_size=4, worker_config=config())
    assert keys_of(get_loader(ds)) == [f"{i:06d}" for i in expected]


def test_splits_of_a_metadataset_may_name_others_of_its_parts(tmp_path):
    texts(tmp_path / "a", 30, train="parts/data-[01].tar", val="parts/data-2.tar")
    path = metadataset(tmp_path / "m.yaml", val={"path": "a", "split_part": "train"})
    ds = get_val_dataset(path, batch_size=4, worker_config=config())
    assert len(keys_of(get_loader(ds))) == 20


# ------------------------------------------------------------------------------- custom blending


def test_custom_blending_overrides_build_train_datasets(tmp_path):
    texts(tmp_path / "a", 20)
    texts(tmp_path / "b", 20)
    path = metadataset(
        tmp_path / "m.yaml",
        train={"blend": [
            {"weight": 1, "path": "a", "subflavors": {"from": "a"}},
            {"weight": 3, "path": "b", "subflavors": {"from": "b"}},
        ]},
    )  # fmt: skip

    class CustomBlending(DefaultTaskEncoder):
        def build_train_datasets(
            self, *, datasets, worker_config, batch_size, batch_drop_last=False,
            packing_buffer_size=None, virtual_epoch_length=0, shuffle_buffer_size=None,
            blend_mode=None, repeat=True,
        ):  # fmt: skip
            # Batches of one dataset each, blended as a whole.
            parts = []
            for loaded in datasets:
                ds = loaded.dataset.build(worker_rotation_offset=0)
                ds = RepeatDataset(ds, worker_config=worker_config)
                ds = BatchDataset(
                    ds, batch_size=batch_size, batcher=self.batch, worker_config=worker_config
                )
                parts.append((ds, loaded.weight))
            ds = BlendDataset(*parts, worker_config=worker_config)
            return MapDataset(ds, self.encode_batch, worker_config=worker_config)

    loader = get_loader(train(path, CustomBlending(), batch_size=4))
    batches = list(itertools.islice(loader, 24))
    origins = [{flavor["from"] for flavor in batch.__subflavors__} for batch in batches]
    assert all(len(origin) == 1 for origin in origins)
    assert abs(origins.count({"b"}) - 18) <= 5


def test_custom_blending_calls_the_default_for_the_rest(tmp_path):
    texts(tmp_path / "a", 20)
    seen = {}

    class Encoder(DefaultTaskEncoder):
        def build_train_datasets(self, **kwargs):
            seen.update(kwargs)
            return super().build_train_datasets(**kwargs)

        def build_batch(self, dataset, **kwargs):
            seen["batch"] = kwargs
            return super().build_batch(dataset, **kwargs)

        def build_encode_sample(self, dataset, **kwargs):
            seen["encode"] = True
            return super().build_encode_sample(dataset, **kwargs)

    loader = get_loader(train(tmp_path / "a", Encoder(), batch_size=4))
    assert len(keys_of(itertools.islice(loader, 5))) == 20
    assert seen["batch_size"] == 4
    assert len(seen["datasets"]) == 1
    assert seen["encode"]
    assert "batch" in seen


# -------------------------------------------------------------------------------- error handling


def test_samples_are_skipped(tmp_path):
    texts(tmp_path / "a", 20)

    class Encoder(DefaultTaskEncoder):
        def encode_sample(self, sample):
            if int(sample.__key__) % 2:
                raise SkipSample()
            return sample

    loader = get_loader(train(tmp_path / "a", Encoder(), repeat=False))
    assert sorted(keys_of(loader)) == [f"{i:06d}" for i in range(0, 20, 2)]


def test_error_handlers_get_sample_and_sources(tmp_path):
    texts(tmp_path / "a", 20)
    errors = []

    def handler(exception, sample, sources):
        errors.append((type(exception), sample.__key__, sources))

    class Encoder(DefaultTaskEncoder):
        def encode_sample(self, sample):
            if sample.__key__ == "000003":
                raise ValueError("bad sample")
            return sample

    settings = config(global_error_handler=handler)
    loader = get_loader(train(tmp_path / "a", Encoder(), repeat=False, worker_config=settings))
    assert len(keys_of(loader)) == 19
    ((kind, key, sources),) = errors
    assert (kind, key) == (ValueError, "000003")
    assert isinstance(sources[0], SourceInfo)


def test_failures_in_a_row_are_fatal(tmp_path):
    texts(tmp_path / "a", 20)

    class Encoder(DefaultTaskEncoder):
        @stateless(failure_tolerance=5)
        def encode_sample(self, sample):
            raise ValueError("always")

    loader = get_loader(train(tmp_path / "a", Encoder()))
    with pytest.raises(FatalSampleError):
        next(iter(loader))


def test_code_that_is_wrong_is_fatal_at_once(tmp_path):
    texts(tmp_path / "a", 20)

    class Encoder(DefaultTaskEncoder):
        def encode_sample(self, sample):
            return undefined_name  # noqa: F821

    with pytest.raises(FatalSampleError, match="undefined_name"):
        next(iter(get_loader(train(tmp_path / "a", Encoder()))))


def test_generators_yield_any_number_of_samples(tmp_path):
    texts(tmp_path / "a", 10)

    class Encoder(DefaultTaskEncoder):
        @stateless
        def encode_sample(self, sample):
            for part in range(int(sample.__key__) % 3):
                yield TextSample.derive_from(sample, text=f"{part}: {sample.text}")

    loader = get_loader(train(tmp_path / "a", Encoder(), repeat=False))
    assert len(keys_of(loader)) == sum(i % 3 for i in range(10))


# --------------------------------------------------------------- parallelism, scaling, wrappers


def test_parallel_ranks_share_an_epoch(tmp_path):
    texts(tmp_path / "a", 24)
    found = []
    for rank in range(3):
        settings = config(rank=rank, world_size=3, num_workers=1)
        found += keys_of(get_loader(train(tmp_path / "a", repeat=False, worker_config=settings)))
    assert sorted(found) == [f"{i:06d}" for i in range(24)]


def test_reproducible_scaling_yields_equal_global_batches(tmp_path):
    texts(tmp_path / "a", 50)

    def global_batches(world_size, workers):
        loaders = [
            get_savable_loader(
                train(
                    tmp_path / "a", batch_size=2,
                    worker_config=config(rank=rank, world_size=world_size, num_workers=workers),
                )
            )
            for rank in range(world_size)
        ]  # fmt: skip
        found = []
        for _ in range(6):
            keys = []
            for loader in loaders:
                keys += keys_of(itertools.islice(loader, 4 // world_size))
            found.append(sorted(keys))
        return found

    assert global_batches(4, 1) == global_batches(2, 2) == global_batches(1, 4)


def test_repeat_and_limit_wrappers_as_in_megatron_lm(tmp_path):
    texts(tmp_path / "a", 30)
    settings = config()
    ds = get_val_dataset(tmp_path / "a", split_part="train", batch_size=4, worker_config=settings)
    limited = LimitDataset(
        RepeatDataset(ds, worker_config=settings), length=10, worker_config=settings,
        reset_after_epoch=True,
    )  # fmt: skip
    loader = get_savable_loader(limited)
    first, second = keys_of(loader), keys_of(loader)
    assert first == second
    assert len(first) == 38  # seven full batches and a last one of two, then two more


def test_epochize_and_log_wrappers_by_position(tmp_path):
    texts(tmp_path / "a", 30)
    ds = EpochizeDataset(train(tmp_path / "a"), 5, config())
    ds = LogSampleDataset(ds, "train", config())
    loader = get_loader(ds)
    assert [len(list(loader)) for _ in range(3)] == [5, 5, 5]


def test_map_and_filter_wrappers(tmp_path):
    texts(tmp_path / "a", 12)
    settings = config()
    ds = train(tmp_path / "a", batch_size=None, repeat=False)
    ds = FilterDataset(
        ds, filter_fn=lambda sample: int(sample.__key__) % 3 == 0, worker_config=settings
    )
    ds = MapDataset(ds, lambda sample: sample.text, worker_config=settings)
    assert sorted(text.split()[1] for text in get_loader(ds)) == ["0", "3", "6", "9"]


def test_mix_batch_wrapper_concatenates(tmp_path):
    texts(tmp_path / "a", 20)
    texts(tmp_path / "b", 20)
    settings = config()
    parts = [(train(tmp_path / name, batch_size=2), 1) for name in ("a", "b")]
    ds = MixBatchDataset(
        *parts, batch_size=4, batch_mix_fn=homogeneous_concat_mix, worker_config=settings
    )
    batch = next(iter(get_loader(ds)))
    assert len([key for keys in batch.__key__ for key in keys]) == 8


def test_random_hooks_differ_between_ranks_and_are_resumed(tmp_path):
    texts(tmp_path / "a", 30)

    class Encoder(DefaultTaskEncoder):
        def encode_batch(self, batch):
            return {"__key__": batch.__key__, "noise": random.random(), "t": torch.rand(()).item()}

    def loader(rank=0):
        settings = config(rank=rank, world_size=2, num_workers=1)
        return get_savable_loader(train(tmp_path / "a", Encoder(), worker_config=settings))

    one, other = loader(0), loader(1)
    drawn = [{batch["noise"] for batch in itertools.islice(ld, 5)} for ld in (one, other)]
    assert not drawn[0] & drawn[1]
    state = one.save_state_rank()
    expected = list(itertools.islice(one, 5))
    resumed = loader(0)
    resumed.restore_state_rank(state)
    assert list(itertools.islice(resumed, 5)) == expected


def test_captions_over_workers_are_each_emitted_once(tmp_path):
    captions(tmp_path / "ds", 25)
    ds = get_val_dataset(
        tmp_path / "ds", split_part="train", batch_size=4, worker_config=config(num_workers=3)
    )
    loader = get_loader(ds)
    for _ in range(2):
        assert sorted(keys_of(loader)) == [f"{i:06d}" for i in range(25)]
