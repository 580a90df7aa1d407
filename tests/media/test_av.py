"""Clips of audio and video are those of a decode of the whole file, whatever the container."""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
import time
import warnings
import wave
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import (
    AVData,
    AVDecoder,
    AVWebdatasetDecoder,
    Cooker,
    DefaultTaskEncoder,
    SampleDecoder,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_clips_uniform,
    get_savable_loader,
    get_single_frames_uniform,
    get_train_dataset,
    stateless,
)
from energon_lite.core.errors import DecodingError
from energon_lite.decoding.part_formats import is_av
from energon_lite.extras.media.media_headers import MediaFilterConfig
from energon_lite.extras.prepare import prepare_dataset

from ..conftest import write_tar

av = pytest.importorskip("av", reason="PyAV is not here: pip install energon_lite[av]")

RATE = 48000
# Name of the file -> codec of the video, codec of the audio, options of the video, of the file.
FORMATS = {
    "b_frames.mp4": ("libx264", "aac", {"bf": "3", "g": "12", "x264-params": "open-gop=0"}),
    "open_gop.mp4": ("libx264", None, {"bf": "3", "g": "12", "x264-params": "open-gop=1"}),
    "b_frames.MKV": ("libx264", "aac", {"bf": "3", "g": "12"}),
    "mpeg4.mov": ("mpeg4", "pcm_s16le", {"g": "10"}),
    "b_frames.avi": ("libx264", "mp3", {"bf": "2", "g": "12"}),
    "no_times.h264": ("libx264", None, {"bf": "2", "g": "12"}),
    "vp8.webm": ("libvpx", "libopus", {"g": "10", "deadline": "realtime"}),
    "flash.flv": ("flv", "mp3", {"g": "10"}),
    "late.mp4": ("libx264", "aac", {"bf": "2", "g": "9"}),
    "vfr.mkv": ("libx264", None, {"bf": "2", "g": "12"}),
    "vfr.mp4": ("libx264", None, {"bf": "2", "g": "12"}),
    "hevc.mp4": ("libx265", "aac", {"x265-params": "bframes=3:keyint=12:open-gop=1:log-level=0"}),
    "vp9.webm": ("libvpx-vp9", "libopus", {"g": "20", "cpu-used": "5", "auto-alt-ref": "1"}),
    "av1.mkv": ("libsvtav1", "flac", {"g": "12", "preset": "12"}),
    "fragments.mp4": ("libx264", "aac", {"bf": "3", "g": "12"}, {"movflags": "frag_keyframe"}),
    "dash.mp4": ("libx264", "aac", {"bf": "3", "g": "12"}, {"movflags": "dash+global_sidx"}),
    "no_edits.mp4": ("libx264", "aac", {"bf": "3", "g": "12"}, {"use_editlist": "0"}),
    "index_first.mp4": ("libx264", "aac", {"bf": "3", "g": "12"}, {"movflags": "faststart"}),
    "negative.mp4": ("libx264", "aac", {"g": "12"}, {"movflags": "negative_cts_offsets"}),
    "no_index.mkv": ("libx264", "mp3", {"bf": "3", "g": "12"}, {"live": "1"}),
}
NUM_FRAMES, FPS = 50, 10
LATE = {"late.mp4": 7}


def frame_times(name):
    """The times of all frames in tenths of a second; some are shown for long, some briefly."""
    if not name.startswith("vfr"):
        return [LATE.get(name, 0) + number for number in range(NUM_FRAMES)]
    steps = itertools.cycle([1, 1, 5, 1, 2, 1, 9])
    return [0, *itertools.accumulate(itertools.islice(steps, NUM_FRAMES - 1))]


