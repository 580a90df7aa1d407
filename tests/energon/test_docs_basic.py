"""What Energon's documentation shows under "basic", as a user types it."""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from megatron.energon import (
    Batch,
    CaptioningSample,
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    TextSample,
    VQASample,
    WorkerConfig,
    basic_sample_keys,
    batch_list,
    batch_pad_stack,
    batch_stack,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
    load_dataset,
    stateless,
    traverse_metadataset,
)
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseWebdatasetFactory
from PIL import Image
from typer.testing import CliRunner

from energon_lite.extras.cli import app

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
    train_set,
    val_set,
    write_shards,
)

# ------------------------------------------------------------------------------------ quickstart


def test_quickstart_trains_on_captions(tmp_path):
    captions(tmp_path / "ds")
    simple_worker_config = WorkerConfig(rank=0, world_size=1, num_workers=2)
    train_ds = get_train_dataset(
        str(tmp_path / "ds"),
        batch_size=1,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        worker_config=simple_worker_config,
    )
    train_loader = get_loader(train_ds)
    for batch in itertools.islice(train_loader, 3):
        assert batch.image.shape == (1, 3, 8, 12)
        assert batch.caption[0].startswith("caption")


def test_quickstart_with_default_worker_config_and_savable_loader(tmp_path):
    captions(tmp_path / "ds")
    ds = get_train_dataset(
        tmp_path / "ds",
        batch_size=4,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        worker_config=WorkerConfig.default_worker_config(0),
    )
    loader = get_savable_loader(ds)
    batches = list(itertools.islice(loader, 20))
    assert len(batches) == 20
    assert set(keys_of(batches)) == {f"{i:06d}" for i in range(30)}


def test_quickstart_task_encoder_collapses_captions(tmp_path):
    captions(tmp_path / "ds")

    @dataclass
    class CaptioningRawBatch(Batch):
        image: torch.Tensor
        caption: list

    class CaptioningTaskEncoder(
        DefaultTaskEncoder[CaptioningSample, CaptioningSample, CaptioningRawBatch, dict]
    ):
        def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
            sample.image = sample.image * 2
            sample.caption = sample.caption.upper()
            return sample

        def batch(self, samples):
            return CaptioningRawBatch(
                __key__=[s.__key__ for s in samples],
                __restore_key__=[s.__restore_key__ for s in samples],
                __subflavors__=None,
                __sources__=None,
                image=batch_stack([s.image for s in samples]),
                caption=batch_list([s.caption for s in samples]),
            )

        def encode_batch(self, batch):
            return {"image": batch.image, "caption": batch.caption, "__key__": batch.__key__}

    ds = train_set(
        tmp_path / "ds",
        batch_size=5,
        shuffle_buffer_size=10,
        max_samples_per_sequence=10,
        task_encoder=CaptioningTaskEncoder(),
    )
    batch = next(iter(get_loader(ds)))
    assert batch["image"].shape == (5, 3, 8, 12)
    assert all(text.startswith("CAPTION") for text in batch["caption"])


def test_quickstart_validates(tmp_path):
    captions(tmp_path / "ds", train="parts/data-[01].tar", val="parts/data-2.tar")
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    ds = get_val_dataset(str(tmp_path / "ds"), batch_size=4, worker_config=config)
    loader = get_loader(ds)
    expected = [f"{i:06d}" for i in range(20, 30)]
    assert keys_of(loader) == keys_of(loader) == expected  # the second pass is equal
    assert len(loader) == 3
    pairs = get_val_datasets(tmp_path / "ds", batch_size=4, limit=2, worker_config=config)
    assert [(len(list(get_loader(ds))), str(f.paths[0])) for ds, f in pairs] == [
        (2, str(tmp_path / "ds"))
    ]


# ------------------------------------------------------------------------------ data preparation


