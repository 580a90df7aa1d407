"""How three public code bases use Energon, rewritten: imports, samples, encoders, loops, states.

Only `as_energon` stands between them and this library.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon import (
    Batch,
    CaptioningSample,
    DefaultTaskEncoder,
    LimitDataset,
    MultiChoiceVQASample,
    OCRSample,
    RepeatDataset,
    Sample,
    SimilarityInterleavedSample,
    VQASample,
    WorkerConfig,
    batch_list,
    batch_pad_stack,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_datasets,
)
from megatron.energon.task_encoder.base import stateless

from ..helpers import assert_same
from .energon_data import (
    before_and_after,
    captions,
    class_of,
    metadataset,
    png,
    prepared,
    train_set,
    write_shards,
)


def words(text: str) -> list[int]:
    """A tokenizer."""
    return [len(word) for word in text.split()]


def vqa(folder, num_samples=24):
    """A VQA dataset with train and val parts."""
    write_shards(
        folder,
        num_samples,
        lambda n: {
            "jpg": png(n),
            "json": {"q": f"what is {n} " + "x " * (n % 4), "a": f"the answer {n}"},
        },
        maxcount=8,
    )
    field_map = {"image": "jpg", "context": "json[q]", "answers": "json[a]"}
    config = {"sample_type": class_of("VQASample"), "field_map": field_map}
    return prepared(folder, config, train="parts/data-[01].tar", val="parts/data-2.tar")


class EnergonDataloader:
    """What Megatron's training loops put around a loader."""

    def __init__(self, dataloader):
        self.save_state_rank = dataloader.save_state_rank
        self.restore_state_rank = dataloader.restore_state_rank
        self._iter = itertools.chain.from_iterable(itertools.repeat(dataloader))

    def __iter__(self):
        return self._iter


def service(samples, **fields):
    """The service fields of a pack or batch, made by hand."""
    keys = [s.__key__ for s in samples]
    return {"__key__": keys, "__restore_key__": [s.__restore_key__ for s in samples], **fields}


# ---------------------------------------------------------------- Megatron-LM, multimodal example


def of_tokens(base, **fields):
    """A dataclass of the program's, which names the service fields once more."""
    own = {"__key__": str, "__restore_key__": tuple, "__subflavor__": dict, "__subflavors__": dict}
    return dataclass(type("Own", (base,), {"__annotations__": {**own, **fields}}))


def multimodal_encoder():
    TENSORS = {"tokens": torch.Tensor, "labels": torch.Tensor, "imgs": list}
    ImageTaskSample = of_tokens(Sample, **TENSORS, num_tiles=list, total_len=int)
    ImageTaskSamplePacked = of_tokens(Sample, **TENSORS, cu_lengths=torch.Tensor)
    ImageTaskBatchPacked = of_tokens(Batch, **TENSORS, cu_lengths=list)

    class TaskEncoder(DefaultTaskEncoder[OCRSample, OCRSample, ImageTaskBatchPacked, dict]):
        def __init__(self, packing_seq_length):
            super().__init__()
            self.packing_seq_length = packing_seq_length
            self.prompts = ["describe", "what is it"]

        @stateless(restore_seeds=True)
        def encode_sample(self, sample):
            if isinstance(sample, (OCRSample, SimilarityInterleavedSample, MultiChoiceVQASample)):
                raise NotImplementedError("Sample format not supported", sample)
            if isinstance(sample, CaptioningSample):
                prompt = self.prompts[np.random.randint(len(self.prompts))]
                yield self._encode(sample, f"{prompt} {sample.caption}")
            elif isinstance(sample, VQASample):
                yield self._encode(sample, f"{sample.context} {sample.answers}")

        def _encode(self, sample, text):
            tokens = words(text)
            return ImageTaskSample(
                __key__=sample.__key__, __restore_key__=sample.__restore_key__,
                __subflavor__=None, __subflavors__=sample.__subflavors__,
                imgs=[torch.from_numpy(np.asarray(sample.image)).float()], num_tiles=[1],
                tokens=torch.tensor(tokens), labels=torch.tensor(tokens), total_len=len(tokens),
            )  # fmt: skip

        def select_samples_to_pack(self, samples):
            packs, room = [], 0
            for sample in sorted(samples, key=lambda s: -s.total_len):
                if sample.total_len > room:
                    packs.append([])
                    room = self.packing_seq_length
                packs[-1].append(sample)
                room -= sample.total_len
            return packs

        @stateless
        def pack_selected_samples(self, samples):
            ends = np.cumsum([0, *(s.total_len for s in samples)])
            tokens = torch.cat([s.tokens for s in samples])
            return ImageTaskSamplePacked(
                __key__=",".join(s.__key__ for s in samples), __restore_key__=(),
                __subflavor__=None, __subflavors__=samples[0].__subflavors__, tokens=tokens,
                labels=tokens, imgs=[img for s in samples for img in s.imgs],
                cu_lengths=torch.tensor(ends),
            )  # fmt: skip

        def batch(self, samples):
            longest = max(len(s.tokens) for s in samples)
            tokens = torch.zeros((len(samples), longest), dtype=torch.int64)
            for i, sample in enumerate(samples):
                tokens[i, : len(sample.tokens)] = sample.tokens
            fields = service(samples, __subflavor__=None, __subflavors__=samples[0].__subflavors__)
            return ImageTaskBatchPacked(
                **fields, tokens=tokens, labels=tokens,
                imgs=torch.stack([img for s in samples for img in s.imgs]),
                cu_lengths=[getattr(s, "cu_lengths", None) for s in samples],
            )  # fmt: skip

        def encode_batch(self, batch):
            raw = dataclasses.asdict(batch)
            del raw["__subflavors__"]
            return raw

    return TaskEncoder


