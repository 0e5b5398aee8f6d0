"""Hostile pictures return short errors, end with their requests, and delay no other client."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ed_esurge.children.process import ChildEndedError, ChildLimits, JobGroup, WorkerProcess
from ed_esurge.pictures.decoder import PictureDecoder, PictureError
from ed_esurge.pictures.decoder_worker import MAX_SCANS
from ed_esurge.server.generation.images import MAX_IMAGE_PIXELS
from ed_esurge.server.generation.prompts import LONG_TEXT
from ed_esurge.server.http.errors import MAX_MESSAGE
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from PIL import Image, ImageOps
from transformers import CLIPImageProcessorPil

from tests.hostile_images import chunk, encoded, noise, picture, png, scanned, segment, unusual

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}<image>{% endfor %}{% endfor %}"
)


class ColorProcessor:
    """One feature for each picture: its mean color."""

    image_token = "<image>"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def _merge_kwargs(self, **options: Any) -> dict[str, Any]:
        return {"images_kwargs": options}

    def _process_images(self, images: list[Any], *, return_tensors: str) -> Any:
        colors = [np.asarray(image, np.float32).mean((0, 1)) for image in images]
        return {"pixel_values": np.array(colors)[..., None, None]}, [self.image_token]


class VisionEngine(ScriptedEngine):
    input_names = ("input_ids", "pixel_values")

    def __init__(self) -> None:
        tokenizer = byte_tokenizer(TEMPLATE)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        super().__init__(lambda prompt, choice: "seen", tokenizer=tokenizer, max_model_len=2**15)
        self.processor = ColorProcessor(tokenizer)


@pytest.fixture(scope="module")
def url():
    with background(VisionEngine()) as url:
        yield url


@pytest.fixture(scope="module")
def decoder():
    return PictureDecoder()


def body(*pictures: bytes) -> dict[str, Any]:
    urls = [f"data:;base64,{base64.b64encode(data).decode()}" for data in pictures]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


def ask(url: str, *pictures: bytes, seconds: float = 60) -> httpx.Response:
    return httpx.post(f"{url}/chat/completions", json=body(*pictures), timeout=seconds)


def small_chunks(count: int) -> bytes:
    """Return a PNG whose pixels are in chunks of one byte."""
    data = zlib.compress(noise(100, 100).tobytes(), 0)
    pieces = [chunk(b"IDAT", data[at : at + 1]) for at in range(count)]
    return png(100, 100, *pieces)


def empty_chunks(kind: bytes, count: int) -> bytes:
    rows = zlib.compress(b"\0" * 9 * 28)
    return png(9, 9, chunk(kind, b"") * count, chunk(b"IDAT", rows))


def bitmap_runs() -> bytes:
    """Return a bitmap whose first run moves 255 rows of 16 million pixels down."""
    side = MAX_IMAGE_PIXELS
    head = struct.pack("<IIIIiiHHIIiiII", 99, 0, 1078, 40, side, 1, 1, 8, 1, 0, 0, 0, 256, 0)
    return b"BM" + head + bytes(1024) + b"\0\2\0\xff" * 1000


def jpeg_segments(data: bytes) -> bytes:
    """Return a JPEG with segments after its first marker."""
    jpeg = encoded(picture(), "JPEG")
    return jpeg[:2] + data + jpeg[2:]


def inflated(kind: bytes) -> bytes:
    """Return a PNG with a chunk of few bytes that expands to 128 MiB."""
    data = chunk(kind, b"a\0\0" + zlib.compress(b"a" * 2**27))
    return png(9, 9, data, chunk(b"IDAT", zlib.compress(b"\0" * 9 * 28)))


def animation(format: str, frames: list[Image.Image]) -> bytes:
    return encoded(frames[0], format, save_all=True, append_images=frames[1:])


#: Pictures of few bytes that need much time or memory, or claim to; each is made for its test.
COSTLY: dict[str, Callable[[], bytes]] = {
    "JPEG of many scans": lambda: scanned(20_000),
    "JPEG of the most scans": lambda: scanned(MAX_SCANS),
    "JPEG of many profiles": lambda: jpeg_segments(segment(0xE2, b"ICC_PROFILE\0\1\1") * 50_000),
    "JPEG of a long profile": lambda: jpeg_segments(segment(0xE2, b"a" * 65_000) * 60),
    "JPEG of many comments": lambda: jpeg_segments(segment(0xFE, b"") * 500_000),
    "PNG with an inflated profile": lambda: inflated(b"iCCP"),
    "PNG with an inflated text": lambda: inflated(b"zTXt"),
    "PNG of pieces": lambda: small_chunks(30_000),
    "PNG of many texts": lambda: empty_chunks(b"tEXt", 300_000),
    "PNG of many animation controls": lambda: empty_chunks(b"fcTL", 300_000),
    "PNG of more data": lambda: png(9, 9, chunk(b"IDAT", zlib.compress(b"\0" * 2**28))),
    "interlaced PNG": lambda: encoded(Image.new("1", (4096, 4096)), "PNG"),
    "GIF of many frames": lambda: animation(
        "GIF", [Image.new("P", (4000, 4000), number) for number in range(8)]
    ),
    "WebP of many frames": lambda: animation(
        "WEBP",
        [
            Image.new("RGB", (64, 64)),
            *(Image.new("RGB", (64, 64), (n % 256, n // 256, 0)) for n in range(400)),
        ],
    ),
    "lossless WebP": lambda: encoded(Image.new("RGB", (4096, 4096)), "WEBP", lossless=True),
    "bitmap of runs": bitmap_runs,
}


OTHER_FORMATS = ("TIFF", "JPEG2000", "ICO", "TGA", "PCX", "PPM", "SGI", "DDS", "ICNS", "AVIF")


@pytest.mark.parametrize("name", COSTLY)
def test_costly_pictures_end_within_their_limits(url, name):
    data = COSTLY[name]()
    assert len(data) < 2**23
    answer = ask(url, data)
    assert answer.status_code in (200, 400), answer.text
    assert len(answer.content) < 2 * MAX_MESSAGE
    if answer.status_code == 400:
        assert answer.json()["error"]["code"] == "invalid_image"


def test_jpeg_of_too_many_scans_is_refused_before_decoding(url, decoder):
    answer = ask(url, scanned(20_000)).json()["error"]
    assert f"more than {MAX_SCANS} scans" in answer["message"]
    assert decoder.read(scanned(MAX_SCANS, 64), 2**24).size == (64, 64)


@pytest.mark.parametrize("format", OTHER_FORMATS)
def test_formats_outside_the_list_are_refused(decoder, format):
    if format not in Image.SAVE and format not in (Image.init() or Image.SAVE):
        pytest.skip(f"this installation of Pillow does not write {format}")
    with pytest.raises(PictureError, match="send BMP, GIF, JPEG, PNG, WEBP"):
        decoder.read(encoded(picture(64, 64), format), 2**24)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pixels_equal_those_of_a_decoder_in_this_process(decoder):
    for name, data in unusual().items():
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        image = decoder.read(data, 2**24)
        assert (image.mode, image.size) == ("RGB", expected.size), name
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected), err_msg=name)


@pytest.mark.parametrize("size", [(30_000, 1), (1, 30_000), (70_000, 4)])
def test_narrow_pictures_are_refused_before_they_are_enlarged(url, monkeypatch, size):
    """The image processor of CLIP enlarges 30,000 x 1 pixels to 336 x 10,080,000."""
    processor = CLIPImageProcessorPil(size={"shortest_edge": 336})
    monkeypatch.setattr(ColorProcessor, "image_processor", processor, raising=False)
    answer = ask(url, encoded(Image.new("RGB", size), "PNG"))
    assert answer.status_code == 400
    assert re.search("at most 297 times|a side of 70000 pixels", answer.json()["error"]["message"])
    assert ask(url, encoded(Image.new("RGB", (200, 1)), "PNG")).status_code == 200


def running_children(pid: int | None) -> list[int]:
    """Return the children of a process."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True)
    return [int(child) for child in listed.stdout.split()]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


