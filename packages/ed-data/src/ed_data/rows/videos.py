"""The videos of a row: files, bytes or lists of pictures, in a field or in parts of chats."""

from __future__ import annotations

from typing import Any

from ed_data.errors import DataError
from ed_data.rows.example import RowImage, RowVideo
from ed_data.rows.media_files import MediaFolder
from ed_data.rows.media_parts import MediaParts
from ed_data.schema import Content, Row

#: The video parts of messages.
_PARTS = MediaParts(
    "video",
    "video",
    ("video", "video_url"),
    ("video", "video_url", "url", "path", "base64", "bytes"),
    "videos",
)
#: Fields of a row with videos.
_FIELDS = ("videos", "video")
#: Types of parts that are images.
_IMAGE_TYPES = ("image", "image_url")


def read_videos(
    row: Row,
    fields: dict[str, Content],
    images: list[RowImage],
    folder: MediaFolder,
    location: str,
) -> tuple[dict[str, Content], list[RowImage | RowVideo]]:
    """Return the fields with plain video parts, and images and videos in the order of the parts.

    A part contains its video (`{"type": "video", "video": …}`), or refers to the next video in the
    field `videos` or `video` of the row. A video is a file, its content, or a list of pictures.

    Args:
        row: the row.
        fields: its contents, with plain image parts.
        images: the images of the row, in the order of their parts.
        folder: the folder whose files the row may name.
        location: the row, for messages.

    Raises:
        DataError: a video is missing, is left over, or cannot be found.
    """
    name = next((name for name in _FIELDS if row.get(name) is not None), _FIELDS[0])
    parts = _PARTS.of(fields)
    value = row.get(name)
    # A text of a chat in the field `video` need not be the name of a file.
    if not parts and not isinstance(value, list | bytes):
        return fields, [*images]
    values = value if isinstance(value, list) else [value] if value is not None else []
    listed = [_read_video(item, folder, location) for item in values]
    if parts:
        listed = _PARTS.sources(
            parts, listed, lambda x: _read_video(x, folder, location), location, name, named=False
        )
    videos = [
        RowVideo(source, f"{location}, video {number} of {len(listed)}")
        for number, source in enumerate(listed, 1)
    ]
    simple_fields = _PARTS.simplify_parts(fields) if parts else fields
    return simple_fields, _order_media(fields, images, videos)


def _order_media(
    fields: dict[str, Content], images: list[RowImage], videos: list[RowVideo]
) -> list[RowImage | RowVideo]:
    """Return images and videos in the order of their parts; media without parts come last."""
    media: list[RowImage | RowVideo] = []
    next_images, next_videos = iter(images), iter(videos)
    for content in fields.values():
        for message in content:
            parts = message.get("content") if isinstance(message, dict) else None
            for part in parts if isinstance(parts, list) else ():
                kind = part.get("type") if isinstance(part, dict) else None
                medium = None
                if kind in _PARTS.types:
                    medium = next(next_videos, None)
                elif kind in _IMAGE_TYPES:
                    medium = next(next_images, None)
                media += [] if medium is None else [medium]
    return [*media, *next_images, *next_videos]


def _read_video(value: object, folder: MediaFolder, location: str) -> Any:
    if isinstance(value, str):
        return folder.locate(value, location, kind="video", key="videos")
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, dict) and value.get("bytes"):
        return value["bytes"]
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        return folder.locate(value["path"], location, kind="video", key="videos")
    if isinstance(value, list | tuple) and value:
        return [_read_video(picture, folder, location) for picture in value]
    text = f"{type(value).__name__} {value!r}"
    raise DataError(
        f"{location}: a video must be a path, bytes, {{path, bytes}} or a list of pictures, got "
        f"{text if len(text) < 80 else f'{text[:77]}…'}; correct the row"
    )
