"""The images of a row: files, bytes or pixels, in a field or in the parts of chat messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ed_data.config import Inform
from ed_data.errors import DataError
from ed_data.rows.example import RowImage
from ed_data.rows.media_files import MediaFolder
from ed_data.rows.media_parts import MediaParts
from ed_data.schema import IMAGE, IMAGES, Content, Image, Row

if TYPE_CHECKING:
    import numpy as np

#: The image parts of messages.
_PARTS = MediaParts(
    IMAGE,
    "image",
    ("image", "image_url"),
    ("image", "image_url", "url", "path", "base64", "bytes"),
    "image_field",
)


class ImageReader:
    """Reads the images of the rows of an inform.

    Args:
        inform: `image_field` or `pixel_field` names the field with the images; by default the
            fields `images` and `image` contain the images of chat messages.
        required: whether each row needs an image; then the default is the field `image`.
    """

    def __init__(self, inform: Inform, *, required: bool = False) -> None:
        self.field = inform.image_field or inform.pixel_field or (IMAGE if required else None)
        self.key = "pixel_field" if inform.pixel_field else "image_field"
        self.required = inform.is_visual or required

    def read_field(self, value: object, folder: MediaFolder, location: str) -> list[Image]:
        """Return the images of a field with one image or a list of images; null has none.

        Args:
            value: value of the field.
            folder: the folder whose files the row may name.
            location: the row, for messages.

        Raises:
            DataError: the value is not an image, or the file does not exist.
        """
        if value is None:
            return []
        name = self.field or IMAGES
        if self.key == "pixel_field":
            return [_pixels(value, name, location)]
        many = isinstance(value, list | tuple)
        items = list(value) if isinstance(value, list | tuple) else [value]
        if many and not items and self.required:
            raise _no_image(value, name, location)
        return [_read_image(item, name, folder, location) for item in items]

    def read_row(
        self, row: Row, fields: dict[str, Content], folder: MediaFolder, location: str
    ) -> tuple[dict[str, Content], list[RowImage]]:
        """Return the fields with plain image parts, and the images in the order of the parts.

        A part contains its image (`{"type": "image", "path": …}`, `{"type": "image_url",
        "image_url": {"url": …}}`), or refers to the next image of the image field. Images of a
        row without image parts belong to the placeholder tokens in its texts, or are before the
        text; see `ed_data.tokens.media.prepare_media`.

        Raises:
            DataError: an image is missing, is left over, or cannot be found.
        """
        name = self.field or (IMAGES if row.get(IMAGES) is not None else IMAGE)
        parts = _PARTS.of(fields)
        value = row.get(name)
        # A text of a chat in the field `image` need not be the name of a file.
        if not parts and not self.required and (not value or isinstance(value, str)):
            return fields, []
        listed = self.read_field(value, folder, location)
        if not parts:
            return fields, _number_images(listed, location)
        images = _PARTS.sources(
            parts,
            listed,
            lambda value: _read_image(value, "image part", folder, location),
            location,
            name,
            named=self.field is not None,
        )
        return _PARTS.simplify_parts(fields), _number_images(images, location)


def _number_images(images: list[Image], location: str) -> list[RowImage]:
    count = len(images)
    return [
        RowImage(image, f"{location}, image {n} of {count}", count == 1)
        for n, image in enumerate(images, 1)
    ]


def _read_image(value: object, name: str, folder: MediaFolder, location: str) -> Image:
    if isinstance(value, str):
        return folder.locate(value, location, kind="image", key="image_field")
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, dict) and value.get("bytes"):
        return {"bytes": value["bytes"], "path": value.get("path")}
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        return folder.locate(value["path"], location, kind="image", key="image_field")
    raise _no_image(value, name, location)


def _no_image(value: object, name: str, location: str) -> DataError:
    return DataError(
        f"{location}: {name!r} must be an image: a path, bytes, or {{path, bytes}}, got "
        f"{_short(value)}; correct the row, or use pixel_field for pixels",
        ("image_field",),
    )


def _pixels(value: object, field: str, location: str) -> np.ndarray:
    import numpy as np  # not needed to check a run file

    try:
        pixels = np.asarray(value)
    except ValueError:  # rows with different lengths
        pixels = np.empty(0, object)
    numbers = pixels.dtype.kind in "uif" and pixels.ndim in (2, 3) and pixels.size
    if not numbers or not np.isfinite(pixels).all():
        raise DataError(
            f"{location}: {field!r} must hold pixels, numbers of shape [height, width] or [height, "
            f"width, channels], got {_short(value)}; correct the row, or drop it in "
            "format_callback",
            ("pixel_field",),
        )
    return pixels


def _short(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) < 80 else f"{text[:77]}…"
