"""What Energon's documentation shows of sources beside tars, as a user types it.

JSONL, joins, auxiliary data, caches, media metadata, audio and video.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import wave
from importlib import import_module

import numpy as np
import pytest
import torch
from megatron.energon import (
    CachePool,
    CaptioningSample,
    Cooker,
    DefaultTaskEncoder,
    FileStore,
    FileStoreCachePool,
    Lazy,
    NoCachePool,
    Sample,
    SampleDecoder,
    TextSample,
    basic_sample_keys,
    cooker,
    edataclass,
    get_savable_loader,
    stateless,
)

from .energon_data import (
    IS_REAL,
    class_of,
    command,
    config,
    metadataset,
    png,
    prepared,
    train_set,
    write_keyed,
    write_shards,
)


def text_of(sample, text):
    return TextSample(**basic_sample_keys(sample), text=str(text))


def cooked(path, *cooks, num=None, decoder=None, cookers=None, **settings):
    """The samples of a path, cooked, in the order of their keys."""
    names = {"cookers": cookers or tuple(map(Cooker, cooks)), "decoder": decoder}
    encoder = type("MyTaskEncoder", (DefaultTaskEncoder,), names)()
    loader = get_savable_loader(train_set(path, task_encoder=encoder, **settings))
    return sorted(itertools.islice(loader, num), key=lambda sample: sample.__key__)


def crude_texts(folder, num_samples=6, **parts):
    """A crude dataset of texts, each with the names of other files."""
    write_shards(
        folder, num_samples,
        lambda n: {"txt": f"text {n}", **{name: value(n) for name, value in parts.items()}},
        maxcount=4,
    )  # fmt: skip
    return prepared(folder, class_of("CrudeWebdataset"))


def pictures(folder, num_samples=6):
    """A dataset of pictures, which another one names."""
    write_shards(folder, num_samples, lambda n: {"jpg": png(n)}, maxcount=4)
    return prepared(folder, class_of("CrudeWebdataset"))


# ----------------------------------------------------------------------------------------- JSONL


LINES = [{"id": i, "question": f"what is {i} + {i}?", "answer": str(2 * i)} for i in range(7)]


def jsonl(path, lines=LINES):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command("prepare", path)
    return path


def test_jsonl_is_prepared_and_read_alone(tmp_path):
    @stateless
    def cook(sample: dict) -> TextSample:
        line = sample["json"]
        return text_of(sample, f"{line['question']} {line['answer']}")

    path = jsonl(tmp_path / "data.jsonl")
    assert (tmp_path / "data.jsonl.idx").stat().st_size == 8 * (len(LINES) + 1)
    samples = cooked(path, cook, decoder=SampleDecoder(), subflavors={}, repeat=False)
    assert [sample.__key__ for sample in samples] == [str(i) for i in range(7)]
    assert samples[3].text == "what is 3 + 3? 6"


def test_jsonl_in_a_metadataset_with_subflavors(tmp_path):
    jsonl(tmp_path / "a.jsonl", LINES[:4])
    jsonl(tmp_path / "b.jsonl", LINES[4:])
    blend = [{"path": f"{n}.jsonl", "weight": 1, "subflavors": {"from": n}} for n in "ab"]
    path = metadataset(tmp_path / "m.yaml", train={"blend": blend})

    def cooker_of(name):
        @stateless
        def cook(sample: dict) -> TextSample:
            return text_of(sample, f"{name} {sample['json']['id']}")

        return Cooker(cook, has_subflavors={"from": name})

    found = cooked(path, num=40, cookers=tuple(map(cooker_of, "ab")), decoder=SampleDecoder())
    assert {s.text for s in found} == {f"{'a' if i < 4 else 'b'} {i}" for i in range(7)}


# ----------------------------------------------------------------------------------------- joins


def text_side(folder, *keys):
    write_keyed(folder, keys, lambda key: {"txt": f"{folder.name} {key}"})
    config = {"sample_type": class_of("TextSample"), "field_map": {"text": "txt"}}
    return prepared(folder, config)


JOINS = """
from dataclasses import dataclass
from megatron.energon import Sample, TextSample

@dataclass
class JoinedSample(Sample):
    texts: list

    @staticmethod
    def from_joined(*samples: TextSample) -> "JoinedSample":
        texts = [None if s is None else s.text for s in samples]
        return JoinedSample.derive_from(samples[0], texts=texts)
"""


@pytest.fixture
def my_joins(tmp_path, monkeypatch):
    """A module of the user's; what the program has imported may be named by a metadataset."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/my_joins.py").write_text(JOINS)
    monkeypatch.syspath_prepend(tmp_path / "code")
    import_module("my_joins")
    yield
    sys.modules.pop("my_joins")


def read_join(tmp_path, node, num=None):
    path = metadataset(tmp_path / "m.yaml", train=node)
    command("prepare", path)
    return list(itertools.islice(get_savable_loader(train_set(path, repeat=num is not None)), num))


