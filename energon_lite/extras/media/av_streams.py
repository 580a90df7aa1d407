"""Reads video frames and audio samples with PyAV: seeks by keyframes, and is exact.

What a clip has is what a decode of the whole file has at the same place. A seek is checked by what
it finds: where it lands too late, it is repeated further back, and at last from the start.
"""

from __future__ import annotations

import bisect
import importlib
import io
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from enum import Enum
from fractions import Fraction
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from energon_lite.core.errors import DecodingError

# Times that users compute differ from those of frames in the last digits. [Unit: second]
_TOLERANCE = 1e-6
# A loader has a process for each core: threads of a decoder would only compete with them.
_DECODE_THREADS = 1
# FFmpeg's numbers for what a demuxer does with a stream.
_READ, _SKIP = 0, 48
INSTALL = "pip install 'energon_lite[av]'"
# A seek to this time before the end finds the last packets. [Unit: second]
_TAIL = 2
# What is decoded before an audio clip, until the filters of the decoder have settled: MP3 refers
# to ten frames, AAC overlaps two, and Opus may need most of this. [Unit: second]
_PREROLL = Fraction(1)
# These codecs may store noise as a mere description, which a decoder fills in from a generator
# that runs since its start. Up to this second such a clip is decoded from the start.
_NOISY = frozenset({"aac", "ac3", "eac3"})
_NOISE_SECONDS = 120
# Codecs of which every frame has the same number of samples; of opus, a multiple of 120.
_CONSTANT_FRAMES = frozenset({"aac", "mp3", "mp3float", "ac3", "opus"})
_OPUS_GRID = 120
# The number of frames that a clip has room for at first.
_FIRST_FRAMES = 16
# Other codecs are decoded from the start, since a seek is not exact in all their files.
_SEEKABLE = _CONSTANT_FRAMES | {"flac", "alac", "vorbis"}
_FILES = (io.BufferedReader, io.FileIO, io.BufferedRandom)


class AVIndexMode(Enum):
    """The way to find frames by their number."""

    FRAMES = "frames"  # the header lists all frames: mp4, mov
    PTS = "pts"  # the file lists times of keyframes: mkv, webm
    PROBE = "probe"  # the packets are listed by reading them once


Range = tuple[float, float]
Source = BinaryIO | str | os.PathLike[str]


class Clip(NamedTuple):
    """A part of a stream: frames or samples, and the times of its start and end in seconds."""

    data: torch.Tensor
    times: tuple[float, float]


def pyav() -> Any:
    """Imports PyAV on first use.

    Raises:
        ImportError: It is not installed; the text has the command that installs it.
    """
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise ImportError(
            f"Audio and video need PyAV to be decoded: {INSTALL}. With "
            "SampleDecoder(av_decode='bytes') such parts stay bytes"
        ) from error


def file_path(stream: Source) -> str | None:
    """Returns the path of a file on disk; None for another stream."""
    if isinstance(stream, (str, os.PathLike)):
        return os.fspath(stream)
    name = getattr(stream, "name", None)
    return name if isinstance(stream, _FILES) and isinstance(name, str) else None


