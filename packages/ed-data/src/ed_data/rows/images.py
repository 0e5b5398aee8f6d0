"""Images of rows: a file, encoded bytes, or the pixels themselves, as the row has them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ed_data.config.source import Inform
from ed_data.errors import DataError

#: The path of a file, encoded bytes, both as `datasets` has them, or pixels.
Image = str | bytes | dict[str, Any] | np.ndarray


def image_of(value: Any, inform: Inform, folder: str, where: str) -> Image | None:
    """Return the image of a row; None where it has none.

    Args:
        value: of the field that `image_field` (a path, bytes, or `{"path": …, "bytes": …}`) or
            `pixel_field` (numbers [height, width] or [height, width, channels]) names.
        inform: of the row.
        folder: of the row's file: a path may be relative to it, or to the working folder.
        where: the row, for messages.

    Raises:
        DataError: it is something else, or there is no such file.
    """
    if value is None:
        return None
    if inform.pixel_field is not None:
        return _pixels(value, inform.pixel_field, where)
    if isinstance(value, str):
        return _file(value, folder, where)
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, dict) and value.get("bytes"):
        return {"bytes": value["bytes"], "path": value.get("path")}
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        return _file(value["path"], folder, where)
    raise DataError(
        f"{where}: {inform.image_field!r} is an image: a path, bytes, or {{path, bytes}}, not "
        f"{_short(value)}; correct the row, or name pixels with pixel_field",
        ("image_field",),
    )


def _file(path: str, folder: str, where: str) -> str:
    if "://" in path:
        return path
    plain = os.path.expanduser(path)
    for candidate in (os.path.join(folder, plain), plain):
        if os.path.isfile(candidate):
            return os.path.abspath(candidate)
    raise DataError(
        f"{where}: there is no image {path!r}, neither in {folder or '.'!r} nor in the working "
        "folder; correct the path, or set on_error: skip",
        ("image_field",),
    )


def _pixels(value: Any, field: str, where: str) -> np.ndarray:
    try:
        pixels = np.asarray(value)
    except ValueError:  # rows of unlike lengths
        pixels = np.empty(0, object)
    numbers = pixels.dtype.kind in "uif" and pixels.ndim in (2, 3) and pixels.size
    if not numbers or not np.isfinite(pixels).all():
        raise DataError(
            f"{where}: {field!r} holds pixels, numbers of [height, width] or [height, width, "
            f"channels], not {_short(value)}; correct the row, or drop it in format_callback",
            ("pixel_field",),
        )
    return pixels


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) < 80 else f"{text[:77]}…"
