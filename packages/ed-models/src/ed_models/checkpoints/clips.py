"""Video files: which frames a model reads, and their size.

The rules are those of `Qwen2VLVideoProcessor` and `Qwen3VLVideoProcessor` of transformers. A clip
is a file that PyAV decodes (`pip install ed-models[videos]`), an animated GIF, a folder of pictures
in the order of their names, or a list of pictures. This module imports neither jax nor
transformers, so a small child process can decode the files of clients.

Legend: n frames, h height, w width.
"""

from __future__ import annotations

import io
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from ed_infra.errors import ConfigError

if TYPE_CHECKING:
    import PIL.Image

#: Frames per second of a clip that states none, as in transformers.
DEFAULT_FPS = 24.0
#: Frames per second that are read if neither the caller nor the checkpoint states a number, as in
#: Qwen3-VL and qwen-vl-utils.
DEFAULT_SAMPLING = 2.0
#: Formats and decoders of files. Others, such as playlists, could open further files.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg"
_CODECS = (
    *("h264", "hevc", "vp8", "vp9", "libvpx", "libvpx-vp9", "av1", "libdav1d", "mpeg4"),
    *("mpeg2video", "mpeg1video", "mjpeg", "theora"),
)
_PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")


class ClipError(ConfigError):
    """A clip cannot be decoded, or exceeds a limit."""


@dataclass(frozen=True)
class ClipLimits:
    """Limits of a clip, each of which is checked before the work that it limits.

    Attributes:
        bytes: size of a file.
        pixels: pixels of a frame of the file.
        frames: frames of the file, of which every one up to the last read one is decoded.
        seconds: duration.
        values: pixels of all read frames after resizing.
    """

    bytes: int = 2**30
    pixels: int = 2**24
    frames: int = 2**17
    seconds: float = 7200.0
    values: int = 2**28


@dataclass(frozen=True)
class ClipFacts:
    """What a file states about its frames.

    Attributes:
        frames: number of frames.
        fps: frames per second; None = unknown.
        height: height of a frame in pixels.
        width: width of a frame in pixels.
        is_sampled: whether all frames are read, because the caller has chosen them.
    """

    frames: int
    fps: float | None
    height: int
    width: int
    is_sampled: bool = False


def compute_times(frames: int, seconds: float, tokens_per_second: float | None) -> np.ndarray:
    """Return `image_times` of the frames of a video, int32 [frames].

    Args:
        frames: number of frames in the grid of the video.
        seconds: seconds between two of these frames.
        tokens_per_second: positions along time of a second (Qwen2.5-VL); None = a frame has one
            position (Qwen2-VL).
    """
    places = np.arange(frames, dtype=np.float32)
    if tokens_per_second is not None:
        # Numbers of transformers: the interval is a number of 32 bits.
        places = places * (np.float32(tokens_per_second) * np.float32(seconds))
    times = places.astype(np.int32) + 1
    times[:1] = 0
    return times