ENDLESS = """
from ed_esurge.children.worker import run_worker

def work(data, options, say):
    if options.get("answer"):
        say(b"A", data)
    elif data == b"memory":
        bytearray(2**34)
    elif data == b"crash":
        import os, signal
        os.kill(os.getpid(), signal.SIGSEGV)
    elif data == b"asleep":
        import time
        time.sleep(1000)
    else:
        while True:
            pass

if __name__ == "__main__":
    run_worker(lambda: None, work)
"""


@pytest.fixture
def endless(tmp_path: Path, monkeypatch) -> WorkerProcess:
    """A worker process whose work ends only for some jobs."""
    (tmp_path / "endless_task.py").write_text(ENDLESS)
    monkeypatch.syspath_prepend(tmp_path)
    return WorkerProcess("endless_task")


def test_fault_of_a_child_ends_one_job(endless):
    limits = ChildLimits(cpu_seconds=0.3, memory=2**26)
    for fault in (b"crash", b"memory", b"endless"):
        with pytest.raises(ChildEndedError):
            list(endless.messages(fault, {}, limits))
        assert list(endless.messages(b"data", {"answer": True}, limits)) == [(b"A", b"data")]


def test_child_of_a_closed_connection_is_killed(endless):
    """The processor time of the limit is longer than the test."""
    limits = ChildLimits(cpu_seconds=1000, memory=2**26, wall_seconds=1000)
    list(endless.messages(b"", {"answer": True}, limits))
    group = JobGroup()
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(list, endless.messages(b"endless", {}, limits, group))
        wait_until(lambda: running_children(endless.pid))
        group.cancel()
        with pytest.raises(ChildEndedError):
            job.result(30)
    wait_until(lambda: not running_children(endless.pid))
    with pytest.raises(ChildEndedError):
        list(endless.messages(b"", {"answer": True}, limits, group))


