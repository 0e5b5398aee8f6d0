"""The server's interface to the worker process that decodes pictures.

A fault of a decoder ends the child of one picture, and not the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ed_esurge.children.messages import REFUSED
from ed_esurge.children.process import (
    ChildEndedError,
    ChildLimits,
    ChildMemoryError,
    JobGroup,
    WorkerProcess,
)
from ed_esurge.pictures.decoder_worker import (
    CPU_SECONDS,
    IMAGE_FORMATS,
    PIXELS,
    SIZE,
    SIZE_FORM,
    TOO_LARGE,
)

if TYPE_CHECKING:
    import PIL.Image

#: Elapsed time of a picture in seconds.
_WALL_SECONDS = 60.0
#: Memory of a picture in bytes: a constant, and bytes of each allowed pixel. A decoder needs a few
#: copies of 4 bytes of a pixel.
MEMORY, MEMORY_PER_PIXEL = 2**27, 24

ENDED = (
    "the image could not be decoded within the limits of this server, or made the decoder fail: "
    "save it again as a baseline JPEG or as PNG"
)


class PictureError(Exception):
    """A picture cannot be decoded, or exceeds a limit."""


class PictureDecoder(WorkerProcess):
    """Decodes pictures in children of a worker process, which starts with the first picture."""

    def __init__(self) -> None:
        super().__init__("ed_esurge.pictures.decoder_worker")

    def read(self, data: bytes, most: int, group: JobGroup | None = None) -> PIL.Image.Image:
        """Return the first frame of a picture in RGB and in its upright orientation.

        Args:
            data: the file, in one of `IMAGE_FORMATS`.
            most: limit of the number of pixels.
            group: the jobs that are cancelled together.

        Raises:
            PictureError: the file is damaged, exceeds a limit, or crashes its process.
        """
        from PIL import Image

        memory = MEMORY + MEMORY_PER_PIXEL * most
        limits = ChildLimits(CPU_SECONDS, memory, _WALL_SECONDS)
        options = {"pixels": most, "wall_seconds": _WALL_SECONDS}
        width = height = 0
        pixels = bytearray()
        try:
            for kind, content in self.messages(data, options, limits, group):
                if kind == TOO_LARGE:
                    raise PictureError(
                        f"the image has {content.decode('utf-8', 'replace')} pixels, and the limit "
                        f"is {most} pixels"
                    )
                if kind == REFUSED:
                    raise PictureError(content.decode("utf-8", "replace"))
                if kind == SIZE and len(content) == SIZE_FORM.size:
                    width, height = SIZE_FORM.unpack(content)
                elif kind == PIXELS:
                    pixels += content
                if width * height > most or len(pixels) > 3 * width * height:
                    raise PictureError(ENDED)
        except ChildMemoryError:
            raise PictureError(
                f"the image needs more than {memory >> 20} MiB to be decoded"
            ) from None
        except ChildEndedError:
            raise PictureError(ENDED) from None
        if not pixels or len(pixels) != 3 * width * height:
            raise PictureError(ENDED)
        return Image.frombytes("RGB", (width, height), bytes(pixels))


__all__ = ["IMAGE_FORMATS", "PictureDecoder", "PictureError"]
