"""Videos in chat requests: the frames that a model reads, their tokens and their patches.

A child process decodes a video within limits (`ed_esurge.pictures.clip_decoder`). The processor of
the checkpoint chooses frames, sizes and tokens, as in `transformers`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from ed_models.checkpoints.clips import ClipLimits
from ed_models.modalities.videos import PIXELS, process_video

from ed_esurge.children.process import JobGroup
from ed_esurge.pictures.clip_decoder import ClipDecoder
from ed_esurge.pictures.decoder import PictureError
from ed_esurge.server.generation.media import VIDEO, ProcessedMedium

#: Number of videos of one request.
MAX_VIDEOS = 4
#: Limits of each video: 64 MiB, frames of 4K, one hour, and 33 megapixels of resized frames.
VIDEO_LIMITS = ClipLimits(bytes=2**26, pixels=2**23, frames=2**15, seconds=3600.0, values=2**25)
#: Time limit of a download in seconds.
VIDEO_SECONDS = 30.0


@dataclass(frozen=True)
class VideoSource:
    """The encoded bytes of a video, and the field of the request for errors."""

    data: bytes
    param: str


class ChatVideos:
    """Reads the videos of chat requests for one model.

    Args:
        names: names of the arrays that the model reads.
        processor: processor of the checkpoint; None = no processor was loaded.

    Attributes:
        token: the placeholder token of a feature; None = the model or the processor reads no
            videos.
        placeholders: text that a chat template writes for a video -> `VIDEO`.
    """

    def __init__(self, names: Collection[str], processor: object) -> None:
        self._names, self._processor = names, cast(Any, processor)
        videos = getattr(processor, "video_processor", None)
        is_read = PIXELS in names and hasattr(videos, "convert_frames")
        self.token: int | None = self._processor.video_token_id if is_read else None
        self.placeholders = {self._processor.video_token: VIDEO} if is_read else {}
        self._decoder = ClipDecoder()

    def process(self, source: VideoSource, group: JobGroup | None) -> ProcessedMedium:
        """Return the frames of a video in the form that the model reads.

        Raises:
            APIError: 400, the video is invalid.
        """
        try:
            sampling = self._processor.video_processor.sampling
            clip = self._decoder.read(source.data, sampling, VIDEO_LIMITS, group)
        except PictureError as error:
            VIDEO.refuse(str(error), source.param)
        try:
            processed = process_video(self._processor, clip, self._names)
        except Exception as error:  # processors may raise any exception for an unusual size
            VIDEO.refuse(f"the video cannot be processed: {error}", source.param)
        return ProcessedMedium(*processed, source.param, VIDEO)