SIDES = [["s1", "s2", "s3", "s5", "s6"], ["s7", "s6", "s4", "s3", "s1"], ["s1", "s2", "s3", "s9"]]


@pytest.mark.usefixtures("my_joins")
@pytest.mark.parametrize(
    ("nonmatch", "expected"),
    [
        (["skip", "skip"], {"s1": "ds3 s1", "s3": "ds3 s3"}),
        pytest.param(
            ["skip", "none"], {"s1": "ds3 s1", "s3": "ds3 s3", "s6": None},
            marks=pytest.mark.xfail(IS_REAL, reason="Energon cannot read it", strict=False),
        ),
        ([None, "skip"], "ds2"),  # without a match by default
    ],
)  # fmt: skip
def test_joins_of_the_table(tmp_path, nonmatch, expected):
    for number, keys in enumerate(SIDES, 1):
        text_side(tmp_path / f"ds{number}", *keys)
    ways = [{}, *({"nonmatch": way} if way else {} for way in nonmatch)]
    sides = [{"path": f"ds{number}", **way} for number, way in enumerate(ways, 1)]
    node = {"join": sides, "joiner": class_of("JoinedSample", "my_joins")}
    if expected == "ds2":
        with pytest.raises(Exception, match=expected):
            read_join(tmp_path, node)
        return
    found = {sample.__key__: sample.texts for sample in read_join(tmp_path, node)}
    assert found == {key: [f"ds1 {key}", f"ds2 {key}", third] for key, third in expected.items()}


@pytest.mark.usefixtures("my_joins")
def test_a_join_in_a_blend_names_files_and_subflavors(tmp_path):
    for name, keys in (("ds1", "s1 s2"), ("ds2", "s1 s2"), ("ds3", "t1 t2 t3")):
        text_side(tmp_path / name, *keys.split())
    files = {"dataset_config": "dataset.yaml", "split_config": "split.yaml"}
    sides = [{"path": "ds1"}, {"path": "ds2", **files, "subflavors": {"ds2_extra": 2}}]
    join = {
        "weight": 1, "join": sides, "joiner": class_of("JoinedSample", "my_joins"),
        "split_part": "train", "subflavors": {"source": "join"},
    }  # fmt: skip
    alone = {"weight": 1, "path": "ds3", "subflavors": {"source": "alone"}}
    samples = read_join(tmp_path, {"blend": [join, alone]}, 20)
    found = {(s.__key__, s.__subflavors__["source"], type(s).__name__) for s in samples}
    assert found == {(f"s{i}", "join", "JoinedSample") for i in (1, 2)} | {
        (f"t{i}", "alone", "TextSample") for i in (1, 2, 3)
    }
    texts = {s.__key__: s.texts for s in samples if s.__key__.startswith("s")}
    assert texts == {key: [f"ds1 {key}", f"ds2 {key}"] for key in ("s1", "s2")}


# ----------------------------------------------------------------------- auxiliary data, caches


def test_the_primary_dataset_by_name(tmp_path):
    crude_texts(tmp_path / "primary", json=lambda n: json.dumps({"next": f"{(n + 1) % 6:06d}"}))

    @stateless
    @cooker(need_primary=True)
    def cook(sample: dict, primary: FileStore) -> TextSample:
        following = primary.get(f"{sample['json']['next']}.txt")
        return text_of(sample, f"{primary.get('.txt')}, {following}")

    samples = cooked(tmp_path / "primary", cook, decoder=SampleDecoder(), repeat=False)
    assert samples[5].text == "text 5, text 0"


@edataclass
class LazySample(Sample):
    text: str
    image: Lazy
    note: Lazy


@pytest.mark.parametrize(("has_pool", "workers"), [(False, 0), (True, 0), (True, 2)])
def test_lazies_are_read_when_a_pack_is_made(tmp_path, has_pool, workers):
    (tmp_path / "cache").mkdir()
    pictures(tmp_path / "aux_ds")
    crude_texts(tmp_path / "primary")
    leaf = {"path": "primary", "aux": {"video_source": "aux_ds"}}
    path = metadataset(tmp_path / "m.yaml", train=leaf)

    @stateless
    @cooker(need_cache=True)
    def cook_video(sample: dict, video_source: FileStore, cache: CachePool) -> LazySample:
        image = cache.get_lazy(video_source, f"{sample['__key__']}.jpg")
        note = cache.to_cache(sample["txt"], sample["__key__"] + ".txt")
        return LazySample(**basic_sample_keys(sample), text=sample["txt"], image=image, note=note)

    class MyTaskEncoder(DefaultTaskEncoder):
        decoder = SampleDecoder(image_decode="torchrgb8")
        cookers = (Cooker(cook_video),)

        def select_samples_to_pack(self, samples):
            return [samples[i : i + 2] for i in range(0, len(samples), 2)]

        @stateless
        def pack_selected_samples(self, samples):
            images = torch.stack([sample.image.get(sample) for sample in samples])
            assert [s.note.get(s) for s in samples] == [s.text for s in samples]
            caption = [s.text for s in samples]
            return CaptioningSample.derive_from(samples[0], image=images, caption=caption)

    pool = FileStoreCachePool(parent_cache_dir=tmp_path / "cache", num_workers=1)
    ds = train_set(
        path, 1, worker_config=config(num_workers=workers), task_encoder=MyTaskEncoder(),
        repeat=False, packing_buffer_size=4,
    )  # fmt: skip
    found = {}
    for batch in get_savable_loader(ds, cache_pool=pool if has_pool else NoCachePool()):
        captions, images = batch.caption[0], batch.image[0]
        found.update(zip(captions, images[:, 0, 0, 0].tolist(), strict=True))
    assert found == {f"text {i}": i for i in range(6)}