@dataclass(frozen=True)
class Sampling:
    """Which frames of a clip a model reads, and their size.

    Attributes:
        whole: whether the limits of pixels are those of a whole clip, and the frames are spread
            from the first to the last (Qwen3-VL). Otherwise the limits are those of a frame
            (Qwen2-VL).
        fps: frames per second to read.
        num_frames: number of frames to read, instead of `fps`.
        min_frames: fewest frames that `fps` reads.
        max_frames: most frames that `fps` reads.
        shortest_edge: fewest pixels.
        longest_edge: most pixels.
        patch_size: side of a patch in pixels.
        merge_size: patches along the side of a block.
        temporal_patch_size: frames of a patch.
        cap_pixels_per_frame: whether `max_video_tokens` limits the pixels of a frame, too.
        max_video_tokens: see `cap_pixels_per_frame`.
    """

    whole: bool
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    shortest_edge: int = 128 * 28 * 28
    longest_edge: int = 28 * 28 * 768
    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 128_000

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Create the sampling of the fields in a mapping; other keys are ignored."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in names})

    def choose_frames(self, facts: ClipFacts) -> list[int]:
        """Return the numbers of the frames to read, in ascending order.

        Raises:
            ClipError: the clip has too few frames.
        """
        total, count, factor = facts.frames, self.num_frames, self.temporal_patch_size
        if facts.is_sampled:
            return list(range(total))
        fps = facts.fps or DEFAULT_FPS
        rate = self.fps if self.fps is not None else DEFAULT_SAMPLING
        if self.whole:
            if count is None:
                count = min(max(int(total / fps * rate), self.min_frames), self.max_frames, total)
            return np.linspace(0, total - 1, count).round().astype(int).tolist()
        if count is None:
            most = math.floor(min(self.max_frames, total) / factor) * factor
            wanted = min(max(total / fps * rate, self.min_frames), most, total)
            count = math.floor(wanted / factor) * factor
        else:
            count = round(count / factor) * factor
        if not 0 < count <= total:
            raise ClipError(
                f"{count} frames cannot be read from a video of {total} frames: request fewer "
                f"frames, at least {factor}, or use a longer video"
            )
        step = total / count
        places = step * np.arange(math.ceil(total / step))
        return places.astype(np.float32).astype(int).tolist()

    def fit_size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which frames are resized.

        Args:
            frames: number of read frames.
            height: height of a frame of the clip in pixels.
            width: width of a frame of the clip in pixels.

        Raises:
            ClipError: one side is more than 200 times the other.
        """
        factor, most = self.patch_size * self.merge_size, self.longest_edge
        least, step = self.shortest_edge, self.temporal_patch_size
        if self.whole:
            if self.cap_pixels_per_frame:
                cap = min(self.max_video_tokens * factor**2, most // frames)
                most = max(cap, int(least * 1.05)) * frames
            if frames < step:
                raise ClipError(f"a video of {frames} frame is too short: use at least {step}")
            if min(height, width) < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
            rounded, count = round(frames / step) * step, frames
        else:
            if self.cap_pixels_per_frame:
                budget = int(self.max_video_tokens * factor * factor * 0.9)
                most = max(min(most, budget * step // frames), int(least * 1.05))
            rounded = count = 1
        if max(height, width) / min(height, width) > 200:
            raise ClipError(
                f"frames of {width} x {height} pixels are too narrow: one side may be at most 200 "
                "times the other"
            )
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if rounded * rows * columns > most:
            beta = math.sqrt(count * height * width / most)
            rows = max(factor, math.floor(height / beta / factor) * factor)
            columns = max(factor, math.floor(width / beta / factor) * factor)
        elif rounded * rows * columns < least:
            beta = math.sqrt(least / (count * height * width))
            rows = math.ceil(height * beta / factor) * factor
            columns = math.ceil(width * beta / factor) * factor
        return rows, columns


class ClipPlan(NamedTuple):
    """The frames of a clip that a model reads, before they are decoded.

    Attributes:
        facts: of the clip.
        indices: numbers of the frames in the clip.
        height: height of a resized frame in pixels.
        width: width of a resized frame in pixels.
    """

    facts: ClipFacts
    indices: list[int]
    height: int
    width: int


@dataclass(frozen=True)
class ClipFrames:
    """The frames of a clip that a model reads.

    Attributes:
        frames: RGB values, uint8 [n, h, w, 3], resized by `Sampling.fit_size`.
        facts: of the clip.
        indices: numbers of the frames in the clip.
    """

    frames: np.ndarray
    facts: ClipFacts
    indices: list[int]


#: A file, its content, a folder of pictures, or pictures (files, arrays or PIL images).
ClipSource = str | os.PathLike[str] | bytes | Sequence[Any]


def import_decoders() -> None:
    """Import the installed decoders, so that the children of a process share them."""
    with suppress(ImportError):  # a clip that requires a missing package raises an error
        from PIL import GifImagePlugin  # noqa: F401
    with suppress(ImportError):
        import av  # noqa: F401


def read_clip(
    source: ClipSource,
    sampling: Sampling,
    limits: ClipLimits | None = None,
    *,
    fps: float | None = None,
) -> ClipFrames:
    """Return the frames of a clip that a model reads.

    Args:
        source: a file, its content, a folder of pictures, or a list of pictures.
        sampling: which frames are read.
        limits: limits of the clip.
        fps: frames per second of a folder or a list of pictures.

    Raises:
        ClipError: the clip cannot be decoded, or exceeds a limit.
    """
    return open_clip(source, limits or ClipLimits(), fps=fps).read(sampling)


def open_clip(source: ClipSource, limits: ClipLimits, *, fps: float | None = None) -> Clip:
    """Return a clip, whose header is read and whose frames are not; see `read_clip`."""
    if isinstance(source, bytes | bytearray):
        return _open_file(bytes(source), limits)
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix.lower() in _PICTURES)
            return Pictures(files, fps, limits)
        try:
            if path.stat().st_size > limits.bytes:
                raise ClipError(
                    f"the video has {path.stat().st_size} bytes, and the limit is {limits.bytes} "
                    "bytes: shorten or compress it"
                )
            return _open_file(path.read_bytes(), limits)
        except OSError as error:
            raise ClipError(f"the video {str(path)!r} cannot be read: {error}") from error
    return Pictures(source, fps, limits)


def _open_file(data: bytes, limits: ClipLimits) -> Clip:
    if len(data) > limits.bytes:
        raise ClipError(
            f"the video has {len(data)} bytes, and the limit is {limits.bytes} bytes: shorten or "
            "compress it"
        )
    return AnimatedPicture(data, limits) if data[:4] == b"GIF8" else VideoFile(data, limits)


class Clip(ABC):
    """A clip with known facts, whose frames are decoded by `read`.

    Args:
        facts: of the clip.
        limits: of the clip.

    Raises:
        ClipError: the clip exceeds a limit, or has no frames.
    """

    def __init__(self, facts: ClipFacts, limits: ClipLimits) -> None:
        self.facts, self._limits = facts, limits
        if facts.frames < 1 or facts.height * facts.width < 1:
            raise ClipError("the video has no frames: use another file")
        _check_limit(facts.frames, limits.frames, "frames")
        _check_limit(facts.height * facts.width, limits.pixels, "pixels in a frame")
        if facts.fps:
            _check_limit(facts.frames / facts.fps, limits.seconds, "seconds")

    @abstractmethod
    def decode(self, numbers: Collection[int]) -> Iterator[PIL.Image.Image]:
        """Yield the frames with these numbers, in ascending order; fewer if the file ends."""

    def plan(self, sampling: Sampling) -> ClipPlan:
        """Return the frames that a model reads, and their size, without decoding them.

        Raises:
            ClipError: the frames exceed a limit.
        """
        facts = self.facts
        indices = sampling.choose_frames(facts)
        height, width = sampling.fit_size(len(indices), facts.height, facts.width)
        if len(indices) * height * width > self._limits.values:
            raise ClipError(
                f"{len(indices)} frames of {width} x {height} pixels exceed the limit of "
                f"{self._limits.values} pixels: shorten the video, or read fewer frames (fps, "
                "num_frames)"
            )
        return ClipPlan(facts, indices, height, width)

    def read(self, sampling: Sampling) -> ClipFrames:
        """Return the frames that a model reads; see `read_clip`."""
        plan = self.plan(sampling)
        frames = np.empty((len(plan.indices), plan.height, plan.width, 3), np.uint8)
        for place, frame in enumerate(self.resize_frames(plan)):
            frames[place] = frame
        return ClipFrames(frames, plan.facts, plan.indices)

    def resize_frames(self, plan: ClipPlan) -> Iterator[np.ndarray]:
        """Yield the RGB values of each frame of a plan, uint8 [h, w, 3].

        Raises:
            ClipError: no frame can be decoded.
        """
        pictures, frame, last = self.decode({*plan.indices}), None, None
        for number in plan.indices:
            # Headers may state more frames than a file has: the last frame fills the rest.
            if number != last and (picture := next(pictures, None)) is not None:
                frame = resize_frame(picture, plan.height, plan.width)
            if frame is None:
                raise ClipError("the video has no frame that can be decoded: use another file")
            yield frame
            last = number


def _check_limit(number: float, limit: float, noun: str) -> None:
    if number > limit:
        raise ClipError(
            f"the video has {number:.10g} {noun}, and the limit is {limit:.10g}: shorten or "
            "shrink it"
        )


def resize_frame(picture: PIL.Image.Image, height: int, width: int) -> np.ndarray:
    """Return the RGB values of a picture, resized with a bicubic kernel, uint8 [h, w, 3]."""
    from PIL import Image

    rgb = picture.convert("RGB")
    if rgb.size != (width, height):
        rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(rgb)


class VideoFile(Clip):
    """A file in a format of videos, which PyAV decodes in one thread."""

    def __init__(self, data: bytes, limits: ClipLimits) -> None:
        try:
            import av
        except ImportError as error:
            raise ClipError(
                "video files require the package av: install ed-models[videos], or pass an "
                "animated GIF, a folder or a list of pictures"
            ) from error
        options = {"format_whitelist": _FORMATS, "codec_whitelist": ",".join(_CODECS)}
        try:
            self._container = av.open(io.BytesIO(data), "r", options=options)
            (stream, *_) = self._container.streams.video or [None]
            frames = 0 if stream is None else stream.frames
            if stream is not None and not frames:
                frames = sum(1 for packet in self._container.demux(stream) if packet.size)
                self._container = av.open(io.BytesIO(data), "r", options=options)
                stream = self._container.streams.video[0]
        except Exception as error:  # decoders raise many types of exceptions for damaged data
            raise _unreadable(error) from error
        if stream is None:
            raise ClipError("the file has no video: use another file")
        codec = stream.codec_context
        if codec.name not in _CODECS:
            raise _unreadable(f"its codec is {codec.name!r}")
        codec.thread_count, codec.options = 1, {"max_pixels": str(limits.pixels)}
        fps = None if not stream.average_rate else float(stream.average_rate)
        super().__init__(ClipFacts(frames, fps, stream.height, stream.width), limits)

    def decode(self, numbers: Collection[int]) -> Iterator[PIL.Image.Image]:
        """See `Clip.decode`."""
        last = max(numbers)
        try:
            for number, frame in enumerate(self._container.decode(video=0)):
                if number in numbers:
                    yield frame.to_image()
                if number == last:
                    return
        except Exception as error:  # decoders raise many types of exceptions for damaged data
            raise _unreadable(error) from error


class AnimatedPicture(Clip):
    """An animated GIF. A frame without a duration lasts a tenth of a second."""

    def __init__(self, data: bytes, limits: ClipLimits) -> None:
        self._picture = _open_picture(io.BytesIO(data))
        width, height = self._picture.size
        _check_limit(width * height, limits.pixels, "pixels in a frame")
        milliseconds, frames = 0.0, 0
        try:
            for frames in range(1, limits.frames + 2):
                milliseconds += self._picture.info.get("duration") or 100
                self._picture.seek(frames)
        except EOFError:
            pass
        except Exception as error:  # decoders raise many types of exceptions for damaged data
            raise _unreadable(error) from error
        super().__init__(ClipFacts(frames, 1000 * frames / milliseconds, height, width), limits)

    def decode(self, numbers: Collection[int]) -> Iterator[PIL.Image.Image]:
        """See `Clip.decode`."""
        try:
            for number in sorted(numbers):
                self._picture.seek(number)
                yield self._picture
        except Exception as error:  # decoders raise many types of exceptions for damaged data
            raise _unreadable(error) from error


class Pictures(Clip):
    """Frames in files or in memory, which the caller has chosen, so all of them are read."""

    def __init__(self, pictures: Sequence[Any], fps: float | None, limits: ClipLimits) -> None:
        self._pictures = pictures
        if not len(pictures):
            raise ClipError(f"the video has no frames: pass pictures ({', '.join(_PICTURES)})")
        width, height = _open_picture(pictures[0]).size
        facts = ClipFacts(len(pictures), fps, height, width, is_sampled=True)
        super().__init__(facts, limits)

    def decode(self, numbers: Collection[int]) -> Iterator[PIL.Image.Image]:
        """See `Clip.decode`."""
        for number in sorted(numbers):
            picture = _open_picture(self._pictures[number])
            if picture.size != (self.facts.width, self.facts.height):
                raise ClipError(
                    f"frame {number} has {picture.width} x {picture.height} pixels, and the first "
                    f"has {self.facts.width} x {self.facts.height}: give all frames one size"
                )
            yield picture


def _open_picture(
    source: str | bytes | io.BytesIO | np.ndarray | PIL.Image.Image,
) -> PIL.Image.Image:
    """Return a picture; files are decoded when their pixels are read."""
    from PIL import Image

    if isinstance(source, Image.Image):
        return source
    try:
        if isinstance(source, np.ndarray):
            return Image.fromarray(source)
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except Exception as error:  # decoders raise many types of exceptions for damaged data
        raise _unreadable(error) from error


def _unreadable(error: Exception | str) -> ClipError:
    unknown = type(error).__name__ == "UnidentifiedImageError"
    reason = "its format is unknown" if unknown else error
    return ClipError(f"the video cannot be decoded: {reason}; save it as MP4 (H.264), WebM or GIF")