class Media:
    """Audio or video that is open for one use; a context manager.

    A file on disk is opened by its path, since forked processes would share the position of a
    stream; of other streams, only what is needed is read.

    Attributes:
        container: PyAV's container.
    """

    container: Any

    def __init__(self, source: Source) -> None:
        self._source: Any = source
        self._is_fresh = False

    def __enter__(self) -> Media:
        """Opens it.

        Raises:
            DecodingError: It is neither audio nor video, or its header is broken.
        """
        try:
            self._open()
        except pyav().error.FFmpegError as error:
            raise DecodingError(self._broken(error)) from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Closes it; errors of the decoder become `DecodingError`."""
        self.container.close()
        # PyAV's index errors are of streams that no header has named.
        if isinstance(error, (pyav().error.FFmpegError, IndexError)):
            raise DecodingError(self._broken(error)) from error

    def _open(self) -> None:
        path = file_path(self._source)
        if path is None:
            self._source.seek(0)
        self.container = pyav().open(path or self._source, metadata_errors="replace")
        for stream in self._streams():
            stream.codec_context.thread_count = _DECODE_THREADS
        self._is_fresh = True

    def _broken(self, error: Exception) -> str:
        path = file_path(self._source)
        if path is not None:
            return f"{path} cannot be decoded as audio or video: {error}"
        self._source.seek(0)
        start = self._source.read(8).hex(" ") or "no bytes"
        return f"audio or video cannot be decoded (starts with {start}): {error}"

    def stream(self, kind: str) -> Any | None:
        """Returns the first stream of `video` or `audio` that has a decoder; None without one.

        It must not be used after packets are read, for which the file may be opened again.
        """
        return next((stream for stream in self._streams() if stream.type == kind), None)

    def _streams(self) -> list[Any]:
        streams = (*self.container.streams.video, *self.container.streams.audio)
        known = (stream for stream in streams if stream.codec_context is not None)
        return [s for s in known if s.type == "video" or s.codec_context.sample_rate]

    def start(self) -> Fraction:
        """Returns the second at which the first stream starts, from which times are counted."""
        known = (s.start_time * s.time_base for s in self._streams() if s.start_time is not None)
        return min(known, default=Fraction(0))

    def index_mode(self) -> AVIndexMode:
        """Returns how frames are found by their number."""
        names = self.container.format.name.split(",")
        if "mov" in names:
            return AVIndexMode.FRAMES
        return AVIndexMode.PTS if "matroska" in names else AVIndexMode.PROBE

    def packets(self, kind: str, at: int | None = None) -> Iterator[Any]:
        """Yields the packets of a stream, from a keyframe on.

        Args:
            kind: `video` or `audio`.
            at: where to start, in units of the time base; None for the start of the file.
        """
        if at is None and not self._is_fresh:
            self.container.close()
            self._open()
        self._is_fresh = False
        stream = self.stream(kind)
        for other in self.container.streams:
            if hasattr(other, "discard"):  # PyAV 18; others are not read where they can be skipped
                other.discard = _READ if other is stream else _SKIP
        if at is not None:
            self.container.seek(at, stream=stream)
        yield from self.container.demux(stream)

    def shown_entries(self) -> list[Any] | None:
        """Returns the entries of the video's index that are shown; None if it lacks frames."""
        stream: Any = self.stream("video")
        entries = stream.index_entries
        if self.index_mode() is not AVIndexMode.FRAMES or not len(entries) == stream.frames > 0:
            return None
        return [entry for entry in entries if not entry.is_discard]

    def length(self, kind: str) -> float | None:
        """Returns the length of a stream in seconds; None without the stream, or its times.

        It is read from the header, or from the last packets, or from all.
        """
        stream = self.stream(kind)
        if stream is None:
            return None
        base, start = stream.time_base, self.start()
        if stream.duration is not None:
            return float(stream.duration * base)
        tail = (self.container.duration or 0) / 1_000_000 - _TAIL
        for at in (int(tail / base), None) if tail > 0 else (None,):
            packets = (p for p in self.packets(kind, at) if p.size and p.pts is not None)
            end = max((packet.pts + (packet.duration or 0) for packet in packets), default=None)
            if end is not None:
                return float(end * base - start)
        length = self.container.duration
        return None if length is None else float(length / 1_000_000)

    def packet_times(self) -> list[int | None]:
        """Reads all packets of the video, and returns when they are shown, in the order read."""
        packets = self.packets("video")
        return [packet.pts for packet in packets if packet.size and not packet.is_discard]

    def num_frames(self) -> int:
        """Returns the number of frames, from the header or by reading all packets."""
        entries = self.shown_entries()
        return len(self.packet_times() if entries is None else entries)


def overlapping(ranges: Sequence[Range]) -> Iterator[list[int]]:
    """Yields the indices of ranges that overlap, group by group in the order of their starts."""
    group: list[int] = []
    end = -math.inf
    for index in sorted(range(len(ranges)), key=ranges.__getitem__):
        first, last = ranges[index]
        if group and first > end:
            yield group
            group = []
        group.append(index)
        end = max(end, last) if len(group) > 1 else last
    if group:
        yield group


# -------------------------------------------------------------------------------------- video


