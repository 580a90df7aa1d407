"""What Energon's documentation shows under "basic", as a user types it."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from dataclasses import dataclass

import pytest
import torch
from megatron.energon import (
    Batch,
    CaptioningSample,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    TextSample,
    VQASample,
    WorkerConfig,
    batch_pad_stack,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_datasets,
)
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseWebdatasetFactory

from .energon_data import (
    before_and_after,
    caption,
    captions,
    class_of,
    command,
    config,
    encoder,
    keys_of,
    numbered,
    png,
    prepared,
    shuffled,
    texts,
    train_set,
    val_set,
    validated,
    write_keyed,
    write_shards,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Datasets of 30 captions, `ds`, with two parts, and of 30 texts, `texts`; read only."""
    root = tmp_path_factory.mktemp("docs")
    captions(root / "ds", train="parts/data-[01].tar", val="parts/data-2.tar")
    texts(root / "texts")
    return root


# ------------------------------------------------------------------------------------ quickstart


@pytest.mark.parametrize("workers", [0, 2])
def test_quickstart_trains_on_captions(root, workers):
    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    train_ds = get_train_dataset(
        str(root / "ds"),
        batch_size=1,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        worker_config=worker_config if workers else WorkerConfig.default_worker_config(0),
    )
    train_loader = get_loader(train_ds) if workers else get_savable_loader(train_ds)
    batches = list(itertools.islice(train_loader, 45))
    for batch in batches:
        assert batch.image.shape == (1, 3, 8, 12)
        assert batch.caption[0].startswith("caption")
    assert set(keys_of(batches)) == set(numbered(range(20)))


def test_quickstart_validates(root):
    loader = get_loader(val_set(str(root / "ds"), 4))
    expected = numbered(range(20, 30))
    assert keys_of(loader) == keys_of(loader) == expected  # the second pass is equal
    assert len(loader) == 3
    pairs = get_val_datasets(root / "ds", batch_size=4, limit=2, worker_config=config())
    assert [(len(list(get_loader(ds))), str(f.paths[0])) for ds, f in pairs] == [
        (2, str(root / "ds"))
    ]
    (sample, *_) = validated(root / "texts", split_part="train")
    assert type(sample) is TextSample
    assert sample.__sources__[0].shard_name == "parts/data-0.tar"


# ------------------------------------------------------------------------------ data preparation

TYPED = ("--non-interactive", "--sample-type", "CaptioningSample")


def test_data_prep_writes_with_shard_writer_and_prepares_from_the_command_line(tmp_path):
    ds = write_shards(tmp_path / "ds", 40, caption)
    field_map = '{"image": "jpg", "caption": "json[caption]"}'
    options = ("--split-ratio", "2,1,1", "--num-workers", "1", "--no-progress")
    command("prepare", ds, *options, *TYPED, "--field-map", field_map)
    sizes = [len(val_set(ds, split_part=part)) for part in ("train", "val", "test")]
    assert sizes == [20, 10, 10]
    command("info", ds, "--")
    command("lint", ds, "--split-parts=train")
    if not os.environ.get("ENERGON_REAL"):  # it divides by zero for pictures of one colour
        command("preview", ds, "--split-parts", "train", answers="y\nn\n")


def test_data_prep_prepares_from_python_with_a_brace_pattern(tmp_path):
    found = BaseWebdatasetFactory.prepare_dataset(
        EPath(write_shards(tmp_path / "ds", 40, caption)),
        ["parts/data-{0..3}.tar"],
        split_parts_ratio=[("train", 0.5), ("val", 0.25), ("test", 0.25)],
        shuffle_seed=None,
        workers=1,
    )
    assert set(found) == {"jpg", "txt", "json"}
    assert "parts/data-{0..1}.tar" in (tmp_path / "ds/.nv-meta/split.yaml").read_text()


@pytest.mark.parametrize("sep", ["_", "/"], ids=["prefix", "folder"])
def test_parts_are_split_by_prefix_and_by_folder(tmp_path, sep):
    for number, shard in enumerate((f"train{sep}0", f"train{sep}1", f"val{sep}0")):
        keys = [f"{number}0", f"{number}1"]
        write_keyed(tmp_path / str(number), keys, lambda key: caption(int(key)))
        path = tmp_path / "ds" / "shards" / f"{shard}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / str(number) / "parts" / "data-0.tar").rename(path)
    parts = ("--split-parts", f"train:shards/train{sep}.*")
    parts += ("--split-parts", f"val:shards/val{sep}.*")
    field_map = '{"image": "jpg", "caption": "txt"}'
    command("prepare", tmp_path / "ds", *parts, *TYPED, "--field-map", field_map)
    assert keys_of(validated(tmp_path / "ds")) == ["20", "21"]
    assert len(validated(tmp_path / "ds", split_part="train")) == 4


