"""Audio and video of a sample, decoded when a hook asks for it: clips, frames, metadata."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch

from energon_lite.core.edataclass import edataclass
from energon_lite.core.errors import DecodingError, did_you_mean
from energon_lite.decoding import part_formats
from energon_lite.extras.media.av_streams import (
    AudioReader,
    Clip,
    Media,
    Range,
    Source,
    VideoReader,
    file_path,
    pyav,
)
from energon_lite.extras.media.media_metadata import AVMetadata
from energon_lite.storage.files import absolute

VideoUnit = Literal["frames", "seconds"]
AudioUnit = Literal["samples", "seconds"]


@edataclass
class AVData:
    """Decoded clips.

    Attributes:
        video_clips: Frames of each clip, uint8, (frames, 3, H, W).
        video_timestamps: Start and end of each clip. [Unit: second]
        audio_clips: Samples of each clip, (channels, samples), in the type of the file.
        audio_timestamps: Start and end of each clip. [Unit: second]
    """

    video_clips: list[torch.Tensor] | None
    video_timestamps: list[tuple[float, float]] | None
    audio_clips: list[torch.Tensor] | None
    audio_timestamps: list[tuple[float, float]] | None


@edataclass
class VideoData:
    """A whole video, as Energon decoded it before it had `AVData`; for types of samples.

    Attributes:
        frames: uint8, (frames, 3, H, W).
        aframes: (channels, samples).
        info: frame rates.
    """

    frames: torch.Tensor
    aframes: torch.Tensor
    info: dict[str, Any]


class AVDecoder:
    """Audio or video that is decoded on demand, by PyAV.

    Clips are exact: their frames and samples are those of a decode of the whole file, with B-frames
    and variable frame rates, too. Only what the clips need is read, from the keyframe before each.
    Each call opens the file again, so a decoder can be pickled and used after a fork. Times are
    counted from the start of the file. One thread decodes. Behind the first two minutes, AAC and
    AC-3 may have other noise than in a whole decode, where the encoder described noise only.

    Args:
        stream: The content, open for reading, or the path of a file. An open file on disk is read
            by its path.
        suppress_warnings: Whether to be silent about ranges behind the end.

    Raises:
        ImportError: PyAV is not installed; the text has the command that installs it.
    """

    def __init__(self, stream: Source, suppress_warnings: bool = False) -> None:
        pyav()
        self.stream = stream
        self.suppress_warnings = suppress_warnings

    def __repr__(self) -> str:
        return f"AVDecoder(stream={self.stream!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the path of a file on disk; of other streams, the bytes."""
        path, stream = file_path(self.stream), cast(Any, self.stream)
        if path is not None:
            return AVDecoder, (str(absolute(Path(path))), self.suppress_warnings)
        stream.seek(0)
        return _from_bytes, (stream.read(), self.suppress_warnings)

    # ------------------------------------------------------------------ clips

    def get_video(self) -> AVData:
        """Returns all frames, as one clip."""
        return self.get_clips([(0, math.inf)], video_unit="frames")

    def get_audio(self) -> AVData:
        """Returns all samples, as one clip."""
        return self.get_clips(None, [(0, math.inf)], audio_unit="samples")

    def get_video_with_audio(self) -> AVData:
        """Returns all frames and all samples, as one clip each."""
        everything = [(0, math.inf)]
        return self.get_clips(everything, everything, "frames", "samples")

    def get_frames(self, video_decode_audio: bool = False) -> AVData | None:
        """Returns everything in the file: frames, or samples of a file without video.

        Args:
            video_decode_audio: Whether to return the audio of a video, too.
        """
        if not self.has_video_stream():
            return self.get_audio()
        if video_decode_audio and self.has_audio_stream():
            return self.get_video_with_audio()
        return self.get_video()

    def get_clips(
        self,
        video_clip_ranges: Sequence[Range] | None = None,
        audio_clip_ranges: Sequence[Range] | None = None,
        video_unit: VideoUnit = "seconds",
        audio_unit: AudioUnit = "seconds",
        video_out_frame_size: tuple[int, int] | None = None,
    ) -> AVData:
        """Returns clips of video, of audio, or both.

        Args:
            video_clip_ranges: Start and end of each clip. Both ends are included: the clip starts
                with the frame that is shown at its start, and has at least this frame. `math.inf`
                is the end of the video.
            audio_clip_ranges: Start and end of each clip; the sample at the end is not included.
            video_unit: `seconds`, or `frames` for numbers of frames in the order in which they
                are shown, from 0.
            audio_unit: `seconds` or `samples`.
            video_out_frame_size: Width and height to which frames are resized.

        Returns:
            The clips in the order of the ranges. A range behind the end has no clip, and a warning.

        Raises:
            ValueError: A range ends before it starts, a unit does not exist, or the file has no
                such stream.
            DecodingError: The content is broken.
        """
        _check("video", video_clip_ranges, video_unit, ("seconds", "frames"))
        _check("audio", audio_clip_ranges, audio_unit, ("seconds", "samples"))
        video: list[Clip | None] = []
        audio: list[Clip | None] = []
        if video_clip_ranges or audio_clip_ranges:
            with Media(self.stream) as media:
                if video_clip_ranges:
                    frames = VideoReader(media, video_out_frame_size)
                    read = frames.by_number if video_unit == "frames" else frames.by_seconds
                    video = read(video_clip_ranges)
                if audio_clip_ranges:
                    samples = AudioReader(media)
                    read = samples.by_number if audio_unit == "samples" else samples.by_seconds
                    audio = read(audio_clip_ranges)
        shown = self._found("video", video, video_clip_ranges or (), video_unit)
        heard = self._found("audio", audio, audio_clip_ranges or (), audio_unit)
        return AVData(
            video_clips=[clip.data for clip in shown],
            video_timestamps=[clip.times for clip in shown],
            audio_clips=[clip.data for clip in heard],
            audio_timestamps=[clip.times for clip in heard],
        )

    def get_video_clips(
        self,
        video_clip_ranges: Sequence[Range],
        video_unit: VideoUnit = "seconds",
        video_out_frame_size: tuple[int, int] | None = None,
    ) -> tuple[list[torch.Tensor], list[tuple[float, float]]]:
        """Returns clips of video and their times; as `get_clips`."""
        data = self.get_clips(video_clip_ranges, None, video_unit, "seconds", video_out_frame_size)
        return data.video_clips or [], data.video_timestamps or []

    def get_audio_clips(
        self, audio_clip_ranges: Sequence[Range], audio_unit: AudioUnit = "seconds"
    ) -> tuple[list[torch.Tensor], list[tuple[float, float]]]:
        """Returns clips of audio and their times; as `get_clips`."""
        data = self.get_clips(None, audio_clip_ranges, audio_unit=audio_unit)
        return data.audio_clips or [], data.audio_timestamps or []

    def _found(
        self, kind: str, clips: list[Clip | None], ranges: Sequence[Range], unit: str
    ) -> list[Clip]:
        missing = [pair for pair, clip in zip(ranges, clips, strict=True) if clip is None]
        if missing and not self.suppress_warnings:
            text = f"{kind}: no clip for {missing} ({unit}), which is behind the end"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        return [clip for clip in clips if clip is not None]

    # ------------------------------------------------------------------ metadata

    def has_video_stream(self) -> bool:
        """Returns whether there is video."""
        with Media(self.stream) as media:
            return media.stream("video") is not None

    def has_audio_stream(self) -> bool:
        """Returns whether there is audio."""
        with Media(self.stream) as media:
            return media.stream("audio") is not None

    def get_video_fps(self) -> float:
        """Returns the average number of frames per second.

        Raises:
            ValueError: There is no video.
        """
        with Media(self.stream) as media:
            return float(VideoReader(media).rate)

    def get_audio_samples_per_second(self) -> int:
        """Returns the sample rate.

        Raises:
            ValueError: There is no audio.
        """
        with Media(self.stream) as media:
            return AudioReader(media).rate

    def get_video_duration(self, get_frame_count: bool = False) -> tuple[float | None, int | None]:
        """Returns the length of the video, and the number of its frames.

        Args:
            get_frame_count: Whether to read all packets if the header has no number of frames.

        Returns:
            Seconds and frames; None where there is no video, and for frames that are not counted.
        """
        with Media(self.stream) as media:
            return _video_duration(media, get_frame_count)

    def get_audio_duration(self) -> float | None:
        """Returns the length of the audio in seconds; None without audio."""
        with Media(self.stream) as media:
            return media.length("audio")

    def get_metadata(
        self,
        get_video: bool = True,
        get_video_duration: bool = True,
        get_video_frame_count: bool = True,
        get_video_frame_size: bool = True,
        get_audio: bool = True,
        get_audio_duration: bool = True,
        get_audio_num_samples: bool = False,
    ) -> AVMetadata:
        """Returns what the file has.

        Args:
            get_video: Whether to describe the video; without it, all its fields are None.
            get_video_duration: Whether to find its length.
            get_video_frame_count: Whether to count its frames.
            get_video_frame_size: Whether to return its width and height.
            get_audio: Whether to describe the audio; without it, all its fields are None.
            get_audio_duration: Whether to find its length.
            get_audio_num_samples: Whether to count its samples, for which the end is decoded, or
                all of it in formats that cannot seek to a sample. Its length is that of its
                packets, then, which the header may round.
        """
        found = AVMetadata()
        with Media(self.stream) as media:
            if get_video and (video := media.stream("video")) is not None:
                found.video_fps = float(VideoReader(media).rate)
                if get_video_frame_size:
                    found.video_width, found.video_height = video.width, video.height
                if get_video_duration or get_video_frame_count:
                    length, number = _video_duration(media, get_video_frame_count)
                    found.video_duration = length if get_video_duration else None
                    found.video_num_frames = number if get_video_frame_count else None
            if get_audio and (audio := media.stream("audio")) is not None:
                found.audio_channels = audio.codec_context.channels
                found.audio_sample_rate = audio.codec_context.sample_rate
                if get_audio_num_samples:
                    found.audio_num_samples, length = AudioReader(media).length()
                    found.audio_duration = length if get_audio_duration else None
                elif get_audio_duration:
                    found.audio_duration = media.length("audio")
        return found