@contextlib.contextmanager
def leaving_client(url: str, request: dict[str, Any]) -> Iterator[None]:
    """Send a request, and close its connection at the end of the block."""
    address, data = httpx.URL(url), json.dumps(request).encode()
    head = f"POST {address.path} HTTP/1.1\r\nHost: {address.host}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((address.host, address.port or 80), timeout=30) as connection:
        connection.sendall(head.encode() + data)
        yield


def test_decoding_ends_when_the_client_leaves(monkeypatch, tmp_path: Path):
    """The child sleeps longer than the test waits, and runs when the client leaves."""
    (tmp_path / "endless_task.py").write_text(ENDLESS)
    monkeypatch.syspath_prepend(tmp_path)
    started: list[PictureDecoder] = []

    def create(decoder: PictureDecoder) -> None:
        WorkerProcess.__init__(decoder, "endless_task")
        started.append(decoder)

    monkeypatch.setattr(PictureDecoder, "__init__", create)
    with background(VisionEngine()) as url:
        (decoder,) = started
        for route in ("chat/completions", "chat/completions/input_tokens"):
            with leaving_client(f"{url}/{route}", body(b"asleep")):
                wait_until(lambda: running_children(decoder.pid))
            wait_until(lambda: not running_children(decoder.pid))


@pytest.mark.nightly
def test_pictures_do_not_delay_prompts_of_text(monkeypatch, tmp_path: Path):
    (tmp_path / "endless_task.py").write_text(ENDLESS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        PictureDecoder, "__init__", lambda decoder: WorkerProcess.__init__(decoder, "endless_task")
    )
    with background(VisionEngine()) as url:

        def attack() -> None:
            with pytest.raises(httpx.ReadTimeout):
                ask(url, b"endless", seconds=3)

        threads = [threading.Thread(target=attack) for _ in range(8)]
        for thread in threads:
            thread.start()
        root = url.removesuffix("/v1")
        answer = httpx.post(f"{root}/tokenize", json={"prompt": "a" * 2 * LONG_TEXT}, timeout=60)
        assert any(thread.is_alive() for thread in threads)
        assert answer.json()["count"] == 2 * LONG_TEXT + 1
        for thread in threads:
            thread.join()


def test_ended_worker_process_is_replaced(decoder):
    data = encoded(picture(), "PNG")
    decoder.read(data, 2**24)
    first = decoder.pid
    os.kill(first, signal.SIGKILL)
    decoder._connection.process.wait()
    assert decoder.read(data, 2**24).size == (40, 30)
    assert decoder.pid != first
