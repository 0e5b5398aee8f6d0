"""The parts of a message's content: texts, images, videos and recordings."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr

from ed_esurge.server.http.fields import History


class TextPart(History):
    """One text part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(History):
    """A refusal of the assistant in the conversation."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text of the refusal."""
        return self.refusal


class ImageURL(History):
    """The address of an image. `detail` has no effect."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


#: Text for a model that cannot read an optional medium.
OMITTED_MEDIUM = "[A tool has read an image here. This model reads only text.]"


class MediumPart(History):
    """Base of the parts with an image, a video or a recording."""

    _field: str | None = PrivateAttr(default=None)
    _content: str = PrivateAttr(default="image_url.url")
    _optional: bool = PrivateAttr(default=False)

    @property
    def field(self) -> str | None:
        """The field of the part in a request of another API; None = the request is a chat."""
        return self._field

    @property
    def is_optional(self) -> bool:
        """Whether a model that reads only text receives a note instead of the medium."""
        return self._optional

    def at(self, field: str | None, content: str, *, optional: bool = False) -> Self:
        """Return the part with its field in a request of another API.

        Args:
            field: the field of the part.
            content: the field inside of the part with the content of the medium.
            optional: see `is_optional`.
        """
        self._field, self._content, self._optional = field, content, optional
        return self

    def content_field(self, path: str) -> str:
        """Return the field with the content of the medium, from the field of the part."""
        return f"{path}.{self._content}"


class ImagePart(MediumPart):
    """One image part of a message's content."""

    type: Literal["image_url"]
    image_url: ImageURL | None = None

    @property
    def url(self) -> str | None:
        """The address of the image; None = the field is missing."""
        return None if self.image_url is None else self.image_url.url


class VideoURL(History):
    """The address of a video."""

    url: str


class VideoPart(MediumPart):
    """One video part of a message's content, as in vLLM's API."""

    _content: str = PrivateAttr(default="video_url.url")

    type: Literal["video_url"]
    video_url: VideoURL | None = None

    @property
    def url(self) -> str | None:
        """The address of the video; None = the field is missing."""
        return None if self.video_url is None else self.video_url.url


class InputAudio(History):
    """A recording: the base64 text of a file, and its format."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(MediumPart):
    """One recording of a message's content."""

    type: Literal["input_audio"]
    input_audio: InputAudio | None = None


ContentPart = TextPart | RefusalPart | ImagePart | VideoPart | AudioPart
#: Types of the parts of a message.
PART_TYPES = ("text", "refusal", "image_url", "video_url", "input_audio")
ContentParts = Annotated[
    list[Annotated[ContentPart, Field(discriminator="type")]], Field(fail_fast=True)
]
#: Class of parts with a medium -> the type of the part for a chat template.
_TEMPLATE_TYPES: dict[type[MediumPart], str] = {
    ImagePart: "image",
    VideoPart: "video",
    AudioPart: "audio",
}


def convert_part(part: ContentPart) -> dict[str, str]:
    """Return a part of a message for a chat template; the content of a medium is no text."""
    if isinstance(part, MediumPart):
        return {"type": _TEMPLATE_TYPES[type(part)]}
    return {"type": "text", "text": part.text}