class VideoReader:
    """Decodes clips of a video.

    A position is a time in units of the time base, or the number of a frame.

    Args:
        media: The open file.
        frame_size: Width and height of the frames; None takes those of the first.

    Raises:
        ValueError: There is no video.
    """

    def __init__(self, media: Media, frame_size: tuple[int, int] | None = None) -> None:
        stream = media.stream("video")
        if stream is None:
            raise ValueError("No video stream found, but video is requested")
        self._media = media
        self._frame_size = frame_size
        self._base: Fraction = stream.time_base
        self._start = media.start()
        self._first: int | None = stream.start_time
        self.rate = Fraction(stream.average_rate or stream.guessed_rate or 25)
        self._frame_ticks = max(1, round(1 / (self.rate * self._base)))
        # In time: None. By number: the decode times of all frames that are shown.
        self._decode_times: list[int] | None = None
        self._keys: list[int] = []  # numbers of the keyframes among them
        self._is_counted = False  # packets have no times: frames are counted from the start
        self._next: tuple[int, Any] | None = None  # decoded to see where the frame before it ends
        self._frames: Iterator[tuple[int, Any]] = iter(())
        self._last_read: int | None = None  # decode time of the last packet

    def by_seconds(self, ranges: Sequence[Range]) -> list[Clip | None]:
        """Returns the frames that are shown in each range, both ends included.

        Args:
            ranges: first and last second, from the start of the file.

        Returns:
            The clips in the order of `ranges`; None for a range behind the end.
        """
        if len(ranges) > 1 and self._media.index_mode() is AVIndexMode.PTS:
            # The first seek reads the index. Later, it would move what is being read.
            self._media.container.seek(0)
        unit, start = float(self._base), float(self._start)
        if self._has_no_times():
            unit, start = float(1 / self.rate), 0.0
        places = [tuple(_floor((x + start + _TOLERANCE) / unit) for x in pair) for pair in ranges]
        return self._clips([(first, last) for first, last in places])

    def by_number(self, ranges: Sequence[Range]) -> list[Clip | None]:
        """Returns the frames of each range of numbers, both ends included.

        Args:
            ranges: numbers of the first and the last frame; frame 0 is the first that is shown.

        Returns:
            The clips in the order of `ranges`; None for a range behind the end.
        """
        numbers = [(_floor(first), _floor(last)) for first, last in ranges]
        entries = self._media.shown_entries()
        if entries is not None:
            self._decode_times = [entry.timestamp for entry in entries]
            self._keys = [number for number, entry in enumerate(entries) if entry.is_keyframe]
            return self._clips(numbers)
        found = self._media.packet_times()
        times = sorted(time for time in found if time is not None)
        if len(set(times)) < len(found):  # without times, or two frames at one time
            self._is_counted = True
            return self._clips(numbers)
        end = len(times) - 1
        inside = [(max(0, int(first)), max(0, last)) for first, last in numbers if first <= end]
        clips = iter(self._clips([(times[a], times[int(min(b, end))]) for a, b in inside]))
        return [next(clips) if first <= end else None for first, _ in numbers]

    def _has_no_times(self) -> bool:
        if self._first is not None:
            return False
        packet = next(self._media.packets("video"), None)
        self._is_counted = packet is None or packet.pts is None
        return self._is_counted

    def _clips(self, ranges: Sequence[Range]) -> list[Clip | None]:
        first = self._first if self._decode_times is None and not self._is_counted else 0
        ranges = [(a, max(a, b)) for a, b in ((max(a, first or 0), b) for a, b in ranges)]
        clips = [_Frames(self) for _ in ranges]
        for group in overlapping(ranges):
            first_of_all = ranges[group[0]][0]
            last_of_all = max(ranges[index][1] for index in group)
            for position, end, frame in self._shown(int(first_of_all), last_of_all):
                for index in group:
                    if position <= ranges[index][1] and end > ranges[index][0]:
                        clips[index].append(frame, position)
        return [frames.clip() for frames in clips]

    def _shown(self, first: int, last: float) -> Iterator[tuple[int, int, Any]]:
        """Yields position, end and frame of all frames shown from one position to another."""
        frames = self._from(first)
        current = next(frames, None)
        while current is not None:
            position, frame = current
            self._next = following = next(frames, None)
            end = position + self._duration(frame) if following is None else following[0]
            if end > first:
                yield position, end, frame
            if following is None or following[0] > last:
                return
            current = following

    def _duration(self, frame: Any) -> int:
        if self._decode_times is not None or self._is_counted:
            return 1
        return int(frame.duration or self._frame_ticks)

    def seconds(self, frame: Any, position: int) -> tuple[float, float]:
        """Returns when a frame is shown, and until when."""
        if self._is_counted:
            return float(position / self.rate), float((position + 1) / self.rate)
        start = frame.pts * self._base - self._start
        duration = frame.duration * self._base if frame.duration else 1 / self.rate
        return float(start), float(start + duration)

    # ------------------------------------------------------------------ seeking

    def _from(self, first: int) -> Iterator[tuple[int, Any]]:
        """Yields frames in order, the first of them at `first` or before."""
        key = self._keyframe_before(first)
        # Without a keyframe in between, a seek would only lead back.
        is_ahead = key is None or self._last_read is None or key > self._last_read
        is_ahead = is_ahead and not self._is_counted
        if self._next is not None and self._next[0] <= first and not is_ahead:
            return itertools.chain([self._next], self._frames)
        self._frames = self._seek(first, first if self._decode_times is None else key)
        return self._frames

    def _keyframe_before(self, first: int) -> int | None:
        if self._decode_times is not None:
            key = bisect.bisect_right(self._keys, first) - 1
            return self._decode_times[self._keys[key]] if key >= 0 else None
        stream: Any = self._media.stream("video")
        entries = stream.index_entries
        found = entries.search_timestamp(first) if len(entries) else -1
        return entries[found].timestamp if found >= 0 else None

    def _seek(self, first: int, at: int | None) -> Iterator[tuple[int, Any]]:
        step = max(1, round(1 / self._base))
        start = self._first or 0
        if self._decode_times:
            # A seek takes the time at which a keyframe is shown, which is later than its decoding.
            at = None if at is None else at + start - self._decode_times[0]
        while at is not None and at > start and not self._is_counted:
            frames = self._decode(at)
            landed = next(frames, None)
            if landed is not None and landed[0] <= first:
                return itertools.chain([landed], frames)
            at -= step
            step *= 4
        return self._decode(None)

    def _decode(self, at: int | None) -> Iterator[tuple[int, Any]]:
        """Yields positions and frames from a keyframe on."""
        key: int | None = None
        number = leading = 0
        numbers = self._decode_times or []
        for packet in self._media.packets("video", at):
            if self._is_counted:
                for frame in packet.decode():
                    yield number, frame
                    number += 1
                continue
            if key is None:
                if not packet.is_keyframe or packet.pts is None:
                    continue
                key = packet.pts
                number = bisect.bisect_left(numbers, packet.dts) if numbers else 0
            elif packet.pts is not None and packet.pts < key:
                leading += 1  # shown before the keyframe: not all that it refers to is decoded
            if packet.size:
                self._last_read = packet.pts if packet.dts is None else packet.dts
            for frame in packet.decode():
                if frame.pts is None or frame.pts < key:
                    continue
                yield (number + leading if numbers else frame.pts), frame
                number += 1

    # ------------------------------------------------------------------ pixels

    def size_of(self, frame: Any) -> tuple[int, int]:
        """Returns width and height of what becomes of a frame: by default that of the first."""
        self._frame_size = self._frame_size or (frame.width, frame.height)
        return self._frame_size