def test_data_prep_field_map_reads_nested_json(tmp_path):
    lines = [{"value": "question {n}"}, {"value": "answer {n}"}]
    write_shards(tmp_path / "ds", 5, lambda n: {
        "png": png(n), "json": json.loads(json.dumps(lines).replace("{n}", str(n)))
    })  # fmt: skip
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
    samples = list(get_loader(train_set(tmp_path / "ds", repeat=False)))
    assert all(isinstance(sample, VQASample) for sample in samples)
    assert sorted(s.answers for s in samples) == [f"answer {n}" for n in range(5)]


OCR_LOADER = """
import torch

def sample_loader(raw: dict) -> dict:
    return dict(
        __key__=raw["__key__"],
        image=raw["jp2"],
        text="\\n".join(line["text"] for line in raw["json"]["lines"]),
        lines_boxes=torch.tensor([(l["l"], l["t"], l["r"] - l["l"], l["b"] - l["t"])
            for l in raw["json"]["lines"]], dtype=torch.int64),
        lines_text=[line["text"] for line in raw["json"]["lines"]],
    )

def part_filter(part: str) -> bool:
    return part in ("jp2", "json")
"""
INTERLEAVED_LOADER = """
def sample_loader(raw: dict) -> dict:
    return dict(
        __key__=raw["__key__"],
        sequence=[raw[entry] if entry.endswith("png") else entry for entry in raw["json"]],
    )

def part_filter(part: str) -> bool:
    return True
"""


def loaded(folder, kind, code, parts, suffix="", **settings):
    """The first sample that a sample loader makes, which is trusted."""
    write_shards(folder, 2, lambda n: parts)
    names = ("sample_loader", "part_filter")
    own = {name: "sample_loader.py" + (suffix and f":{name}") for name in names}
    prepared(folder, {"sample_type": class_of(kind), **own})
    (folder / ".nv-meta/sample_loader.py").write_text(code)
    return validated(folder, split_part="train", **settings)[0]


def test_data_prep_sample_loader_next_to_the_yaml(tmp_path, monkeypatch):
    parts = {"1.png": png(1), "2.png": png(2), "json": ["see", "1.png", "and", "2.png"]}
    sample = loaded(tmp_path / "a", "InterleavedSample", INTERLEAVED_LOADER, parts, trust=True)
    assert [type(entry).__name__ for entry in sample.sequence] == ["str", "Tensor"] * 2
    monkeypatch.setenv("ENERGON_LITE_TRUST", "1")
    lines = [{"l": 1, "t": 2, "r": 9, "b": 7, "text": t} for t in ("CHAPTER", "4")]
    parts = {"jp2": caption(3)["jpg"], "json": {"lines": lines}}
    sample = loaded(tmp_path / "b", "OCRSample", OCR_LOADER, parts, suffix="of each")
    assert sample.text == "CHAPTER\n4"
    assert sample.lines_boxes.tolist() == [[1, 2, 8, 5]] * 2
    assert sample.words_boxes is None


def test_shards_and_samples_are_excluded(tmp_path):
    meta = texts(tmp_path / "ds", 30) / ".nv-meta"
    counts = json.loads((meta / ".info.json").read_text())["shard_counts"]
    (meta / ".info.json").unlink()
    (meta / ".info.yaml").write_text(json.dumps({"shard_counts": counts}))
    (meta / "split.yaml").write_text(
        "exclude:\n  - parts/data-2.tar\n  - parts/data-1.tar/000012\n"
        "split_parts:\n  train:\n  - parts/data-0.tar\n  - parts/data-1.tar\n  - parts/data-2.tar\n"
    )
    found = keys_of(validated(tmp_path / "ds", split_part="train"))
    assert found == numbered(n for n in range(20) if n != 12)


# ---------------------------------------------------------------------------------- task encoder


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
    decoder = SampleDecoder(image_decode="torchrgb")

    def __init__(self, tokenizer, image_transform=lambda image: image, max_seq_len=8):
        super().__init__(
            encoded_sample_type=EncodedCaptioningSample,
            raw_batch_type=CaptioningRawBatch,
            batch_type=CaptioningBatch,
        )
        self.tokenizer = tokenizer
        self.image_transform = image_transform
        self.max_seq_len = max_seq_len

    def encode_sample(self, sample: CaptioningSample) -> EncodedCaptioningSample:
        sample.image = self.image_transform(sample.image)
        caption = torch.tensor(self.tokenizer(sample.caption)[: self.max_seq_len])
        return EncodedCaptioningSample.derive_from(sample, image=sample.image, caption=caption)

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