def print_error_handler(exc: Exception, key: str | None) -> None:
    """Energon ignores it, and calls it nowhere; it has another signature than ours."""
    raise AssertionError("never called")


def multimodal_loaders(path, packing_buffer_size, workers):
    worker_config = WorkerConfig(
        rank=0,
        world_size=1,
        num_workers=workers,
        data_parallel_group=None,
        worker_debug_path=None,
        worker_log_level=0,
    )
    common = {
        "batch_size": 2,
        "task_encoder": multimodal_encoder()(30),
        "worker_config": worker_config,
        "packing_buffer_size": packing_buffer_size,
        "handler": print_error_handler,
        "image_decode": "pil",
    }
    shuffling = {"max_samples_per_sequence": 100, "shuffle_buffer_size": 100}
    train = get_train_dataset(path, virtual_epoch_length=1000, **shuffling, **common)
    own = {"worker_config": worker_config}
    validation = [
        LimitDataset(RepeatDataset(ds, **own), length=6, reset_after_epoch=True, **own)
        for ds, _ in get_val_datasets(path, **common)
    ]
    return get_savable_loader(train, **own), [get_loader(ds, **own) for ds in validation]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("buffer", "workers", "is_blend"), [(None, 0, True), (8, 0, False), (8, 1, True)]
)
def test_megatron_lm_multimodal(tmp_path, buffer, workers, is_blend):
    path = vqa(tmp_path / "ds")
    if is_blend:  # of two types of samples, one of which is encoded with random numbers
        captions(tmp_path / "captions")
        blend = [{"path": "ds", "weight": 2}, {"path": "captions"}]
        path = metadataset(tmp_path / "blend.yaml", train={"blend": blend}, val={"path": "ds"})

    def make():
        return EnergonDataloader(multimodal_loaders(path, buffer, workers)[0])

    batches, expected, found = before_and_after(make, 5, 6, tmp_path / "rank000.pt")
    names = {"tokens", "labels", "imgs", "cu_lengths", "__key__", "__restore_key__"}
    assert set(batches[0]) == names | {"__subflavor__", "__sources__"}
    assert all(len(batch["tokens"]) == 2 for batch in batches)
    if buffer:
        assert any("," in key for batch in expected for key in batch["__key__"])
        assert max(ends[-1] for batch in expected for ends in batch["cu_lengths"]) <= 30
    assert_same(found, expected)
    (val,) = multimodal_loaders(path, buffer, workers)[1]
    passes = [[batch["__key__"] for batch in val] for _ in range(2)]
    assert [len(batches) for batches in passes] == [6, 6]
    assert passes[0] == passes[1]


# --------------------------------------------------------------------------------- Megatron-Bridge


BRIDGE = """
import pickle
import re
from dataclasses import dataclass
from typing import List, Optional

import torch
from megatron.energon.epathlib.epath import EPath
from megatron.energon.flavors.base_dataset import Sample
from megatron.energon.flavors.webdataset import DefaultDecoderWebdatasetFactory
from webdataset.autodecode import Decoder, imagehandler


@dataclass
class ChatMLSample(Sample):
    conversation: str
    imgs: Optional[List[torch.Tensor]] = None


class pictures:
    def __call__(self, key, data):
        if re.sub(r".*[.]", "", key).lower() != "jpgs":
            return None
        return [imagehandler("torchrgb")("png", entry) for entry in pickle.loads(data)]


class ChatMLWebdataset(DefaultDecoderWebdatasetFactory[ChatMLSample]):
    __sample_type__ = ChatMLSample

    def __init__(self, path: EPath, *, auto_decode: bool = True, **kwargs):
        kwargs.pop("decoder", None)
        super().__init__(path, decoder=None, **kwargs)
        if auto_decode:
            self._decoder = Decoder([imagehandler("torchrgb"), pictures()])
"""


