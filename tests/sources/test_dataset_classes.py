"""Dataset classes of the user's: their decoders, their `load_sample`, and Energon's arguments."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from webdataset.autodecode import Decoder, imagehandler

from energon_lite import (
    DatasetFormatError,
    DefaultDecoderWebdatasetFactory,
    DefaultGenericWebdatasetFactory,
    FatalSampleError,
    Sample,
    SampleDecoder,
    StandardWebdatasetFactory,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_lite.sources.dataset_config import load_factory

from ..conftest import jpeg, write_tar
from ..helpers import assert_same, prepared, text_set, through_json

NUM_TEXTS = 12


@dataclass
class ChatSample(Sample):
    conversation: str
    imgs: list[Any] | None = None


class PickledImages:
    """A handler of webdataset: the part with one extension is a pickled list of JPEGs."""

    def __init__(self, extension: str) -> None:
        self.extension = extension

    def __call__(self, key: str, data: bytes) -> Any:
        if key.split(".")[-1] != self.extension:
            return None
        return [np.asarray(Image.open(io.BytesIO(raw))) for raw in pickle.loads(data)]


class ChatWebdataset(DefaultDecoderWebdatasetFactory[ChatSample]):
    """As training frameworks write it: the decoder is webdataset's, set after `super()`."""

    __sample_type__ = ChatSample

    def __init__(self, path: Any, *, auto_decode: bool = True, **kwargs: Any) -> None:
        super().__init__(path, auto_decode=auto_decode, **kwargs)
        if auto_decode:
            self._decoder = Decoder([imagehandler("pil"), PickledImages("jpgs")])


class EarlyChatWebdataset(DefaultDecoderWebdatasetFactory[ChatSample]):
    """The same, set before `super()`."""

    __sample_type__ = ChatSample

    def __init__(self, path: Any, **kwargs: Any) -> None:
        self._decoder = Decoder([PickledImages("jpgs")])
        super().__init__(path, **kwargs)


class OldChatWebdataset(DefaultDecoderWebdatasetFactory[ChatSample]):
    """As classes for Energon 6 have it: settings of the decoder are arguments and attributes."""

    __sample_type__ = ChatSample

    def __init__(self, path: Any, *, image_decode: str = "pilrgb", **kwargs: Any) -> None:
        super().__init__(path, auto_decode=True, image_decode=image_decode, **kwargs)
        self.seen = self.image_decode, self.av_decode, self.video_decode_audio


class WrongChatWebdataset(DefaultDecoderWebdatasetFactory[ChatSample]):
    """Passes an argument that there is not."""

    __sample_type__ = ChatSample

    def __init__(self, path: Any, **kwargs: Any) -> None:
        super().__init__(path, decode_images=True, **kwargs)


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes") / "chats"
    members = []
    for i in range(6):
        pictures = [jpeg(10 * i + k) for k in range(i % 3)]
        members += [
            (f"{i:03d}.jpgs", pickle.dumps(pictures)),
            (f"{i:03d}.json", b'{"turns": "chat %d"}' % i),
        ]
    write_tar(folder / "chats.tar", members)
    return prepared(folder, "CrudeWebdataset")


def name_class(folder: Path, cls: type, field_map: str) -> None:
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        f"__module__: {cls.__module__}\n__class__: {cls.__name__}\n{field_map}"
    )


def test_decoder_settings_of_old_classes_work(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("0.jpg", jpeg(1)), ("0.txt", b"a")])
    prepared(tmp_path, "CrudeWebdataset")
    name_class(tmp_path, OldChatWebdataset, "field_map: {imgs: jpg, conversation: txt}\n")
    factory: Any = load_factory(tmp_path, decoder=SampleDecoder())
    assert factory.seen == ("pilrgb", "AVDecoder", False)
    assert isinstance(next(iter(factory.build())).imgs, Image.Image)
    name_class(tmp_path, WrongChatWebdataset, "field_map: {imgs: jpg, conversation: txt}\n")
    with pytest.raises(DatasetFormatError, match=r"class .*WrongChatWebdataset: .*'decode_images'"):
        load_factory(tmp_path)


@pytest.mark.parametrize("cls", [ChatWebdataset, EarlyChatWebdataset])
def test_decoder_of_webdataset_in_a_subclass_decodes_and_the_run_resumes(chats, cls) -> None:
    name_class(chats, cls, "field_map: {imgs: jpgs, conversation: 'json[turns]'}\n")
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1)

    def make() -> Any:
        dataset = get_train_dataset(
            chats, worker_config=config, batch_size=None, shuffle_buffer_size=4, repeat=False
        )
        return get_savable_loader(dataset)

    loader = make()
    samples = list(loader)
    assert loader.num_skipped == {}
    assert {sample.conversation for sample in samples} == {f"chat {i}" for i in range(6)}
    for sample in samples:
        number = int(sample.__key__)
        assert [picture.shape for picture in sample.imgs] == [(16, 24, 3)] * (number % 3)
        assert_same(loader.restore_sample(sample.__restore_key__), sample)
    first, resumed = make(), make()
    iterator = iter(first)
    for _ in range(2):
        next(iterator)
    resumed.load_state_dict(through_json(first.state_dict()))
    assert_same(list(resumed), samples[2:])