def _from_bytes(raw: bytes, suppress_warnings: bool) -> AVDecoder:
    return AVDecoder(io.BytesIO(raw), suppress_warnings)


def _check(kind: str, ranges: Sequence[Range] | None, unit: str, units: tuple[str, ...]) -> None:
    if unit not in units:
        raise ValueError(f"{kind}_unit: unknown unit {unit!r}.{did_you_mean(unit, units)}")
    for first, last in ranges or ():
        if not first <= last or math.isinf(first):  # NaN, too
            raise ValueError(
                f"{kind}_clip_ranges: ({first}, {last}) must start at a number that is less or "
                "equal than its end"
            )


def _video_duration(media: Media, count: bool) -> tuple[float | None, int | None]:
    if media.stream("video") is None:
        return None, None
    seconds = media.length("video")
    number = media.num_frames() if count or seconds is None else None
    if seconds is None and number is not None:
        seconds = float(number / VideoReader(media).rate)
    return seconds, number


# -------------------------------------------------------------------------------------- uniform


def get_clips_uniform(
    av_decoder: AVDecoder,
    clip_duration_seconds: float,
    num_clips: int,
    request_video: bool = False,
    request_audio: bool = False,
    video_out_frame_size: tuple[int, int] | None = None,
) -> AVData:
    """Returns clips of one length, evenly spaced: the first at the start, the last at the end.

    Args:
        av_decoder: The file.
        clip_duration_seconds: Length of each clip; of 0, each clip is one frame.
        num_clips: Number of clips.
        request_video: Whether to return video.
        request_audio: Whether to return audio.
        video_out_frame_size: Width and height to which frames are resized.

    Raises:
        ValueError: Neither video nor audio is requested, or the file has no such stream.
    """
    if not request_video and not request_audio:
        raise ValueError("You must request at least one of video or audio")
    if num_clips < 1 or clip_duration_seconds < 0:
        raise ValueError(
            f"num_clips={num_clips} must be 1 or more, and "
            f"clip_duration_seconds={clip_duration_seconds} 0 or more"
        )
    seconds, number = av_decoder.get_video_duration(get_frame_count=not clip_duration_seconds)
    length = av_decoder.get_audio_duration() if request_audio else None
    if request_video and seconds is None:
        raise ValueError("No video stream found, but video is requested")
    if request_audio and length is None:
        raise ValueError("No audio stream found, but audio is requested")
    end = min(x for x in (seconds if request_video else None, length) if x is not None)
    last_start = max(0.0, end - clip_duration_seconds)
    steps = max(1, num_clips - 1)
    starts = [last_start * index / steps for index in range(num_clips)]
    ranges = [(start, start + clip_duration_seconds) for start in starts]
    # Clips of no length are single frames, of which the last is the last of the video.
    last = (number or 1) - 1
    numbers = [(2 * last * index + steps) // (2 * steps) for index in range(num_clips)]
    by_number = not clip_duration_seconds and number is not None
    return av_decoder.get_clips(
        ([(i, i) for i in numbers] if by_number else ranges) if request_video else None,
        ranges if request_audio else None,
        video_unit="frames" if by_number else "seconds",
        video_out_frame_size=video_out_frame_size,
    )


def get_single_frames_uniform(
    av_decoder: AVDecoder,
    num_frames: int,
    *,
    video_out_frame_size: tuple[int, int] | None = None,
    return_timestamps: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, list[float]]:
    """Returns evenly spaced frames: the first is the first of the video, the last its last.

    Args:
        av_decoder: The file.
        num_frames: Number of frames.
        video_out_frame_size: Width and height to which frames are resized.
        return_timestamps: Whether to return the start of each frame in seconds, too.

    Returns:
        The frames, (num_frames, 3, H, W); with `return_timestamps` also their times.

    Raises:
        ValueError: There is no video.
        DecodingError: The content is broken, or ends early.
    """
    data = get_clips_uniform(
        av_decoder, 0, num_frames, request_video=True, video_out_frame_size=video_out_frame_size
    )
    found = data.video_clips or ()
    if len(found) < num_frames:
        raise DecodingError(
            f"{av_decoder}: only {len(found)} of {num_frames} frames can be decoded; it ends "
            "before the length in its header"
        )
    frames = torch.cat([clip[:1] for clip in found])
    if return_timestamps:
        return frames, [start for start, _ in data.video_timestamps or ()]
    return frames


# -------------------------------------------------------------------------------------- parts


class AVWebdatasetDecoder:
    """Decodes parts of samples that are audio or video, as `SampleDecoder` does.

    Args:
        video_decode_audio: Whether mode `torch` decodes the audio of videos, too.
        av_decode: `AVDecoder`, `torch` for `AVData` with all frames or samples, or `pyav` for
            PyAV's open container.

    Raises:
        ValueError: The mode does not exist.
    """

    def __init__(
        self,
        video_decode_audio: bool,
        av_decode: Literal["torch", "AVDecoder", "pyav"] = "AVDecoder",
    ) -> None:
        if av_decode not in part_formats.AV_MODES:
            hint = did_you_mean(av_decode, part_formats.AV_MODES)
            raise ValueError(f"av_decode: unknown mode {av_decode!r}.{hint}")
        self.video_decode_audio = video_decode_audio
        self.av_decode = av_decode

    def __call__(self, key: str, data: bytes) -> Any:
        """Decodes a part; returns None for one whose name is not that of audio or video."""
        if key.rpartition(".")[2].lower() not in part_formats.AV_EXTENSIONS:
            return None
        return av_part_decoder(self.av_decode, self.video_decode_audio)(data)

    def read_av_data(self, data: bytes) -> AVDecoder:
        """Returns the decoder of a part."""
        return AVDecoder(io.BytesIO(data))


def av_part_decoder(
    mode: str, video_decode_audio: bool, max_bytes: int | None = None
) -> Callable[[bytes], Any]:
    """Returns the function that decodes parts.

    Args:
        mode: one of `part_formats.AV_MODES`.
        video_decode_audio: Whether mode `torch` decodes the audio of videos, too.
        max_bytes: Bytes that the frames of a video may have in mode `torch`.
    """
    if mode == "AVDecoder":
        return AVWebdatasetDecoder(video_decode_audio).read_av_data
    if mode == "pyav":
        return lambda raw: pyav().open(io.BytesIO(raw))

    def decode_all(raw: bytes) -> AVData | None:
        decoder = AVDecoder(io.BytesIO(raw))
        if max_bytes is not None:
            found = decoder.get_metadata(get_audio=False, get_video_duration=False)
            width, height = found.video_width or 0, found.video_height or 0
            size = (found.video_num_frames or 0) * width * height * 3
            part_formats.check_size(size, max_bytes, f"{found.video_num_frames} frames")
        return decoder.get_frames(video_decode_audio)

    return decode_all
