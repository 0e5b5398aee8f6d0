"""The task of the worker process that decodes pictures, see `ed_esurge.children.worker`."""

from __future__ import annotations

import io
import struct
from typing import Any

from ed_esurge.children.messages import RefusedError, SendAnswer
from ed_esurge.children.worker import limit_time, run_worker

#: Formats whose decoders are enabled.
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
# Kinds of messages: width and height, the RGB values row by row, more pixels than the limit.
SIZE, PIXELS, TOO_LARGE = b"W", b"P", b"L"
SIZE_FORM = struct.Struct("<II")
#: Processor time of a picture in seconds: of its header, and of each pixel. Slow decoders need
#: 1e-7 seconds for a pixel.
CPU_SECONDS, CPU_PER_PIXEL = 2.0, 2.5e-7
#: Most scans of a JPEG file. Each scan costs as much time as the whole picture.
MAX_SCANS = 100


def _prepare() -> None:
    """Import the decoders, which the children share."""
    from PIL import (  # noqa: F401
        BmpImagePlugin,
        GifImagePlugin,
        ImageOps,
        JpegImagePlugin,
        MpoImagePlugin,
        PngImagePlugin,
        WebPImagePlugin,
    )


def _work(data: bytes, options: dict[str, Any], say: SendAnswer) -> None:
    """Decode the first frame of a picture in its upright orientation.

    Args:
        options: `pixels`, the largest number of pixels, and `wall_seconds`.

    Raises:
        RefusedError: the picture cannot be decoded, or is too large (`TOO_LARGE`).
    """
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        count = image.width * image.height
        if count > options["pixels"]:
            raise RefusedError(f"{image.width} x {image.height}", TOO_LARGE)
        if image.format in ("JPEG", "MPO"):
            check_scans(data)
        limit_time(CPU_SECONDS + CPU_PER_PIXEL * count, options["wall_seconds"])
        upright = ImageOps.exif_transpose(image).convert("RGB")
    except (RefusedError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise RefusedError("too many", TOO_LARGE) from None
    except Exception:  # decoders raise many types of exceptions for damaged data
        raise RefusedError(
            f"the image cannot be decoded: send {', '.join(IMAGE_FORMATS)}"
        ) from None
    say(SIZE, SIZE_FORM.pack(*upright.size))
    say(PIXELS, upright.tobytes())


def check_scans(data: bytes) -> None:
    """Count the scans of a JPEG file. Raises RefusedError: there are more than `MAX_SCANS`."""
    count, at = 0, 2
    while True:
        at = data.find(b"\xff", at)
        if at < 0 or at + 4 > len(data):
            return
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker <= 0x01 or 0xD0 <= marker <= 0xD8:  # a marker without a segment
            at += 2
        elif marker == 0xD9:  # the end of the picture
            return
        else:
            count += marker == 0xDA
            if count > MAX_SCANS:
                raise RefusedError(
                    f"the JPEG file has more than {MAX_SCANS} scans: save it again as a baseline "
                    "JPEG or as PNG"
                )
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")


if __name__ == "__main__":
    run_worker(_prepare, _work)