def test_auto_decode_false_leaves_bytes(chats) -> None:
    factory = ChatWebdataset(
        chats, auto_decode=False, field_map={"imgs": "jpgs", "conversation": "json"}
    )
    assert isinstance(next(iter(factory.build())).conversation, bytes)


@pytest.mark.parametrize("decoder", [None, SampleDecoder(), lambda parts: {**parts, "txt": "own"}])
def test_decoder_is_an_argument_as_in_energon(texts, decoder) -> None:
    factory: Any = DefaultDecoderWebdatasetFactory(
        texts, decoder=decoder, sample_type=TextSample, field_map={"text": "txt"}, training=False
    )
    text = next(iter(factory.build())).text
    assert text == {type(None): b"text 0 ", SampleDecoder: "text 0 "}.get(type(decoder), "own")


class Loud(DefaultDecoderWebdatasetFactory[TextSample]):
    """Makes its samples itself, with the help of the default; and not all of them."""

    __sample_type__ = TextSample

    def load_sample(self, raw_data: dict[str, Any]) -> TextSample:
        assert isinstance(raw_data["txt"], bytes)
        assert raw_data["__shard__"] == raw_data["__sources__"][0].shard_name
        sample = super().load_sample(raw_data)
        sample.text = sample.text.upper()
        return sample

    def sample_filter(self, key: str) -> bool:
        return int(key) % 4 != 1


def test_own_load_sample_is_called_and_its_samples_carry_what_others_do(texts) -> None:
    factory = Loud(
        texts, field_map={"text": "txt"}, training=False, loss_weight=0.5, subflavors={"a": 1}
    )
    plain: Any = StandardWebdatasetFactory(
        texts, sample_type=TextSample, field_map={"text": "txt"}, training=False, loss_weight=0.5,
        subflavors={"a": 1},
    )  # fmt: skip
    expected = [s for s in plain.build() if int(s.__key__) % 4 != 1]
    for sample in expected:
        sample.text = sample.text.upper()
    found = list(factory.build())
    assert len(found) == 9
    assert_same(found, expected)


class Bare(DefaultGenericWebdatasetFactory[Any]):
    """Has neither field map nor sample type: `load_sample` makes crude samples."""

    def load_sample(self, raw_data: dict[str, Any]) -> Any:
        return {"length": len(raw_data["txt"])}


class Wrong(Bare):
    def load_sample(self, raw_data: dict[str, Any]) -> Any:
        return len(raw_data["txt"])


def test_load_sample_may_return_a_dict(texts) -> None:
    sample = next(iter(Bare(texts, training=False).build()))
    assert (sample["length"], sample["__key__"]) == (7, "00000")
    assert sample["__restore_key__"] == ("texts/train", 0, 0, 0)


def test_load_sample_that_returns_no_sample_ends_the_run(texts) -> None:
    with pytest.raises(FatalSampleError, match="load_sample returned a int; return a Sample"):
        next(iter(Wrong(texts, training=False).build()))


def test_generic_class_leaves_parts_as_bytes(texts) -> None:
    factory: Any = DefaultGenericWebdatasetFactory(
        texts, sample_type=TextSample, field_map={"text": "txt"}, training=False
    )
    assert next(iter(factory.build())).text == b"text 0 "


def test_functions_of_the_dataset_are_named_as_in_dataset_yaml(texts) -> None:
    (texts / ".nv-meta" / "own.py").write_text(
        "def load(parts):\n    return {'text': parts['txt'] + '!'}\n"
        "def part_filter(part):\n    return part == 'txt'\n"
    )
    factory: Any = StandardWebdatasetFactory(
        texts, sample_type=TextSample, sample_loader="own.py:load", part_filter="own.py",
        training=False,
    )  # fmt: skip
    assert next(iter(factory.build())).text == "text 0 !"


def test_build_takes_what_energon_passes(texts) -> None:
    factory: Any = StandardWebdatasetFactory(
        texts, sample_type=TextSample, field_map={"text": "txt"}, split_part="train",
        training=True, worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        shuffle_over_epochs=1, parallel_shard_iters=2, max_samples_per_sequence=3, subset=None,
        split_config=None,
    )  # fmt: skip
    assert len(list(factory.build(3))) == NUM_TEXTS == len(factory)


class Building(DefaultDecoderWebdatasetFactory[TextSample]):
    __sample_type__ = TextSample

    def build(self, worker_rotation_offset: int = 0, **settings: Any) -> Any:
        return super().build(worker_rotation_offset, **settings)


class RawLoading(Loud):
    def _load_sample_raw(self, raw_sample: Any) -> Any:
        return raw_sample


@pytest.mark.parametrize(
    ("cls", "text"),
    [(Building, "Building overrides build, "), (RawLoading, "override load_sample")],
)
def test_override_that_would_not_be_called_is_refused_by_name(tmp_path, cls, text) -> None:
    folder = text_set(tmp_path / "texts", 3)
    name_class(folder, cls, "field_map: {text: txt}\n")
    with pytest.raises(DatasetFormatError, match=text):
        load_factory(folder)