def test_megatron_bridge(tmp_path, monkeypatch):
    write_shards(
        tmp_path / "ds",
        12,
        lambda n: {
            "jpgs": pickle.dumps([png(n), png(n + 1)]),
            "json": [{"from": "human", "value": f"hi {n}"}, {"from": "gpt", "value": "ho"}],
        },
    )
    config = {
        **class_of("ChatMLWebdataset", "bridge_data"),
        "field_map": {"imgs": "jpgs", "conversation": "json"},
    }
    prepared(tmp_path / "ds", config)
    (tmp_path / "bridge_data.py").write_text(BRIDGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ENERGON_LITE_TRUST", "1")

    @dataclass
    class EncodedSample:
        __key__: str
        __subflavors__: dict
        input_ids: torch.Tensor
        visual_tensors: dict = field(default_factory=dict)

    @dataclass
    class EncodedBatch(Batch):
        __keys__: list = field(default_factory=list)
        __subflavors__: list = field(default_factory=list)
        input_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0))
        visual_tensors: dict = field(default_factory=dict)

    class TaskEncoder(DefaultTaskEncoder[Any, EncodedSample, EncodedBatch, dict]):
        def encode_sample(self, sample):
            turns = sample.conversation
            turns = json.loads(turns) if isinstance(turns, (str, bytes)) else turns
            ids = torch.tensor(words(turns[0]["value"]))
            visual = {"pixel_values": torch.stack(sample.imgs)}
            return EncodedSample(sample.__key__, sample.__subflavors__, ids, visual)

        def batch(self, samples):
            keys = [s.__key__ for s in samples]
            visual = torch.cat([s.visual_tensors["pixel_values"] for s in samples])
            return EncodedBatch(
                __key__=keys, __restore_key__=(), __keys__=keys,
                __subflavors__=[s.__subflavors__ for s in samples],
                input_ids=torch.stack([s.input_ids for s in samples]),
                visual_tensors={"pixel_values": visual},
            )  # fmt: skip

        def encode_batch(self, batch):
            raw = dataclasses.asdict(batch)
            for name in ("__key__", "__keys__", "__restore_key__", "__subflavors__", "__sources__"):
                raw.pop(name, None)
            return raw

    def make():
        own = {"task_encoder": TaskEncoder(), "split_part": "train", "shuffle_buffer_size": 100}
        worker_config = WorkerConfig.default_worker_config(0)
        return get_savable_loader(
            train_set(
                tmp_path / "ds", 2, packing_buffer_size=None, worker_config=worker_config, **own
            )
        )

    (batch,), expected, found = before_and_after(lambda: EnergonDataloader(make()), 1, 1)
    assert set(batch) == {"input_ids", "visual_tensors"}
    assert batch["visual_tensors"]["pixel_values"].shape == (4, 3, 8, 12)
    assert_same(found, expected)


# -------------------------------------------------------------------------------------------- NeMo


@dataclass
class ImageTextSample:
    """No subclass of Sample: NeMo's is made empty, then filled."""

    __key__: str = ""
    images: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))


@dataclass
class PackedImageTextSample(ImageTextSample):
    __restore_key__: tuple = ()
    position_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class ImageTextRawBatch:
    __keys__: list = field(default_factory=list)
    images: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))


def nemo_encoder(packed):
    class MultiModalTaskEncoder(DefaultTaskEncoder[VQASample, ImageTextSample, Any, dict]):
        def __init__(self, tokenizer):  # calls no super().__init__()
            self.tokenizer = tokenizer
            self.encoders = {VQASample.__name__: self._encode_vqa}

        def _encode_vqa(self, sample, out):
            out.__key__ = sample.__key__
            out.images = sample.image
            out.tokens = torch.tensor(self.tokenizer(sample.context))
            return out

        @stateless
        def encode_sample(self, sample):
            return self.encoders[type(sample).__name__](sample, ImageTextSample())

        def batch(self, samples):
            return ImageTextRawBatch(
                __keys__=batch_list([s.__key__ for s in samples]),
                images=batch_pad_stack([s.images for s in samples]),
                tokens=batch_pad_stack([s.tokens for s in samples]),
            )

        def encode_batch(self, batch_data):
            batch_dict = batch_data.__dict__
            batch_dict["media"] = batch_dict["images"]
            del batch_dict["images"]
            batch_dict["attention_mask"] = None
            return batch_dict

        def select_samples_to_pack(self, samples):
            return [samples[i : i + 3] for i in range(0, len(samples), 3)]

        @stateless
        def pack_selected_samples(self, samples):
            return PackedImageTextSample(
                __key__=",".join(s.__key__ for s in samples),
                __restore_key__=(),
                tokens=torch.cat([s.tokens for s in samples]),
                images=torch.stack([s.images for s in samples]),
                position_ids=torch.arange(sum(len(s.tokens) for s in samples)),
            )

    return MultiModalTaskEncoder(words)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("packing_buffer_size", [None, 9])
def test_nemo(tmp_path, packing_buffer_size):
    path = str(vqa(tmp_path / "ds"))

    def make(split="train"):
        worker_config = WorkerConfig.default_worker_config(0)
        own = {"packing_buffer_size": packing_buffer_size, "split_part": split}
        own["task_encoder"] = nemo_encoder(packing_buffer_size)
        size = 1 if packing_buffer_size else 2
        dataset = train_set(path, size, worker_config=worker_config, shuffle_buffer_size=100, **own)
        return get_savable_loader(dataset, worker_config=worker_config)

    batches, expected, found = before_and_after(make, 3, 5)
    assert set(batches[0]) == {"__keys__", "tokens", "media", "attention_mask"}
    assert_same(found, expected)
    assert len(list(itertools.islice(make("val"), 4))) == 4
