"""A document: the fields of one row, named as in the schema, with its images and recordings."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ed_data.media_access import RemoteFile
from ed_data.schema import Audio, Content, Image, Row


class RowImage(NamedTuple):
    """An image of a row.

    Attributes:
        source: path, bytes or pixels.
        location: inform, file, row and number of the image, for messages.
        is_single: whether the document has no other image.
    """

    source: Image
    location: str
    is_single: bool = True


class RowAudio(NamedTuple):
    """A recording of a row.

    Attributes:
        source: path, bytes or samples.
        location: inform, file, row and number of the recording, for messages.
    """

    source: Audio
    location: str


class RowVideo(NamedTuple):
    """A video of a row.

    Attributes:
        source: path, bytes, or a list of pictures.
        location: inform, file, row and number of the video, for messages.
    """

    source: Image | list[Image]
    location: str


RowMedium: TypeAlias = RowImage | RowVideo | RowAudio


@dataclass(frozen=True, slots=True)
class Example:
    """A document: the fields of one row, named as in the schema.

    Attributes:
        fields: the contents, in the order of `Schema.fields`.
        extra: the row's `additional_fields`.
        place: file and line (or row) of the document, for messages.
        values: the numbers, in the order of `Schema.values`.
        images: images and videos, in the order of their placeholders in the fields.
        template: arguments of the chat template; see `ed_data.rows.template`.
        recordings: in the order of their placeholders, or the one whose transcript is a field.
    """

    fields: dict[str, Content]
    extra: Row = field(default_factory=dict)
    place: str = ""
    values: tuple[float | tuple[float, ...], ...] = ()
    images: tuple[RowImage | RowVideo, ...] = ()
    template: dict[str, Any] = field(default_factory=dict)
    recordings: tuple[RowAudio, ...] = ()

    @property
    def content(self) -> Content:
        """The first field."""
        return next(iter(self.fields.values()))

    @property
    def image(self) -> Image | list[Image] | None:
        """The image of the row; a list if the row has several, None if it has none."""
        sources: list[Any] = [
            image.source.address if isinstance(image.source, RemoteFile) else image.source
            for image in self.images
        ]
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def media(self) -> tuple[RowMedium, ...]:
        """The images and recordings."""
        return (*self.images, *self.recordings)

    @property
    def digest(self) -> int:
        """A 64-bit hash of all fields, equal in every file and every run."""
        more: list[Any] = [self.template] if self.template else []
        if self.recordings:
            keys = [_audio_key(audio.source) for audio in self.recordings]
            keys += [image_key(image.source) for image in self.images]
            return _hash([self.fields, keys[0] if len(keys) == 1 else keys, *more])
        if self.images:
            keys = [image_key(image.source) for image in self.images]
            return _hash([self.fields, self.values, keys[0] if len(keys) == 1 else keys, *more])
        if self.values or more:
            return _hash([self.fields, self.values, *more])
        return _hash(self.content if len(self.fields) == 1 else self.fields)

    @property
    def content_digest(self) -> int:
        """A 64-bit hash of the content, which decides whether the document is held out."""
        return _hash(self.content)


def image_key(image: Image | list[Image]) -> str:
    """Return a text that identifies an image: its path, or a hash of its content."""
    if isinstance(image, list):  # the pictures of a video
        raw = "\n".join(map(image_key, image))
    elif isinstance(image, RemoteFile):
        raw = image.address
    elif isinstance(image, dict):
        raw = image["bytes"]
    elif isinstance(image, bytes | str):
        raw = image
    else:  # pixels
        raw = f"{image.shape}{image.dtype}".encode() + image.tobytes()
    return hashlib.blake2b(raw).hexdigest() if isinstance(raw, bytes) else raw


def _audio_key(audio: Audio) -> str:
    """Return a text that identifies a recording: the name of a file, or a hash of the content."""
    name = audio.address if isinstance(audio, RemoteFile) else audio
    if isinstance(audio, dict) and audio.get("bytes"):
        audio = audio["bytes"]
    if isinstance(audio, bytes):
        return hashlib.blake2b(audio).hexdigest()
    if isinstance(name, str):
        return name.replace("\\", "/").rpartition("/")[2]
    assert isinstance(audio, dict)
    samples = audio["array"]
    rate = f"{audio['sampling_rate']}{samples.shape}{samples.dtype}".encode()
    return hashlib.blake2b(rate + samples.tobytes()).hexdigest()


def _hash(value: object) -> int:
    text = (
        value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    )
    raw = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(raw, "little")