class _Frames:
    """The frames of one clip, in one array from the start.

    Args:
        reader: what decodes them.
    """

    def __init__(self, reader: VideoReader) -> None:
        self._reader = reader
        self._num = 0
        self._times = (0.0, 0.0)
        self._reformat: Any = None
        self._pixels: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def append(self, frame: Any, position: int) -> None:
        """Converts a frame to RGB, into the array."""
        start, end = self._reader.seconds(frame, position)
        width, height = self._reader.size_of(frame)
        if self._reformat is None:
            self._reformat = pyav().video.reformatter.VideoReformatter().reformat
            self._times = (start, end)
            self._pixels = np.empty((_FIRST_FRAMES, height, width * 3), np.uint8)
        if self._num == len(self._pixels):  # a large array keeps its pages, and is not copied
            self._pixels.resize((self._num * 5 // 4, height, width * 3), refcheck=False)
        rgb = self._reformat(frame, width, height, "rgb24", threads=_DECODE_THREADS).planes[0]
        rows = np.frombuffer(rgb, np.uint8).reshape(-1, rgb.line_size)
        self._pixels[self._num] = rows[:height, : width * 3]
        self._num += 1
        self._times = (self._times[0], end)

    def clip(self) -> Clip | None:
        """Returns the frames as (frames, 3, H, W); None without one."""
        if not self._num:
            return None
        height, row_size = self._pixels.shape[1:]
        self._pixels.resize((self._num, height, row_size), refcheck=False)
        pixels = torch.from_numpy(self._pixels).view(self._num, height, row_size // 3, 3)
        return Clip(pixels.permute(0, 3, 1, 2), self._times)


def _floor(position: float) -> float:
    return math.floor(position) if math.isfinite(position) else position


# -------------------------------------------------------------------------------------- audio

Samples = npt.NDArray[Any]


class AudioReader:
    """Decodes clips of audio; a position is the number of a sample of the whole.

    Args:
        media: The open file.

    Raises:
        ValueError: There is no audio.
    """

    def __init__(self, media: Media) -> None:
        stream = media.stream("audio")
        if stream is None:
            raise ValueError("No audio stream found, but audio is requested")
        self._media = media
        self._base: Fraction = stream.time_base
        self.rate: int = stream.codec_context.sample_rate
        # When sample 0 is heard.
        first = stream.start_time
        self._start = 0.0 if first is None else float(first * self._base - media.start())
        codec = stream.codec_context
        is_pcm = codec.name.startswith("pcm_")
        self._is_exact = self._base * self.rate <= 1  # otherwise several samples have one time
        self._first: tuple[int, int] | None = None  # time and length of the first frame
        self._grid = 0
        if codec.name in _CONSTANT_FRAMES:
            self._grid = codec.frame_size or _OPUS_GRID
        can_number = (self._is_exact or self._grid > 0) and not _has_pause(media)
        self._can_seek = can_number and (is_pcm or codec.name in _SEEKABLE)
        self._num_noisy = _NOISE_SECONDS * self.rate if codec.name in _NOISY else 0
        self._num_unseekable = 0  # the samples among them, once noise was found
        self._preroll = 0 if is_pcm or codec.name == "flac" else int(_PREROLL * self.rate)
        self._end = 0  # when the last packet that was read ends, in units of the time base

    def by_seconds(self, ranges: Sequence[Range]) -> list[Clip | None]:
        """Returns the samples of each range, without the sample at its end.

        Ranges of equal duration have equally many samples.

        Args:
            ranges: first and last second, from the start of the file.

        Returns:
            The clips in the order of `ranges`, each (channels, samples); None for a range behind
            the end.
        """
        rate, start = self.rate, self._start
        firsts = [_floor((first - start) * rate + 1e-4) for first, _ in ranges]
        nums = [_floor((last - first) * rate + 1e-4) for first, last in ranges]
        samples = [(first, first + num) for first, num in zip(firsts, nums, strict=True)]
        return self._clips(samples, ranges)

    def by_number(self, ranges: Sequence[Range]) -> list[Clip | None]:
        """Returns the samples of each range, without the last one; otherwise as `by_seconds`."""
        times = [(a / self.rate + self._start, b / self.rate + self._start) for a, b in ranges]
        return self._clips([(_floor(a), _floor(b)) for a, b in ranges], times)

    def length(self) -> tuple[int, float]:
        """Decodes the end, and returns the number of samples, and when the last packet ends."""
        last = int(((self._media.length("audio") or 0) - _PREROLL) * self.rate)
        num = 0
        for at, data in self._from(last) or self._decode(None):
            num = at + data.shape[1]
        return num, float(self._end * self._base)

    def _clips(self, ranges: Sequence[Range], times: Sequence[Range]) -> list[Clip | None]:
        ranges = [(max(0, first), max(0, first, last)) for first, last in ranges]
        found: dict[int, Samples | None] = {}
        from_start: list[int] = []
        for group in overlapping(ranges):
            clips = self._after_seek([ranges[index] for index in group])
            if clips is None:
                from_start += group
            else:
                found.update(zip(group, clips, strict=True))
        if from_start:
            clips = _cut_samples(self._decode(None), [ranges[index] for index in from_start])
            found.update(zip(from_start, clips, strict=True))
        return [
            self._clip(found[index], ranges[index][0], pair) for index, pair in enumerate(times)
        ]

    def _clip(self, data: Samples | None, first: float, times: Range) -> Clip | None:
        if data is None:
            return None
        end = (first + data.shape[1]) / self.rate + self._start
        start = max(times[0], 0.0)
        # The end that was asked for, unless the audio ends before.
        last = times[1] if times[1] - end < 2 / self.rate else end
        return Clip(torch.from_numpy(data), (float(start), float(max(last, 0.0))))

    def _after_seek(self, ranges: Sequence[Range]) -> list[Samples | None] | None:
        """Returns the samples of overlapping ranges; None if only a decode of all is exact."""
        first, last = int(ranges[0][0]), max(last for _, last in ranges)
        around = first - self._preroll // 2, last
        frames = None if first < self._num_unseekable else self._from(first)
        if frames is None:
            return None
        *found, heard = _cut_samples(frames, [*ranges, around])
        if first < self._num_noisy:
            frames = self._from(first - self._preroll)  # noise would be other noise
            again = None if frames is None else _cut_samples(frames, [around])[0]
            if again is None or heard is None or not np.array_equal(again, heard):
                self._num_unseekable = self._num_noisy
                return None
        return found

    def _from(self, first: int) -> Iterator[tuple[int, Samples]] | None:
        """Seeks to before a sample; returns None where this is not possible."""
        first -= self._preroll
        if first <= 0 or not self._can_seek:
            return None
        try:
            self._first = self._first or self._first_frame()
            frames = self._decode(self._first[0] + int(first / self._base / self.rate))
            landed = next(frames, None)
        except pyav().error.FFmpegError:  # a part of a frame, or a file that cannot seek
            return None
        if landed is None or landed[0] > first:
            return None
        return itertools.chain([landed], frames)

    def _decode(self, at: int | None) -> Iterator[tuple[int, Samples]]:
        """Yields numbers of samples, and the samples from there on."""
        number: int | None = 0 if at is None else None
        for packet in self._media.packets("audio", at):
            if packet.pts is not None:
                self._end = packet.pts + (packet.duration or 0)
            for frame in packet.decode():
                if number is None:
                    # The first frame may be cut short.
                    if frame.pts is None or (self._grid and frame.samples % self._grid):
                        continue
                    number = self._number(frame.pts)
                data = frame.to_ndarray()
                if not frame.format.is_planar:
                    data = data.reshape(frame.samples, -1).T
                yield number, data
                number += data.shape[1]

    def _first_frame(self) -> tuple[int, int]:
        for packet in self._media.packets("audio"):
            for frame in packet.decode():
                if frame.pts is not None:
                    return frame.pts, frame.samples
        return 0, 0

    def _number(self, pts: int) -> int:
        """Returns the number of the sample that is heard at a time."""
        first, size = self._first or (0, 0)
        number = (pts - first) * self._base * self.rate
        if self._is_exact:
            return round(number)
        return size + round((number - size) / self._grid) * self._grid


def _cut_samples(
    frames: Iterator[tuple[int, Samples]], ranges: Sequence[Range]
) -> list[Samples | None]:
    """Returns the samples of each range; None for a range behind the end."""
    pieces: list[list[Samples]] = [[] for _ in ranges]
    end_of_all = max(max(last, first + 1) for first, last in ranges)
    for at, data in frames:
        end = at + data.shape[1]
        for found, (first, last) in zip(pieces, ranges, strict=True):
            if at < max(last, first + 1) and end > first:
                found.append(data[:, int(max(0, first - at)) : int(min(last, end) - at)])
        if end >= end_of_all:
            break
    return [np.concatenate(found, axis=1) if found else None for found in pieces]


def _has_pause(media: Media) -> bool:
    """Returns whether the index has fewer packets than fill the time of the audio.

    A decoder leaves a pause out, so that the numbers of samples do not follow from their times.
    """
    stream: Any = media.stream("audio")
    entries = stream.index_entries
    if media.index_mode() is not AVIndexMode.FRAMES or len(entries) < 2:
        return False
    size = entries[1].timestamp - entries[0].timestamp
    return bool(abs(len(entries) * size - (stream.duration or 0)) > 2 * size)