def write_clip(path, name):
    video_codec, audio_codec, options, *of_file = FORMATS[name]
    times = frame_times(name)
    with av.open(str(path), "w", options=of_file[0] if of_file else {}) as container:
        video = container.add_stream(video_codec, rate=FPS, options=options)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        video.codec_context.time_base = Fraction(1, FPS)
        audio = container.add_stream(audio_codec, rate=RATE, layout="mono") if audio_codec else None
        # A chirp; for noise, AAC would only store that it is noise.
        seconds = np.arange(RATE * NUM_FRAMES // FPS) / RATE
        samples = np.sin(seconds * (800 + 300 * seconds))[None].astype(np.float32) / 3
        for number, at in enumerate(times):
            pixels = np.full((48, 64, 3), 5 * number, np.uint8)
            pixels[number % 48, :] = 255
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = at, Fraction(1, FPS)
            container.mux(video.encode(frame))
        if audio is not None:
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = RATE, 0
            for part in av.AudioResampler(audio.format, "mono", RATE, audio.frame_size).resample(
                frame
            ):
                container.mux(audio.encode(part))
            container.mux(audio.encode(None))
        container.mux(video.encode(None))


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Content by name, written once."""
    folder = tmp_path_factory.mktemp("clips")
    found = {}
    for name in FORMATS:
        try:
            write_clip(folder / name.lower(), name)
        except (ValueError, av.error.FFmpegError) as error:  # PyAV without this encoder
            warnings.warn(f"{name}: {error}", stacklevel=1)
            continue
        found[name] = (folder / name.lower()).read_bytes()
    assert len(found) >= 15
    return found


def all_frames(raw):
    """Pixels, start and end of all frames, from a decode of the whole file."""
    with av.open(io.BytesIO(raw)) as container:
        frames = list(container.decode(video=0))
    return [frame.to_ndarray(format="rgb24") for frame in frames], frames


def all_samples(raw):
    with av.open(io.BytesIO(raw)) as container:
        arrays = [
            frame.to_ndarray()
            if frame.format.is_planar
            else frame.to_ndarray().reshape(frame.samples, -1).T
            for frame in container.decode(audio=0)
        ]
    return np.concatenate(arrays, axis=1)


def decoder_of(raw):
    return AVDecoder(io.BytesIO(raw))


def assert_frames(clip, pixels):
    assert clip.dtype == torch.uint8
    assert clip.shape == (len(pixels), 3, *pixels[0].shape[:2])
    assert np.array_equal(clip.permute(0, 2, 3, 1).numpy(), np.stack(pixels))


@pytest.mark.parametrize("name", FORMATS)
def test_every_frame_by_number_is_that_of_a_whole_decode(clips, name) -> None:
    raw = clips.get(name) or pytest.skip("PyAV cannot encode it")
    pixels, _ = all_frames(raw)
    assert len(pixels) == NUM_FRAMES
    ranges = [(number, number) for number in range(len(pixels))]
    found, times = decoder_of(raw).get_video_clips(ranges, video_unit="frames")
    for number, clip in enumerate(found):
        assert_frames(clip, pixels[number : number + 1])
    assert all(start < end for start, end in times)
    assert_frames(decoder_of(raw).get_video().video_clips[0], pixels)


@pytest.mark.parametrize("name", FORMATS)
def test_every_time_has_the_frame_that_is_shown_then(clips, name) -> None:
    raw = clips.get(name) or pytest.skip("PyAV cannot encode it")
    pixels, frames = all_frames(raw)
    _, every = decoder_of(raw).get_video_clips(
        [(n, n) for n in range(len(frames))], video_unit="frames"
    )
    if not name.startswith("no_times"):
        start = float(frames[0].pts * frames[0].time_base) - every[0][0]
        shown = [float(f.pts * f.time_base) - start for f in frames]
        assert [at for at, _ in every] == pytest.approx(shown)
    starts = [at for at, _ in every]
    for number, at in enumerate(starts):
        after = starts[number + 1] if number + 1 < len(starts) else every[-1][1]
        middle = (at + after) / 2
        clip, (at_once,) = decoder_of(raw).get_video_clips([(at, at)])
        assert_frames(clip[0], pixels[number : number + 1])
        assert at_once[0] == pytest.approx(at)
        clip, _ = decoder_of(raw).get_video_clips([(middle, middle)])
        assert_frames(clip[0], pixels[number : number + 1])


@pytest.mark.parametrize("name", FORMATS)
def test_ranges_in_any_order_overlapping_and_open_are_exact(clips, name) -> None:
    raw = clips.get(name) or pytest.skip("PyAV cannot encode it")
    pixels, _ = all_frames(raw)
    ranges = [(30, 33), (2, 9), (5, 20), (5, 5), (45, math.inf), (-3, 1), (11, 13), (25, 25.5)]
    found, _ = decoder_of(raw).get_video_clips(ranges, video_unit="frames")
    assert len(found) == len(ranges)
    for (first, last), clip in zip(ranges, found, strict=True):
        assert_frames(clip, pixels[max(0, first) : int(min(last, 49)) + 1])


@pytest.mark.parametrize("name", ["b_frames.mp4", "b_frames.MKV"])
def test_what_is_behind_the_end_has_no_clip_and_is_reported(clips, name) -> None:
    decoder = decoder_of(clips[name])
    with pytest.warns(RuntimeWarning, match=r"video: no clip for \[\(90, 91\)\] \(seconds\)"):
        found, times = decoder.get_video_clips([(1, 2), (90, 91), (4.9, 70)])
    assert len(found) == len(times) == 2
    assert found[1].shape[0] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet = AVDecoder(io.BytesIO(clips[name]), suppress_warnings=True)
        assert quiet.get_video_clips([(900, 901)], video_unit="frames") == ([], [])
        assert quiet.get_audio_clips([(90, 91)]) == ([], [])


@pytest.mark.parametrize(
    "name", [name for name, (_, audio, *_) in FORMATS.items() if audio is not None]
)
def test_samples_are_those_of_a_whole_decode(clips, name) -> None:
    raw = clips.get(name) or pytest.skip("PyAV cannot encode it")
    samples = all_samples(raw)
    rng = np.random.default_rng(1)
    starts = rng.integers(0, samples.shape[1] - 5000, 40).tolist()
    ranges = [(start, start + 1 + 97 * n) for n, start in enumerate(starts)]
    ranges += [(0, 1), (7, 7), (48000, math.inf)]
    found, _ = decoder_of(raw).get_audio_clips(ranges, audio_unit="samples")
    for (first, last), clip in zip(ranges, found, strict=True):
        end = samples.shape[1] if math.isinf(last) else last
        assert np.array_equal(clip.numpy(), samples[:, first:end]), (first, last)
    whole = decoder_of(raw).get_audio()
    assert np.array_equal(whole.audio_clips[0].numpy(), samples)
    assert whole.audio_clips[0].dtype in (torch.int16, torch.float32)


# Name of the file -> codec, rate, channels, seconds, options of the codec.
RECORDINGS = {
    "whole.m4a": ("aac", 16000, 1, 150, {"aac_pns": "0"}),
    "noise.m4a": ("aac", 48000, 2, 12, {}),
    "high.m4a": ("aac", 96000, 1, 6, {}),
    "surround.m4a": ("aac", 48000, 6, 6, {}),
    "low.mp3": ("mp3", 8000, 1, 12, {}),
    "variable.mp3": ("mp3", 44100, 2, 12, {"q": "2"}),
    "delayed.mka": ("mp3", 48000, 1, 12, {}),
    "lossless.m4a": ("alac", 44100, 2, 6, {}),
    "voice.ogg": ("libopus", 16000, 1, 30, {}),
    "voice.webm": ("libopus", 16000, 1, 12, {}),
    "vorbis.webm": ("vorbis", 44100, 2, 12, {"strict": "-2"}),
    "dither.mka": ("ac3", 48000, 2, 6, {}),
    "blocks.wav": ("adpcm_ima_wav", 8000, 1, 6, {}),
    "telephone.wav": ("pcm_mulaw", 8000, 1, 6, {}),
    "tiny.flac": ("flac", 48000, 1, 0.001, {}),
}


def write_recording(path, codec, rate, channels, seconds, options):
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[channels]
    rng = np.random.default_rng(3)
    noise = (rng.normal(size=(channels, int(rate * seconds))) / 6).clip(-1, 1).astype(np.float32)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout, options=options)
        frame = av.AudioFrame.from_ndarray(noise, format="fltp", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        size = stream.frame_size or 1024
        resampler = av.AudioResampler(stream.format, layout, rate, size)
        for part in (*resampler.resample(frame), *resampler.resample(None), None):
            container.mux(stream.encode(part))


@pytest.mark.parametrize("name", RECORDINGS)
def test_samples_after_a_seek_and_their_number_are_those_of_a_whole_decode(tmp_path, name) -> None:
    path = tmp_path / name
    write_recording(path, *RECORDINGS[name])
    samples = all_samples(path.read_bytes())
    num = samples.shape[1]
    starts = [*np.random.default_rng(1).integers(0, num, 30).tolist(), num - 1]
    ranges = [(start, start + 400) for start in starts]
    for start, end in ranges:
        (clip,), ((first, last),) = AVDecoder(path).get_audio_clips([(start, end)], "samples")
        assert np.array_equal(clip.numpy(), samples[:, start:end]), start
        rate = AVDecoder(path).get_audio_samples_per_second()
        assert (first, last) == pytest.approx((start / rate, min(end, num) / rate))
    found, _ = AVDecoder(path).get_audio_clips(ranges, "samples")
    assert [clip.shape[1] for clip in found] == [min(num - start, 400) for start in starts]
    for start, clip in zip(starts, found, strict=True):
        assert np.array_equal(clip.numpy(), samples[:, start : start + 400]), start
    length = AVDecoder(path).get_metadata(get_audio_num_samples=True)
    assert length.audio_num_samples == num
    assert length.audio_duration == pytest.approx(num / length.audio_sample_rate, abs=0.2)


class CountedBytes(io.BytesIO):
    """Counts the bytes that are read."""

    num_read = 0

    def read(self, size=-1):
        raw = super().read(size)
        self.num_read += len(raw)
        return raw


@pytest.mark.parametrize("name", ["whole.m4a", "voice.ogg", "voice.webm"])
def test_a_clip_of_a_recording_reads_only_what_is_around_it(tmp_path, name) -> None:
    codec, rate, channels, _, options = RECORDINGS[name]
    write_recording(tmp_path / name, codec, rate, channels, 150, options)
    file = CountedBytes((tmp_path / name).read_bytes())
    (clip,), _ = AVDecoder(file).get_audio_clips([(130, 131)])
    assert clip.shape[1] == AVDecoder(file).get_audio_samples_per_second()
    assert file.num_read < 0.4 * len(file.getvalue())


@pytest.mark.parametrize("name", ["long.mp4", "long.mov", "long.mkv", "long.webm"])
def test_uniform_clips_read_less_than_two_fifths_of_the_file(tmp_path, name) -> None:
    codec = "libvpx" if name.endswith("webm") else "libx264"
    with av.open(str(tmp_path / name), "w") as container:
        options = {"g": "20", "deadline": "realtime", "bf": "0", "b": "2000000"}
        stream = container.add_stream(codec, rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        rng = np.random.default_rng(0)
        for number in range(60 * FPS):
            pixels = rng.integers(0, 256, (96, 128, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    file = CountedBytes((tmp_path / name).read_bytes())
    data = get_clips_uniform(AVDecoder(file), 1, 8, request_video=True)
    assert [clip.shape[0] for clip in data.video_clips] == [11] * 7 + [10]
    assert file.num_read < 0.4 * len(file.getvalue())


def test_clips_may_begin_before_the_start_be_single_frames_and_be_none(clips) -> None:
    raw = clips["b_frames.mp4"]
    pixels, _ = all_frames(raw)
    found, times = decoder_of(raw).get_video_clips([(-3, 0.25)])
    assert_frames(found[0], pixels[:3])
    assert times[0] == pytest.approx((0, 0.3))
    audio, heard = decoder_of(raw).get_audio_clips([(-1, 0.5), (4.9, math.inf)])
    assert audio[0].shape == (1, RATE // 2)
    assert heard[0] == (0, 0.5)
    assert np.array_equal(audio[1], all_samples(raw)[:, int(4.9 * RATE) :])
    strided = [(number, number) for number in range(3, NUM_FRAMES, 7)]
    found, _ = decoder_of(raw).get_video_clips(strided, "frames", (32, 24))
    assert {clip.shape for clip in found} == {(1, 3, 24, 32)}
    whole, _ = decoder_of(raw).get_video_clips([(0, math.inf)], "frames", (32, 24))
    assert torch.equal(torch.cat(found), whole[0][3::7])
    assert decoder_of(raw).get_video_clips([]) == ([], [])
    assert decoder_of(raw).get_clips() == decoder_of(raw).get_clips([], [])


def test_the_first_stream_counts_and_frames_stay_as_they_are_stored(tmp_path) -> None:
    """Which way up a player shows them is metadata, and is for the hook to apply."""
    path = tmp_path / "two.mkv"
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=FPS, options={"g": "1"})
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        audio = [container.add_stream("flac", rate=8000, layout="mono") for _ in range(2)]
        frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
        frame.pts = 0
        container.mux([*video.encode(frame), *video.encode(None)])
        for number, stream in enumerate(audio):
            samples = np.full((1, 4000), 1000 * (number + 1), np.int16)
            sound = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            sound.sample_rate, sound.pts = 8000, 0
            container.mux([*stream.encode(sound), *stream.encode(None)])
    data = AVDecoder(path).get_video_with_audio()
    assert data.video_clips[0].shape == (1, 3, 48, 64)
    assert (data.audio_clips[0] == 1000).all()
    frames = get_single_frames_uniform(AVDecoder(path), 3)
    assert frames.shape == (3, 3, 48, 64)


def test_frames_are_resized_to_width_and_height(clips) -> None:
    found, _ = decoder_of(clips["b_frames.mp4"]).get_video_clips([(1, 2)], "seconds", (20, 10))
    assert found[0].shape == (11, 3, 10, 20)


def test_uniform_clips_start_at_the_start_and_end_at_the_end(clips) -> None:
    data = get_clips_uniform(decoder_of(clips["b_frames.mp4"]), 1, 3, request_video=True)
    assert [clip.shape[0] for clip in data.video_clips] == [11, 11, 10]
    assert data.video_timestamps == [(0, 1.1), (2, 3.1), (4, 5)]
    assert data.audio_clips == []
    both = get_clips_uniform(decoder_of(clips["b_frames.mp4"]), 1, 2, True, True)
    assert [clip.shape for clip in both.audio_clips] == [(1, RATE)] * 2
    with pytest.raises(ValueError, match="at least one of video or audio"):
        get_clips_uniform(decoder_of(clips["b_frames.mp4"]), 1, 2)


def test_single_frames_are_the_first_the_last_and_evenly_between(clips) -> None:
    pixels, _ = all_frames(clips["b_frames.mp4"])
    frames, times = get_single_frames_uniform(
        decoder_of(clips["b_frames.mp4"]), 5, return_timestamps=True
    )
    assert_frames(frames, [pixels[number] for number in (0, 12, 25, 37, 49)])
    assert times == pytest.approx([0, 1.2, 2.5, 3.7, 4.9])


def test_metadata_describes_both_streams(clips) -> None:
    found = decoder_of(clips["b_frames.mp4"]).get_metadata(get_audio_num_samples=True)
    assert (found.video_width, found.video_height, found.video_fps) == (64, 48, 10)
    assert (found.video_duration, found.video_num_frames) == (5, 50)
    assert (found.audio_channels, found.audio_sample_rate) == (1, RATE)
    assert found.audio_num_samples == all_samples(clips["b_frames.mp4"]).shape[1]
    for name, raw in clips.items():
        found = decoder_of(raw).get_metadata(get_audio_num_samples=True)
        samples = all_samples(raw).shape[1] if FORMATS[name][1] else None
        assert (found.video_num_frames, found.audio_num_samples) == (NUM_FRAMES, samples), name
        if name != "no_times.h264":
            assert MediaFilterConfig.parse(None, True, False).extract_metadata(raw, "x") == found
        seconds, number = decoder_of(raw).get_video_duration(get_frame_count=True)
        assert number == NUM_FRAMES, name
        assert seconds > 4.8 or name == "no_times.h264"
    silent = decoder_of(clips["open_gop.mp4"])
    assert not silent.has_audio_stream()
    assert silent.get_audio_duration() is None
    with pytest.raises(ValueError, match="No audio stream found"):
        silent.get_audio()


def test_decoders_are_pickled_with_bytes_or_path(clips, tmp_path) -> None:
    raw = clips["b_frames.mp4"]
    path = tmp_path / "a.mp4"
    path.write_bytes(raw)
    pixels, _ = all_frames(raw)
    with path.open("rb") as file:
        for decoder in (decoder_of(raw), AVDecoder(file)):
            again = pickle.loads(pickle.dumps(decoder))
            assert_frames(again.get_video_clips([(20, 21)], "frames")[0][0], pixels[20:22])
        assert len(pickle.dumps(AVDecoder(file))) < 1000
        # What is at this path is opened again: positions are not shared over a fork.
        file.seek(5)
        AVDecoder(file).get_video_clips([(20, 21)], "frames")
        assert file.tell() == 5


@pytest.mark.parametrize(
    ("ranges", "text"),
    [([(2, 1)], r"\(2, 1\) must start"), ([(math.nan, 1)], "nan"), ([(-math.inf, 1)], "-inf")],
)
def test_wrong_ranges_and_units_are_named(clips, ranges, text) -> None:
    with pytest.raises(ValueError, match=text):
        decoder_of(clips["b_frames.mp4"]).get_video_clips(ranges)
    with pytest.raises(ValueError, match=r"unknown unit 'frame'. Did you mean 'frames'"):
        decoder_of(clips["b_frames.mp4"]).get_video_clips([(0, 1)], "frame")


def test_broken_content_is_a_decoding_error_with_a_text(clips) -> None:
    with pytest.raises(DecodingError, match="starts with 62 72 6f"):
        decoder_of(b"broken content" * 20).get_video()
    with pytest.raises(DecodingError, match="no bytes"):
        decoder_of(b"").get_video()
    half = clips["b_frames.mp4"][: len(clips["b_frames.mp4"]) // 2]
    with pytest.raises(DecodingError, match="starts with"):
        decoder_of(half).get_video()


def damaged(raw, rng):
    """Returns content that is cut, or has other bytes: anywhere, or in the first and last 2 KB."""
    raw = bytearray(raw)
    places = rng.integers(0, len(raw), int(rng.choice([1, 30, 500])))
    kind = rng.integers(4)
    if kind == 0:
        del raw[places[0] :]
    elif kind == 1:
        del raw[places[0] : places[0] + 300]
    else:
        for at in places[:20] % 2048 - 1024 if kind == 2 else places:
            raw[at % len(raw)] = rng.integers(256)
    return bytes(raw)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_content_is_an_error_or_decoded_and_never_anything_else(clips, seed) -> None:
    """What is decoded is that of a whole decode, in which FFmpeg conceals damaged frames."""
    rng = np.random.default_rng(seed)
    names = sorted(name for name in clips if name != "no_times.h264")
    texts = set()
    for name in rng.choice(names, 50):
        raw = damaged(clips[name], rng)
        for use in (
            lambda raw: decoder_of(raw).get_video_clips([(1, 1.5), (3, 4)]),
            lambda raw: decoder_of(raw).get_video_clips([(3, 4), (40, math.inf)], "frames"),
            lambda raw: decoder_of(raw).get_audio_clips([(0.5, 1), (3.5, 4)]),
            lambda raw: get_single_frames_uniform(decoder_of(raw), 4).shape[0] == 4,
            lambda raw: decoder_of(raw).get_metadata(get_audio_num_samples=True),
            lambda raw: decoder_of(raw).get_frames(True),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                started = time.process_time()
                try:
                    assert use(raw)
                except (DecodingError, ValueError) as error:
                    texts.add(str(error).rpartition("(")[0] or str(error))
                assert time.process_time() - started < 5
    known = ("audio or video cannot be", "AVDecoder", "No video stream", "No audio stream")
    assert texts
    assert [text for text in texts if not text.startswith(known)] == []


def test_parts_are_decoded_by_name_in_every_mode(clips) -> None:
    raw = clips["b_frames.mp4"]
    assert isinstance(SampleDecoder().decode("a.MP4", raw), AVDecoder)
    data = SampleDecoder(av_decode="torch").decode("a.mp4", raw)
    assert isinstance(data, AVData)
    assert (len(data.video_clips), len(data.audio_clips)) == (1, 0)
    both = SampleDecoder(av_decode="torch", video_decode_audio=True).decode("a.mp4", raw)
    assert (len(both.video_clips), len(both.audio_clips)) == (1, 1)
    with SampleDecoder(av_decode="pyav").decode("a.mp4", raw) as container:
        assert len(container.streams) == 2
    assert SampleDecoder(av_decode="bytes").decode("a.mp4", raw) is raw
    assert SampleDecoder().decode("a.bin", raw) is raw
    for name, content in clips.items():
        assert is_av(content) == (name != "no_times.h264")
        if name == "no_times.h264":
            continue
        assert isinstance(SampleDecoder(guess_content=True).decode("bin", content), AVDecoder)
    with pytest.raises(DecodingError, match=r"part 'mp4'.* is not audio or video"):
        SampleDecoder(av_decode="torch").decode("a.mp4", b"broken" * 20)
    with pytest.raises(DecodingError, match=r"50 frames.*max_bytes"):
        SampleDecoder(av_decode="torch", max_bytes=100_000).decode("a.mp4", raw)
    old = AVWebdatasetDecoder(False, "torch")
    assert isinstance(old("x.Mp4", raw), AVData)
    assert old("jpg", raw) is None
    with pytest.raises(ValueError, match="unknown mode 'pytorch'"):
        AVWebdatasetDecoder(False, "pytorch")


CLIPS = Path(__file__).parents[3] / "shared" / "data" / "av_clips"


@pytest.mark.skipif(not CLIPS.is_dir(), reason="the clips in shared/data are not here")
@pytest.mark.parametrize("path", sorted(CLIPS.glob("*.m[pk][4v]")), ids=lambda path: path.name)
def test_every_frame_of_real_clips_is_exact(path) -> None:
    pixels, _ = all_frames(path.read_bytes())
    with path.open("rb") as file:
        decoder = AVDecoder(file)
        for unit_of_one in (1, 7):
            ranges = [(n, n + unit_of_one - 1) for n in range(0, len(pixels), unit_of_one)]
            found, times = decoder.get_video_clips(ranges, video_unit="frames")
            for (first, last), clip in zip(ranges, found, strict=True):
                assert_frames(clip, pixels[first : last + 1])
            for number in range(0, len(ranges), 50):
                clip, _ = decoder.get_video_clips([(times[number][0], times[number][0])])
                assert_frames(clip[0], pixels[number * unit_of_one : number * unit_of_one + 1])


@pytest.mark.skipif(not CLIPS.is_dir(), reason="the clips in shared/data are not here")
@pytest.mark.parametrize(
    "path", sorted(p for p in CLIPS.glob("*.*") if p.suffix != ".md"), ids=lambda path: path.name
)
def test_samples_of_real_clips_are_exact(path) -> None:
    samples = all_samples(path.read_bytes())
    rng = np.random.default_rng(2)
    starts = rng.integers(0, samples.shape[1] - 1000, 30).tolist()
    with path.open("rb") as file:
        found, _ = AVDecoder(file).get_audio_clips([(s, s + 999) for s in starts], "samples")
        for start, clip in zip(starts, found, strict=True):
            single, _ = AVDecoder(file).get_audio_clips([(start, start + 999)], "samples")
            assert np.array_equal(clip.numpy(), samples[:, start : start + 999])
            assert torch.equal(single[0], clip)
    soundfile = pytest.importorskip("soundfile", reason="compares with soundfile")
    if path.suffix in (".wav", ".flac"):
        expected, rate = soundfile.read(path, dtype="int16", always_2d=True)
        assert np.array_equal(expected.T, samples)
        assert AVDecoder(path).get_audio_samples_per_second() == rate


# ------------------------------------------------------------------------------ in a pipeline


@stateless
def cook_video(parts):
    return TextSample(**basic_sample_keys(parts), text=parts["mp4"])


class Frames(DefaultTaskEncoder):
    """Holds decoders in a packing buffer, and decodes them in the pack."""

    cookers = (Cooker(cook_video),)

    def select_samples_to_pack(self, samples):
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    @stateless
    def pack_selected_samples(self, samples):
        frames = [get_single_frames_uniform(sample.text, 3) for sample in samples]
        sounds = [sample.text.get_audio_clips([(0.5, 1)])[0][0] for sample in samples]
        return TextSample.derive_from(samples[0], text=(frames, sounds))

    def batch(self, samples):
        return samples


@pytest.fixture(scope="module")
def videos(tmp_path_factory, clips):
    """A dataset of videos; one of them is cut short."""
    root = tmp_path_factory.mktemp("videos")
    names = [name for name, (_, audio, *_) in FORMATS.items() if audio and name.endswith("mp4")]
    for shard in range(2):
        members = []
        for number in range(6 * shard, 6 * shard + 6):
            raw = clips[names[number % len(names)]]
            members.append((f"{number:03d}.mp4", raw[:900] if number == 4 else raw))
        write_tar(root / f"{shard}.tar", members)
    prepare_dataset(root, split_ratio="1,0,0")
    (root / ".nv-meta/dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )
    return root


def loader_of(root, encoder, start_method=None, **options):
    workers = {"num_workers": 2, "start_method": start_method} if start_method else {}
    config = WorkerConfig(rank=0, world_size=1, **{"num_workers": 0, **workers})
    dataset = get_train_dataset(
        root, task_encoder=encoder, worker_config=config, shuffle_buffer_size=None,
        max_samples_per_sequence=None, repeat=False, **options,
    )  # fmt: skip
    return get_savable_loader(dataset)


@pytest.mark.parametrize("start_method", [None, "fork", "forkserver"])
def test_decoders_in_packing_buffers_resume_in_any_process(videos, start_method, caplog) -> None:
    options = {"batch_size": None, "packing_buffer_size": 4}
    loader = loader_of(videos, Frames(), start_method, **options)
    packs = iter(loader)
    next(packs)
    state = json.loads(json.dumps(loader.save_state_rank()))
    rest = list(packs)
    assert len(rest) >= 3
    if start_method is None:
        assert "audio or video cannot be decoded" in caplog.text
        assert "004" in caplog.text
    again = loader_of(videos, Frames(), start_method, **options)
    again.restore_state_rank(state)
    for one, other in itertools.zip_longest(rest, again):
        assert one.__key__ == other.__key__
        for some, others in zip(one.text, other.text, strict=True):
            assert all(map(torch.equal, some, others))
    assert again.restore_sample(rest[0].__restore_key__).__key__ == rest[0].__key__


@given(
    rate=st.sampled_from([8000, 11025, 16000, 22050, 44100]),
    duration=st.floats(0.01, 0.5),
    starts=st.lists(st.floats(0, 1), min_size=2, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_clips_of_equal_duration_have_equally_many_samples(rate, duration, starts):
    raw = io.BytesIO()
    with wave.open(raw, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.arange(2 * rate, dtype="<i2").tobytes())
    ranges = [(start, start + duration) for start in starts]
    clips, times = AVDecoder(io.BytesIO(raw.getvalue())).get_audio_clips(ranges)
    assert len({clip.shape for clip in clips}) == 1
    for clip, (start, _), found in zip(clips, ranges, times, strict=True):
        first = int(clip[0, 0]) & 0xFFFF
        assert first == int(start * rate + 1e-4) & 0xFFFF
        assert found == pytest.approx((start, start + duration))