# -------------------------------------------------------------------------------- media metadata


def test_media_metadata_is_read_by_a_cooker(tmp_path):
    write_shards(tmp_path / "ds", 3, lambda n: {"png": png(n, (10 + n, 8)), "txt": "x"})
    crude = ("--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset")
    by_name = "--media-metadata-by-extension"
    command("prepare", tmp_path / "ds", "--non-interactive", *crude, by_name)
    pictures(tmp_path / "aux_ds", 3)
    command("prepare-media", tmp_path / "aux_ds", "--media-metadata-by-header")
    (tmp_path / "images" / "deep").mkdir(parents=True)
    for i in range(3):
        (tmp_path / "images" / "deep" / f"{i}.png").write_bytes(png(i, (9, 7)))
    command("prepare-media", tmp_path / "images", by_name)
    aux = {"pics": "aux_ds", "fs": "filesystem://./images"}
    path = metadataset(tmp_path / "m.yaml", train={"path": "ds", "aux": aux})

    @stateless
    @cooker(need_primary=True)
    def cook(sample: dict, primary: FileStore, pics: FileStore, fs: FileStore) -> TextSample:
        key = sample["__key__"]
        found = [
            primary.get_media_metadata(".png"), pics.get_media_metadata(f"{key}.jpg"),
            fs.get_media_metadata(f"deep/{int(key)}.png"),
        ]  # fmt: skip
        return text_of(sample, [f"{one.width}x{one.height} {one.format}" for one in found])

    found = [sample.text for sample in cooked(path, cook, repeat=False)]
    assert found == [str([f"1{n}x8 PNG", "12x8 PNG", "9x7 PNG"]) for n in range(3)]


# ------------------------------------------------------------------------------- audio and video


def video(num_frames=50, rate=25, size=(64, 48)):
    """An mp4 whose frames get brighter, with silence."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for i in range(num_frames):
            pixels = np.full((size[1], size[0], 3), 4 * i, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def part_of(tmp_path, part, data, look=lambda value: value, **decoder):
    """What a cooker sees of a part."""
    write_shards(tmp_path / "ds", 1, lambda n: {part: data, "txt": "x"})
    prepared(tmp_path / "ds", class_of("CrudeWebdataset"))
    found = []

    @stateless
    def cook(sample: dict) -> TextSample:
        found.append(look(sample[part]))
        return text_of(sample, "")

    cooked(tmp_path / "ds", cook, decoder=SampleDecoder(**decoder), repeat=False)
    return found[0]


def test_clips_of_a_video(tmp_path):
    decoder = part_of(tmp_path, "mp4", video())
    clips = decoder.get_clips(video_clip_ranges=[(0, 0.4), (1, 1.4)], video_unit="seconds")
    assert [clip.shape for clip in clips.video_clips] == [(11, 3, 48, 64)] * 2
    assert abs(int(clips.video_clips[1][0].float().mean()) - 100) <= 3
    assert decoder.get_video().video_clips[0].shape == (50, 3, 48, 64)
    av = import_module("megatron.energon.av")
    clips = av.get_clips_uniform(
        av_decoder=decoder, num_clips=3, clip_duration_seconds=0.2, request_video=True
    )
    assert len(clips.video_clips) == 3
    assert clips.video_timestamps[0][0] == 0
    assert av.get_single_frames_uniform(decoder, 5).shape == (5, 3, 48, 64)
    found = decoder.get_metadata()
    assert (found.video_width, found.video_height, found.video_num_frames) == (64, 48, 50)
    assert found.video_fps == 25
    assert abs(found.video_duration - 2) < 0.05


def test_sound_is_decoded(tmp_path):
    pytest.importorskip("av", reason="PyAV is not installed")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.zeros(4000, np.int16).tobytes())
    found = part_of(tmp_path, "wav", buffer.getvalue(), lambda value: value.get_audio())
    assert found.audio_clips[0].shape == (1, 4000)
