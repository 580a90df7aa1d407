"""One length function of text and pictures, which are not decoded, for all kinds of datasets."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from energon_lite import (
    AugmentTaskEncoder,
    CaptioningSample,
    Cooker,
    DefaultDecoderWebdatasetFactory,
    DefaultTaskEncoder,
    Packing,
    SampleDecoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    get_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.extras.cli import app
from energon_lite.extras.lengths.length_index import LengthFunction, measure_lengths
from energon_lite.extras.lengths.stored_metadata import MetadataDecoder, _in_place
from energon_lite.extras.media.media_headers import MediaFilterConfig
from energon_lite.extras.media.media_metadata import (
    ImageMetadata,
    serialize_media_metadata,
)
from energon_lite.extras.prepare.prepare_media import prepare_media
from energon_lite.formats.length_files import lengths_path

from ..conftest import jpeg, write_tar
from ..helpers import metadataset, prepared

NUM_SAMPLES = 12
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)
PACKING = Packing(capacity={"tokens": 64, "tiles": 24})
BY_EXTENSION = MediaFilterConfig.parse(None, header=False, extension=True)


def caption(i: int) -> str:
    return "caption " + "x" * i


def picture(i: int) -> bytes:
    return jpeg(9 * i, (8 * (1 + i % 4), 8 * (1 + i % 3)))


EXPECTED = {
    "tokens": [len(caption(i)) for i in range(NUM_SAMPLES)],
    "tiles": [(1 + i % 4) * (1 + i % 3) for i in range(NUM_SAMPLES)],
}


@stateless
def cook(sample: Any, **stores: Any) -> CaptioningSample:
    found = sample["json"] if "json" in sample else {"caption": sample["txt"]}
    image = stores["pictures"].get(found["image"], sample) if stores else sample["jpg"]
    return CaptioningSample(**basic_sample_keys(sample), image=image, caption=found["caption"])


class Vlm(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Measures decoded pictures in training and their metadata for the index, by one function."""

    cookers: ClassVar = (Cooker(cook),)
    packing = PACKING

    def sample_length(self, sample: CaptioningSample) -> dict[str, int]:
        height, width = sample.image.shape[-2:]
        return {"tokens": len(sample.caption), "tiles": (height // 8) * (width // 8)}

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


def members(i: int, *parts: str) -> list[tuple[str, bytes]]:
    contents = {"jpg": picture(i), "txt": caption(i).encode()}
    return [(f"{i:03d}.{part}", contents[part]) for part in parts]


def tars(folder: Path, *parts: str) -> Path:
    for shard in range(3):
        numbers = range(4 * shard, 4 * shard + 4)
        write_tar(folder / f"{shard}.tar", [m for i in numbers for m in members(i, *parts)])
    return folder


def typed(root: Path) -> tuple[Path, Any]:
    fields = {"image": "jpg", "caption": "txt"}
    path = prepared(tars(root / "data", "jpg", "txt"), "CaptioningSample", fields)
    return path, str(path)


def crude(root: Path) -> tuple[Path, Any]:
    path = prepared(tars(root / "data", "jpg", "txt"), "CrudeWebdataset")
    return path, str(path)


def write_lines(root: Path, image: str) -> Path:
    lines = ({"caption": caption(i), "image": image.format(i)} for i in range(NUM_SAMPLES))
    (root / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root / "texts.jsonl"


def lines_and_folder(root: Path) -> tuple[Path, Any]:
    (root / "pictures").mkdir()
    for i in range(NUM_SAMPLES):
        (root / f"pictures/{i}.jpg").write_bytes(picture(i))
    path = write_lines(root, "{}.jpg")
    aux = {"pictures": f"filesystem://{root}/pictures"}
    return root / "pictures", metadataset({"path": str(path), "aux": aux})


def lines_and_tars(root: Path) -> tuple[Path, Any]:
    pictures = prepared(tars(root / "pictures", "jpg"), "CrudeWebdataset")
    path = write_lines(root, "{:03d}.jpg")
    return pictures, metadataset({"path": str(path), "aux": {"pictures": str(pictures)}})


def joined(root: Path) -> tuple[Path, Any]:
    pictures = prepared(tars(root / "pictures", "jpg"), "ImageSample", {"image": "jpg"})
    texts = prepared(tars(root / "texts", "txt"), "TextSample", {"text": "txt"})
    join = {"pictures": {"path": str(pictures)}, "texts": {"path": str(texts)}}
    joiner = {"__module__": __name__, "__function__": "caption_of"}
    return pictures, metadataset({"join": join, "joiner": joiner})


def caption_of(pictures: Any, texts: Any) -> CaptioningSample:
    return CaptioningSample.derive_from(pictures, image=pictures.image, caption=texts.text)


KINDS = (typed, crude, lines_and_folder, lines_and_tars, joined)
Kind = Callable[[Path], tuple[Path, Any]]


def written(root: Path, dataset: Any) -> Any:
    """Returns the path of a dataset; a metadataset is written."""
    if isinstance(dataset, str):
        return dataset
    (root / "meta.yaml").write_text(json.dumps(dataset))
    return root / "meta.yaml"


def stored(report: Any) -> dict[str, list[int]]:
    return {
        resource: np.load(lengths_path(report.path, report.split_part, "vlm", resource)).tolist()
        for resource in report.totals
    }


def measured(path: Any, encoder: Any = None, **settings: Any) -> Any:
    settings = {"num_workers": 0, "name": "vlm", "media_metadata": True, **settings}
    (report,) = measure_lengths(path, encoder or Vlm(), **settings)
    return report


def empty_pictures(folder: Path) -> None:
    """Overwrites the pictures of a dataset or a folder, so that no header can be read."""
    for path in folder.rglob("*.jpg"):
        path.write_bytes(bytes(path.stat().st_size))
    for path in folder.rglob("*.tar"):
        data = path.read_bytes()
        for i in range(NUM_SAMPLES):
            data = data.replace(picture(i), bytes(len(picture(i))))
        path.write_bytes(data)


class Planned(Vlm):
    packing = dataclasses.replace(PACKING, lengths="vlm")


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_of_metadata_equal_those_of_decoded_pictures(kind: Kind, tmp_path: Path) -> None:
    media, dataset = kind(tmp_path)
    path = written(tmp_path, dataset)
    for media_metadata in (False, True):
        report = measured(path, media_metadata=media_metadata)
        assert (stored(report), report.measured) == (EXPECTED, NUM_SAMPLES)
    settings: Any = {"batch_size": 1, "shuffle_buffer_size": None, "worker_config": CONFIG}
    packs = iter(get_loader(get_train_dataset(path, task_encoder=Planned(), **settings)))
    # A length that is not that of the index ends the run.
    assert all(torch.is_tensor(next(packs).image) for _ in range(NUM_SAMPLES))
    # Pictures with stored metadata are not read.
    prepare_media(media, BY_EXTENSION, num_workers=0)
    empty_pictures(media)
    report = measured(path, Other(), num_workers=2)
    assert (stored(report), report.failed) == (EXPECTED, 0)


class Other(Vlm):
    """The same, by other code, so that all is measured again."""

    def sample_length(self, sample: CaptioningSample) -> dict[str, int]:
        return super().sample_length(sample)


def tiles(sample: Any) -> dict[str, int]:
    picture = sample["jpg"]
    return {"tokens": picture.width * picture.height, "tiles": picture.width // 8}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_is_read_of_samples_of_pictures_alone(num_workers: int, tmp_path: Path) -> None:
    root = prepared(tars(tmp_path / "data", "jpg"), "CrudeWebdataset")
    prepare_media(root, BY_EXTENSION, num_workers=0)
    split = root / ".nv-meta/split.yaml"
    split.write_text(split.read_text().replace("exclude: []", "exclude: [1.tar/005]"))
    for path in root.glob("*.tar"):  # the same size, but no tar any more
        times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        path.write_bytes(bytes(path.stat().st_size))
        os.utime(path, ns=times)
    report = measured(root, LengthFunction(tiles), num_workers=num_workers)
    assert (report.samples, report.failed) == (11, 0)
    sizes = [(8 * (1 + i % 4), 8 * (1 + i % 3)) for i in range(NUM_SAMPLES) if i != 5]
    expected = {"tokens": [w * h for w, h in sizes], "tiles": [w // 8 for w, _ in sizes]}
    assert stored(report) == expected


class Sizes(DefaultDecoderWebdatasetFactory[TextSample]):
    """A dataset class that opens its pictures itself."""

    __sample_type__ = TextSample

    def load_sample(self, raw_data: dict[str, Any]) -> TextSample:
        width, height = Image.open(io.BytesIO(raw_data["jpg"])).size
        return TextSample(**basic_sample_keys(raw_data), text="x" * (width * height))


def test_classes_that_decode_themselves_get_the_files(tmp_path: Path) -> None:
    root = prepared(tars(tmp_path / "data", "jpg"), "CrudeWebdataset")
    prepare_media(root, BY_EXTENSION, num_workers=0)
    config = f"__module__: {__name__}\n__class__: Sizes\n"
    (root / ".nv-meta/dataset.yaml").write_text(config)
    report = measured(root, LengthFunction(lambda sample: len(sample.text)))
    sizes = [(8 * (1 + i % 4), 8 * (1 + i % 3)) for i in range(NUM_SAMPLES)]
    assert stored(report) == {"tokens": [width * height for width, height in sizes]}


@stateless
@cooker(need_primary=True, need_cache=True)
def cook_late(sample: Any, primary: Any, cache: Any, pictures: Any) -> CaptioningSample:
    name = sample["json"]["image"]
    assert primary.get(".json")["image"] == name
    late = cache.get_lazy(pictures, name)
    caption = sample["json"]["caption"]
    return CaptioningSample(**basic_sample_keys(sample), image=late, caption=caption)


class Late(Vlm):
    cookers: ClassVar = (Cooker(cook_late),)

    def sample_length(self, sample: CaptioningSample) -> dict[str, int]:
        image: Any = sample.image
        height, width = image.get(sample).shape[-2:]
        return {"tokens": len(sample.caption), "tiles": (height // 8) * (width // 8)}


@pytest.mark.parametrize("kind", [lines_and_folder, lines_and_tars])
def test_lazy_values_are_metadata_too_and_augmented_encoders_measure(kind, tmp_path) -> None:
    media, dataset = kind(tmp_path)
    path = written(tmp_path, dataset)
    assert stored(measured(path, AugmentTaskEncoder(Late()))) == EXPECTED
    prepare_media(media, BY_EXTENSION, num_workers=0)
    empty_pictures(media)
    report = measured(path, Late())  # the same lengths, measured again for another encoder
    assert (stored(report), report.measured) == (EXPECTED, NUM_SAMPLES)


def test_command_measures_pictures_by_their_headers(tmp_path: Path) -> None:
    media, dataset = lines_and_folder(tmp_path)
    for i in range(NUM_SAMPLES):
        (media / f"{i}.jpg").write_bytes(picture(i)[:-4])  # could not be decoded
    path = str(written(tmp_path, dataset))
    arguments = ["lengths", path, "--with", f"{__name__}:Vlm", "--name", "vlm", "--media-metadata"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    (report,) = json.loads(done.stdout)
    assert report["totals"] == {name: sum(lengths) for name, lengths in EXPECTED.items()}
    assert report["failed"] == 0


def sounds(sample: Any) -> int:
    return round(1000 * sample["wav"].get_metadata().audio_duration)


@pytest.mark.parametrize("is_stored", [False, True])
def test_recordings_and_their_metadata_are_measured_by_one_function(tmp_path, is_stored):
    pytest.importorskip("av")
    members = []
    for i in range(NUM_SAMPLES):
        wav = io.BytesIO()
        with wave.open(wav, "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
            file.writeframes(bytes(2 * 800 * (i + 1)))
        members.append((f"{i:03d}.wav", wav.getvalue()))
    write_tar(tmp_path / "data/0.tar", members)
    root = prepared(tmp_path / "data", "CrudeWebdataset")
    if is_stored:
        prepare_media(root, BY_EXTENSION, num_workers=0)
    expected = {"tokens": [100 * (i + 1) for i in range(NUM_SAMPLES)]}
    for media_metadata in (True, False):
        report = measured(root, LengthFunction(sounds), media_metadata=media_metadata)
        assert (stored(report), report.measured) == (expected, NUM_SAMPLES)


def test_unreadable_pictures_are_listed_with_their_samples(tmp_path: Path) -> None:
    media, dataset = typed(tmp_path)
    prepare_media(media, MediaFilterConfig.parse("*[!3].jpg", False, False), num_workers=0)
    empty_pictures(media)
    report = measured(dataset)
    assert (report.samples, report.failed) == (NUM_SAMPLES, 1)
    assert report.problems[0][0] == "003"
    assert "no image that can be read" in report.problems[0][1]


@pytest.mark.parametrize("mode", ["torchrgb", "rgb8", "pil", "l8"])
def test_metadata_have_the_size_of_an_image_in_every_decode_mode(mode: str) -> None:
    raw = jpeg(3, (40, 24))
    found = MetadataDecoder(inner=None).decode("a/b.jpg", raw)
    assert found == ImageMetadata(width=40, height=24, format="JPEG", mode="RGB")
    image = SampleDecoder(image_decode=mode).decode("jpg", raw)
    if mode == "pil":
        assert (image.width, image.height) == (found.width, found.height)
    elif mode == "torchrgb":
        assert image.shape[-2:] == found.shape[-2:]
    else:
        assert image.shape[:2] == found.shape[:2]


@pytest.mark.parametrize("image_size", [10, 100, {"longest_edge": 30}, {"max_pixels": 300}])
def test_metadata_have_the_size_to_which_images_are_decoded(image_size: Any) -> None:
    inner, raw = SampleDecoder(image_size=image_size), jpeg(3, (40, 24))
    size = inner.decode("b.jpg", raw).shape[-2:]
    kind, text = serialize_media_metadata(
        ImageMetadata(width=40, height=24, format="JPEG", mode="RGB")
    )
    for content in (raw, _in_place(kind.value, text)):
        assert MetadataDecoder(inner=inner).decode("b.jpg", content).shape[-2:] == size
