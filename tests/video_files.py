"""Video files that PyAV writes, and files that are unusual, damaged or hostile."""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable, Mapping

import numpy as np
import pytest

Array = np.ndarray


def make_frames(count: int, height: int = 48, width: int = 64, seed: int = 0) -> Array:
    """Return frames of large blocks, uint8 [count, height, width, 3]."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, 3, 4, 3), np.uint8)
    rows, columns = (np.arange(size) * n // size for size, n in ((height, 3), (width, 4)))
    return blocks[:, rows][:, :, columns]


def write_video(frames: Array, rate: int = 10, codec: str = "mpeg4", form: str = "mp4") -> bytes:
    """Return a file with frames [n, h, w, 3]. Skips the test without PyAV."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()


def write_gif(frames: Array, milliseconds: int = 100) -> bytes:
    """Return an animated GIF with frames [n, h, w, 3]."""
    from PIL import Image

    first, *others = (Image.fromarray(frame) for frame in frames)
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others, duration=milliseconds)
    return file.getvalue()


@functools.cache
def get_clip() -> bytes:
    """Return an MP4 of two seconds."""
    return write_video(make_frames(20))


def replace_numbers(box: bytes, offset: int, *numbers: int) -> bytes:
    """Return the MP4 of `get_clip` with numbers of 32 bits in a box.

    Args:
        box: type of the box.
        offset: bytes between the type and the numbers.
    """
    data = bytearray(get_clip())
    at = data.index(box) + 4 + offset
    data[at : at + 4 * len(numbers)] = struct.pack(f">{len(numbers)}I", *numbers)
    return bytes(data)


def resize_header(height: int, width: int) -> bytes:
    """Return the MP4 with another size in the description of its frames."""
    data = bytearray(get_clip())
    at = data.index(b"mp4v") + 4 + 24
    data[at : at + 4] = struct.pack(">HH", width, height)
    return bytes(data)


def nest_boxes(depth: int) -> bytes:
    """Return an MP4 whose boxes contain each other."""
    boxes = b""
    for _ in range(depth):
        boxes = struct.pack(">I", len(boxes) + 8) + b"moov" + boxes
    return get_clip()[:32] + boxes


#: Damaged files that the library reads.
DAMAGED: Mapping[str, Callable[[], bytes]] = {
    "index in free space": lambda: get_clip().replace(b"moov", b"free"),
    "number of chunks": lambda: replace_numbers(b"stco", 4, 2**32 - 1),
    "size of a box": lambda: replace_numbers(b"moov", -8, 2**31 - 1),
    "truncated Matroska": lambda: write_video(make_frames(20), form="matroska")[:1900],
}
#: Files that no model reads; each is made for its test.
HOSTILE: Mapping[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"a" * 4096,
    "noise": lambda: np.random.default_rng(0).bytes(2**16),
    "truncated header": lambda: get_clip()[:300],
    "header without frames": lambda: get_clip().replace(b"mdat", b"free", 1)[:200],
    "no index": lambda: get_clip().replace(b"moov", b"abcd"),
    "number of frames": lambda: replace_numbers(b"stsz", 8, 2**31),
    "number of durations": lambda: replace_numbers(b"stts", 4, 2**32 - 1),
    "number of samples": lambda: replace_numbers(b"stts", 8, 2**31 - 1),
    "duration of a frame": lambda: replace_numbers(b"stts", 12, 2**31 - 1),
    "units of a second": lambda: replace_numbers(b"mdhd", 12, 0),
    "size of a frame": lambda: replace_numbers(b"stsz", 4, 2**31 - 1),
    "nested boxes": lambda: nest_boxes(20_000),
    "playlist": lambda: b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "list of files": lambda: b"ffconcat version 1.0\nfile /etc/passwd\n",
    "picture": lambda: write_gif(make_frames(1)),
    "giant GIF": lambda: (
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + write_gif(make_frames(2))[10:]
    ),
    "damaged GIF": lambda: write_gif(make_frames(9))[:400],
    "raw video": lambda: write_video(make_frames(9), codec="rawvideo", form="avi"),
}
