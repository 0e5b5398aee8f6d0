"""The server's interface to the worker process that decodes videos.

A fault of a decoder ends the child of one video, and not the server.
"""

from __future__ import annotations

from dataclasses import asdict

from ed_models.checkpoints.clips import ClipFrames, ClipLimits, Sampling

from ed_esurge.children.messages import REFUSED
from ed_esurge.children.process import (
    ChildEndedError,
    ChildLimits,
    ChildMemoryError,
    JobGroup,
    WorkerProcess,
)
from ed_esurge.pictures.clip_worker import FRAMES, PLAN, build_frames
from ed_esurge.pictures.decoder import PictureError

#: Processor time and elapsed time of a video in seconds.
CPU_SECONDS, _WALL_SECONDS = 60.0, 120.0
# Memory of a video in bytes: a constant, and bytes of each allowed pixel of a frame. A decoder
# keeps up to 17 frames of 1.5 bytes of a pixel, and a frame is converted to RGB.
_MEMORY, _MEMORY_PER_PIXEL = 2**28, 40
#: Size of the longest plan, in bytes.
_PLAN = 2**20

_ENDED = (
    f"the video could not be decoded within {CPU_SECONDS:g} seconds of processor time, or made the "
    "decoder fail: shorten or shrink it, and save it as MP4 (H.264) or WebM"
)


class ClipDecoder(WorkerProcess):
    """Decodes videos in children of a worker process, which starts with the first video."""

    def __init__(self) -> None:
        super().__init__("ed_esurge.pictures.clip_worker")

    def read(
        self, data: bytes, sampling: Sampling, limits: ClipLimits, group: JobGroup | None = None
    ) -> ClipFrames:
        """Return the frames of a video that a model reads.

        Args:
            data: the file.
            sampling: which frames are read, and their size.
            limits: limits of the video.
            group: the jobs that are cancelled together.

        Raises:
            PictureError: the file is damaged, exceeds a limit, or crashes its process.
        """
        memory = _MEMORY + _MEMORY_PER_PIXEL * limits.pixels
        options = {"sampling": asdict(sampling), "limits": asdict(limits)}
        plan, pixels = bytearray(), bytearray()
        try:
            for kind, content in self.messages(
                data, options, ChildLimits(CPU_SECONDS, memory, _WALL_SECONDS), group
            ):
                if kind == REFUSED:
                    raise PictureError(content.decode("utf-8", "replace"))
                if kind == PLAN:
                    plan += content
                elif kind == FRAMES:
                    pixels += content
                if len(plan) > _PLAN or len(pixels) > 3 * limits.values:
                    raise PictureError(_ENDED)
        except ChildMemoryError:
            raise PictureError(
                f"the video needs more than {memory >> 20} MiB to be decoded: shrink it"
            ) from None
        except ChildEndedError:
            raise PictureError(_ENDED) from None
        try:
            return build_frames(bytes(plan), pixels)
        except (TypeError, ValueError):
            raise PictureError(_ENDED) from None
