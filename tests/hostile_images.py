"""Encoded images that are unusual, damaged or hostile."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def encoded(image: Any, format: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


def picture(width: int = 40, height: int = 30) -> Any:
    return Image.fromarray(noise(width, height))


@functools.cache
def unusual() -> dict[str, bytes]:
    """Return images that every decoder accepts."""
    color, gray = picture(), picture().convert("L")
    frames = [Image.new("RGB", (30, 20), (80 * n, 9, 9)) for n in range(3)]
    alpha = Image.fromarray(noise(40, 30, 4))
    found = {
        "one pixel": encoded(Image.new("RGB", (1, 1), "red"), "PNG"),
        "gray": encoded(gray, "JPEG"),
        "gray with alpha": encoded(alpha.convert("LA"), "PNG"),
        "alpha": encoded(alpha, "PNG"),
        "palette": encoded(color.convert("P"), "PNG", transparency=3),
        "two colors": encoded(color.convert("1"), "PNG"),
        "16 bits": encoded(Image.fromarray(noise(40, 60, 1)[..., 0].view(np.uint16)), "PNG"),
        "CMYK": encoded(color.convert("CMYK"), "JPEG"),
        "YCbCr": encoded(color.convert("YCbCr"), "JPEG"),
        "progressive": encoded(color, "JPEG", progressive=True),
        "animated GIF": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated WebP": encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "lossless WebP": encoded(color, "WEBP", lossless=True),
        "bitmap": encoded(color, "BMP"),
        "bytes after the end": encoded(color, "PNG") + b"\0" * 99,
    }
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[274] = orientation
        found[f"orientation {orientation}"] = encoded(color, "JPEG", exif=exif)
    return found


def chunk(kind: bytes, data: bytes) -> bytes:
    crc = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)


def png(width: int, height: int, *chunks: bytes, bits: int = 8, color: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    parts = (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), *chunks, chunk(b"IEND", b""))
    return b"".join(parts)


@functools.cache
def damaged() -> dict[str, bytes]:
    """Return data that no decoder accepts as a whole image."""
    color, found = picture(), {}
    for format in ("PNG", "JPEG", "WEBP", "BMP"):
        whole = encoded(color, format)
        for share in (3, 20, 40, 60, 80):
            found[f"{share} % of {format}"] = whole[: len(whole) * share // 100]
    whole = encoded(color, "PNG")
    pixels = zlib.compress(b"\0" * 100)
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(b"a" * 2**27))
    return {
        **found,
        "nothing": b"",
        "zeros": b"\0" * 1000,
        "random bytes": noise(40, 30).tobytes(),
        "text": b"no image",
        "a web page": b"<!doctype html><html><body><img src=x></body></html>",
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "PDF": b"%PDF-1.7\n%%EOF",
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
        "signature of PNG": b"\x89PNG\r\n\x1a\n",
        "signature of JPEG": b"\xff\xd8\xff\xe0",
        "signature of GIF": b"GIF89a",
        "signature of BMP": b"BM",
        "archive": b"PK\x03\x04" + b"\0" * 60,
        "unknown kind of color": png(9, 9, chunk(b"IDAT", pixels), color=7),
        "three bits per color": png(9, 9, chunk(b"IDAT", pixels), bits=3),
        "no pixels": png(0, 0, chunk(b"IDAT", pixels)),
        "no rows": png(9, 0, chunk(b"IDAT", pixels)),
        "no data": png(9, 9),
        "too little data": png(9, 9, chunk(b"IDAT", pixels)),
        "damaged data": png(9, 9, chunk(b"IDAT", b"\1" * 50)),
        "damaged checksum": whole[:30] + b"\0\0\0\0" + whole[34:],
        "billions of pixels": png(2**16 - 1, 2**16 - 1, chunk(b"IDAT", pixels)),
        "most pixels of a header": png(2**31 - 1, 2**31 - 1, chunk(b"IDAT", pixels)),
        "one row of a billion": png(2**30, 1, chunk(b"IDAT", pixels)),
        "hundreds of megapixels": encoded(Image.new("1", (20_000, 20_000)), "PNG"),
        "128 MiB of text": png(9, 9, text, chunk(b"IDAT", zlib.compress(b"\0" * 9 * 28))),
        "large GIF": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"\x3b",
        "large JPEG": encoded(color, "JPEG").replace(
            struct.pack(">HH", 30, 40), struct.pack(">HH", 65500, 65500), 1
        ),
        "bitmap of negative size": b"BM" + struct.pack("<IIIIiiHH", 99, 0, 54, 40, -9, 9, 1, 24),
        "bitmap of a gigapixel": b"BM"
        + struct.pack("<IIIIiiHHIIiiII", 99, 0, 54, 40, 40_000, 40_000, 1, 24, 0, 0, 0, 0, 0, 0),
        "TIFF that refers to itself": b"II*\0" + struct.pack("<IHI", 8, 0, 8),
        "size of WebP": b"RIFF\xff\xff\xff\xffWEBPVP8 \xff\xff\xff\xff" + b"\0" * 40,
    }


def segment(marker: int, data: bytes) -> bytes:
    """Return a segment of a JPEG file."""
    return bytes((0xFF, marker)) + struct.pack(">H", len(data) + 2) + data


def pack_bits(bits: str) -> bytes:
    """Return the entropy-coded bytes of a text of bits."""
    padded = bits + "1" * (-len(bits) % 8)
    data = int(padded, 2).to_bytes(len(padded) // 8, "big")
    return data.replace(b"\xff", b"\xff\0")


def scanned(scans: int, side: int = 4096) -> bytes:
    """Return a gray progressive JPEG file whose scans need few bytes and much time.

    The first scan has the DC coefficients, and each of the others repeats that no block has an AC
    coefficient.
    """
    blocks = (side // 8) ** 2
    run, extra = 2**14 + 0x2AAA, f"{0x2AAA:014b}"
    empty = pack_bits(("0" + extra) * (-(-blocks // run)))
    tables = b"\x00" + b"\1" + b"\0" * 15 + b"\0" + b"\x10" + b"\1" + b"\0" * 15 + b"\xe0"
    scan = segment(0xDA, b"\1\1\0\x01\x3f\0") + empty
    return b"".join(
        (
            b"\xff\xd8",
            segment(0xDB, b"\0" + b"\1" * 64),
            segment(0xC2, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0"),
            segment(0xC4, tables),
            segment(0xDA, b"\1\1\0\0\0\0"),
            b"\0" * (blocks // 8),
            scan * (scans - 1),
            b"\xff\xd9",
        )
    )