def test_data_prep_writes_with_shard_writer_and_prepares_from_the_command_line(tmp_path):
    write_shards(tmp_path / "ds", 40, caption)
    result = CliRunner().invoke(
        app,
        ["prepare", str(tmp_path / "ds"), "--non-interactive", "--split-ratio", "2,1,1",
         "--num-workers", "1", "--no-progress", "--sample-type", "CaptioningSample",
         "--field-map", '{"image": "jpg", "caption": "json[caption]"}'],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    sizes = {
        part: len(get_val_dataset(tmp_path / "ds", split_part=part, batch_size=None,
                                  worker_config=config))
        for part in ("train", "val", "test")
    }  # fmt: skip
    assert sizes == {"train": 20, "val": 10, "test": 10}
    for command in ("info", "lint"):
        result = CliRunner().invoke(app, [command, str(tmp_path / "ds")])
        assert result.exit_code == 0, result.output


def test_data_prep_prepares_from_python_with_a_brace_pattern(tmp_path):
    write_shards(tmp_path / "ds", 40, caption)
    found = BaseWebdatasetFactory.prepare_dataset(
        EPath(tmp_path / "ds"),
        ["parts/data-{0..3}.tar"],
        split_parts_ratio=[("train", 0.5), ("val", 0.25), ("test", 0.25)],
        shuffle_seed=None,
        workers=1,
    )
    assert set(found) == {"jpg", "txt", "json"}
    split = (tmp_path / "ds/.nv-meta/split.yaml").read_text()
    assert "parts/data-{0..1}.tar" in split


def test_data_prep_field_map_reads_nested_json(tmp_path):
    write_shards(
        tmp_path / "ds", 5,
        lambda n: {"png": png(n), "json": [{"value": f"question {n}"}, {"value": f"answer {n}"}]},
    )  # fmt: skip
    prepared(
        tmp_path / "ds",
        """
sample_type:
  __module__: megatron.energon
  __class__: VQASample
field_map:
  image: jpg,png
  context: json[0][value]
  answers: json[1][value]
""",
    )
    ds = train_set(tmp_path / "ds", repeat=False)
    samples = list(get_loader(ds))
    assert all(isinstance(sample, VQASample) for sample in samples)
    assert sorted(s.answers for s in samples) == [f"answer {n}" for n in range(5)]


SAMPLE_LOADER = """
import torch

def sample_loader(raw: dict) -> dict:
    return dict(
        __key__=raw["__key__"],
        image=raw["jpg"],
        text=raw["json"]["caption"],
        words_boxes=torch.tensor([[0, 0, 1, raw["json"]["id"]]]),
    )

def part_filter(part: str) -> bool:
    return part in ("jpg", "json")
"""


def test_data_prep_sample_loader_next_to_the_yaml(tmp_path, monkeypatch):
    write_shards(tmp_path / "ds", 5, caption)
    config = {
        "sample_type": class_of("OCRSample"),
        "sample_loader": "sample_loader.py:sample_loader",
        "part_filter": "sample_loader.py:part_filter",
    }
    prepared(tmp_path / "ds", config)
    (tmp_path / "ds/.nv-meta/sample_loader.py").write_text(SAMPLE_LOADER)
    monkeypatch.setenv("ENERGON_LITE_TRUST", "1")
    ds = train_set(
        tmp_path / "ds",
        batch_size=2,
        shuffle_buffer_size=10,
        max_samples_per_sequence=10,
        repeat=False,
    )
    batches = list(get_loader(ds))
    assert sorted(int(box[0, 3]) for batch in batches for box in batch.words_boxes) == [*range(5)]


INTERLEAVED_LOADER = """
def sample_loader(raw: dict) -> dict:
    return dict(
        __key__=raw["__key__"],
        sequence=[raw[entry] if entry.endswith("png") else entry for entry in raw["json"]],
    )

def part_filter(part: str) -> bool:
    return True
"""


def test_data_prep_interleaved_sample_of_several_pictures(tmp_path):
    write_shards(
        tmp_path / "ds", 4,
        lambda n: {"1.png": png(n), "2.png": png(n + 1), "json": ["see", "1.png", "and", "2.png"]},
    )  # fmt: skip
    config = {
        "sample_type": class_of("InterleavedSample"),
        "sample_loader": "sample_loader.py",
        "part_filter": "sample_loader.py",
    }
    prepared(tmp_path / "ds", config)
    (tmp_path / "ds/.nv-meta/sample_loader.py").write_text(INTERLEAVED_LOADER)
    ds = val_set(tmp_path / "ds", split_part="train", trust=True)
    kinds = [[type(entry).__name__ for entry in sample.sequence] for sample in get_loader(ds)]
    assert kinds == [["str", "Tensor", "str", "Tensor"]] * 4


def test_data_prep_crude_dataset(tmp_path):
    crude(tmp_path / "ds", 6)

    @stateless
    def cook(sample: CrudeSample) -> CaptioningSample:
        return CaptioningSample(
            **basic_sample_keys(sample), image=sample["jpg"], caption=sample["json"]["caption"]
        )

    class MyTaskEncoder(DefaultTaskEncoder):
        cookers = [Cooker(cook)]  # noqa: RUF012 as users type it

    ds = train_set(tmp_path / "ds", batch_size=3, task_encoder=MyTaskEncoder(), repeat=False)
    assert sorted(keys_of(get_loader(ds))) == [f"{i:06d}" for i in range(6)]


USER_CLASS = """
from dataclasses import dataclass
from megatron.energon import DefaultDecoderWebdatasetFactory, Sample

@dataclass
class ReversedSample(Sample):
    text: str

class ReversedWebdataset(DefaultDecoderWebdatasetFactory[ReversedSample]):
    __sample_type__ = ReversedSample

    def __init__(self, path, **kwargs):
        super().__init__(path, **kwargs)

    def load_sample(self, raw_data):
        sample = super().load_sample(raw_data)
        sample.text = sample.text[::-1]
        return sample
"""


def test_data_prep_dataset_class_of_the_users(tmp_path, monkeypatch):
    texts(tmp_path / "ds", 4)
    (tmp_path / "users_reversed.py").write_text(USER_CLASS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {**class_of("ReversedWebdataset", "users_reversed"), "field_map": {"text": "txt"}}
    (tmp_path / "ds/.nv-meta/dataset.yaml").write_text(json.dumps(config))
    ds = val_set(tmp_path / "ds", split_part="train", trust=True)
    assert next(iter(get_loader(ds))).text == "text 0 "[::-1]


def test_data_prep_other_split_and_dataset_files(tmp_path):
    captions(tmp_path / "ds")
    (tmp_path / "ds/.nv-meta/other.yaml").write_text(
        json.dumps({"sample_type": class_of("TextSample"), "field_map": {"text": "json[caption]"}})
    )
    (tmp_path / "ds/.nv-meta/half.yaml").write_text(
        "split_parts:\n  train: [parts/data-0.tar]\nexclude: [parts/data-0.tar/000003]\n"
    )
    ds = train_set(
        tmp_path / "ds", repeat=False, split_config="half.yaml", dataset_config="other.yaml"
    )
    samples = list(get_loader(ds))
    assert {type(sample) for sample in samples} == {TextSample}
    assert sorted(keys_of(samples)) == [f"{i:06d}" for i in range(10) if i != 3]


# ---------------------------------------------------------------------------------- task encoder


def test_task_encoder_with_types_for_each_step(tmp_path):
    captions(tmp_path / "ds")

    @dataclass
    class EncodedCaptioningSample(Sample):
        image: torch.Tensor
        caption: torch.Tensor

    @dataclass
    class CaptioningRawBatch(Batch):
        image: torch.Tensor
        caption: torch.Tensor

    @dataclass
    class CaptioningBatch(Batch):
        images: torch.Tensor
        text_tokens: torch.Tensor
        text_attn_mask: torch.Tensor

    class CaptioningTaskEncoder(
        DefaultTaskEncoder[
            CaptioningSample, EncodedCaptioningSample, CaptioningRawBatch, CaptioningBatch
        ]
    ):
        def __init__(self, tokenizer, max_seq_len=8):
            super().__init__(
                encoded_sample_type=EncodedCaptioningSample,
                raw_batch_type=CaptioningRawBatch,
                batch_type=CaptioningBatch,
            )
            self.tokenizer = tokenizer
            self.max_seq_len = max_seq_len

        def encode_sample(self, sample: CaptioningSample) -> EncodedCaptioningSample:
            return EncodedCaptioningSample.derive_from(
                sample, image=sample.image,
                caption=torch.tensor(self.tokenizer(sample.caption)[: self.max_seq_len]),
            )  # fmt: skip

        def batch(self, samples: list[EncodedCaptioningSample]) -> CaptioningRawBatch:
            return CaptioningRawBatch.from_samples(
                samples,
                image=batch_pad_stack([s.image for s in samples]),
                caption=batch_pad_stack([s.caption for s in samples]),
            )

        def encode_batch(self, batch_data: CaptioningRawBatch) -> CaptioningBatch:
            return CaptioningBatch.derive_from(
                batch_data, images=batch_data.image, text_tokens=batch_data.caption,
                text_attn_mask=batch_data.caption == 0,
            )  # fmt: skip

    ds = train_set(
        tmp_path / "ds",
        batch_size=6,
        shuffle_buffer_size=20,
        max_samples_per_sequence=10,
        task_encoder=CaptioningTaskEncoder(lambda text: [len(word) for word in text.split()]),
    )
    batch = next(iter(get_loader(ds)))
    assert isinstance(batch, CaptioningBatch)
    assert batch.images.shape == (6, 3, 8, 12)
    assert batch.text_tokens.shape == batch.text_attn_mask.shape
    assert len(batch.__key__) == 6


def test_task_encoder_sees_subflavors(tmp_path):
    texts(tmp_path / "a", 10)
    texts(tmp_path / "b", 10)
    path = metadataset(
        tmp_path / "both.yaml",
        train={"blend": [
            {"weight": 1, "path": "a", "subflavors": {"augment": True}},
            {"weight": 1, "path": "b", "subflavors": {"augment": False}},
        ]},
    )  # fmt: skip

    class TaskEncoder(DefaultTaskEncoder):
        def encode_sample(self, sample):
            if sample.__subflavors__["augment"]:
                sample.text = "augmented"
            return sample

    ds = train_set(path, batch_size=4, task_encoder=TaskEncoder())
    found = [text for batch in itertools.islice(get_loader(ds), 5) for text in batch.text]
    assert 8 <= found.count("augmented") <= 12
    assert len(found) == 20


def test_task_encoder_pre_and_postencodes(tmp_path):
    texts(tmp_path / "ds", 10)

    class TaskEncoder(DefaultTaskEncoder):
        @stateless
        def preencode_sample(self, sample: TextSample) -> TextSample:
            sample.text = sample.text.strip()
            return sample

        @stateless
        def postencode_sample(self, sample: TextSample) -> TextSample:
            sample.text = f"<{sample.text}>"
            return sample

    ds = train_set(
        tmp_path / "ds",
        batch_size=2,
        shuffle_buffer_size=4,
        max_samples_per_sequence=4,
        task_encoder=TaskEncoder(),
        repeat=False,
    )
    found = [text for batch in get_loader(ds) for text in batch.text]
    assert len(found) == 10
    assert all(text.startswith("<text") and text.endswith(">") for text in found)


def test_task_encoder_without_super_init(tmp_path):
    texts(tmp_path / "ds", 4)

    class TaskEncoder(DefaultTaskEncoder):
        def __init__(self, suffix):
            self.suffix = suffix

        def encode_sample(self, sample):
            sample.text += self.suffix
            return sample

    ds = train_set(tmp_path / "ds", batch_size=2, task_encoder=TaskEncoder("!"), repeat=False)
    assert all(text.endswith("!") for batch in get_loader(ds) for text in batch.text)


def test_task_encoder_without_batching(tmp_path):
    texts(tmp_path / "ds", 4)
    ds = val_set(tmp_path / "ds", split_part="train")
    samples = list(get_loader(ds))
    assert [type(sample) for sample in samples] == [TextSample] * 4
    assert samples[0].__sources__[0].shard_name == "parts/data-0.tar"


# --------------------------------------------------------------------------------- metadatasets


def test_metadataset_blends_by_weight(tmp_path):
    texts(tmp_path / "coco", 30)
    texts(tmp_path / "coyo", 30)
    path = tmp_path / "metadataset.yaml"
    path.write_text(
        """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  # Train dataset, the datasets will be mixed according to their weights
  train:
    blend:
      - weight: 5
        path: ./coco
        subflavors: {origin: coco}
      - weight: 2
        path: ./coyo
        subflavors: {origin: coyo}
  # For val and test, datasets will be concatenated
  val:
    path: ./coco
    split_part: train
"""
    )
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    ds = get_train_dataset(
        path, batch_size=7, shuffle_buffer_size=100, max_samples_per_sequence=100,
        worker_config=config,
    )  # fmt: skip
    batches = list(itertools.islice(get_loader(ds), 20))
    origins = [flavor["origin"] for batch in batches for flavor in batch.__subflavors__]
    assert abs(origins.count("coco") - 100) <= 5
    assert len(origins) == 140
    val = get_val_dataset(path, batch_size=10, worker_config=config)
    assert keys_of(get_loader(val)) == [f"{i:06d}" for i in range(30)]


def test_metadataset_nests_by_path_and_outer_subflavors_win(tmp_path):
    for name in ("a", "b", "c"):
        texts(tmp_path / name, 20)
    (tmp_path / "inner").mkdir()
    metadataset(
        tmp_path / "inner/inner.yaml",
        train={"blend": [
            {"weight": 1, "path": "../b", "subflavors": {"name": "b", "kind": "inner"}},
            {"weight": 3, "path": "../c", "subflavors": {"name": "c", "kind": "inner"}},
        ]},
    )  # fmt: skip
    outer = metadataset(
        tmp_path / "outer.yaml",
        train={"blend": [
            {"weight": 3, "path": "a", "subflavors": {"name": "a"}},
            {"weight": 1, "path": "inner/inner.yaml", "subflavors": {"kind": "outer"}},
        ]},
    )  # fmt: skip
    ds = train_set(outer, batch_size=16)
    flavors = [f for b in itertools.islice(get_loader(ds), 10) for f in b.__subflavors__]
    names = [flavor["name"] for flavor in flavors]
    counts = {name: names.count(name) for name in "abc"}
    assert abs(counts["a"] - 120) <= 5
    assert abs(counts["b"] - 10) <= 5
    assert {f["kind"] for f in flavors if f["name"] != "a"} == {"outer"}
    leaves = traverse_metadataset(outer, split_part="train")
    assert [Path(str(leaf.path)).name for leaf in leaves] == ["a", "b", "c"]


def test_metadataset_is_loaded_from_python(tmp_path):
    texts(tmp_path / "a", 20)
    path = metadataset(tmp_path / "m.yaml", train={"path": "a"})
    loaded = load_dataset(path)
    datasets = loaded.get_datasets(
        training=False,
        split_part="train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    assert len(datasets.datasets) == 1
    assert len(datasets.datasets[0].dataset) == 20


def test_metadataset_as_a_dict(tmp_path):
    texts(tmp_path / "a", 5)
    content = {**class_of("MetadatasetV2"), "splits": {"train": {"path": str(tmp_path / "a")}}}
    ds = train_set(content, batch_size=5, repeat=False)
    assert len(keys_of(get_loader(ds))) == 5


def test_metadataset_of_the_old_form(tmp_path):
    texts(tmp_path / "a", 10)
    texts(tmp_path / "b", 10)
    path = tmp_path / "old.yaml"
    path.write_text(
        """
__module__: megatron.energon
__class__: Metadataset
splits:
  train:
    datasets:
      - {weight: 1, path: a, subflavors: {from: a}}
      - {weight: 3, path: b, subflavors: {from: b}}
"""
    )
    ds = train_set(path, batch_size=8)
    flavors = [f["from"] for b in itertools.islice(get_loader(ds), 10) for f in b.__subflavors__]
    assert abs(flavors.count("b") - 60) <= 5


# ----------------------------------------------------------------------------- save and restore


def savable(path, **settings):
    ds = get_train_dataset(
        path, batch_size=3, shuffle_buffer_size=10, max_samples_per_sequence=5,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=settings.pop("workers", 0)),
        **settings,
    )  # fmt: skip
    return get_savable_loader(ds)


@pytest.mark.parametrize("workers", [0, 2])
def test_save_restore_per_rank_by_torch_save(tmp_path, workers):
    texts(tmp_path / "ds")
    loader = savable(tmp_path / "ds", workers=workers)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.save_state_rank()
    torch.save(state, tmp_path / "dataloader_rank0.pt")
    expected = keys_of(next(iterator) for _ in range(10))

    resumed = savable(tmp_path / "ds", workers=workers)
    resumed.restore_state_rank(torch.load(tmp_path / "dataloader_rank0.pt", weights_only=False))
    assert keys_of(itertools.islice(resumed, 10)) == expected


def test_save_restore_global(tmp_path):
    texts(tmp_path / "ds")
    loader = savable(tmp_path / "ds")
    keys_of(itertools.islice(loader, 4))
    state = loader.save_state_global(global_dst_rank=0)
    expected = keys_of(itertools.islice(loader, 6))
    resumed = savable(tmp_path / "ds")
    resumed.restore_state_global(state, src_rank=None)
    assert keys_of(itertools.islice(resumed, 6)) == expected
    again = savable(tmp_path / "ds")
    again.restore_state_global(state=state, src_rank=0)
    assert keys_of(itertools.islice(again, 6)) == expected


def test_save_restore_by_the_deprecated_names(tmp_path):
    texts(tmp_path / "ds")
    loader = savable(tmp_path / "ds")
    keys_of(itertools.islice(loader, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        state = loader.save_state(0)
        expected = keys_of(itertools.islice(loader, 6))
        resumed = savable(tmp_path / "ds")
        resumed.restore_state(state)
    assert keys_of(itertools.islice(resumed, 6)) == expected


def test_restoring_none_does_nothing(tmp_path):
    texts(tmp_path / "ds")
    loader = savable(tmp_path / "ds")
    loader.restore_state_rank(None)
    assert len(keys_of(itertools.islice(loader, 2))) == 6


def test_a_sample_is_restored_by_its_key(tmp_path):
    texts(tmp_path / "ds")
    loader = savable(tmp_path / "ds")
    assert loader.can_restore_sample()
    batch = list(itertools.islice(loader, 3))[-1]
    again = loader.restore_sample(batch.__restore_key__)
    assert (again.__key__, again.text) == (batch.__key__, batch.text)


# -------------------------------------------------------------------------------- data decoding


def test_decoding_pictures_as_pil(tmp_path):
    captions(tmp_path / "ds", 4)

    class MyTaskEncoder(DefaultTaskEncoder):
        decoder = SampleDecoder(image_decode="pilrgb")

    ds = train_set(tmp_path / "ds", task_encoder=MyTaskEncoder(), repeat=False)
    sample = next(iter(get_loader(ds)))
    assert isinstance(sample.image, Image.Image)
    assert sample.image.mode == "RGB"


def test_decoding_switched_off(tmp_path):
    captions(tmp_path / "ds", 4)

    class MyTaskEncoder(DefaultTaskEncoder):
        decoder = None

    ds = train_set(tmp_path / "ds", task_encoder=MyTaskEncoder(), repeat=False)
    sample = next(iter(get_loader(ds)))
    assert isinstance(sample.image, bytes)
    assert isinstance(sample.caption, bytes)


@pytest.mark.parametrize(
    ("mode", "shape", "kind"),
    [("torchrgb", (3, 8, 12), torch.float32), ("torchrgb8", (3, 8, 12), torch.uint8),
     ("torchl8", (8, 12), torch.uint8)],
)  # fmt: skip
def test_decoding_pictures_as_tensors(tmp_path, mode, shape, kind):
    captions(tmp_path / "ds", 2)

    class MyTaskEncoder(DefaultTaskEncoder):
        decoder = SampleDecoder(image_decode=mode)

    ds = val_set(tmp_path / "ds", split_part="train", task_encoder=MyTaskEncoder())
    image = next(iter(get_loader(ds))).image
    assert (tuple(image.shape)[-2:], image.dtype) == (shape[-2:], kind)