@pytest.mark.parametrize("has_transforms", [False, True])
def test_task_encoder_with_types_for_each_step(root, has_transforms):
    size, own = (8, 12), {}
    if has_transforms:
        size, reason = (16, 16), "needs torchvision"
        transforms = pytest.importorskip("torchvision.transforms", reason=reason)
        own["image_transform"] = transforms.RandomResizedCrop(size)
    encoding = CaptioningTaskEncoder(lambda text: [len(word) for word in text.split()], **own)
    batch = next(iter(shuffled(root / "ds", 6, task_encoder=encoding)))
    assert isinstance(batch, CaptioningBatch)
    assert batch.images.shape == (6, 3, *size)
    assert batch.text_tokens.shape == batch.text_attn_mask.shape
    assert len(batch.__key__) == 6


# --------------------------------------------------------------------------------- metadatasets

HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\n"
BLEND = """splits:
  # Train dataset, the datasets will be mixed according to their weights
  train:
    blend:
      - weight: 5
        path: ./texts
        subflavors: {origin: a}
      - weight: 2
        path: ./ds
        dataset_config: dataset.yaml
        subflavors: {origin: b}
  # For val and test, datasets will be concatenated
  val:
    path: ./texts
    split_part: train
"""
OLD = BLEND[: BLEND.index("  # For val")].replace("blend:", "datasets:")


@pytest.mark.parametrize("form", ["new", "old", "dict"])
def test_metadataset_blends_by_weight(root, form):
    path = root / f"{form}.yaml"
    path.write_text(OLD if form == "old" else HEAD + BLEND)
    leaves = [(5, "texts", "a"), (2, "ds", "b")]
    blend = [
        {"weight": weight, "path": str(root / name), "subflavors": {"origin": origin}}
        for weight, name, origin in leaves
    ]
    content = {**class_of("MetadatasetV2"), "splits": {"train": {"blend": blend}}}
    ds = train_set(content if form == "dict" else path, task_encoder=encoder(decoder=None))
    samples = list(itertools.islice(get_loader(ds), 140))
    origins = [sample.__subflavors__["origin"] for sample in samples]
    assert abs(origins.count("a") - 100) <= 5
    assert len(origins) == 140
    if form == "new":
        assert keys_of(validated(path, 10)) == numbered(range(30))


# ----------------------------------------------------------------------------- save and restore


@pytest.mark.parametrize("workers", [0, 2])
def test_save_restore_per_rank_by_torch_save(root, tmp_path, workers):
    def make():
        return shuffled(root / "texts", 3, worker_config=config(num_workers=workers))

    _, expected, found = before_and_after(make, 5, 10, tmp_path / "dataloader_rank0.pt")
    assert keys_of(found) == keys_of(expected)


def test_save_restore_global(root):
    ways = [
        (lambda x: x.save_state_global(global_dst_rank=0), lambda x, state:
         x.restore_state_global(state, src_rank=None)),
        (lambda x: x.save_state_global(0), lambda x, state:
         x.restore_state_global(state=state, src_rank=0)),
        (lambda x: x.save_state(0), lambda x, state: x.restore_state(state)),  # deprecated names
    ]  # fmt: skip
    for save, restore in ways:
        loader, resumed = shuffled(root / "texts", 3), shuffled(root / "texts", 3)
        resumed.restore_state_rank(None)  # does nothing
        keys_of(itertools.islice(loader, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            state = save(loader)
            expected = keys_of(itertools.islice(loader, 6))
            restore(resumed, state)
        assert keys_of(itertools.islice(resumed, 6)) == expected


# -------------------------------------------------------------------------------- data decoding


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (None, "bytes"),
        ("pilrgb", "Image RGB"),
        ("torchrgb", "Tensor (3, 8, 12) torch.float32"),
        ("torchrgb8", "Tensor (3, 8, 12) torch.uint8"),
        ("torchl8", "Tensor (8, 12) torch.uint8"),
    ],
)
def test_decoding_pictures(root, mode, expected):
    own = encoder(decoder=mode and SampleDecoder(image_decode=mode))
    image = validated(root / "ds", task_encoder=own)[0].image
    found = [type(image).__name__]
    if isinstance(image, torch.Tensor):
        found += [str(tuple(image.shape)), str(image.dtype)]
    elif mode:
        found.append(image.mode)
    assert " ".join(found) == expected
